"""Normalised queries and keys: logits that cannot grow with the weights."""

from abc import abstractmethod
from typing import Annotated

from torch import nn

from harness.components.norm import BatchNorm, Norm, RMSNorm
from harness.schema import Changes, Level, UserError


class QueryKeyNorm(Level):
    """Base of the axis; a level acts on each head by itself, before the scale and before positions."""

    @abstractmethod
    def build(self, d_head: int) -> nn.Module:
        """A module that maps queries, or keys, `(B, H, T, d_head)` to the same shape; each have one of their own."""

    def check(self) -> None:
        """Raise `UserError` where the level's fields do not fit."""


class NoQKNorm(QueryKeyNorm):
    """q·k of queries and keys as they are projected."""

    def build(self, d_head: int) -> nn.Module:
        """Nothing."""
        return nn.Identity()


class QKNorm(QueryKeyNorm):
    """norm(q)·norm(k), with a trained gain a dimension, shared by the heads (Henry et al. 2020, arXiv:2010.04245;
    Dehghani et al. 2023, arXiv:2302.05442).
    """

    norm: Annotated[Norm, Changes("outputs")] = RMSNorm()

    def check(self) -> None:
        """A norm that looks at one token."""
        if isinstance(self.norm, BatchNorm):
            raise UserError("qk_norm.norm = BatchNorm: it would mix tokens; choose RMSNorm() or LayerNorm()")

    def build(self, d_head: int) -> nn.Module:
        """A norm over a head's dimensions."""
        return self.norm.build(d_head)
