"""The sizes that components need to know of the model that they are built for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A model's sizes: width, number of heads and layers, and the width of a head with the field that it comes from,
    as a refusal names it.
    """

    d_model: int
    num_heads: int
    num_layers: int
    d_head: int
    d_head_field: str = "d_head (if not set, d_model / num_heads)"
