"""Residual connections against their equations, with every placement of norms."""

import pytest
import torch
from torch import Tensor, nn

from harness.components.architecture import EncoderOnly
from harness.components.norm import LayerNorm, NoNorm, NormPlacement, PostNorm, PreNorm, SandwichNorm
from harness.components.position import places
from harness.components.residual import NoResidual, Residual, ResidualConnection, ResidualStep
from harness.spec import ModelSpec
from harness.transformer import Reading, build_model

PLACEMENTS = [PreNorm(), PostNorm(), SandwichNorm(), NoNorm()]


def norm(x: Tensor) -> Tensor:
    """LayerNorm as it is at the start."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def step(placement: NormPlacement, residual: ResidualConnection, dropout: float = 0.0) -> ResidualStep:
    return ResidualStep(placement, LayerNorm(), residual, dropout, d_model=8).double()


@pytest.mark.parametrize("residual", [Residual(), NoResidual()], ids=lambda level: level.kind)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda level: level.kind)
def test_a_step_is_its_equation(placement: NormPlacement, residual: ResidualConnection) -> None:
    x, sublayer = torch.randn(2, 3, 8, dtype=torch.float64), nn.Linear(8, 8).double()
    x = x * 3 + 1
    kept = x if isinstance(residual, Residual) else torch.zeros_like(x)
    expected = {
        "PreNorm": kept + sublayer(norm(x)),
        "PostNorm": norm(kept + sublayer(x)),
        "SandwichNorm": kept + norm(sublayer(norm(x))),
        "NoNorm": kept + sublayer(x),
    }[placement.kind]
    built = step(placement, residual)
    torch.testing.assert_close(built.leave(x, sublayer(built.enter(x, None)), None), expected)


@pytest.mark.parametrize("residual", [Residual(), NoResidual()], ids=lambda level: level.kind)
def test_residuals_have_no_parameters(residual: ResidualConnection) -> None:
    assert not list(step(NoNorm(), residual).parameters())


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda level: level.kind)
def test_sublayers_that_give_zero_are_the_identity_only_with_residuals(placement: NormPlacement) -> None:
    def out(residual: ResidualConnection) -> Tensor:
        spec = ModelSpec(d_model=16, num_heads=2, num_layers=1, norm_placement=placement, residual=residual)
        block = build_model(spec, 10, seed=0).get_submodule("blocks.0")
        with torch.no_grad():
            for name in ("attention.output", "feedforward.2"):
                block.get_parameter(f"{name}.weight").zero_()
        return block(x, places(5), Reading(causal=True))[0]

    x = torch.randn(2, 5, 16)
    expected = norm(norm(x)) if isinstance(placement, PostNorm) else x
    torch.testing.assert_close(out(Residual()), expected)
    assert not out(NoResidual()).any()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda level: level.kind)
def test_without_residuals_attention_makes_all_tokens_alike(placement: NormPlacement) -> None:
    # CLAIMS D12: rank collapse, doubly exponential in depth (Dong et al. 2021, arXiv:2103.03404).
    def differences(residual: ResidualConnection) -> float:
        spec = ModelSpec(
            d_model=16,
            num_heads=2,
            num_layers=4,
            norm_placement=placement,
            residual=residual,
            architecture=EncoderOnly(),
        )
        made, seen = build_model(spec, 10, seed=0).double(), list[Tensor]()
        made.get_submodule("head").register_forward_pre_hook(lambda module, args: seen.append(args[0][0].detach()))
        made(torch.arange(10)[None])
        return float((seen[0] - seen[0].mean(0)).norm() / seen[0].norm())

    assert differences(Residual()) > 0.1
    assert differences(NoResidual()) < 1e-9


def test_dropout_of_the_residual_acts_on_the_sublayers_output_in_training_only() -> None:
    built = step(NoNorm(), Residual(), dropout=0.25)
    x, y = torch.randn(2, 40, 50, 8, dtype=torch.float64)
    added = built.leave(x, y, None) - x
    dropped = added.abs() < 1e-12
    torch.testing.assert_close(added[~dropped], y[~dropped] / 0.75)  # the mean is kept
    assert float(dropped.double().mean()) == pytest.approx(0.25, abs=0.02)
    built.eval()
    torch.testing.assert_close(built.leave(x, y, None), x + y)


def test_without_a_way_around_dropout_leaves_zeros() -> None:
    built = step(NoNorm(), NoResidual(), dropout=0.5)
    x, y = torch.randn(2, 4, 50, 8, dtype=torch.float64)
    left = built.leave(x, y, None)
    assert float((left == 0).double().mean()) == pytest.approx(0.5, abs=0.1)


def test_the_dropout_of_a_spec_reaches_every_step_and_draws_from_the_global_generator() -> None:
    made = build_model(ModelSpec(d_model=16, num_heads=2, residual_dropout=0.3), 10, seed=0)
    steps = [module for module in made.modules() if isinstance(module, ResidualStep)]
    assert [module.dropout.p for module in steps] == [0.3] * 4
    read = torch.arange(10)[None]

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return made(read)

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    made.eval()
    assert torch.equal(logits(1), logits(2))
