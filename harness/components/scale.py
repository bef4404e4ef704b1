"""The factor on attention logits q·k before the softmax."""

import math
from abc import abstractmethod

from harness.schema import Level


class Scale(Level):
    """Base of the attention-scale axis."""

    @abstractmethod
    def factor(self, d_head: int) -> float:
        """What q·k is multiplied by, for heads of `d_head` dimensions."""


class InverseSqrt(Scale):
    """1/√d_k: unit-variance queries and keys get unit-variance logits (Vaswani et al. 2017, arXiv:1706.03762)."""

    def factor(self, d_head: int) -> float:
        """1/√d_head."""
        return 1 / math.sqrt(d_head)


class Unscaled(Scale):
    """Factor = 1: unit-variance queries and keys get logits of variance d_k, and the softmax saturates."""

    def factor(self, d_head: int) -> float:
        """One."""
        return 1.0


class Inverse(Scale):
    """1/d_k: logits shrink as heads widen (the limit kept by µP, Yang et al. 2022, arXiv:2203.03466)."""

    def factor(self, d_head: int) -> float:
        """1/d_head."""
        return 1 / d_head
