"""The figures about scores and training: accuracy by length, every seed's score and difference, loss, speed."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from harness.report.look import FAINT, INK, MUTED, Style, key, legend, panels, safe, styles
from harness.report.tables import (
    Findings,
    records,
    score_summaries,
    seed_differences,
    threshold_column,
    variants_of,
    versus,
)
from harness.results import IN_DISTRIBUTION, LEARNING_TIME
from harness.wording import PENDING, listed, metric_name, ranges

Look = dict[str, Style]

POINTS = 100  # of a loss curve: more cannot be told apart at a column's width
SEED_WIDTH, SEED_ALPHA = 0.7, 0.28
VERDICT_COLOURS = {"better": "#01579b", "worse": "#a63c06", "equivalent": "#1a1a1a", "undecided": "#6b6b6b"}


@dataclass(frozen=True)
class Picture:
    """A figure with what a reader needs beside it; `name` is its file's name, `wide` one that is scrolled."""

    name: str
    title: str
    caption: str
    figure: Figure
    wide: bool = False


def score_pictures(found: Findings) -> Iterator[Picture]:
    """The figures for which the study has data, one after the other, so that each can be saved and let go."""
    look = styles(variants_of(found.document), found.document["baseline"])
    makers: tuple[Callable[[Findings, Look], Picture | None], ...] = (accuracy, differences, scores, loss, speed)
    for make in makers:
        picture = make(found, look)
        if picture is not None:
            yield picture


def accuracy(found: Findings, look: Look) -> Picture | None:
    """Accuracy against length, a panel a task."""
    document, lengths = found.document, found.lengths
    tasks = [task for task in document["tasks"] if task in set(lengths["task"])]
    if not tasks or lengths.groupby("task")["length"].nunique().max() == 1:  # a point a task, which `scores` shows
        return None
    metric = metric_name(found.data.metric)
    figure, axes = panels(len(tasks), height=2.6)
    seeds = found.data.scores[found.data.scores["metric"] == found.data.metric]
    for ax, task in zip(axes, tasks, strict=True):
        _lengths_panel(ax, lengths[lengths["task"] == task], seeds[seeds["task"] == task], look)
        _training_range(ax, document["train_lengths"].get(task))
        ax.set(title=safe(task), xlabel="length of the source")
        label_left(ax, metric)
    shown = [name for name in look if name in set(lengths["variant"])]
    handles: list[Line2D | Patch] = [key(name, look[name]) for name in shown]
    handles.append(Line2D([], [], color=MUTED, lw=SEED_WIDTH, label="one seed"))
    handles += _band_keys(lengths, look)
    legend(figure, handles, columns=min(len(handles), 5 if len(tasks) > 1 else 3))
    return Picture("accuracy_by_length", f"{metric[0].upper()}{metric[1:]} by length", _lengths_caption(found), figure)


def _lengths_panel(ax: Axes, means: pd.DataFrame, seeds: pd.DataFrame, look: Look) -> None:
    shown = [name for name in look if name in set(means["variant"])]
    for name in shown:
        own = seeds[seeds["variant"] == name]
        _thin_lines(ax, own, "length", "value", look[name].colour)
    for place, name in enumerate(shown):
        row = means[means["variant"] == name]
        shape = look[name]
        ax.plot(
            row["length"], row["mean"], color=shape.colour, linestyle=shape.dash_pattern, marker=shape.marker,
            markersize=5, markeredgecolor="white", markeredgewidth=0.6, lw=2.2 if place == 0 else 1.6,
            # Markers take turns, so that lines on top of each other can still be told apart.
            markevery=(place % len(shown), len(shown)) if len(row) > len(shown) else None,
            zorder=3 + place * 0.01, clip_on=False,
        )  # fmt: skip
        refused = row[row["mark"].str.startswith("unsupported")]
        ax.scatter(
            refused["length"], refused["mean"], marker="x", s=26, color=shape.colour, lw=1.4, zorder=5, clip_on=False
        )
    seen = sorted({int(n) for n in means.loc[means["mark"].str.startswith("seen"), "length"]})
    for length in seen:
        ax.axvspan(length - 0.5, length + 0.5, facecolor="none", edgecolor="#c2c7cc", hatch="////", lw=0, zorder=0.6)
    values = pd.concat([means["mean"], seeds["value"]]).dropna()
    if values.between(0, 1).all():
        ax.set_ylim(-0.02, 1.02)
    ax.set_xlim(means["length"].min() - 0.5, means["length"].max() + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def label_left(ax: Axes, label: str) -> None:
    """A label for the panel's shared vertical axis, where it stands at the left edge."""
    place = ax.get_subplotspec()
    if place is None or place.is_first_col():
        ax.set_ylabel(label)


def _thin_lines(ax: Axes, runs: pd.DataFrame, x: str, y: str, colour: str) -> None:
    """A faint line a seed."""
    lines = [group[[x, y]].to_numpy(dtype=float) for _, group in runs.dropna(subset=[y]).sort_values(x).groupby("seed")]
    ax.add_collection(LineCollection(lines, colors=colour, linewidths=SEED_WIDTH, alpha=SEED_ALPHA, zorder=2))


def _training_range(ax: Axes, lengths: list[int] | None) -> None:
    if lengths:
        ax.axvspan(min(lengths) - 0.5, max(lengths) + 0.5, color=FAINT, lw=0, zorder=0.5)


def _band_keys(lengths: pd.DataFrame, look: Look) -> list[Line2D | Patch]:
    keys: list[Line2D | Patch] = [Patch(color=FAINT, label="training lengths")]
    if lengths["mark"].str.startswith("seen").any():
        keys.append(Patch(facecolor=FAINT, edgecolor="#b0b5ba", hatch="/////", lw=0, label="mostly seen in training"))
    if lengths["mark"].str.startswith("unsupported").any():
        keys.append(Line2D([], [], color=MUTED, marker="x", lw=0, label="length unsupported (scores 0)"))
    return keys


def _lengths_caption(found: Findings) -> str:
    lengths = found.lengths
    parts = [
        "Thin lines are single seeds, thick lines their mean; the markers of a line are spaced so that "
        "lines on top of each other can be told apart. The shaded lengths were trained on."
    ]
    seen = lengths[lengths["mark"].str.startswith("seen")]
    cases = {str(task): ranges(group["length"]) for task, group in seen.groupby("task", sort=False)}
    if cases:
        parts.append(f"Hatched lengths ({_together(cases)}) have so few sequences that training saw most or all.")
    cases = {f"{row['variant']} on {row['task']}": row["lengths"] for row in records(found.unsupported)}
    if cases:
        parts.append(f"A cross marks a length that the variant cannot take ({_together(cases)}); it counts as 0.")
    return " ".join(parts)


def _together(cases: dict[str, str]) -> str:
    """`copy and reverse: 1–2`: names that share a text drawn together."""
    texts = list(dict.fromkeys(cases.values()))
    return "; ".join(f"{listed([name for name in cases if cases[name] == text])}: {text}" for text in texts)


def rows_figure(tasks: int, names: list[str]) -> tuple[Figure, list[Axes]]:
    """Panels with a row a variant, the first on top."""
    figure, axes = panels(tasks, height=0.7 + 0.34 * len(names))
    for ax in axes:
        ax.set_ylim(len(names) - 0.45, -0.55)
        ax.set_yticks(range(len(names)), [safe(name) for name in names])
        ax.tick_params(axis="y", length=0)
        ax.grid(visible=False, axis="y")
        ax.xaxis.set_major_locator(MaxNLocator(5 if tasks > 1 else 8, steps=[1, 2, 2.5, 5, 10]))  # room for −0.025
    return figure, axes


def offsets(seeds: pd.Series, order: list[int]) -> np.ndarray:
    """Where in its row each seed stands, above the mean: the same place in every row, so that pairs can be followed."""
    places = {seed: place for place, seed in enumerate(order)}
    step = 0.42 / max(1, len(order) - 1)
    return np.array([-0.38 + step * places[seed] for seed in seeds])


def scores(found: Findings, look: Look) -> Picture | None:
    """Every seed's primary score, with mean and interval."""
    document = found.document
    gate = found.data.runs.get(IN_DISTRIBUTION, pd.Series(math.nan, index=found.data.runs.index))
    outcome = found.data.runs[["variant", "task", "seed", "status"]].assign(
        passed=gate.astype("float64") >= document["gate"]
    )
    table = found.data.primary().dropna().merge(outcome, on=["variant", "task", "seed"])
    tasks = [task for task in document["tasks"] if task in set(table["task"])]
    if not tasks:
        return None
    names, summaries = list(look), score_summaries(found.data)
    order = sorted(table["seed"].unique())
    figure, axes = rows_figure(len(tasks), names)
    for ax, task in zip(axes, tasks, strict=True):
        for row, name in enumerate(names):
            own = table[(table["task"] == task) & (table["variant"] == name)]
            _seed_points(ax, own, row + offsets(own["seed"], order), look[name])
            summary = summaries[(summaries["task"] == task) & (summaries["variant"] == name)]
            mean_and_interval(ax, summary, row, "mean", look[name])
        if table["score"].between(0, 1).all():
            ax.set_xlim(-0.03, 1.03)
        over = " over the test lengths" if any(document["test_lengths"].values()) else " over the training lengths"
        over = "" if document["score"] == LEARNING_TIME else over
        ax.set(title=safe(task), xlabel=f"mean {metric_name(document['score'])}{over}")
    legend(figure, _point_keys(table), columns=4)
    caption = (
        "Every seed's primary score: a dot a seed, each seed at the same height in every row. The bar is "
        "the mean with its 95 % t interval, each variant by itself; verdicts rest on the paired differences "
        "instead."
    )
    return Picture("scores", "Every seed's score", caption, figure)


def _seed_points(ax: Axes, own: pd.DataFrame, heights: np.ndarray, shape: Style) -> None:
    """Filled if the run passed the gate, hollow if not, a cross if it diverged."""
    lost = (own["status"] == "diverged").to_numpy()
    passed = own["passed"].to_numpy(dtype=bool) & ~lost
    x = own["score"].to_numpy(dtype=float)
    style: dict[str, Any] = {"s": 15, "alpha": 0.75, "zorder": 2, "clip_on": False, "linewidths": 0.9}
    ax.scatter(x[passed], heights[passed], color=shape.colour, **style)
    missed = ~passed & ~lost
    ax.scatter(x[missed], heights[missed], facecolors="white", edgecolors=shape.colour, **style)
    ax.scatter(x[lost], heights[lost], marker="x", color=shape.colour, **style)


def mean_and_interval(ax: Axes, rows: pd.DataFrame, row: int, centre: str, shape: Style) -> None:
    """The column `centre` of the only one of `rows` with its interval `low` to `high`, below a row's seeds."""
    if rows.empty or not np.isfinite(rows[centre].iloc[0]):
        return
    mean, low, high = (float(rows[column].iloc[0]) for column in (centre, "low", "high"))
    height = row + 0.3
    if np.isfinite([low, high]).all():
        ax.plot(
            [low, high], [height, height], color=shape.colour, lw=1.8, zorder=3, solid_capstyle="butt", clip_on=False
        )
    ax.plot(
        [mean],
        [height],
        marker=shape.marker,
        color=shape.colour,
        markeredgecolor="white",
        markersize=6,
        zorder=4,
        clip_on=False,
    )


def _point_keys(table: pd.DataFrame) -> list[Line2D]:
    def dot(**style: object) -> Line2D:
        return Line2D([], [], lw=0, color=MUTED, markersize=4.5, **style)  # type: ignore[arg-type]

    keys = [Line2D([], [], color=MUTED, marker="o", markeredgecolor="white", lw=1.8, label="mean, 95 % interval")]
    lost = table["status"] == "diverged"
    if (table["passed"] & ~lost).any():
        keys.append(dot(marker="o", label="seed, passed the gate"))
    if (~table["passed"] & ~lost).any():
        keys.append(dot(marker="o", markerfacecolor="white", label="seed, missed the gate"))
    if lost.any():
        keys.append(dot(marker="x", label="seed, diverged"))
    return keys


def differences(found: Findings, look: Look) -> Picture | None:
    """What the verdicts rest on: each seed's difference to the baseline."""
    document, compared = found.document, found.compared
    pairs = seed_differences(found.data)
    tasks = [task for task in document["tasks"] if task in set(pairs["task"])]
    if not tasks:
        return None
    names = [name for name in look if name != document["baseline"]]
    order = sorted(pairs["seed"].unique())
    figure, axes = rows_figure(len(tasks), [versus(document, name) for name in names])
    for ax, task in zip(axes, tasks, strict=True):
        margin = document["margin"]
        ax.axvspan(-margin, margin, color=FAINT, lw=0, zorder=0.5)
        ax.axvline(0, color=look[document["baseline"]].colour, lw=1, zorder=1)
        for row, name in enumerate(names):
            own = pairs[(pairs["task"] == task) & (pairs["variant"] == name)]
            ax.scatter(
                own["difference"], row + offsets(own["seed"], order), s=15, color=look[name].colour, alpha=0.6,
                zorder=2, linewidths=0,
            )  # fmt: skip
            result = compared[(compared["task"] == task) & (compared["variant"] == name)]
            mean_and_interval(ax, result, row, "difference", look[name])
            _verdict_beside(ax, row, str(result["verdict"].iloc[0]))
        ax.set(title=safe(task), xlabel=f"difference in mean {metric_name(document['score'])}")
    keys: list[Line2D | Patch] = [
        Line2D([], [], color=MUTED, marker="o", markeredgecolor="white", lw=1.8, label="mean, 95 % interval"),
        Line2D([], [], color=MUTED, marker="o", lw=0, markersize=4, label="one seed"),
        Line2D([], [], color=INK, lw=1, label=f"baseline: {safe(document['baseline'])}"),
        Patch(color=FAINT, label=f"margin ±{margin:g}"),
    ]
    legend(figure, keys, columns=4)
    return Picture("differences", "Differences to the baseline", _differences_caption(document), figure)


def _verdict_beside(ax: Axes, row: int, verdict: str) -> None:
    colour = VERDICT_COLOURS.get(verdict, MUTED)
    ax.text(1.015, row, verdict, transform=ax.get_yaxis_transform(), va="center", fontsize=7, color=colour)


def _differences_caption(document: dict[str, object]) -> str:
    baseline = "baseline, or what is named in brackets" if document.get("against") else "baseline"
    better = "to the right" if document.get("higher_is_better", True) else "to the left"
    return (
        f"Variant minus {baseline}, paired by seed: a dot a seed, the mean with its 95 % interval; {better} of "
        "the line is better. Differences inside the shaded margin do not matter in practice. The verdict "
        "also needs a test that is corrected for all comparisons, so an interval that misses zero alone "
        "decides nothing."
    )


def loss(found: Findings, look: Look) -> Picture | None:
    """Training loss, a panel a task."""
    curves = found.data.curves
    curves = curves[(curves["metric"] == "train/loss") & np.isfinite(curves["value"].astype("float64"))]
    tasks = [task for task in found.document["tasks"] if task in set(curves["task"])]
    if not tasks:
        return None
    curves, width = binned(curves)
    statuses = found.data.runs.set_index(["variant", "task", "seed"])["status"]
    figure, axes = panels(len(tasks), height=2.4)
    for ax, task in zip(axes, tasks, strict=True):
        own = curves[curves["task"] == task]
        curves_panel(ax, own, look)
        _diverged_ends(ax, own, statuses, look)
        ax.set(title=safe(task), xlabel="training step", ylabel="")
        label_left(ax, "training loss (nats a token)")
        if own["value"].min() > 0 and own["value"].max() > 10 * own["value"].min():
            ax.set_yscale("log")
    shown = [name for name in look if name in set(curves["variant"])]
    handles = [key(name, look[name], marker=False) for name in shown]
    handles.append(Line2D([], [], color=MUTED, lw=SEED_WIDTH, label="one seed"))
    if (statuses == "diverged").any():
        handles.append(Line2D([], [], color=MUTED, marker="x", lw=0, label="diverged here"))
    legend(figure, handles, columns=min(len(handles), 4))
    caption = (
        f"Thin lines are single seeds, averaged over {width} steps a point; thick lines are the median over "
        "the seeds that have got so far."
    )
    return Picture("loss", "Training loss", caption, figure)


def binned(curves: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Curves with at most about `POINTS` points a run, each the mean of a bin of steps; the bin's width in steps."""
    width = max(1, math.ceil((curves["step"].max() + 1) / POINTS))
    middle = (curves["step"] - 1).clip(lower=0) // width * width + (width + 1) / 2
    keys = ["variant", "task", "seed"]
    values = curves.assign(step=middle, value=curves["value"].astype("float64"))
    return values.groupby([*keys, "step"], sort=False)["value"].mean().reset_index(), width


def curves_panel(ax: Axes, own: pd.DataFrame, look: Look) -> None:
    """A faint line a seed and the median of each variant, of points as `binned` gives them."""
    shown = [name for name in look if name in set(own["variant"])]
    for name in shown:
        _thin_lines(ax, own[own["variant"] == name], "step", "value", look[name].colour)
    medians = own.groupby(["variant", "step"], sort=False)["value"].median().reset_index()
    sns.lineplot(
        medians, x="step", y="value", hue="variant", style="variant", hue_order=shown, style_order=shown,
        palette={name: look[name].colour for name in shown}, dashes={name: look[name].dashes for name in shown},
        errorbar=None, estimator=None, legend=False, ax=ax,
    )  # fmt: skip


def _diverged_ends(ax: Axes, own: pd.DataFrame, statuses: pd.Series, look: Look) -> None:
    for (variant, task, seed), group in own.groupby(["variant", "task", "seed"], sort=False):
        if statuses.get((variant, task, seed)) == "diverged":
            end = group.sort_values("step").iloc[-1]
            ax.scatter(end["step"], end["value"], marker="x", s=26, lw=1.4, color=look[str(variant)].colour, zorder=5)


def speed(found: Findings, look: Look) -> Picture | None:
    """Steps until the training lengths were learned, every seed."""
    column = threshold_column(found.data)
    if column is None:
        return None
    runs = found.data.runs[~found.data.runs["status"].isin(PENDING)]
    runs = runs.assign(needed=runs[column].astype("float64"))
    tasks = [task for task in found.document["tasks"] if task in set(runs["task"])]
    names, order = list(look), sorted(runs["seed"].unique())
    figure, axes = rows_figure(len(tasks), names)
    beyond = 1.08 * runs["needed"].max()
    for ax, task in zip(axes, tasks, strict=True):
        for row, name in enumerate(names):
            own = runs[(runs["task"] == task) & (runs["variant"] == name)]
            reached = own["needed"].notna()
            heights = row + offsets(own["seed"], order)
            style: dict[str, Any] = {"s": 15, "color": look[name].colour, "alpha": 0.75, "clip_on": False}
            ax.scatter(own["needed"][reached], heights[reached], linewidths=0, **style)
            ax.scatter(np.full((~reached).sum(), beyond), heights[~reached], marker="x", lw=0.9, **style)
            ax.plot(
                [own["needed"].median()],
                [row - 0.14],
                marker="|",
                color=look[name].colour,
                markersize=15,
                markeredgewidth=2,
            )
        ax.set(title=safe(task), xlabel="training steps to the threshold")
        ax.set_xlim(0, 1.03 * beyond)
    handles = [
        Line2D(
            [],
            [],
            color=MUTED,
            marker="|",
            markersize=9,
            markeredgewidth=2,
            lw=0,
            label="median of those that reached it",
        ),
        Line2D([], [], color=MUTED, marker="o", markersize=4.5, lw=0, label="one seed"),
    ]
    if runs["needed"].isna().any():
        handles.append(Line2D([], [], color=MUTED, marker="x", markersize=4.5, lw=0, label="never reached it"))
    legend(figure, handles, columns=3)
    caption = (
        "The first training step at which exact match, averaged over the last ten training batches before their "
        f"updates, reached {found.document['gate']:g}. Batches have random training lengths. Where final scores tie "
        "at the ceiling, this tells variants apart. It is descriptive: no test was made."
    )
    return Picture("steps_to_threshold", "Steps until the training lengths were learned", caption, figure)
