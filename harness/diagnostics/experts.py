"""Probes of mixtures of experts: whether what is declared to keep them balanced does."""

from typing import Any

import torch
from torch import Tensor, nn

from harness.diagnostics.finding import Measured, NotApplicable
from harness.diagnostics.subject import Subject, hooked
from harness.diagnostics.wiring import trained

FORCED = 4.0  # by which the first expert's logit then lies above all: every token chooses it, with almost all of p
NO_RISE = 0.01  # of E Σ f p: there is no more imbalance to be forced


def moe_aux(subject: Subject) -> Measured | NotApplicable:
    """What the auxiliary loss rises by when all tokens are made to choose one expert, over what the declared
    coefficient · E Σ f_i p_i rises by (f_i the share of choices, p_i the mean probability; mean over layers).
    """
    if subject.auxiliary is None or not subject.routers:
        return NotApplicable("there is no router, or something else than balance is declared of it")
    if subject.trained:
        return NotApplicable("the model is trained, and may be as unbalanced as can be")
    _, coefficient = subject.auxiliary
    if coefficient == 0:
        return NotApplicable("no balance is declared")
    even, declared_even = _measured(subject, forced=False)
    forced, declared_forced = _measured(subject, forced=True)
    if float(declared_forced - declared_even) < NO_RISE:
        cause = "every token chooses the same experts before training"
        return Measured(0.0, cause=cause, evidence={"balance": float(declared_even)})
    found = float(forced - even) / (coefficient * float(declared_forced - declared_even))
    cause = "the auxiliary loss does not enter the loss, or does not see the choice" if abs(found) < 0.1 else ""
    return Measured(found, cause=cause, evidence={"even": float(even), "forced": float(forced)})


def _measured(subject: Subject, *, forced: bool) -> tuple[Tensor, Tensor]:
    """The auxiliary loss, and the mean over layers of E Σ f_i p_i, with the first expert forced or not."""
    assert subject.auxiliary is not None
    balances: list[Tensor] = []

    def push(_module: nn.Module, _args: Any, _kwargs: Any, logits: Tensor) -> Tensor:
        pushed = logits.clone()
        if forced:
            pushed[..., 0] = logits.amax(-1) + FORCED
        probabilities = pushed.detach().softmax(-1).flatten(0, -2)
        chosen = probabilities.topk(subject.top_k, -1).indices
        load = torch.bincount(chosen.flatten(), minlength=probabilities.shape[-1]) / chosen.numel()
        balances.append(probabilities.shape[-1] * (load * probabilities.mean(0)).sum())
        return pushed

    with trained(subject), hooked(subject.model, dict.fromkeys(subject.routers, push)):
        added = subject.auxiliary[0]()
    return added, torch.stack(balances).mean()
