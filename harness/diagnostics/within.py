"""Detectors of what happens inside: attention, the residual stream, gradients by depth, units, experts."""

from collections.abc import Callable
from itertools import pairwise
from statistics import median

from harness.diagnostics.finding import Measured, NotApplicable
from harness.diagnostics.history import History

LATE = 0.2  # of the steps: from when on heads should have learned where to look
SUSTAINED = 10  # points of a curve in a row, of ten steps each
RISEN = 2.0  # times: logits that grow


def _of_layers(
    history: History, name: str, number: Callable[[list[float]], float], pick: Callable[..., int], begin: float = 0.0
) -> Measured | NotApplicable:
    """A number of each layer's curve, at the layer which is picked."""
    layers = history.layers(name, begin)
    if not layers or not all(layers):
        return NotApplicable(f"{name} was not looked at")
    return _at([number(values) for values in layers], pick)


def _at(numbers: list[float], pick: Callable[..., int]) -> Measured | NotApplicable:
    """The number that is picked, with its layer."""
    if not numbers:
        return NotApplicable("it was not looked at before training")
    place = pick(range(len(numbers)), key=numbers.__getitem__)
    return Measured(numbers[place], f"layer {place + 1}")


def initial_logits(history: History) -> Measured | NotApplicable:
    """The largest attention logit before training."""
    return _at(history.start("heads/logit_max"), max)


def attention_logits(history: History) -> Measured | NotApplicable:
    """The largest attention logit."""
    return _of_layers(history, "heads/logit_max", max, max)


def attention_saturated(history: History) -> Measured | NotApplicable:
    """The share of heads that see one key, in a layer whose logits have grown."""
    sharp, logits = history.layers("heads/sharp", LATE), history.layers("heads/logit_max")
    if not any(sharp):
        return NotApplicable("attention was not looked at")
    grown = [len(values) > 1 and max(values[1:]) > RISEN * max(values[0], 1e-12) for values in logits]
    shares = [median(values) if risen and values else 0.0 for values, risen in zip(sharp, grown, strict=True)]
    return _at(shares, max)


def attention_uniform(history: History) -> Measured | NotApplicable:
    """The share of heads, over all layers, that see all keys alike."""
    layers = [median(values) for values in history.layers("heads/uniform", LATE) if values]
    return Measured(sum(layers) / len(layers)) if layers else NotApplicable("attention was not looked at")


def rank_collapse(history: History) -> Measured | NotApplicable:
    """How far tokens are from their mean, over their norm, before training."""
    return _at(history.start("residual/distinct"), min)


def depth_gradients(history: History) -> Measured | NotApplicable:
    """The largest block's gradient over the smallest's, at the first step."""
    first = history.start("gradient/block", step=1)
    if len(first) < 2:
        return NotApplicable("there are not two blocks whose gradients were looked at")
    place = max(range(len(first)), key=first.__getitem__)
    return Measured(max(first) / max(min(first), 1e-30), f"block {place + 1} has the largest")


def residual_jump(history: History) -> Measured | NotApplicable:
    """The largest factor by which the residual stream grows from a block to the next, before training."""
    factors = [after / max(before, 1e-30) for before, after in pairwise(history.start("residual/rms"))]
    if not factors:
        return NotApplicable("there are not two blocks that were looked at before training")
    place = max(range(len(factors)), key=factors.__getitem__)
    return Measured(factors[place], f"block {place + 2}")


def dead_units(history: History) -> Measured | NotApplicable:
    """The share of feed-forward units of a layer that no token of the probe batch wakes, at the end."""
    return _of_layers(history, "feedforward/dead", lambda values: values[-1], max)


def moe_balance(history: History) -> Measured | NotApplicable:
    """MaxVio that a hundred steps in a row have at least."""
    loads = history.values("router/load_max")
    windows = [min(loads[i : i + SUSTAINED]) for i in range(len(loads) - SUSTAINED + 1)]
    return Measured(max(windows) - 1) if windows else NotApplicable("there are no experts, or too few steps")


def moe_idle(history: History) -> Measured | NotApplicable:
    """The least used expert's share of the choices, times the number of experts, in the second half."""
    loads = history.values("router/load_min", 0.5)
    return Measured(median(loads)) if loads else NotApplicable("there are no experts")


def moe_dropped(history: History) -> Measured | NotApplicable:
    """The share of choices that find their expert full, in the second half."""
    shares = history.values("router/dropped", 0.5)
    return Measured(median(shares)) if shares else NotApplicable("there are no experts")


def router_logits(history: History) -> Measured | NotApplicable:
    """By how much the logarithm of the sum of a router's exponentiated logits has risen."""
    return _of_layers(history, "router/logsumexp", lambda values: values[-1] - values[0], max)


def auxiliary_gradient(history: History) -> Measured | NotApplicable:
    """The gradient of the routers' losses over that of the task, on the weights that both reach: the median."""
    shares = history.values("gradient/auxiliary")
    return Measured(median(shares)) if shares else NotApplicable("no loss of routers is declared")
