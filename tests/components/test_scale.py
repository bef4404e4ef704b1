"""The factor on attention logits, and why it is 1/√d_k."""

import math

import pytest
import torch

from harness.components.attention import attention_weights
from harness.components.scale import Inverse, InverseSqrt, Scale, Unscaled
from harness.spec import ModelSpec
from harness.trace import Trace
from harness.transformer import build_model


@pytest.mark.parametrize("d_head", [1, 2, 7, 64])
def test_factors(d_head: int) -> None:
    assert InverseSqrt().factor(d_head) == pytest.approx(d_head**-0.5)
    assert Unscaled().factor(d_head) == 1
    assert Inverse().factor(d_head) == pytest.approx(1 / d_head)


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


@pytest.mark.parametrize("scale", [InverseSqrt(), Unscaled(), Inverse()], ids=lambda level: level.kind)
def test_the_factor_reaches_the_attention_of_every_layer(scale: Scale) -> None:
    d_head, tokens = 8, torch.arange(10)[None]
    model = build_model(ModelSpec(d_model=16, num_layers=1, num_heads=2, scale=scale), 10, seed=0)
    trace = Trace()
    model(tokens, trace=trace)
    attention = model.blocks[0].attention
    x = model.position.add(model.embedding(tokens))
    query, key = (m(x).unflatten(-1, (2, d_head)).transpose(1, 2) for m in (attention.query, attention.key))
    factor = {"InverseSqrt": 1 / math.sqrt(d_head), "Unscaled": 1, "Inverse": 1 / d_head}[scale.kind]
    expected = attention_weights(query * factor, key, None, causal=True)
    torch.testing.assert_close(trace.stacked("attention")[0], expected)


def test_a_smaller_factor_makes_attention_more_even() -> None:
    # CLAIMS E27: a missing scale sharpens, it does not blur.
    query, key = torch.randn(2, 1, 1, 32, 64)

    def entropy(scale: Scale) -> float:
        weights = attention_weights(query * scale.factor(64), key, None, causal=False)
        return float(torch.special.entr(weights).sum(-1).mean())

    assert entropy(Unscaled()) < 1.5 < entropy(InverseSqrt()) < entropy(Inverse())
    assert entropy(Inverse()) == pytest.approx(math.log(32), rel=0.02)
