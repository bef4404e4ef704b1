"""Probes of positions: whether the declared encoding acts, acts once, and in full precision."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn

from harness.components.position import PositionEncoding
from harness.diagnostics.finding import Measured, NotApplicable, worst_of
from harness.diagnostics.heads import inputs, outputs
from harness.diagnostics.masking import apart
from harness.diagnostics.operators import Attended, attended
from harness.diagnostics.subject import AttentionSite, Subject
from harness.diagnostics.visibility import NEVER_CALLED

SHIFT = 1000  # tokens: angles in fp32 are good to 1e-4 there, in bf16 to nothing


def position_effect(subject: Subject) -> Measured | NotApplicable:
    """How far the first attention sublayer's result at the last token moves, in deviations, when those before it,
    of a window those in it, change places.
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
    length = tokens.shape[1]
    near = length if site.window is None else site.window
    begin = max(0, length - near)
    reversed_, found = tokens.clone(), []
    reversed_[:, begin:-1] = tokens[:, begin:-1].flip(1)
    for ids in (tokens, reversed_):
        with outputs(subject, [site.path]) as made:
            subject.logits(replace(subject.tokens, inputs=ids))
        if site.path not in made:
            return NotApplicable(NEVER_CALLED)
        found.append(made[site.path][:, -1])
    if not found[0].any():
        return NotApplicable("the first attention sublayer gives zero")
    return Measured(apart(found[1] - found[0], found[0]), site.path)


def position_shift(subject: Subject) -> Measured | NotApplicable:
    """How far logits move, in deviations, when all positions are a thousand further on, for relative encodings."""
    if subject.positions is None or not subject.positions.relative:
        return NotApplicable("no relative positions are declared")
    if not any(isinstance(module, PositionEncoding) for module in subject.model.modules()):
        return NotApplicable("positions of a model that was built elsewhere cannot be moved from outside")
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
    """The largest error, in radians, of the angles by which pairs of a query's and a key's dimensions have turned."""
    declared = subject.positions.frequencies if subject.positions is not None else None
    if declared is None:
        return NotApplicable("no rotation is declared")
    sites = {site.path: site for site in subject.sites if site.query and not site.across}
    names = [name for site in sites.values() for name in (site.query, site.key)]
    with outputs(subject, names) as made:
        ran = [call for call in attended(subject) if call.path in sites]
    errors: dict[str, float] = {}
    causes: dict[str, str] = {}
    for call in (call for call in reversed(ran) if sites[call.path].query in made):
        turned = dict(_turned(sites[call.path], call, made, 2 * len(declared)))
        if turned:
            errors[call.path] = _angle_error(turned.values(), declared)
            causes[call.path] = next(
                (f"{name} {how}" for how, n in TURNS.items() for name, x in turned.items() if _turn(x, n * declared)),
                "",
            )
    if not errors:
        return NotApplicable("no softmax ran over a whole sequence")
    worst = worst_of(errors)
    return Measured(errors[worst], worst, causes[worst], errors)


Rotation = tuple[Tensor, Tensor]  # `(B, H, T, d)` before and after

TURNS = {"are not rotated": 0, "are rotated twice": 2, "are rotated the wrong way round": -1}
NONE = 1e-3  # radians


def _turned(site: AttentionSite, call: Attended, made: dict[str, Tensor], width: int) -> Iterator[tuple[str, Rotation]]:
    """Queries, and keys where they are named: as they were made and as a kernel took them, of the latter as many
    dimensions as are turned: in latent attention the last ones.
    """
    for name, taken in (("query", call.query), ("key", call.key)):
        if getattr(site, name) not in made:
            continue
        before = site.part(name, made[getattr(site, name)])
        after, last = in_order(taken, before.shape, blocks=name == "query"), before.shape[-1]
        if after is not None:
            before = before.repeat_interleave(after.shape[1] // before.shape[1], dim=1)
            yield PLURAL[name], (before[..., last - width :], after[..., last - width : last])


PLURAL = {"query": "queries", "key": "keys"}


def in_order(taken: Tensor, made: torch.Size, *, blocks: bool) -> Tensor | None:
    """`(B, H, T, d)` of what a kernel took `(N, H, T, d)`, its heads one dimension again, and the blocks of a window's
    queries put together; None where some are missing.
    """
    batch, heads, length = made[:3]
    if taken.shape[0] == batch and taken.shape[2] == length and taken.shape[1] % heads == 0:
        return taken
    if taken.shape[1] == 1 and taken.shape[2] == length and taken.shape[0] % (batch * heads) == 0:
        return taken.squeeze(1).unflatten(0, (batch, -1))
    if not blocks or taken.shape[1] != heads or taken.shape[0] % batch or len(taken) // batch * taken.shape[2] < length:
        return None
    return taken.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _turn(rotation: Rotation, frequencies: Tensor) -> bool:
    return _angle_error([rotation], frequencies) < NONE


def _angle_error(rotations: Iterable[Rotation], frequencies: Tensor) -> float:
    """Of several rotations that pair dimensions by one rule: next to each other, or one half with the other."""
    several = list(rotations)
    return min(
        max(_error(pairs(before), pairs(after), frequencies) for before, after in several) for pairs in (beside, halves)
    )


def beside(x: Tensor) -> Tensor:
    """Complex numbers of neighbouring dimensions."""
    return torch.view_as_complex(x.double().contiguous().unflatten(-1, (-1, 2)))


def halves(x: Tensor) -> Tensor:
    """Complex numbers whose real parts are the first half of the dimensions."""
    return torch.complex(*x.double().chunk(2, -1))


def _error(before: Tensor, after: Tensor, frequencies: Tensor) -> float:
    """Radians, of complex numbers `(B, H, T, d / 2)`."""
    place = torch.arange(before.shape[2], dtype=torch.float64, device=before.device)[:, None]
    due = torch.polar(torch.ones_like(place), place * frequencies.double())
    counted = before.abs() > LONG * before.abs().mean()
    return float((after * (before * due).conj()).angle().abs()[counted].max())


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
