"""Lengths: what may be asked for, and how a mistake is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.schema import UserError
from tasks import Copy, Lengths


@given(st.integers(1, 20), st.integers(0, 20), st.sets(st.integers(1, 40), max_size=6))
def test_lengths_are_a_range_and_rising_lengths_beyond_it(low: int, more: int, beyond: set[int]) -> None:
    high = low + more
    lengths = Lengths(train=(low, high), test=tuple(high + b for b in sorted(beyond)))
    assert list(lengths.training) == [low + i for i in range(more + 1)]
    assert not set(lengths.training) & set(lengths.test)


def test_without_test_lengths_the_task_is_plain() -> None:
    assert Lengths(train=(3, 3), test=()).test == ()


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        ((0, 4), (5,), "train = (0, 4): lengths must satisfy 1 ≤ lo ≤ hi, e.g. (1, 10)"),
        ((4, 3), (5,), "train = (4, 3): lengths must satisfy 1 ≤ lo ≤ hi, e.g. (1, 10)"),
        ((-2, -1), (5,), "train = (-2, -1): lengths must satisfy"),
        ((1, 4), (4,), "test = (4,): name lengths above 4, the longest of training, each once, rising"),
        ((1, 4), (6, 5), "test = (6, 5): name lengths above 4"),
        ((1, 4), (5, 5), "test = (5, 5): name lengths above 4"),
    ],
)
def test_a_mistake_is_named(train: tuple[int, int], test: tuple[int, ...], words: str) -> None:
    with pytest.raises(UserError) as caught:
        Lengths(train=train, test=test)
    assert words in str(caught.value)


@pytest.mark.parametrize("wrong", [{"train": (1,)}, {"train": (1, 2, 3)}, {"train": ("1", 2)}, {"test": (11.5,)}])
def test_lengths_are_whole_numbers(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Lengths(**wrong)  # type: ignore[arg-type]


def test_lists_of_a_document_are_tuples_again() -> None:
    lengths = Lengths(train=(2, 3), test=(4, 9))
    assert Lengths.parse({"train": [2, 3], "test": [4, 9]}) == lengths
    assert Copy.parse({"lengths": {"train": [2, 3], "test": [4, 9]}}).lengths == lengths
