"""Position encodings: how a Transformer, whose attention is permutation-equivariant, learns where a token stands.

A level is a spec; `build` makes its module, a `PositionEncoding`. An encoding acts in one or both of two places:
`add` changes the embeddings once, `relation` says what happens inside every layer's attention.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from harness.components.shape import Shape
from harness.schema import Changes, Level, UserError

Bias = Callable[[Tensor, Tensor, Tensor], Tensor]


def _unchanged(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query, key


@dataclass(frozen=True)
class Relation:
    """What an encoding does inside attention; made once a forward pass, shared by all layers.

    Attributes:
        queries: `(T,)` the positions of the tokens of this pass.
        keys: `(K,)` those of all tokens so far: the same, or with a cache also those before.
        encode: maps scaled queries and keys of this pass, `(B, H, T, d_head)`, to those that are multiplied; it may
            add dimensions.
        bias: what is added to the scaled logits of queries `(B, H, …, Q, d_head)` (scaled, not encoded) at positions
            `(…, Q)` and of keys at `(…, K)`: broadcasts to `(B, H, …, Q, K)`. None adds nothing and keeps flash
            attention on.
    """

    queries: Tensor
    keys: Tensor
    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _unchanged
    bias: Bias | None = None


def places(length: int, device: torch.device | None = None) -> Relation:
    """No encoding: only positions 0 … length−1."""
    positions = torch.arange(length, device=device)
    return Relation(positions, positions)


class PositionEncoding(nn.Module):
    """The module of a level; as it stands it encodes nothing."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """`(length,)`, int64: where the tokens of a sequence stand. Raises `UnsupportedLength` for too many."""
        return torch.arange(length, device=device)

    def add(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """Embeddings `(B, T, d_model)` with whatever the encoding adds at positions `(T,)`, same shape."""
        return embeddings

    def relation(self, queries: Tensor, keys: Tensor, *, causal: bool, cached: bool) -> Relation:
        """What attention does with queries and keys at these positions; `cached` keys are encoded once, alone."""
        return Relation(queries, keys)

    def in_layer(self, relation: Relation, layer: int) -> Relation:
        """The relation of one layer: as it is, unless layers differ."""
        return relation


class Position(Level):
    """Base of the position-encoding axis. Subclass it, implement `build`, and the level works in every command."""

    biases_logits: ClassVar[bool] = False  # such a level needs attention that has logits
    scales_logits: ClassVar[bool] = False  # likewise
    limited_by: ClassVar[str] = "max_length"  # the field that `limit` follows from
    counts_tokens: ClassVar[bool] = True  # False for a level that needs positions 0, 1, 2 … without gaps

    @abstractmethod
    def build(self, shape: Shape) -> PositionEncoding:
        """The encoding's module for a model of this shape."""

    def check(self, shape: Shape) -> None:
        """Raise `UserError` where the level cannot be combined with a model of this shape."""

    def limit(self) -> int | None:
        """The longest sequence, in tokens, that the level can take; None where there is no limit."""
        return None

    def flash_obstacle(self, device: str, *, causal: bool) -> str:
        """Why flash attention cannot run with this level on a device; empty where it can."""
        if not self.biases_logits:
            return ""
        return f"{self.kind} adds a T×T bias, which flash takes only on the CPU, untrained"

    def added_width(self, *, causal: bool) -> int:
        """Dimensions that the level adds to queries and keys where it acts in them."""
        return 0

    def codes(self, length: int, d_model: int) -> Tensor | None:
        """The fixed vectors `(length, d_model)` that the level adds to embeddings; None where it adds none."""
        return None


class NoPE(Position):
    """No position encoding: a causal decoder can still count what it sees (Haviv et al. 2022, arXiv:2203.16634)."""

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding that does nothing."""
        return PositionEncoding()


class Sinusoidal(Position):
    """Fixed sine and cosine codes added to the embeddings (Vaswani et al. 2017, arXiv:1706.03762).

    PE(pos, 2i) = sin(pos / base^{2i/d_model}), PE(pos, 2i+1) = cos of the same: low dimensions have the high
    frequencies.
    """

    base: Annotated[float, Changes("outputs"), Gt(1)] = 10_000.0

    def check(self, shape: Shape) -> None:
        """Sine and cosine come in pairs."""
        _require_even("d_model", shape.d_model, self.kind)

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding that adds the codes."""
        return SinusoidalEncoding(self.base)

    def codes(self, length: int, d_model: int) -> Tensor:
        """The codes of positions 0 … length−1, `(length, d_model)`."""
        return sinusoidal_codes(torch.arange(length), d_model, self.base)


class SinusoidalEncoding(PositionEncoding):
    """Adds `sinusoidal_codes` to the embeddings."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base

    def add(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """`(B, T, d_model)` plus the codes of the positions."""
        return embeddings + sinusoidal_codes(positions, embeddings.shape[-1], self.base)


def sinusoidal_codes(positions: Tensor, d_model: int, base: float = 10_000.0) -> Tensor:
    """The sinusoidal codes of positions `(…)` in fp32, `(…, d_model)`: sines in even, cosines in odd dimensions."""
    angle = angles(positions, frequencies(d_model, base, positions.device))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def frequencies(dimensions: int, base: float, device: torch.device | None = None) -> Tensor:
    """base^{−2i/dimensions}, fp32, `(dimensions / 2,)`: radians a position, the highest first."""
    return base ** -(torch.arange(0, dimensions, 2, device=device, dtype=torch.float32) / dimensions)


def angles(positions: Tensor, frequency: Tensor) -> Tensor:
    """Position times frequency, in radians, `(…, len(frequency))`."""
    return positions.float()[..., None] * frequency


class Learned(Position):
    """A trained vector for each position up to a maximum, added to the embeddings (BERT, arXiv:1810.04805).

    Rows past the training length stay as initialised; a longer sequence than `max_length` raises `UnsupportedLength`.
    """

    max_length: Annotated[int, Changes("parameters"), Ge(1)] = 128

    def limit(self) -> int:
        """`max_length`."""
        return self.max_length

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding with a `(max_length, d_model)` table."""
        return LearnedEncoding(self.max_length, shape.d_model)


class UnsupportedLength(UserError):
    """A model cannot take a sequence of this length."""


class LearnedEncoding(PositionEncoding):
    """Adds a trained row a position."""

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_length, d_model)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """0 … length−1; raises `UnsupportedLength` when the table has fewer rows."""
        if length > (maximum := self.table.num_embeddings):
            raise UnsupportedLength(
                f"position.max_length = {maximum}: learned positions cannot take a sequence of {length} tokens; "
                f"raise max_length to {length} or more"
            )
        return super().positions(length, device)

    def add(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """`(B, T, d_model)` plus the rows of the positions."""
        return embeddings + self.table(positions)


@dataclass(frozen=True)
class Rotation:
    """How fast each pair of dimensions turns, `(d_head / 2,)` radians a position, and what it is multiplied by."""

    frequency: Tensor
    amplitude: float = 1.0


class RoPE(Position):
    """Rotary positions: queries and keys turn by an angle proportional to their position (Su et al. 2021,
    arXiv:2104.09864).

    Pair i turns by pos · base^{−2i/d_head}, so that a score depends on the distance of query and key alone.
    """

    base: Annotated[float, Changes("outputs"), Gt(1)] = 10_000.0

    def check(self, shape: Shape) -> None:
        """Rotations act on pairs of dimensions."""
        _require_even(shape.d_head_field, shape.d_head, self.kind)

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding that rotates."""
        rotation = Rotation(frequencies(shape.d_head, self.base))
        return RotaryEncoding(rotation, rotation)


class ScaledRoPE(Position):
    """Base of the ways to stretch RoPE by a factor s, so that longer sequences turn no further than trained ones.

    The factor may differ between training and evaluation: 1 and s stretch a model that was trained without.
    """

    base: Annotated[float, Changes("outputs"), Gt(1)] = 10_000.0
    train_factor: Annotated[float, Changes("outputs"), Ge(1)] = 1.0
    test_factor: Annotated[float, Changes("evaluation"), Ge(1)] = 4.0

    @abstractmethod
    def rotation(self, d_head: int, factor: float) -> Rotation:
        """The rotation stretched by a factor; that of RoPE for a factor of 1."""

    def check(self, shape: Shape) -> None:
        """Rotations act on pairs of dimensions."""
        _require_even(shape.d_head_field, shape.d_head, self.kind)

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding that rotates, by one factor in training and by the other in evaluation."""
        return RotaryEncoding(*(self.rotation(shape.d_head, s) for s in (self.train_factor, self.test_factor)))


class LinearRoPE(ScaledRoPE):
    """Position interpolation: RoPE at pos / s (Chen et al. 2023, arXiv:2306.15595)."""

    def rotation(self, d_head: int, factor: float) -> Rotation:
        """All frequencies fall alike."""
        return Rotation(frequencies(d_head, self.base) / factor)


class NTKRoPE(ScaledRoPE):
    """NTK-aware scaling: RoPE with base · s^{d/(d−2)} (Peng et al. 2023, arXiv:2309.00071, section 3.1).

    The lowest frequency falls by s as in interpolation, the highest stays: near tokens are told apart as before.
    """

    def check(self, shape: Shape) -> None:
        """The exponent d / (d − 2) needs two pairs."""
        super().check(shape)
        if shape.d_head < 4:
            raise UserError(f"{shape.d_head_field} = {shape.d_head}: {self.kind} needs 4 or more; raise it")

    def rotation(self, d_head: int, factor: float) -> Rotation:
        """Another base."""
        return Rotation(frequencies(d_head, self.base * factor ** (d_head / (d_head - 2))))


class YaRN(ScaledRoPE):
    """NTK-by-parts and a temperature (Peng et al. 2023, arXiv:2309.00071).

    Pair i makes r = trained_length · θ_i / 2π turns within the trained length. Where r < `slow` it is interpolated (θ_i
    / s), where r > `fast` it stays, between the two it is mixed by (r − slow) / (fast − slow): the paper's ramp, over
    turns. The authors' code, and transformers after it, ramps over the index i instead. Queries and keys are multiplied
    by 0.1 · ln s + 1 (of Latent, the rotated dimensions alone).
    """

    scales_logits = True
    trained_length: Annotated[int, Changes("outputs"), Ge(2)] = 256
    slow: Annotated[float, Changes("outputs"), Gt(0)] = 1.0
    fast: Annotated[float, Changes("outputs"), Gt(0)] = 32.0

    def check(self, shape: Shape) -> None:
        """There is a band between slow and fast."""
        super().check(shape)
        if self.fast <= self.slow:
            raise UserError(f"position.fast = {self.fast} must exceed position.slow = {self.slow}; raise fast")

    def rotation(self, d_head: int, factor: float) -> Rotation:
        """Slow pairs interpolated, fast ones kept."""
        frequency = frequencies(d_head, self.base)
        turns = self.trained_length * frequency / (2 * math.pi)
        kept = ((turns - self.slow) / (self.fast - self.slow)).clamp(0, 1)
        return Rotation(frequency * (kept + (1 - kept) / factor), 0.1 * math.log(factor) + 1)


class RotaryEncoding(PositionEncoding):
    """Rotates queries and keys, by one rotation in training and another in evaluation."""

    def __init__(self, train: Rotation, test: Rotation) -> None:
        super().__init__()
        self.train_amplitude, self.test_amplitude = train.amplitude, test.amplitude
        self.register_buffer("train_frequency", train.frequency, persistent=False)
        self.register_buffer("test_frequency", test.frequency, persistent=False)
        self.train_frequency: Tensor
        self.test_frequency: Tensor

    def relation(self, queries: Tensor, keys: Tensor, *, causal: bool, cached: bool) -> Relation:
        """The rotation by position, from fp32 tables."""
        frequency = self.train_frequency if self.training else self.test_frequency
        angle = angles(queries, frequency.float())
        amplitude = torch.full_like(angle, self.train_amplitude if self.training else self.test_amplitude)
        return Relation(queries, keys, encode=partial(_rotate_both, turns=torch.polar(amplitude, angle)))


def _rotate_both(query: Tensor, key: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(query, turns), rotate(key, turns)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Multiplies each pair of dimensions of `(…, T, d_head)`, read as a complex number, by e^{i·angle}.

    `turns` is `(T, d_head / 2)`, complex64; the result has the type of `x`.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class ALiBi(Position):
    """Attention logits fall linearly with distance, by a fixed slope a head (Press et al. 2022, arXiv:2108.12409)."""

    biases_logits = True

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding with a slope a head."""
        return LinearBiases(shape.num_heads)

    def flash_obstacle(self, device: str, *, causal: bool) -> str:
        """None in a decoder, where the bias rides in extra dimensions; the CPU's flash takes an untrained bias."""
        return f"{self.kind} adds a T×T bias where attention is not causal" if device == "cuda" and not causal else ""

    def added_width(self, *, causal: bool) -> int:
        """Two, in which the bias rides."""
        return 2 if causal else 0


class LinearBiases(PositionEncoding):
    """Adds −slope · |i − j| to the logit of query i and key j.

    A causal query i sees keys j ≤ i only, where −slope·(i − j) = slope·j − slope·i; the second term is the same for the
    whole row and cancels in the softmax. So slope·j rides in two extra dimensions of queries and keys, no T×T bias
    is made, and flash attention stays on. j is split as 256·a + b, both exact in bfloat16. A cache keeps keys of d_head
    dimensions; there the bias is a row a query.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", alibi_slopes(num_heads), persistent=False)
        self.slopes: Tensor

    def relation(self, queries: Tensor, keys: Tensor, *, causal: bool, cached: bool) -> Relation:
        """Extra dimensions when causal; otherwise an explicit bias."""
        if cached or not causal:
            return Relation(queries, keys, bias=self._bias)
        position = queries.float()
        block = torch.div(position, 256, rounding_mode="floor") * 256
        columns = torch.stack([block, position - block], dim=-1)
        return Relation(queries, keys, encode=partial(_append, slopes=self.slopes[:, None, None], columns=columns))

    def _bias(self, query: Tensor, at: Tensor, of: Tensor) -> Tensor:
        distance = (at[..., :, None] - of[..., None, :]).abs()
        return -self.slopes.view(-1, *(1 for _ in distance.shape)) * distance


def _append(query: Tensor, key: Tensor, slopes: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    slope = slopes.to(query.dtype).expand(*query.shape[:-1], columns.shape[-1])
    column = columns.to(key.dtype).expand(*key.shape[:-1], -1)
    return torch.cat([query, slope], dim=-1), torch.cat([key, column], dim=-1)


def alibi_slopes(num_heads: int) -> Tensor:
    """2^{−8h/n} for h = 1 … n when n is a power of two; otherwise those of the power below, filled up with every other
    slope of the power above, as in the paper's code. `(num_heads,)`, fp32.
    """
    below = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / below) for head in range(below)]
    between = [2 ** (-4 * (head + 1) / below) for head in range(0, 2 * below, 2)]
    return torch.tensor((slopes + between)[:num_heads])


class T5Bias(Position):
    """A trained bias a head for each bucket of distance, shared by the layers (Raffel et al. 2020, arXiv:1910.10683).

    Short distances have a bucket each, longer ones share buckets that grow logarithmically up to `max_distance`.
    """

    biases_logits = True
    num_buckets: Annotated[int, Changes("parameters"), Ge(4)] = 32
    max_distance: Annotated[int, Changes("outputs"), Ge(2)] = 128

    def check(self, shape: Shape) -> None:
        """The logarithmic buckets start at `num_buckets / 2` (bidirectional: a quarter)."""
        if self.max_distance <= self.num_buckets // 2:
            raise UserError(
                f"position.max_distance = {self.max_distance} must exceed num_buckets / 2 = {self.num_buckets // 2}; "
                f"raise max_distance or lower num_buckets"
            )

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding with a `(num_buckets, num_heads)` table."""
        return BucketedBias(self.num_buckets, self.max_distance, shape)


class BucketedBias(PositionEncoding):
    """Adds table[bucket(i − j)] to the logit of query i and key j."""

    def __init__(self, num_buckets: int, max_distance: int, shape: Shape) -> None:
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = BiasTable(num_buckets, shape.num_heads, std=shape.d_model**-0.5)

    def relation(self, queries: Tensor, keys: Tensor, *, causal: bool, cached: bool) -> Relation:
        """The bias, made where it is asked for."""
        return Relation(queries, keys, bias=partial(self._bias, causal=causal))

    def _bias(self, query: Tensor, at: Tensor, of: Tensor, *, causal: bool) -> Tensor:
        distance = at[..., :, None] - of[..., None, :]
        bucket = distance_buckets(distance, self.num_buckets, self.max_distance, causal=causal)
        return self.table(bucket).movedim(-1, 0)


class BiasTable(nn.Embedding):
    """A bias a bucket and head, drawn from N(0, 1/d_model) as in T5: as wide as token embeddings it would swamp the
    logits.
    """

    def __init__(self, num_buckets: int, num_heads: int, std: float) -> None:
        self.std = std
        super().__init__(num_buckets, num_heads)

    def reset_parameters(self) -> None:
        """Draw the table."""
        nn.init.normal_(self.weight, std=self.std)


def distance_buckets(distance: Tensor, num_buckets: int, max_distance: int, *, causal: bool) -> Tensor:
    """The bucket of each distance query − key (int64, any shape).

    Causal: keys ahead share bucket 0. Bidirectional: half of the buckets serve keys ahead.
    """
    if causal:
        offset, distance = torch.zeros_like(distance), distance.clamp(min=0)
    else:
        num_buckets //= 2
        offset, distance = (distance < 0) * num_buckets, distance.abs()
    exact = num_buckets // 2
    growth = torch.log(distance.clamp(min=1) / exact) / math.log(max_distance / exact)
    shared = (exact + growth * (num_buckets - exact)).long().clamp(max=num_buckets - 1)
    return offset + torch.where(distance < exact, distance, shared)


class TransformerXL(Position):
    """Relative positions by content: the logit of query i and key j is (q_i + u)·k_j + (q_i + v)·W_R R_{i−j}, with
    sinusoidal codes R of the distance (Dai et al. 2019, arXiv:1901.02860).

    W_R is a layer's own, the biases u and v are shared by the layers, as in the paper's code. They meet queries that
    are already scaled. Each query meets the codes of all distances, so windows of keys save no memory: T×T stays.
    """

    biases_logits = True
    counts_tokens = False

    def check(self, shape: Shape) -> None:
        """Sine and cosine come in pairs."""
        _require_even("d_model", shape.d_model, self.kind)

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding with W_R a layer, u and v."""
        return ContentRelative(shape)


class ContentRelative(PositionEncoding):
    """Transformer-XL's module: u changes the query, (q + v)·W_R R_{i−j} is a bias that depends on it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.num_heads * shape.d_head
        self.num_heads, self.d_model = shape.num_heads, shape.d_model
        self.projections = nn.ModuleList(nn.Linear(shape.d_model, width, bias=False) for _ in range(shape.num_layers))
        self.content = HeadBias(shape.num_heads, shape.d_head)
        self.place = HeadBias(shape.num_heads, shape.d_head)

    def relation(self, queries: Tensor, keys: Tensor, *, causal: bool, cached: bool) -> Relation:
        """The part that all layers share: the codes of every distance there is."""
        furthest = keys.shape[0] - 1
        distances = torch.arange(0 if causal else -furthest, furthest + 1, device=keys.device)
        codes = sinusoidal_codes(distances, self.d_model).to(self.content.weight.dtype)
        return Relation(queries, keys, encode=self._encode, bias=partial(self._bias, codes=codes, least=distances[0]))

    def in_layer(self, relation: Relation, layer: int) -> Relation:
        """With the layer's projection of the codes."""
        assert isinstance(relation.bias, partial)
        codes = relation.bias.keywords["codes"]
        projected = self.projections[layer](codes).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        return replace(relation, bias=partial(relation.bias, codes=projected))

    def _encode(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query + self.content.weight[:, None].to(query.dtype), key

    def _bias(self, query: Tensor, at: Tensor, of: Tensor, *, codes: Tensor, least: Tensor) -> Tensor:
        between = (1 for _ in at.shape)  # dimensions of the positions, T among them
        shifted = query + self.place.weight.view(self.num_heads, *between, -1)
        by_distance = shifted @ codes.view(self.num_heads, *(1 for _ in at.shape[1:]), *codes.shape[1:]).transpose(
            -2, -1
        )
        distance = at[..., :, None] - of[..., None, :] - least
        index = distance.clamp(0, codes.shape[1] - 1)  # what lies outside is masked
        return by_distance.gather(-1, index.expand(*by_distance.shape[:-1], -1))


class HeadBias(nn.Module):
    """A trained vector a head, `(H, d_head)`, zero at the start."""

    def __init__(self, num_heads: int, d_head: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, d_head))

    def reset_parameters(self) -> None:
        """Zero."""
        nn.init.zeros_(self.weight)


class Randomised(Position):
    """Another encoding at randomised positions: in training, a sorted random choice among 0 … max_length−1 stands for
    0 … T−1, drawn anew each step, so that positions of longer sequences are trained too (Ruoss et al. 2023,
    arXiv:2305.16843).

    In evaluation the positions of `test_tokens` tokens are one such choice, drawn when the model is built: fixed, so
    that a sequence may grow token by token, which the paper's fresh draw for every sequence rules out. So a sequence
    shorter than `test_tokens` stands closer together, and nearer to zero, than one of its length did in training.
    """

    limited_by = "test_tokens"
    inner: Annotated[Position, Changes("outputs")] = Sinusoidal()
    max_length: Annotated[int, Changes("outputs"), Ge(2)] = 512
    test_tokens: Annotated[int, Changes("evaluation"), Ge(1)] = 64

    @property
    def scales_logits(self) -> bool:  # type: ignore[override]
        """As the inner encoding."""
        return self.inner.scales_logits

    @property
    def biases_logits(self) -> bool:  # type: ignore[override]
        """As the inner encoding."""
        return self.inner.biases_logits

    def check(self, shape: Shape) -> None:
        """The inner encoding takes gaps, and positions up to max_length."""
        self.inner.check(shape)
        if isinstance(self.inner, Randomised | NoPE) or not self.inner.counts_tokens:
            raise UserError(f"position.inner = {self.inner.kind} cannot be randomised; choose another encoding")
        if (limit := self.inner.limit()) is not None and limit < self.max_length:
            raise UserError(
                f"position.max_length = {self.max_length} exceeds the {limit} positions of {self.inner.kind}; lower it"
            )
        if self.test_tokens > self.max_length:
            raise UserError(
                f"position.test_tokens = {self.test_tokens} exceeds max_length = {self.max_length}; lower it"
            )

    def limit(self) -> int:
        """`test_tokens`, which are no more than `max_length`."""
        return self.test_tokens

    def flash_obstacle(self, device: str, *, causal: bool) -> str:
        """As the inner encoding."""
        return self.inner.flash_obstacle(device, causal=causal)

    def added_width(self, *, causal: bool) -> int:
        """As the inner encoding."""
        return self.inner.added_width(causal=causal)

    def build(self, shape: Shape) -> PositionEncoding:
        """The inner encoding at other positions."""
        return RandomisedPositions(self.inner.build(shape), self.max_length, self.test_tokens)


class RandomisedPositions(PositionEncoding):
    """Draws positions from torch's global generator, which is seeded from (seed, step)."""

    def __init__(self, inner: PositionEncoding, max_length: int, test_tokens: int) -> None:
        super().__init__()
        self.inner, self.max_length, self.test_tokens = inner, max_length, test_tokens
        self.register_buffer("fixed", torch.arange(test_tokens))
        self.fixed: Tensor

    def draw_buffers(self) -> None:
        """Choose the positions of evaluation."""
        self.fixed.copy_(self._choice(self.test_tokens))

    def _choice(self, length: int) -> Tensor:
        return torch.randperm(self.max_length)[:length].sort().values

    def positions(self, length: int, device: torch.device) -> Tensor:
        """A sorted choice; raises `UnsupportedLength` for more tokens than `test_tokens`."""
        if length > self.test_tokens:
            raise UnsupportedLength(
                f"position.test_tokens = {self.test_tokens}: randomised positions cannot take a sequence of {length} "
                f"tokens; raise test_tokens to {length} or more"
            )
        return self._choice(length).to(device) if self.training else self.fixed[:length]

    def add(self, embeddings: Tensor, positions: Tensor) -> Tensor:
        """As the inner encoding."""
        return self.inner.add(embeddings, positions)

    def relation(self, queries: Tensor, keys: Tensor, *, causal: bool, cached: bool) -> Relation:
        """As the inner encoding."""
        return self.inner.relation(queries, keys, causal=causal, cached=cached)

    def in_layer(self, relation: Relation, layer: int) -> Relation:
        """As the inner encoding."""
        return self.inner.in_layer(relation, layer)


def _require_even(name: str, value: int, kind: str) -> None:
    if value % 2:
        choices = f"{value + 1} or {value - 1}" if value > 1 else "2"
        raise UserError(f"{name} = {value}: {kind} needs an even number; choose {choices}")
