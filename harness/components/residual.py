"""Residual connections: whether a sublayer's input is added to its output, and the whole step around a sublayer."""

from abc import abstractmethod

from torch import Tensor, nn

from harness.components.norm import Norm, NormPlacement
from harness.schema import Level


class ResidualConnection(Level):
    """Base of the residual axis."""

    @abstractmethod
    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """What goes on from a sublayer's input and output, both `(B, T, d_model)`."""


class Residual(ResidualConnection):
    """x + f(x): the gradient has a path around every sublayer (He et al. 2015, arXiv:1512.03385)."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum."""
        return x + y


class NoResidual(ResidualConnection):
    """y = f(x): a sublayer keeps nothing of its input but what it computes."""

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """The output."""
        return y


class ResidualStep(nn.Module):
    """outer(residual(x, dropout(after(f(before(x)))))): the sublayer f stands between `enter` and `leave`."""

    def __init__(
        self, placement: NormPlacement, norm: Norm, residual: ResidualConnection, dropout: float, d_model: int
    ) -> None:
        super().__init__()

        def made(present: bool) -> nn.Module | None:
            return norm.build(d_model) if present else None

        self.before, self.after, self.outer = made(placement.before), made(placement.after), made(placement.outer)
        self.residual = residual
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def enter(self, x: Tensor, real: Tensor | None) -> Tensor:
        """What the sublayer sees of `x` `(B, T, d_model)`; `real` `(B, T)` is False at padding."""
        return x if self.before is None else self.before(x, real)

    def leave(self, x: Tensor, y: Tensor, real: Tensor | None) -> Tensor:
        """What goes on, from the input `x` and the sublayer's output `y`."""
        y = y if self.after is None else self.after(y, real)
        joined: Tensor = self.residual.join(x, self.dropout(y))
        return joined if self.outer is None else self.outer(joined, real)
