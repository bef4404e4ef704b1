"""Linear maps by their role: initialisation and weight decay tell parameters apart by the type of their module."""

from torch import nn


class InputProjection(nn.Linear):
    """A map to queries, keys or values."""


class ResidualOutput(nn.Linear):
    """The last map of a sublayer, whose result is added to the residual stream."""
