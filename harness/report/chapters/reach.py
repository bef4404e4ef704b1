"""Reach of the windows: whether retrieval fails where no path through the windows leads back to the asked value.

In a decoder a query sees its own token and the `window` − 1 before it, so L layers carry information over
L · (window − 1) tokens and no further. The value of the pair that stands `distance` pairs back lies 2 · distance tokens
before SEP, where the answer is predicted, and its key one token further: `c 3 a 7 d 1 a SEP` asks for the pair 2 back,
whose value 7 lies 4 tokens before SEP, its key a 5.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from harness.report.blocks import Block, Cell, Table
from harness.report.chapters.chapter import Chapter
from harness.report.figures import Picture, label_left
from harness.report.look import INK, MUTED, Style, key, legend, panels, styles
from harness.report.tables import Findings, field_of, variants_of
from harness.wording import ABSENT, decimal, metric_name, span

REACHED = (0, (4, 2))  # the dashes of the line at the reach
COLUMNS = ["variant", "task", "seed", "tokens", "reach", "score"]


def value_tokens_back(distance: int) -> int:
    """How many tokens before SEP the value of the pair stands that is `distance` pairs back; its key is one further."""
    return 2 * distance


def reach_of(document: dict[str, Any], variant: str) -> int | None:
    """Tokens back that information gets to a query through all layers; None: no limit known, or further than windows.

    Global and random tokens (Longformer, BigBird) and an encoder's output are ways around the windows.
    """
    alone = field_of(document, variant, "model.attention") == "SlidingWindow"
    if not alone or field_of(document, variant, "model.architecture") != "DecoderOnly":
        return None
    window = field_of(document, variant, "model.attention.window")
    return int(field_of(document, variant, "model.num_layers") * (window - 1))


def place(tokens: int, reach: int) -> str:
    """Where a pair lies whose value is so many tokens back."""
    if tokens + 1 <= reach:
        return "inside"
    return "value only" if tokens == reach else "outside"


def retrieved(found: Findings) -> pd.DataFrame:
    """A row a run that has a score on a retrieval task with a distance: variant, task, seed, tokens, reach, score.

    `tokens` is how far back the value lies, `reach` NaN where none is known, `score` the study's metric, mean over the
    test lengths (training lengths where there are none) of at least `distance` pairs: in shorter ones the value is
    nearer. No rows unless some variant's attention has a window.
    """
    document, data = found.document, found.data
    names, tasks = variants_of(document), document["spec"].get("tasks", {})
    if all(field_of(document, name, "model.attention.window") is None for name in names):
        return pd.DataFrame(columns=COLUMNS)
    rows = []
    scores = data.scores[data.scores["metric"] == data.metric]
    for (variant, task, seed), own in scores.groupby(["variant", "task", "seed"], sort=False):
        distance = _distance(document, str(variant), tasks.get(task, {}))
        split = "test" if document["test_lengths"].get(task) else "train"
        far = own[(own["split"] == split) & (own["length"] >= distance)] if distance else own.iloc[:0]
        if distance and not far.empty:
            tokens, reach = value_tokens_back(distance), reach_of(document, str(variant))
            rows.append((variant, task, seed, tokens, reach, far["value"].astype("float64").mean()))
    table = pd.DataFrame(rows, columns=COLUMNS).astype({"reach": "float64", "score": "float64"})
    return table.dropna(subset="score")


def _distance(document: dict[str, Any], variant: str, task: dict[str, Any]) -> int | None:
    """How many pairs back a task asks, where it is a retrieval and has a fixed distance."""
    changed = document["differences"].get(variant, {})
    kind = changed.get("task", task.get("kind"))
    distance = changed.get("task.distance", task.get("distance"))
    return distance if kind == "Retrieval" and isinstance(distance, int) else None


def pictures(found: Findings, table: pd.DataFrame) -> Iterator[Picture]:
    """The score against the distance in tokens, and for windows alone against the distance in reaches."""
    document = found.document
    look = styles(variants_of(document), document["baseline"])
    look = {name: shape for name, shape in look.items() if name in set(table["variant"])}
    bounded = table[table["reach"] > 0]
    figure, axes = panels(1 if bounded.empty else 2, height=2.7)
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    if table["score"].between(0, 1).all():
        axes[0].set_ylim(-0.03, 1.03)
    label_left(axes[0], metric_name(found.data.metric))
    _by_tokens(axes[0], table, look)
    if not bounded.empty:
        _by_reach(axes[1], bounded, look)
    keys: list[Line2D | Patch] = [key(name, shape) for name, shape in look.items()]
    keys.append(Line2D([], [], color=MUTED, marker="o", lw=0, markersize=3.5, label="one seed"))
    if not bounded.empty:
        keys.append(Line2D([], [], color=INK, lw=1, ls=REACHED, label="the reach"))
    legend(figure, keys, columns=3)
    yield Picture("reach", "Retrieval by distance and reach", _caption(found), figure)


def _by_tokens(ax: Axes, table: pd.DataFrame, look: dict[str, Style]) -> None:
    for index, (name, shape) in enumerate(look.items()):
        own = table[table["variant"] == name]
        apart = 2 ** (0.2 * (index / max(1, len(look) - 1) - 0.5))
        _line(ax, own["tokens"] * apart, own["score"], shape)
    distances = sorted(set(table["tokens"]))
    if len(distances) < 9:
        ax.set_xticks(distances)
    ax.set(title="all variants", xlabel="distance of the value (tokens)")


def _by_reach(ax: Axes, bounded: pd.DataFrame, look: dict[str, Style]) -> None:
    for name, own in bounded.groupby("variant", sort=False):
        shape = look[str(name)]
        _line(ax, own["tokens"] / own["reach"], own["score"], shape)
    ax.axvline(1, color=INK, lw=1, ls=REACHED, zorder=1)
    ax.set(title="windows alone", xlabel="distance of the value / (layers × (window − 1))")


def _line(ax: Axes, x: pd.Series, score: pd.Series, shape: Style) -> None:
    ax.scatter(x, score, s=13, color=shape.colour, alpha=0.45, lw=0, zorder=2, clip_on=False)
    means = score.groupby(x).mean()
    ax.plot(
        means.index, means, color=shape.colour, linestyle=shape.dash_pattern, marker=shape.marker, markersize=5,
        markeredgecolor="white", markeredgewidth=0.6, zorder=3, clip_on=False,
    )  # fmt: skip


def _caption(found: Findings) -> str:
    return (
        f"Mean {metric_name(found.data.metric)} over the lengths that have so many pairs: a dot a seed, a line through "
        "the means; left, variants stand a little apart. The answer is predicted at SEP, and the value that is asked "
        "for stands two tokens before it for each pair that one goes back, its key one token further. In a decoder a "
        "query sees window − 1 tokens back, so that nothing further back than layers × (window − 1) tokens, the dashed "
        "line at 1, can reach the answer: right of it a model can only guess. At 1 itself the value is in reach and "
        "its key is not. Attention without a window, or with global or random tokens besides, has no such limit and "
        "stands on the left only. Descriptive: no test was made."
    )


def blocks(found: Findings, table: pd.DataFrame) -> list[Block]:
    """A row a variant, a column a distance: the mean score, and whether the value was in reach."""
    distances = sorted(set(table["tokens"]))
    means = table.groupby(["variant", "tokens"])["score"].mean()
    rows = []
    for name in variants_of(found.document):
        reach = reach_of(found.document, name)
        cells = [_cell(means.get((name, tokens)), tokens, reach) for tokens in distances]
        rows.append([Cell(name), Cell(ABSENT if reach is None else str(reach)), *cells])
    seeds = table.groupby(["variant", "task"])["seed"].nunique().tolist()
    caption = (
        f"Mean {metric_name(found.data.metric)} over {span(seeds)} seeds. reach: layers × (window − 1) tokens; a dash "
        "where attention is not limited to windows. inside: value and key are within reach. value only: the key is one "
        "token too far. outside: the value is, too. Descriptive: no test was made."
    )
    return [Table(["variant", "reach", *(f"{t} tokens back" for t in distances)], rows, caption)]


def _cell(mean: float | None, tokens: int, reach: int | None) -> Cell:
    if mean is None:
        return Cell(ABSENT)
    where = "" if reach is None else place(tokens, reach)
    return Cell(f"{decimal(mean)}, {where}".removesuffix(", "), "marked" if where == "outside" else "")


def seen(found: Findings, table: pd.DataFrame) -> str:
    """The score within and beyond reach, of attention that is limited to windows."""
    bounded = table.dropna(subset="reach")
    where = [place(tokens, reach) for tokens, reach in zip(bounded["tokens"], bounded["reach"], strict=True)]
    means = bounded.groupby(pd.Series(where, index=bounded.index, dtype=object))["score"].mean()
    said = {"inside": "within reach", "value only": "with the value alone in reach", "outside": "beyond reach"}
    parts = [f"{decimal(means[name], 2)} {words}" for name, words in said.items() if name in means.index]
    return f"of windows alone, mean {metric_name(found.data.metric)} {', '.join(parts)}" if parts else ""


CHAPTER = Chapter("reach", "Reach of the windows", retrieved, pictures, blocks, seen=seen)
