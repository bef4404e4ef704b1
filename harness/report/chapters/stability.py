"""Stability: which runs diverged, spiked or never trained, and the largest learning rate that was stable.

For studies without gradient clipping, and for those that try several learning rates on the same configuration.
"""

import json
import math
from collections.abc import Iterable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

from harness.report.blocks import Block, Cell, Items, Table, Text
from harness.report.chapters.chapter import Chapter
from harness.report.figures import Picture, label_left, rows_figure
from harness.report.look import INK, MUTED, Style, key, legend, panels, safe, styles
from harness.report.tables import RUN, Findings, field_of, gate_passed, records, variants_of
from harness.schema import quoted
from harness.stats import clopper_pearson
from harness.wording import ABSENT, counted, decimal, interval, listed, plain, span

if TYPE_CHECKING:
    from harness.results import StudyData

RATE, CLIP = "train.learning_rate", "train.gradient_clip"
INITIAL = "train/initial_loss"
# Of the untrained loss: how far a point must rise above the level reached, the lowest median of LEVEL points in a row.
# Batches have random lengths, and a run that has learned the short ones alone swings by up to a quarter of it.
SPIKE, LEVEL = 1 / 3, 5
TRAINED = 0.5  # of the untrained loss: a run that ends below it has learned something
NAMED = 4  # configurations that one sentence can hold
COLUMNS = ["diverged", "spikes", "trained", "stable", "gradient", "loss", "untrained"]

# Outcomes of a run, each run having one, with the colours of their bars and of the numbers on these.
OUTCOMES = {
    "trained without a spike": ("#01579b", "white"),
    "spiked": ("#e6a756", INK),
    "no spike, but did not train": ("#b9c0c7", INK),
    "diverged": ("#a63c06", "white"),
}


def configurations(document: dict[str, Any]) -> dict[str, list[str]]:
    """Variants that differ in nothing but the learning rate, under the fields that tell them from the others."""
    groups: dict[str, list[str]] = {}
    fields: dict[str, None] = {}
    for name in variants_of(document):
        own = {path: value for path, value in document["differences"].get(name, {}).items() if path != RATE}
        groups.setdefault(json.dumps(own, sort_keys=True), []).append(name)
        fields |= dict.fromkeys(own)
    names = list(groups.values())
    kinds = [path for path in fields if not any(path.startswith(f"{other}.") for other in fields)]
    labels = [_label(document, own[0], kinds) for own in names]
    if len(set(labels)) < len(labels):  # levels of one kind that differ in a field of theirs
        labels = [_label(document, own[0], fields) for own in names]
    return dict(zip(labels, names, strict=True))


def _label(document: dict[str, Any], variant: str, paths: Iterable[str]) -> str:
    parts = [f"{path.rpartition('.')[2]} = {plain(field_of(document, variant, path))}" for path in paths]
    return ", ".join(parts) or "all variants"


def swept(document: dict[str, Any]) -> dict[str, list[str]]:
    """The configurations, if one of them was tried at several learning rates."""
    groups = configurations(document)
    return groups if any(len(rates_of(document, names)) > 1 for names in groups.values()) else {}


def rates_of(document: dict[str, Any], variants: Iterable[str]) -> list[float]:
    """The learning rates of some variants, each once, rising."""
    return sorted({float(field_of(document, name, RATE)) for name in variants})


def spikes(losses: Iterable[float], untrained: float) -> int:
    """How often a loss curve spiked.

    A spike begins at a point that lies more than a third of the untrained loss above the lowest level reached before,
    a level being the median of five points in a row (of those there are, at the start). It lasts until the curve is
    back within half of that. Points that are not finite are left out: a run that has them diverged.
    """
    points = [loss for loss in losses if math.isfinite(loss)]
    lowest, inside, count = math.inf, False, 0
    for place, loss in enumerate(points):
        rise = (loss - lowest) / (SPIKE * untrained)
        if not inside and rise > 1:
            inside, count = True, count + 1
        elif inside and rise <= 0.5:
            inside = False
        lowest = min(lowest, median(points[max(0, place + 1 - LEVEL) : place + 1]))
    return count


def outcomes(data: "StudyData") -> pd.DataFrame:
    """How training went: a row a run that finished or diverged and whose untrained loss is recorded.

    Columns: variant, task, seed, diverged, spikes, trained, stable (trained with neither), gradient (the largest norm
    logged), loss (at the end), untrained (nats; the smallest among the task's runs, so that all are measured alike
    and an initialisation far worse than guessing makes no run look trained).
    """
    runs = data.runs[data.runs["status"].isin(("finished", "diverged"))]
    if INITIAL not in runs.columns or (known := runs[runs[INITIAL].notna()]).empty:
        return pd.DataFrame(columns=[*RUN, *COLUMNS])
    curves = data.curves
    losses = {
        run: group["value"].tolist()
        for run, group in curves[curves["metric"] == "train/loss"].sort_values("step", kind="stable").groupby(RUN)
    }
    norms = curves[curves["metric"] == "train/gradient_norm"].groupby(RUN)["value"].max()
    untrained = known.groupby("task")[INITIAL].min()
    rows = []
    for row in records(known):
        run, unit = (row["variant"], row["task"], row["seed"]), float(untrained[row["task"]])
        diverged = row["status"] == "diverged"
        count = spikes([row[INITIAL], *losses.get(run, [])], unit)
        trained = not diverged and row["train/loss"] < TRAINED * unit
        stable = trained and count == 0
        rows.append((*run, diverged, count, trained, stable, norms.get(run, math.nan), row["train/loss"], unit))
    return pd.DataFrame(rows, columns=[*RUN, *COLUMNS])


def relevant_outcomes(found: Findings) -> pd.DataFrame:
    """The outcomes of a study about stability; no rows for another."""
    document = found.document
    unclipped = all(field_of(document, name, CLIP) is None for name in variants_of(document))
    return outcomes(found.data) if unclipped or swept(document) else pd.DataFrame(columns=[*RUN, *COLUMNS])


def pictures(found: Findings, table: pd.DataFrame) -> Iterator[Picture]:
    """What became of the runs, and the final loss against the learning rate where several were tried."""
    yield _shares(found, table)
    if groups := swept(found.document):
        yield _losses(found, table, groups)


def _shares(found: Findings, table: pd.DataFrame) -> Picture:
    tasks, names = _tasks(found, table), variants_of(found.document)
    figure, axes = rows_figure(len(tasks), names)
    for ax, task in zip(axes, tasks, strict=True):
        for row, name in enumerate(names):
            _bar(ax, row, table[(table["task"] == task) & (table["variant"] == name)])
        ax.grid(visible=False)
        ax.set(title=safe(task), xlabel="fraction of runs", xlim=(0, 1))
    legend(figure, [Patch(color=colour, label=name) for name, (colour, _) in OUTCOMES.items()], columns=4)
    caption = (
        "What became of the runs that finished or diverged; the numbers count them. A run that spiked may have "
        "trained all the same. Descriptive: no test was made."
    )
    return Picture("stability_outcomes", "What became of the runs", caption, figure)


def _bar(ax: Axes, row: int, own: pd.DataFrame) -> None:
    calm = ~own["diverged"].astype(bool) & (own["spikes"] == 0)
    counts = (own["stable"].sum(), (~own["diverged"].astype(bool) & ~calm).sum(), (calm & ~own["trained"]).sum())
    left = 0.0
    for (colour, ink), count in zip(OUTCOMES.values(), (*counts, own["diverged"].sum()), strict=True):
        if count:
            share = count / len(own)
            ax.barh(row, share, left=left, height=0.66, color=colour, lw=0)
            ax.text(left + share / 2, row, str(count), ha="center", va="center", color=ink, fontsize=7)
            left += share


def _losses(found: Findings, table: pd.DataFrame, groups: dict[str, list[str]]) -> Picture:
    document, tasks = found.document, _tasks(found, table)
    home = next(label for label, names in groups.items() if document["baseline"] in names)
    look = styles(list(groups), home)
    rates = rates_of(document, variants_of(document))
    room = min(0.25, 0.3 * float(np.diff(np.log(rates)).min()))
    losses = table["loss"].where(~table["diverged"].astype(bool), table["untrained"]).clip(lower=1e-9)
    low, high = losses.min(), max(losses.max(), table["untrained"].max())
    figure, axes = panels(len(tasks), height=2.6)
    for ax, task in zip(axes, tasks, strict=True):
        ax.set(xscale="log", yscale="log", title=safe(task), xlabel="learning rate")
        for place, (label, names) in enumerate(groups.items()):
            own = table[(table["task"] == task) & table["variant"].isin(names)]
            shift = math.exp(room * (place / max(1, len(groups) - 1) - 0.5)) if len(groups) > 1 else 1.0
            own = own.assign(rate=[shift * float(field_of(document, name, RATE)) for name in own["variant"]])
            _line(ax, own, look[label])
        ax.axhline(table.loc[table["task"] == task, "untrained"].iloc[0], color=MUTED, lw=0.9, ls=(0, (1, 2)))
        ax.set_xlim(rates[0] * math.exp(-room), rates[-1] * math.exp(room))
        ax.set_xticks(rates, [plain(rate) for rate in rates], rotation=45 if len(rates) > 6 else 0)
        ax.minorticks_off()
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
        ax.set_ylim(low * (low / high) ** 0.05, high * (high / low) ** 0.15)  # crosses stand above all dots
        label_left(ax, "final training loss (nats a token)")
    legend(figure, _loss_keys(table, look), columns=3)
    caption = (
        "A dot a seed, and a line through the medians of variants that differ in nothing but the learning rate; they "
        "stand a little apart so that dots do not hide each other. A run that diverged is a cross at the top and "
        "counts as the largest loss, so that a line ends where half of the runs diverged. Descriptive: no test was "
        "made."
    )
    return Picture("stability_learning_rate", "Training loss by learning rate", caption, figure)


def _line(ax: Axes, own: pd.DataFrame, shape: Style) -> None:
    lost = own["diverged"].astype(bool)
    ax.scatter(own["rate"][~lost], own["loss"][~lost], s=13, color=shape.colour, alpha=0.45, lw=0, zorder=2)
    ax.scatter(
        own["rate"][lost], np.full(lost.sum(), 0.95), s=20, marker="x", lw=1.1, color=shape.colour, zorder=4,
        transform=ax.get_xaxis_transform(),
    )  # fmt: skip
    medians = own["loss"].where(~lost, math.inf).groupby(own["rate"]).median().replace(math.inf, math.nan)
    ax.plot(
        medians.index, medians, color=shape.colour, linestyle=shape.dash_pattern, marker=shape.marker, markersize=5,
        markeredgecolor="white", markeredgewidth=0.6, zorder=3,
    )  # fmt: skip


def _loss_keys(table: pd.DataFrame, look: dict[str, Style]) -> list[Line2D | Patch]:
    keys: list[Line2D | Patch] = [key(label, shape) for label, shape in look.items()]
    keys.append(Line2D([], [], color=MUTED, marker="o", lw=0, markersize=3.5, label="one seed"))
    if table["diverged"].any():
        keys.append(Line2D([], [], color=MUTED, marker="x", lw=0, markersize=4.5, label="one seed, diverged"))
    keys.append(Line2D([], [], color=MUTED, lw=0.9, ls=(0, (1, 2)), label="untrained model"))
    return keys


def blocks(found: Findings, table: pd.DataFrame) -> list[Block]:
    """What counts as what, a table a task, and the largest stable learning rates."""
    tasks = _tasks(found, table)
    return [
        Items(_definitions(table)),
        *(_task_table(found, table[table["task"] == task], task) for task in tasks),
        *_rates(found, table, tasks),
        Text("These numbers are descriptive: no test was made."),
    ]


def _definitions(table: pd.DataFrame) -> list[str]:
    losses = table.groupby("task", sort=False)["untrained"].first()
    known = listed([f"{decimal(loss, 2)} on {task}" for task, loss in losses.items()])
    return [
        f"untrained loss: the smallest loss of a task's models before training, about that of guessing; in nats a "
        f"token, {known}.",
        "spike: a point of the logged training loss (ten steps a point) more than a third of the untrained loss above "
        "the lowest level reached before it (median of five points in a row). It counts once, until the curve is back "
        "within half of that.",
        "trained: the run did not diverge, and its training loss ended below half of the untrained loss.",
        "diverged: loss or gradient stopped being finite, or the loss ended far above its start. Beside it is the 95 % "
        "Clopper–Pearson interval of the fraction.",
        "largest gradient norm: of the steps that were logged (one in ten), before any clipping; the median over runs.",
    ]


def _task_table(found: Findings, own: pd.DataFrame, task: str) -> Table:
    gates = {r["variant"]: r for r in records(found.verdicts[found.verdicts["task"] == task])}
    rows = []
    for name in variants_of(found.document):
        runs, gate = own[own["variant"] == name], gates[name]
        total, lost = len(runs), int(runs["diverged"].sum())
        low, high = clopper_pearson(lost, total)
        rows.append(
            [
                Cell(name),
                Cell(str(total)),
                _share(lost, total, bad=lost > 0),
                Cell(interval(low, high, 2, signed=False) if total else ABSENT),
                _share(spiked := int((runs["spikes"] > 0).sum()), total, bad=spiked > 0),
                Cell(plain(float(runs["spikes"].median())) if total else ABSENT),
                _share(trained := int(runs["trained"].sum()), total, bad=trained < total),
                Cell(f"{gate['gate_passed']} of {gate['gate_of']}"),
                Cell(decimal(runs["gradient"].median(), 2)),
            ]
        )
    columns = [
        f"on {task}", "runs", "diverged", "95 % interval", "with spikes", "median spikes", "trained", "passed gate",
        "largest gradient norm",
    ]  # fmt: skip
    return Table(columns, rows, "Runs that finished or diverged; the gate also counts those that failed otherwise.")


def _share(count: int, total: int, *, bad: bool) -> Cell:
    return Cell(f"{count} of {total}" if total else ABSENT, "marked" if bad else "")


def _rates(found: Findings, table: pd.DataFrame, tasks: list[str]) -> list[Block]:
    """The largest stable learning rate of each configuration, and which variants it is made of."""
    groups = swept(found.document)
    if not groups:
        return []
    table = _at_rates(found, table)
    rows = []
    for label, names in groups.items():
        own = table[table["variant"].isin(names)]
        seeds = own.groupby(["task", "rate"]).size().tolist()
        on = [own[own["task"] == task] for task in tasks]
        cells = [Cell(largest_rate(runs, held)) for runs in on for held in ("stable", "passed")]
        tried = ", ".join(map(plain, rates_of(found.document, names)))
        rows.append([Cell(label), *cells, Cell(tried), Cell(span(seeds) if seeds else ABSENT)])
    caption = (
        "stable: the largest learning rate, among those tried, at which no seed diverged or spiked and every one "
        "trained (ended below half of the untrained loss); learned: at which every seed passed the gate. Where it says "
        "≥, larger ones may do, too. Which variants stand behind each row is listed below."
    )
    said = [f"{held} on {task}" for task in tasks for held in ("stable", "learned")]
    heads = ["largest learning rate", *said, "rates tried", "seeds a rate"]
    return [
        Table(heads, rows, caption),
        Items([f"{label}: {listed([*map(quoted, names)])}" for label, names in groups.items()]),
    ]


def _at_rates(found: Findings, table: pd.DataFrame) -> pd.DataFrame:
    """With the learning rate of every run and whether it passed the gate."""
    table = table.assign(rate=[float(field_of(found.document, name, RATE)) for name in table["variant"]])
    table = table.merge(gate_passed(found.data), on=RUN, how="left")
    return table.assign(passed=table["passed"] == 1)


def largest_rate(own: pd.DataFrame, column: str) -> str:
    """The largest `rate` at which a column holds for every run, in words, of runs of one configuration on one task."""
    if own.empty:
        return ABSENT
    held = own.groupby("rate")[column].all()
    if not held.any():
        return f"none of {', '.join(map(plain, held.index))}"
    largest = float(held[held].index.max())
    text = f"≥ {plain(largest)}, the largest tried" if largest == held.index.max() else plain(largest)
    below = [rate for rate in held[~held].index if rate < largest]
    return f"{text} (but not {listed([plain(rate) for rate in below])})" if below else text


def _tasks(found: Findings, table: pd.DataFrame) -> list[str]:
    return [task for task in found.document["tasks"] if task in set(table["task"])]


def seen(found: Findings, table: pd.DataFrame) -> str:
    """How many runs diverged, spiked or did not train, and the largest rate that every seed learned at, of several."""
    lost = table["diverged"].astype(bool)
    spiked = (table["spikes"] > 0) & ~lost
    idle = ~table["trained"].astype(bool) & ~lost & ~spiked
    counts = [f"{n} {what}" for n, what in ((lost.sum(), "diverged"), (spiked.sum(), "spiked")) if n]
    counts = counts or ["none diverged or spiked"]
    counts += [f"{idle.sum()} did not train"] if idle.any() else []
    parts = [f"of {counted(len(table), 'run')} {listed(counts)}"]
    groups = swept(found.document)
    if 0 < len(groups) <= NAMED:
        runs = _at_rates(found, table)
        for task in _tasks(found, table):
            on = runs[runs["task"] == task]
            rates = [f"{_learned(on[on['variant'].isin(own)])} with {quoted(name)}" for name, own in groups.items()]
            parts.append(f"the largest learning rate at which every seed learned {task} is {', '.join(rates)}")
    return "; ".join(parts)


def _learned(own: pd.DataFrame) -> str:
    """`largest_rate` of the runs that passed the gate, in a word."""
    passed = own.groupby("rate")["passed"].all()
    if not passed.any():
        return "none"
    largest = float(passed[passed].index.max())
    return f"{'≥ ' if largest == passed.index.max() else ''}{plain(largest)}"


CHAPTER = Chapter("stability", "Stability", relevant_outcomes, pictures, blocks, leads=True, seen=seen)
