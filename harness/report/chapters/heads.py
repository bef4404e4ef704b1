"""Heads: how widely each spreads its attention, and which simple role it plays (claim E08)."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.report.blocks import Block, Cell, Items, Table, Text
from harness.report.chapters.chapter import Chapter
from harness.report.figures import Picture, mean_and_interval, rows_figure
from harness.report.inside import Maps, file_name, read_maps
from harness.report.look import MUTED, PAGE, legend, safe, styles
from harness.report.tables import Findings, records, variants_of
from harness.schema import is_within
from harness.stats import summary_interval
from harness.wording import decimal, interval

Floats = npt.NDArray[np.float64]

AXES = (
    "model.num_heads", "model.d_head", "model.scale", "model.qk_norm", "model.output_projection", "model.attention",
    "model.init", "model.attention_dropout",
)  # fmt: skip
ROLES = {  # in this order a key is given to one of them
    "itself": "the token that looks; where nothing ahead is seen, the last one visible",
    "previous": "the token before it",
    "first": "the first token of the sequence",
    "next": "the token after it, where tokens ahead are seen",
    "last": "the last token of the sequence, where tokens ahead are seen",
    "separator": "a SEP token elsewhere",
    "same": "an equal token elsewhere",
    "induction": "the token that followed an earlier equal token",
}
SPREAD = "spread"
SPECIAL = ("PAD", "BOS", "SEP", "EOS")
START = 2  # the third token: up to the second, the previous token is the first
COLUMNS = 48  # layers × heads that a panel of the heat map shows one by one
TITLE = {2: 44, 3: 26}  # letters that fit above a panel, by panels across

MEANING = (
    "Means over seeds, at the last snapshot of each run on one fixed probe sequence. Spread: entropy of a "
    "token's attention over its largest value, the logarithm of the number of tokens it can see (in a causal "
    "model token i, from 0, sees i + 1), mean over tokens and heads, without the first token; tokens a window "
    "hides count as seen; 1 is uniform. Strongest role: of each head the role that has most of its attention, "
    "mean over heads. A role's column: the share of the head that plays it most, mean over the tokens that have "
    "such a token to look at, from the third token on. A token counts for one role only, the first that fits in "
    "this order. A dash: the probe has no such token. A map says where a head looks, not what it uses. "
    "Descriptive: no test was made."
)


def role_keys(labels: Sequence[str], *, causal: bool) -> dict[str, npt.NDArray[np.bool_]]:
    """Which keys count for which role, `(T, T)` a role, rows are queries: a key counts once, for the first role that
    fits, and only where it can be seen. Queries before the third token count nowhere.
    """
    size = len(labels)
    query, key = np.arange(size)[:, None], np.arange(size)[None, :]
    equal = np.array([[a == b and a not in SPECIAL for b in labels] for a in labels], dtype=bool).reshape(size, size)
    after_equal = np.zeros_like(equal)
    after_equal[:, 1:] = equal[:, :-1] & (key[:, :-1] < query)
    fits = {
        "itself": query == key,
        "previous": key == query - 1,
        "first": np.broadcast_to(key == 0, equal.shape),
        "next": (key == query + 1) & (not causal),
        "last": np.broadcast_to((key == size - 1) & (not causal), equal.shape),
        "separator": np.broadcast_to(np.array([label == "SEP" for label in labels], dtype=bool), equal.shape),
        "same": equal,
        "induction": after_equal,
    }
    free = (key <= query if causal else np.ones_like(equal)) & (query >= START)
    taken = {}
    for role, keys in fits.items():
        taken[role] = keys & free
        free = free & ~keys
    return taken


def head_scores(maps: Maps) -> pd.DataFrame:
    """A row a head: layer, head, each role's score, and `spread`.

    A role's score is the share of a query's attention that its keys get, mean over the queries that have such keys; NaN
    where none has. `spread` is the entropy of a query's attention over its largest value, the logarithm of the number
    of tokens it can see (i + 1 at the i-th from 0 where nothing ahead is seen, else T), mean over the queries from the
    second on: 1 is uniform, 0 is one key.
    """
    real = np.array([label != "PAD" for label in maps.labels], dtype=bool)
    labels = [label for label in maps.labels if label != "PAD"]
    weights = maps.weights[:, :, real][..., real]
    causal = not np.nan_to_num(weights[..., np.triu(np.ones(weights.shape[-2:], dtype=bool), 1)]).any()
    sums = weights.sum(-1, keepdims=True)
    weights = weights / np.where(sums > 0, sums, np.nan)
    keys = role_keys(labels, causal=causal)
    scores = {role: _share(weights, keys[role]) for role in ROLES} | {SPREAD: _spread(weights, causal=causal)}
    layers, heads = weights.shape[:2]
    places = {"layer": np.repeat(np.arange(layers) + 1, heads), "head": np.tile(np.arange(heads) + 1, layers)}
    return pd.DataFrame(places | {name: values.ravel() for name, values in scores.items()})


def _share(weights: Floats, keys: npt.NDArray[np.bool_]) -> Floats:
    """`(layers, heads)` attention on the keys, mean over the queries that have any."""
    rows = keys.any(-1)
    return _mean((weights * keys).sum(-1)[..., rows])


def _spread(weights: Floats, *, causal: bool) -> Floats:
    """`(layers, heads)` relative entropy."""
    size = weights.shape[-1]
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)[..., 1:]
    seen = np.arange(2, size + 1) if causal else np.full(max(0, size - 1), size)
    return _mean(entropy / np.log(seen))


def _mean(values: Floats) -> Floats:
    """Over the last axis, NaN left out; NaN where nothing is left."""
    count = np.isfinite(values).sum(-1)
    return np.where(count > 0, np.nansum(values, -1) / np.maximum(count, 1), np.nan)


def all_heads(found: Findings) -> pd.DataFrame:
    """`variant, task, seed, layer, head`, each role and `spread` at the last snapshot of every run; empty where the
    study's axes do not shape heads. Files that are torn are left out, and heads whose weights are not finite.
    """
    columns = ["variant", "task", "seed", "layer", "head", *ROLES, SPREAD]
    axes = found.document["axes"]
    attention = found.data.attention
    if attention.empty or not any(is_within(axis, AXES) for axis in axes):
        return pd.DataFrame(columns=columns)
    last = attention.sort_values("step").drop_duplicates(["variant", "task", "seed"], keep="last")
    rows = [
        head_scores(maps).assign(variant=row["variant"], task=row["task"], seed=row["seed"])
        for row in records(last)
        if (maps := read_maps(row)) is not None and maps.weights.shape[-1] > 1
    ]
    return pd.concat(rows, ignore_index=True).dropna(subset=[SPREAD]) if rows else pd.DataFrame(columns=columns)


def pictures(found: Findings, heads: pd.DataFrame) -> Iterator[Picture]:
    """Every head's spread; then a map of roles a task."""
    yield _spread_picture(found, heads)
    for task in found.document["tasks"]:
        own = heads[heads["task"] == task]
        if len(own):
            yield _roles_picture(found, task, own)


def _spread_picture(found: Findings, heads: pd.DataFrame) -> Picture:
    document = found.document
    look = styles(variants_of(document), document["baseline"])
    names = [name for name in look if name in set(heads["variant"])]
    tasks = [task for task in document["tasks"] if task in set(heads["task"])]
    figure, axes = rows_figure(len(tasks), names)
    for ax, task in zip(axes, tasks, strict=True):
        for row, name in enumerate(names):
            own = heads[(heads["task"] == task) & (heads["variant"] == name)].sort_values(["layer", "seed", "head"])
            heights = row + np.linspace(-0.36, 0.14, len(own))
            ax.scatter(own[SPREAD], heights, s=9, color=look[name].colour, alpha=0.55, linewidths=0, clip_on=False)
            mean_and_interval(ax, _seed_summary(own), row, "mean", look[name])
        ax.set_xlim(-0.02, 1.02)
        ax.set(title=safe(task), xlabel="entropy of attention / its largest value")
    keys = [
        Line2D([], [], lw=0, color=MUTED, marker="o", markersize=3.5, label="one head of one seed"),
        Line2D([], [], lw=1.8, color=MUTED, marker="o", markeredgecolor="white", label="mean, 95 % interval"),
    ]
    legend(figure, keys)
    caption = (
        "How widely each head spreads its attention on the probe sequence at the last snapshot, 1 is uniform, 0 is one "
        "token: a dot a head and seed, the first layer's on top. Descriptive: no test was made."
    )
    return Picture("heads_spread", "Spread of attention", caption, figure)


def _seed_summary(own: pd.DataFrame) -> pd.DataFrame:
    """One row: `mean, low, high` of the seeds' mean spread."""
    return pd.DataFrame([summary_interval(own.groupby("seed")[SPREAD].mean())], columns=["mean", "low", "high"])


def _roles_picture(found: Findings, task: str, heads: pd.DataFrame) -> Picture:
    names = [name for name in variants_of(found.document) if name in set(heads["variant"])]
    shown = [role for role in (*ROLES, SPREAD) if heads[role].notna().any()]
    first = {name: _first_seed(heads[heads["variant"] == name]) for name in names}
    longest = max(len(name) for name in names)
    across = 2 if max(len(table) for table in first.values()) > 16 or len(names) < 3 or longest > TITLE[3] else 3
    lines = -(-len(names) // across)
    figure = Figure(figsize=(PAGE, 0.8 + lines * (0.62 + 0.15 * len(shown))), layout="constrained")
    axes = list(figure.subplots(lines, across, squeeze=False).flat)
    for spare in axes[len(names) :]:
        spare.remove()
    colours = sns.color_palette("rocket_r", as_cmap=True).with_extremes(bad="#d9dcdf")
    image = None
    for place, (ax, (name, table)) in enumerate(zip(axes, first.items(), strict=False)):
        image = ax.imshow(table[shown].to_numpy(dtype=float).T, cmap=colours, vmin=0, vmax=1, aspect="auto")
        ax.set_yticks(range(len(shown)), shown if place % across == 0 else [])
        _label_heads(ax, table)
        ax.set_title(safe(name), fontsize=8.5 * min(1, TITLE[across] / longest))
        ax.grid(visible=False)
        ax.tick_params(length=0)
    assert image is not None
    figure.colorbar(
        image, ax=axes[: len(names)], location="bottom", shrink=0.4, aspect=40, pad=0.02, label="share of attention"
    )
    seeds = sorted({int(table["seed"].iloc[0]) for table in first.values()})
    when = f"seed {seeds[0]}" if len(seeds) == 1 else "each variant's first seed"
    reduced = any("of" in table.columns for table in first.values())
    caption = (
        f"What each head attends to on the probe sequence at the last snapshot, {when}: a column a head, layer by layer"
        + (" (of models with many heads a column a layer, with the head that has most of each role)" * reduced)
        + ", a row a role. Spread is entropy over its largest value. Grey: the probe has no such token."
    )
    return Picture(f"heads_{file_name(task)}", f"Roles of the heads on {task}", caption, figure)


def _first_seed(own: pd.DataFrame) -> pd.DataFrame:
    """The heads of the first seed; where they are too many, the largest score a layer (then `of` counts its heads)."""
    table = own[own["seed"] == own["seed"].min()].sort_values(["layer", "head"])
    if len(table) <= COLUMNS:
        return table
    layers = table.groupby("layer")
    return layers[[*ROLES, SPREAD, "seed"]].max().reset_index().assign(of=layers.size().to_numpy())


def _label_heads(ax: Any, table: pd.DataFrame) -> None:
    """White lines between layers, whose names stand in the middle of their columns."""
    layers = table["layer"].to_numpy()
    starts = np.flatnonzero(np.diff(layers, prepend=layers[0] - 1))
    ends = np.append(starts[1:], len(layers))
    step = max(1, math.ceil(len(starts) / 12))
    middles = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    word = "layer " if len(starts) <= 3 else ""
    ax.set_xticks(middles[::step], [f"{word}{layers[start]}" for start in starts[::step]])
    if len(starts) > 3:
        ax.set_xlabel("layer")
    for start in starts[1:]:
        ax.axvline(start - 0.5, color="white", lw=2)


def blocks(found: Findings, heads: pd.DataFrame) -> Sequence[Block]:
    """A table a task, and what its words mean."""
    tables = [_table(found, task, heads[heads["task"] == task]) for task in found.document["tasks"]]
    meanings = [f"{role}: {what}" for role, what in ROLES.items() if heads[role].notna().any()]
    return [*(table for table in tables if table.rows), Text(MEANING), Items(meanings)]


def _table(found: Findings, task: str, heads: pd.DataFrame) -> Table:
    rows = []
    for name in variants_of(found.document):
        own = heads[heads["variant"] == name]
        if own.empty:
            continue
        seeds = own.groupby("seed")
        spread, low, high = _seed_summary(own).iloc[0]
        strongest = own[list(ROLES)].max(axis=1).groupby(own["seed"]).mean()
        best = seeds[list(ROLES)].max().mean()
        between = interval(low, high, 2, signed=False)
        cells = [name, str(len(seeds)), decimal(spread, 2), between, decimal(strongest.mean(), 2)]
        rows.append([Cell(cell) for cell in (*cells, *(decimal(best[role], 2) for role in ROLES))])
    return Table([f"on {task}", "seeds", SPREAD, "95 % interval", "strongest role", *ROLES], rows)


CHAPTER = Chapter("heads", "Heads", all_heads, pictures, blocks)
