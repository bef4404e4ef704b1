"""Probes of positions: whether the declared encoding acts, acts once, and in full precision."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from harness.components.position import PositionEncoding
from harness.diagnostics.finding import Measured, NotApplicable
from harness.diagnostics.heads import inputs, outputs
from harness.diagnostics.masking import apart
from harness.diagnostics.operators import Attended, attended
from harness.diagnostics.subject import Subject

SHIFT = 1000  # tokens: angles in fp32 are good to 1e-4 there, in bf16 to nothing


def position_effect(subject: Subject) -> Measured | NotApplicable:
    """How far the first attention sublayer's result at the last token moves, in deviations, when two tokens before it
    change places.
    """
    if subject.positions is None or not subject.positions.act:
        return NotApplicable("no positions are declared")
    return _moved_by_order(subject)


def position_uninvited(subject: Subject) -> Measured | NotApplicable:
    """The same where no positions are declared."""
    if subject.positions is None or subject.positions.act:
        return NotApplicable("positions are declared")
    return _moved_by_order(subject)


def _moved_by_order(subject: Subject) -> Measured | NotApplicable:
    site = next((site for site in subject.sites if not site.across), None)
    if site is None:
        return NotApplicable("no attention sublayer is named")
    if site.window is not None and site.window < 3:
        return NotApplicable("two tokens besides the last do not fit into the window")
    tokens = subject.tokens.inputs
    swapped = tokens.clone()
    swapped[:, [-3, -2]] = tokens[:, [-2, -3]]
    differ = tokens[:, -3] != tokens[:, -2]
    found = []
    for ids in (tokens, swapped):
        with outputs(subject, [site.path]) as made:
            subject.logits(replace(subject.tokens, inputs=ids))
        found.append(made[site.path][differ, -1])
    return Measured(apart(found[1] - found[0], found[0]), site.path)


def position_shift(subject: Subject) -> Measured | NotApplicable:
    """How far logits move, in deviations, when all positions are a thousand further on, for relative encodings."""
    if subject.positions is None or not subject.positions.relative:
        return NotApplicable("no relative positions are declared")
    before = subject.logits(subject.tokens)
    with _shifted(subject.model):
        after = subject.logits(subject.tokens)
    return Measured(apart(after - before, before))


@contextmanager
def _shifted(model: nn.Module) -> Iterator[None]:
    """All positions of ours further on."""
    with ExitStack() as patches:
        for encoding in (module for module in model.modules() if isinstance(module, PositionEncoding)):
            patches.enter_context(patch.object(encoding, "positions", partial(_further, encoding.positions)))
        yield


def _further(positions: Callable[[int, torch.device], Tensor], length: int, device: torch.device) -> Tensor:
    return positions(length, device) + SHIFT


def rotation_fit(subject: Subject) -> Measured | NotApplicable:
    """The largest error, in radians, of the angles by which pairs of a query's dimensions have turned."""
    declared = subject.positions.frequencies if subject.positions is not None else None
    if declared is None:
        return NotApplicable("no rotation is declared")
    sites = {site.path: site for site in subject.sites if site.query and not site.across}
    with outputs(subject, [site.query for site in sites.values()]) as made:
        ran = [call for call in attended(subject) if call.path in sites]
    errors: dict[str, float] = {}
    causes: dict[str, str] = {}
    for call in ran:
        site = sites[call.path]
        before = made[site.query]
        before = before if before.dim() == 4 else before.unflatten(-1, (site.num_heads, -1)).transpose(1, 2)
        after = in_order(call, before.shape[0], before.shape[2])
        if after is None or call.path in errors:
            continue
        width, last = 2 * len(declared), before.shape[-1]  # latent attention turns the last dimensions of a query
        before, after = before[..., last - width :], after[..., last - width : last]
        errors[call.path] = _angle_error(before, after, declared)
        causes[call.path] = next((c for c, n in TURNS.items() if _angle_error(before, after, n * declared) < NONE), "")
    if not errors:
        return NotApplicable("no softmax ran over a whole sequence")
    worst = max(errors, key=errors.__getitem__)
    return Measured(errors[worst], worst, causes[worst], errors)


TURNS = {
    "queries are not rotated": 0,
    "queries are rotated twice": 2,
    "queries are rotated the wrong way round": -1,
}
NONE = 1e-3  # radians


def in_order(call: Attended, batch: int, length: int) -> Tensor | None:
    """Queries `(B, H, T, d)` of a call, those of a window's blocks put together again; None where some are missing."""
    query = call.query
    if query.shape[0] == batch and query.shape[2] == length:
        return query
    if query.shape[0] % batch or query.shape[0] // batch * query.shape[2] < length:
        return None
    return query.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _angle_error(before: Tensor, after: Tensor, frequencies: Tensor) -> float:
    """Of queries `(B, H, T, d)` before and after their rotation, both as complex numbers of pairs."""
    one, other = (torch.view_as_complex(x.double().contiguous().unflatten(-1, (-1, 2))) for x in (before, after))
    place = torch.arange(one.shape[2], dtype=torch.float64, device=one.device)[:, None]
    due = torch.polar(torch.ones_like(place), place * frequencies.double())
    counted = one.abs() > LONG * one.abs().mean()
    return float((other * (one * due).conj()).angle().abs()[counted].max())


LONG = 0.1  # times the mean: shorter pairs have no angle to speak of


def code_fit(subject: Subject) -> Measured | NotApplicable:
    """What is added to embeddings for the positions, as a multiple of what is declared: 1 if it is there once."""
    if subject.positions is None or subject.positions.codes is None:
        return NotApplicable("no codes are declared to be added to embeddings")
    factors = _factors(subject)
    return factors if isinstance(factors, NotApplicable) else Measured(factors[1], evidence={"embedding": factors[0]})


def embedding_factor(subject: Subject) -> Measured | NotApplicable:
    """The factor that embeddings are multiplied with, over the declared one."""
    factors = _factors(subject)
    return factors if isinstance(factors, NotApplicable) else Measured(factors[0], evidence={"codes": factors[1]})


def _factors(subject: Subject) -> tuple[float, float] | NotApplicable:
    """(a, b) of what the first block reads = a · declared factor · embedding + b · declared codes, by least squares."""
    positions = subject.positions
    if positions is None or not positions.embedding or not positions.first_block:
        return NotApplicable("embedding and first block are not named")
    with outputs(subject, [positions.embedding]) as made, inputs(subject, positions.first_block) as read:
        subject.logits(subject.tokens)
    embedded = made[positions.embedding].double() * positions.factor
    columns = [embedded.flatten()]
    if positions.codes is not None:
        columns.append(positions.codes.double().expand_as(embedded).flatten())
    found = torch.linalg.lstsq(torch.stack(columns, 1), read[0].double().flatten()[:, None]).solution[:, 0]
    if positions.codes is None:
        return float(found[0]), math.nan
    return float(found[0]), float(found[1])
