"""Probes of what decoding and long sequences need: a cache that changes nothing and holds no more than it must, and the
kernel that stores no table.
"""

from functools import partial
from typing import Any

from torch import nn

from harness.components.kernel import backend_of
from harness.diagnostics.finding import Measured, NotApplicable, worst_of
from harness.diagnostics.keeping import kept, mode
from harness.diagnostics.masking import apart, in_pieces
from harness.diagnostics.subject import Subject, first, hooked


def cache_parity(subject: Subject) -> Measured | NotApplicable:
    """How far logits read with a cache, token by token and in blocks, are from those read at once, past the edge of any
    window.
    """
    if subject.read is None:
        return NotApplicable("there is no cache")
    length = subject.tokens.inputs.shape[1]
    third = length // 3
    ways = {
        "token by token": (1,) * length,
        "a prompt, then token by token": (third, *(1,) * (length - third)),
        "in blocks": (third, length - third),
    }
    whole = subject.logits(subject.tokens)
    found = {way: apart(in_pieces(subject, subject.tokens, pieces) - whole, whole) for way, pieces in ways.items()}
    worst = worst_of(found)
    return Measured(found[worst], worst, evidence=found)


def decode_work(subject: Subject) -> Measured | NotApplicable:
    """Queries that attention computes while a prompt and then single tokens are read with a cache, over the tokens
    that are read: the most of all sublayers.
    """
    if subject.read is None or not subject.sites:
        return NotApplicable("there is no cache, or no attention sublayer is named")
    length = subject.tokens.inputs.shape[1]
    third, computed = length // 3, {site.path: 0 for site in subject.sites if site.causal or site.across}

    def count(path: str, _module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        computed[path] += first(result).shape[1]

    with hooked(subject.model, {path: partial(count, path) for path in computed}):
        in_pieces(subject, subject.tokens, (third, *(1,) * (length - third)))
    worst = worst_of(computed)
    return Measured(computed[worst] / length, worst)


def cache_bytes(subject: Subject) -> Measured | NotApplicable:
    """Bytes that a cache holds for the probe tokens, over those that its kind of attention needs."""
    if subject.held is None:
        return NotApplicable("no size of a cache is declared")
    found, declared = subject.held()
    return Measured(found / declared, evidence={"bytes": float(found), "declared": float(declared)})


def flash_off(subject: Subject) -> Measured | NotApplicable:
    """1 where attention stores its table of weights although nothing that is declared stands in the way of flash."""
    if subject.spec is None:
        return NotApplicable("what stands in the way of flash is not declared")
    if obstacle := subject.spec.flash_obstacle():
        return NotApplicable(obstacle)
    with mode(subject.model, training=False), kept(subject.model):
        ran = backend_of(lambda: subject.predict(subject.model, subject.tokens))
    return Measured(float(ran in ("math", "none")), f"{ran} attention")
