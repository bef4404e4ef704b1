"""Reverse: the vectorised answer is the oracle's, and the drawing in its docstring is right."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks import Lengths, Reverse
from tasks.task import BOS, EOS, FIRST_SYMBOL, IGNORED, SEP

sources = st.integers(1, 12).flatmap(
    lambda n: st.lists(st.lists(st.integers(FIRST_SYMBOL, 40), min_size=n, max_size=n), min_size=1, max_size=4)
)


@given(sources)
def test_the_answer_is_the_oracles(rows: list[list[int]]) -> None:
    task, source = Reverse(), torch.tensor(rows)
    assert task.answer(source).tolist() == [task.oracle(row) for row in rows]
    assert [task.oracle(row) for row in rows] == [list(reversed(row)) for row in rows]
    assert source.tolist() == rows


def test_the_drawn_example() -> None:
    # BOS c a d SEP d a c EOS
    task = Reverse(lengths=Lengths(train=(3, 3), test=()))
    batch = task.batch(0, "train", 0, 1, 3, torch.device("cpu"))
    c, a, d = batch.inputs[0, 1:4].tolist()
    assert batch.inputs[0].tolist() == [BOS, c, a, d, SEP, d, a, c]
    assert batch.targets[0].tolist() == [IGNORED, IGNORED, IGNORED, IGNORED, d, a, c, EOS]


def test_what_is_asked_for_moves_away_by_two_with_every_token() -> None:
    for length in (1, 4, 9):
        batch = Reverse().batch(0, "train", 0, 5, length, torch.device("cpu"))
        for i in range(length):
            t = length + 1 + i
            assert torch.equal(batch.targets[:, t], batch.inputs[:, t - (1 + 2 * i)])
