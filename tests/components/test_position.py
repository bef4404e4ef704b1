"""Laws of the position encodings, each against an independent reference."""

import cmath
import math
import re
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.components.architecture import DecoderOnly, EncoderDecoder, EncoderOnly
from harness.components.attention import Latent, attention_weights, fused_attention
from harness.components.init import Initialisation, initialise
from harness.components.position import (
    ALiBi,
    Learned,
    LinearRoPE,
    NoPE,
    NTKRoPE,
    Position,
    PositionEncoding,
    Randomised,
    Relation,
    RoPE,
    ScaledRoPE,
    Sinusoidal,
    T5Bias,
    TransformerXL,
    UnsupportedLength,
    YaRN,
    alibi_slopes,
    distance_buckets,
)
from harness.components.shape import Shape
from harness.cost import parameters
from harness.schema import UserError
from harness.seeding import seed_global
from harness.spec import ModelSpec
from harness.trace import Trace
from harness.transformer import Transformer, build_model

CPU = torch.device("cpu")
VOCABULARY = 20
INNER = [Sinusoidal(), Learned(max_length=32), RoPE(), ALiBi(), T5Bias(num_buckets=8, max_distance=16)]
SCALED = [LinearRoPE(), NTKRoPE(), YaRN(trained_length=20)]
ENCODINGS = [*INNER, *SCALED, TransformerXL(), Randomised(max_length=64, test_tokens=32)]


def named(level: Position) -> str:
    return level.kind


def encoding(level: Position, d_head: int, num_heads: int = 1) -> PositionEncoding:
    """For a model of one layer; in evaluation, and drawn as in a model of seed 0."""
    built = level.build(Shape(d_head * num_heads, num_heads, 1, d_head)).eval()
    initialise(built, Initialisation(), num_layers=1, seed=0)
    return built


def related(built: PositionEncoding, length: int, *, causal: bool, cached: bool = False) -> Relation:
    """The relation of the first tokens of a sequence."""
    positions = built.positions(length, CPU)
    return built.in_layer(built.relation(positions, positions, causal=causal, cached=cached), 0)


def biases(relation: Relation, query: Tensor) -> Tensor:
    """`(B or nothing, H, T, T)`, from scaled queries `(B, H, T, d_head)`."""
    assert relation.bias is not None
    return relation.bias(query, relation.queries, relation.keys)


def model(position: Position, *, causal: bool = True, num_layers: int = 2) -> Transformer:
    architecture = DecoderOnly() if causal else EncoderOnly()
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=num_layers, position=position, architecture=architecture)
    return build_model(spec, VOCABULARY, seed=0).double().eval()


def tokens(length: int, batch: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


# --- none -----------------------------------------------------------------------------------------------------------


def test_nope_adds_nothing() -> None:
    embeddings, query, key = torch.randn(2, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 8)
    none = encoding(NoPE(), 8)
    relation = related(none, 5, causal=True)
    assert torch.equal(none.add(embeddings, relation.queries), embeddings)
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
    added = encoding(Sinusoidal(base=50.0), 8).add(torch.zeros(2, 6, 8), torch.arange(6))
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


def test_sinusoidal_codes_past_the_training_length_are_unlike_the_trained_ones() -> None:
    # CLAIMS E10: further from every trained code than trained neighbours are from each other, and further yet beyond.
    codes = Sinusoidal().codes(201, 64).double()
    neighbours = float((codes[1] - codes[0]).norm())
    nearest = [float((codes[:20] - codes[position]).norm(dim=1).min()) for position in (20, 25, 40, 200)]
    assert nearest[0] == pytest.approx(neighbours, rel=1e-4)
    assert nearest == sorted(nearest)
    assert nearest[-1] > 3 * neighbours


# --- learned --------------------------------------------------------------------------------------------------------


def test_learned_positions_are_rows_of_a_table() -> None:
    learned = encoding(Learned(max_length=6), 8)
    embeddings = torch.randn(2, 4, 8)
    (table,) = learned.parameters()
    assert table.shape == (6, 8)
    assert torch.equal(learned.add(embeddings, torch.arange(4)), embeddings + table[:4])


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
    # CLAIMS E11: no error up to max_length, and nothing learned there either.
    decoder = model(Learned(max_length=8))
    (table,) = decoder.position.parameters()
    decoder(tokens(5)).square().sum().backward()
    assert table.grad is not None
    assert (table.grad[:5].abs().sum(dim=1) > 0).all()
    assert not table.grad[5:].any()


# --- RoPE -----------------------------------------------------------------------------------------------------------


def scores(level: Position, query: Tensor, key: Tensor, length: int) -> Tensor:
    """Logits `(T, T)` of one query and one key `(d_head)`, put at every position."""
    relation = related(encoding(level, len(query)), length, causal=False)
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
    turned, _ = related(encoding(RoPE(), 8, num_heads=3), 16, causal=True).encode(query, key)
    torch.testing.assert_close(turned.norm(dim=-1), query.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(turned[:, :, 0], query[:, :, 0])
    assert not torch.allclose(turned[:, :, 1], query[:, :, 1], atol=1e-2)


def test_rope_adds_no_parameters() -> None:
    # CLAIMS E12
    assert not encoding(RoPE(), 8).state_dict()
    assert parameters(model(RoPE())) == parameters(model(NoPE()))


D_HEAD = r"d_head \(if not set, d_model / num_heads\)"


def test_rope_needs_pairs_of_dimensions() -> None:
    with pytest.raises(
        ValueError,
        match=rf"{D_HEAD} = 3: RoPE needs an even number; choose 4 or 2",
    ):
        ModelSpec(d_model=6, num_heads=2, position=RoPE())
    with pytest.raises(
        ValueError, match=r"^ModelSpec: attention\.d_rope = 3: RoPE needs an even number; choose 4 or 2$"
    ):
        ModelSpec(position=RoPE(), attention=Latent(d_rope=3))


def test_rope_keeps_the_type_of_queries() -> None:
    query, key = torch.randn(2, 1, 1, 4, 8, dtype=torch.bfloat16)
    turned = related(encoding(RoPE(), 8), 4, causal=True).encode(query, key)
    assert {x.dtype for x in turned} == {torch.bfloat16}


# --- RoPE, stretched ------------------------------------------------------------------------------------------------


def turned(x: Tensor, position: float, frequency: list[float], amplitude: float = 1.0) -> Tensor:
    """`(d_head)` at a position: each pair of dimensions times amplitude · e^{i·position·frequency}."""
    pairs = zip(x[::2].tolist(), x[1::2].tolist(), frequency, strict=True)
    numbers = [amplitude * complex(a, b) * cmath.exp(1j * position * w) for a, b, w in pairs]
    return torch.tensor([part for z in numbers for part in (z.real, z.imag)], dtype=torch.float64)


def check_turns(level: ScaledRoPE, frequency: list[float], amplitude: float = 1.0) -> None:
    """Queries and keys of an evaluated model turn by these frequencies."""
    d_head, length = 2 * len(frequency), 50
    query, key = torch.randn(2, 1, 1, length, d_head, dtype=torch.float64)
    encoded = related(encoding(level, d_head), length, causal=True).encode(query, key)
    for x, found in zip((query, key), encoded, strict=True):
        for i in (0, 1, 7, length - 1):
            expected = turned(x[0, 0, i], i, frequency, amplitude)
            torch.testing.assert_close(found[0, 0, i], expected, atol=1e-4, rtol=0)


def rope_frequencies(pairs: int, base: float) -> list[float]:
    return [base ** (-2 * i / (2 * pairs)) for i in range(pairs)]


factors = st.floats(1, 64)
bases = st.floats(10, 1e6)


@given(st.integers(1, 8), bases, factors)
def test_linear_rope_is_rope_at_positions_divided_by_the_factor(pairs: int, base: float, factor: float) -> None:
    check_turns(
        LinearRoPE(base=base, test_factor=factor), [frequency / factor for frequency in rope_frequencies(pairs, base)]
    )


@given(st.integers(2, 8), bases, factors)
def test_ntk_rope_is_rope_with_another_base(pairs: int, base: float, factor: float) -> None:
    d = 2 * pairs
    check_turns(NTKRoPE(base=base, test_factor=factor), rope_frequencies(pairs, base * factor ** (d / (d - 2))))


@pytest.mark.parametrize("d_head", [4, 16, 64, 128])
def test_ntk_rope_keeps_the_highest_frequency_and_divides_the_lowest(d_head: int) -> None:
    plain, stretched = (NTKRoPE().rotation(d_head, factor).frequency.double() for factor in (1, 8))
    assert float(stretched[0]) == float(plain[0]) == 1
    assert float(stretched[-1]) == pytest.approx(float(plain[-1]) / 8, rel=1e-5)
    assert (stretched[1:-1] < plain[1:-1]).all()
    assert (stretched[1:-1] > plain[1:-1] / 8).all()


@pytest.mark.parametrize(("d_head", "base"), [(16, 48_761), (32, 43_873), (64, 41_829), (128, 40_890)])
def test_a_factor_of_four_is_a_base_of_forty_thousand(d_head: int, base: float) -> None:
    # CLAIMS E13: the article's 500 000 is not four times the length but 44 to 47 times.
    query, key = torch.randn(2, 1, 1, 30, d_head)
    stretched = related(encoding(NTKRoPE(test_factor=4.0), d_head), 30, causal=True).encode(query, key)
    based = related(encoding(RoPE(base=base), d_head), 30, causal=True).encode(query, key)
    torch.testing.assert_close(stretched, based, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("d_head", "factor"), [(64, 44.25), (128, 47.03)])
def test_a_base_of_half_a_million_is_a_factor_of_forty_five(d_head: int, factor: float) -> None:
    # CLAIMS E13
    stretched, based = NTKRoPE().rotation(d_head, factor), NTKRoPE(base=500_000.0).rotation(d_head, 1)
    torch.testing.assert_close(stretched.frequency, based.frequency, rtol=1e-3, atol=0)


def yarn_frequencies(pairs: int, level: YaRN) -> list[float]:
    """The paper's section 3.2, a pair at a time: wavelength λ, ratio r = L / λ, ramp γ."""
    found = []
    for i in range(pairs):
        wavelength = 2 * math.pi * level.base ** (2 * i / (2 * pairs))
        ratio = level.trained_length / wavelength
        if ratio < level.slow:
            ramp = 0.0
        elif ratio > level.fast:
            ramp = 1.0
        else:
            ramp = (ratio - level.slow) / (level.fast - level.slow)
        theta = 2 * math.pi / wavelength
        found.append((1 - ramp) * theta / level.test_factor + ramp * theta)
    return found


@given(st.integers(1, 8), bases, factors, st.integers(2, 4000), st.floats(0.5, 4), st.floats(8, 64))
def test_yarn_is_the_papers_formula(
    pairs: int, base: float, factor: float, length: int, slow: float, fast: float
) -> None:
    level = YaRN(base=base, test_factor=factor, trained_length=length, slow=slow, fast=fast)
    check_turns(level, yarn_frequencies(pairs, level), 0.1 * math.log(factor) + 1)


def test_yarns_temperature_multiplies_logits_by_the_square_of_its_amplitude() -> None:
    # All pairs slow: interpolation and nothing else.
    query, key = torch.randn(2, 16, dtype=torch.float64)
    yarn, linear = YaRN(test_factor=4.0, trained_length=2), LinearRoPE(test_factor=4.0)
    hotter = scores(yarn, query, key, 20) / scores(linear, query, key, 20)
    torch.testing.assert_close(hotter, torch.full_like(hotter, (0.1 * math.log(4) + 1) ** 2), rtol=1e-4, atol=0)


def test_the_trained_length_decides_which_pairs_yarn_stretches() -> None:
    def kept(length: int) -> Tensor:
        """0: interpolated, 1: as it was."""
        frequency, whole = (YaRN(trained_length=length).rotation(64, s).frequency.double() for s in (8, 1))
        return (frequency / whole - 1 / 8) / (1 - 1 / 8)

    for length in (6, 201, 202, 20_000, 2_500_000):
        assert (kept(length).diff() <= 1e-6).all()
    assert kept(6).abs().max() < 1e-6
    assert 0 < kept(20_000)[0] - kept(20_000)[-1] <= 1 + 1e-6
    # CLAIMS E13: no pair stays as it was unless the trained length exceeds 2π · 32 = 201.06.
    assert kept(200).max() < 0.999
    assert kept(202)[0] == pytest.approx(1, abs=1e-6)
    assert kept(202)[1:].max() < 0.8
    assert kept(2_500_000).min() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kind", [LinearRoPE, NTKRoPE, YaRN])
def test_a_factor_of_one_is_rope(kind: type[ScaledRoPE]) -> None:
    query, key = torch.randn(2, 1, 2, 40, 8)
    plain = related(encoding(RoPE(base=777.0), 8, 2), 40, causal=True).encode(query, key)
    stretched = related(encoding(kind(base=777.0, test_factor=1.0), 8, 2), 40, causal=True).encode(query, key)
    torch.testing.assert_close(stretched, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [LinearRoPE, NTKRoPE, YaRN])
def test_one_factor_acts_in_training_and_the_other_in_evaluation(kind: type[ScaledRoPE]) -> None:
    def logits(train_factor: float, test_factor: float, *, training: bool) -> Tensor:
        decoder = model(kind(train_factor=train_factor, test_factor=test_factor)).train(training)
        return decoder(tokens(12)).detach()

    assert torch.equal(logits(1, 4, training=True), logits(1, 16, training=True))
    assert torch.equal(logits(1, 4, training=False), logits(2, 4, training=False))
    assert torch.equal(logits(3, 4, training=True), logits(4, 3, training=False))
    assert not torch.allclose(logits(1, 4, training=True), logits(1, 4, training=False), atol=1e-3)


@pytest.mark.parametrize("level", SCALED, ids=named)
def test_stretching_adds_no_parameters_and_keeps_scores_a_matter_of_distance(level: ScaledRoPE) -> None:
    # CLAIMS E12
    assert not encoding(level, 8).state_dict()
    query, key = torch.randn(2, 8, dtype=torch.float64)
    logits = scores(level, query, key, 64)
    torch.testing.assert_close(logits[1:, 1:], logits[:-1, :-1], atol=1e-4, rtol=0)


def test_what_cannot_be_stretched_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=rf"{D_HEAD} = 2: NTKRoPE needs 4 or more; raise it",
    ):
        ModelSpec(d_model=4, num_heads=2, position=NTKRoPE())
    with pytest.raises(ValueError, match=r"position\.fast = 1\.0 must exceed position\.slow = 1\.0; raise fast"):
        ModelSpec(position=YaRN(slow=1.0, fast=1.0))
    for kind in (LinearRoPE, NTKRoPE, YaRN):
        with pytest.raises(
            ValueError,
            match=rf"{D_HEAD} = 5: {kind.__name__} needs an even number",
        ):
            ModelSpec(d_model=10, num_heads=2, position=kind())


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
    relation = related(encoding(ALiBi(), 4, heads), length, causal=causal)
    query, key = relation.encode(torch.zeros(1, heads, length, 4), torch.zeros(1, heads, length, 4))
    bias = None if causal else biases(relation, query)
    weights = attention_weights(query, key, bias, causal=causal)[0].double()
    found = weights.log() - weights.diagonal(dim1=1, dim2=2).log()[..., None]
    for head, slope in enumerate(slopes_of_the_paper(heads)):
        for i in range(length):
            for j in range(i + 1 if causal else length):
                assert float(found[head, i, j]) == pytest.approx(-slope * abs(i - j), abs=1e-4)
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
    relation = related(encoding(ALiBi(), 8, heads), length, causal=True)
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
    relation = related(encoding(ALiBi(), 8, 3), 20, causal=False)
    mixed = fused_attention(*relation.encode(query, key), value, biases(relation, query), causal=False)
    expected = masked_alibi(query, key, value, torch.arange(20), causal=False)
    torch.testing.assert_close(mixed.double(), expected, atol=2e-6, rtol=0)


def test_alibi_with_a_cache_is_the_form_of_extra_dimensions() -> None:
    built, (query, key) = encoding(ALiBi(), 8, 3), torch.randn(2, 2, 3, 20, 8, dtype=torch.float64)
    wide, cached = related(built, 20, causal=True), related(built, 20, causal=True, cached=True)
    ahead = torch.ones(20, 20, dtype=torch.bool).triu(1)

    def weights(relation: Relation, bias: Tensor | float) -> Tensor:
        turned_query, turned_key = relation.encode(query, key)
        return (turned_query @ turned_key.mT + bias).masked_fill(ahead, float("-inf")).softmax(-1)

    assert torch.equal(cached.encode(query, key)[1], key)
    torch.testing.assert_close(weights(cached, biases(cached, query)), weights(wide, 0.0), atol=1e-6, rtol=0)


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
    bias = biases(related(biased, 16, causal=causal), torch.zeros(1, 3, 16, 4))
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


# --- Transformer-XL -------------------------------------------------------------------------------------------------


def with_biases(causal: bool) -> Transformer:
    """Two layers, u and v drawn."""
    made = model(TransformerXL(), causal=causal)
    for name in ("content.weight", "place.weight"):
        nn.init.normal_(made.position.get_parameter(name))
    return made


def xl_logit(query: Tensor, key: Tensor, u: Tensor, v: Tensor, projection: Tensor, distance: int) -> float:
    """(q + u)·k + (q + v)·W_R R_{i−j} of one head, a number at a time."""
    d_head, d_model = projection.shape
    code = [sinusoid(abs(distance), n, d_model, 10_000.0) for n in range(d_model)]
    if distance < 0:
        code[::2] = [-sine for sine in code[::2]]
    place = [sum(float(projection[m, n]) * code[n] for n in range(d_model)) for m in range(d_head)]
    return sum(float((query[m] + u[m]) * key[m]) + float(query[m] + v[m]) * place[m] for m in range(d_head))


@pytest.mark.parametrize("causal", [True, False])
def test_transformer_xl_is_the_papers_equation_in_every_layer(causal: bool) -> None:
    made, trace, read = with_biases(causal), Trace(), tokens(5)
    seen: list[Tensor] = []
    for layer in range(2):
        attention = made.get_submodule(f"blocks.{layer}.attention")
        attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        made(read, trace=trace)
        for layer, weights in enumerate(trace.stacked("attention").double()):
            expected = xl_weights(made, layer, seen[layer], causal=causal)
            torch.testing.assert_close(weights[0], expected, atol=1e-6, rtol=0)


def xl_weights(made: Transformer, layer: int, x: Tensor, *, causal: bool) -> Tensor:
    """softmax of the logits of one layer, whose attention reads `x` `(1, T, d_model)`: `(H, T, T)`."""
    attention = made.get_submodule(f"blocks.{layer}.attention")
    query, key = (attention.get_submodule(name)(x)[0].unflatten(-1, (2, 8)) for name in ("query", "key"))
    projections = made.position.get_parameter(f"projections.{layer}.weight").unflatten(0, (2, 8))
    content, place = (made.position.get_parameter(f"{name}.weight") for name in ("content", "place"))
    length = x.shape[1]
    weights = torch.zeros(2, length, length, dtype=torch.float64)
    for head, (u, v, projection) in enumerate(zip(content, place, projections, strict=True)):
        for i in range(length):
            reach = i + 1 if causal else length
            pairs = [(query[i, head] / 8**0.5, key[j, head], u, v, projection, i - j) for j in range(reach)]
            logits = torch.tensor([xl_logit(*pair) for pair in pairs], dtype=torch.float64)
            weights[head, i, :reach] = logits.softmax(0)
    return weights


def test_transformer_xl_starts_without_biases_and_has_a_projection_a_layer() -> None:
    made = model(TransformerXL(), num_layers=3)
    shapes = {name: tuple(p.shape) for name, p in made.position.named_parameters()}
    assert shapes == {
        **{f"projections.{layer}.weight": (16, 16) for layer in range(3)},
        "content.weight": (2, 8),
        "place.weight": (2, 8),
    }
    assert not made.position.get_parameter("content.weight").any()
    assert not made.position.get_parameter("place.weight").any()
    made(tokens(6)).square().sum().backward()
    for name, parameter in made.position.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_transformer_xls_bias_depends_on_content_as_t5s_does_not() -> None:
    query = torch.randn(1, 2, 6, 8)
    for level, by_content in ((TransformerXL(), True), (T5Bias(), False)):
        relation = related(encoding(level, 8, 2), 6, causal=True)
        once, other = (biases(relation, q).expand(1, 2, 6, 6).tril() for q in (query, query + 1))
        assert torch.equal(once, other) is not by_content


# --- biases in parts ------------------------------------------------------------------------------------------------

BIASES = [ALiBi(), T5Bias(num_buckets=8, max_distance=16), TransformerXL()]


@pytest.mark.parametrize("level", BIASES, ids=named)
@pytest.mark.parametrize("causal", [True, False])
def test_the_bias_of_blocks_is_a_part_of_the_whole(level: Position, causal: bool) -> None:
    # Blocks of 3 queries that see their own block and the one before: (nb, w) × (nb, 2w).
    built, query = encoding(level, 4, 2).double(), torch.randn(5, 2, 12, 4, dtype=torch.float64)
    relation = related(built, 12, causal=causal, cached=True)
    whole = biases(relation, query).expand(5, 2, 12, 12)
    at = torch.arange(12).view(4, 3)
    of = (torch.arange(4)[:, None] * 3 + torch.arange(-3, 3)).clamp(min=0)
    assert relation.bias is not None
    blocked = relation.bias(query.unflatten(2, (4, 3)), at, of).expand(5, 2, 4, 3, 6)
    expected = whole[:, :, at[:, :, None], of[:, None, :]]
    seen = at[:, :, None] >= of[:, None, :] if causal else torch.ones(4, 3, 6, dtype=torch.bool)
    torch.testing.assert_close(blocked[:, :, seen], expected[:, :, seen])


@pytest.mark.parametrize("level", BIASES, ids=named)
def test_the_bias_of_the_last_queries_is_the_last_rows(level: Position) -> None:
    # As in decoding with a cache.
    built, query = encoding(level, 4, 2), torch.randn(3, 2, 10, 4)
    positions = torch.arange(10)
    whole = biases(related(built, 10, causal=True, cached=True), query).tril()
    last = built.in_layer(built.relation(positions[7:], positions, causal=True, cached=True), 0)
    torch.testing.assert_close(biases(last, query[:, :, 7:]).tril(7), whole[..., 7:, :])


# --- randomised -----------------------------------------------------------------------------------------------------


def test_positions_in_training_are_a_sorted_choice_that_every_step_draws_anew() -> None:
    built = encoding(Randomised(max_length=50, test_tokens=20), 8).train()

    def drawn(step: int) -> Tensor:
        seed_global(0, "step", step)
        return built.positions(12, CPU)

    steps = [drawn(step) for step in range(40)]
    for positions in steps:
        assert positions.shape == (12,)
        assert (positions.diff() > 0).all()  # sorted and distinct
        assert positions.min() >= 0
        assert positions.max() < 50
    assert len({tuple(positions.tolist()) for positions in steps}) == 40
    assert torch.equal(drawn(3), steps[3])  # from the global generator
    assert set(torch.cat(steps).tolist()) == set(range(50))  # all are trained


def test_positions_in_evaluation_are_fixed_and_grow_with_the_sequence() -> None:
    built = encoding(Randomised(max_length=50, test_tokens=20), 8)
    longest = built.positions(20, CPU)
    torch.manual_seed(99)
    for length in range(1, 21):
        assert torch.equal(built.positions(length, CPU), longest[:length])
    assert (longest.diff() > 0).all()
    assert longest.max() < 50
    assert longest.tolist() != list(range(20))


def test_positions_in_evaluation_come_from_the_seed_and_the_name() -> None:
    def fixed(seed: int) -> tuple[Tensor, Tensor]:
        position = Randomised(max_length=500, test_tokens=30)
        made = build_model(ModelSpec(position=position, architecture=EncoderDecoder()), VOCABULARY, seed=seed).eval()
        assert made.encoder is not None
        return made.position.positions(30, CPU), made.encoder.position.positions(30, CPU)

    once, again, other = fixed(0), fixed(0), fixed(1)
    assert all(map(torch.equal, once, again))
    assert not any(map(torch.equal, once, other))
    assert not torch.equal(*once)  # encoder and decoder have names of their own


@pytest.mark.parametrize("inner", INNER, ids=named)
@pytest.mark.parametrize("causal", [True, False])
def test_randomised_positions_are_rows_of_the_inner_encoding(inner: Position, causal: bool) -> None:
    built = encoding(Randomised(inner=inner, max_length=32, test_tokens=10), 8, 2)
    plain, relation = built.get_submodule("inner"), related(built, 10, causal=causal)
    assert isinstance(plain, PositionEncoding)
    whole, rows = related(plain, 32, causal=causal), relation.queries
    embeddings, (query, key) = torch.randn(3, 10, 16), torch.randn(2, 3, 2, 10, 8)

    def spread(x: Tensor) -> Tensor:
        """The tokens at their positions in a sequence of 32."""
        return x.new_zeros(*x.shape[:-2], 32, x.shape[-1]).index_copy(-2, rows, x)

    torch.testing.assert_close(built.add(embeddings, rows), plain.add(spread(embeddings), whole.queries)[:, rows])
    encoded = (x[:, :, rows] for x in whole.encode(spread(query), spread(key)))
    torch.testing.assert_close(relation.encode(query, key), tuple(encoded))
    assert (relation.bias is None) is (whole.bias is None)
    if relation.bias is not None:
        expected = biases(whole, spread(query))[..., rows, :][..., rows]
        torch.testing.assert_close(biases(relation, query), expected)


@pytest.mark.parametrize("inner", INNER, ids=named)
@pytest.mark.parametrize("training", [True, False])
def test_a_choice_of_all_positions_is_the_inner_encoding(inner: Position, training: bool) -> None:
    # Nothing to choose when as many tokens as positions are read.
    made, plain = (
        model(level).train(training) for level in (Randomised(inner=inner, max_length=9, test_tokens=9), inner)
    )
    made.position.get_submodule("inner").load_state_dict(plain.position.state_dict())
    torch.testing.assert_close(made(tokens(9)), plain(tokens(9)))


def test_a_layers_own_relation_is_that_of_the_inner_encoding() -> None:
    class LayeredBias(PositionEncoding):
        def in_layer(self, relation: Relation, layer: int) -> Relation:
            return replace(relation, bias=lambda query, at, of: torch.full((1, len(at), len(of)), float(layer)))

    class Layered(Position):
        def build(self, shape: Shape) -> PositionEncoding:
            return LayeredBias()

    relation = Relation(torch.arange(3), torch.arange(3))
    third = encoding(Randomised(inner=Layered()), 8).in_layer(relation, 2)
    assert biases(third, torch.zeros(1, 1, 3, 8)).unique().tolist() == [2]


@pytest.mark.parametrize(
    ("level", "message"),
    [
        (
            Randomised(inner=TransformerXL()),
            "position.inner = TransformerXL cannot be randomised; choose another encoding",
        ),
        (Randomised(inner=Randomised()), "position.inner = Randomised cannot be randomised; choose another encoding"),
        (
            Randomised(inner=Learned(max_length=40), max_length=41, test_tokens=8),
            "position.max_length = 41 exceeds the 40 positions of Learned; lower it",
        ),
        (
            Randomised(max_length=20, test_tokens=21),
            "position.test_tokens = 21 exceeds max_length = 20; lower it",
        ),
    ],
)
def test_what_cannot_be_randomised_is_refused_in_a_sentence(level: Randomised, message: str) -> None:
    with pytest.raises(UserError) as caught:
        level.check(ModelSpec().shape)
    assert str(caught.value) == message
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelSpec(position=level)


@pytest.mark.parametrize("training", [True, False])
def test_randomised_positions_refuse_more_tokens_than_were_declared(training: bool) -> None:
    level = Randomised(max_length=64, test_tokens=6)
    decoder = model(level).train(training)
    assert decoder(tokens(6)).shape == (1, 6, VOCABULARY)
    with pytest.raises(UnsupportedLength) as caught:
        decoder(tokens(7))
    assert str(caught.value) == (
        "position.test_tokens = 6: randomised positions cannot take a sequence of 7 tokens; "
        "raise test_tokens to 7 or more"
    )
    assert level.limit() == 6


@pytest.mark.parametrize("inner", [NoPE(), *INNER], ids=named)
def test_a_randomised_encoding_is_as_fast_as_the_inner_one(inner: Position) -> None:
    level = Randomised(inner=inner)
    assert level.biases_logits is inner.biases_logits
    assert level.scales_logits is inner.scales_logits
    for causal, device in product((True, False), ("cpu", "cuda")):
        assert level.flash_obstacle(device, causal=causal) == inner.flash_obstacle(device, causal=causal)


# --- all ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [NoPE(), *ENCODINGS], ids=named)
def test_only_tables_and_fixed_choices_have_a_longest_sequence(level: Position) -> None:
    limit = level.limit()
    decoder = model(level)
    assert decoder(tokens(100 if limit is None else limit)).isfinite().all()
    assert (limit is not None) is isinstance(level, Learned | Randomised)


@pytest.mark.parametrize("d_model", [15, 17])
def test_sinusoidal_codes_come_in_pairs(d_model: int) -> None:
    with pytest.raises(ValueError, match=f"d_model = {d_model}: Sinusoidal needs an even number"):
        ModelSpec(d_model=d_model, num_heads=1, position=Sinusoidal())
    with pytest.raises(UserError, match="even"):
        Sinusoidal().check(Shape(d_model, 1, 1, d_model))
