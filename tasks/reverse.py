"""Reverse: write the source from its end to its start.

    BOS c a d SEP d a c EOS
              └─ answer ─┘

The token to attend to moves back by two with every token written, so no fixed distance solves it.

The dial is the lengths, and `num_symbols`: of fewer symbols more look alike, and what stands before one tells less.
"""

from torch import Tensor

from tasks.task import SymbolTask


class Reverse(SymbolTask):
    """The answer is the source read backwards."""

    def answer(self, source: Tensor) -> Tensor:
        """`(B, n)`, reversed along the sequence."""
        return source.flip(1)

    def oracle(self, source: list[int]) -> list[int]:
        """The reversed list."""
        return source[::-1]
