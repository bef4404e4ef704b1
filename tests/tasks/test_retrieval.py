"""Retrieval: which pair is asked for, and that there are keys enough."""

from collections import Counter

import pytest
import torch

from harness.schema import UserError
from tasks import Lengths, Retrieval
from tasks.task import FIRST_SYMBOL

LENGTHS = Lengths(train=(1, 6), test=(7, 8))


def asked_place(source: list[int]) -> int:
    """Which pair, counted from the last one, which is 1."""
    keys = source[:-1:2]
    return len(keys) - keys.index(source[-1])


def test_keys_are_distinct_and_values_are_no_keys() -> None:
    task = Retrieval(lengths=LENGTHS, num_symbols=20)
    for row in task.source(200, 8, torch.Generator().manual_seed(0)).tolist():
        keys, values = row[:-1:2], row[1::2]
        assert len(set(keys)) == 8
        assert max(keys) < FIRST_SYMBOL + 10 <= min(values)
        assert row[-1] in keys


def test_any_pair_is_asked_for_alike() -> None:
    source = Retrieval(lengths=LENGTHS).source(3000, 5, torch.Generator().manual_seed(0)).tolist()
    places = Counter(map(asked_place, source))
    assert set(places) == {1, 2, 3, 4, 5}
    assert all(abs(n - 600) < 120 for n in places.values())


@pytest.mark.parametrize(("distance", "length", "place"), [(1, 5, 1), (3, 5, 3), (5, 5, 5), (9, 5, 5), (1, 1, 1)])
def test_the_pair_at_a_distance_is_asked_for_or_the_first(distance: int, length: int, place: int) -> None:
    source = Retrieval(lengths=LENGTHS, distance=distance).source(50, length, torch.Generator().manual_seed(0))
    assert {asked_place(row) for row in source.tolist()} == {place}


def test_an_example_by_hand() -> None:
    source = torch.tensor([[4, 40, 5, 41, 6, 42, 5]])
    assert Retrieval().answer(source).tolist() == [[41]]
    assert Retrieval().oracle(source[0].tolist()) == [41]


def test_too_few_keys_are_refused_with_what_it_takes() -> None:
    with pytest.raises(UserError) as caught:
        Retrieval(lengths=Lengths(train=(1, 6), test=(30,)), num_symbols=16)
    assert str(caught.value) == (
        "Retrieval: num_symbols = 16 makes 8 keys, and 30 pairs need one each; "
        "raise num_symbols to 60 or shorten lengths"
    )
