"""The factor on attention logits, and why it is 1/√d_k."""

import math

import pytest
import torch

from harness.components.attention import attention_weights
from harness.components.scale import Inverse, InverseSqrt, LearnedTemperature, Scale, Unscaled
from harness.components.shape import Shape
from harness.spec import ModelSpec
from harness.trace import Trace
from harness.transformer import Transformer, build_model

FIXED = [InverseSqrt(), Unscaled(), Inverse()]


@pytest.mark.parametrize("d_head", [1, 2, 7, 64])
def test_factors(d_head: int) -> None:
    assert InverseSqrt().factor(d_head) == pytest.approx(d_head**-0.5)
    assert Unscaled().factor(d_head) == 1
    assert Inverse().factor(d_head) == pytest.approx(1 / d_head)
    assert LearnedTemperature(initial=3.0).factor(d_head) == pytest.approx(3 * d_head**-0.5)


@pytest.mark.parametrize("level", [*FIXED, LearnedTemperature(initial=3.0)], ids=lambda level: level.kind)
def test_modules_multiply_queries_by_the_factor(level: Scale) -> None:
    query = torch.randn(2, 3, 5, 8)
    built = level.build(Shape(d_model=24, num_heads=3, num_layers=1, d_head=8))
    torch.testing.assert_close(built(query), query * level.factor(8))


@pytest.mark.parametrize("d_k", [4, 64, 256])
def test_the_variance_of_a_logit_is_d_k_and_the_factor_makes_it_one(d_k: int) -> None:
    # CLAIMS E02: Monte-Carlo over 20 000 unit-variance pairs; the variance's own standard error is about 1 %.
    query, key = torch.randn(2, 20_000, d_k, generator=torch.Generator().manual_seed(0))
    logits = (query * key).sum(-1)
    variance = {
        level.kind: float((logits * level.factor(d_k)).var()) for level in (Unscaled(), InverseSqrt(), Inverse())
    }
    assert variance["Unscaled"] == pytest.approx(d_k, rel=0.06)
    assert variance["InverseSqrt"] == pytest.approx(1, rel=0.06)
    assert variance["Inverse"] == pytest.approx(1 / d_k, rel=0.06)


def test_logits_of_64_dimensions_spread_by_8() -> None:
    # The articles say ±8 and ±20–30 of the same thing: 8 is the standard deviation, 20 is passed by 1 in 80.
    query, key = torch.randn(2, 100_000, 64, generator=torch.Generator().manual_seed(0))
    logits = (query * key).sum(-1)
    assert float(logits.std()) == pytest.approx(8, rel=0.02)
    assert 0.005 < float((logits.abs() > 20).double().mean()) < 0.02


def gradient(logits: torch.Tensor) -> float:
    """Mean norm of ∂softmax/∂logits, diag(p) − ppᵀ, over rows."""
    p = logits.double().softmax(-1)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return float(jacobian.flatten(1).norm(dim=1).mean())


def test_the_gradient_of_softmax_vanishes_as_logits_grow() -> None:
    # CLAIMS E03
    logits = torch.randn(500, 16, generator=torch.Generator().manual_seed(0))
    norms = [gradient(logits * sigma) for sigma in (1, 2, 4, 8, 16, 32, 64)]
    assert norms[1:] == sorted(norms[1:], reverse=True)
    assert norms[-1] < norms[0] / 5
    assert gradient(torch.eye(16)[:1] * 100) < 1e-30


@pytest.mark.parametrize("scale", FIXED, ids=lambda level: level.kind)
def test_the_factor_reaches_the_attention_of_every_layer(scale: Scale) -> None:
    factor = {"InverseSqrt": 8**-0.5, "Unscaled": 1.0, "Inverse": 1 / 8}[scale.kind]
    traced, logits = weights_and_products(model(scale))
    expected = attention_weights(logits * factor, torch.eye(10).expand(1, 2, -1, -1), None, causal=True)
    torch.testing.assert_close(traced, expected)


def model(scale: Scale) -> Transformer:
    return build_model(ModelSpec(d_model=16, num_layers=1, num_heads=2, scale=scale), 10, seed=0)


def weights_and_products(made: Transformer) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the only layer over ten tokens, and q·k by its projections, both `(1, H, 10, 10)`."""
    trace, tokens = Trace(), torch.arange(10)
    made(tokens[None], trace=trace)
    attention = made.get_submodule("blocks.0.attention")
    x = made.position.add(made.embedding(tokens[None]), tokens)
    query, key = (attention.get_submodule(m)(x).unflatten(-1, (2, 8)).transpose(1, 2) for m in ("query", "key"))
    return trace.stacked("attention")[0], query @ key.mT


def test_a_smaller_factor_makes_attention_more_even() -> None:
    # CLAIMS E27: a missing scale sharpens, it does not blur.
    query, key = torch.randn(2, 1, 1, 32, 64)

    def entropy(scale: Scale) -> float:
        weights = attention_weights(query * scale.factor(64), key, None, causal=False)
        return float(torch.special.entr(weights).sum(-1).mean())

    assert entropy(Unscaled()) < 1.5 < entropy(InverseSqrt()) < entropy(Inverse())
    assert entropy(Inverse()) == pytest.approx(math.log(32), rel=0.02)


def test_a_learned_temperature_is_a_factor_of_each_head() -> None:
    made = model(LearnedTemperature(initial=2.0))
    temperature = made.get_parameter("blocks.0.attention.scale.temperature")
    with torch.no_grad():
        temperature.copy_(torch.tensor([0.7, -1.5]))
    traced, logits = weights_and_products(made)
    for head, tau in enumerate((0.7, -1.5)):
        factor = 2 / math.sqrt(8) * math.exp(tau)
        expected = (logits[0, head] * factor).masked_fill(~torch.ones(10, 10).tril().bool(), -math.inf).softmax(-1)
        torch.testing.assert_close(traced[0, head], expected)


def test_a_learned_temperature_starts_as_the_inverse_root_and_is_trained() -> None:
    tokens, learned, fixed = torch.arange(10)[None], model(LearnedTemperature()), model(InverseSqrt())
    assert torch.equal(learned(tokens), fixed(tokens))  # the other parameters are shared
    assert sum(p.numel() for p in learned.parameters()) - sum(p.numel() for p in fixed.parameters()) == 2
    learned(tokens).square().sum().backward()
    gradient = learned.get_parameter("blocks.0.attention.scale.temperature").grad
    assert gradient is not None
    assert (gradient != 0).all()
