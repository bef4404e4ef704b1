"""Copy: the vectorised answer is the oracle's, and the drawing in its docstring is right."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks import Copy, Lengths
from tasks.task import BOS, EOS, FIRST_SYMBOL, IGNORED, SEP

sources = st.integers(1, 12).flatmap(
    lambda n: st.lists(st.lists(st.integers(FIRST_SYMBOL, 40), min_size=n, max_size=n), min_size=1, max_size=4)
)


@given(sources)
def test_the_answer_is_the_oracles(rows: list[list[int]]) -> None:
    task, source = Copy(), torch.tensor(rows)
    assert task.answer(source).tolist() == [task.oracle(row) for row in rows] == rows
    assert source.tolist() == rows


def test_the_drawn_example() -> None:
    # BOS c a d SEP c a d EOS: the model reads all but the end and answers from SEP on.
    task = Copy(lengths=Lengths(train=(3, 3), test=()))
    batch = task.batch(0, "train", 0, 1, 3, torch.device("cpu"))
    c, a, d = batch.inputs[0, 1:4].tolist()
    assert batch.inputs[0].tolist() == [BOS, c, a, d, SEP, c, a, d]
    assert batch.targets[0].tolist() == [IGNORED, IGNORED, IGNORED, IGNORED, c, a, d, EOS]


def test_a_distance_solves_it() -> None:
    # What is asked for at a position stands one source length back, at every length.
    for length in (1, 4, 9):
        batch = Copy().batch(0, "train", 0, 5, length, torch.device("cpu"))
        for t in range(length + 1, 2 * length + 1):
            assert torch.equal(batch.targets[:, t], batch.inputs[:, t - length])
