"""An explicit sink for what happens inside a model; nothing is computed for it unless someone looks."""

from collections import defaultdict

import torch
from torch import Tensor


class Trace:
    """Collects named internals of one forward pass, a tensor a layer, in the order of the layers."""

    def __init__(self) -> None:
        self.kept: dict[str, list[Tensor]] = defaultdict(list)

    def keep(self, name: str, value: Tensor) -> None:
        """Append a tensor, detached."""
        self.kept[name].append(value.detach())

    def stacked(self, name: str) -> Tensor:
        """All tensors of a name as one, layers first."""
        return torch.stack(self.kept[name])
