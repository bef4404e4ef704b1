"""What attention keeps of the tokens before, so that decoding reads each of them once.

A cache belongs to one layer and is made empty by `Attention.cache`. Tokens are numbered from 0; all sequences of the
batch grow in step. `nbytes` counts the tensors that are held of them, but not their numbers, which a window keeps
besides: an int64 a token, whatever the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from harness.schema import UserError


class LayerCache(ABC):
    """Base of the caches."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What is held."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors)


class TokenCache(LayerCache):
    """Base of the caches that hold something for each token, keys and values or what they are made from."""

    @abstractmethod
    def extend(self, *new: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Take in new tokens, tensors `(B, G, T, d)`; all that these may attend to, themselves included, and the
        numbers of those tokens.
        """


class FullCache(TokenCache):
    """All tokens, in room for `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.room: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The room, filled or not."""
        return self.room

    def extend(self, *new: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Write the new ones after the others."""
        if not self.room:
            self.room = tuple(x.new_empty(*x.shape[:-2], self.capacity, x.shape[-1]) for x in new)
        begin, length = self.length, self.length + new[0].shape[-2]
        if length > self.capacity:
            raise UserError(f"capacity = {self.capacity}: a cache has no room for {length} tokens; make a larger one")
        self.length = length
        for room, x in zip(self.room, new, strict=True):
            room[..., begin : self.length, :] = x
        return tuple(room[..., : self.length, :] for room in self.room), torch.arange(self.length, device=new[0].device)


class WindowCache(TokenCache):
    """The first `num_first` tokens and the last `window`: what later queries can still see."""

    def __init__(self, window: int, num_first: int) -> None:
        self.window, self.num_first = window, num_first
        self.length = 0
        self.held: tuple[Tensor, ...] = ()
        self.numbers = torch.arange(0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Of `num_first` + `window` tokens at most."""
        return self.held

    def extend(self, *new: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Put the new ones behind those that they see, then forget those that have left the window."""
        begin, self.length = self.length, self.length + new[0].shape[-2]
        added = torch.arange(begin, self.length, device=new[0].device)
        numbers = torch.cat([*self._seen(self.numbers.to(added.device), dim=0), added])
        pairs = zip(self.held, new, strict=True)
        seen = tuple(torch.cat([*self._seen(old, dim=-2), x], dim=-2) for old, x in pairs) if self.held else new
        self.held, self.numbers = tuple(self._kept(x, dim=-2) for x in seen), self._kept(numbers, dim=0)
        return seen, numbers

    def _seen(self, held: Tensor, dim: int) -> list[Tensor]:
        """What the next token sees of those held, which are then copied once a token and not twice."""
        return self._ends(held, dim, self.window - 1)

    def _kept(self, seen: Tensor, dim: int) -> Tensor:
        """Those to hold; a copy where there are others, so that a long prompt does not stay in memory."""
        parts = self._ends(seen, dim, self.window)
        return seen if parts[0] is seen else torch.cat(parts, dim=dim)

    def _ends(self, tokens: Tensor, dim: int, last: int) -> list[Tensor]:
        count = tokens.shape[dim]
        if count <= self.num_first + last:
            return [tokens]
        first = [tokens.narrow(dim, 0, self.num_first)] if self.num_first else []
        return [*first, tokens.narrow(dim, count - last, last)]


class StateCache(LayerCache):
    """Sums over all tokens so far, whose size does not grow."""

    def __init__(self) -> None:
        self.sums: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The sums."""
        return self.sums


class MemoryCache(LayerCache):
    """Keys and values of an encoder's output, made at the first step."""

    def __init__(self) -> None:
        self.made: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values."""
        return self.made

    def once(self, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What was made the first time."""
        self.made = self.made or make()
        return self.made
