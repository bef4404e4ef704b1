"""Probes inside attention sublayers: the scale, the kernel's arithmetic, and whether heads stay apart."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from harness.components.attention import positive
from harness.components.position import Relation
from harness.diagnostics.finding import Measured, NotApplicable, worst_of
from harness.diagnostics.operators import WRONG_DIMENSION, Attended, attended
from harness.diagnostics.subject import AttentionSite, Subject, first, hooked
from harness.diagnostics.visibility import MOVED, NEVER_CALLED, Call, calls

NEAR = 0.01  # of a factor
UNEVEN = 0.01  # of a factor by which vectors have grown: rotations and rounding change less from token to token


def scale_fit(subject: Subject) -> Measured | NotApplicable:
    """The factor on q·k that really acts, over the declared one: of all heads of all sublayers the furthest from 1.

    In a softmax it is the kernel's own factor times what queries and keys have grown by since their projections, which
    rotations leave as it is; in linear attention the one that gives what the sublayer gave.
    """
    sites = [site for site in subject.sites if site.scale is not None and site.query]
    if not sites:
        return NotApplicable("no scale is declared, or no projection of queries is named")
    with every_output(subject, (name for site in sites for name in (site.query, site.key, site.value))) as made:
        ran = defaultdict(list)
        for call in attended(subject):
            ran[call.path].append(call)
    ratios: dict[str, float] = {}
    for site in (site for site in sites if site.query in made):
        if ran[site.path]:
            ratios |= {f"{site.path} head {h}": r for h, r in enumerate(_softmax_ratios(site, ran[site.path], made))}
        elif site.feature_map and site.key and site.value and site.output:
            ratios[site.path] = _linear_ratio(subject, site, {name: each[0] for name, each in made.items()})
    if not ratios:
        return NotApplicable("no softmax ran on the queries and keys that are named, as they were made")
    worst = max(ratios, key=lambda name: abs(math.log(max(ratios[name], 1e-30))))
    site = next(site for site in sites if site.path == worst.partition(" ")[0])
    return Measured(ratios[worst], worst, _scale_named(site, made[site.query][0], ratios[worst]), ratios)


def _scale_named(site: AttentionSite, made: Tensor, ratio: float) -> str:
    """The usual factor that acts in place of the declared one; empty where it is none of them."""
    assert site.scale is not None
    width = site.part("query", made).shape[-1]
    usual = {
        "q·k is not scaled at all": 1.0,
        "q·k is divided by d_k, not by its root": 1 / width,
        "q·k is divided by √d_k": width**-0.5,
        "q·k is divided by √d_model, not by that of a head": (width * site.num_heads) ** -0.5,
        "q·k is scaled twice": site.scale**2,
    }
    acts = ratio * site.scale
    return next((cause for cause, factor in usual.items() if abs(acts / factor - 1) < NEAR < abs(ratio - 1)), "")


def _softmax_ratios(site: AttentionSite, ran: list[Attended], made: dict[str, list[Tensor]]) -> list[float]:
    """By head; none where what attention took is not what was made, times a factor."""
    assert site.scale is not None
    grown = _growth(site, [site.part("query", each) for each in made[site.query]], [call.query for call in ran])
    if site.key and grown is not None:
        of_keys = _growth(site, [site.part("key", each) for each in made[site.key]], [call.key for call in ran])
        grown = None if of_keys is None else grown * of_keys.repeat_interleave(len(grown) // len(of_keys))
    return [] if grown is None else [float(factor) for factor in grown * ran[0].scale / site.scale]


def _growth(site: AttentionSite, made: list[Tensor], taken: list[Tensor]) -> Tensor | None:
    """`(heads,)`, or one number where the kernel was not told of heads: the longest vector that a kernel took over the
    longest that was made, `(B, heads, T, d)`, of all calls of a sublayer, as far as positions have left them alone.
    Where keys of groups were repeated for the heads, those of the heads. None where nothing was made, or where tokens
    have grown by different factors, as of another head's vectors, or by a norm that is not named.
    """
    width = made[0].shape[-1]

    def lengths(parts: list[Tensor]) -> list[Tensor]:
        parts = [x[..., :width] - (x[..., :width].mean((0, 2), keepdim=True) if site.shifted else 0) for x in parts]
        return [x.double().norm(dim=-1) for x in parts]

    before, after = lengths(made), lengths(taken)
    if [x.shape for x in before] == [x.shape for x in after] and _uneven(torch.stack(before), torch.stack(after)):
        return None
    longest, grown = (torch.stack([x.amax((0, 2)) for x in each]).amax(0) for each in (before, after))
    if not longest.all():
        return None
    many = len(grown) % len(longest) == 0
    return grown / (longest.repeat_interleave(len(grown) // len(longest)) if many else longest.amax()[None])


def _uneven(before: Tensor, after: Tensor) -> bool:
    """Whether vectors of one head have grown by different factors, by their lengths `(calls, B, heads, T)`."""
    factors = (after / before).movedim(2, 0).flatten(1)
    factors = factors.masked_fill(~factors.isfinite(), math.nan)
    return bool(((factors - factors.nanmean(1, keepdim=True)).abs() > UNEVEN * factors.nanmedian()).any())


def _linear_ratio(subject: Subject, site: AttentionSite, made: dict[str, Tensor]) -> float:
    """The factor whose linear attention comes nearest to what the sublayer gave, over the declared one."""
    assert site.scale is not None
    query, key, value = (
        x.repeat_interleave(site.num_heads // x.shape[1], dim=1)
        for x in (site.part(name, made[getattr(site, name)]).double() for name in ("query", "key", "value"))
    )
    with calls(subject) as found, inputs(subject, site.output) as mixed:
        call = found[site.path]
        call.again(call.hidden)
    relation = next((x for x in call.args if isinstance(x, Relation)), None)

    def miss(factor: float) -> float:
        phi, other = positive(factor * query), positive(key)
        encoded, other_encoded = (phi, other) if relation is None else relation.encode(phi, other)
        above, below = encoded @ other_encoded.mT, phi @ other.mT
        if site.causal:
            above, below = above.tril(), below.tril()
        given = (above @ value) / below.sum(-1, keepdim=True)
        return float((given.transpose(1, 2).flatten(2) - mixed[-1]).square().mean())

    declared = site.scale
    return math.exp(least(lambda x: miss(declared * math.exp(x)), -8, 8))


def least(miss: Callable[[float], float], low: float, high: float, rounds: int = 5, points: int = 33) -> float:
    """Where a function of one number is least, by ever finer grids."""
    for _ in range(rounds):
        grid = torch.linspace(low, high, points).tolist()
        at = min(grid, key=miss)
        step = (high - low) / (points - 1)
        low, high = at - step, at + step
    return at


def kernel_parity(subject: Subject) -> Measured | NotApplicable:
    """The error of what attention gave, against the same in fp64, over that of the explicit form in fp32: the most of
    all sublayers.
    """
    errors: dict[str, float] = {}
    causes: dict[str, str] = {}
    for call in attended(subject):
        exact, plain = call.recomputed(), call.recomputed(torch.float32).double()
        floor = torch.finfo(torch.float32).eps * float(exact.abs().max())
        name = f"{call.path or 'outside of the named sublayers'}, {call.kernel}"
        errors[name] = max(errors.get(name, 0.0), _gap(call.output.double(), exact) / max(_gap(plain, exact), floor))
        if not call.over_keys:
            causes[name] = WRONG_DIMENSION
        elif call.changed:
            causes[name] = "weights are changed after the softmax: a mask belongs before it"
    if not errors:
        return NotApplicable("no softmax ran")
    worst = worst_of(errors)
    return Measured(errors[worst], worst, causes.get(worst, ""), errors)


def _gap(one: Tensor, other: Tensor) -> float:
    found = float((one - other).abs().max())
    return math.inf if math.isnan(found) else found


def head_isolation(subject: Subject) -> Measured | NotApplicable:
    """Heads whose result moves with another group's values, or not with its own, or with another head's queries or
    another group's keys, of all sublayers.
    """
    sites = [site for site in subject.sites if site.value and site.output]
    if not sites:
        return NotApplicable("no projections of values are named")
    wrong: dict[str, float] = {}
    causes: dict[str, str] = {}
    with calls(subject) as found:
        for site in (site for site in sites if site.path in found):
            call, groups = found[site.path], torch.arange(site.num_groups)[:, None]
            moved = _moved_heads(subject, site, call, "value")
            owned = groups == torch.arange(site.num_heads) // (site.num_heads // site.num_groups)
            wrong[site.path] = float((moved != owned).sum())
            if _exchanged(subject, site, call):
                wrong[site.path] = float(owned.sum())
                causes[site.path] = "keys and values are exchanged"
            elif wrong[site.path]:
                if moved.equal(groups == torch.arange(site.num_heads) % site.num_groups):
                    causes[site.path] = "keys and values go to every num_groups-th head, not to neighbours"
            else:
                named = [name for name in ("query", "key") if getattr(site, name)]
                others = {name: _others_read(subject, site, call, name) for name in named}
                wrong[site.path] = float(sum(others.values()))
                if wrong[site.path]:
                    causes[site.path] = f"a head reads another one's {'queries' if others.get('query') else 'keys'}"
    if not wrong:
        return NotApplicable(NEVER_CALLED)
    worst = worst_of(wrong)
    return Measured(wrong[worst], worst if wrong[worst] else "", causes.get(worst, "") if wrong[worst] else "", wrong)


def _others_read(subject: Subject, site: AttentionSite, call: Call, name: str) -> int:
    """Pairs of a head's queries, or a group's keys, and a head that moves with them and should not."""
    moved = _moved_heads(subject, site, call, name)
    shared = site.num_heads // len(moved)
    owned = torch.arange(len(moved))[:, None] == torch.arange(site.num_heads) // shared
    return int((moved & ~owned).sum())


def _moved_heads(subject: Subject, site: AttentionSite, call: Call, name: str) -> Tensor:
    """`(heads, H)`: the heads whose results move when a head's queries, or a group's keys or values, do."""
    before, moved = mixed(subject, site, call), []
    for group in range(site.num_heads if name == "query" else site.num_groups):
        with turned(subject, site, name, slice(group, group + 1)):
            far = (mixed(subject, site, call) - before).abs().amax((0, 1)).unflatten(0, (site.num_heads, -1)).amax(-1)
        moved.append(far > MOVED * before.std())
    return torch.stack(moved).cpu()


def _exchanged(subject: Subject, site: AttentionSite, call: Call) -> bool:
    """Whether results turn round when the keys do, as they must with the values."""
    if not site.key:
        return False
    before = mixed(subject, site, call)
    with turned(subject, site, "key", slice(None)):
        after = mixed(subject, site, call)
    return bool((after + before).abs().max() <= MOVED * before.std())


@contextmanager
def turned(subject: Subject, site: AttentionSite, name: str, heads: slice) -> Iterator[None]:
    """Queries, keys or values of some heads, of the other sign."""

    def turn(module: nn.Module, args: object, kwargs: object, result: Tensor) -> Tensor:
        other = result.clone()
        site.part(name, other)[:, heads].neg_()
        return other

    with hooked(subject.model, {getattr(site, name): turn}):
        yield


def mixed(subject: Subject, site: AttentionSite, call: Call) -> Tensor:
    """`(B, T, heads · d_v)`: the heads' results side by side, when a sublayer is called again."""
    with inputs(subject, site.output) as found:
        call.again(call.hidden)
    return found[-1]


@contextmanager
def outputs(subject: Subject, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """What the named modules give, by name; of several calls the first."""
    found: dict[str, Tensor] = {}
    with every_output(subject, names) as made:
        yield found
    found |= {name: given[0] for name, given in made.items()}


@contextmanager
def every_output(subject: Subject, names: Iterable[str]) -> Iterator[dict[str, list[Tensor]]]:
    """What the named modules give, by name, call by call."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, module: nn.Module, args: object, kwargs: object, result: object) -> None:
        found.setdefault(name, []).append(first(result).detach())

    with hooked(subject.model, {name: partial(keep, name) for name in filter(None, names)}):
        yield found


@contextmanager
def inputs(subject: Subject, name: str) -> Iterator[list[Tensor]]:
    """What a module is called with, call by call."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], kwargs: object) -> None:
        found.append(args[0].detach())

    with hooked(subject.model, {}, {name: keep}):
        yield found
