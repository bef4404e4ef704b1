"""Cost by length: what a model of each variant costs as its sequences grow, counted when the study was planned."""

from collections.abc import Iterator, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from harness.report.blocks import Block, Cell, Table, Text
from harness.report.chapters.chapter import Chapter
from harness.report.figures import Look, Picture
from harness.report.look import PAGE, key, legend, styles
from harness.report.tables import Findings, records, reference_of, variants_of, versus
from harness.schema import quoted
from harness.wording import listed, quantity, whole

SHOWN = (1024, 16_384)  # tokens at which the table stands
PANELS = {  # column of costs.csv -> title, unit
    "score_elements": ("score matrices", "numbers a sequence"),
    "cache_bytes": ("cache of keys and values", "bytes a sequence"),
    "flops_per_token_forward": ("forward pass", "FLOPs a token"),
}


def costs_of(found: Findings) -> pd.DataFrame:
    """The costs of a study that counted them."""
    return found.data.costs


def pictures(found: Findings, costs: pd.DataFrame) -> Iterator[Picture]:
    """The three costs against length, a line a variant."""
    look = styles(variants_of(found.document), found.document["baseline"])
    look = {name: style for name, style in look.items() if name in set(costs["variant"])}
    figure = Figure(figsize=(PAGE, 2.7 + 0.11 * len(look)), layout="constrained")
    for ax, column in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        _panel(ax, costs, column, look)
    legend(figure, [key(name, look[name]) for name in look], columns=4)
    yield Picture("costs", "Cost by length", _caption(costs, look), figure)


def _panel(ax: Axes, costs: pd.DataFrame, column: str, look: Look) -> None:
    for place, (name, shape) in enumerate(look.items()):
        own = costs[(costs["variant"] == name) & (costs[column] > 0)]
        ax.plot(
            own["tokens"], own[column], color=shape.colour, linestyle=shape.dash_pattern, marker=shape.marker,
            markersize=4.5, markeredgecolor="white", markeredgewidth=0.5, lw=2.2 if place == 0 else 1.4,
            # Markers take turns, so that lines on top of each other can still be told apart.
            markevery=(place % max(1, len(own)), min(len(look), max(1, len(own)))),
        )  # fmt: skip
    title, unit = PANELS[column]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = sorted(costs["tokens"].unique())
    ax.set_xticks(lengths, [f"{length // 1024} k" if length >= 1024 else f"{length}" for length in lengths])
    drawn = costs.loc[costs[column] > 0, column]
    wide = drawn.empty or drawn.max() > 100 * drawn.min()
    ax.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
    ax.yaxis.set_major_formatter(lambda value, _: quantity(value))
    ax.minorticks_off()
    ax.set(title=title, xlabel="tokens", ylabel=unit)


def _caption(costs: pd.DataFrame, look: Look) -> str:
    parts = ["Counted for one sequence, all layers and heads. Both scales are logarithmic, markers take turns."]
    for column, (title, _) in PANELS.items():
        curves: dict[tuple[float, ...], list[str]] = {}
        for name in look:
            curves.setdefault(tuple(costs.loc[costs["variant"] == name, column]), []).append(name)
        same = [names for curve, names in curves.items() if len(names) > 1 and any(curve)]
        none = [name for curve, names in curves.items() if not any(curve) for name in names]
        if same:
            groups = ["all variants" if len(names) == len(look) else listed([*map(quoted, names)]) for names in same]
            parts.append(f"One line in {title}: {'; '.join(groups)}.")
        if none:
            parts.append(f"Zero in {title}, and so not drawn: {listed([*map(quoted, none)])}.")
    return " ".join(parts)


def blocks(found: Findings, costs: pd.DataFrame) -> Sequence[Block]:
    """The costs at two lengths, beside those of what each variant is compared with."""
    document = found.document
    at = {(row["variant"], row["tokens"]): row for row in records(costs)}
    rows = []
    for name in variants_of(document):
        for tokens in SHOWN:
            own = at.get((name, tokens))
            if own is not None:
                base = None if name == document["baseline"] else at.get((reference_of(document, name), tokens))
                sizes = [whole(own[column]) for column in ("parameters", "active_parameters")]
                counted = (_cost(own, base, column) for column in PANELS)
                rows.append([Cell(cell) for cell in (versus(document, name), whole(tokens), *sizes, *counted)])
    precision = "bf16" if document["device"] == "cuda" else "fp32"
    caption = (
        "×: how many times the cost of the baseline, or of what is named in brackets. Score matrices of full attention "
        "have T² numbers a head and layer; fused kernels compute them in tiles and store none. The cache holds what "
        f"decoding keeps, in {precision}. FLOPs count attention in full, a multiply-add as two. Active parameters are "
        "those that one token meets."
    )
    columns = ["variant", "tokens", "parameters", "active", *(f"{title}, {unit}" for title, unit in PANELS.values())]
    said = (
        "These costs are counted on the model of the first task, not measured, and a kernel may be far from them: "
        "results/reference/bench-attention has measured times and memory of every attention variant."
    )
    if unknown := [quoted(name) for name in variants_of(document) if name not in set(costs["variant"])]:
        said += f" Not counted, as counting raised an error: {listed(unknown)}."
    return [*([Table(columns, rows, caption)] if rows else []), Text(said)]


def _cost(own: dict[str, float], base: dict[str, float] | None, column: str) -> str:
    amount = quantity(own[column])
    return f"{amount} (× {own[column] / base[column]:.3g})" if base is not None and base[column] else amount


CHAPTER = Chapter("costs", "Cost by length", costs_of, pictures, blocks)
