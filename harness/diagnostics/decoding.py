"""Probes of what decoding and long sequences need: a cache that changes nothing and holds no more than it must, and the
kernel that stores no table.
"""

from harness.components.kernel import backend_of
from harness.diagnostics.finding import Measured, NotApplicable
from harness.diagnostics.masking import apart, in_pieces
from harness.diagnostics.subject import Subject, kept, mode


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
    worst = max(found, key=found.__getitem__)
    return Measured(found[worst], worst, evidence=found)


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
