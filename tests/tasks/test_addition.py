"""Addition against Python's own, in any base."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks import Addition
from tasks.task import FIRST_SYMBOL


def tokens(number: int, base: int, length: int) -> list[int]:
    return [FIRST_SYMBOL + number // base**place % base for place in range(length - 1, -1, -1)]


@given(st.integers(2, 100), st.integers(1, 6), st.data())
def test_sums_are_pythons(base: int, length: int, data: st.DataObject) -> None:
    one, other = (data.draw(st.integers(0, base**length - 1)) for _ in range(2))
    task = Addition(num_symbols=base)
    source = [*tokens(one, base, length), task.plus, *tokens(other, base, length)]
    expected = tokens(one + other, base, length + 1)
    assert task.answer(torch.tensor([source])).tolist() == [expected]
    assert task.oracle(source) == expected
    backwards = task.replace("reversed_digits", True)
    assert backwards.answer(torch.tensor([source])).tolist() == [expected[::-1]]
    assert backwards.oracle(source) == expected[::-1]


@pytest.mark.parametrize("base", [2, 10])
def test_the_plus_sign_is_a_token_of_its_own(base: int) -> None:
    task = Addition(num_symbols=base)
    source = task.source(20, 3, torch.Generator().manual_seed(0))
    assert (source[:, 3] == task.plus).all()
    assert (source == task.plus).sum() == 20
    assert task.vocab_size == FIRST_SYMBOL + base + 1
    assert task.label(task.plus) == "+"
