"""Position encodings: how a Transformer, whose attention is permutation-equivariant, learns where a token stands.

A level is a spec; `build` makes its module, a `PositionEncoding`. An encoding acts in one or both of two places:
`add` changes the embeddings once, `relation` says what happens inside every layer's attention.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from harness.components.shape import Shape
from harness.schema import Changes, Level, UserError


def _unchanged(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query, key


@dataclass(frozen=True)
class Relation:
    """What an encoding does inside attention; made once a forward pass, shared by all layers.

    Attributes:
        encode: maps scaled queries and keys, both `(B, H, T, d_head)`, to those that are multiplied; it may add
            dimensions.
        bias: `(H, T, T)`, rows are queries, added to the scaled logits; None adds nothing and keeps flash attention on.
    """

    encode: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _unchanged
    bias: Tensor | None = None


class PositionEncoding(nn.Module):
    """The module of a level; as it stands it encodes nothing."""

    def add(self, embeddings: Tensor) -> Tensor:
        """Embeddings `(B, T, d_model)` with whatever the encoding adds to them, same shape."""
        return embeddings

    def relation(self, length: int, *, causal: bool, device: torch.device) -> Relation:
        """What attention over positions 0 … length−1 does with queries and keys."""
        return Relation()


class Position(Level):
    """Base of the position-encoding axis. Subclass it, implement `build`, and the level works in every command."""

    @abstractmethod
    def build(self, shape: Shape) -> PositionEncoding:
        """The encoding's module for a model of this shape."""

    def check(self, shape: Shape) -> None:
        """Raise `UserError` where the level cannot be combined with a model of this shape."""

    def limit(self) -> int | None:
        """The longest sequence, in tokens, that the level can take; None where there is no limit."""
        return None

    def flash_obstacle(self) -> str:
        """Why flash attention cannot run with this level in a causal decoder; empty where it can."""
        return ""

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
        return sinusoidal_codes(length, d_model, self.base)


class SinusoidalEncoding(PositionEncoding):
    """Adds `sinusoidal_codes` to the embeddings."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base = base

    def add(self, embeddings: Tensor) -> Tensor:
        """`(B, T, d_model)` plus the codes of positions 0 … T−1."""
        _, length, d_model = embeddings.shape
        return embeddings + sinusoidal_codes(length, d_model, self.base, device=embeddings.device)


def sinusoidal_codes(length: int, d_model: int, base: float, device: torch.device | None = None) -> Tensor:
    """The sinusoidal table in fp32, `(length, d_model)`: sines in even, cosines in odd dimensions."""
    angle = angles(length, d_model, base, device)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


def angles(length: int, dimensions: int, base: float, device: torch.device | None = None) -> Tensor:
    """Pos · base^{−2i/dimensions} in radians, fp32, `(length, dimensions / 2)`."""
    frequency = base ** -(torch.arange(0, dimensions, 2, device=device, dtype=torch.float32) / dimensions)
    return torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency


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

    def add(self, embeddings: Tensor) -> Tensor:
        """`(B, T, d_model)` plus rows 0 … T−1 of the table; raises `UnsupportedLength` when there are fewer than T."""
        length, maximum = embeddings.shape[1], self.table.num_embeddings
        if length > maximum:
            raise UnsupportedLength(
                f"position.max_length = {maximum}: learned positions cannot take a sequence of {length} tokens; "
                f"raise max_length to {length} or more"
            )
        return embeddings + self.table.weight[:length]


class RoPE(Position):
    """Rotary positions: queries and keys turn by an angle proportional to their position (Su et al. 2021,
    arXiv:2104.09864).

    Pair i turns by pos · base^{−2i/d_head}, so that a score depends on the distance of query and key alone.
    """

    base: Annotated[float, Changes("outputs"), Gt(1)] = 10_000.0

    def check(self, shape: Shape) -> None:
        """Rotations act on pairs of dimensions."""
        _require_even("d_model / num_heads", shape.d_head, self.kind)

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding that rotates."""
        return RotaryEncoding(self.base, shape.d_head)


class RotaryEncoding(PositionEncoding):
    """Rotates queries and keys."""

    def __init__(self, base: float, d_head: int) -> None:
        super().__init__()
        self.base, self.d_head = base, d_head

    def relation(self, length: int, *, causal: bool, device: torch.device) -> Relation:
        """The rotation by position, from fp32 tables."""
        angle = angles(length, self.d_head, self.base, device)
        return Relation(encode=partial(_rotate_both, turns=torch.polar(torch.ones_like(angle), angle)))


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

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding with a slope a head."""
        return LinearBiases(shape.num_heads)


class LinearBiases(PositionEncoding):
    """Adds −slope · |i − j| to the logit of query i and key j.

    A causal query i sees keys j ≤ i only, where −slope·(i − j) = slope·j − slope·i; the second term is the same for the
    whole row and cancels in the softmax. So slope·j rides in two extra dimensions of queries and keys, no T×T bias
    is made, and flash attention stays on. j is split as 256·a + b, both exact in bfloat16.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", alibi_slopes(num_heads), persistent=False)
        self.slopes: Tensor

    def relation(self, length: int, *, causal: bool, device: torch.device) -> Relation:
        """Extra dimensions when causal; otherwise an explicit bias."""
        position = torch.arange(length, device=device, dtype=torch.float32)
        if causal:
            block = torch.div(position, 256, rounding_mode="floor") * 256
            columns = torch.stack([block, position - block], dim=-1)
            return Relation(encode=partial(_append, slopes=self.slopes[:, None, None], columns=columns))
        distance = (position[:, None] - position[None, :]).abs()
        return Relation(bias=-self.slopes[:, None, None] * distance)


def _append(query: Tensor, key: Tensor, slopes: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = query.shape
    slope = slopes.to(query.dtype).expand(batch, heads, length, columns.shape[-1])
    column = columns.to(key.dtype).expand(batch, heads, -1, -1)
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

    num_buckets: Annotated[int, Changes("parameters"), Ge(4)] = 32
    max_distance: Annotated[int, Changes("outputs"), Ge(2)] = 128

    def check(self, shape: Shape) -> None:
        """The logarithmic buckets start at `num_buckets / 2` (bidirectional: a quarter)."""
        if self.max_distance <= self.num_buckets // 2:
            raise UserError(
                f"position.max_distance = {self.max_distance} must exceed num_buckets / 2 = {self.num_buckets // 2}; "
                f"raise max_distance or lower num_buckets"
            )

    def flash_obstacle(self) -> str:
        """The bias is trained, and no flash kernel gives it gradients."""
        return f"{self.kind} adds a trained T×T bias, which flash does not take"

    def build(self, shape: Shape) -> PositionEncoding:
        """An encoding with a `(num_buckets, num_heads)` table."""
        return BucketedBias(self.num_buckets, self.max_distance, shape)


class BucketedBias(PositionEncoding):
    """Adds table[bucket(i − j)] to the logit of query i and key j."""

    def __init__(self, num_buckets: int, max_distance: int, shape: Shape) -> None:
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = BiasTable(num_buckets, shape.num_heads, std=shape.d_model**-0.5)

    def relation(self, length: int, *, causal: bool, device: torch.device) -> Relation:
        """The bias `(H, T, T)`."""
        position = torch.arange(length, device=device)
        distance = position[:, None] - position[None, :]
        bucket = distance_buckets(distance, self.num_buckets, self.max_distance, causal=causal)
        return Relation(bias=self.table(bucket).permute(2, 0, 1))


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


def _require_even(name: str, value: int, kind: str) -> None:
    if value % 2:
        raise UserError(f"{name} = {value}: {kind} needs an even number; choose {value + 1} or {value - 1}")
