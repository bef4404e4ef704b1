"""Attention against the articles' worked examples (with the right numbers) and explicit fp64 references."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.components.architecture import Architecture, DecoderOnly, EncoderDecoder, EncoderOnly
from harness.components.attention import (
    Attention,
    BigBird,
    Blocks,
    Everything,
    GroupedQuery,
    Latent,
    LatentAttention,
    Linear,
    LinearAttention,
    Longformer,
    MultiHead,
    MultiHeadAttention,
    MultiQuery,
    Parts,
    SlidingWindow,
    attention_weights,
    fused_attention,
)
from harness.components.cache import MemoryCache
from harness.components.feedforward import FeedForward, MoE, ReLU
from harness.components.kernel import Fastest, Math
from harness.components.norm import LayerNorm, RMSNorm
from harness.components.output_projection import NoProjection, Projection
from harness.components.position import (
    ALiBi,
    ContentRelative,
    NoPE,
    Position,
    PositionEncoding,
    Relation,
    RoPE,
    T5Bias,
    TransformerXL,
    distance_buckets,
    places,
)
from harness.components.qk_norm import NoQKNorm, QKNorm
from harness.components.scale import Inverse, InverseSqrt, LearnedTemperature, Scale, Unscaled
from harness.components.shape import Shape
from harness.cost import parameters
from harness.schema import UserError
from harness.spec import ModelSpec
from harness.trace import Trace
from harness.transformer import Transformer, build_model

CPU = torch.device("cpu")
SHAPE = Shape(d_model=16, num_heads=4, num_layers=1, d_head=4)
PARTS = Parts(SHAPE, InverseSqrt(), NoQKNorm(), Projection(), dropout=0.0)


def module_of(level: Attention, parts: Parts = PARTS) -> Any:
    """Any: tests look inside."""
    return level.build(parts)


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
    attention = module_of(MultiHead(), replace(PARTS, shape=Shape(d_model=4, num_heads=1, num_layers=1, d_head=4)))
    with torch.no_grad():
        for projection, rows in ((attention.query, QUERY), (attention.key, KEY), (attention.value, VALUE)):
            projection.weight[:, :3] = rows.T
        attention.output.weight.copy_(torch.eye(4))
    trace = Trace()
    mixed = attention(torch.eye(4)[None, :3], places(3), causal=False, trace=trace)
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
    # CLAIMS E15: the fused kernel is exact.
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


def test_minus_1e9_is_a_mask_in_wide_types_alone() -> None:
    # CLAIMS E41: fp16 ends at 65 504.
    logits, hidden = torch.full((1, 2), 100.0), torch.tensor([[False, True]])
    for dtype in (torch.float32, torch.bfloat16):
        assert logits.to(dtype).masked_fill(hidden, -1e9).softmax(-1).tolist() == [[1, 0]]
    with pytest.raises(RuntimeError, match="overflow"):
        logits.half().masked_fill(hidden, -1e9)


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
    attention = module_of(MultiHead(), replace(PARTS, shape=Shape(12, 3, 1, d_head=4), scale=scale))
    x = torch.randn(2, 7, 12)
    factor = {"InverseSqrt": 4**-0.5, "Unscaled": 1.0, "Inverse": 0.25}[scale.kind]
    expected = torch.zeros(2, 7, 12, dtype=torch.float64)
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        query, key, value = (x @ m.weight[rows].T for m in (attention.query, attention.key, attention.value))
        mixed = reference(query[:, None] * factor, key[:, None], value[:, None], None, causal=causal)[:, 0]
        expected += mixed @ attention.output.weight[:, rows].T.double()
    torch.testing.assert_close(attention(x, places(7), causal=causal).double(), expected, atol=1e-6, rtol=1e-5)


def test_attention_has_four_square_projections() -> None:
    attention = module_of(MultiHead(), replace(PARTS, shape=Shape(12, 3, 1, d_head=4)))
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters()}
    assert shapes == {f"{name}.weight": (12, 12) for name in ("query", "key", "value", "output")}


def test_attention_is_equivariant_under_permutation() -> None:
    # CLAIMS D16
    attention = module_of(MultiHead())
    x, order = torch.randn(1, 6, 16), torch.tensor([4, 1, 5, 0, 3, 2])
    mixed = attention(x, places(6), causal=False)
    torch.testing.assert_close(attention(x[:, order], places(6), causal=False), mixed[:, order])


def test_the_relation_acts_on_scaled_queries_and_keys() -> None:
    # A scale must not touch what an encoding adds: ALiBi's slopes ride beside scaled queries.
    attention = module_of(MultiHead(), replace(PARTS, shape=Shape(8, 2, 1, d_head=4), scale=Inverse()))
    x = torch.randn(1, 5, 8)
    bias = torch.randn(2, 5, 5)
    seen: list[tuple[Tensor, Tensor]] = []

    def encode(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((query, key))
        return query, key

    trace = Trace()
    attention(x, replace(places(5), encode=encode, bias=lambda query, at, of: bias), causal=False, trace=trace)
    ((query, key),) = seen
    torch.testing.assert_close(query, attention.query(x).unflatten(-1, (2, 4)).transpose(1, 2) / 4)
    expected = (query @ key.transpose(-2, -1) + bias).softmax(-1)
    torch.testing.assert_close(trace.stacked("attention")[0], expected)


def test_multi_head_attention_is_torchs_own() -> None:
    ours, theirs = module_of(MultiHead()), nn.MultiheadAttention(16, 4, bias=False, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.out_proj.weight.copy_(ours.output.weight)
    x, memory = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    real = torch.arange(5) < torch.tensor([[3], [5]])
    trace = Trace()
    torch.testing.assert_close(ours(x, places(7), causal=False, trace=trace), (mixed := theirs(x, x, x))[0])
    torch.testing.assert_close(trace.stacked("attention")[0].mean(1), mixed[1])
    read = ours(x, places(0), causal=False, memory=memory, real=real, trace=trace)
    torch.testing.assert_close(read, (mixed := theirs(x, memory, memory, key_padding_mask=~real))[0])
    torch.testing.assert_close(trace.stacked("cross_attention")[0].mean(1), mixed[1])


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()], ids=lambda norm: norm.kind)
def test_queries_and_keys_are_normalised_before_scale_and_positions(norm: RMSNorm | LayerNorm) -> None:
    parts = replace(PARTS, qk_norm=QKNorm(norm=norm), scale=LearnedTemperature(initial=3.0))
    attention, x, trace = module_of(MultiHead(), parts).double(), torch.randn(2, 5, 16).double(), Trace()
    with torch.no_grad():
        for parameter in attention.parameters():
            nn.init.normal_(parameter)
    attention(x, rope := encoded(RoPE(), 5, causal=True), causal=True, trace=trace)
    query, key = (m(x).unflatten(-1, (4, 4)).transpose(1, 2) for m in (attention.query, attention.key))

    def normalised(t: Tensor, gain: Tensor, bias: Tensor | float) -> Tensor:
        t = t - t.mean(-1, keepdim=True) if norm == LayerNorm() else t
        return t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias

    query = normalised(query, attention.query_norm.weight, getattr(attention.query_norm, "bias", 0.0))
    key = normalised(key, attention.key_norm.weight, getattr(attention.key_norm, "bias", 0.0))
    query, key = rope.encode(query * 3 / 2 * attention.scale.temperature.exp()[:, None, None], key)
    logits = (query @ key.mT).masked_fill(torch.ones(5, 5).triu(1) > 0, float("-inf"))
    torch.testing.assert_close(trace.stacked("attention")[0].double(), logits.softmax(-1), atol=1e-6, rtol=1e-5)


def test_normalised_logits_do_not_grow_with_the_weights() -> None:
    attention, x, trace = module_of(MultiHead(), replace(PARTS, qk_norm=QKNorm())), torch.randn(2, 5, 16), Trace()
    attention(x, places(5), causal=True, trace=trace)
    with torch.no_grad():
        attention.query.weight *= 100
        attention.key.weight *= 100
    attention(x, places(5), causal=True, trace=trace)
    torch.testing.assert_close(*trace.kept["attention"], atol=1e-3, rtol=0)


def test_without_an_output_projection_heads_stand_side_by_side() -> None:
    plain, projected = module_of(MultiHead(), replace(PARTS, output_projection=NoProjection())), module_of(MultiHead())
    projected.load_state_dict({**plain.state_dict(), "output.weight": torch.eye(16)})
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(plain(x, places(5), causal=True), projected(x, places(5), causal=True))
    assert parameters(plain) == parameters(projected) - 16 * 16


# --- shared keys -----------------------------------------------------------------------------------------------------


def test_as_many_groups_as_heads_are_multi_head_attention() -> None:
    grouped, plain = module_of(GroupedQuery(num_groups=4)), module_of(MultiHead())
    grouped.load_state_dict(plain.state_dict())
    x = torch.randn(2, 7, 16)
    assert torch.equal(grouped(x, places(7), causal=True), plain(x, places(7), causal=True))


def test_one_group_is_multi_query_attention() -> None:
    grouped, multi = module_of(GroupedQuery(num_groups=1)), module_of(MultiQuery())
    grouped.load_state_dict(multi.state_dict())
    x = torch.randn(2, 7, 16)
    assert torch.equal(grouped(x, places(7), causal=True), multi(x, places(7), causal=True))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_of_a_group_read_the_same_keys(groups: int) -> None:
    # Equal to multi-head attention whose weights repeat each group's for num_heads / groups heads in a row.
    grouped, plain = module_of(GroupedQuery(num_groups=groups)), module_of(MultiHead())
    state = grouped.state_dict()
    for name in ("key.weight", "value.weight"):
        assert state[name].shape == (4 * groups, 16)
        state[name] = state[name].unflatten(0, (groups, 4)).repeat_interleave(4 // groups, dim=0).flatten(0, 1)
    plain.load_state_dict(state)
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(grouped(x, places(7), causal=True), plain(x, places(7), causal=True))


# --- every level against an explicit n×n -----------------------------------------------------------------------------

FULL = [MultiHead(), GroupedQuery(num_groups=2), MultiQuery(), Latent(d_latent=6, d_rope=4)]
SPARSE = [
    SlidingWindow(window=1),
    SlidingWindow(window=4),
    Longformer(window=4, num_global=2),
    Longformer(window=2, num_global=5),
    BigBird(window=4, num_global=1, num_random=2),
    BigBird(window=2, num_global=0, num_random=3),
]
SOFTMAX = [*FULL, *SPARSE]
EVERY = [*SOFTMAX, Linear()]
POSITIONS = [NoPE(), RoPE(base=50.0), ALiBi(), T5Bias(num_buckets=8, max_distance=16), TransformerXL()]


def named(level: Attention | Position) -> str:
    fields = level.document()
    return "-".join([level.kind, *(str(value) for name, value in fields.items() if name != "kind")])


def encoding(position: Position, level: Attention | None = None) -> PositionEncoding:
    made = position.build(SHAPE if level is None else level.rotated(SHAPE)).double().eval()
    if isinstance(made, ContentRelative):  # u and v start at zero, which would hide them
        nn.init.normal_(made.content.weight)
        nn.init.normal_(made.place.weight)
    return made


def related(made: PositionEncoding, length: int, *, causal: bool) -> Relation:
    at = made.positions(length, CPU)
    return made.in_layer(made.relation(at, at, causal=causal, cached=False), 0)


def encoded(position: Position, length: int, *, causal: bool) -> Relation:
    return related(encoding(position), length, causal=causal)


def built(level: Attention, parts: Parts = PARTS) -> Any:
    """In fp64, with its random keys drawn."""
    module = module_of(level, parts).double().eval()
    for part in module.modules():
        if isinstance(part, Blocks):
            part.draw_buffers()
    return module


def logits_by_hand(position: Position, made: Any, query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    """q·k with what each encoding's paper does to it, `(B, H, T, T)` from scaled queries."""
    length, width = query.shape[-2:]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    match position:
        case RoPE():
            frequency = position.base ** -(torch.arange(0, width, 2) / width).double()
            turn = torch.exp(1j * torch.arange(length)[:, None] * frequency)
            query, key = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn for x in (query, key))
            return (query @ key.mH).real
        case ALiBi():
            slopes = 2.0 ** (-8 * torch.arange(1, 5) / 4)
            return query @ key.mT - slopes[:, None, None] * distance.abs()
        case T5Bias():  # its buckets are held against the paper's code in test_position.py
            buckets = distance_buckets(distance, position.num_buckets, position.max_distance, causal=causal)
            return query @ key.mT + made.table.weight[buckets].permute(2, 0, 1)
        case TransformerXL():
            angle = distance[..., None].double() * 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
            codes = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)  # (T, T, d_model)
            relative = (codes @ made.projections[0].weight.T).unflatten(-1, (4, width))
            content = (query + made.content.weight[:, None]) @ key.mT
            return content + torch.einsum("bhid,ijhd->bhij", query + made.place.weight[:, None], relative)
        case _:
            return query @ key.mT


def sees(level: Attention, module: Any, length: int, *, causal: bool) -> Tensor:
    """`(T, T)`: which keys each query sees, by the papers' words, a pair at a time."""

    def pair(i: int, j: int) -> bool:
        if causal and j > i:
            return False
        if isinstance(level, SlidingWindow | Longformer | BigBird) and abs(i - j) >= level.window:
            first = getattr(level, "num_global", 0)
            return j < first or (i < first and not causal) or j in drawn(i)
        return True

    def drawn(i: int) -> set[int]:
        if not isinstance(level, BigBird):
            return set()
        room = i // level.window * level.window if causal else length
        draws = module.pattern.draws[i // level.window].tolist()
        return {int(draw * room) for draw in draws} if room else set()

    return torch.tensor([[pair(i, j) for j in range(length)] for i in range(length)])


def heads_by_hand(level: Attention, module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values; and the parts of queries and keys that positions act on, `(B, H, T, d)`."""

    def split(rows: Tensor, heads: int) -> Tensor:
        return (x @ rows.T).unflatten(-1, (heads, -1)).transpose(1, 2)

    w = {name.removesuffix(".weight"): p for name, p in module.named_parameters()}
    if isinstance(level, Latent):
        query, place = split(w["query"], 4).split([4, level.d_rope], dim=-1)
        compressed = x @ w["latent"].T
        latent = compressed / (compressed.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["latent_norm"]
        key, value = (latent[:, None] @ w[name].unflatten(0, (4, 4)).mT for name in ("key_up", "value_up"))
        factor = (4 + level.d_rope) ** -0.5
        return query * factor, key, value, place * factor, split(w["shared_key"], 1).expand(-1, 4, -1, -1)
    groups = w["key"].shape[0] // 4
    key, value = (split(w[name], groups).repeat_interleave(4 // groups, dim=1) for name in ("key", "value"))
    query = split(w["query"], 4) / 2
    return torch.zeros_like(query), torch.zeros_like(key), value, query, key


def by_definition(
    level: Attention, module: Any, position: Position, made: Any, x: Tensor, *, causal: bool, real: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The level's output and its weights `(B, H, T, T)`: every logit made, then masked."""
    query, key, value, turning_query, turning_key = heads_by_hand(level, module, x)
    logits = query @ key.mT + logits_by_hand(position, made, turning_query, turning_key, causal=causal)
    seen = sees(level, module, x.shape[1], causal=causal)
    if real is not None:
        seen = seen & real[:, None, None]
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2) @ module.output.weight.T, weights


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: position.kind)
@pytest.mark.parametrize("level", SOFTMAX, ids=named)
def test_every_level_is_its_definition(level: Attention, position: Position, causal: bool) -> None:
    module, made = built(level), encoding(position, level)
    for length in (1, 3, 8, 11):  # shorter than the window, a multiple of it, neither
        x, trace = torch.randn(2, length, 16).double().requires_grad_(), Trace()
        mixed = module(x, related(made, length, causal=causal), causal=causal, trace=trace)
        expected, weights = by_definition(level, module, position, made, x, causal=causal)
        torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(trace.stacked("attention")[0].double(), weights, atol=1e-5, rtol=1e-5)
        direction = torch.randn_like(mixed)
        gradient, wanted = (torch.autograd.grad((y * direction).sum(), x)[0] for y in (mixed, expected))
        torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: position.kind)
@pytest.mark.parametrize("level", SOFTMAX, ids=named)
def test_padding_is_seen_by_nobody(level: Attention, position: Position) -> None:
    module, made = built(level), encoding(position, level)
    x = torch.randn(3, 10, 16).double().requires_grad_()
    real = torch.arange(10) < torch.tensor([[10], [3], [7]])  # a last block of the window's with padding alone
    mixed = module(x, related(made, 10, causal=False), causal=False, real=real)
    expected, _ = by_definition(level, module, position, made, x, causal=False, real=real)
    torch.testing.assert_close(mixed[real], expected[real], atol=1e-5, rtol=1e-5)
    mixed[real].square().sum().backward()
    assert x.grad is not None
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())
    assert x.grad.isfinite().all()
    assert not x.grad[~real].any()


@pytest.mark.parametrize("level", SPARSE, ids=named)
def test_no_row_is_masked_whole(level: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    # Neither a query in padding nor one that fills up a block: kernels differ in what they make of such a row.
    masks: list[Tensor] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def spy(*args: Any, **named: Any) -> Tensor:
        masks.append(named["attn_mask"])
        return fused(*args, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    real = torch.arange(10) < torch.tensor([[10], [3], [7]])
    built(level)(torch.randn(3, 10, 16).double(), places(10), causal=False, real=real)
    assert all(mask.any(-1).all() for mask in masks)


@pytest.mark.parametrize("level", [level for level in EVERY if not isinstance(level, BigBird)], ids=named)
def test_padding_changes_nothing_for_real_tokens(level: Attention) -> None:
    # BigBird's encoder draws keys among all tokens, padding included.
    module, made = built(level), encoding(NoPE())
    x = torch.randn(1, 10, 16).double()
    real = torch.arange(10)[None] < 7
    padded = module(x, related(made, 10, causal=False), causal=False, real=real)
    alone = module(x[:, :7], related(made, 7, causal=False), causal=False)
    torch.testing.assert_close(padded[:, :7], alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("level", EVERY, ids=named)
def test_outputs_depend_on_the_keys_that_are_seen_and_on_no_other(level: Attention, causal: bool) -> None:
    # CLAIMS D19 among them: exactly no gradient from what lies ahead.
    module, x = built(level), torch.randn(11, 16).double()

    def mixed(x: Tensor) -> Tensor:
        return module(x[None], places(11), causal=causal)[0]

    touched = torch.autograd.functional.jacobian(mixed, x, vectorize=True).abs().sum((1, 3)) > 0
    assert torch.equal(touched, sees(level, module, 11, causal=causal))


@pytest.mark.parametrize("level", EVERY, ids=named)
def test_weights_drop_out_in_training_only(level: Attention) -> None:
    if isinstance(level, Linear):
        with pytest.raises(UserError, match="no weights to drop; use 0"):
            level.check(replace(PARTS, dropout=0.5), NoPE())
        return
    module, x = built(level, replace(PARTS, dropout=0.5)), torch.randn(1, 12, 16).double()
    still = module(x, places(12), causal=True)
    assert torch.equal(module(x, places(12), causal=True), still)
    module.train()
    drawn = torch.stack([module(x, places(12), causal=True) for _ in range(200)])
    assert drawn.std(0).min() > 0
    assert ((drawn.mean(0) - still).abs() < 5 * drawn.std(0) / 200**0.5).all()  # right in the mean


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_reach_is_layers_times_window(layers: int) -> None:
    # CLAIMS E16. |i − j| < w hands on w − 1 tokens a layer.
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=layers, attention=SlidingWindow(window=4), position=NoPE())
    model, read = build_model(spec, 9, seed=0), torch.arange(16)[None] % 9
    changed = read.clone()
    changed[0, 2] = 8
    touched = (model(changed) != model(read)).any(-1)[0].nonzero().flatten().tolist()
    assert touched == list(range(2, 2 + layers * 3 + 1))


def test_random_keys_come_from_the_seed_and_the_modules_name() -> None:
    spec = ModelSpec(d_model=16, num_heads=2, attention=BigBird(window=4))

    def draws(seed: int) -> list[Tensor]:
        return [part.draws for part in build_model(spec, 9, seed=seed).modules() if isinstance(part, Blocks)]

    first, again, other = draws(0), draws(0), draws(1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_random_keys_stay_those_of_the_model() -> None:
    spec = ModelSpec(d_model=16, num_heads=2, attention=BigBird(window=4))
    model = build_model(spec, 9, seed=0)
    copy = Transformer(spec, 9)
    copy.load_state_dict(model.state_dict())
    read = torch.arange(30)[None] % 9
    assert torch.equal(copy(read), model(read))


def test_a_drawn_key_lies_before_its_block_and_anywhere_in_an_encoder() -> None:
    module = built(BigBird(window=4, num_global=0, num_random=64))
    pattern, at = module.pattern, torch.arange(32)
    causal, both = (pattern._random(at // 4, 32, causal=c) for c in (True, False))
    assert (causal[:4] == -1).all()
    assert (causal[4:] < (at[4:] // 4 * 4)[:, None]).all()
    assert causal[4:].min() == 0
    assert set(both.flatten().tolist()) == set(range(32))
    assert torch.equal(pattern._random(at + Blocks.ROWS, 32, causal=False), pattern._random(at, 32, causal=False))


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tensors(made))])
        return made


def tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, tuple | list):
        for part in made:
            yield from tensors(part)


def largest(level: Attention, position: Position, length: int, *, causal: bool) -> int:
    """Forwards and backwards."""
    module, made = built(level), encoding(position)
    x = torch.randn(1, length, 16).double().requires_grad_()
    with Largest() as seen:
        module(x, related(made, length, causal=causal), causal=causal).sum().backward()
    return seen.elements


LONG = [SlidingWindow(window=8), Longformer(window=8, num_global=2), BigBird(window=8), Linear()]
# Transformer-XL's logits by distance are T×T, whatever is seen of them; Linear has no logits to bias.
LONG_CASES = [(level, position) for level in LONG for position in POSITIONS[: 4 if level.has_logits else 2]]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("level", "position"), LONG_CASES, ids=lambda level: level.kind)
def test_memory_grows_as_the_sequence_not_as_its_square(level: Attention, position: Position, causal: bool) -> None:
    # CLAIMS E16, E17
    assert growth(level, position, causal=causal) <= 2.2


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("level", [MultiHead(), GroupedQuery(), MultiQuery(), Latent()], ids=lambda level: level.kind)
def test_flash_stores_no_scores(level: Attention, causal: bool) -> None:
    # CLAIMS E15
    assert growth(level, NoPE(), causal=causal) <= 2.2


def growth(level: Attention, position: Position, *, causal: bool) -> float:
    """The largest tensor at 1024 tokens over that at 512."""
    longer, shorter = (largest(level, position, length, causal=causal) for length in (1024, 512))
    return longer / shorter


def test_memory_of_explicit_weights_grows_as_the_square() -> None:
    # What the test above would see if it saw it.
    longer, shorter = (largest(MultiHead(), T5Bias(), length, causal=True) for length in (256, 128))
    assert longer / shorter == 4


# --- linear attention ------------------------------------------------------------------------------------------------


def linear_by_hand(module: Any, x: Tensor, position: Position, *, causal: bool) -> Tensor:
    """Σ_j (φ(q_i)·φ(k_j)) v_j / Σ_j φ(q_i)·φ(k_j), every pair made; rotary positions in the numerator alone."""

    def split(m: nn.Linear) -> Tensor:
        return m(x).unflatten(-1, (4, 4)).transpose(1, 2)

    def phi(t: Tensor) -> Tensor:
        return torch.where(t > 0, t + 1, t.exp())

    query, key, value = phi(split(module.query) / 2), phi(split(module.key)), split(module.value)
    above = logits_by_hand(position, None, query, key, causal=causal)
    below = query @ key.mT
    if causal:
        above, below = above.tril(), below.tril()
    return ((above @ value) / below.sum(-1, keepdim=True)).transpose(1, 2).flatten(2) @ module.output.weight.T


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("position", [NoPE(), RoPE(base=50.0)], ids=lambda position: position.kind)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_linear_attention_is_the_sum_with_its_normaliser(length: int, position: Position, causal: bool) -> None:
    # CLAIMS E17: the article's formula drops the normaliser. 64 tokens are a chunk.
    module, x = built(Linear()), torch.randn(2, length, 16).double().requires_grad_()
    mixed = module(x, encoded(position, length, causal=causal), causal=causal)
    expected = linear_by_hand(module, x, position, causal=causal)
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn_like(mixed)
    gradient, wanted = (torch.autograd.grad((y * direction).sum(), x)[0] for y in (mixed, expected))
    torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("position", [NoPE(), RoPE()], ids=lambda position: position.kind)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_traced_weights_of_linear_attention_mix_its_values(position: Position, causal: bool) -> None:
    module, trace = built(Linear(), replace(PARTS, output_projection=NoProjection())), Trace()
    x = torch.randn(2, 70, 16).double()
    mixed = module(x, encoded(position, 70, causal=causal), causal=causal, trace=trace)
    weights = trace.stacked("attention")[0].double()
    value = module.value(x).unflatten(-1, (4, 4)).transpose(1, 2)
    torch.testing.assert_close(mixed, (weights @ value).transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)
    if position == NoPE():
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 70).double(), atol=1e-5, rtol=0)


def test_linear_attention_divides_by_no_zero() -> None:
    # elu(−20) + 1 is 0 in fp32; a query of such numbers sees by their ratios all the same.
    module = module_of(Linear(), replace(PARTS, scale=Unscaled()))
    with torch.no_grad():
        module.query.weight.copy_(torch.randn(16, 16) * 1e3)
    x = torch.randn(4, 9, 16, requires_grad=True)
    for causal in (True, False):
        mixed = module(x, places(9), causal=causal)
        mixed.sum().backward()
        assert mixed.isfinite().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_linear_attention_sums_in_full_precision(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A bf16 sum stops counting after 256 terms of a size.
    module, calls = module_of(Linear()), []
    product = module._product

    def spy(*inputs: Any) -> tuple[Tensor, Tensor]:
        calls.append((inputs, made := product(*inputs)))
        return made

    monkeypatch.setattr(module, "_product", spy)
    with torch.autocast("cpu", torch.bfloat16):
        module(torch.randn(1, 100, 16), places(100), causal=causal)
    for inputs, made in calls:
        torch.testing.assert_close(made, product(*inputs), atol=0, rtol=0)
    assert len(calls) == 2


def test_linear_attention_does_not_approximate_a_softmax() -> None:
    # CLAIMS E17. A sharper query makes a softmax choose; elu + 1 keeps its ratios, bounded by the keys'.
    parts = replace(PARTS, scale=Unscaled(), output_projection=NoProjection())
    linear, softmax = built(Linear(), parts), built(MultiHead(), parts)
    softmax.load_state_dict(linear.state_dict())
    x = torch.randn(1, 6, 16).double()
    sharpest = {}
    for factor in (1.0, 1e3):
        with torch.no_grad():
            for module in (linear, softmax):
                module.query.weight.copy_(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)) * factor)
                trace = Trace()
                module(x, places(6), causal=False, trace=trace)
                sharpest[type(module), factor] = trace.stacked("attention")[0].amax(-1)
    assert (sharpest[MultiHeadAttention, 1e3] > 0.99).all()
    assert sharpest[LinearAttention, 1e3].median() < 0.6
    assert (sharpest[LinearAttention, 1.0] - sharpest[MultiHeadAttention, 1.0]).abs().max() > 0.2


@pytest.mark.parametrize("position", [ALiBi(), T5Bias(), TransformerXL()], ids=lambda position: position.kind)
def test_linear_attention_has_no_logits_to_bias(position: Position) -> None:
    with pytest.raises(UserError, match=f"attention = Linear has no logits for position = {position.kind} to bias"):
        Linear().check(PARTS, position)


# --- latent attention ------------------------------------------------------------------------------------------------


def no_keys_made(*_: Any) -> None:
    raise AssertionError("a key was made")


@pytest.mark.parametrize("sources", [1, 3, 9])
def test_absorbed_latents_give_what_keys_and_values_give(sources: int) -> None:
    # Decoding, a token at a time with a cache, multiplies W_UK and W_UV into query and result.
    level = Latent(d_latent=6, d_rope=4)
    module, x, memory = built(level), torch.randn(2, 5, 16).double(), torch.randn(2, sources, 16).double()
    query, own_key, own_value, place, own_shared = heads_by_hand(level, module, x)
    _, key, value, _, shared = heads_by_hand(level, module, memory)

    def by_hand(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        weights = logits.softmax(-1)
        return module.output((weights @ values).transpose(1, 2).flatten(2)), weights

    across, across_weights = by_hand(query @ key.mT + place @ shared.mT, value)
    ahead = torch.ones(5, 5).triu(1) > 0
    own, _ = by_hand((query @ own_key.mT + place @ own_shared.mT).masked_fill(ahead, float("-inf")), own_value)
    trace = Trace()
    torch.testing.assert_close(module(x, places(0), causal=False, memory=memory, trace=trace), across)
    torch.testing.assert_close(trace.stacked("cross_attention")[0].double(), across_weights, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(module(x, places(5), causal=True), own)

    for up in (module.key_up, module.value_up):
        up.register_forward_hook(no_keys_made)
    of_memory, of_own = MemoryCache(), module.cache(5)
    for t in range(5):
        token, trace = x[:, t : t + 1], Trace()
        read = module(token, places(0), causal=False, memory=memory, cache=of_memory, trace=trace)
        torch.testing.assert_close(read, across[:, t : t + 1])
        weights = trace.stacked("cross_attention")[0].double()
        torch.testing.assert_close(weights, across_weights[:, :, t : t + 1], atol=1e-6, rtol=1e-5)
        at = torch.arange(t + 1)
        torch.testing.assert_close(module(token, Relation(at[t:], at), causal=True, cache=of_own), own[:, t : t + 1])


def test_latent_attention_has_these_parameters() -> None:
    module = module_of(Latent(d_latent=6, d_rope=4))
    assert isinstance(module, LatentAttention)
    shapes = {name.removesuffix(".weight"): tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {
        "query": (4 * (4 + 4), 16),
        "latent": (6, 16),
        "latent_norm": (6,),
        "shared_key": (4, 16),
        "key_up": (16, 6),
        "value_up": (16, 6),
        "output": (16, 16),
    }


# --- masks of the wrong shape ----------------------------------------------------------------------------------------


def test_a_mask_without_a_dimension_for_heads_masks_other_heads() -> None:
    # CLAIMS E40, in torch as the derivation writes it: to hide all of sequence 1 hides head 1 of every sequence.
    logits, hidden = torch.zeros(2, 2, 3, 3), torch.tensor([False, True])[:, None, None].expand(2, 3, 3)
    assert logits.masked_fill(hidden, -1)[:, :, 0, 0].tolist() == [[0, -1], [0, -1]]
    assert logits.masked_fill(hidden[:, None], -1)[:, :, 0, 0].tolist() == [[0, 0], [-1, -1]]
    with pytest.raises(RuntimeError, match="must match the size"):  # more sequences than heads show it at least
        torch.zeros(3, 2, 3, 3).masked_fill(torch.ones(3, 3, 3, dtype=torch.bool), -1)


def test_a_mask_without_a_dimension_for_heads_is_refused() -> None:
    # CLAIMS E40: (B, T, T) would be read as (H, T, T), and where B = H nothing would show.
    query, key, value = torch.randn(3, 2, 2, 5, 4)
    seen = torch.rand(2, 5, 5) > 0.3
    seen |= torch.eye(5, dtype=torch.bool)
    right = reference_masked(query, key, value, seen)
    torch.testing.assert_close(fused_attention(query, key, value, causal=False, visible=seen[:, None]), right)
    for heads_of in (fused_attention, attention_weights):
        given = (query, key, value) if heads_of is fused_attention else (query, key)
        with pytest.raises(UserError, match=r"^visible has the shape \(2, 5, 5\): .* use four, as in \(B, 1, T, K\)$"):
            heads_of(*given, causal=False, visible=seen)  # type: ignore[operator]


def reference_masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Sequence by sequence, head by head, query by query."""
    mixed = torch.zeros_like(value)
    for b, h, t in itertools.product(range(2), range(2), range(5)):
        keys = seen[b, t].nonzero().flatten()
        powers = (key[b, h, keys] @ query[b, h, t]).exp()
        mixed[b, h, t] = (powers / powers.sum()) @ value[b, h, keys]
    return mixed


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderOnly(), EncoderDecoder()], ids=lambda level: level.kind)
def test_a_model_takes_a_mark_a_token_and_no_mask(architecture: Architecture) -> None:
    # CLAIMS E40: two sequences, two heads.
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=1, architecture=architecture)
    model, tokens = build_model(spec, 10, seed=0), torch.randint(10, (2, 5))
    source = torch.randint(10, (2, 4)) if architecture.has_encoder() else None
    mask = torch.ones(2, 5, 5, dtype=torch.bool)
    with pytest.raises(UserError, match=r"^real has the shape \(2, 5, 5\), its tokens have \(2, 5\): .* one mark, "):
        model(tokens, source, mask)
    if source is not None:
        with pytest.raises(UserError, match=r"^source_real has the shape \(2, 5, 4\), its tokens have \(2, 4\): "):
            model(tokens, source, None, mask[:, :, :4])


@pytest.mark.parametrize("feedforward", [ReLU(), MoE()], ids=lambda level: level.kind)
@pytest.mark.parametrize(
    ("marks", "kind"), [(Tensor.float, "torch.float32"), (Tensor.long, "torch.int64"), (Tensor.tolist, "list")]
)
def test_marks_of_padding_are_true_or_false(marks: Any, kind: str, feedforward: FeedForward) -> None:
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=1, architecture=EncoderDecoder(), feedforward=feedforward)
    model, tokens, real = build_model(spec, 10, seed=0), torch.randint(10, (2, 5)), torch.arange(5).expand(2, -1) < 3
    with pytest.raises(UserError, match=rf"^real is of the type {kind}: give a boolean tensor, "):
        model(tokens, tokens, marks(real))
    with pytest.raises(UserError, match=rf"^source_real is of the type {kind}: give a boolean tensor, "):
        model(tokens, tokens, real, marks(real))


# --- what cannot be combined -----------------------------------------------------------------------------------------


def test_groups_divide_heads() -> None:
    with pytest.raises(UserError, match="num_groups = 3 does not divide num_heads = 4; choose a divisor"):
        GroupedQuery(num_groups=3).check(PARTS, NoPE())


def test_latents_are_normalised_already() -> None:
    with pytest.raises(UserError, match="qk_norm = QKNorm: attention = Latent normalises its latent instead"):
        Latent().check(replace(PARTS, qk_norm=QKNorm()), NoPE())


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderOnly()], ids=lambda level: level.kind)
@pytest.mark.parametrize(
    "position", [T5Bias(num_buckets=8, max_distance=20), TransformerXL(), ALiBi()], ids=lambda p: p.kind
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_bias_in_strips_is_the_whole_bias(
    architecture: Architecture, position: Position, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=2, position=position, architecture=architecture)
    model = build_model(spec, 10, seed=0).double()
    tokens = torch.randint(10, (2, 37))
    real = torch.arange(37)[None] < torch.tensor([[37], [30]]) if padded else None

    def results(strip: int) -> list[Tensor]:
        monkeypatch.setattr(Everything, "STRIP", strip)
        model.zero_grad()
        logits = model(tokens, None, real)
        (logits * torch.arange(10)).sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for whole, strips in zip(results(1000), results(8), strict=True):
        torch.testing.assert_close(strips, whole, atol=1e-10, rtol=1e-10)


def test_strips_are_computed_again_on_the_kernel_of_their_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Everything, "STRIP", 8)
    spec = ModelSpec(d_model=16, num_heads=2, position=ALiBi(), architecture=EncoderOnly())
    model, tokens = build_model(spec, 10, seed=0), torch.randint(10, (2, 20))
    gradients = []
    for kernel in (Math(), Fastest()):
        model.zero_grad()
        with kernel.context():
            logits = model(tokens)
        logits.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for explicit, fastest in zip(*gradients, strict=True):
        torch.testing.assert_close(explicit, fastest, atol=1e-3, rtol=1e-3)
