"""Probes of what may see what: tokens ahead, padding, other sequences."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from harness.diagnostics.finding import Measured, NotApplicable, worst_of
from harness.diagnostics.keeping import kept, mode, seed_draws
from harness.diagnostics.operators import WRONG_DIMENSION, attended
from harness.diagnostics.subject import AttentionSite, Subject
from harness.diagnostics.visibility import MOVED, NEVER_CALLED, calls, explain, influence
from tasks.task import PAD, Batch

Logits = Callable[[Batch], Tensor]


def causal_leak(subject: Subject) -> Measured | NotApplicable:
    """How far logits at t move when a later token is another, in deviations of the logits: in evaluation and in
    training mode, and where a block of tokens is read on top of a cache.
    """
    if not subject.causal:
        return NotApplicable("an encoder sees all tokens")
    leaks = {way: _leak(subject, logits) for way, logits in _ways(subject)}
    worst = worst_of(leaks)
    if leaks["in evaluation mode"] > MOVED:
        return Measured(leaks[worst], worst, _hiding(subject) or mistake(subject) or _elsewhere(subject), leaks)
    return Measured(leaks[worst], worst, f"tokens ahead are seen {worst} only" if leaks[worst] else "", leaks)


def _hiding(subject: Subject) -> str:
    """What attention does to hidden keys instead of hiding them; empty where it hides them, or does not try."""
    sites = {site.path: site for site in subject.sites if site.causal}
    for call in attended(subject):
        length = call.query.shape[2]
        if call.path not in sites or length != call.key.shape[2]:
            continue
        if not call.over_keys:
            return WRONG_DIMENSION
        ahead, logits = ~sites[call.path].sees(length).to(call.query.device), call.logits()
        if bool((logits.softmax(-1)[..., ahead] <= MOVED).all()):
            continue  # this sublayer hides them
        if call.changed and call.weights is not None and not call.weights[..., ahead].any():
            return "the mask acts after the softmax, so that keys ahead still take their share of each row's sum"
        if bool((logits[..., ahead].abs() < 1e-9).all()):
            return "the mask sets logits to zero: before a softmax that hides nothing"
        if call.mask is not None and bool((call.mask.expand_as(logits)[..., ahead] < -1).all()):
            return "the mask adds a finite number, which is too small to hide a key"
    return ""


def _elsewhere(subject: Subject) -> str:
    """What is left where every attention sublayer is seen to hide what lies ahead."""
    seen = [seen for site, seen in seen_by(subject) if site.causal]
    if not seen or any(bool(each.triu(1).any()) for each in seen):
        return ""
    return "the attention that is named hides tokens ahead: something else hands them on, as a norm over the sequence"


def _ways(subject: Subject) -> Iterator[tuple[str, Logits]]:
    yield "in evaluation mode", subject.logits
    if not subject.mixes_batch:
        yield "in training mode", lambda batch: subject.logits(batch, training=True)
    if subject.read is not None:
        block = subject.tokens.inputs.shape[1] // 3
        pieces = (block, subject.tokens.inputs.shape[1] - block)
        yield "behind a cache", lambda batch: in_pieces(subject, batch, pieces)


def in_pieces(subject: Subject, batch: Batch, pieces: tuple[int, ...]) -> Tensor:
    """Logits in evaluation mode of a batch that is read in pieces, with a cache."""
    assert subject.read is not None
    with torch.no_grad(), mode(subject.model, training=False), kept(subject.model):
        return subject.read(subject.model, batch, pieces).float()


def _leak(subject: Subject, logits: Logits) -> float:
    batch = subject.tokens
    before, other = logits(batch), subject.others(batch.inputs)
    worst = 0.0
    for place in range(1, batch.inputs.shape[1]):
        inputs = batch.inputs.clone()
        inputs[:, place] = other[:, place]
        moved = (logits(replace(batch, inputs=inputs)) - before)[:, :place]
        worst = max(worst, apart(moved, before))
    return worst


def apart(difference: Tensor, scale: Tensor) -> float:
    """The largest difference, in deviations of `scale`; infinite where one is not finite."""
    found = float(difference.abs().max() / scale.std().clamp(min=1e-12))
    return math.inf if math.isnan(found) else found


def seen_by(subject: Subject) -> list[tuple[AttentionSite, Tensor]]:
    """Each attention sublayer that is called and reads its own tokens, and what it sees, `(B, T, T)`; none that gives
    nothing, as where an output projection is drawn as zero.
    """
    with calls(subject) as found:
        sites = [site for site in subject.sites if not site.across and site.path in found]
        sites = [site for site in sites if found[site.path].result.any()]
        return [(site, influence(found[site.path]) > MOVED) for site in sites]


def mistake(subject: Subject) -> str:
    """The first mistake that explains what a sublayer sees; empty where there is none."""
    return next(filter(None, (explain(site, seen) for site, seen in seen_by(subject))), "")


def visibility(subject: Subject) -> Measured | NotApplicable:
    """Pairs of query and key in which a query sees a key that it must not, or not one that it must: the most of all
    sublayers, a sequence. In a trained model only the first are counted: weights that training has made vanish look
    hidden.
    """
    if not any(not site.across for site in subject.sites):
        return NotApplicable("no attention sublayer is named")
    wrong: dict[str, float] = {}
    causes = []
    for site, seen in seen_by(subject):
        declared = site.sees(seen.shape[-1]).to(seen.device)
        seen = seen | declared if subject.trained else seen
        causes.append(explain(site, seen))
        more = (seen & ~declared).sum(-1) - site.num_random  # so many others may be drawn for a query
        allowed = torch.ones_like(declared).tril() if site.causal else torch.ones_like(declared)
        wrong[site.path] = float(
            ((declared & ~seen).sum() + more.clamp(min=0).sum() + (seen & ~allowed).sum()) / len(seen)
        )
    if not wrong:
        return NotApplicable(f"{NEVER_CALLED}, or all of them give zero")
    worst = worst_of(wrong)
    return Measured(wrong[worst], worst if wrong[worst] else "", next(filter(None, causes), ""), wrong)


def batch_leak(subject: Subject) -> Measured | NotApplicable:
    """How far a sequence's logits move when the first or the last sequence of its batch is another, in both modes."""
    batch, other = subject.tokens, subject.others(subject.tokens.inputs)
    leaks: dict[str, float] = {}
    for way, training in (("in evaluation mode", False), ("in training mode", True)):
        if training and subject.mixes_batch:
            continue
        before = subject.logits(batch, training=training)
        for row in (0, len(other) - 1):
            inputs = batch.inputs.clone()
            inputs[row] = other[row]
            after = subject.logits(replace(batch, inputs=inputs), training=training)
            rest = torch.arange(len(other), device=other.device) != row
            leaks[way] = max(leaks.get(way, 0.0), apart((after - before)[rest], before))
    worst = worst_of(leaks)
    return Measured(leaks[worst], worst, evidence=leaks)


def pad_invariance(subject: Subject) -> Measured | NotApplicable:
    """How far logits of real tokens are from those of the same tokens without padding, in a batch whose sequences have
    different lengths.
    """
    if not subject.takes_padding:
        return NotApplicable("padding is not marked")
    tokens = subject.tokens
    real = lengths(tokens)[:, None] > torch.arange(tokens.inputs.shape[1], device=tokens.inputs.device)
    moved = {}
    for token in (PAD, subject.vocabulary[0]):
        together = subject.logits(marked(tokens, real, token))
        for length in lengths(tokens).unique().tolist():
            rows = lengths(tokens) == length
            alone = subject.logits(_cut(tokens.rows(rows), length))
            name = f"{tokens.inputs.shape[1] - length} of token {token}"
            moved[name] = apart(together[rows, :length] - alone, alone)
    worst = worst_of(moved)
    return Measured(moved[worst], worst, evidence=moved)


def lengths(tokens: Batch) -> Tensor:
    """`(B,)`: the tokens that stay of each sequence where some are padding: all but 0, 1, 2, 0, 1 …"""
    count, length = tokens.inputs.shape
    return length - torch.arange(count, device=tokens.inputs.device) % 3


def marked(tokens: Batch, real: Tensor, token: int) -> Batch:
    """A batch with a token in place of what is not real, sources too, and marks."""
    source = None if tokens.source is None else tokens.source.where(real, token)
    return Batch(
        tokens.inputs.where(real, token), tokens.targets, source, real, None if tokens.source is None else real
    )


def _cut(tokens: Batch, length: int) -> Batch:
    source = None if tokens.source is None else tokens.source[:, :length]
    return Batch(tokens.inputs[:, :length], tokens.targets[:, :length], source)


def masked_row(subject: Subject) -> Measured | NotApplicable:
    """Numbers that are not finite, in other sequences' logits or in gradients, where one sequence is all padding."""
    if not subject.takes_padding:
        return NotApplicable("padding is not marked")
    tokens = subject.tokens
    everything = torch.ones_like(tokens.inputs, dtype=torch.bool)
    real = everything.clone()
    real[-1] = False
    batch = replace(marked(tokens, real, PAD), **({} if tokens.source is None else {"real": everything}))
    with mode(subject.model, training=True), kept(subject.model):
        seed_draws(0, "diagnostics")
        logits = subject.predict(subject.model, batch)[:-1]
        trained = [p for p in subject.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(logits.float().logsumexp(-1).mean(), trained, allow_unused=True)
    bad = sum(int((~g.isfinite()).sum()) for g in gradients if g is not None)
    return Measured(float(bad + int((~logits.isfinite()).sum())))


def mask_strength(subject: Subject) -> Measured | NotApplicable:
    """How far below zero the finite numbers lie that hide keys, as a multiple of the largest |logit|: the least of all
    sublayers; infinite where −∞ hides. Logits count as 1 at least: an untrained model's are smaller, and grow.
    """
    sites = {site.path: site for site in subject.sites if not site.across}
    strengths = {}
    for call in attended(subject):
        site, length = sites.get(call.path), call.query.shape[2]
        if call.mask is None or site is None or length != call.key.shape[2]:  # a window's blocks are not in order
            continue
        hidden = ~site.sees(length).to(call.mask.device)
        least = call.mask.masked_fill(~hidden, -math.inf).max()
        largest = replace(call, mask=None, causal=False).logits().abs().max().clamp(min=1.0)
        strengths[call.path] = float(-least / largest)
    worst = min(strengths, key=strengths.__getitem__, default="")
    return Measured(strengths.get(worst, math.inf), worst, evidence=strengths)
