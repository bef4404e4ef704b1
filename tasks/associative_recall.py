"""AssociativeRecall: pairs of a key and a value, then all keys in another order: write their values.

    BOS c 3 a 7 d 1 a d c SEP 7 1 3 EOS
        └ pairs ┘   asked     answer

Many lookups in one sequence (multi-query associative recall, Arora et al. 2023, arXiv:2312.04927): a state of fixed
size forgets as the pairs, which are what length counts, grow in number.

The dial is the lengths, pairs to keep apart, and `num_symbols`: half of them are keys to tell from each other.
"""

import torch
from torch import Tensor

from tasks.retrieval import Pairs


class AssociativeRecall(Pairs):
    """The answer is the values of all keys in the order in which they are asked for."""

    def source(self, batch_size: int, length: int, randomness: torch.Generator) -> Tensor:
        """`(B, 3 · length)`: key, value, …, then the keys in random order."""
        keys, values = self.pairs(batch_size, length, randomness)
        order = torch.rand(batch_size, length, generator=randomness, device=randomness.device).argsort(dim=1)
        return torch.cat([torch.stack([keys, values], dim=2).flatten(1), keys.gather(1, order)], dim=1)

    def answer(self, source: Tensor) -> Tensor:
        """`(B, n)` values."""
        count = source.shape[1] // 3
        keys, values, asked = source[:, : 2 * count : 2], source[:, 1 : 2 * count : 2], source[:, 2 * count :]
        return values.gather(1, (asked[:, :, None] == keys[:, None, :]).int().argmax(dim=2))

    def oracle(self, source: list[int]) -> list[int]:
        """Look every key up."""
        count = len(source) // 3
        pairs, asked = source[: 2 * count], source[2 * count :]
        values = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return [values[key] for key in asked]
