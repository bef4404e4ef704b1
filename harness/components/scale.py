"""The factor on attention logits q·k before the softmax."""

import math
from abc import abstractmethod
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor, nn

from harness.components.shape import Shape
from harness.schema import Changes, Level


class Scale(Level):
    """Base of the attention-scale axis."""

    @abstractmethod
    def factor(self, d_head: int) -> float:
        """What q·k is multiplied by at the start, for heads of `d_head` dimensions."""

    def build(self, shape: Shape) -> nn.Module:
        """A module that multiplies queries `(B, H, T, d_head)`."""
        return FixedScale(self.factor(shape.d_head))


class FixedScale(nn.Module):
    """The same factor for all heads, for ever."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, query: Tensor) -> Tensor:
        """`(B, H, T, d_head)`, multiplied."""
        return query * self.factor


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


class LearnedTemperature(Scale):
    """initial/√d_k · e^{τ_h} with a trained τ a head, zero at the start (Henry et al. 2020, arXiv:2010.04245, train one
    factor with normalised queries and keys).
    """

    initial: Annotated[float, Changes("outputs"), Gt(0)] = 1.0

    def factor(self, d_head: int) -> float:
        """initial/√d_head."""
        return self.initial / math.sqrt(d_head)

    def build(self, shape: Shape) -> nn.Module:
        """A factor a head."""
        return TrainedScale(self.factor(shape.d_head), shape.num_heads)


class TrainedScale(nn.Module):
    """A factor times e^{τ_h}."""

    def __init__(self, factor: float, num_heads: int) -> None:
        super().__init__()
        self.factor = factor
        self.temperature = nn.Parameter(torch.zeros(num_heads))

    def reset_parameters(self) -> None:
        """Zero: the factor as it is."""
        nn.init.zeros_(self.temperature)

    def forward(self, query: Tensor) -> Tensor:
        """`(B, H, T, d_head)`, multiplied head by head."""
        return query * (self.factor * self.temperature.exp())[:, None, None]
