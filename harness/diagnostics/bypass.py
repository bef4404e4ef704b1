"""A probe of residual connections: what a block hands on where its sublayers give nothing."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.diagnostics.finding import Measured, NotApplicable, worst_of
from harness.diagnostics.operators import without_fast_path
from harness.diagnostics.subject import Subject, block_of, first, hooked
from harness.diagnostics.visibility import NEVER_CALLED
from harness.seeding import generator

CAUSES = {
    "sum": "a block does not hand on its input: the residual connection is left out, or weighs it",
    "normed": "a block does not hand on its input's norm: the residual connection is left out",
    "none": "a block hands on its input, though no residual connection is declared",
}


def residual_fit(subject: Subject) -> Measured | NotApplicable:
    """How far what a block hands on is from what is declared, relative, where its sublayers give nothing, and where one
    of them gives random numbers: the sum of that and its input (*sum*), its norm (*normed*, of the first sublayer), the
    same for every token (*none*, where they give nothing).
    """
    if not subject.residual:
        return NotApplicable("residual connections are not declared")
    if subject.residual == "normed" and subject.trained:
        return NotApplicable("training has moved the norms that blocks end with")
    inside = {block: [p for p in subject.sublayers if block_of(p, [block])] for block in subject.blocks}
    if not inside or not all(inside.values()):
        return NotApplicable("blocks and their sublayers are not named")
    apart: dict[str, float] = {}
    for block, own in inside.items():
        given = {"none": [], "normed": own[:1], "sum": own}[subject.residual]
        passes = [_passed(subject, block, own, speaking) for speaking in (None, *given)]
        if not all(passes):
            return NotApplicable(NEVER_CALLED)
        apart[block] = max(_apart(subject.residual, *found) for found in passes if found)
    worst = worst_of(apart)
    return Measured(apart[worst], worst, CAUSES[subject.residual], apart)


def _passed(
    subject: Subject, block: str, sublayers: Sequence[str], speaking: str | None
) -> tuple[Tensor, Tensor] | None:
    """What should leave a block and what does, where its sublayers give nothing, but for one that gives random numbers
    of the size of what enters; None where it is never called.
    """
    entered: list[Tensor] = []
    left: list[Tensor] = []
    draws: dict[str, Tensor] = {}

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:  # hidden states come first, by whatever name
        entered.append(first(args or next(iter(kwargs.values()))).detach())

    def leave(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        left.append(first(output).detach())

    def speak(path: str, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        said = torch.zeros_like(first(output))
        if path == speaking:
            drawn = torch.randn(said.shape, generator=generator(said.device, 0, "bypass", 0, 0), device=said.device)
            said = draws[path] = (drawn * entered[-1].float().square().mean().sqrt()).to(said)
        return _replaced(output, said)

    after = {path: partial(speak, path) for path in sublayers} | {block: leave}
    with hooked(subject.model, after, {block: enter}), without_fast_path():
        subject.logits(subject.tokens)
    if not left or (speaking is not None and not draws):
        return None
    return entered[0] + sum(draws.values()), left[0]


def _replaced(output: Any, first_of_it: Tensor) -> Any:
    """What a module gives, with another tensor in the first place."""
    if isinstance(output, Tensor):
        return first_of_it
    if hasattr(output, "_replace"):  # a named tuple
        return output._replace(**{output._fields[0]: first_of_it})
    return (first_of_it, *output[1:])


def _apart(residual: str, due: Tensor, left: Tensor) -> float:
    """How far one is from the other, relative; of what a norm follows, of their directions; of what should hand on
    nothing, how much tokens differ. What is no number is as far as can be.
    """
    due, left = (x.float().flatten(0, -2) for x in (due, left))
    if residual == "sum":
        apart = (left - due).norm() / due.norm()
    elif residual == "none":
        apart = (left - left.mean(0)).norm() / (due - due.mean(0)).norm()
    else:
        one, other = (functional.normalize(x - x.mean(-1, keepdim=True), dim=-1) for x in (due, left))
        apart = (one - other).norm(dim=-1).max()
    return float(apart.nan_to_num(nan=math.inf))
