"""A probe of residual connections: what a block hands on where its sublayers give nothing."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.diagnostics.finding import Measured, NotApplicable
from harness.diagnostics.operators import without_fast_path
from harness.diagnostics.subject import Subject, first, hooked

CAUSES = {
    "sum": "a block does not hand on its input: the residual connection is left out, or weighs it",
    "normed": "a block does not hand on its input's norm: the residual connection is left out",
    "none": "a block hands on its input, though no residual connection is declared",
}


def residual_fit(subject: Subject) -> Measured | NotApplicable:
    """How far what a block hands on is from what is declared, relative to its input, where its sublayers give nothing:
    its input (*sum*), the input's norm (*normed*), the same for every token (*none*).
    """
    if not subject.residual:
        return NotApplicable("residual connections are not declared")
    if subject.residual == "normed" and subject.trained:
        return NotApplicable("training has moved the norms that blocks end with")
    if not subject.blocks or not subject.sublayers:
        return NotApplicable("blocks and their sublayers are not named")
    passed: dict[str, tuple[Tensor, Tensor]] = {}

    def note(path: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        passed[path] = first(args or next(iter(kwargs.values()))).detach(), first(output).detach()

    after = dict.fromkeys(subject.sublayers, _silence) | {path: partial(note, path) for path in subject.blocks}
    with hooked(subject.model, after), without_fast_path():
        subject.logits(subject.tokens)
    apart = {path: _apart(subject.residual, *both) for path, both in passed.items()}
    worst = max(apart, key=apart.__getitem__)
    return Measured(apart[worst], worst, CAUSES[subject.residual])


def _silence(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
    """A sublayer's result, of zeros."""
    nothing = torch.zeros_like(first(output))
    return nothing if isinstance(output, Tensor) else (nothing, *output[1:])


def _apart(residual: str, entered: Tensor, left: Tensor) -> float:
    entered, left = (x.float().flatten(0, -2) for x in (entered, left))
    if residual == "sum":
        return float((left - entered).norm() / entered.norm())
    if residual == "none":
        return float((left - left.mean(0)).norm() / (entered - entered.mean(0)).norm())
    one, other = (functional.normalize(x - x.mean(-1, keepdim=True), dim=-1) for x in (entered, left))
    return float((one - other).norm(dim=-1).max())
