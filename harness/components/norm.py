"""Normalisation: which kind, and where it stands around a sublayer."""

from abc import abstractmethod
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from torch import Tensor, nn

from harness.schema import Changes, Level


class Norm(Level):
    """Base of the normalisation-kind axis."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module:
        """A module that maps `(B, T, d_model)` and, if it cares, the mask of real tokens `(B, T)` to the same shape."""


class LayerNorm(Norm):
    """γ · (x − mean) / √(var + ε) + β over the last dimension, biased variance (Ba et al. 2016, arXiv:1607.06450)."""

    eps: Annotated[float, Changes("outputs"), Gt(0)] = 1e-5

    def build(self, d_model: int) -> nn.Module:
        """Torch's own."""
        return LayerNormalisation(d_model, eps=self.eps)


class RMSNorm(Norm):
    """γ · x / √(mean(x²) + ε) over the last axis: no centring or bias (Zhang, Sennrich 2019, arXiv:1910.07467)."""

    eps: Annotated[float, Changes("outputs"), Gt(0)] = 1e-5

    def build(self, d_model: int) -> nn.Module:
        """Torch's own."""
        return RMSNormalisation(d_model, eps=self.eps)


class BatchNorm(Norm):
    """γ · (x − mean) / √(var + ε) + β with moments a feature, over all real tokens of the batch; in evaluation over
    those of training, x̄ ← (1 − momentum) · x̄ + momentum · mean (Ioffe & Szegedy 2015, arXiv:1502.03167).

    In training every token sees the whole batch, tokens ahead of it too.
    """

    eps: Annotated[float, Changes("outputs"), Gt(0)] = 1e-5
    momentum: Annotated[float, Changes("evaluation"), Gt(0), Le(1)] = 0.1

    def build(self, d_model: int) -> nn.Module:
        """One that leaves padding out."""
        return BatchNormalisation(d_model, eps=self.eps, momentum=self.momentum)


class LayerNormalisation(nn.LayerNorm):
    """Torch's, for callers that name the real tokens."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """`(…, d_model)` to the same shape."""
        return super().forward(x)


class RMSNormalisation(nn.RMSNorm):
    """Torch's, for callers that name the real tokens."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """`(…, d_model)` to the same shape."""
        return super().forward(x.to(self.weight.dtype))  # as autocast does for LayerNorm; torch fuses no mixed types


class BatchNormalisation(nn.BatchNorm1d):
    """Torch's, over batch and sequence, padding left out of the moments."""

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """`(B, T, d_model)` to the same shape; `real` `(B, T)` is False at padding."""
        if not self.training:
            return super().forward(x.flatten(0, -2)).view_as(x)
        if real is None:
            real = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        wide = x.to(self.weight.dtype)  # bf16 would not even sum the weights to one
        weight = real.to(wide.dtype)[..., None] / real.sum()
        mean = (wide * weight).sum((0, 1))
        variance = ((wide - mean).square() * weight).sum((0, 1))
        self._remember(mean.detach(), variance.detach(), real.sum())
        return ((wide - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running moments, the variance unbiased, as torch does."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


class NormPlacement(Level):
    """Base of the norm-placement axis: outer(residual(x, after(f(before(x))))), each of the three a norm or nothing."""

    before: ClassVar[bool] = False
    after: ClassVar[bool] = False
    outer: ClassVar[bool] = False
    final: ClassVar[bool] = False  # one more between the last block and the output head


class PreNorm(NormPlacement):
    """x + f(norm(x)), and one more norm at the end (Xiong et al. 2020, arXiv:2002.04745)."""

    before = True
    final = True


class PostNorm(NormPlacement):
    """norm(x + f(x)), as in the original (Vaswani et al. 2017, arXiv:1706.03762)."""

    outer = True


class SandwichNorm(NormPlacement):
    """x + norm(f(norm(x))), and one more norm at the end (Ding et al. 2021, arXiv:2105.13290)."""

    before = True
    after = True
    final = True


class NoNorm(NormPlacement):
    """y = x + f(x): nothing is normalised, and the kind of norm is without effect."""
