"""Feed-forward levels against their formulas in fp64, and what they cost."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.components.attention import MultiHeadAttention
from harness.components.feedforward import GELU, FeedForward, ReLU, SwiGLU
from harness.components.scale import InverseSqrt
from harness.components.shape import Shape
from harness.cost import parameters

sizes = st.tuples(st.integers(1, 12), st.integers(1, 24), st.integers(0, 2**31))
LEVELS = [ReLU(d_ff=24), GELU(d_ff=24), SwiGLU(d_ff=24)]
DEFAULTS = [ReLU(), GELU(), SwiGLU()]


def built(level: FeedForward, d_model: int, draw: torch.Generator) -> tuple[nn.Module, list[Tensor]]:
    """A module in fp64 with drawn parameters, and these in the order of their use."""
    module = level.build(d_model).double()
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return module, [parameter.detach() for parameter in module.parameters()]


def phi(x: Tensor) -> Tensor:
    """The normal distribution function, a number at a time."""
    values = [0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


@given(sizes)
def test_relu_is_its_formula(case: tuple[int, int, int]) -> None:
    d_model, d_ff, seed = case
    draw = torch.Generator().manual_seed(seed)
    module, (w1, b1, w2, b2) = built(ReLU(d_ff=d_ff), d_model, draw)
    x = torch.randn(2, 3, d_model, generator=draw, dtype=torch.float64)
    hidden = x @ w1.T + b1
    torch.testing.assert_close(module(x), torch.where(hidden > 0, hidden, 0) @ w2.T + b2)


@given(sizes)
def test_gelu_is_its_exact_formula(case: tuple[int, int, int]) -> None:
    d_model, d_ff, seed = case
    draw = torch.Generator().manual_seed(seed)
    module, (w1, b1, w2, b2) = built(GELU(d_ff=d_ff), d_model, draw)
    x = torch.randn(2, 3, d_model, generator=draw, dtype=torch.float64)
    hidden = x @ w1.T + b1
    torch.testing.assert_close(module(x), (hidden * phi(hidden)) @ w2.T + b2)


@given(sizes)
def test_swiglu_is_its_formula(case: tuple[int, int, int]) -> None:
    d_model, d_ff, seed = case
    draw = torch.Generator().manual_seed(seed)
    module, _ = built(SwiGLU(d_ff=d_ff), d_model, draw)
    w = {name.split(".")[0]: p.detach() for name, p in module.named_parameters()}
    assert set(w) == {"gate", "up", "down"}
    x = torch.randn(2, 3, d_model, generator=draw, dtype=torch.float64)
    gate = x @ w["gate"].T
    silu = gate / (1 + torch.exp(-gate))
    torch.testing.assert_close(module(x), (silu * (x @ w["up"].T)) @ w["down"].T)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.kind)
def test_each_position_is_mapped_by_itself(level: FeedForward) -> None:
    module, x = level.build(8), torch.randn(2, 5, 8)
    changed = x.clone()
    changed[1, 3] += 1
    assert (module(changed) != module(x)).any(-1).nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("level", "weights", "biases"), [(ReLU, 2, True), (GELU, 2, True), (SwiGLU, 3, False)], ids=lambda x: str(x)
)
def test_parameters_by_hand(level: type[FeedForward], weights: int, biases: bool) -> None:
    d_model, d_ff = 16, 40
    expected = weights * d_model * d_ff + biases * (d_ff + d_model)
    assert parameters(level.parse({"kind": level.__name__, "d_ff": d_ff}).build(d_model)) == expected


@pytest.mark.parametrize(
    ("level", "share"),
    [
        (ReLU(d_ff=4 * 96), 8 / 12),
        (GELU(d_ff=4 * 96), 8 / 12),
        (SwiGLU(d_ff=4 * 96), 12 / 16),  # unmatched: as wide as the two-matrix form
        (SwiGLU(d_ff=8 * 96 // 3), 8 / 12),  # ⅔ of it: as many weights
    ],
    ids=["ReLU", "GELU", "SwiGLU", "SwiGLU matched"],
)
def test_the_feedforward_sublayer_holds_two_thirds_of_a_blocks_weights(level: FeedForward, share: float) -> None:
    # CLAIMS E35: 8d² of 12d².
    d_model = 96

    def weights(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.ndim == 2)

    attention = weights(MultiHeadAttention(Shape(d_model, num_heads=4, num_layers=1), InverseSqrt()))
    feedforward = weights(level.build(d_model))
    assert attention == 4 * d_model**2
    assert feedforward / (attention + feedforward) == pytest.approx(share)


def test_the_defaults_have_as_many_weights_as_each_other() -> None:
    counts = {level.kind: sum(p.numel() for p in level.build(64).parameters() if p.ndim == 2) for level in DEFAULTS}
    assert counts["ReLU"] == counts["GELU"]
    assert counts["SwiGLU"] == pytest.approx(counts["ReLU"], rel=0.005)
