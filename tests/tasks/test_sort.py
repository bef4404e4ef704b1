"""Sort: the symbols in order, repeats kept."""

import torch

from tasks import Sort


def test_repeats_are_kept() -> None:
    task = Sort()
    assert task.answer(torch.tensor([[9, 5, 9, 4]])).tolist() == [[4, 5, 9, 9]]
    assert task.oracle([9, 5, 9, 4]) == [4, 5, 9, 9]


def test_fewer_symbols_repeat_more() -> None:
    draw = torch.Generator().manual_seed(0)
    repeats = [len(row) - len(set(row)) for row in Sort(num_symbols=4).source(50, 8, draw).tolist()]
    assert min(repeats) >= 4
