"""AssociativeRecall: every key once, in another order."""

import torch

from tasks import AssociativeRecall


def test_every_key_is_asked_for_once() -> None:
    task = AssociativeRecall()
    orders = set()
    for row in task.source(100, 4, torch.Generator().manual_seed(0)).tolist():
        keys, asked = row[:8:2], row[8:]
        assert sorted(keys) == sorted(asked)
        orders.add(tuple(keys.index(key) for key in asked))
    assert len(orders) > 15  # of 24


def test_an_example_by_hand() -> None:
    source = torch.tensor([[4, 40, 5, 41, 6, 42, 6, 4, 5]])
    assert AssociativeRecall().answer(source).tolist() == [[42, 40, 41]]
    assert AssociativeRecall().oracle(source[0].tolist()) == [42, 40, 41]
