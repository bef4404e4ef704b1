"""Initialisation: each parameter from (seed, its name), so that variants share the parameters they have in common."""

from torch import nn

from harness.seeding import seed_global


def initialise(model: nn.Module, seed: int) -> None:
    """Draw every parameter of a model anew, in place.

    Linear weights: Xavier normal, std √(2 / (fan_in + fan_out)) (Glorot & Bengio 2010); biases zero. Embeddings: N(0,
    1), the paper's N(0, 1/d_model) times √d_model. Other modules that own parameters: their own `reset_parameters`.

    Raises:
        TypeError: a module owns parameters and has no `reset_parameters`.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            seed_global(seed, "init", f"{path}.{name}")
            _draw(module, name, parameter)


def _draw(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module) is nn.Linear:
        nn.init.xavier_normal_(parameter) if name == "weight" else nn.init.zeros_(parameter)
    elif type(module) is nn.Embedding:
        nn.init.normal_(parameter)
    elif callable(reset := getattr(module, "reset_parameters", None)):
        drawn = {n: p.detach().clone() for n, p in module.named_parameters(recurse=False) if n != name}
        reset()
        for other, value in drawn.items():  # reset draws all at once; each parameter keeps the draw of its own seed
            getattr(module, other).data.copy_(value)
    else:
        raise TypeError(f"{type(module).__name__} owns the parameter {name!r} and has no reset_parameters()")
