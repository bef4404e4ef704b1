"""Routing: how routers share tokens out among experts, and what balance goes with in score."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.report.blocks import Block, Cell, Table, Text
from harness.report.chapters.chapter import Chapter
from harness.report.figures import SEED_WIDTH, Look, Picture, binned, curves_panel, label_left
from harness.report.look import MUTED, PAGE, key, legend, panels, safe, styles
from harness.report.tables import RUN, Findings, field_of, records, variants_of
from harness.schema import quoted
from harness.stats import summary_interval
from harness.wording import ABSENT, decimal, interval, is_known, metric_name, whole

PREFIX = "router/"
LAST = 0.1  # share of a run's steps, the last ones, over which a curve counts as its end
DRAWN = {"router/max_violation": "MaxVio", "router/entropy": "router entropy (nats)"}
MEANING = (
    "Means over layers, over the last tenth of the steps and over seeds, with 95 % t intervals over seeds. Auxiliary "
    "loss: what the routers add to the training loss, coefficients included. Entropy / ln E: the entropy of a "
    "token's router probabilities over its largest value for E experts; 1 prefers no expert. MaxVio: how far the "
    "fullest expert lies above an even share; 0 is even. Loads: share of the choices times the number of experts; 1 "
    "is even. Dropped: share of the choices that found their expert full. Active parameters: those that one token "
    "meets. Descriptive: no test was made."
)
EXPERTS = "model.feedforward.num_experts"


def router_curves(found: Findings) -> pd.DataFrame:
    """The curves of routers: `variant, task, seed, step, metric, value`; empty without a router."""
    curves = found.data.curves
    curves = curves[curves["metric"].str.startswith(PREFIX).astype(bool)]
    return curves.assign(value=curves["value"].astype("float64"))


def ends(curves: pd.DataFrame) -> pd.DataFrame:
    """A row a run: each metric's mean over the last tenth of the run's steps so far."""
    last = curves.groupby(RUN, sort=False)["step"].transform("max")
    late = curves[curves["step"] > (1 - LAST) * last]
    return late.pivot_table(index=RUN, columns="metric", values="value", aggfunc="mean").reset_index()


def pictures(found: Findings, curves: pd.DataFrame) -> Iterator[Picture]:
    """Imbalance and entropy against step; then the score against imbalance."""
    look = styles(variants_of(found.document), found.document["baseline"])
    look = {name: style for name, style in look.items() if name in set(curves["variant"])}
    yield _curves_picture(found, curves, look)
    trade = found.data.primary().merge(ends(curves), on=RUN)
    trade = trade[np.isfinite(trade["score"]) & np.isfinite(trade["router/max_violation"])]
    if len(trade):
        yield _trade_picture(found, trade, look)


def _curves_picture(found: Findings, curves: pd.DataFrame, look: Look) -> Picture:
    tasks = [task for task in found.document["tasks"] if task in set(curves["task"])]
    figure = Figure(figsize=(PAGE, 0.5 + 2.1 * len(tasks)), layout="constrained")
    axes = figure.subplots(len(tasks), len(DRAWN), squeeze=False)
    width = 1
    for column, (metric, label) in enumerate(DRAWN.items()):
        points, width = binned(curves[curves["metric"] == metric])
        for row, task in enumerate(tasks):
            ax = axes[row, column]
            curves_panel(ax, points[points["task"] == task], look)
            ax.set(title=safe(task), xlabel="training step", ylabel=label)
            ax.set_ylim(bottom=0)
    handles: list[Line2D | Patch] = [key(name, look[name], marker=False) for name in look]
    handles.append(Line2D([], [], color=MUTED, lw=SEED_WIDTH, label="one seed"))
    legend(figure, handles, columns=4)
    caption = (
        "How unevenly routers share tokens out while they train, mean over layers. MaxVio is how far the fullest "
        "expert lies above an even share: 0 is even, 1 is twice that share. Entropy is that of a token's router "
        f"probabilities: 0 is certain. Thin lines are single seeds, averaged over {width} steps a point; thick lines "
        "are their median."
    )
    return Picture("routing_curves", "Balance and certainty of the routers", caption, figure)


def _trade_picture(found: Findings, trade: pd.DataFrame, look: Look) -> Picture:
    tasks = [task for task in found.document["tasks"] if task in set(trade["task"])]
    shown = {name: style for name, style in look.items() if name in set(trade["variant"])}
    figure, axes = panels(len(tasks), height=2.4)
    for ax, task in zip(axes, tasks, strict=True):
        for name, shape in shown.items():
            own = trade[(trade["task"] == task) & (trade["variant"] == name)]
            ax.scatter(
                own["router/max_violation"], own["score"], marker=shape.marker, s=22, color=shape.colour, alpha=0.75,
                linewidths=0, clip_on=False,
            )  # fmt: skip
        if trade["score"].between(0, 1).all():
            ax.set_ylim(-0.02, 1.02)
        ax.set(title=safe(task), xlabel="MaxVio at the end of training")
        ax.set_xlim(left=0)
        label_left(ax, metric_name(found.document["score"]))
    legend(figure, [_dot(name, shown) for name in shown], columns=4)
    better = "higher" if found.document.get("higher_is_better", True) else "lower"
    caption = (
        f"Primary score against imbalance at the end of training, a dot a seed: further left is more even, {better} "
        "is better. Balance that costs score shows as a slope between variants. Descriptive: no test was made."
    )
    return Picture("routing_trade", "What balance goes with in score", caption, figure)


def _dot(name: str, look: Look) -> Line2D:
    return Line2D([], [], lw=0, marker=look[name].marker, markersize=5, color=look[name].colour, label=safe(name))


def blocks(found: Findings, curves: pd.DataFrame) -> Sequence[Block]:
    """A table a task: where the routers ended."""
    end = ends(curves)
    tables = [_table(found, task, end[end["task"] == task]) for task in found.document["tasks"]]
    return [*(table for table in tables if table.rows), Text(MEANING)]


def _table(found: Findings, task: str, end: pd.DataFrame) -> Table:
    sizes = {row["variant"]: row["parameters"] for row in records(found.ledger) if row["task"] == task}
    counted = {row["variant"]: row for row in records(found.data.costs)}
    rows = []
    for name in variants_of(found.document):
        own = end[end["variant"] == name]
        if own.empty:
            continue
        known = counted.get(name, {})
        experts = num_experts(found.document, name)
        rows.append(
            [
                Cell(name),
                Cell(_summary(own, "router/loss")),
                Cell(_summary(own, "router/entropy", 1 / math.log(experts) if experts else math.nan)),
                Cell(_summary(own, "router/max_violation")),
                Cell(_loads(own)),
                Cell(_summary(own, "router/dropped")),
                Cell(str(len(own))),
                Cell(whole(known.get("active_parameters"))),
                Cell(whole(sizes[name] if is_known(sizes.get(name)) else known.get("parameters"))),
            ]
        )
    columns = [
        f"on {task}", "auxiliary loss", "entropy / ln E", "MaxVio", "least and most loaded expert", "dropped", "seeds",
        "active parameters", "parameters",
    ]  # fmt: skip
    return Table(columns, rows)


def num_experts(document: dict[str, Any], variant: str) -> int | None:
    """How many experts a variant's mixtures have, where the plan says."""
    experts = field_of(document, variant, EXPERTS)
    return None if experts is None else int(experts)


def _summary(own: pd.DataFrame, metric: str, scale: float = 1.0) -> str:
    """Mean over seeds with its 95 % interval."""
    if metric not in own:
        return ABSENT
    mean, low, high = summary_interval(own[metric] * scale)
    return f"{decimal(mean)} {interval(low, high, signed=False)}" if is_known(low) else decimal(mean)


def _loads(own: pd.DataFrame) -> str:
    if "router/load_min" not in own:
        return ABSENT
    return f"{decimal(own['router/load_min'].mean(), 2)}, {decimal(own['router/load_max'].mean(), 2)}"


def seen(found: Findings, curves: pd.DataFrame) -> str:
    """How uneven the routers of every variant ended, a task."""
    end = ends(curves)
    if "router/max_violation" not in end:
        return ""
    means = end.groupby(["task", "variant"])["router/max_violation"].mean()
    parts = []
    for task in found.document["tasks"]:
        routed = [name for name in variants_of(found.document) if (task, name) in means.index]
        if routed:
            said = [f"{decimal(means[task, name], 2)} with {quoted(name)}" for name in routed]
            parts.append(f"MaxVio on {task} {', '.join(said)}")
    return f"{'; '.join(parts)} (0: every expert has an even share)" if parts else ""


CHAPTER = Chapter("routing", "Routing", router_curves, pictures, blocks, seen=seen)
