"""Normalisation: which kind, and where it stands around a sublayer."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated

from annotated_types import Gt
from torch import Tensor, nn

from harness.schema import Changes, Level


class Norm(Level):
    """Base of the normalisation-kind axis."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module:
        """A module that maps `(B, T, d_model)` to the same shape."""


class LayerNorm(Norm):
    """γ · (x − mean) / √(var + ε) + β over the last dimension, biased variance (Ba et al. 2016, arXiv:1607.06450)."""

    eps: Annotated[float, Changes("outputs"), Gt(0)] = 1e-5

    def build(self, d_model: int) -> nn.Module:
        """Torch's own."""
        return nn.LayerNorm(d_model, eps=self.eps)


class RMSNorm(Norm):
    """γ · x / √(mean(x²) + ε) over the last axis: no centring or bias (Zhang, Sennrich 2019, arXiv:1910.07467)."""

    eps: Annotated[float, Changes("outputs"), Gt(0)] = 1e-5

    def build(self, d_model: int) -> nn.Module:
        """Torch's own."""
        return nn.RMSNorm(d_model, eps=self.eps)


Sublayer = Callable[[Tensor], Tensor]


class NormPlacement(Level):
    """Base of the norm-placement axis."""

    @abstractmethod
    def apply(self, x: Tensor, norm: nn.Module, sublayer: Sublayer) -> Tensor:
        """One residual step around a sublayer, `(B, T, d_model)` to the same shape."""

    @abstractmethod
    def final(self, norm: Norm, d_model: int) -> nn.Module:
        """What stands between the last block and the output head."""


class PreNorm(NormPlacement):
    """x + f(norm(x)), and one more norm at the end (Xiong et al. 2020, arXiv:2002.04745)."""

    def apply(self, x: Tensor, norm: nn.Module, sublayer: Sublayer) -> Tensor:
        """X + f(norm(x))."""
        return x + sublayer(norm(x))

    def final(self, norm: Norm, d_model: int) -> nn.Module:
        """A norm: the residual stream has never been normalised."""
        return norm.build(d_model)


class PostNorm(NormPlacement):
    """norm(x + f(x)), as in the original (Vaswani et al. 2017, arXiv:1706.03762)."""

    def apply(self, x: Tensor, norm: nn.Module, sublayer: Sublayer) -> Tensor:
        """norm(x + f(x))."""
        return norm(x + sublayer(x))

    def final(self, norm: Norm, d_model: int) -> nn.Module:
        """Nothing: the last block ends in a norm."""
        return nn.Identity()
