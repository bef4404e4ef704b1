"""Attention against the articles' worked examples (with the right numbers) and an explicit fp64 reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.components.attention import MultiHeadAttention, attention_weights, fused_attention
from harness.components.position import Relation
from harness.components.scale import Inverse, InverseSqrt, Scale, Unscaled
from harness.components.shape import Shape
from harness.trace import Trace

# CLAIMS D09, derivation 3.2: three words, d_k = 4.
QUERY = torch.tensor([[1.0, 0.5, 0.2, 0.8], [0.3, 1.2, 0.7, 0.1], [0.6, 0.3, 1.1, 0.4]])
KEY = torch.tensor([[0.8, 0.3, 0.5, 0.2], [0.4, 0.9, 0.1, 0.7], [0.7, 0.2, 0.8, 0.3]])
VALUE = torch.tensor([[0.1, 0.4, 0.7, 0.2], [0.5, 0.2, 0.8, 0.3], [0.9, 0.6, 0.1, 0.5]])
# By hand. The article prints [.93, 1.89, 1.12] and [1.04, 1.30, 1.47] for the last two rows of QKᵀ.
PRODUCTS = torch.tensor([[1.21, 1.43, 1.20], [0.97, 1.34, 1.04], [1.20, 0.90, 1.48]])
# From those by softmax(· / 2) and the values.
EXPECTED_WEIGHTS = torch.tensor([[0.321, 0.359, 0.320], [0.309, 0.371, 0.320], [0.332, 0.286, 0.382]])
EXPECTED_OUTPUTS = torch.tensor(
    [[0.499, 0.392, 0.544, 0.332], [0.504, 0.390, 0.545, 0.333], [0.520, 0.419, 0.499, 0.343]]
)


def by_hand(products: list[list[float]], values: list[list[float]], factor: float) -> tuple[Tensor, Tensor]:
    """Weights and outputs of softmax(factor · products) · values in plain Python."""
    weights, outputs = [], []
    for row in products:
        powers = [math.exp(factor * product) for product in row]
        weights.append([power / sum(powers) for power in powers])
        outputs.append([sum(w * v[d] for w, v in zip(weights[-1], values, strict=True)) for d in range(len(values[0]))])
    return torch.tensor(weights), torch.tensor(outputs)


def test_the_derivations_example_has_these_products() -> None:
    torch.testing.assert_close(QUERY @ KEY.T, PRODUCTS)


def test_the_derivations_example_with_the_right_numbers() -> None:
    weights, outputs = by_hand(PRODUCTS.tolist(), VALUE.tolist(), 0.5)
    query, key, value = QUERY[None, None] * InverseSqrt().factor(4), KEY[None, None], VALUE[None, None]
    torch.testing.assert_close(attention_weights(query, key, None, causal=False)[0, 0], weights)
    torch.testing.assert_close(fused_attention(query, key, value, None, causal=False)[0, 0], outputs)


def test_the_derivations_example_to_three_decimals() -> None:
    weights, outputs = by_hand(PRODUCTS.tolist(), VALUE.tolist(), 0.5)
    torch.testing.assert_close(weights, EXPECTED_WEIGHTS, atol=5e-4, rtol=0)
    torch.testing.assert_close(outputs, EXPECTED_OUTPUTS, atol=5e-4, rtol=0)


def test_the_module_reproduces_the_derivations_example() -> None:
    # Words are unit vectors, so that the projections' columns are the example's queries, keys and values.
    attention = MultiHeadAttention(Shape(d_model=4, num_heads=1, num_layers=1), InverseSqrt())
    with torch.no_grad():
        for projection, rows in ((attention.query, QUERY), (attention.key, KEY), (attention.value, VALUE)):
            projection.weight[:, :3] = rows.T
        attention.output.weight.copy_(torch.eye(4))
    trace = Trace()
    mixed = attention(torch.eye(4)[None, :3], Relation(), causal=False, trace=trace)
    torch.testing.assert_close(trace.stacked("attention")[0, 0, 0], EXPECTED_WEIGHTS, atol=5e-4, rtol=0)
    torch.testing.assert_close(mixed[0], EXPECTED_OUTPUTS, atol=5e-4, rtol=0)


def test_the_evolutions_example_ignores_nobody() -> None:
    # CLAIMS D09, evolution 2.3: the article prints [.39, .22, .39] and calls position 1 ignored.
    words = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, None]
    value = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])[None, None]
    query = words * InverseSqrt().factor(2)
    logits = query @ words.transpose(-2, -1)
    torch.testing.assert_close(logits[0, 0, 0], torch.tensor([0.7071, 0.0, 0.7071]), atol=1e-4, rtol=0)
    weights = attention_weights(query, words, None, causal=False)[0, 0, 0]
    torch.testing.assert_close(weights, torch.tensor([0.401, 0.198, 0.401]), atol=5e-4, rtol=0)
    mixed = fused_attention(query, words, value, None, causal=False)[0, 0, 0]
    torch.testing.assert_close(mixed, torch.tensor([3.0, 4.0]))


# --- fused = explicit ------------------------------------------------------------------------------------------------


def reference(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool) -> Tensor:
    """softmax(QKᵀ + bias) V in fp64, a query at a time over the keys that it may see."""
    query, key, value = (x.double() for x in (query, key, value))
    batch, heads, length, _ = query.shape
    mixed = torch.zeros(batch, heads, length, value.shape[-1], dtype=torch.float64)
    for i in range(length):
        seen = i + 1 if causal else length
        logits = torch.einsum("bhd,bhjd->bhj", query[:, :, i], key[:, :, :seen])
        if bias is not None:
            logits = logits + bias[:, i, :seen].double()
        powers = torch.exp(logits - logits.max(dim=-1, keepdim=True).values)
        mixed[:, :, i] = torch.einsum("bhj,bhjd->bhd", powers / powers.sum(-1, keepdim=True), value[:, :, :seen])
    return mixed


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 16), st.integers(1, 8), st.integers(0, 3)),
    causal=st.booleans(),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_fused_attention_is_the_explicit_form(
    sizes: tuple[int, int, int, int, int], causal: bool, biased: bool, seed: int
) -> None:
    batch, heads, length, d_head, extra = sizes  # queries and keys may be wider than values
    draw = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, batch, heads, length, d_head + extra, generator=draw)
    value = torch.randn(batch, heads, length, d_head, generator=draw)
    bias = torch.randn(heads, length, length, generator=draw) if biased else None
    expected = reference(query, key, value, bias, causal=causal)
    mixed = fused_attention(query, key, value, bias, causal=causal)
    torch.testing.assert_close(mixed.double(), expected, atol=1e-5, rtol=1e-5)
    weights = attention_weights(query, key, bias, causal=causal)
    torch.testing.assert_close((weights @ value).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(batch, heads, length))
    if causal:
        assert not weights.triu(1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_weight_leaks_ahead_in_any_type(dtype: torch.dtype) -> None:
    # CLAIMS E41: the mask is −∞, which every type has; logits of 100 would outweigh −1e4, and −1e9 is none in fp16.
    query = key = torch.full((1, 1, 4, 4), 5.0, dtype=dtype)
    value = torch.eye(4, dtype=dtype)[None, None]
    for bias in (None, torch.zeros(1, 4, 4)):
        mixed = fused_attention(query, key, value, bias, causal=True)
        assert mixed.isfinite().all()
        assert not mixed.triu(1).any()
        weights = attention_weights(query, key, bias, causal=True)
        assert weights.dtype == torch.float32
        assert not weights.triu(1).any()


def test_huge_logits_neither_overflow_nor_vanish() -> None:
    query = key = torch.eye(4)[None, None] * 1e4
    value = torch.randn(1, 1, 4, 4)
    torch.testing.assert_close(fused_attention(query, key, value, None, causal=False), value)


def test_weights_of_mixed_precision_are_those_of_full_precision() -> None:
    # Attention maps are drawn from traced calls, which on a GPU run under autocast.
    query, key = torch.randn(2, 1, 2, 16, 8) * 3
    with torch.autocast("cpu", torch.bfloat16):
        weights = attention_weights(query, key, None, causal=True)
    torch.testing.assert_close(weights, attention_weights(query, key, None, causal=True))


# --- the module ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [InverseSqrt(), Unscaled(), Inverse()], ids=lambda scale: scale.kind)
@pytest.mark.parametrize("causal", [True, False])
def test_heads_work_in_their_own_subspaces(scale: Scale, causal: bool) -> None:
    # Head h reads rows h·d_head … of the projections and writes the same columns of the output projection.
    attention = MultiHeadAttention(Shape(d_model=12, num_heads=3, num_layers=1), scale)
    x = torch.randn(2, 7, 12)
    factor = {"InverseSqrt": 4**-0.5, "Unscaled": 1.0, "Inverse": 0.25}[scale.kind]
    expected = torch.zeros(2, 7, 12, dtype=torch.float64)
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        query, key, value = (x @ m.weight[rows].T for m in (attention.query, attention.key, attention.value))
        mixed = reference(query[:, None] * factor, key[:, None], value[:, None], None, causal=causal)[:, 0]
        expected += mixed @ attention.output.weight[:, rows].T.double()
    torch.testing.assert_close(attention(x, Relation(), causal=causal).double(), expected, atol=1e-6, rtol=1e-5)


def test_attention_has_four_square_projections() -> None:
    attention = MultiHeadAttention(Shape(d_model=12, num_heads=3, num_layers=1), InverseSqrt())
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters()}
    assert shapes == {f"{name}.weight": (12, 12) for name in ("query", "key", "value", "output")}


def test_attention_is_equivariant_under_permutation() -> None:
    # CLAIMS D16
    attention = MultiHeadAttention(Shape(d_model=8, num_heads=2, num_layers=1), InverseSqrt())
    x, order = torch.randn(1, 6, 8), torch.tensor([4, 1, 5, 0, 3, 2])
    mixed = attention(x, Relation(), causal=False)
    torch.testing.assert_close(attention(x[:, order], Relation(), causal=False), mixed[:, order])


def test_the_relation_acts_on_scaled_queries_and_keys() -> None:
    # A scale must not touch what an encoding adds: ALiBi's slopes ride beside scaled queries.
    attention = MultiHeadAttention(Shape(d_model=8, num_heads=2, num_layers=1), Inverse())
    x = torch.randn(1, 5, 8)
    bias = torch.randn(2, 5, 5)
    seen: list[tuple[Tensor, Tensor]] = []

    def encode(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((query, key))
        return query, key

    trace = Trace()
    attention(x, Relation(encode=encode, bias=bias), causal=False, trace=trace)
    ((query, key),) = seen
    torch.testing.assert_close(query, attention.query(x).unflatten(-1, (2, 4)).transpose(1, 2) / 4)
    expected = (query @ key.transpose(-2, -1) + bias).softmax(-1)
    torch.testing.assert_close(trace.stacked("attention")[0], expected)
