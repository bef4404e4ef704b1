"""Normalisation kinds against their formulas in fp64, placements against their equations."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.components.norm import (
    BatchNorm,
    LayerNorm,
    NoNorm,
    Norm,
    NormPlacement,
    PostNorm,
    PreNorm,
    RMSNorm,
    SandwichNorm,
)
from harness.components.position import NoPE, places
from harness.components.residual import Residual, ResidualStep
from harness.spec import ModelSpec
from harness.transformer import Block, Reading, Transformer, build_model

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
        norm.get_parameter("weight").copy_(gain)
        norm.get_parameter("bias").copy_(bias)
    torch.testing.assert_close(norm(x), layer_norm(x, gain, bias, eps))


def test_layer_norm_is_not_the_one_that_the_derivation_prints() -> None:
    # CLAIMS D10: unbiased standard deviation, ε outside of the root.
    x, ones = torch.randn(2, 3, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    printed = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
    norm = LayerNorm().build(8).double()
    torch.testing.assert_close(norm(x), layer_norm(x, ones, 0 * ones, 1e-5))
    assert (norm(x) - printed).abs().max() > 0.05
    torch.testing.assert_close(norm(x).var(-1, correction=0), torch.ones(2, 3, dtype=torch.float64), atol=1e-3, rtol=0)


@given(inputs, st.floats(1e-8, 0.1))
def test_rms_norm_is_its_formula(case: tuple[int, int, float, float], eps: float) -> None:
    x, gain, _ = drawn(case)
    norm = RMSNorm(eps=eps).build(x.shape[-1]).double()
    with torch.no_grad():
        norm.get_parameter("weight").copy_(gain)
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


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm(), BatchNorm()], ids=lambda level: level.kind)
@pytest.mark.parametrize(
    "real", [None, torch.arange(40) < torch.arange(5, 45, 5)[:, None]], ids=["no padding", "a mask"]
)
def test_norms_of_half_precision_inputs_have_moments_in_full(norm: Norm, real: Tensor | None) -> None:
    x, half, whole = (torch.randn(8, 40, 16) * 2 + 9).bfloat16(), norm.build(16), norm.build(16)
    with torch.autocast("cpu", torch.bfloat16):
        got = half(x, real)
    expected = whole(x.float(), real)
    torch.testing.assert_close(got.float(), expected, atol=1e-6, rtol=2**-8)  # rounded once, at the end
    for name, moment in whole.named_buffers():
        torch.testing.assert_close(half.get_buffer(name), moment, rtol=1e-5, atol=0)


# --- batch norm ------------------------------------------------------------------------------------------------------


def batch_norms(eps: float, momentum: float) -> tuple[nn.Module, nn.BatchNorm1d]:
    """Ours and torch's, in fp64, with the same affine parameters."""
    ours = BatchNorm(eps=eps, momentum=momentum).build(6).double()
    theirs = nn.BatchNorm1d(6, eps=eps, momentum=momentum).double()
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter)
        ours.get_parameter(name).data.copy_(parameter.data)
    return ours, theirs


def padded(seed: int) -> tuple[Tensor, Tensor]:
    """`(4, 7, 6)` and which of its tokens are real."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 7, 6, generator=draw, dtype=torch.float64) * 3 + 2
    return x, torch.arange(7) < torch.tensor([[7], [3], [1], [5]])


@pytest.mark.parametrize("padding", [True, False])
def test_batch_norm_is_torchs_on_the_real_tokens(padding: bool) -> None:
    ours, theirs = batch_norms(eps=1e-3, momentum=0.3)
    for step in range(3):
        x, real = padded(step)
        real = real if padding else torch.ones_like(real)
        x.requires_grad_()
        got, expected = ours(x, real if padding else None)[real], theirs(x[real])
        torch.testing.assert_close(got, expected)
        slope = torch.randn_like(got)
        torch.testing.assert_close(torch.autograd.grad(got, x, slope), torch.autograd.grad(expected, x, slope))
        for moment in ("running_mean", "running_var"):
            torch.testing.assert_close(ours.get_buffer(moment), theirs.get_buffer(moment))
    ours.eval()
    theirs.eval()
    x, real = padded(9)
    torch.testing.assert_close(ours(x, real)[real], theirs(x[real]))
    torch.testing.assert_close(ours(x), theirs(x.flatten(0, 1)).view_as(x))


def test_padding_does_not_matter_to_batch_norm() -> None:
    # CLAIMS D13: neither what stands there nor how much.
    (x, real), once, other = padded(0), BatchNorm().build(6).double(), BatchNorm().build(6).double()
    changed = torch.cat([x.where(real[..., None], 1e3), torch.full((4, 2, 6), -50.0)], dim=1)
    longer = torch.cat([real, torch.zeros(4, 2, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(once(x, real)[real], other(changed, longer)[longer])
    torch.testing.assert_close(once.state_dict(), other.state_dict())
    wrong = BatchNorm().build(6).double()(x)[real]  # what a norm that sees padding makes of it
    assert (once(x, real)[real] - wrong).abs().max() > 0.1


@pytest.mark.parametrize("real", [None, torch.ones(3, 4, dtype=torch.bool)], ids=["no padding", "a mask"])
def test_batch_norm_mixes_tokens_in_training_only(real: Tensor | None) -> None:
    # CLAIMS D13: LayerNorm does not, see above.
    x, built = torch.randn(3, 4, 8), BatchNorm().build(8)
    changed = x.clone()
    changed[1, 2] += 1

    def differs() -> Tensor:
        return (built(changed, real) != built(x, real)).any(-1)

    assert differs().all()
    built.eval()
    assert differs().nonzero().tolist() == [[1, 2]]


def test_a_batch_of_one_real_token_keeps_running_moments_finite() -> None:
    built = BatchNorm().build(4)
    built(torch.randn(1, 3, 4), torch.tensor([[True, False, False]]))
    assert all(moment.isfinite().all() for moment in built.state_dict().values())


# --- placement -------------------------------------------------------------------------------------------------------

PLACEMENTS = [PreNorm(), PostNorm(), SandwichNorm(), NoNorm()]


def by_equation(placement: NormPlacement, x: Tensor, f: Callable[[Tensor], Tensor], norms: list[nn.Module]) -> Tensor:
    """A residual step with the norms in the order in which they act."""
    if isinstance(placement, PreNorm):
        return x + f(norms[0](x))
    if isinstance(placement, PostNorm):
        return norms[0](x + f(x))
    if isinstance(placement, SandwichNorm):
        return x + norms[1](f(norms[0](x)))
    return x + f(x)


def norms_of(step: nn.Module) -> list[nn.Module]:
    """The norms of a step, with affine parameters of their own, so that none can stand in for another."""
    norms: list[nn.Module] = [module for module in step.children() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
    for parameter in step.parameters():
        nn.init.normal_(parameter)
    return norms


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm()], ids=lambda level: level.kind)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda level: level.kind)
def test_placements_are_their_equations(placement: NormPlacement, norm: Norm) -> None:
    x, sublayer = torch.randn(2, 3, 8), nn.Linear(8, 8)
    step = ResidualStep(placement, norm, Residual(), dropout=0.0, d_model=8)
    expected = by_equation(placement, x, sublayer, norms_of(step))
    torch.testing.assert_close(step.leave(x, sublayer(step.enter(x, None)), None), expected)


def one_block(placement: NormPlacement) -> Block:
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=1, norm_placement=placement)
    block = build_model(spec, 10, seed=0).blocks[0]
    assert isinstance(block, Block)
    return block


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda level: level.kind)
def test_a_block_is_its_equations(placement: NormPlacement) -> None:
    block, x, relation = one_block(placement), torch.randn(2, 5, 16), places(5)
    first, second = norms_of(block.attention_step), norms_of(block.feedforward_step)
    expected = by_equation(placement, x, lambda h: block.attention(h, relation, causal=True), first)
    expected = by_equation(placement, expected, block.feedforward, second)
    torch.testing.assert_close(block(x, relation, Reading(causal=True))[0], expected)


def model(placement: NormPlacement, norm: Norm | None = None, num_layers: int = 2) -> Transformer:
    spec = ModelSpec(
        d_model=16,
        num_heads=2,
        num_layers=num_layers,
        position=NoPE(),
        norm=norm or LayerNorm(),
        norm_placement=placement,
    )
    return build_model(spec, 10, seed=0)


@pytest.mark.parametrize("norm", [LayerNorm(), RMSNorm(), BatchNorm()], ids=lambda level: level.kind)
def test_norms_before_sublayers_need_a_final_norm(norm: Norm) -> None:
    finals = {placement.kind: model(placement, norm).final_norm for placement in PLACEMENTS}
    assert type(finals["PreNorm"]) is type(finals["SandwichNorm"]) is type(norm.build(16))
    assert finals["PostNorm"] is finals["NoNorm"] is None
    # What reaches the head has unit size: post-norm's last block ends in a norm.
    for placement in PLACEMENTS[:3]:
        made, seen = model(placement, norm), list[Tensor]()
        made.get_submodule("head").register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        made(torch.arange(10)[None])
        axis = 1 if isinstance(norm, BatchNorm) else -1
        size = seen[0].square().mean(axis)
        torch.testing.assert_close(size, torch.ones_like(size), atol=1e-3, rtol=0)


def test_the_residual_stream_grows_unless_norms_stand_on_it() -> None:
    def stream(placement: NormPlacement) -> Tensor:
        made = model(placement, num_layers=6)
        sizes: list[Tensor] = []
        for block in made.blocks:
            block.register_forward_hook(lambda module, args, output: sizes.append(output[0].detach().square().mean()))
        made(torch.arange(10)[None])
        return torch.stack(sizes)

    assert (stream(PreNorm()).diff() > 0).all()
    torch.testing.assert_close(stream(PostNorm()), torch.ones(6), atol=1e-3, rtol=0)
    # A sandwich adds about one a sublayer, no norm at all about as much as there is.
    first, last = (float(stream(SandwichNorm())[layer]) for layer in (0, -1))
    assert 2 * first < last < 2 * 13
    assert stream(NoNorm())[-1] > 10 * last


def test_a_batch_of_one_token_is_normalised_like_any_other() -> None:
    norm = BatchNorm().build(4).train()
    assert norm(torch.randn(1, 1, 4)).isfinite().all()
    assert norm.running_var.isfinite().all()
