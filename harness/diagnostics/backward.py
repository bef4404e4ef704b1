"""A probe of the backward pass: whether gradients are the slope of the loss, by differences of the loss alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from harness.diagnostics.finding import Measured, NotApplicable
from harness.diagnostics.masking import apart
from harness.diagnostics.subject import Subject
from harness.diagnostics.wiring import has_loss, trained, training_loss
from harness.seeding import generator

DOUBLE, SINGLE = torch.float64, torch.float32
STEPS = {DOUBLE: (1e-6, 1e-8, 1e-4), SINGLE: (1e-2, 1e-3)}  # of the weights' norm; the first that is sure is enough
ROUNDING = {DOUBLE: 1e-13, SINGLE: 1e-6}  # of a loss
DIRECTIONS = 3  # drawn: of one, a part that is missing may be nearly a right angle away
UNSURE = 3.0  # times what slopes over two step lengths differ by
SURE = 1e-3  # of a slope
NOTHING = 1e-6  # of the loss: a slope that does not matter
SAME = 1e-3  # deviations of the logits, in two precisions


def backward_fit(subject: Subject) -> Measured | NotApplicable:
    """How far gradients are from the slope of the loss, relative and beyond what its numbers leave open, in random
    directions of the weights and in their own: of each block, and of each parameter outside of them.

    All is computed in fp64 where the model can.
    """
    if not has_loss(subject):
        return NotApplicable("there is nothing that training would learn from")
    precision = DOUBLE if _takes_double(subject) else SINGLE
    with trained(subject), _in_double(subject.model) if precision == DOUBLE else nullcontext():
        loss = training_loss(subject, 0)
        loss.backward()  # through whatever hooks a training step has
        size = abs(loss.item())
        errors = {name: max(_errors(subject, own, size, precision)) for name, own in _groups(subject).items()}
    worst = max(errors, key=errors.__getitem__)
    return Measured(errors[worst], worst, evidence=errors)


def _groups(subject: Subject) -> dict[str, list[nn.Parameter]]:
    found: dict[str, list[nn.Parameter]] = {}
    for name, p in subject.model.named_parameters():
        block = next((path for path in subject.blocks if name.startswith(f"{path}.")), name)
        if p.requires_grad:
            found.setdefault(block, []).append(p)
    return found


def _errors(subject: Subject, weights: Sequence[nn.Parameter], loss: float, precision: torch.dtype) -> Iterator[float]:
    """By direction; a gradient that is zero has no direction of its own."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights]
    draws = generator(weights[0].device, 0, "backward", 0, 0)
    directions = [
        [torch.randn(p.shape, generator=draws, device=p.device, dtype=p.dtype) for p in weights]
        for _ in range(DIRECTIONS)
    ]
    if any(gradient.any() for gradient in gradients):
        directions.append(gradients)
    size = _dot(weights, weights).sqrt()
    usual = size * (_dot(gradients, gradients) / sum(p.numel() for p in weights)).sqrt()
    for drawn in directions:
        direction = [d * (size / _dot(drawn, drawn).sqrt()) for d in drawn]
        promised = _dot(gradients, direction)
        scale = max(promised.abs().item(), usual.item(), NOTHING * loss)
        yield min(_excesses(subject, weights, direction, promised.item(), precision, loss, scale))


def _excesses(
    subject: Subject,
    weights: Sequence[nn.Parameter],
    direction: Sequence[Tensor],
    promised: float,
    precision: torch.dtype,
    loss: float,
    scale: float,
) -> Iterator[float]:
    """How far the slope is from the promised one, relative, beyond what is unsure: that over twice the length it is
    another, where the loss bends or leaps, and what is lost to rounding. By length, until one is sure: a long one that
    bends may look straight.
    """
    for step in STEPS[precision]:
        near, far = (_difference(subject, weights, direction, length) / (2 * length) for length in (step, 2 * step))
        apart = abs(near - far) + ROUNDING[precision] * loss / step
        yield max(abs(near - promised) - UNSURE * apart, 0.0) / max(scale, abs(near))
        if apart < SURE * scale:
            return


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a.detach() * b.detach()).sum() for a, b in zip(one, other, strict=True)]).sum()


@torch.no_grad()
def _difference(subject: Subject, weights: Sequence[nn.Parameter], direction: Sequence[Tensor], length: float) -> float:
    """Of the losses that far ahead and that far back."""
    before, losses = [p.detach().clone() for p in weights], []
    for sign in (1, -1):
        for p, value, d in zip(weights, before, direction, strict=True):
            p.copy_(value + sign * length * d)
        losses.append(training_loss(subject, 0).item())
    for p, value in zip(weights, before, strict=True):
        p.copy_(value)
    return losses[0] - losses[1]


def _takes_double(subject: Subject) -> bool:
    """Whether the model computes the same in fp64: one that casts on its way cannot, and torch 2.13's fused attention
    reads a mask of fp32 beside queries of fp64 as if it were of their type, without a word.
    """
    single = subject.logits(subject.tokens)
    try:
        with _in_double(subject.model):
            double = subject.logits(subject.tokens)
    except RuntimeError:
        return False
    return apart(double - single, single) <= SAME


@contextmanager
def _in_double(model: nn.Module) -> Iterator[None]:
    """A model whose weights and buffers are fp64 for a while."""
    weights = [(p, p.data) for p in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    model.double()
    try:
        yield
    finally:
        for p, data in weights:
            p.grad, p.data = None, data
        for module, own in buffers:
            module._buffers.update(own)
