"""Addition: write the sum of two numbers of n digits.

    BOS 4 7 + 8 5 SEP 1 3 2 EOS
                      answer

Carries run from the last digit to the first, the answer is written from the first to the last: `reversed_digits`
turns it round, after which every digit needs only what stands before it (Lee et al. 2023, arXiv:2307.03381). Length
counts the digits of one number.

The dial is the lengths, `reversed_digits` (easier) and `num_symbols`, the base: base² sums of digits are to be learned.
"""

from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor

from harness.schema import Changes
from tasks.task import FIRST_SYMBOL, SymbolTask


class Addition(SymbolTask):
    """The answer is the sum, n + 1 digits with leading zeros. `num_symbols` is the base of the numerals."""

    num_symbols: Annotated[int, Changes("data"), Ge(2), Le(100)] = 10
    reversed_digits: Annotated[bool, Changes("data")] = False

    @property
    def plus(self) -> int:
        """The token of the plus sign, after the digits."""
        return FIRST_SYMBOL + self.num_symbols

    @property
    def vocab_size(self) -> int:
        """Special tokens, digits and the plus sign."""
        return FIRST_SYMBOL + self.num_symbols + 1

    def space(self, length: int) -> int:
        """Pairs of numbers."""
        return int(self.num_symbols ** (2 * length))

    def source(self, batch_size: int, length: int, randomness: torch.Generator) -> Tensor:
        """`(B, 2 · length + 1)`: digits, plus, digits, each digit independent and equally likely."""
        digits = super().source(batch_size, 2 * length, randomness)
        plus = torch.full((batch_size, 1), self.plus, device=digits.device)
        return torch.cat([digits[:, :length], plus, digits[:, length:]], dim=1)

    def answer(self, source: Tensor) -> Tensor:
        """`(B, length + 1)`, digit by digit with carries."""
        length = source.shape[1] // 2
        digits = source - FIRST_SYMBOL
        sums = digits[:, :length] + digits[:, length + 1 :]
        carry, found = torch.zeros_like(sums[:, 0]), []
        for place in range(length - 1, -1, -1):
            total = sums[:, place] + carry
            found.append(total % self.num_symbols)
            carry = total // self.num_symbols
        lowest_first = torch.stack([*found, carry], dim=1) + FIRST_SYMBOL
        return lowest_first if self.reversed_digits else lowest_first.flip(1)

    def oracle(self, source: list[int]) -> list[int]:
        """Add as Python does."""
        length, base = len(source) // 2, self.num_symbols
        total = sum(self._number(source[part]) for part in (slice(length), slice(length + 1, None)))
        digits = [FIRST_SYMBOL + total // base**place % base for place in range(length + 1)]
        return digits if self.reversed_digits else digits[::-1]

    def _number(self, tokens: list[int]) -> int:
        value = 0
        for token in tokens:
            value = value * self.num_symbols + token - FIRST_SYMBOL
        return value

    def label(self, token: int) -> str:
        """The digit, or the sign."""
        return "+" if token == self.plus else super().label(token)
