"""Normalised queries and keys: against the formula, and what they bound."""

import math

import pytest
import torch
from torch import Tensor

from harness.components.attention import Latent
from harness.components.norm import BatchNorm, LayerNorm, Norm, RMSNorm
from harness.components.position import NoPE, Position, RoPE
from harness.components.qk_norm import NoQKNorm, QKNorm, QueryKeyNorm
from harness.spec import ModelSpec
from harness.trace import Trace
from harness.transformer import Transformer, build_model

HEADS, WIDTH, LENGTH = 2, 8, 10


def model(level: QueryKeyNorm, position: Position | None = None) -> Transformer:
    spec = ModelSpec(d_model=HEADS * WIDTH, num_heads=HEADS, num_layers=1, qk_norm=level, position=position or NoPE())
    return build_model(spec, LENGTH, seed=0).double()


def weights(made: Transformer) -> Tensor:
    """`(H, T, T)`"""
    trace = Trace()
    made(torch.arange(LENGTH)[None], trace=trace)
    return trace.stacked("attention")[0, 0].double()


def normalised(x: Tensor, gain: Tensor, norm: Norm) -> Tensor:
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()], ids=lambda level: level.kind)
def test_logits_are_products_of_normalised_heads(norm: Norm) -> None:
    made = model(QKNorm(norm=norm))
    attention, x = made.get_submodule("blocks.0.attention"), made.embedding.weight
    logits = torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    gains = torch.randn(2, WIDTH, dtype=torch.float64)
    turned = []
    with torch.no_grad():
        for name, gain in zip(("query", "key"), gains, strict=True):
            attention.get_parameter(f"{name}_norm.weight").copy_(gain)
            heads = (x @ attention.get_parameter(f"{name}.weight").T).view(LENGTH, HEADS, WIDTH).transpose(0, 1)
            turned.append(normalised(heads, gain, norm))
    logits = turned[0] @ turned[1].mT / math.sqrt(WIDTH)
    expected = logits.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(weights(made), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()], ids=lambda level: level.kind)
@pytest.mark.parametrize("position", [NoPE(), RoPE()], ids=lambda level: level.kind)
def test_logits_cannot_grow_with_the_weights(norm: Norm, position: Position) -> None:
    # |q|, |k| ≤ √d_head, so |q·k| / √d_head ≤ √d_head: within a row, weights differ by e^{2√d_head} at most.
    def spread(level: QueryKeyNorm) -> float:
        made = model(level, position)
        with torch.no_grad():
            for name in ("query", "key"):
                made.get_parameter(f"blocks.0.attention.{name}.weight").mul_(100)
        row = weights(made)[:, -1].clamp(min=1e-300).log()
        return float((row.amax(-1) - row.amin(-1)).max())

    assert spread(QKNorm(norm=norm)) <= 2 * math.sqrt(WIDTH) + 1e-6
    assert spread(NoQKNorm()) > 20 * math.sqrt(WIDTH)


@pytest.mark.parametrize("norm", [RMSNorm(eps=1e-12), LayerNorm(eps=1e-12)], ids=lambda level: level.kind)
def test_the_size_of_queries_and_keys_does_not_matter(norm: Norm) -> None:
    made, larger = model(QKNorm(norm=norm)), model(QKNorm(norm=norm))
    with torch.no_grad():
        larger.get_parameter("blocks.0.attention.query.weight").mul_(7)
        larger.get_parameter("blocks.0.attention.key.weight").mul_(0.2)
    torch.testing.assert_close(weights(larger), weights(made), atol=1e-6, rtol=0)


def test_queries_and_keys_have_a_gain_each_that_is_shared_by_the_heads() -> None:
    made, plain = model(QKNorm()), model(NoQKNorm())
    added = {name: tuple(p.shape) for name, p in made.named_parameters() if name not in plain.state_dict()}
    assert added == {f"blocks.0.attention.{name}_norm.weight": (WIDTH,) for name in ("query", "key")}
    made(torch.arange(LENGTH)[None]).square().sum().backward()
    for name in added:
        gradient = made.get_parameter(name).grad
        assert gradient is not None
        assert gradient.any()


def test_a_norm_that_mixes_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"qk_norm\.norm = BatchNorm: it would mix tokens; choose RMSNorm\(\) or"):
        ModelSpec(qk_norm=QKNorm(norm=BatchNorm()))


def test_a_latent_whose_keys_are_never_made_is_refused() -> None:
    with pytest.raises(ValueError, match=r"qk_norm = QKNorm: attention = Latent normalises its latent instead"):
        ModelSpec(qk_norm=QKNorm(), attention=Latent())
