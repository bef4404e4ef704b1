"""Sort: write the source's symbols in rising order.

    BOS c a d SEP a c d EOS
              └─ answer ─┘

Each answer token depends on all of the source and on how often its symbol has been written: order of positions does not
matter, counting does where symbols repeat. With more symbols than tokens few repeat.

The dial is the lengths, and `num_symbols`: more symbols are a longer order to learn, fewer repeat and must be counted.
"""

from torch import Tensor

from tasks.task import SymbolTask


class Sort(SymbolTask):
    """The answer is the source in rising order of the symbols' numbers."""

    def answer(self, source: Tensor) -> Tensor:
        """`(B, n)`, sorted along the sequence."""
        return source.sort(dim=1).values

    def oracle(self, source: list[int]) -> list[int]:
        """The sorted list."""
        return sorted(source)
