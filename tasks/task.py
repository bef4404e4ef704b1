"""The base of every task: how a source and its answer become a batch of tokens.

One length a batch, so that no arithmetic is spent on padding. A model is trained and scored on the answer. How source
and answer become tokens follows from the architecture (`harness.layout`); a decoder's sequence is `BOS source SEP
answer EOS`, of which it reads all but the last. Each batch is a pure function of (seed, stream, step).

Chance: a model that guesses uniformly over the V tokens of the vocabulary is right with probability V^−m on an answer
of m tokens, the end token counted where it is scored; one that knows which tokens answers are made of does better.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from harness.layout import Layout
from harness.schema import Changes, Level
from harness.seeding import generator, stable_hash
from tasks.lengths import Lengths

PAD, BOS, SEP, EOS = range(4)
FIRST_SYMBOL = 4
IGNORED = -100  # cross entropy's own mark for positions without a target


@dataclass(frozen=True)
class Batch:
    """Sequences of one batch.

    Attributes:
        inputs: `(B, T)` token ids that the model reads.
        targets: `(B, T)` the token to predict where it belongs to the answer (the end token included if it is trained),
            else −100.
        source: `(B, S)` token ids that an encoder reads; None without one.
        real: `(B, T)`, False at padding; None: no padding.
        source_real: `(B, S)`, likewise.
    """

    inputs: Tensor
    targets: Tensor
    source: Tensor | None = None
    real: Tensor | None = None
    source_real: Tensor | None = None

    @property
    def reading(self) -> tuple[Any, ...]:
        """What a model is called with: inputs, source, real, source_real, as far as there is any."""
        everything = (self.inputs, self.source, self.real, self.source_real)
        return everything[: max(i for i, part in enumerate(everything) if part is not None) + 1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, T, S), S = 0 without a source."""
        return self.inputs.shape[0], self.inputs.shape[1], 0 if self.source is None else self.source.shape[1]

    def rows(self, which: Tensor | slice) -> "Batch":
        """Some of the sequences."""
        parts = (self.source, self.real, self.source_real)
        optional = (None if part is None else part[which] for part in parts)
        return Batch(self.inputs[which], self.targets[which], *optional)

    def unpadded(self) -> list["Batch"]:
        """Each sequence by itself, without padding."""
        return [self.rows(slice(row, row + 1))._cut() for row in range(len(self.inputs))]

    def _cut(self) -> "Batch":
        width = None if self.real is None else int(self.real.sum())
        source_width = None if self.source_real is None else int(self.source_real.sum())
        source = None if self.source is None else self.source[:, :source_width]
        return Batch(self.inputs[:, :width], self.targets[:, :width], source)

    def split(self, size: int) -> list["Batch"]:
        """The same in batches of `size` sequences at most."""
        return [self.rows(slice(first, first + size)) for first in range(0, len(self.inputs), size)]


class Task(Level):
    """Base of the tasks. Subclass `SymbolTask` in any file, give it `answer` and `oracle`, and it works in every
    command.
    """

    lengths: Annotated[Lengths, Changes("data")] = Lengths()
    train_end_token: Annotated[bool, Changes("loss")] = True

    special_tokens: ClassVar[tuple[str, ...]] = ("PAD", "BOS", "SEP", "EOS")
    ragged: ClassVar[bool] = False  # True: sources and answers of one length differ in tokens, and end in PAD

    @abstractmethod
    def source(self, batch_size: int, length: int, randomness: torch.Generator) -> Tensor:
        """Sources `(batch_size, n)` as token ids."""

    @abstractmethod
    def answer(self, source: Tensor) -> Tensor:
        """The right answers `(B, m)` to sources `(B, n)`, as token ids."""

    def sample(self, batch_size: int, length: int, randomness: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sources and their answers."""
        source = self.source(batch_size, length, randomness)
        return source, self.answer(source)

    @abstractmethod
    def oracle(self, source: list[int]) -> list[int]:
        """The same for one source in plain Python: what `answer` is tested against."""

    @abstractmethod
    def space(self, length: int) -> int:
        """How many different sources of a length there are; a small space is seen whole in training."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Special tokens and all others."""

    @property
    def unknown(self) -> int | None:
        """The token that stands for whatever the vocabulary lacks, which as an answer is never right; None: nothing."""
        return None

    @abstractmethod
    def label(self, token: int) -> str:
        """A token's name for people."""

    def tokens(self, length: int, layout: Layout = "continue") -> int:
        """Tokens of the longest sequence that a model reads for a source of this length."""
        batch = self.sequences(1, length, torch.Generator().manual_seed(0), layout)
        return max(part.shape[1] for part in (batch.inputs, batch.source) if part is not None)

    def widths(self, length: int) -> tuple[int, int] | None:
        """Tokens of a source of this length and of its answer, without marks; None where they differ."""
        if self.ragged:
            return None
        source, answer = self.sample(1, length, torch.Generator().manual_seed(0))
        return source.shape[1], answer.shape[1]

    def sequences(
        self, batch_size: int, length: int, randomness: torch.Generator, layout: Layout = "continue"
    ) -> Batch:
        """A batch of one source length."""
        source, answer = self.sample(batch_size, length, randomness)
        if layout == "in place":
            return Batch(source, answer.clone())

        def column(token: int) -> Tensor:
            return torch.full((batch_size, 1), token, dtype=torch.int64, device=source.device)

        prompt = [column(BOS), source, column(SEP)] if layout == "continue" else [column(BOS)]
        tokens = torch.cat([*prompt, answer, column(EOS)], dim=1)
        asked = torch.zeros_like(tokens, dtype=torch.bool)
        asked[:, tokens.shape[1] - answer.shape[1] - 1 :] = True
        asked[:, -1] = self.train_end_token
        read = torch.cat([source, column(EOS)], dim=1) if layout == "translate" else None
        if not self.ragged:
            return Batch(tokens[:, :-1], torch.where(asked, tokens, IGNORED)[:, 1:], read)
        (tokens, asked), read = _closed_up(tokens, asked), read if read is None else _closed_up(read)[0]
        targets = torch.where(asked & (tokens != PAD), tokens, IGNORED)[:, 1:]
        inputs = tokens[:, :-1]
        return Batch(inputs, targets, read, inputs != PAD, None if read is None else read != PAD)

    def batch(
        self,
        seed: int,
        stream: str,
        step: int,
        batch_size: int,
        length: int,
        device: torch.device,
        layout: Layout = "continue",
    ) -> Batch:
        """The batch of a step of a stream: the same arguments give the same batch, whatever was drawn before."""
        return self.sequences(batch_size, length, generator(device, seed, stream, step, length), layout)

    def training_length(self, seed: int, stream: str, step: int) -> int:
        """The length of a training step's batch, uniform over the training lengths."""
        low, high = self.lengths.train
        return low + stable_hash(seed, stream, step, "length") % (high - low + 1)


class SymbolTask(Task):
    """Base of the tasks about symbols without meaning. `num_symbols` is the difficulty dial: with fewer symbols more
    of a sequence looks alike.
    """

    num_symbols: Annotated[int, Changes("data"), Ge(2), Le(100_000)] = 16

    def source(self, batch_size: int, length: int, randomness: torch.Generator) -> Tensor:
        """Sources `(batch_size, length)`: every symbol independent and equally likely."""
        high = FIRST_SYMBOL + self.num_symbols
        return torch.randint(FIRST_SYMBOL, high, (batch_size, length), generator=randomness, device=randomness.device)

    def space(self, length: int) -> int:
        """num_symbols^length."""
        return int(self.num_symbols**length)

    @property
    def vocab_size(self) -> int:
        """Special tokens and symbols."""
        return FIRST_SYMBOL + self.num_symbols

    def label(self, token: int) -> str:
        """`SEP`, or the number of the symbol."""
        return self.special_tokens[token] if token < FIRST_SYMBOL else str(token - FIRST_SYMBOL)


def _closed_up(tokens: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Rows `(B, T)` without the padding between their tokens, which goes to the end; others of the shape likewise."""
    order = (tokens == PAD).int().argsort(dim=1, stable=True)
    return tuple(x.gather(1, order) for x in (tokens, *others))


def padded(batches: list[Batch]) -> Batch:
    """Batches of several lengths as one, padded at the end to the longest, real tokens named."""

    def joined(parts: list[Tensor], fill: int | bool) -> Tensor:
        width = max(part.shape[1] for part in parts)
        return torch.cat([nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in parts])

    def marked(parts: list[Tensor]) -> Tensor:
        return joined([torch.ones_like(part, dtype=torch.bool) for part in parts], False)

    inputs, sources = [b.inputs for b in batches], [b.source for b in batches if b.source is not None]
    return Batch(
        joined(inputs, PAD),
        joined([b.targets for b in batches], IGNORED),
        joined(sources, PAD) if sources else None,
        marked(inputs),
        marked(sources) if sources else None,
    )
