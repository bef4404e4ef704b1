"""Main effects and interactions of a study over several axes: what a change does on average over the settings of the
other axes, and whether two changes together do more or less than the sum of each alone.

A variant is a cell of the axes' grid; a level of an axis is what the variant's specification has there. With levels a
of one axis and b of another beside the baseline's, and m the seed's score,

    main effect of a  = mean over settings s of the other axes of  m(a, s) − m(baseline's level, s)
    interaction of a and b = mean over settings s of the rest of  m(a, b, s) − m(a, s) − m(b, s) + m(neither, s)

over the settings for which all cells of a term stand among the variants: a grid need not be complete. Each is computed
seed by seed and tested as a comparison is (`stats.contrasts`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import pandas as pd

from harness.report.blocks import Block, Cell, Table, Text
from harness.report.chapters.chapter import Chapter
from harness.report.figures import Picture
from harness.report.tables import Findings, records, variants_of
from harness.results import number_of_looks
from harness.schema import canonical_json, is_within
from harness.stats import contrasts
from harness.wording import ABSENT, is_known, listed, plain, probability, with_interval

MAIN, INTERACTION = "main effect", "interaction"
BASE = "{}"  # the baseline's level of an axis: nothing differs
VERDICTS = {  # of an interaction: the verdict on a difference, in words that fit a difference of differences
    "better": "▲ better than the sum",
    "worse": "▼ worse than the sum",
    "equivalent": "= the sum",
    "undecided": "? undecided",
}
EFFECTS = {"better": "▲ better", "worse": "▼ worse", "equivalent": "= equivalent", "undecided": "? undecided"}
Levels = tuple[str, ...]  # a level for each axis: canonical JSON of what differs there


@dataclass(frozen=True)
class Effect:
    """A contrast: its kind, what it is of, the number of settings it is a mean over, the weight of each variant."""

    kind: str
    name: str
    settings: int
    weights: Mapping[str, float]


def levels_of(document: Mapping[str, Any]) -> dict[Levels, str]:
    """The variant at each point of the axes' grid, by its levels, for axes that vary."""
    solved = (document.get("match") or {}).get("field")  # of matched variants: it follows from the others
    own = {
        name: {path: value for path, value in document["differences"].get(name, {}).items() if path != solved}
        for name in variants_of(dict(document))
    }
    points = {
        name: tuple(
            canonical_json({path: value for path, value in fields.items() if is_within(path, [axis])})
            for axis in document["axes"]
        )
        for name, fields in own.items()
    }
    return {levels: name for name, levels in points.items()}


def effects_of(document: Mapping[str, Any]) -> list[Effect]:
    """Every main effect that is a mean over several settings, then every interaction of two changes."""
    grid = levels_of(document)
    found = []
    axes = range(len(document["axes"]))
    changes = [(k, level) for k in axes for level in dict.fromkeys(p[k] for p in grid) if level != BASE]
    for change in changes:
        terms = _terms(grid, [change])
        if len(terms) > 1:
            found.append(Effect(MAIN, _said(document, change), len(terms), _mean(terms)))
    for one, two in combinations(changes, 2):
        if one[0] != two[0] and (terms := _terms(grid, [one, two])):
            name = f"{_said(document, one)} × {_said(document, two)}"
            found.append(Effect(INTERACTION, name, len(terms), _mean(terms)))
    return found


def _terms(grid: Mapping[Levels, str], changes: Sequence[tuple[int, str]]) -> list[dict[str, float]]:
    """For each setting of the other axes, the weights of the variants with and without each change; only settings
    where all of these exist.
    """
    terms = []
    for point in grid:
        if any(point[axis] != level for axis, level in changes):
            continue
        weights: dict[str, float] = {}
        for mask in range(2 ** len(changes)):
            levels, sign = list(point), 1.0
            for bit, (axis, _) in enumerate(changes):
                if mask >> bit & 1:
                    levels[axis], sign = BASE, -sign
            if (variant := grid.get(tuple(levels))) is None:
                break
            weights[variant] = sign
        else:
            terms.append(weights)
    return terms


def _mean(terms: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for term in terms for name in term)
    return {name: fmean(term.get(name, 0.0) for term in terms) for name in names}


def _said(document: Mapping[str, Any], change: tuple[int, str]) -> str:
    """`scale = Unscaled`, `init.qkv.deviation = 0.02`: an axis and what differs there."""
    axis, fields = document["axes"][change[0]], json.loads(change[1])
    short = axis.split(".", 1)[1]
    own = {path.removeprefix(axis).lstrip("."): plain(value) for path, value in fields.items()}
    kind = own.pop("", None)
    rest = [f"{name} = {value}" for name, value in own.items()]
    if kind is None:
        return listed([f"{short}.{field}" for field in rest])
    return f"{short} = {kind}{f' ({listed(rest)})' if rest else ''}"


def contrasted(found: Findings) -> pd.DataFrame:
    """A row an effect and task: `kind, effect, settings`, then the columns of `stats.contrasts`. A pilot's are all
    *undecided*. No rows unless two axes vary and their levels are combined.
    """
    document = found.document
    if len(document["axes"]) < 2 or not (effects := effects_of(document)):
        return pd.DataFrame()
    named = {f"{effect.kind}: {effect.name}": effect for effect in effects}
    weights = {name: effect.weights for name, effect in named.items()}
    looks = number_of_looks(document)
    table = contrasts(found.data.primary(), weights, document["margin"], document["higher_is_better"], looks=looks)
    if found.data.is_pilot:
        table = table.assign(verdict="undecided")
    columns = {
        "kind": [named[name].kind for name in table["variant"]],
        "effect": [named[name].name for name in table["variant"]],
        "settings": [named[name].settings for name in table["variant"]],
    }
    return pd.DataFrame(columns).join(table.drop(columns="variant"))


def pictures(found: Findings, table: pd.DataFrame) -> Iterator[Picture]:
    """None: the numbers are few."""
    yield from ()


def blocks(found: Findings, table: pd.DataFrame) -> Sequence[Block]:
    """A table a task, main effects first."""
    document, said = found.document, []
    for task in document["tasks"]:
        columns = [f"on {task}", "verdict", "effect", "95 % interval", "corrected p", "seeds", "means over"]
        said.append(Table(columns, [_row(row) for row in records(table[table["task"] == task])]))
    margin = f"{document['margin']:g}"
    text = (
        "A main effect is what a change does to the score on average over the settings of the other axes at which the "
        "study has it with and without; an interaction is how far two changes together are from the sum of each alone, "
        f"m(both) − m(one) − m(other) + m(neither). Computed seed by seed and tested like the verdicts, corrected for "
        f"the {len(table)} effects of this chapter; {EFFECTS['equivalent']} and {VERDICTS['equivalent']}: within "
        f"±{margin}. A study whose cells tie at an end of the scale, or whose score ends there, has interactions that "
        "are the scale's own: look at the cells."
    )
    return [*said, Text(text)]


def _row(row: dict[str, Any]) -> list[Cell]:
    words = VERDICTS if row["kind"] == INTERACTION else EFFECTS
    size, between = with_interval(row["difference"], row["low"], row["high"], 3)
    verdict = str(row["verdict"])
    return [
        Cell(f"{row['effect']}"),
        Cell(words[verdict], verdict),
        Cell(size if is_known(row["difference"]) else ABSENT),
        Cell(between),
        Cell(probability(row["p_holm"])),
        Cell(str(row["n_pairs"])),
        Cell(f"{row['settings']} setting{'s' * (row['settings'] > 1)}"),
    ]


CHAPTER = Chapter("effects", "Main effects and interactions", contrasted, pictures, blocks)
