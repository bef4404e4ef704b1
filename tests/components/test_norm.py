"""Normalisation kinds against their formulas in fp64, placements against their equations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.components.norm import LayerNorm, Norm, NormPlacement, PostNorm, PreNorm, RMSNorm
from harness.components.position import NoPE
from harness.spec import ModelSpec
from harness.transformer import Block, build_model

inputs = st.tuples(st.integers(2, 24), st.integers(0, 2**31), st.floats(0.01, 100), st.floats(-10, 10))


def drawn(case: tuple[int, int, float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """An input `(2, 3, d)` and affine parameters `(d)`."""
    width, seed, spread, shift = case
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, width, generator=draw, dtype=torch.float64) * spread + shift
    return x, *torch.randn(2, width, generator=draw, dtype=torch.float64)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]  # biased
    return gain * (x - mean) / (variance + eps) ** 0.5 + bias


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5


@given(inputs, st.floats(1e-8, 0.1))
def test_layer_norm_is_its_formula(case: tuple[int, int, float, float], eps: float) -> None:
    x, gain, bias = drawn(case)
    norm = LayerNorm(eps=eps).build(x.shape[-1]).double()
    with torch.no_grad():
        norm.weight.copy_(gain)
        norm.bias.copy_(bias)
    torch.testing.assert_close(norm(x), layer_norm(x, gain, bias, eps))


def test_layer_norm_is_not_the_one_that_the_derivation_prints() -> None:
    # CLAIMS D10: unbiased standard deviation, ε outside of the root.
    x, ones = torch.randn(2, 3, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    printed = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
    norm = LayerNorm().build(8).double()
    torch.testing.assert_close(norm(x), layer_norm(x, ones, 0 * ones, 1e-5))
    assert (norm(x) - printed).abs().max() > 0.05


@given(inputs, st.floats(1e-8, 0.1))
def test_rms_norm_is_its_formula(case: tuple[int, int, float, float], eps: float) -> None:
    x, gain, _ = drawn(case)
    norm = RMSNorm(eps=eps).build(x.shape[-1]).double()
    with torch.no_grad():
        norm.weight.copy_(gain)
    torch.testing.assert_close(norm(x), rms_norm(x, gain, eps))


def test_rms_norm_neither_centres_nor_shifts() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    layer, rms = LayerNorm(eps=1e-12).build(8).double(), RMSNorm(eps=1e-12).build(8).double()
    assert [name for name, _ in rms.named_parameters()] == ["weight"]
    torch.testing.assert_close(rms(x - x.mean(-1, keepdim=True)), layer(x))  # equal once centred
    torch.testing.assert_close(layer(x + 3), layer(x))
    assert (rms(x + 3) - rms(x)).abs().max() > 0.1
    assert (rms(x).mean(-1).abs() > 1e-3).all()


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()], ids=lambda level: level.kind)
def test_norms_look_at_one_token_only(norm: Norm) -> None:
    x, built = torch.randn(3, 4, 8), norm.build(8)
    changed = x.clone()
    changed[1, 2] += 1
    differs = (built(changed) != built(x)).any(-1)
    assert differs.nonzero().tolist() == [[1, 2]]


# --- placement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()], ids=lambda level: level.kind)
def test_placements_are_their_equations(norm: Norm) -> None:
    x, built, sublayer = torch.randn(2, 3, 8), norm.build(8), nn.Linear(8, 8)
    torch.testing.assert_close(PreNorm().apply(x, built, sublayer), x + sublayer(built(x)))
    torch.testing.assert_close(PostNorm().apply(x, built, sublayer), built(x + sublayer(x)))


def block_by_equations(block: Block, x: Tensor, placement: NormPlacement) -> Tensor:
    def attend(h: Tensor) -> Tensor:
        return block.attention(h, RELATION, causal=True)

    if isinstance(placement, PreNorm):
        x = x + attend(block.attention_norm(x))
        return x + block.feedforward(block.feedforward_norm(x))
    x = block.attention_norm(x + attend(x))
    return block.feedforward_norm(x + block.feedforward(x))


RELATION = NoPE().build(ModelSpec().shape).relation(5, causal=True, device=torch.device("cpu"))


@pytest.mark.parametrize("placement", [PreNorm(), PostNorm()], ids=lambda level: level.kind)
def test_a_block_is_its_equations(placement: NormPlacement) -> None:
    # Norms with affine parameters of their own, so that none can stand in for another.
    model = build_model(ModelSpec(d_model=16, num_heads=2, num_layers=1, norm_placement=placement), 10, seed=0)
    (block,) = model.blocks
    for norm in (block.attention_norm, block.feedforward_norm):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(block(x, RELATION, causal=True), block_by_equations(block, x, placement))


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()], ids=lambda level: level.kind)
def test_pre_norm_has_a_final_norm_and_post_norm_none(norm: Norm) -> None:
    def build(placement: NormPlacement) -> nn.Module:
        spec = ModelSpec(d_model=16, num_heads=2, position=NoPE(), norm=norm, norm_placement=placement)
        return build_model(spec, 10, seed=0)

    pre, post = build(PreNorm()), build(PostNorm())
    assert type(pre.final_norm) is type(norm.build(16))
    assert isinstance(post.final_norm, nn.Identity)
    # What reaches the head has unit size for both: post-norm's last block ends in a norm.
    for model in (pre, post):
        seen: list[Tensor] = []
        model.head.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        model(torch.arange(10)[None])
        torch.testing.assert_close(seen[0].square().mean(-1), torch.ones(1, 10), atol=1e-3, rtol=0)


def test_the_residual_stream_grows_with_pre_norm_only() -> None:
    def stream(placement: NormPlacement) -> Tensor:
        model = build_model(ModelSpec(d_model=16, num_heads=2, num_layers=6, norm_placement=placement), 10, seed=0)
        sizes: list[Tensor] = []
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, output: sizes.append(output.square().mean()))
        model(torch.arange(10)[None])
        return torch.stack(sizes)

    assert (stream(PreNorm()).diff() > 0).all()
    torch.testing.assert_close(stream(PostNorm()), torch.ones(6), atol=1e-3, rtol=0)
