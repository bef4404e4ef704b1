"""Linear maps by their role: initialisation and weight decay tell parameters apart by the type of their module. And
where products must not be rounded to bf16.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


class InputProjection(nn.Linear):
    """A map to queries, keys or values."""


class ResidualOutput(nn.Linear):
    """The last map of a sublayer, whose result is added to the residual stream."""


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context in which products on the tensor's device keep their type; the meta device knows no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
