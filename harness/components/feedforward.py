"""The position-wise feed-forward sublayer."""

from abc import abstractmethod
from typing import Annotated

from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional

from harness.schema import Changes, Level


class FeedForward(Level):
    """Base of the feed-forward axis."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module:
        """A module that maps `(B, T, d_model)` to the same shape, each position by itself."""


class ReLU(FeedForward):
    """W₂ · max(0, W₁x + b₁) + b₂ (Vaswani et al. 2017, arXiv:1706.03762); 2 · d_model · d_ff weights."""

    d_ff: Annotated[int, Changes("parameters"), Ge(1)] = 256

    def build(self, d_model: int) -> nn.Module:
        """Two linear maps around a ReLU."""
        return nn.Sequential(nn.Linear(d_model, self.d_ff), nn.ReLU(), nn.Linear(self.d_ff, d_model))


class GELU(FeedForward):
    """W₂ · GELU(W₁x + b₁) + b₂, the exact GELU x·Φ(x) (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

    d_ff: Annotated[int, Changes("parameters"), Ge(1)] = 256

    def build(self, d_model: int) -> nn.Module:
        """Two linear maps around a GELU."""
        return nn.Sequential(nn.Linear(d_model, self.d_ff), nn.GELU(), nn.Linear(self.d_ff, d_model))


class SwiGLU(FeedForward):
    """W₂ · (SiLU(W₁x) ⊙ W₃x), no biases (Shazeer 2020, arXiv:2002.05202); 3 · d_model · d_ff weights.

    d_ff = ⅔ of a two-matrix feed-forward's gives the same number of weights.
    """

    d_ff: Annotated[int, Changes("parameters"), Ge(1)] = 171

    def build(self, d_model: int) -> nn.Module:
        """A gated pair of maps and one back."""
        return GatedFeedForward(d_model, self.d_ff)


class GatedFeedForward(nn.Module):
    """SwiGLU's module."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, T, d_model)` to the same shape."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))
