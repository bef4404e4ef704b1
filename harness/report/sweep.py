"""What a sweep found, for people: the score against each field, what trained stably, importances, costs, a front.

Sees DataFrames and plain data only; a row of `table` is a setting that was tried.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.record import write_atomically
from harness.report import save
from harness.report.figures import Picture, label_left
from harness.report.look import COLUMN, INK, MUTED, Style, drawing, key, legend, panels, safe, styles
from harness.schema import quoted
from harness.wording import ABSENT, counted, decimal, is_known, listed, markdown, metric_name, quantity, seconds

RATE = "train.learning_rate"
BINS = 8  # of a range, in each of which the best setting is a point of the curve
COST_NAMES = {"flops": "training FLOPs of a run", "parameters": "parameters"}
EDGE_COLOUR = "#a63c06"


def write_sweep(
    folder: Path, document: dict[str, Any], table: pd.DataFrame, answer: dict[str, Any], importances: pd.DataFrame
) -> None:
    """Write `stable.csv`, `budgets.csv`, `importances.csv`, with several objectives `pareto.csv`, `figures/` and
    `summary.md` into a sweep's folder, over earlier ones.
    """
    tables = {"budgets": budgets(document, table), "importances": importances}
    if RATE in document["fields"]:
        tables["stable"] = stable_rates(document, table)
    if document["costs"]:
        tables["pareto"] = pareto(document, table)
    for name, found in tables.items():
        write_atomically(folder / f"{name}.csv", found.to_csv(index=False))
    (folder / "figures").mkdir(exist_ok=True)
    with drawing():
        images = [save(picture, folder / "figures", publish=False) for picture in _pictures(document, table, answer,
                                                                                          tables)]  # fmt: skip
    shown = [(image.title, image.caption, image.files[0]) for image in images]
    write_atomically(folder / "summary.md", summary(document, answer, tables, shown))


# Tables


def is_counted(table: pd.DataFrame) -> "pd.Series[bool]":
    """Which settings are part of the budget."""
    return ~table["status"].isin(("interrupted", "running"))


def budgets(document: Mapping[str, Any], table: pd.DataFrame) -> pd.DataFrame:
    """What each variant had: settings tried, how they ended, how many were known before, steps, seconds, FLOPs (those
    of settings that were given up by the steps of the others).
    """
    rows = []
    for variant in document["variants"]:
        own = table[table["variant"] == variant]
        tried = own[is_counted(own)]
        ended = tried["status"].value_counts()
        row: dict[str, Any] = {"variant": variant, "tried": len(tried)}
        row |= {status: int(ended.get(status, 0)) for status in ENDINGS}
        row["reused"] = int(tried["same_as"].notna().sum())
        row["interrupted"] = int((own["status"] == "interrupted").sum())
        row |= {"steps": tried["steps"].sum(), "seconds": tried["seconds"].sum()}
        row["flops"] = tried["steps"].sum() * _flops_a_step(document, tried)
        rows.append(row)
    return pd.DataFrame(rows)


ENDINGS = ("finished", "pruned", "diverged", "failed", "out_of_memory")


def _flops_a_step(document: Mapping[str, Any], tried: pd.DataFrame) -> float:
    """Of the settings that ran to the end; `flops` is the mean over a setting's runs."""
    whole = tried[(tried["status"] == "finished") & tried["flops"].notna() & tried["same_as"].isna()]
    runs = len(document["seeds"]) * len(document["tasks"])
    return float(whole["flops"].sum() * runs / whole["steps"].sum()) if len(whole) else math.nan


def stable_rates(document: Mapping[str, Any], table: pd.DataFrame) -> pd.DataFrame:
    """The largest learning rate up to which no setting diverged (`stable`), the smallest at which one did (NaN: none,
    so that `stable` is a lower bound), the largest at which one trained to the end, and learned the training lengths.
    """
    rows = []
    for variant in document["variants"]:
        own = table[(table["variant"] == variant) & table["status"].isin(("finished", "diverged"))]
        trained = own[own["status"] == "finished"]
        lowest = own.loc[own["status"] == "diverged", RATE].min()
        below = trained[RATE] if math.isnan(lowest) else trained.loc[trained[RATE] < lowest, RATE]
        learned = trained.loc[trained["in_distribution"] >= document["gate"], RATE]
        rows.append((variant, below.max(), lowest, trained[RATE].max(), learned.max()))
    return pd.DataFrame(rows, columns=["variant", "stable", "smallest_diverged", "largest_trained", "largest_learned"])


def pareto(document: Mapping[str, Any], table: pd.DataFrame) -> pd.DataFrame:
    """The settings of each variant that no other of the same variant beats in score and in every cost at once."""
    front = table[table["front"] & table["same_as"].isna()]
    columns = ["variant", *document["fields"], "score", *document["costs"], "loss"]
    return front[columns].sort_values(["variant", document["costs"][0]]).reset_index(drop=True)


# Figures


def _pictures(
    document: dict[str, Any], table: pd.DataFrame, answer: dict[str, Any], tables: dict[str, pd.DataFrame]
) -> Iterator[Picture]:
    look = styles(document["variants"], document["baseline"])
    ranges = [path for path, field in document["fields"].items() if field["kind"] != "Choice"]
    for path in ranges:
        yield sensitivity(document, table, answer, path)
    if tables["importances"]["importance"].notna().any():
        yield importance(document, tables["importances"], look)
    for cost in document["costs"]:
        yield front(document, table, cost, look)


def sensitivity(document: Mapping[str, Any], table: pd.DataFrame, answer: Mapping[str, Any], path: str) -> Picture:
    """The score of every setting against one field, a panel a variant, its best marked."""
    variants, field = document["variants"], document["fields"][path]
    figure, axes = panels(len(variants), height=2.0)
    for ax, variant in zip(axes, variants, strict=True):
        own = table[table["variant"] == variant]
        _settings(ax, own, path)
        _curve(ax, own, path, field, higher=document["higher_is_better"])
        _optimum(ax, answer["variants"][variant], path)
        _range(ax, field)
        ax.set(title=safe(variant), xlabel=path.rpartition(".")[2].replace("_", " "), ylim=(-0.06, 1.06))
        label_left(ax, metric_name(document["score"]))
    legend(figure, _sensitivity_keys(table), columns=3)
    name = path.rpartition(".")[2]
    higher = "largest" if document["higher_is_better"] else "smallest"
    caption = (
        f"A point a setting, mean over {counted(len(document['seeds']), 'pilot seed')} and "
        f"{counted(len(document['tasks']), 'task')}; other fields vary with it. The line joins the {higher} scores in "
        f"{BINS} parts of the range. Grey marks at the bottom were given up early, crosses at the top diverged or "
        f"failed. A red star lies on the edge of the space: better values may lie beyond it."
    )
    return Picture(f"sensitivity_{name}", f"Sensitivity to {name.replace('_', ' ')}", caption, figure)


def _settings(ax: Axes, own: pd.DataFrame, path: str) -> None:
    scored = own[own["status"] == "finished"]
    ax.scatter(scored[path], scored["score"], s=13, color=INK, alpha=0.45, lw=0, zorder=3)
    pruned = own[own["status"] == "pruned"]
    ax.scatter(pruned[path], np.full(len(pruned), -0.03), marker="|", s=26, color=MUTED, lw=0.9, zorder=2)
    lost = own[own["status"].isin(("diverged", "failed", "out_of_memory"))]
    ax.scatter(lost[path], np.full(len(lost), 1.03), marker="x", s=20, color=EDGE_COLOUR, lw=1.1, zorder=4)


def _curve(ax: Axes, own: pd.DataFrame, path: str, field: Mapping[str, Any], *, higher: bool) -> None:
    """Through the best setting of each part of the range."""
    scored = own[(own["status"] == "finished") & own["score"].notna()]
    if scored.empty:
        return
    scale = np.log if field["log"] else np.asarray
    low, high = scale(field["low"]), scale(field["high"])
    part = np.clip(((scale(scored[path].to_numpy(dtype=float)) - low) / (high - low) * BINS).astype(int), 0, BINS - 1)
    groups = scored.groupby(part)["score"]
    best = scored.loc[groups.idxmax() if higher else groups.idxmin()].sort_values(path)
    ax.plot(best[path], best["score"], color="#01579b", lw=1.4, zorder=2.5)


def _optimum(ax: Axes, found: Mapping[str, Any], path: str) -> None:
    if found["changes"] is None:
        return
    on_edge = path in found["edges"]
    colour = EDGE_COLOUR if on_edge else "#01579b"
    ax.scatter([found["changes"][path]], [found["score"]], marker="*", s=110, color=colour, edgecolor="white", lw=0.6,
               zorder=5, clip_on=False)  # fmt: skip
    said = f"{found['changes'][path]:.2g}" + (" (edge)" if on_edge else "")
    ax.annotate(said, (0.98, 0.5), xycoords="axes fraction", ha="right", va="center", fontsize=7, color=colour)


def _range(ax: Axes, field: Mapping[str, Any]) -> None:
    if field["log"]:
        ax.set_xscale("log")
        room = (field["high"] / field["low"]) ** 0.03
        ax.set_xlim(field["low"] / room, field["high"] * room)
    else:
        room = 0.03 * (field["high"] - field["low"])
        ax.set_xlim(field["low"] - room, field["high"] + room)


def _sensitivity_keys(table: pd.DataFrame) -> list[Line2D]:
    known = set(table["status"])
    found = [
        Line2D([], [], color=INK, alpha=0.45, marker="o", ls="", markersize=4, label="one setting"),
        Line2D([], [], color="#01579b", lw=1.4, label="best of a part"),
        Line2D([], [], color="#01579b", marker="*", ls="", markersize=9, label="optimum"),
    ]
    if "pruned" in known:
        found.append(Line2D([], [], color=MUTED, marker="|", ls="", markersize=6, label="given up early"))
    if known & {"diverged", "failed", "out_of_memory"}:
        found.append(Line2D([], [], color=EDGE_COLOUR, marker="x", ls="", markersize=5, label="diverged or failed"))
    return found


def importance(document: Mapping[str, Any], importances: pd.DataFrame, look: Mapping[str, Style]) -> Picture:
    """How much each field explains, with its interval, a marker a variant."""
    figure, (ax,) = panels(1, height=1.2 + 0.28 * len(document["fields"]) * max(1, len(look) / 3))
    fields = list(document["fields"])
    for place, (variant, shape) in enumerate(look.items()):
        own = importances[(importances["variant"] == variant) & importances["importance"].notna()]
        heights = [fields.index(name) + (place - (len(look) - 1) / 2) * 0.7 / len(look) for name in own["field"]]
        ax.hlines(heights, own["low"], own["high"], color=shape.colour, linestyle=shape.dash_pattern, lw=1.2)
        ax.scatter(own["importance"], heights, marker=shape.marker, s=24, color=shape.colour, edgecolor="white", lw=0.5,
                   zorder=3)  # fmt: skip
    ax.axvline(1 / len(fields), color=MUTED, lw=0.8, ls=":")
    ax.set(xlim=(-0.02, 1.02), xlabel="importance", yticks=range(len(fields)), ylim=(len(fields) - 0.5, -0.5))
    ax.set_yticklabels([safe(name.rpartition(".")[2].replace("_", " ")) for name in fields])
    ax.grid(axis="y", visible=False)
    legend(figure, [key(name, shape) for name, shape in look.items()])
    caption = (
        "Share of what tells the better quarter of settings from the rest that each field explains (PED-ANOVA), mean "
        "and 90 % interval over resampled settings. Dotted: what each would have if all mattered alike. A variant "
        "without a marker has too few settings with a score."
    )
    return Picture("importance", "Importance of the fields", caption, figure)


def front(document: Mapping[str, Any], table: pd.DataFrame, cost: str, look: Mapping[str, Style]) -> Picture:
    """Score against a cost, each variant's Pareto front as a line."""
    figure, (ax,) = panels(1, height=2.8)
    figure.set_figwidth(COLUMN * 1.6)
    for variant, shape in look.items():
        own = table[(table["variant"] == variant) & table["score"].notna() & table[cost].notna()]
        ax.scatter(own[cost], own["score"], marker=shape.marker, s=14, color=shape.colour, alpha=0.3, lw=0)
        best = own[own["front"]].sort_values([cost, "score"])
        ax.plot(best[cost], best["score"], color=shape.colour, linestyle=shape.dash_pattern, marker=shape.marker,
                markersize=5, markeredgecolor="white", markeredgewidth=0.6, drawstyle="steps-post")  # fmt: skip
    if table[cost].notna().any() and table[cost].max() > 3 * table[cost].min():
        ax.set_xscale("log")
    ax.set(xlabel=COST_NAMES[cost], ylabel=metric_name(document["score"]), ylim=(-0.03, 1.03))
    legend(figure, [key(name, shape) for name, shape in look.items()])
    others = (
        f" Fronts are of all objectives ({listed(['score', *document['costs']])})." if document["costs"][1:] else ""
    )
    caption = f"Faint: every setting. Joined: those that no other of the variant beats in both.{others}"
    return Picture(f"pareto_{cost}", f"Score against {COST_NAMES[cost]}", caption, figure)


# Text


def summary(
    document: Mapping[str, Any],
    answer: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame],
    images: list[tuple[str, str, str]],
) -> str:
    """`summary.md`."""
    done = all(each["tried"] == document["asked"] for each in answer["variants"].values())
    lines = [f"# Sweep of {markdown(document['study'])}", ""]
    if not done:
        lines += ["Preliminary: not every variant has had its budget; run the sweep again to finish it.", ""]
    lines += [
        f"{counted(document['asked'], 'setting')} of {listed([f'`{path}`' for path in document['fields']])} for each "
        f"variant ({document['sampler']}{', successive halving' if document['pruning'] else ''}), judged by "
        f"{metric_name(document['score'])} on pilot seeds {document['seeds'][0]}–{document['seeds'][-1]} and samples "
        f"that no final comparison uses; budget “{document['budget']}”, {document['device']}. The score of the best "
        f"of many settings is flattered by the choice: only `harness ablate {document['study']} --tuned`, on other "
        f"seeds and samples, compares the variants.",
        "",
        "## The tuned settings",
        "",
        *_as_markdown(_settings_table(document, answer)),
        *warnings_of(answer),
        "",
        "## Budgets",
        "",
        *_as_markdown(_budgets_table(tables["budgets"])),
    ]
    if "stable" in tables:
        lines += ["## Largest stable learning rate", "", *_as_markdown(_stable_table(tables["stable"])),
                  "Stable: no setting with this or a lower rate diverged. ≥: none diverged at all.", ""]  # fmt: skip
    if "pareto" in tables:
        lines += ["## Pareto front", "", *_as_markdown(_front_table(document, tables["pareto"]))]
    if tables["importances"]["importance"].notna().any():
        lines += ["## Importance", "", *_as_markdown(_importance_table(tables["importances"]))]
    for title, caption, file in images:
        lines += [f"## {title}", "", f"![{title}]({file})", "", caption, ""]
    return "\n".join(lines) + "\n"


def warnings_of(answer: Mapping[str, Any]) -> list[str]:
    """A sentence for each optimum on the edge of the space, and for each variant without one."""
    found = []
    for variant, each in answer["variants"].items():
        if each["changes"] is None:
            found.append(f"Warning: no setting of {quoted(variant)} has trained to the end.")
        for path, end in each["edges"].items():
            value = answer["fields"][path][end]
            found.append(
                f"Warning: the best {path} of {quoted(variant)}, {each['changes'][path]:.3g}, lies on the {end} edge "
                f"of the space ({value:.3g}): better ones may lie beyond; widen space.fields and sweep again."
            )
    return found


def _settings_table(document: Mapping[str, Any], answer: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for variant, each in answer["variants"].items():
        values = [_shown(each["changes"][path]) if each["changes"] else ABSENT for path in document["fields"]]
        rows.append([variant, *values, decimal(each["score"]), decimal(each["loss"])])
    return ["variant", *document["fields"], metric_name(document["score"]), "loss at training lengths"], rows


def _budgets_table(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    columns = ["variant", "tried", *ENDINGS, "reused", "interrupted", "steps", "time", "FLOPs"]
    rows = [
        [str(row["variant"]), *(str(row[name]) for name in columns[1:-3]), quantity(row["steps"]),
         seconds(row["seconds"]), quantity(row["flops"])]
        for row in found.to_dict("records")
    ]  # fmt: skip
    return [name.replace("_", " ") for name in columns], rows


def _stable_table(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = []
    for row in found.to_dict("records"):
        bound = "≥ " if is_known(row["stable"]) and not is_known(row["smallest_diverged"]) else ""
        rest = (row["smallest_diverged"], row["largest_trained"], row["largest_learned"])
        rows.append([str(row["variant"]), bound + _shown(row["stable"]), *map(_shown, rest)])
    return ["variant", "stable", "smallest that diverged", "largest that trained", "largest that learned"], rows


def _front_table(document: Mapping[str, Any], found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = [
        [str(row["variant"]), *(_shown(row[path]) for path in document["fields"]), decimal(row["score"]),
         *(quantity(row[cost]) for cost in document["costs"])]
        for row in found.to_dict("records")
    ]  # fmt: skip
    return ["variant", *document["fields"], metric_name(document["score"]), *document["costs"]], rows


def _importance_table(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    rows = [
        [str(row["variant"]), str(row["field"]), decimal(row["importance"], 2),
         f"{decimal(row['low'], 2)}–{decimal(row['high'], 2)}", str(row["settings"])]
        for row in found.to_dict("records")
    ]  # fmt: skip
    return ["variant", "field", "importance", "90 % interval", "settings"], rows


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if is_known(value) else ABSENT
    return str(value) if is_known(value) else ABSENT


def _as_markdown(table: tuple[list[str], list[list[str]]]) -> list[str]:
    columns, rows = table
    lines = [columns, ["---"] * len(columns), *([markdown(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]
