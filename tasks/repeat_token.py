"""RepeatToken: write one symbol as often as it stands in the source.

    BOS c c c SEP c c c EOS
              └─ answer ─┘

No token looks different from its neighbours, so attention by content finds nothing: the model has to count, and to
stop.

The dial is the lengths: how far there is to count.
"""

import torch
from torch import Tensor

from tasks.task import SymbolTask


class RepeatToken(SymbolTask):
    """The answer is the source, which is one symbol again and again."""

    def source(self, batch_size: int, length: int, randomness: torch.Generator) -> Tensor:
        """A symbol a row, equally likely, `length` times."""
        return super().source(batch_size, 1, randomness).expand(-1, length).clone()

    def space(self, length: int) -> int:
        """One source a symbol."""
        return self.num_symbols

    def answer(self, source: Tensor) -> Tensor:
        """`(B, n)`, the source itself."""
        return source

    def oracle(self, source: list[int]) -> list[int]:
        """The first symbol as often as there are symbols."""
        return [source[0]] * len(source)
