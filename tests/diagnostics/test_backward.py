"""Gradients and their slope, blocks and their input, in models of others: what may be healthy, and what is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness import ModelSpec, RunSpec, TrainSpec
from harness.components.norm import BatchNorm, LayerNorm, PostNorm, PreNorm, SandwichNorm
from harness.components.residual import NoResidual
from harness.diagnostics import Measured, NotApplicable, Subject, subject_of
from harness.diagnostics.backward import backward_fit
from harness.diagnostics.bypass import residual_fit
from harness.module import TransformerModule
from tasks import Copy
from tasks.task import Batch

WORDS, WIDTH = 11, 8
TOKENS = torch.randint(WORDS, (3, 9), generator=torch.Generator().manual_seed(1))
BATCH = Batch(TOKENS[:, :-1], TOKENS[:, 1:])


class Block(nn.Module):
    """x · weigh + f(x), f of two maps with something between them."""

    def __init__(self, between: Callable[[Tensor], Tensor], weigh: float = 1.0, beside: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.f = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Between(between), nn.Linear(WIDTH, WIDTH))
        self.weigh, self.beside = weigh, beside

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh * x + self.beside * self.f(self.norm(x))


class _Between(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(x)


class Model(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(between), Block(between, **how)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def subject(model: nn.Module, **declared: Any) -> Subject:
    names = {"blocks": ("blocks.0", "blocks.1"), "sublayers": ("blocks.0.f", "blocks.1.f")}
    return Subject(model, BATCH, BATCH, vocabulary=(0, WORDS), **names | declared)


def measured(found: Measured | NotApplicable) -> float:
    assert isinstance(found, Measured), found
    return found.value


class StraightThrough(torch.autograd.Function):
    """The sign, whose backward pass is the identity's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Remembering(nn.Module):
    """Keeps a tensor of the type of what it saw last, and gives it to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones_like(x)
        return x @ (self.mask.mT @ self.mask / self.mask.numel()) if self.mask.dtype == x.dtype else 1 / 0


HEALTHY: dict[str, Callable[[Tensor], Tensor]] = {
    "smooth": torch.tanh,
    "a kink that is hit": lambda x: functional.relu(x - x.detach()),
    "casts to fp32": lambda x: x.float().tanh().to(x.dtype),
}


@pytest.mark.parametrize("between", HEALTHY.values(), ids=HEALTHY)
def test_gradients_of_a_healthy_model_are_the_slope_of_its_loss(between: Callable[[Tensor], Tensor]) -> None:
    assert measured(backward_fit(subject(Model(between)))) < 1e-3


def test_what_rounds_to_half_precision_has_no_slope_that_could_be_seen() -> None:
    assert isinstance(backward_fit(subject(Model(lambda x: x.bfloat16().to(x.dtype)))), NotApplicable)


def test_a_loss_that_draws_and_one_that_knows_no_fp64_are_taken() -> None:
    model, weight = Model(lambda x: functional.dropout(x, 0.5)), torch.ones(WORDS)

    def loss() -> Tensor:
        return functional.cross_entropy(model(BATCH.inputs).flatten(0, 1), BATCH.targets.flatten(), weight=weight)

    assert measured(backward_fit(subject(model, training_loss=loss))) < 1e-3


def test_a_straight_through_estimator_may_be_declared() -> None:
    assert measured(backward_fit(subject(Model(StraightThrough.apply)))) > 0.1
    assert isinstance(backward_fit(subject(Model(StraightThrough.apply), exact_gradients=False)), NotApplicable)


def test_what_a_module_keeps_of_fp64_is_forgotten() -> None:
    model = Model()
    model.blocks[0].f[1] = Remembering()
    measured(backward_fit(subject(model)))
    model(BATCH.inputs)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("spoil", "least"),
    [
        (lambda model: model.head.weight.register_hook(lambda gradient: 3 * gradient), 0.5),
        (lambda model: model.embedding.weight.register_hook(lambda gradient: gradient * float("nan")), 0.5),
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_a_changed_gradient_is_seen_even_of_weights_that_are_zero(
    spoil: Callable[[Model], object], least: float, zero: bool
) -> None:
    model = Model()
    with torch.no_grad():
        if zero:
            model.head.weight.zero_()
            model.head.bias.zero_()
    spoil(model)
    value = measured(backward_fit(subject(model)))
    assert not value < least


@pytest.mark.parametrize(("how", "apart"), [({}, 0.0), ({"weigh": 0.5}, 0.3), ({"beside": 0.3}, 0.3)])
def test_either_branch_of_a_residual_connection_counts(how: dict[str, float], apart: float) -> None:
    found = residual_fit(subject(Model(**how), residual="sum", sublayers=("blocks.0.f", "blocks.1.f")))
    assert measured(found) == pytest.approx(0, abs=1e-6) if not apart else measured(found) > apart
    assert isinstance(found, Measured)
    assert not apart or found.where == "blocks.1"


def test_a_block_that_is_never_called_is_not_judged() -> None:
    model = Model()
    model.forward = lambda tokens: model.head(model.embedding(tokens))
    assert isinstance(residual_fit(subject(model, residual="sum")), NotApplicable)


@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm()])
@pytest.mark.parametrize("placement", [SandwichNorm(), PreNorm(), PostNorm()])
def test_a_trained_model_hands_on_what_it_should(norm: Any, placement: Any) -> None:
    spec = RunSpec(
        model=ModelSpec(d_model=16, num_heads=2, num_layers=2, norm=norm, norm_placement=placement),
        task=Copy(),
        train=TrainSpec(steps=20, batch_size=4),
    )
    module = TransformerModule(spec)
    optimiser = torch.optim.Adam(module.parameters(), lr=3e-3)
    for _ in range(10):
        optimiser.zero_grad()
        module.training_step(None, 0).backward()
        optimiser.step()
    found = residual_fit(subject_of(spec, module, trained=True))
    assert isinstance(found, NotApplicable) if placement == PostNorm() else measured(found) < 1e-5


@pytest.mark.parametrize("placement", [PreNorm(), PostNorm()])
def test_one_block_with_a_connection_that_is_not_declared_is_seen(placement: Any) -> None:
    model = ModelSpec(d_model=16, num_heads=2, num_layers=3, residual=NoResidual(), norm_placement=placement)
    module = TransformerModule(RunSpec(model=model, task=Copy()))
    assert measured(residual_fit(subject_of(module.spec, module))) < 1e-6
    for step in (module.model.blocks[1].attention_step, module.model.blocks[1].feedforward_step):
        step.leave = lambda x, y, real, own=step.leave: own(x, y + x, real)
    found = residual_fit(subject_of(module.spec, module))
    assert isinstance(found, Measured)
    assert (found.value > 0.1, found.where) == (True, "blocks.1")
