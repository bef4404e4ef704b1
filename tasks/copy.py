"""Copy: write the source again.

    BOS c a d SEP c a d EOS
              └─ answer ─┘

Solved by attending to the token one source length back; length extrapolation asks whether that rule was learned, or a
table of absolute positions.

The dial is the lengths, and `num_symbols`: of fewer symbols more look alike, and what follows one tells less.
"""

from torch import Tensor

from tasks.task import SymbolTask


class Copy(SymbolTask):
    """The answer is the source."""

    def answer(self, source: Tensor) -> Tensor:
        """`(B, n)`, the source itself."""
        return source

    def oracle(self, source: list[int]) -> list[int]:
        """The same list."""
        return list(source)
