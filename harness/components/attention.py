"""Attention: which keys a query sees, how keys and values are shared or compressed, and the kernels that compute it.

A level is a spec; `build` makes its module from the `Parts` that all levels have in common. Modules take what an
encoder wrote as `memory` (cross-attention), and a cache that they extend.
"""

from abc import abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness.components.cache import FullCache, LayerCache, MemoryCache, StateCache, TokenCache, WindowCache
from harness.components.kernel import same_kernels
from harness.components.linear import InputProjection, without_autocast
from harness.components.norm import RMSNormalisation
from harness.components.output_projection import OutputProjection
from harness.components.position import Position, Relation
from harness.components.qk_norm import NoQKNorm, QueryKeyNorm
from harness.components.scale import Scale
from harness.components.shape import Shape
from harness.schema import Changes, Level, UserError
from harness.trace import Trace


@dataclass(frozen=True)
class Parts:
    """What every attention module is made with."""

    shape: Shape
    scale: Scale
    qk_norm: QueryKeyNorm
    output_projection: OutputProjection
    dropout: float


class Attention(Level):
    """Base of the attention axis."""

    draws_keys: ClassVar[bool] = False  # True: among all tokens of an encoder, padding too
    has_logits: ClassVar[bool] = True  # False: there is nothing to add a bias to, and nothing to drop out

    @abstractmethod
    def build(self, parts: Parts) -> nn.Module:
        """A module called as `module(x, relation, causal=…, memory=…, real=…, cache=…, trace=…)`; it has `cache`."""

    @abstractmethod
    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """Numbers that a layer's cache holds for one sequence after so many tokens."""

    def seen_keys(self, tokens: int, *, causal: bool) -> int:
        """Keys that one query is multiplied with in a sequence of so many tokens, at most."""
        return tokens

    def check(self, parts: Parts, position: Position) -> None:
        """Raise `UserError` where the level cannot be combined with a model of these parts."""
        if not self.has_logits and position.biases_logits:
            raise UserError(
                f"attention = {self.kind} has no logits for position = {position.kind} to bias; choose a position "
                f"that changes embeddings, queries or keys"
            )
        if not self.has_logits and position.scales_logits:
            raise UserError(
                f"attention = {self.kind} has no logits for position = {position.kind} to scale; choose LinearRoPE() "
                f"or NTKRoPE()"
            )
        if not self.has_logits and parts.dropout:
            raise UserError(
                f"attention_dropout = {parts.dropout}: attention = {self.kind} has no weights to drop; use 0"
            )

    def rotated(self, shape: Shape) -> Shape:
        """The shape with the part of a head that positions act on."""
        return shape

    def query_width(self, shape: Shape) -> int:
        """Dimensions of what a query is multiplied with, but for those that positions add."""
        return shape.d_head

    def across(self) -> "Attention":
        """The level that reads an encoder's output in a model of this one."""
        return self

    def flash_obstacle(self, device: str) -> str:
        """Why flash attention cannot run with this level on a device; empty where it can."""
        return ""


class MultiHead(Attention):
    """softmax(scale · QKᵀ) V in num_heads subspaces of d_head dimensions (Vaswani et al. 2017, arXiv:1706.03762)."""

    def build(self, parts: Parts) -> nn.Module:
        """As many keys and values as queries."""
        return MultiHeadAttention(parts, parts.shape.num_heads, Everything())

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """2 · n_h · d_h a token."""
        return 2 * shape.num_heads * shape.d_head * tokens


class GroupedQuery(Attention):
    """Groups of heads share keys and values: 2 · n_g · d_h numbers a token in the cache (Ainslie et al. 2023,
    arXiv:2305.13245).
    """

    num_groups: Annotated[int, Changes("parameters"), Ge(1)] = 2

    def check(self, parts: Parts, position: Position) -> None:
        """Groups of one size."""
        super().check(parts, position)
        if parts.shape.num_heads % self.num_groups:
            raise UserError(
                f"attention.num_groups = {self.num_groups} does not divide num_heads = {parts.shape.num_heads}; "
                f"choose a divisor"
            )

    def build(self, parts: Parts) -> nn.Module:
        """`num_groups` keys and values."""
        return MultiHeadAttention(parts, self.num_groups, Everything())

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """2 · n_g · d_h a token."""
        return 2 * self.num_groups * shape.d_head * tokens


class MultiQuery(Attention):
    """All heads share one key and one value: 2 · d_h numbers a token in the cache (Shazeer 2019, arXiv:1911.02150)."""

    def build(self, parts: Parts) -> nn.Module:
        """One key, one value."""
        return MultiHeadAttention(parts, 1, Everything())

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """2 · d_h a token."""
        return 2 * shape.d_head * tokens


class Latent(Attention):
    """Multi-head latent attention: keys and values of all heads are W_UK c and W_UV c of one latent c = norm(W_DKV x)
    of `d_latent` dimensions (DeepSeek-AI 2024, arXiv:2405.04434).

    Positions act on `d_rope` further dimensions of each query and of one key that all heads share, so that the cache
    holds d_latent + d_rope numbers a token. Decoding with a cache multiplies W_UK into the query and W_UV into the
    result instead of making keys and values. Queries are not compressed. With a position encoding that rotates nothing
    the `d_rope` dimensions are plain ones of one shared key.
    """

    d_latent: Annotated[int, Changes("parameters"), Ge(1)] = 32
    d_rope: Annotated[int, Changes("parameters"), Ge(2)] = 8

    def check(self, parts: Parts, position: Position) -> None:
        """Keys are never made in decoding, so they cannot be normalised."""
        super().check(parts, position)
        if not isinstance(parts.qk_norm, NoQKNorm):
            raise UserError(
                f"qk_norm = {parts.qk_norm.kind}: attention = Latent normalises its latent instead; use NoQKNorm()"
            )

    def build(self, parts: Parts) -> nn.Module:
        """The latent, its two ways up, the shared key."""
        return LatentAttention(parts, self.d_latent, self.d_rope)

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """d_c + d_h^R a token."""
        return (self.d_latent + self.d_rope) * tokens

    def rotated(self, shape: Shape) -> Shape:
        """`d_rope` of them."""
        return replace(shape, d_head=self.d_rope, d_head_field="attention.d_rope")

    def query_width(self, shape: Shape) -> int:
        """d_head + d_rope."""
        return shape.d_head + self.d_rope


class Sparse(Attention):
    """Base of the levels whose queries see a window and some tokens besides: O(n · w) in time and memory (but with
    TransformerXL, whose logits by distance are T×T).
    """

    window: Annotated[int, Changes("outputs"), Ge(1)] = 8

    @abstractmethod
    def pattern(self) -> "Blocks":
        """Which keys a query sees."""

    def build(self, parts: Parts) -> nn.Module:
        """As many keys and values as queries, seen through the pattern."""
        return MultiHeadAttention(parts, parts.shape.num_heads, self.pattern())

    def seen_keys(self, tokens: int, *, causal: bool) -> int:
        """The window, in an encoder on both sides, and what is seen besides."""
        pattern = self.pattern()
        window = self.window if causal else 2 * self.window - 1
        return min(tokens, window + pattern.num_global + pattern.num_random)

    def across(self) -> Attention:
        """Full attention: a window on another sequence has no place to stand."""
        return MultiHead()

    def flash_obstacle(self, device: str) -> str:
        """CUDA's flash takes no mask, the CPU's does."""
        return f"{self.kind} masks keys within blocks of the sequence" if device == "cuda" else ""


class SlidingWindow(Sparse):
    """Query i sees keys j with |i − j| < window, in a decoder j ≤ i: O(n · w), a reach of layers × window (Beltagy et
    al. 2020, arXiv:2004.05150).
    """

    def pattern(self) -> "Blocks":
        """The window alone."""
        return Blocks(self.window)

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """2 · n_h · d_h a token, of `window` tokens at most."""
        return 2 * shape.num_heads * shape.d_head * min(tokens, self.window)


class Longformer(Sparse):
    """|i − j| < window, or j < num_global: the first tokens are seen by all, and in an encoder see all (Beltagy et al.
    2020, arXiv:2004.05150). Global tokens share the projections of the others.
    """

    num_global: Annotated[int, Changes("outputs"), Ge(1)] = 1

    def pattern(self) -> "Blocks":
        """Window and global tokens."""
        return Blocks(self.window, self.num_global)

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """2 · n_h · d_h a token, of `window` + `num_global` tokens at most."""
        return 2 * shape.num_heads * shape.d_head * min(tokens, self.window + self.num_global)


class BigBird(Sparse):
    """Window, global tokens, and `num_random` keys for each block of `window` queries, drawn when the model is built;
    in a decoder among j < start of the block (Zaheer et al. 2020, arXiv:2007.14062).
    """

    draws_keys = True
    num_global: Annotated[int, Changes("outputs"), Ge(0)] = 1
    num_random: Annotated[int, Changes("outputs"), Ge(1)] = 2

    def pattern(self) -> "Blocks":
        """Window, global and random tokens."""
        return Blocks(self.window, self.num_global, self.num_random)

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """2 · n_h · d_h a token: any may be drawn by a later block."""
        return 2 * shape.num_heads * shape.d_head * tokens


class Linear(Attention):
    """φ(q)·Σ φ(k) vᵀ / φ(q)·Σ φ(k) with φ = elu + 1: O(n · d²), and a state of fixed size (Katharopoulos et al. 2020,
    arXiv:2006.16236).

    No softmax is approximated. The scale multiplies q before φ. Rotary positions turn φ(q) and φ(k) in the numerator
    only, which keeps the normaliser positive (Su et al. 2021, arXiv:2104.09864, section 3.3).
    """

    has_logits = False

    def seen_keys(self, tokens: int, *, causal: bool) -> int:
        """None: sums of keys are."""
        return 0

    def build(self, parts: Parts) -> nn.Module:
        """Sums instead of a softmax."""
        return LinearAttention(parts)

    def cache_elements(self, shape: Shape, tokens: int) -> int:
        """n_h · (d_h² + d_h), however many tokens."""
        return shape.num_heads * (shape.d_head**2 + shape.d_head)

    def across(self) -> Attention:
        """Full attention."""
        return MultiHead()

    def flash_obstacle(self, device: str) -> str:
        """There is no softmax."""
        return f"{self.kind} has no softmax"


@dataclass(frozen=True)
class Heads:
    """What one pass of attention computes with.

    Attributes:
        query: scaled and encoded, `(B, H, T, d)`.
        key: encoded, `(B, G, K, d)`, G dividing H.
        value: `(B, G, K, d_v)`.
        raw: queries scaled and not encoded, for biases that depend on them.
        relation: positions and bias.
        numbers: `(K,)` numbers of the keys; the queries are the last T tokens of the sequence.
        causal: whether a query sees only keys that do not lie ahead.
        real: `(B, K)`, False at padding; None: no padding.
        dropout: probability at which a weight is dropped.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    raw: Tensor
    relation: Relation
    numbers: Tensor
    causal: bool
    real: Tensor | None = None
    dropout: float = 0.0

    @property
    def at(self) -> Tensor:
        """`(T,)`: numbers of the queries."""
        end = self.relation.keys.shape[0] if self.relation.keys.shape[0] else self.query.shape[2]
        return torch.arange(end - self.query.shape[2], end, device=self.query.device)

    @property
    def whole(self) -> bool:
        """Whether the queries are all tokens of the sequence that the keys belong to."""
        return self.numbers.shape[0] == self.query.shape[2] == self.relation.keys.shape[0]

    def bias(self) -> Tensor | None:
        """`(B or nothing, H, T, K)`, from the relation."""
        if self.relation.bias is None:
            return None
        return self.relation.bias(self.raw, self.relation.queries, self.relation.keys[self.numbers])


class Everything(nn.Module):
    """Every query sees every key, in a decoder those that do not lie ahead."""

    def allowed(self, at: Tensor, of: Tensor, *, causal: bool) -> Tensor | None:
        """`(…, Q, K)`: whether queries of numbers `(…, Q)` see keys of numbers `(…, K)`; None: all do."""
        return at[..., :, None] >= of[..., None, :] if causal else None

    STRIP = 512  # queries at a time where a bias would be T×T

    def mix(self, heads: Heads) -> Tensor:
        """softmax(QKᵀ + bias) V, `(B, H, T, d_v)`."""
        if heads.relation.bias is not None and heads.whole and heads.query.shape[2] > self.STRIP:
            return self._in_strips(heads)
        mask = None
        if heads.causal and not heads.whole and heads.query.shape[2] > 1:
            mask = self.allowed(heads.at, heads.numbers, causal=True)
        return fused_attention(
            heads.query,
            heads.key,
            heads.value,
            heads.bias(),
            causal=heads.causal and heads.whole,
            visible=visible_keys(mask, heads.real),
            dropout=heads.dropout,
        )

    def _in_strips(self, heads: Heads) -> Tensor:
        """The same, some queries at a time, and once more in the backward pass: memory grows with T, not with T²."""
        length = heads.query.shape[2]
        firsts = range(0, length, self.STRIP)
        again = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), same_kernels()))
        strips = [again(self._strip, heads, n, min(n + self.STRIP, length)) for n in firsts]
        return torch.cat(strips, dim=2)

    def _strip(self, heads: Heads, first: int, last: int) -> Tensor:
        """The rows of queries `first` to `last`; in a decoder they need no key from `last` on."""
        end = last if heads.causal else heads.query.shape[2]
        relation = replace(heads.relation, queries=heads.relation.queries[first:last], keys=heads.relation.keys[:end])
        part = replace(
            heads,
            query=heads.query[:, :, first:last],
            raw=heads.raw[:, :, first:last],
            key=heads.key[:, :, :end],
            value=heads.value[:, :, :end],
            numbers=heads.numbers[:end],
            real=None if heads.real is None else heads.real[:, :end],
            relation=relation,
        )
        return self.mix(part)

    def cache(self, capacity: int) -> TokenCache:
        """An empty cache for so many tokens."""
        return FullCache(capacity)


class Blocks(nn.Module):
    """A window, some global tokens, some random ones: computed in blocks of `window` queries, never as T×T."""

    ROWS = 256  # blocks with random keys of their own; later ones repeat them, in proportion to their place

    def __init__(self, window: int, num_global: int = 0, num_random: int = 0) -> None:
        super().__init__()
        self.window, self.num_global, self.num_random = window, num_global, num_random
        self.register_buffer("draws", torch.zeros(self.ROWS, num_random))
        self.draws: Tensor

    def draw_buffers(self) -> None:
        """Choose the random keys."""
        self.draws.uniform_()

    def cache(self, capacity: int) -> TokenCache:
        """Bounded, unless any token may be drawn later."""
        return FullCache(capacity) if self.num_random else WindowCache(self.window, self.num_global)

    def allowed(self, at: Tensor, of: Tensor, *, causal: bool, length: int | None = None) -> Tensor:
        """`(…, Q, K)`: whether queries of numbers `(…, Q)` see keys of numbers `(…, K)` in a sequence of `length`."""
        distance = at[..., :, None] - of[..., None, :]
        seen = (distance.abs() < self.window) | (of < self.num_global)[..., None, :]
        if self.num_random:
            drawn = self._random(at // self.window, at.shape[-1] if length is None else length, causal=causal)
            seen = seen | (of[..., None, :, None] == drawn[..., :, None, :]).any(-1)
        return seen & (distance >= 0) if causal else seen | (at < self.num_global)[..., :, None]

    def _random(self, block: Tensor, length: int, *, causal: bool) -> Tensor:
        """`(…, num_random)`: the keys drawn for blocks `(…)`; −1 where there is none before the first block."""
        room = (block * self.window if causal else torch.full_like(block, length))[..., None]
        drawn = (self.draws[block % self.ROWS] * room).long()
        return torch.where(room > 0, drawn.minimum(room - 1), -1)

    def _columns(self, blocks: int, length: int, *, causal: bool, device: torch.device) -> Tensor:
        """`(blocks, K)`: the keys that some query of a block may see, each once; −1 fills up."""
        number = torch.arange(blocks, device=device)
        first, last = -self.window, self.window if causal else 2 * self.window
        near = number[:, None] * self.window + torch.arange(first, last, device=device)
        near = torch.where((near >= 0) & (near < length), near, -1)
        others = torch.arange(min(self.num_global, length), device=device).expand(blocks, -1)
        if self.num_random:
            others = torch.cat([others, self._random(number, length, causal=causal)], dim=-1)
        columns = torch.cat([near, others], dim=-1)
        same = others[:, :, None] == columns[:, None, :]
        earlier = torch.arange(columns.shape[1], device=device) < near.shape[1] + torch.arange(
            others.shape[1], device=device
        ).unsqueeze(-1)
        return torch.cat([near, torch.where((same & earlier).any(-1), -1, others)], dim=-1)

    def mix(self, heads: Heads) -> Tensor:
        """softmax(QKᵀ + bias) V over the keys seen, `(B, H, T, d_v)`, in O(T · (window + global + random))."""
        if not heads.whole:
            mask = self.allowed(heads.at, heads.numbers, causal=heads.causal)
            seen = visible_keys(mask, heads.real)
            return fused_attention(
                heads.query, heads.key, heads.value, heads.bias(), causal=False, visible=seen, dropout=heads.dropout
            )
        mixed = self._blocked(heads)
        if heads.causal or not self.num_global:
            return mixed
        count = min(self.num_global, heads.query.shape[2])  # global tokens of an encoder see everything
        first = replace(
            heads,
            query=heads.query[:, :, :count],
            raw=heads.raw[:, :, :count],
            relation=replace(heads.relation, queries=heads.relation.queries[:count]),
        )
        return torch.cat([Everything().mix(first), mixed[:, :, count:]], dim=2)

    def _blocked(self, heads: Heads) -> Tensor:
        batch, _, length, _ = heads.query.shape
        blocks = -(-length // self.window)
        padded = blocks * self.window
        of = self._columns(blocks, length, causal=heads.causal, device=heads.query.device)
        at = torch.arange(padded, device=heads.query.device).view(blocks, self.window)
        there = (of >= 0)[:, None, :]
        seen = self.allowed(at, of, causal=heads.causal, length=length) & there
        index = of.clamp(min=0)

        def rows(x: Tensor) -> Tensor:  # (B, H, T, d) -> (B, H, blocks, window, d)
            return functional.pad(x, (0, 0, 0, padded - length)).unflatten(2, (blocks, self.window))

        def folded(x: Tensor) -> Tensor:  # (B, H, blocks, n, d) -> (B · blocks, H, n, d)
            return x.transpose(1, 2).flatten(0, 1)

        mask = seen[None].expand(batch, -1, -1, -1)
        if heads.real is not None:
            own = at[..., None] == of[:, None, :]  # a query in padding sees itself, as it must see something
            mask = mask & (heads.real[:, index][:, :, None] | own)
        mask = mask | (there & (at >= length)[..., None])  # rows that fill up the last block: anything but NaN
        bias = None
        if heads.relation.bias is not None:
            places = heads.relation.keys
            bias = heads.relation.bias(rows(heads.raw), places[at.clamp(max=length - 1)], places[index])
            bias = folded(bias if bias.dim() == 5 else bias.expand(batch, *bias.shape))
        mixed = fused_attention(
            folded(rows(heads.query)),
            folded(heads.key[:, :, index]),
            folded(heads.value[:, :, index]),
            bias,
            causal=False,
            visible=mask.flatten(0, 1)[:, None],
            dropout=heads.dropout,
        )
        return mixed.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def visible_keys(mask: Tensor | None, real: Tensor | None) -> Tensor | None:
    """Which keys are seen, `(B or 1, 1, T or 1, K)`, from a mask `(T, K)` and real tokens `(B, K)`; None: all."""
    if real is None:
        return None if mask is None else mask[None, None]
    return real[:, None, None] if mask is None else real[:, None, None] & mask


def explicit_weights(pattern: Everything | Blocks, heads: Heads) -> Tensor:
    """softmax(QKᵀ + bias), `(B, H, T, K)` in fp32, zero where the pattern hides a key."""
    mask = pattern.allowed(heads.at, heads.numbers, causal=heads.causal)
    return attention_weights(heads.query, heads.key, heads.bias(), causal=False, visible=visible_keys(mask, heads.real))


class Projected(nn.Module):
    """Base of the attentions with a projection each for queries, keys and values: `num_heads` queries and `groups`
    keys and values of d_head dimensions.
    """

    def __init__(self, parts: Parts, groups: int) -> None:
        super().__init__()
        shape = parts.shape
        self.num_heads, self.groups, self.dropout = shape.num_heads, groups, parts.dropout
        self.query = InputProjection(shape.d_model, shape.num_heads * shape.d_head, bias=False)
        self.key = InputProjection(shape.d_model, groups * shape.d_head, bias=False)
        self.value = InputProjection(shape.d_model, groups * shape.d_head, bias=False)
        self.query_norm, self.key_norm = parts.qk_norm.build(shape.d_head), parts.qk_norm.build(shape.d_head)
        self.scale = parts.scale.build(shape)
        self.output = parts.output_projection.build(shape)

    def scaled_queries(self, x: Tensor) -> Tensor:
        """`(B, T, d_model)` to normalised and scaled queries `(B, H, T, d_head)`."""
        queries: Tensor = self.scale(self.query_norm(split(self.query(x), self.num_heads)))
        return queries

    def keys_and_values(self, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """`(B, K, d_model)` to normalised keys and values, each `(B, G, K, d_head)`."""
        assert x is not None
        return self.key_norm(split(self.key(x), self.groups)), split(self.value(x), self.groups)


class MultiHeadAttention(Projected):
    """softmax(scale · QKᵀ + bias) V in `num_heads` subspaces of d_head dimensions, mixed by an output projection.

    `groups` keys and values are shared by num_heads / groups queries each; `pattern` says which keys a query sees.
    """

    def __init__(self, parts: Parts, groups: int, pattern: "Everything | Blocks") -> None:
        super().__init__(parts, groups)
        self.pattern = pattern

    def cache(self, capacity: int) -> TokenCache:
        """An empty cache."""
        return self.pattern.cache(capacity)

    def forward(
        self,
        x: Tensor,
        relation: Relation,
        *,
        causal: bool,
        memory: Tensor | None = None,
        real: Tensor | None = None,
        cache: LayerCache | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """`(B, T, d_model)` to the same shape.

        Keys and values come from `memory` `(B, S, d_model)` where there is one; `real` `(B, K)` is False at padding.
        Traced calls keep `attention` (of memory: `cross_attention`), `(B, H, T, K)`, rows are queries.
        """
        raw = self.scaled_queries(x)
        if isinstance(cache, MemoryCache):
            query, (key, value) = raw, cache.once(lambda: self.keys_and_values(memory))
        else:
            key, value = self.keys_and_values(x if memory is None else memory)
            query, key = relation.encode(raw, key)
        numbers = torch.arange(key.shape[2], device=key.device)
        if isinstance(cache, TokenCache):
            (key, value), numbers = cache.extend(key, value)
        dropout = self.dropout if self.training else 0.0
        heads = Heads(query, key, value, raw, relation, numbers, causal, real, dropout)
        if trace is not None:
            trace.keep(trace_name(memory, cache), explicit_weights(self.pattern, heads))
        return self.output(joined(self.pattern.mix(heads)))


def trace_name(memory: Tensor | None, cache: LayerCache | None) -> str:
    """What the weights of a pass are kept as."""
    return "attention" if memory is None and not isinstance(cache, MemoryCache) else "cross_attention"


def split(x: Tensor, heads: int) -> Tensor:
    """`(B, T, heads · d)` to `(B, heads, T, d)`."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """`(B, heads, T, d)` to `(B, T, heads · d)`."""
    return x.transpose(1, 2).flatten(2)


class LatentAttention(nn.Module):
    """Latent's module: `(B, T, d_model)` → c and a shared rotated key → keys and values of all heads."""

    def __init__(self, parts: Parts, d_latent: int, d_rope: int) -> None:
        super().__init__()
        shape = parts.shape
        width = shape.num_heads * shape.d_head
        self.num_heads, self.d_head, self.dropout = shape.num_heads, shape.d_head, parts.dropout
        self.d_latent, self.d_rope = d_latent, d_rope
        self.query = InputProjection(shape.d_model, shape.num_heads * (shape.d_head + d_rope), bias=False)
        self.latent = InputProjection(shape.d_model, d_latent, bias=False)
        self.latent_norm = RMSNormalisation(d_latent, eps=1e-5)
        self.shared_key = InputProjection(shape.d_model, d_rope, bias=False)
        self.key_up = InputProjection(d_latent, width, bias=False)
        self.value_up = InputProjection(d_latent, width, bias=False)
        self.scale = parts.scale.build(replace(shape, d_head=shape.d_head + d_rope))
        self.pattern = Everything()
        self.output = parts.output_projection.build(shape)

    def cache(self, capacity: int) -> TokenCache:
        """An empty cache for latents and shared keys."""
        return self.pattern.cache(capacity)

    def forward(
        self,
        x: Tensor,
        relation: Relation,
        *,
        causal: bool,
        memory: Tensor | None = None,
        real: Tensor | None = None,
        cache: LayerCache | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """As `MultiHeadAttention`."""
        content, place = self.scale(split(self.query(x), self.num_heads)).split([self.d_head, self.d_rope], dim=-1)
        place = place.contiguous()  # at an odd d_head its pairs could not be read as complex numbers
        if isinstance(cache, MemoryCache):
            turned, (held,) = place, cache.once(lambda: (torch.cat(self._read(memory), dim=-1),))
        else:
            latent, shared = self._read(x if memory is None else memory)
            turned, shared = relation.encode(place, shared)
            held = torch.cat([latent, shared], dim=-1)
        numbers = torch.arange(held.shape[2], device=x.device)
        if isinstance(cache, TokenCache):
            (held,), numbers = cache.extend(held)
        absorbed = cache is not None and x.shape[1] == 1  # for one query it is cheaper not to make the keys
        if absorbed:
            content, key, value = content @ self._per_head(self.key_up), held, held
        else:
            key, value = self._up(held)
        query = torch.cat([content, turned], dim=-1)
        heads = Heads(query, key, value, place, relation, numbers, causal, real, self.dropout if self.training else 0.0)
        if trace is not None:
            trace.keep(trace_name(memory, cache), explicit_weights(self.pattern, heads))
        mixed = self.pattern.mix(heads)
        if absorbed:
            mixed = mixed[..., : self.d_latent] @ self._per_head(self.value_up).mT
        return self.output(joined(mixed))

    def _read(self, source: Tensor | None) -> tuple[Tensor, Tensor]:
        """Latents `(B, 1, T, d_latent)` and shared keys `(B, 1, T, d_rope)`."""
        assert source is not None
        return self.latent_norm(self.latent(source))[:, None], self.shared_key(source)[:, None]

    def _up(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `(B, H, T, d_head + d_rope)`, values `(B, H, T, d_head)` from latents and shared keys side by side."""
        latent, shared = held[:, 0, :, : self.d_latent], held[..., self.d_latent :]
        key, value = split(self.key_up(latent), self.num_heads), split(self.value_up(latent), self.num_heads)
        return torch.cat([key, shared.expand(-1, self.num_heads, -1, -1)], dim=-1), value

    def _per_head(self, up: nn.Linear) -> Tensor:
        """A way up as `(H, d_head, d_latent)`."""
        return up.weight.unflatten(0, (self.num_heads, self.d_head))


class LinearAttention(Projected):
    """Linear's module. Training computes chunks of `CHUNK` tokens and carries the sums between them."""

    CHUNK = 64

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, parts.shape.num_heads)

    def cache(self, capacity: int) -> StateCache:
        """An empty state."""
        return StateCache()

    def forward(
        self,
        x: Tensor,
        relation: Relation,
        *,
        causal: bool,
        memory: Tensor | None = None,
        real: Tensor | None = None,
        cache: LayerCache | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """As `MultiHeadAttention`, without memory; the weights that are traced are what a softmax would give."""
        assert memory is None
        key, value = self.keys_and_values(x)
        query, key = positive(self.scaled_queries(x)), positive(key)
        if real is not None:
            key = key * real[:, None, :, None]
        turned_query, turned_key = relation.encode(query, key)
        if trace is not None:
            trace.keep("attention", _linear_weights(turned_query, turned_key, query, key, causal=causal))
        sums = cache.sums if isinstance(cache, StateCache) else ()
        with without_autocast(x):
            above, state = self._product(turned_query, turned_key, value, causal, sums[0] if sums else None)
            ones = torch.ones_like(value[..., :1])
            below, norm = self._product(query, key, ones, causal, sums[1] if sums else None)
        if isinstance(cache, StateCache):
            cache.sums = (state, norm)
        below = torch.where(below == 0, 1.0, below)  # of padding alone: 0 / 0 would make every gradient NaN
        return self.output(joined((above / below).to(value.dtype)))

    def _product(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Σ (q_i · k_j) v_j over the keys that query i sees, and Σ k_j v_jᵀ over all, in fp32."""
        query, key, value = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
        if causal:
            return running_product(query, key, value, self.CHUNK, before)
        state = key.mT @ value
        return query @ state, state


def positive(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1 > 0, made without the sum, which is 0 below −17 and the normaliser with it."""
    return torch.where(x > 0, x + 1, x.clamp(-30, 0).exp())


def running_product(
    query: Tensor, key: Tensor, value: Tensor, chunk: int, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ_{j ≤ i} (q_i · k_j) v_j for every i, `(B, H, T, d_v)`, and the sum Σ k_j v_jᵀ `(B, H, d, d_v)` after the
    last; `before` is that sum of the tokens before the first.
    """
    length = query.shape[2]
    chunk = min(chunk, length)
    fill = -length % chunk
    query, key, value = (functional.pad(x, (0, 0, 0, fill)).unflatten(2, (-1, chunk)) for x in (query, key, value))
    sums = (key.mT @ value).cumsum(2)  # after each chunk
    if before is not None:
        sums = sums + before[:, :, None]
    first = torch.zeros_like(sums[:, :, :1]) if before is None else before[:, :, None]
    carried = query @ torch.cat([first, sums[:, :, :-1]], dim=2)
    within = (query @ key.mT).tril() @ value
    return (carried + within).flatten(2, 3)[:, :, :length], sums[:, :, -1]


def _linear_weights(turned_query: Tensor, turned_key: Tensor, query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    with without_autocast(query):
        above, below = turned_query.float() @ turned_key.float().mT, query.float() @ key.float().mT
    if causal:
        above, below = above.tril(), below.tril()
    return above / below.sum(-1, keepdim=True)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool,
    visible: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(QKᵀ + bias) V for queries already scaled, by the fastest kernel that torch has for these inputs.

    Queries `(B, H, T, d)` and keys `(B, G, K, d)`, G dividing H, may be wider than values `(B, G, K, d_v)`, or
    narrower: flash wants one width, so the narrower are padded with zeros and the result is cut. `bias` broadcasts to
    `(B, H, T, K)`, so does `visible`, which is False where a key is not seen and has two dimensions or four.
    """
    d_value, extra = value.shape[-1], query.shape[-1] - value.shape[-1]
    if extra > 0:
        value = functional.pad(value, (0, extra))
    elif extra < 0:
        query, key = functional.pad(query, (0, -extra)), functional.pad(key, (0, -extra))
    mask = _mask(bias, visible, causal=causal)
    if mask is not None and mask.dim() == 3:
        mask = mask[None]  # the CPU's flash takes (B, H, T, K) alone
    mixed = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype),
        dropout_p=dropout,
        is_causal=causal and mask is None,
        scale=1.0,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed[..., :d_value]


def attention_weights(
    query: Tensor, key: Tensor, bias: Tensor | None = None, *, causal: bool, visible: Tensor | None = None
) -> Tensor:
    """softmax(QKᵀ + bias), `(B, H, T, K)` in fp32, for queries already scaled: what the fused kernel never stores."""
    with without_autocast(query):
        shared = key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = query.float() @ shared.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias.float()
    masked = _mask(logits, visible, causal=causal)
    assert masked is not None
    return masked.softmax(dim=-1)


def _mask(bias: Tensor | None, visible: Tensor | None, *, causal: bool) -> Tensor | None:
    """The bias where a key is seen, −∞ where it is not; without a bias, whether it is seen; None: nothing to say."""
    if visible is not None and visible.dim() == 3:  # (B, T, K) would pass for (H, T, K) where B = H
        raise UserError(
            f"visible has the shape {tuple(visible.shape)}: whether the first of three dimensions counts "
            f"sequences or heads is not said; use four, as in (B, 1, T, K)"
        )
    given = visible if bias is None else bias
    if given is None:
        return None
    if causal:
        behind = torch.ones(2 * given.shape[-1:], dtype=torch.bool, device=given.device).tril()
        visible = behind if visible is None else visible & behind
    if bias is None:
        return visible
    if visible is None:
        return bias
    return bias.masked_fill(~visible, float("-inf"))
