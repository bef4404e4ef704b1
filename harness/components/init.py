"""Initialisation: each parameter from (seed, its name), so that variants share the parameters they have in common."""

import math
from abc import abstractmethod
from typing import Annotated

from annotated_types import Gt
from torch import Tensor, nn

from harness.components.linear import InputProjection, ResidualOutput
from harness.schema import Changes, Level, Spec
from harness.seeding import seed_global


class Draw(Level):
    """Base of the distributions that weights are drawn from."""

    @abstractmethod
    def std(self, fan_in: int, fan_out: int) -> float:
        """The standard deviation of a weight `(fan_out, fan_in)`."""


class Xavier(Draw):
    """N(0, 2 / (fan_in + fan_out)): keeps variances alike on the way forth and back (Glorot & Bengio 2010)."""

    def std(self, fan_in: int, fan_out: int) -> float:
        """√(2 / (fan_in + fan_out))."""
        return math.sqrt(2 / (fan_in + fan_out))


class Kaiming(Draw):
    """N(0, 2 / fan_in): keeps the variance through a ReLU (He et al. 2015, arXiv:1502.01852)."""

    def std(self, fan_in: int, fan_out: int) -> float:
        """√(2 / fan_in)."""
        return math.sqrt(2 / fan_in)


class Normal(Draw):
    """N(0, deviation²), whatever the fans (BERT's .02, arXiv:1810.04805)."""

    deviation: Annotated[float, Changes("outputs"), Gt(0)] = 0.02

    def std(self, fan_in: int, fan_out: int) -> float:
        """The deviation."""
        return self.deviation


class Gain(Level):
    """Base of the factors on the residual output projections, which add up along the residual stream."""

    @abstractmethod
    def factor(self, num_layers: int) -> float:
        """What their standard deviation is multiplied by."""


class UnitGain(Gain):
    """Factor = 1: residual outputs are drawn like the rest."""

    def factor(self, num_layers: int) -> float:
        """One."""
        return 1.0


class DepthGain(Gain):
    """1/√(2L) for L layers of two sublayers each: the stream's variance does not grow with depth (GPT-2; Shoeybi et al.
    2019, arXiv:1909.08053).
    """

    def factor(self, num_layers: int) -> float:
        """1/√(2 · num_layers)."""
        return 1 / math.sqrt(2 * num_layers)


class Initialisation(Spec):
    """What each group of weights is drawn from; biases are zero, norms the identity.

    `qkv` are the maps to queries, keys and values, `residual` the last map of every sublayer (`residual_gain` on top),
    `linear` all other matrices. Embeddings have N(0, 1), the paper's N(0, 1/d_model) times √d_model.
    """

    linear: Annotated[Draw, Changes("outputs")] = Xavier()
    qkv: Annotated[Draw, Changes("outputs")] = Xavier()
    residual: Annotated[Draw, Changes("outputs")] = Xavier()
    residual_gain: Annotated[Gain, Changes("outputs")] = UnitGain()
    embedding: Annotated[Draw, Changes("outputs")] = Normal(deviation=1.0)


def initialise(model: nn.Module, spec: Initialisation, num_layers: int, seed: int) -> None:
    """Draw every parameter of a model anew, in place, and the buffers of modules that have `draw_buffers`.

    Modules other than linear maps and embeddings draw their own parameters by `reset_parameters`.

    Raises:
        TypeError: a module owns parameters and has no `reset_parameters`.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            seed_global(seed, "init", f"{path}.{name}")
            _draw(module, name, parameter, spec, num_layers)
        if callable(draw := getattr(module, "draw_buffers", None)):
            seed_global(seed, "buffers", path)
            draw()


def declared_deviation(
    module: nn.Module, name: str, parameter: Tensor, spec: Initialisation, num_layers: int
) -> float | None:
    """The standard deviation that a parameter of a linear map or an embedding is drawn with, zero for biases; None
    where the module draws it by itself.
    """
    if type(module) in (nn.Linear, InputProjection, ResidualOutput):
        if name != "weight":
            return 0.0
        fan_out, fan_in = parameter.shape
        return _linear_std(module, fan_in, fan_out, spec, num_layers)
    if type(module) is nn.Embedding:
        return spec.embedding.std(parameter.shape[1], parameter.shape[0])
    return None


def _draw(module: nn.Module, name: str, parameter: Tensor, spec: Initialisation, num_layers: int) -> None:
    deviation = declared_deviation(module, name, parameter, spec, num_layers)
    if deviation is not None:
        nn.init.normal_(parameter, std=deviation) if deviation else nn.init.zeros_(parameter)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        drawn = {n: p.detach().clone() for n, p in module.named_parameters(recurse=False) if n != name}
        reset()
        for other, value in drawn.items():  # reset draws all at once; each parameter keeps the draw of its own seed
            getattr(module, other).data.copy_(value)
    else:
        raise TypeError(f"{type(module).__name__} owns the parameter {name!r} and has no reset_parameters()")


def _linear_std(module: nn.Module, fan_in: int, fan_out: int, spec: Initialisation, num_layers: int) -> float:
    if isinstance(module, InputProjection):
        return spec.qkv.std(fan_in, fan_out)
    if isinstance(module, ResidualOutput):
        return spec.residual.std(fan_in, fan_out) * spec.residual_gain.factor(num_layers)
    return spec.linear.std(fan_in, fan_out)
