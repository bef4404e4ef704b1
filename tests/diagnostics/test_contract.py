"""The step as it is declared: the one that is made where nothing is wrong, and around what is."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import ModelSpec, RunSpec, TrainSpec
from harness.components.feedforward import MoE, ReLU
from harness.components.norm import BatchNorm, SandwichNorm
from harness.diagnostics.contract import (
    Contract,
    DeclaredStep,
    contract_of,
    declared_step,
    gradient_error,
    noise_scale,
    same_batch,
)
from harness.module import TransformerModule
from harness.spec import Padded
from tasks import Copy, Lengths

TASK = Copy(lengths=Lengths(train=(1, 5), test=()), num_symbols=6)
EXPERTS = MoE(expert=ReLU(d_ff=8), jitter=0.1, z_loss=0.01, bias_rate=0.01)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "dropout, smoothing": ({"residual_dropout": 0.2, "attention_dropout": 0.1}, {"label_smoothing": 0.1}),
    "experts": ({"feedforward": EXPERTS}, {}),
    "experts without a balance loss": ({"feedforward": MoE(expert=ReLU(d_ff=8), balance=0.0, bias_rate=0.01)}, {}),
    "gradients that are rounding": (
        {"norm": BatchNorm(), "norm_placement": SandwichNorm(), "feedforward": MoE(expert=ReLU(d_ff=8))},
        {},
    ),
    "BatchNorm, padded": ({"norm": BatchNorm()}, {"sampling": Padded()}),
}


def module_of(model: dict[str, Any], train: dict[str, Any]) -> TransformerModule:
    shape = {"d_model": 16, "num_layers": 2, "num_heads": 2}
    return TransformerModule(
        RunSpec(model=ModelSpec(**shape | model), task=TASK, train=TrainSpec(steps=20, batch_size=8, **train))
    )


def made(module: TransformerModule) -> Tensor:
    """The loss of a step that is made, whose gradients are left in the model."""
    module.zero_grad()
    loss = module.training_step(None, 0)
    loss.backward()
    return loss.detach()


def declared(module: TransformerModule) -> DeclaredStep:
    return declared_step(module.model, contract_of(module.spec, module.model), module.batch(0), 0)


def errors(module: TransformerModule, step: DeclaredStep) -> dict[str, float]:
    parameters = dict(module.model.named_parameters())
    return {name: x.item() for name, x in gradient_error(parameters, step, ["blocks.0", "blocks.1"]).items()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_is_the_declared_one_and_looking_changes_nothing(kind: tuple[dict[str, Any], dict[str, Any]]) -> None:
    module = module_of(*kind).eval()
    for experts in module.model.experts():
        experts.rebalance(torch.rand(experts.spec.num_experts))  # as earlier steps have
    buffers = [buffer.clone() for buffer in module.buffers()]
    draws = torch.get_rng_state()
    step = declared(module)
    assert not module.model.training
    assert torch.equal(draws, torch.get_rng_state())
    assert all(map(torch.equal, buffers, module.buffers()))
    assert all(p.grad is None for p in module.parameters())
    module.train()
    torch.testing.assert_close(step.loss, made(module))
    found = errors(module, step)
    assert found.keys() == {"error", "error.0", "error.1", "fit"}
    assert found.pop("fit") == pytest.approx(1)
    assert max(found.values()) < 1e-4


def multiplied(module: TransformerModule) -> None:
    for p in module.model.parameters():
        p.register_hook(lambda gradient: 3 * gradient)


def frozen(module: TransformerModule) -> None:
    for p in module.model.blocks[1].parameters():
        p.requires_grad_(False)


def turned(module: TransformerModule) -> None:
    module.model.blocks[1].register_full_backward_hook(
        lambda part, given, got: tuple(g if g is None else -g for g in given)
    )


def row_cut(module: TransformerModule) -> None:
    module.model.embedding.weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([4]), 0.0))


@pytest.mark.parametrize(
    ("fault", "due"),
    [
        (multiplied, {"error": 2, "error.0": 2, "error.1": 2, "fit": 3}),
        (frozen, {"error": 0, "error.0": 0, "error.1": 1}),
        (turned, {"error.0": 2, "error.1": 0}),
        (row_cut, {"error": 1, "error.0": 0, "error.1": 0}),
    ],
)
def test_what_stands_between_loss_and_gradients_is_seen(
    fault: Callable[[TransformerModule], None], due: dict[str, float]
) -> None:
    module = module_of({}, {})
    fault(module)
    step = declared(module)
    made(module)
    found = errors(module, step)
    assert {name: found[name] for name in due} == pytest.approx(due, abs=1e-4)


def test_gradients_of_routers_and_of_the_task_are_compared_where_both_act() -> None:
    module = module_of({"feedforward": replace_balance(10.0)}, {})
    weak, strong = (
        declared(module_of({"feedforward": replace_balance(c)}, {})).others["auxiliary"] for c in (0.1, 10.0)
    )
    torch.testing.assert_close(strong, 100 * weak)
    assert "auxiliary" not in declared(module_of({}, {})).others
    assert "noise_scale" in declared(module).others


def replace_balance(coefficient: float) -> MoE:
    return MoE(expert=ReLU(d_ff=8), balance=coefficient)


def test_the_noise_scale_is_that_of_gradients_that_were_drawn_with_it() -> None:
    """Means of independent draws with covariance Σ: the estimates of tr(Σ) and |G|² have these for their means."""
    torch.manual_seed(0)
    true, deviation, size, draws = torch.ones(50), 3.0, 16, 4000
    samples = true + deviation * torch.randn(draws, size, 50)
    whole, half = samples.mean(1), samples[:, : size // 2].mean(1)
    square = (2 * whole.square().sum(-1) - half.square().sum(-1)).mean()
    variance = size * (half.square().sum(-1) - whole.square().sum(-1)).mean()
    assert (variance / square).item() == pytest.approx(deviation**2, rel=0.05)
    each = noise_scale({"w": half[0]}, {"w": whole[0]}, size)
    one = 2 * whole[0].square().sum() - half[0].square().sum()
    torch.testing.assert_close(each, size * (half[0].square().sum() - whole[0].square().sum()) / one)
    assert math.isnan(noise_scale({"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])}, 2))


def test_batches_are_compared_number_by_number() -> None:
    batch = module_of({}, {"sampling": Padded()}).batch(0)
    assert batch.real is not None
    assert same_batch(batch, batch) == 1
    count = sum(part.numel() for part in (batch.inputs, batch.targets, batch.real))
    targets = batch.targets.clone()
    targets[0, 0] += 1
    assert same_batch(batch, replace(batch, targets=targets)) == pytest.approx(1 - 1 / count)
    assert same_batch(batch, replace(batch, real=None)) == 0
    assert same_batch(batch, batch.rows(slice(2))) == 0


def test_another_loss_may_be_declared_of_any_module() -> None:
    """As the foreign modules that the watch takes: a loss of weights, a batch and a number of steps."""
    model = nn.Linear(3, 1)
    x = torch.randn(4, 3)

    def losses(weights: Any, batch: Tensor, taken: int) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(model, dict(weights), (batch,)).square().mean() * (taken + 1), torch.zeros(())

    step = declared_step(model, Contract(losses=losses), x, 1)
    model(x).square().mean().mul(2).backward()
    torch.testing.assert_close(step.gradients["weight"], model.weight.grad)
    assert step.others == {}
