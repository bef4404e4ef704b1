"""A probe of the backward pass: whether gradients are the slope of the loss, by differences of the loss alone."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.diagnostics.finding import Measured, NotApplicable, worst_of
from harness.diagnostics.keeping import in_double
from harness.diagnostics.masking import apart
from harness.diagnostics.subject import Subject, block_of
from harness.diagnostics.wiring import has_loss, trained, training_loss
from harness.seeding import generator

DOUBLE, SINGLE = torch.float64, torch.float32
STEPS = {DOUBLE: (1e-6, 1e-8, 1e-4), SINGLE: (1e-2, 1e-3)}  # of the weights' norm; the first that is sure is enough
ROUNDING = {DOUBLE: 1e-13, SINGLE: 1e-6}  # of a loss
DIRECTIONS = 3  # drawn: of one, a part that is missing may be nearly a right angle away
UNSURE = 3.0  # times what slopes over two step lengths differ by
SURE = 1e-3  # of a slope
LEAST = 0.01  # of a weight: of those that are zero as well
NOTHING = 1e-6  # of the loss: a slope that does not matter
SAME = 1e-3  # deviations of the logits, in two precisions


def backward_fit(subject: Subject) -> Measured | NotApplicable:
    """How far gradients are from the slope of the loss, relative and beyond what its numbers leave open, in random
    directions of the weights and in their own: of each block, and of each module outside of them.

    All is computed in fp64 where the model can.
    """
    if not has_loss(subject):
        return NotApplicable("there is nothing that training would learn from")
    if not subject.exact_gradients:
        return NotApplicable("gradients are not declared to be the slope of the loss")
    with trained(subject), in_double(subject.model):
        narrowest = _narrowest(subject)
    if narrowest < SINGLE.itemsize:
        return NotApplicable("the loss is rounded to half precision on its way: it has no slope that could be seen")
    precision = DOUBLE if narrowest == DOUBLE.itemsize and _is_same(subject) else SINGLE
    with trained(subject), in_double(subject.model) if precision == DOUBLE else nullcontext():
        training_loss(subject, 0).backward()  # through whatever hooks a training step has
        errors = {name: max(_errors(subject, own, precision)) for name, own in _groups(subject).items()}
    worst = worst_of(errors)
    return Measured(errors[worst], worst, evidence=errors)


def _groups(subject: Subject) -> dict[str, list[nn.Parameter]]:
    found: dict[str, list[nn.Parameter]] = {}
    for name, p in subject.model.named_parameters():
        if p.requires_grad:
            found.setdefault(block_of(name, subject.blocks) or name.rpartition(".")[0], []).append(p)
    return found


def _errors(subject: Subject, weights: Sequence[nn.Parameter], precision: torch.dtype) -> Iterator[float]:
    """By direction; a gradient that is zero has no direction of its own."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights]
    draws = generator(weights[0].device, 0, "backward", 0, 0)
    directions = [
        [torch.randn(p.shape, generator=draws, device=p.device, dtype=p.dtype) for p in weights]
        for _ in range(DIRECTIONS)
    ]
    if any(gradient.any() for gradient in gradients):
        directions.append(gradients)
    here = _loss_at(subject, weights, weights, 0.0)
    count = sum(p.numel() for p in weights)
    size = max(_dot(weights, weights) ** 0.5, LEAST * count**0.5)
    usual = size * (_dot(gradients, gradients) / count) ** 0.5
    for drawn in directions:
        direction = [d * (size / _dot(drawn, drawn) ** 0.5) for d in drawn]
        promised = _dot(gradients, direction)
        scale = max(abs(promised), usual, NOTHING * abs(here))
        yield min(_excesses(subject, weights, direction, promised, precision, here, scale))


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return torch.stack([(a.detach() * b.detach()).sum() for a, b in zip(one, other, strict=True)]).sum().item()


def _excesses(
    subject: Subject,
    weights: Sequence[nn.Parameter],
    direction: Sequence[Tensor],
    promised: float,
    precision: torch.dtype,
    here: float,
    scale: float,
) -> Iterator[float]:
    """How far the slopes ahead and back are from the promised one, relative, beyond what is unsure: that over twice the
    length they are others, where the loss bends or leaps, and what is lost to rounding. At a kink any slope between the
    two will do. By length, until one is sure: a long one that bends may look straight.
    """
    for step in STEPS[precision]:
        losses = {times: _loss_at(subject, weights, direction, times * step) for times in (-2, -1, 1, 2)}
        ahead, back = (losses[1] - here) / step, (here - losses[-1]) / step
        far = (losses[2] - losses[-2]) / (4 * step)
        apart = abs((ahead + back) / 2 - far) + ROUNDING[precision] * abs(here) / step
        beyond = max(promised - max(ahead, back), min(ahead, back) - promised) - UNSURE * apart
        yield max(beyond, 0.0) / max(scale, abs(ahead), abs(back))
        if apart < SURE * scale:
            return


@torch.no_grad()
def _loss_at(subject: Subject, weights: Sequence[nn.Parameter], direction: Sequence[Tensor], length: float) -> float:
    """The loss that far away."""
    before = [p.detach().clone() for p in weights]
    for p, value, d in zip(weights, before, direction, strict=True):
        p.copy_(value + length * d)
    found = training_loss(subject, 0).item()
    for p, value in zip(weights, before, strict=True):
        p.copy_(value)
    return found


class _Casts(TorchFunctionMode):
    """Sees the fewest bytes of a number that is made of wider ones on the way from weights to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.narrowest = DOUBLE.itemsize

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad:
            self.narrowest = min(self.narrowest, result.dtype.itemsize)
        return result


def _narrowest(subject: Subject) -> int:
    """Bytes of the narrowest numbers that the loss of a model in fp64 passes through; as many as fp32 has where it
    cannot be computed so.
    """
    with _Casts() as casts:
        try:
            training_loss(subject, 0).backward()
        except Exception:  # of a module that is not made for fp64, anything
            return min(casts.narrowest, SINGLE.itemsize)
    return casts.narrowest


def _is_same(subject: Subject) -> bool:
    """Whether a model gives the same logits in fp64: torch 2.13's fused attention reads a mask of fp32 beside queries
    of fp64 as if it were of their type, without a word.
    """
    single = subject.logits(subject.tokens)
    try:
        with in_double(subject.model):
            double = subject.logits(subject.tokens)
    except Exception:  # of a module that keeps something of fp32, anything
        return False
    return apart(double - single, single) <= SAME
