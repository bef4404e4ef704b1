"""The Transformer, to be read like the paper's equations.

Legend of shapes, used everywhere: B sequences in a batch, T tokens in a sequence, S tokens of an encoder's source, K
keys, H heads, G groups of keys, V words in the vocabulary, d_model the width of the residual stream, d_head that of a
head, d_ff the width inside the feed-forward sublayer, E experts.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness.components.cache import LayerCache, MemoryCache
from harness.components.feedforward import MixtureOfExperts, Routing
from harness.components.init import initialise
from harness.components.kernel import same_kernels
from harness.components.position import Relation, UnsupportedLength, places
from harness.components.residual import ResidualStep
from harness.schema import UserError, shown
from harness.trace import Trace

if TYPE_CHECKING:
    from harness.spec import ModelSpec


@dataclass(frozen=True)
class BlockCache:
    """What one block keeps: of its own tokens, and of the encoder's."""

    own: LayerCache
    memory: MemoryCache


@dataclass
class Cache:
    """What a model keeps of `length` tokens of so many `sequences` that it has read; made by `Transformer.cache`."""

    blocks: list[BlockCache]
    length: int = 0
    sequences: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes held for tokens, room for later ones included, and for an encoder's source."""
        return sum(block.own.nbytes + block.memory.nbytes for block in self.blocks)


@dataclass(frozen=True)
class Reading:
    """What one pass hands to every block.

    Attributes:
        causal: whether a token sees only those that do not lie ahead.
        real: `(B, T)`, False at padding; None: no padding.
        memory: `(B, S, d_model)`, what the encoder made of the source.
        memory_real: `(B, S)`, False at padding of the source.
        trace: where internals are kept.
    """

    causal: bool
    real: Tensor | None = None
    memory: Tensor | None = None
    memory_real: Tensor | None = None
    trace: Trace | None = None


@dataclass
class Output:
    """Logits `(B, T, V)`, and what the router of each mixture of experts did, in the order of the layers."""

    logits: Tensor
    routing: list[Routing] = field(default_factory=list)

    @property
    def auxiliary_loss(self) -> Tensor | float:
        """The routers' losses, mean over the layers that have one; zero without any."""
        losses = [routing.loss for routing in self.routing]
        return torch.stack(losses).mean() if losses else 0.0


class Block(nn.Module):
    """Attention, in a decoder with an encoder attention to its output, then feed-forward: each a residual step."""

    def __init__(self, spec: "ModelSpec", *, reads_memory: bool = False) -> None:
        super().__init__()

        def step() -> ResidualStep:
            return ResidualStep(spec.norm_placement, spec.norm, spec.residual, spec.residual_dropout, spec.d_model)

        self.attention, self.attention_step = spec.attention.build(spec.parts), step()
        self.memory_attention = spec.attention.across().build(spec.parts) if reads_memory else None
        self.memory_step = step() if reads_memory else None
        self.feedforward, self.feedforward_step = spec.feedforward.build(spec.d_model), step()

    def cache(self, capacity: int) -> BlockCache:
        """An empty cache for so many tokens."""
        own: LayerCache = self.attention.cache(capacity)  # type: ignore[operator]
        return BlockCache(own, MemoryCache())

    def forward(
        self, x: Tensor, relation: Relation, reading: Reading, cache: BlockCache | None = None
    ) -> tuple[Tensor, Routing | None]:
        """`(B, T, d_model)` to the same shape, and what the router did if there is one."""
        real, trace = reading.real, reading.trace
        x = self.attention_step.leave(
            x,
            self.attention(
                self.attention_step.enter(x, real),
                relation,
                causal=reading.causal,
                real=None if reading.causal else real,  # padding lies ahead of all that is asked for
                cache=cache.own if cache else None,
                trace=trace,
            ),
            real,
        )
        if self.memory_attention is not None and self.memory_step is not None:
            read = self.memory_attention(
                self.memory_step.enter(x, real),
                places(0, x.device),
                causal=False,
                memory=reading.memory,
                real=reading.memory_real,
                cache=cache.memory if cache else None,
                trace=trace,
            )
            x = self.memory_step.leave(x, read, real)
        h = self.feedforward_step.enter(x, real)
        if isinstance(self.feedforward, MixtureOfExperts):
            y, routing = self.feedforward(h, real)
        else:
            y, routing = self.feedforward(h), None
        return self.feedforward_step.leave(x, y, real), routing


class Stack(nn.Module):
    """Positions, blocks and the last norm: embeddings `(B, T, d_model)` to the same shape."""

    def __init__(self, spec: "ModelSpec", *, causal: bool, reads_memory: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.position = spec.position.build(spec.rotated_shape)
        self.blocks = nn.ModuleList(Block(spec, reads_memory=reads_memory) for _ in range(spec.num_layers))
        self.final_norm = spec.norm.build(spec.d_model) if spec.norm_placement.final else None
        self.dropout = nn.Dropout(spec.embedding_dropout) if spec.embedding_dropout else nn.Identity()

    def read(
        self,
        embeddings: Tensor,
        reading: Reading,
        cache: Cache | None = None,
        *,
        recompute: bool = False,
    ) -> tuple[Tensor, list[Routing]]:
        """What the blocks make of embeddings, and what their routers did; `recompute` keeps only each block's input
        for the backward pass. Raises `UnsupportedLength` where the positions cannot take so many tokens.
        """
        begin = cache.length if cache else 0
        keys = self.position.positions(begin + embeddings.shape[1], embeddings.device)
        queries = keys[begin:]
        x = self.dropout(self.position.add(embeddings, queries))
        relation = self.position.relation(queries, keys, causal=self.causal, cached=cache is not None)
        routings = []
        for layer, block in enumerate(self.blocks):
            own = self.position.in_layer(relation, layer)
            kept = cache.blocks[layer] if cache else None
            if recompute and self.training:
                passes = partial(_two_passes, block)
                x, routing = checkpoint(block, x, own, reading, kept, use_reentrant=False, context_fn=passes)
            else:
                x, routing = block(x, own, reading, kept)
            if routing is not None:
                routings.append(routing)
        if cache:
            cache.length, cache.sequences = cache.length + queries.shape[0], embeddings.shape[0]
        return x if self.final_norm is None else self.final_norm(x, reading.real), routings


def _two_passes(block: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around a block's two passes over the same tokens: the second takes the kernels of the first, and moves no running
    moments.
    """
    return nullcontext(), _again(block, same_kernels())


@contextmanager
def _again(block: nn.Module, kernels: AbstractContextManager[Any]) -> Iterator[None]:
    with buffers_kept(block), kernels:
        yield


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards a module's buffers (running moments, biases of a choice) are what they were before."""
    before = [buffer.clone() for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in zip(module.buffers(), before, strict=True):
            buffer.copy_(value)


def check_padding(name: str, real: Tensor | None, tokens: Tensor | None) -> None:
    """Raise `UserError` unless there is a boolean mark for each token: numbers would be added to the scores, and a mask
    of queries and keys `(B, T, T)` would meet scores `(B, H, T, K)` head by head where there are as many heads as
    sequences.
    """
    if real is None:
        return
    if not isinstance(real, Tensor) or real.dtype != torch.bool:
        found = real.dtype if isinstance(real, Tensor) else type(real).__name__
        raise UserError(f"{name} is of the type {found}: give a boolean tensor, True at tokens and False at padding")
    if tokens is not None and real.shape != tokens.shape:
        raise UserError(
            f"{name} has the shape {tuple(real.shape)}, its tokens have {tuple(tokens.shape)}: give each token one "
            f"mark, False at padding (a causal mask comes from the architecture)"
        )


class Transformer(Stack):
    """Tokens to logits: a causal decoder, an encoder that predicts all positions at once, or a decoder that reads what
    an encoder made of a source.
    """

    def __init__(self, spec: "ModelSpec", vocab_size: int) -> None:
        encoded = spec.architecture.has_encoder()
        super().__init__(spec, causal=spec.architecture.is_causal(), reads_memory=encoded)
        self.embedding = nn.Embedding(vocab_size, spec.d_model)
        self.embedding_factor = spec.embedding_scale.factor(spec.d_model)
        self.encoder = Stack(spec, causal=False) if encoded else None
        self.head = None if spec.output_head.is_tied() else nn.Linear(spec.d_model, vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        source: Tensor | None = None,
        real: Tensor | None = None,
        source_real: Tensor | None = None,
        *,
        cache: Cache | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Logits `(B, T, V)`; see `outputs`."""
        return self.outputs(tokens, source, real, source_real, cache=cache, trace=trace).logits

    def outputs(
        self,
        tokens: Tensor,
        source: Tensor | None = None,
        real: Tensor | None = None,
        source_real: Tensor | None = None,
        *,
        cache: Cache | None = None,
        trace: Trace | None = None,
        recompute: bool = False,
    ) -> Output:
        """One pass over token ids `(B, T)`, with an encoder also over `source` `(B, S)`.

        Args:
            tokens: with a cache, those that follow what it has read.
            source: what the encoder reads; a cache keeps what came of it.
            real: `(B, T)`, boolean, False at padding; a causal stack takes it to stand behind a sequence's tokens.
            source_real: `(B, S)`, likewise, padding anywhere.
            cache: from `cache()`; extended in place.
            trace: where internals are kept.
            recompute: compute blocks twice to save memory (Chen et al. 2016, arXiv:1604.06174).

        Raises:
            UnsupportedLength: the positions cannot take so many tokens.
            UserError: `real` or `source_real` does not mark its tokens; there is an encoder without a source, or the
                reverse; sources or a cache are of another number of sequences; a cache is full; in evaluation mode, a
                causal stack's padding stands before a token.
        """
        self._check(tokens, source, real, source_real)
        others = {"source": source.shape[0] if source is not None else 0, "cache": cache.sequences if cache else 0}
        for name, count in others.items():
            if count not in (0, tokens.shape[0]):
                raise UserError(f"{name} is of {count} sequences, tokens are of {tokens.shape[0]}; give one for each")
        memory: Tensor | None = None
        routings: list[Routing] = []
        if self.encoder is not None and (cache is None or cache.length == 0):
            if source is None:
                raise UserError("source is None: an encoder-decoder reads one; pass its token ids (B, S) as source=…")
            read = Reading(causal=False, real=source_real)
            try:
                memory, routings = self.encoder.read(self.embed(source), read, recompute=recompute)
            except UnsupportedLength as error:
                raise UnsupportedLength(f"source: {error}") from error
        reading = Reading(self.causal, real, memory, source_real, trace)
        x, more = self.read(self.embed(tokens), reading, cache, recompute=recompute)
        logits = functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        return Output(logits, routings + more)

    def _check(self, tokens: Tensor, source: Tensor | None, real: Tensor | None, source_real: Tensor | None) -> None:
        check_padding("real", real, tokens)
        check_padding("source_real", source_real, source)
        if self.encoder is None and not (source is None and source_real is None):
            name = "source_real" if source is None else "source"
            raise UserError(
                f"{name} is given, and the model has no encoder to read it: leave it out (padding of tokens is marked "
                f"by real=…), or build the model with EncoderDecoder()"
            )
        # Not in training, which would have to wait for a GPU's answer.
        if real is not None and self.causal and not self.training and (real[:, 1:] & ~real[:, :-1]).any():
            raise UserError(
                "real is False before a token: a causal stack looks back at all tokens; put padding behind them"
            )

    def embed(self, tokens: Tensor) -> Tensor:
        """`(B, T)` to `(B, T, d_model)`."""
        embedded: Tensor = self.embedding(tokens)
        return embedded if self.embedding_factor == 1 else embedded * self.embedding_factor

    def cache(self, capacity: int) -> Cache:
        """An empty cache for sequences of up to `capacity` tokens."""
        return Cache([cast(Block, block).cache(capacity) for block in self.blocks])

    def experts(self) -> list[MixtureOfExperts]:
        """The mixtures of experts, in the order in which `outputs` tells of them."""
        stacks = [self] if self.encoder is None else [self.encoder, self]
        layers = [block.feedforward for stack in stacks for block in stack.blocks]
        return [layer for layer in layers if isinstance(layer, MixtureOfExperts)]


def build_model(spec: "ModelSpec", vocab_size: int, *, seed: int) -> Transformer:
    """The Transformer of a spec, each parameter drawn from (seed, its name).

    Raises:
        UserError: `spec` is no ModelSpec, there is no word, or the seed is negative.
    """
    if seed < 0:
        raise UserError(f"seed = {seed}: a seed is 0 or more; choose another")
    if vocab_size < 1:
        raise UserError(f"vocab_size = {vocab_size}: a model has one word or more; give `task.vocab_size`")
    if not hasattr(spec, "architecture"):  # ModelSpec itself is not known here
        raise UserError(
            f"build_model takes a ModelSpec, not {shown(spec)}; give ModelSpec(…), or the `model` of a RunSpec"
        )
    model = Transformer(spec, vocab_size)
    initialise(model, spec.init, spec.num_layers, seed)
    return model
