"""What an examination leaves as it was, in models that keep things of a pass."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.diagnostics import Subject, examine
from harness.diagnostics.keeping import in_double, kept, weights_kept
from tasks.task import Batch

WORDS, WIDTH = 20, 8


class Keeps(nn.Module):
    """A layer that keeps what modules do keep of a pass: tables that grow, by attribute, length, dictionary and buffer;
    a count; a draw of its own; and weights that are held down.
    """

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.length, self.calls, self.tables, self.seen = 0, 0, {}, []
        self.register_buffer("table", torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape)
        if x.shape[1] > self.length:
            self.length, self.cosines = x.shape[1], torch.arange(x.shape[1]).to(x)[:, None].cos()
            self.table = torch.ones(x.shape[1], WIDTH).to(x)
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.ones(x.shape[1], 1).to(x)
        if self.training and random.random() + np.random.random() < 0.5:
            return x
        n = x.shape[1]
        return self.map(x) * self.cosines[:n] * self.tables[n] + self.table[:n]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(WORDS, WIDTH, max_norm=1.0), Keeps()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens)))


def batch(length: int = 6) -> Batch:
    tokens = torch.randint(0, WORDS, (3, length + 1), generator=torch.Generator().manual_seed(0))
    return Batch(tokens[:, :-1], tokens[:, 1:])


def subject_of(model: nn.Module) -> Subject:
    optimizer = lambda: torch.optim.AdamW(model.parameters(), lr=1e-3)  # noqa: E731
    return Subject(model, batch(), batch=batch(9), vocabulary=(0, WORDS), optimizer=optimizer)


def state(model: Reader) -> tuple[object, ...]:
    layer = model.layer
    own = layer.length, layer.calls, sorted(layer.tables), len(layer.seen), hasattr(layer, "cosines"), layer.table.shape
    draws = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    return own, draws, [m.training for m in model.modules()], [id(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("warm", [False, True], ids=["untouched", "after a pass"])
def test_a_model_is_as_it_was(warm: bool) -> None:
    torch.manual_seed(0)
    model = Reader()
    if warm:
        model(batch(4).inputs).sum().backward()
    weights, before = [p.detach().clone() for p in model.parameters()], state(model)
    assert not [finding.document() for finding in examine(subject_of(model)) if finding.alarms]
    assert state(model) == before
    assert all(map(torch.equal, weights, model.parameters()))
    model(batch(12).inputs).sum().backward()  # and still works, on longer ones too
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("keeping", [kept, in_double])
def test_what_is_kept_is_restored_even_where_a_pass_fails(
    keeping: Callable[[nn.Module], AbstractContextManager[None]],
) -> None:
    model = Reader()
    before = state(model)

    def fails() -> None:
        with keeping(model):
            model(batch().inputs)
            random.random()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert state(model) == before


def test_gradients_outlive_a_while_in_double() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = [p.grad for p in model.parameters()]
    with in_double(model):
        assert all(p.grad is None and p.dtype == torch.float64 for p in model.parameters())
        model(torch.ones(1, 2).double()).sum().backward()
    assert all(p.grad is old for p, old in zip(model.parameters(), before, strict=True))


def test_weights_are_kept() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with weights_kept(model), torch.no_grad():
        model.weight.zero_()
    assert torch.equal(model.weight, before)
