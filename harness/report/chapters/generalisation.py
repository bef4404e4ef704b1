"""Generalisation and calibration: what is known by heart only, and how far a model's confidence is to be believed."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.blocks import Block, Cell, Items, Table
from harness.report.chapters.chapter import Chapter
from harness.report.figures import Picture, mean_and_interval, offsets, rows_figure
from harness.report.look import MUTED, legend, safe, styles
from harness.report.tables import RUN, Findings, summaries, variants_of
from harness.results import IN_DISTRIBUTION
from harness.stats import summary_interval
from harness.wording import beside_baseline, decimal, interval

SEEN, GAP, CALIBRATION = "seen/exact_match", "gap", "eval/calibration_error"
COLUMNS = {
    SEEN: "exact match, training samples",
    IN_DISTRIBUTION: "exact match, fresh",
    GAP: "gap",
    "seen/loss": "loss, training samples",
    "eval/loss": "loss, fresh",
    "eval/accuracy": "accuracy",
    "eval/confidence": "confidence",
    CALIBRATION: "calibration error",
}
WITH_INTERVAL = (GAP, CALIBRATION)

TERMS_OF_GAP = (
    "Generalisation gap: exact match on the training samples minus exact match on fresh sequences of the same lengths; "
    "0 where nothing is known by heart only. Fresh ones do not stand among the training samples, unless a length has "
    "hardly more sequences than those. Losses are in nats a token, without label smoothing."
)
TERMS_OF_CALIBRATION = (
    "Calibration: a model is calibrated if, of the tokens to which it gives a probability of 0.8, 80 % are right. The "
    "expected calibration error sorts the answer tokens into ten bins of equal width by their confidence, the "
    "probability of the model's first choice, and averages |accuracy − confidence| over the bins, weighted by their "
    "tokens (Guo et al. 2017, arXiv:1706.04599). Accuracy is the share of these tokens that are right. Confidence "
    "above accuracy is too much, below it too little; the error counts both."
)
BASIS = (
    "Means over the seeds whose runs could be measured, at the training lengths, the right answer fed back; intervals "
    "are 95 % t intervals of one variant by itself. Descriptive: no test was made."
)


def pictures(found: Findings, runs: pd.DataFrame) -> Iterator[Picture]:
    """The generalisation gap, where there are training samples to compare with, and the calibration error."""
    if runs[GAP].notna().any():
        label = "exact match: training samples − fresh"
        caption = "How much better models answer their training samples than fresh sequences of the same lengths."
        yield Picture("generalisation_gap", "Generalisation gap", _caption(caption), _rows(found, runs, GAP, label))
    caption = "How far confidence is from accuracy, on the answers to fresh sequences of the training lengths."
    figure = _rows(found, runs, CALIBRATION, "expected calibration error")
    yield Picture("generalisation_calibration", "Calibration error", _caption(caption), figure)


def blocks(found: Findings, runs: pd.DataFrame) -> Sequence[Block]:
    """A table a task, and what the terms mean."""
    tables = [_table(found, runs, task) for task in found.document["tasks"] if task in set(runs["task"])]
    terms = [TERMS_OF_GAP] if runs[GAP].notna().any() else []
    return [*tables, Items([*terms, TERMS_OF_CALIBRATION])]


def measured(found: Findings) -> pd.DataFrame:
    """The runs that measured it, with their gap; none where the study is about neither finite data nor confidence."""
    runs = found.data.runs.reindex(columns=[*RUN, *COLUMNS]).astype(dict.fromkeys(COLUMNS, "float64"))
    runs = runs.assign(**{GAP: runs[SEEN] - runs[IN_DISTRIBUTION]}).dropna(subset=[CALIBRATION])
    return runs if runs[GAP].notna().any() or _varies_confidence(found.document) else runs.iloc[:0]


def _varies_confidence(document: dict[str, Any]) -> bool:
    names = [axis.split(".")[-1] for axis in document["axes"]]
    return any(name == "label_smoothing" or name.endswith("dropout") for name in names)


def _rows(found: Findings, runs: pd.DataFrame, column: str, label: str) -> Figure:
    """A panel a task, a row a variant: a dot a seed, mean and interval."""
    look = styles(variants_of(found.document), found.document["baseline"])
    runs, middles = runs.dropna(subset=[column]), summaries(runs, column)
    tasks = [task for task in found.document["tasks"] if task in set(runs["task"])]
    order = sorted(runs["seed"].unique())
    figure, axes = rows_figure(len(tasks), list(look))
    for ax, task in zip(axes, tasks, strict=True):
        ax.axvline(0, color=MUTED, lw=0.8, zorder=1)
        for row, (variant, shape) in enumerate(look.items()):
            own = runs[(runs["task"] == task) & (runs["variant"] == variant)]
            heights = row + offsets(own["seed"], order)
            ax.scatter(own[column], heights, s=15, color=shape.colour, alpha=0.6, linewidths=0, zorder=2, clip_on=False)
            middle = middles[(middles["task"] == task) & (middles["variant"] == variant)]
            mean_and_interval(ax, middle, row, "mean", shape)
        ax.set(title=safe(task), xlabel=label)
    low, high = zip(*(ax.get_xlim() for ax in axes), strict=True)
    for ax in axes:
        ax.set_xlim(min(low), max(high))
    keys = [
        Line2D([], [], color=MUTED, marker="o", markeredgecolor="white", lw=1.8, label="mean, 95 % interval"),
        Line2D([], [], color=MUTED, marker="o", lw=0, markersize=4, label="one seed"),
    ]
    legend(figure, keys)
    return figure


def _caption(what: str) -> str:
    return (
        f"{what} A dot a seed, each seed at the same height in every row; the bar is the mean with its 95 % t "
        "interval. Descriptive: no test was made."
    )


def _table(found: Findings, runs: pd.DataFrame, task: str) -> Table:
    own = runs[runs["task"] == task]
    shown = [name for name in COLUMNS if own[name].notna().any()]
    heads = [[COLUMNS[name], "95 % interval"] if name in WITH_INTERVAL else [COLUMNS[name]] for name in shown]
    rows = []
    for variant in variants_of(found.document):
        theirs = own[own["variant"] == variant]
        cells = [cell for name in shown for cell in _summary(theirs, name)]
        rows.append([Cell(variant), Cell(str(len(theirs))), *cells])
    return Table([f"on {task}", "seeds", *chain.from_iterable(heads)], rows, BASIS)


def _summary(runs: pd.DataFrame, name: str) -> list[Cell]:
    mean, low, high = summary_interval(runs[name])
    signed = name == GAP
    return [Cell(decimal(mean, signed=signed)), *[Cell(interval(low, high, signed=signed))] * (name in WITH_INTERVAL)]


def seen(found: Findings, runs: pd.DataFrame) -> str:
    """The gap and the calibration error, a task."""
    parts = []
    for name, said, signed in ((GAP, "generalisation gap", True), (CALIBRATION, "calibration error", False)):
        for task in found.document["tasks"]:
            means = runs[runs["task"] == task].groupby("variant")[name].mean().to_dict()
            if text := beside_baseline(means, found.document["baseline"], signed=signed):
                parts.append(f"{said} on {task} {text}")
    return "; ".join(parts)


CHAPTER = Chapter("generalisation", "Generalisation and calibration", measured, pictures, blocks, seen=seen)
