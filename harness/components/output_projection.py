"""What mixes the heads' results into the residual stream."""

from abc import abstractmethod

from torch import nn

from harness.components.linear import ResidualOutput
from harness.components.shape import Shape
from harness.schema import Level, UserError


class OutputProjection(Level):
    """Base of the output-projection axis."""

    @abstractmethod
    def build(self, shape: Shape) -> nn.Module:
        """A module that maps the joined heads `(B, T, H · d_head)` to `(B, T, d_model)`."""

    def check(self, shape: Shape) -> None:
        """Raise `UserError` where the level cannot be combined with a model of this shape."""


class Projection(OutputProjection):
    """W_o [head_1 … head_H], H · d_head · d_model weights (Vaswani et al. 2017, arXiv:1706.03762)."""

    def build(self, shape: Shape) -> nn.Module:
        """A linear map without bias."""
        return ResidualOutput(shape.num_heads * shape.d_head, shape.d_model, bias=False)


class NoProjection(OutputProjection):
    """[head_1 … head_H] as they are: W_o = 1, so that each head writes to its own dimensions."""

    def check(self, shape: Shape) -> None:
        """The heads must be as wide as the stream."""
        if shape.num_heads * shape.d_head != shape.d_model:
            raise UserError(
                f"output_projection = NoProjection: num_heads × d_head = {shape.num_heads * shape.d_head} must equal "
                f"d_model = {shape.d_model}; change d_head or use Projection()"
            )

    def build(self, shape: Shape) -> nn.Module:
        """Nothing."""
        return nn.Identity()
