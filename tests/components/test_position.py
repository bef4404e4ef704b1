"""Laws of the position encodings, each against an independent reference."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.components.attention import attention_weights, fused_attention
from harness.components.init import initialise
from harness.components.position import (
    ALiBi,
    Learned,
    NoPE,
    Position,
    PositionEncoding,
    RoPE,
    Sinusoidal,
    T5Bias,
    UnsupportedLength,
    alibi_slopes,
    distance_buckets,
)
from harness.components.shape import Shape
from harness.cost import parameters
from harness.schema import UserError
from harness.spec import ModelSpec
from harness.transformer import Transformer, build_model

CPU = torch.device("cpu")
VOCABULARY = 20
ENCODINGS = [Sinusoidal(), Learned(max_length=32), RoPE(), ALiBi(), T5Bias(num_buckets=8, max_distance=16)]


def named(level: Position) -> str:
    return level.kind


def encoding(level: Position, d_head: int, num_heads: int = 1) -> PositionEncoding:
    return level.build(Shape(d_model=d_head * num_heads, num_heads=num_heads, num_layers=1))


def model(position: Position, *, causal: bool = True, num_layers: int = 2) -> Transformer:
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=num_layers, position=position)
    made = Transformer(spec, VOCABULARY, causal=causal)
    initialise(made, seed=0)
    return made.double().eval()


def tokens(length: int, batch: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


# --- none -----------------------------------------------------------------------------------------------------------


def test_nope_adds_nothing() -> None:
    embeddings, query, key = torch.randn(2, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 8)
    none = encoding(NoPE(), 8)
    relation = none.relation(5, causal=True, device=CPU)
    assert torch.equal(none.add(embeddings), embeddings)
    assert all(map(torch.equal, relation.encode(query, key), (query, key)))
    assert relation.bias is None
    assert not none.state_dict()
    assert NoPE().codes(5, 8) is None
    assert NoPE().limit() is None


def test_an_encoder_without_positions_is_permutation_equivariant() -> None:
    # CLAIMS D16: equivariant, not invariant. Shuffled tokens give shuffled outputs.
    encoder, read = model(NoPE(), causal=False), tokens(8)
    order = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
    logits = encoder(read)
    torch.testing.assert_close(encoder(read[:, order]), logits[:, order])
    assert not torch.allclose(logits[:, order], logits, atol=1e-2)


@pytest.mark.parametrize("level", ENCODINGS, ids=named)
def test_every_encoding_breaks_permutation_equivariance(level: Position) -> None:
    encoder, read = model(level, causal=False), tokens(8)
    order = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
    assert (encoder(read[:, order]) - encoder(read)[:, order]).abs().max() > 1e-2


def test_a_causal_decoder_without_positions_needs_two_layers_to_tell_orders_apart() -> None:
    # CLAIMS E04: the mask alone carries order, but not within one layer (Haviv et al. 2022).
    read = torch.tensor([[4, 5, 6, 7, 8]])
    shuffled = torch.tensor([[6, 4, 7, 5, 8]])
    shallow, deep = model(NoPE(), num_layers=1), model(NoPE(), num_layers=2)
    torch.testing.assert_close(shallow(read)[:, -1], shallow(shuffled)[:, -1])
    assert (deep(read)[:, -1] - deep(shuffled)[:, -1]).abs().max() > 1e-2


# --- sinusoidal -----------------------------------------------------------------------------------------------------


def sinusoid(position: int, dimension: int, d_model: int, base: float) -> float:
    """The paper's formula, one number at a time in double precision."""
    angle = position / base ** (2 * (dimension // 2) / d_model)
    return math.cos(angle) if dimension % 2 else math.sin(angle)


@given(st.integers(1, 8), st.floats(2, 1e6), st.integers(0, 300))
def test_the_sinusoidal_table_is_the_formula(pairs: int, base: float, position: int) -> None:
    codes = Sinusoidal(base=base).codes(position + 1, 2 * pairs)
    expected = torch.tensor([sinusoid(position, i, 2 * pairs, base) for i in range(2 * pairs)])
    # fp32 holds an angle of 300 radians to 3e-5
    torch.testing.assert_close(codes[position], expected, atol=6e-5, rtol=0)


def test_the_sinusoidal_table_is_what_is_added() -> None:
    added = encoding(Sinusoidal(base=50.0), 8).add(torch.zeros(2, 6, 8))
    assert torch.equal(added, Sinusoidal(base=50.0).codes(6, 8).expand(2, 6, 8))


def test_sinusoidal_codes_are_unique() -> None:
    codes = Sinusoidal().codes(1024, 64).double()
    apart = torch.cdist(codes, codes) + torch.eye(1024) * 9
    assert apart.min() > 0.5


@pytest.mark.parametrize("distance", [1, 3, 50])
def test_a_shift_of_sinusoidal_codes_is_one_linear_map(distance: int) -> None:
    # PE(p + k) = R(k) PE(p) with R(k) the same for every p: a rotation of each (sin, cos) pair by k·ω_i.
    d_model = 16
    codes = Sinusoidal().codes(200, d_model).double()
    rotation = torch.zeros(d_model, d_model, dtype=torch.float64)
    for pair in range(d_model // 2):
        angle = distance / 10_000 ** (2 * pair / d_model)
        rotation[2 * pair, 2 * pair : 2 * pair + 2] = torch.tensor([math.cos(angle), math.sin(angle)])
        rotation[2 * pair + 1, 2 * pair : 2 * pair + 2] = torch.tensor([-math.sin(angle), math.cos(angle)])
    torch.testing.assert_close(codes[:-distance] @ rotation.T, codes[distance:], atol=5e-5, rtol=0)


def test_neighbouring_sinusoidal_codes_are_more_alike_than_distant_ones() -> None:
    codes = Sinusoidal().codes(513, 64).double()
    alike = codes @ codes.T / 32  # 1 on the diagonal
    torch.testing.assert_close(alike[100, 100:500], alike[0, :400], atol=1e-4, rtol=0)  # by distance alone
    assert alike[0, 0] > alike[0, 1] > alike[0, 2] > alike[0, 3] > alike[0, 4:].max()


def test_low_dimensions_of_sinusoidal_codes_have_the_high_frequencies() -> None:
    # CLAIMS D02: the article has it the other way round.
    codes = Sinusoidal().codes(2000, 16)
    turns = (codes[1:].sign() != codes[:-1].sign()).sum(dim=0)
    sines, cosines = turns[::2].tolist(), turns[1::2].tolist()
    assert sines == sorted(sines, reverse=True)
    assert cosines == sorted(cosines, reverse=True)
    assert sines[0] > 600  # 2000 positions, one radian each
    assert sines[-1] <= 1


# --- learned --------------------------------------------------------------------------------------------------------


def test_learned_positions_are_rows_of_a_table() -> None:
    learned = encoding(Learned(max_length=6), 8)
    embeddings = torch.randn(2, 4, 8)
    (table,) = learned.parameters()
    assert table.shape == (6, 8)
    assert torch.equal(learned.add(embeddings), embeddings + table[:4])


def test_learned_positions_refuse_what_is_longer_than_their_table() -> None:
    # CLAIMS E11
    decoder = model(Learned(max_length=6))
    assert decoder(tokens(6)).shape == (1, 6, VOCABULARY)
    with pytest.raises(UnsupportedLength) as caught:
        decoder(tokens(7))
    message = str(caught.value)
    assert "max_length = 6" in message
    assert "7 tokens" in message
    assert "raise max_length to 7 or more" in message
    assert "\n" not in message
    assert Learned(max_length=6).limit() == 6


def test_rows_of_learned_positions_past_the_training_length_stay_as_initialised() -> None:
    decoder = model(Learned(max_length=8))
    (table,) = decoder.position.parameters()
    decoder(tokens(5)).square().sum().backward()
    assert table.grad is not None
    assert (table.grad[:5].abs().sum(dim=1) > 0).all()
    assert not table.grad[5:].any()


# --- RoPE -----------------------------------------------------------------------------------------------------------


def scores(level: Position, query: Tensor, key: Tensor, length: int) -> Tensor:
    """Logits `(T, T)` of one query and one key `(d_head)`, put at every position."""
    relation = encoding(level, len(query)).relation(length, causal=False, device=CPU)
    queries, keys = (x.expand(1, 1, length, -1) for x in (query, key))
    encoded = relation.encode(queries, keys)
    return (encoded[0] @ encoded[1].transpose(-2, -1))[0, 0]


vectors = st.integers(0, 2**31).map(lambda seed: torch.Generator().manual_seed(seed))


@given(vectors, st.integers(1, 16), st.floats(2, 1e6))
def test_rope_scores_depend_on_the_offset_alone(draw: torch.Generator, pairs: int, base: float) -> None:
    query, key = torch.randn(2, 2 * pairs, generator=draw, dtype=torch.float64)
    logits = scores(RoPE(base=base), query, key, 64)
    tolerance = 1e-5 * float(query.norm() * key.norm())
    torch.testing.assert_close(logits[1:, 1:], logits[:-1, :-1], atol=tolerance, rtol=0)


@given(vectors, st.integers(1, 16), st.floats(2, 1e6), st.integers(0, 63), st.integers(0, 63))
def test_rope_is_a_rotation_in_the_complex_plane(
    draw: torch.Generator, pairs: int, base: float, i: int, j: int
) -> None:
    # Score of a query at i and a key at j: Re Σ_p (q_p e^{i·i·θ_p}) conj(k_p e^{i·j·θ_p}), θ_p = base^{−2p/d_head}.
    query, key = torch.randn(2, 2 * pairs, generator=draw, dtype=torch.float64)

    def rotated(x: Tensor, position: int) -> list[complex]:
        angles = [position * base ** (-2 * p / (2 * pairs)) for p in range(pairs)]
        z = torch.complex(x[::2], x[1::2]).tolist()
        return [value * complex(math.cos(angle), math.sin(angle)) for value, angle in zip(z, angles, strict=True)]

    expected = sum(q * k.conjugate() for q, k in zip(rotated(query, i), rotated(key, j), strict=True)).real
    tolerance = 1e-5 * float(query.norm() * key.norm())
    assert float(scores(RoPE(base=base), query, key, 64)[i, j]) == pytest.approx(expected, abs=tolerance)


def test_rope_keeps_lengths_and_leaves_position_zero_alone() -> None:
    query, key = torch.randn(2, 2, 3, 16, 8, dtype=torch.float64)
    turned, _ = encoding(RoPE(), 8, num_heads=3).relation(16, causal=True, device=CPU).encode(query, key)
    torch.testing.assert_close(turned.norm(dim=-1), query.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(turned[:, :, 0], query[:, :, 0])
    assert not torch.allclose(turned[:, :, 1], query[:, :, 1], atol=1e-2)


def test_rope_adds_no_parameters() -> None:
    # CLAIMS E12
    assert not encoding(RoPE(), 8).state_dict()
    assert parameters(model(RoPE())) == parameters(model(NoPE()))


def test_rope_needs_pairs_of_dimensions() -> None:
    with pytest.raises(ValueError, match=r"d_model / num_heads = 3: RoPE needs an even number; choose 4 or 2"):
        ModelSpec(d_model=6, num_heads=2, position=RoPE())


def test_rope_keeps_the_type_of_queries() -> None:
    query, key = torch.randn(2, 1, 1, 4, 8, dtype=torch.bfloat16)
    turned = encoding(RoPE(), 8).relation(4, causal=True, device=CPU).encode(query, key)
    assert {x.dtype for x in turned} == {torch.bfloat16}


# --- ALiBi ----------------------------------------------------------------------------------------------------------


def slopes_of_the_paper(heads: int) -> list[float]:
    """The recursion in the paper's published code, written anew."""
    if heads & (heads - 1) == 0:
        first = 2.0 ** -(8.0 / heads)
        return [first**power for power in range(1, heads + 1)]
    lower = 1 << (heads.bit_length() - 1)
    return slopes_of_the_paper(lower) + slopes_of_the_paper(2 * lower)[0::2][: heads - lower]


@given(st.integers(1, 200))
def test_alibi_slopes_are_the_papers(heads: int) -> None:
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor(slopes_of_the_paper(heads)), rtol=1e-6, atol=0)


def test_alibi_slopes_of_known_head_counts() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    expected = [2.0**-h for h in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(expected))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_alibi_is_linear_in_distance(heads: int, causal: bool) -> None:
    # Empty queries and keys leave the bias alone; log-weights against the diagonal's cancel the softmax.
    length = 12
    relation = encoding(ALiBi(), 4, heads).relation(length, causal=causal, device=CPU)
    query, key = relation.encode(torch.zeros(1, heads, length, 4), torch.zeros(1, heads, length, 4))
    weights = attention_weights(query, key, relation.bias, causal=causal)[0].double()
    bias = weights.log() - weights.diagonal(dim1=1, dim2=2).log()[..., None]
    for head, slope in enumerate(slopes_of_the_paper(heads)):
        for i in range(length):
            for j in range(i + 1 if causal else length):
                assert float(bias[head, i, j]) == pytest.approx(-slope * abs(i - j), abs=1e-4)
    if causal:
        assert not weights.triu(1).any()


def masked_alibi(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, *, causal: bool) -> Tensor:
    """The explicit form in fp64 for some rows: softmax(QKᵀ − slope·|i − j|) V."""
    query, key, value = (x.double() for x in (query, key, value))
    distance = rows[:, None] - torch.arange(key.shape[2])
    slopes = torch.tensor(slopes_of_the_paper(key.shape[1]), dtype=torch.float64)[:, None, None]
    logits = query[:, :, rows] @ key.transpose(-2, -1) - slopes * distance.abs()
    if causal:
        logits = logits.masked_fill(distance < 0, float("-inf"))
    return logits.softmax(dim=-1) @ value


@pytest.mark.parametrize(
    ("length", "dtype", "tolerance"),
    [
        (64, torch.float32, 2e-6),
        (300, torch.float32, 5e-6),
        (4096, torch.float32, 5e-5),
        (300, torch.bfloat16, 2e-2),
        (4096, torch.bfloat16, 2e-2),
    ],
)
@pytest.mark.parametrize("heads", [2, 3])
def test_alibi_by_extra_dimensions_is_the_masked_form(
    length: int, dtype: torch.dtype, tolerance: float, heads: int
) -> None:
    query, key, value = torch.randn(3, 1, heads, length, 8).to(dtype)
    relation = encoding(ALiBi(), 8, heads).relation(length, causal=True, device=CPU)
    assert relation.bias is None
    wide = relation.encode(query, key)
    assert {x.dtype for x in wide} == {dtype}
    rows = torch.cat([torch.arange(0, length, max(1, length // 24)), torch.arange(length - 8, length)])
    mixed = fused_attention(*wide, value, None, causal=True)[:, :, rows]
    expected = masked_alibi(query, key, value, rows, causal=True)
    assert mixed.shape == expected.shape
    assert (mixed.double() - expected).abs().max() < tolerance


def test_alibi_of_an_encoder_is_the_masked_form() -> None:
    query, key, value = torch.randn(3, 2, 3, 20, 8)
    relation = encoding(ALiBi(), 8, 3).relation(20, causal=False, device=CPU)
    mixed = fused_attention(*relation.encode(query, key), value, relation.bias, causal=False)
    expected = masked_alibi(query, key, value, torch.arange(20), causal=False)
    torch.testing.assert_close(mixed.double(), expected, atol=2e-6, rtol=0)


def test_alibi_has_nothing_to_train_or_save() -> None:
    assert not encoding(ALiBi(), 8, 2).state_dict()
    assert parameters(model(ALiBi())) == parameters(model(NoPE()))


# --- T5 -------------------------------------------------------------------------------------------------------------


def bucket_of_the_paper(distance: int, num_buckets: int, max_distance: int, *, causal: bool) -> int:
    """Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`, all beyond
    share the last. Bidirectional: half of all are for keys ahead. In exact rational arithmetic.
    """
    if causal:
        ahead, distance = 0, max(distance, 0)
    else:
        num_buckets //= 2
        ahead, distance = num_buckets * (distance < 0), abs(distance)
    single = num_buckets // 2
    if distance < single:
        return ahead + distance
    shared = num_buckets - single
    # floor(shared · log(distance/single) / log(max/single)) is the largest k with
    # (max/single)^k ≤ (distance/single)^shared
    reached, whole = Fraction(distance, single) ** shared, Fraction(max_distance, single)
    step = max(k for k in range(shared + 1) if whole**k <= reached)
    return ahead + min(single + step, num_buckets - 1)


bucketings = st.tuples(st.integers(4, 40), st.integers(1, 300)).map(lambda pair: (pair[0], pair[0] // 2 + pair[1]))


@given(bucketings, st.booleans(), st.lists(st.integers(-600, 600), min_size=1))
def test_t5_buckets_are_the_papers(sizes: tuple[int, int], causal: bool, distances: list[int]) -> None:
    got = distance_buckets(torch.tensor(distances), *sizes, causal=causal).tolist()
    assert got == [bucket_of_the_paper(d, *sizes, causal=causal) for d in distances]


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(8, 32), (10, 160), (32, 128), (32, 1024), (16, 8192)])
def test_t5_buckets_where_logarithms_are_whole(num_buckets: int, max_distance: int) -> None:
    # Distances on the edge of a bucket, where rounding would show.
    powers = [num_buckets // 2 * 2**k for k in range(12)]
    edges = sorted({max(0, d + shift) for d in powers for shift in (-1, 0, 1)})
    got = distance_buckets(torch.tensor(edges), num_buckets, max_distance, causal=True).tolist()
    assert got == [bucket_of_the_paper(d, num_buckets, max_distance, causal=True) for d in edges]


@given(bucketings)
def test_t5_buckets_rise_with_distance_within_their_range(sizes: tuple[int, int]) -> None:
    num_buckets, max_distance = sizes
    distance = torch.arange(-max_distance - 5, max_distance + 6)
    one_way = distance_buckets(distance, *sizes, causal=True)
    behind = one_way[distance >= 0]
    assert not one_way[distance <= 0].any()
    assert (behind.diff() >= 0).all()
    assert behind[: num_buckets // 2].tolist() == list(range(num_buckets // 2))
    assert set(behind[max_distance:].tolist()) == {num_buckets - 1}
    both = distance_buckets(distance, *sizes, causal=False)
    half = num_buckets // 2
    assert set(both[distance >= 0].tolist()) <= set(range(half))
    assert torch.equal(both[distance < 0], both[distance > 0].flip(0) + half)


@pytest.mark.parametrize("causal", [True, False])
def test_the_t5_bias_is_the_tables_row_for_the_bucket(causal: bool) -> None:
    biased = encoding(T5Bias(num_buckets=8, max_distance=12), 4, 3)
    (table,) = biased.parameters()
    assert table.shape == (8, 3)
    bias = biased.relation(16, causal=causal, device=CPU).bias
    assert bias is not None
    for i in range(16):
        for j in range(16):
            bucket = bucket_of_the_paper(i - j, 8, 12, causal=causal)
            assert torch.equal(bias[:, i, j], table[bucket])


def test_the_t5_table_is_shared_by_the_layers_and_trained_by_all() -> None:
    shallow, deep = model(T5Bias(), num_layers=1), model(T5Bias(), num_layers=3)
    for decoder in (shallow, deep):
        (table,) = decoder.position.parameters()
        assert parameters(decoder.position) == table.numel()
        decoder(tokens(8)).square().sum().backward()
        assert table.grad is not None
        assert (table.grad[:8].abs().sum(dim=1) > 0).all()


def test_t5_buckets_that_cannot_grow_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_distance = 16 must exceed num_buckets / 2 = 16; raise max_distance"):
        ModelSpec(position=T5Bias(num_buckets=32, max_distance=16))
    assert ModelSpec(position=T5Bias(num_buckets=32, max_distance=17))


# --- all ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [NoPE(), *ENCODINGS], ids=named)
def test_only_learned_positions_have_a_longest_sequence(level: Position) -> None:
    limit = level.limit()
    decoder = build_model(ModelSpec(d_model=16, num_heads=2, position=level), VOCABULARY, seed=0)
    assert decoder(tokens(100 if limit is None else limit)).isfinite().all()
    assert (limit is not None) is isinstance(level, Learned)


@pytest.mark.parametrize("d_model", [15, 17])
def test_sinusoidal_codes_come_in_pairs(d_model: int) -> None:
    with pytest.raises(ValueError, match=f"d_model = {d_model}: Sinusoidal needs an even number"):
        ModelSpec(d_model=d_model, num_heads=1, position=Sinusoidal())
    with pytest.raises(UserError, match="even"):
        Sinusoidal().check(Shape(d_model, 1, 1))
