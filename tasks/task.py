"""The base of every task: how a source and its answer become a batch of tokens.

A sequence is `BOS source SEP answer EOS`, one length a batch, so that no arithmetic is spent on padding. The model
reads all but the last token and is trained and scored on the answer. Each batch is a pure function of (seed, stream,
step).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

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
        targets: `(B, T)` the next token where it belongs to the answer (the end token included if it is trained), else
            −100.
    """

    inputs: Tensor
    targets: Tensor


class Task(Level):
    """Base of the tasks. Subclass it in any file, give it `answer` and `oracle`, and it works in every command.

    `num_symbols` is the difficulty dial: with fewer symbols more of a sequence looks alike.
    """

    lengths: Annotated[Lengths, Changes("data")] = Lengths()
    num_symbols: Annotated[int, Changes("data"), Ge(2), Le(100_000)] = 16
    train_end_token: Annotated[bool, Changes("loss")] = True

    special_tokens: ClassVar[tuple[str, ...]] = ("PAD", "BOS", "SEP", "EOS")

    @abstractmethod
    def answer(self, source: Tensor) -> Tensor:
        """The right answers `(B, m)` to sources `(B, n)`, as token ids."""

    @abstractmethod
    def oracle(self, source: list[int]) -> list[int]:
        """The same for one source in plain Python: what `answer` is tested against."""

    def source(self, batch_size: int, length: int, randomness: torch.Generator) -> Tensor:
        """Sources `(batch_size, length)`: by default every symbol independent and equally likely."""
        high = FIRST_SYMBOL + self.num_symbols
        return torch.randint(FIRST_SYMBOL, high, (batch_size, length), generator=randomness, device=randomness.device)

    def space(self, length: int) -> int:
        """How many different sources of a length there are; a small space is seen whole in training."""
        return int(self.num_symbols**length)

    @property
    def vocab_size(self) -> int:
        """Special tokens and symbols."""
        return FIRST_SYMBOL + self.num_symbols

    def tokens(self, length: int) -> int:
        """Tokens of the sequence that a model reads for a source of this length."""
        return self.sequences(1, length, torch.Generator().manual_seed(0)).inputs.shape[1]

    def sequences(self, batch_size: int, length: int, randomness: torch.Generator) -> Batch:
        """A batch of one source length."""
        source = self.source(batch_size, length, randomness)
        answer = self.answer(source)

        def column(token: int) -> Tensor:
            return torch.full((batch_size, 1), token, dtype=torch.int64, device=source.device)

        tokens = torch.cat([column(BOS), source, column(SEP), answer, column(EOS)], dim=1)
        targets = tokens[:, 1:].clone()
        targets[:, : source.shape[1] + 1] = IGNORED
        if not self.train_end_token:
            targets[:, -1] = IGNORED
        return Batch(tokens[:, :-1], targets)

    def batch(self, seed: int, stream: str, step: int, batch_size: int, length: int, device: torch.device) -> Batch:
        """The batch of a step of a stream: the same arguments give the same batch, whatever was drawn before."""
        return self.sequences(batch_size, length, generator(device, seed, stream, step, length))

    def training_length(self, seed: int, stream: str, step: int) -> int:
        """The length of a training step's batch, uniform over the training lengths."""
        low, high = self.lengths.train
        return low + stable_hash(seed, stream, step, "length") % (high - low + 1)

    def label(self, token: int) -> str:
        """A token's name for people: `SEP`, or the number of its symbol."""
        return self.special_tokens[token] if token < FIRST_SYMBOL else str(token - FIRST_SYMBOL)


def padded(batches: list[Batch]) -> Batch:
    """Batches of several lengths as one, padded at the end to the longest."""
    width = max(batch.inputs.shape[1] for batch in batches)

    def joined(parts: list[Tensor], fill: int) -> Tensor:
        return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1]), value=fill) for part in parts])

    return Batch(joined([b.inputs for b in batches], PAD), joined([b.targets for b in batches], IGNORED))
