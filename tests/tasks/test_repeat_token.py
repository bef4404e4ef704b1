"""RepeatToken: one symbol, and how often."""

import torch

from tasks import Lengths, RepeatToken


def test_a_source_is_one_symbol_again_and_again() -> None:
    task = RepeatToken(lengths=Lengths(train=(1, 6), test=(7,)), num_symbols=5)
    source = task.source(100, 6, torch.Generator().manual_seed(0))
    assert (source == source[:, :1]).all()
    assert len(set(source[:, 0].tolist())) == 5
    assert task.space(6) == task.space(1) == 5
    assert task.oracle([7, 7, 7]) == [7, 7, 7]
