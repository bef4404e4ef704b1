"""Retrieval: pairs of a key and a value, then a key: write its value.

    BOS c 3 a 7 d 1 a SEP 7 EOS
        └ pairs ┘ asked └ answer

Length counts pairs (one step of the induction of Olsson et al. 2022, arXiv:2209.11895).

The dial is `distance`, how far back the asked pair lies (a window of w tokens in L layers reaches L · (w − 1) of them),
the lengths, and `num_symbols`: half of them are keys to tell from each other.
"""

from typing import Annotated

import torch
from annotated_types import Ge
from pydantic import Field, model_validator
from torch import Tensor

from harness.schema import Changes
from tasks.task import FIRST_SYMBOL, SymbolTask


class Pairs(SymbolTask):
    """Base of the tasks about pairs: the first half of the symbols are keys, the others values; no key comes twice."""

    num_symbols: Annotated[int, Changes("data"), Ge(4)] = 64

    @model_validator(mode="after")
    def _enough_keys(self) -> "Pairs":
        longest = max(self.lengths.train[1], *self.lengths.test, 0)
        if longest > self.num_keys:
            raise ValueError(
                f"num_symbols = {self.num_symbols} makes {self.num_keys} keys, and {longest} pairs need one each; "
                f"raise num_symbols to {2 * longest} or shorten lengths"
            )
        return self

    @property
    def num_keys(self) -> int:
        """Half of the symbols."""
        return self.num_symbols // 2

    def pairs(self, batch_size: int, length: int, randomness: torch.Generator) -> tuple[Tensor, Tensor]:
        """Keys and values, each `(B, length)`: keys a random choice in random order, values independent."""
        device = randomness.device
        order = torch.rand(batch_size, self.num_keys, generator=randomness, device=device).argsort(dim=1)
        shape, high = (batch_size, length), self.num_symbols
        values = torch.randint(self.num_keys, high, shape, generator=randomness, device=device)
        return order[:, :length] + FIRST_SYMBOL, values + FIRST_SYMBOL

    def space(self, length: int) -> int:
        """Choices of keys in order times values; what is asked is left out."""
        keys = 1
        for index in range(length):
            keys *= self.num_keys - index
        return int(keys * (self.num_symbols - self.num_keys) ** length)


class Retrieval(Pairs):
    """The answer is the value of the key at the end. `distance` is how many pairs back it stands, 1 being the last
    one; if there are fewer pairs it is the first. None: any pair, equally likely.
    """

    distance: Annotated[int | None, Changes("data"), Field(ge=1)] = None

    def source(self, batch_size: int, length: int, randomness: torch.Generator) -> Tensor:
        """`(B, 2 · length + 1)`: key, value, …, and the key that is asked for."""
        keys, values = self.pairs(batch_size, length, randomness)
        if self.distance is None:
            shape, device = (batch_size, 1), randomness.device
            asked = torch.randint(length, shape, generator=randomness, device=device)
        else:
            asked = torch.full((batch_size, 1), max(0, length - self.distance), device=keys.device)
        return torch.cat([torch.stack([keys, values], dim=2).flatten(1), keys.gather(1, asked)], dim=1)

    def answer(self, source: Tensor) -> Tensor:
        """`(B, 1)`, the value that follows the asked key where it stands first."""
        keys, values, asked = source[:, :-1:2], source[:, 1::2], source[:, -1:]
        return values.gather(1, (keys == asked).int().argmax(dim=1, keepdim=True))

    def oracle(self, source: list[int]) -> list[int]:
        """Look the key up."""
        *pairs, asked = source
        return [dict(zip(pairs[::2], pairs[1::2], strict=True))[asked]]
