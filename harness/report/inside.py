"""The figures that look inside: attention maps, and the table of fixed position codes with its similarity curve."""

import io
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.report.figures import Picture
from harness.report.look import INK, MUTED, PAGE, safe
from harness.report.tables import Findings, records, variants_of

Floats = npt.NDArray[np.float64]

MAPS = 8  # across a page; a model with more heads shows each layer's mean over heads, with more layers the last ones
GAP, HEADING = 2, 3  # cells between two maps, above a strip
NOTHING = 2.0  # a weight that cannot be, drawn white
LEFT, RIGHT, BELOW = 0.75, 0.1, 0.95  # inches around the maps
REFERENCES = 3  # positions from which similarity is drawn


@dataclass(frozen=True)
class Maps:
    """Attention of one run on the probe: `weights` (layers, heads, T, T), rows are queries."""

    variant: str
    seed: int
    step: int
    weights: Floats
    labels: list[str]


def inside_pictures(found: Findings) -> Iterator[Picture]:
    """One figure of attention maps a task, then the position codes."""
    attention = found.data.attention
    for task in found.document["tasks"]:
        files = last_maps(attention[attention["task"] == task]) if len(attention) else attention
        picture = attention_picture(found, task, files)
        if picture is not None:
            yield picture
    codes = codes_picture(found)
    if codes is not None:
        yield codes


def last_maps(attention: pd.DataFrame) -> pd.DataFrame:
    """A row a variant: the last step of its first seed."""
    if attention.empty:
        return attention
    return attention.sort_values(["seed", "step"], ascending=[True, False]).drop_duplicates("variant")


def read_maps(row: dict[str, object]) -> Maps | None:
    """The maps in a file; None where the file is torn, which the caption then says."""
    try:
        with np.load(io.BytesIO(Path(str(row["path"])).read_bytes()), allow_pickle=False) as file:
            weights, labels = file["weights"].astype(np.float64), [str(label) for label in file["labels"]]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return Maps(str(row["variant"]), int(str(row["seed"])), int(str(row["step"])), weights, labels)


def attention_picture(found: Findings, task: str, files: pd.DataFrame) -> Picture | None:
    """A row a variant, a map a head."""
    if files.empty:
        return None
    rows = {str(row["variant"]): row for row in records(files)}
    read = {name: read_maps(rows[name]) for name in variants_of(found.document) if name in rows}
    maps = [each for each in read.values() if each is not None]
    if not maps:
        return None
    figure = attention_figure(maps)
    title = f"Attention on {task}"
    caption = _attention_caption(maps)
    torn = [name for name, each in read.items() if each is None]
    caption += f" Unreadable file: {', '.join(torn)}." if torn else ""
    return Picture(f"attention_{file_name(task)}", title, caption, figure, wide=True)


def file_name(name: str) -> str:
    """A user's name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "task"


def attention_figure(maps: list[Maps]) -> Figure:
    """A strip of maps a variant, all on one colour scale from 0 (pale) to 1 (dark).

    It is one image on one axes, in units of a map's cells: an axes a map, with ticks, takes seconds.
    """
    strips = [strip(each.weights) for each in maps]
    columns = max(image.shape[1] for image, _ in strips)
    tops = np.cumsum([0, *(len(image) + HEADING for image, _ in strips)])
    rows = int(tops[-1])
    sheet = np.full((rows, columns), NOTHING)
    for (image, _), top in zip(strips, tops, strict=False):
        sheet[top + HEADING : top + HEADING + len(image), : image.shape[1]] = image
    cell = (PAGE * 1.5 - LEFT - RIGHT) / columns  # inches
    height = rows * cell + BELOW
    figure = Figure(figsize=(PAGE * 1.5, height))
    ax = figure.add_axes((LEFT / (PAGE * 1.5), BELOW / height, columns * cell / (PAGE * 1.5), rows * cell / height))
    colours = sns.color_palette("rocket_r", as_cmap=True).with_extremes(bad="#d9dcdf", over="white")
    drawn = ax.imshow(sheet, cmap=colours, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    ax.set_axis_off()
    size = min(8.0, cell * 72 * 0.95)
    for place, (each, (_, titles), top) in enumerate(zip(maps, strips, tops, strict=False)):
        is_shared = place + 1 < len(maps) and maps[place + 1].labels == each.labels
        _label_strip(ax, each, titles, top + HEADING, size, keys=not is_shared)
    scale = figure.add_axes((0.36, 0.45 / height, 0.28, 0.09 / height))
    figure.colorbar(
        drawn, cax=scale, orientation="horizontal", label="attention weight (grey: tokens ahead, not visible)"
    )
    return figure


def _label_strip(ax: Axes, maps: Maps, titles: list[str], top: int, size: float, *, keys: bool) -> None:
    """Names of variant, maps and tokens around one strip, whose first row is `top`; `size` is the tokens' font size.

    Keys are named below a strip, unless the next one has the same.
    """
    length = len(maps.labels)
    for place, label in enumerate(maps.labels):
        ax.text(-0.8, top + place, safe(label), ha="right", va="center", fontsize=size)
    for index, title in enumerate(titles):
        start = index * (length + GAP)
        ax.text(start + length / 2 - 0.5, top - 0.9, title, ha="center", va="bottom", fontsize=7.5, color=MUTED)
        for place, label in enumerate(maps.labels if keys else []):
            ax.text(start + place, top + length - 0.2, safe(label), ha="center", va="top", rotation=90, fontsize=size)
    ax.text(
        -6,
        top + length / 2,
        safe(maps.variant),
        ha="center",
        va="center",
        rotation=90,
        fontsize=9.5,
        weight="bold",
        color=INK,
    )


def strip(weights: Floats) -> tuple[Floats, list[str]]:
    """Maps side by side with gaps, `(T, maps · (T + GAP) − GAP)`, and their titles; what is ahead of a query is NaN."""
    layers, heads, size, _ = weights.shape
    if layers * heads <= MAPS:
        shown = weights.reshape(-1, size, size)
        titles = [f"layer {layer + 1}, head {head + 1}" for layer in range(layers) for head in range(heads)]
    else:
        shown = weights.mean(axis=1)[-MAPS:]
        titles = [f"layer {layer + 1}, mean of {heads} heads" for layer in range(layers)][-MAPS:]
    ahead = np.triu(np.ones((size, size), dtype=bool), 1)
    if not np.nan_to_num(shown[:, ahead]).any():
        shown = np.where(ahead, np.nan, shown)
    gap = np.full((len(shown), size, GAP), NOTHING)
    return np.concatenate(list(np.concatenate([shown, gap], axis=2)), axis=1)[:, :-GAP], titles


def _attention_caption(maps: list[Maps]) -> str:
    seeds, steps = sorted({each.seed for each in maps}), sorted({each.step for each in maps})
    when = f"seed {seeds[0]}" if len(seeds) == 1 else "each variant's first seed"
    step = f"step {steps[0]}" if len(steps) == 1 else "its last recorded step"
    return (
        f"Attention weights on one fixed probe sequence, {when}, at {step}. A row of a map is the token that "
        "looks (query), a column the token looked at (key); a row sums to 1. Axes name the tokens of the "
        "sequence."
    )


def codes_picture(found: Findings) -> Picture | None:
    """The fixed position codes of the variants that add some: table on the left, similarity on the right."""
    tables = {name: found.data.codes[name] for name in variants_of(found.document) if name in found.data.codes}
    tables = {name: np.asarray(codes, dtype=np.float64) for name, codes in tables.items() if np.size(codes)}
    if not tables:
        return None
    figure = Figure(figsize=(PAGE, 0.35 + 2.45 * len(tables)), layout="constrained")
    axes = figure.subplots(len(tables), 2, squeeze=False, width_ratios=[1.25, 1])
    captions = []
    for (left, right), (name, codes) in zip(axes, tables.items(), strict=True):
        _code_table(figure, left, name, codes)
        _similarity(right, name, codes)
        captions.append(describe_codes(name, codes) if len(tables) > 1 else describe_codes("", codes))
    caption = (
        "Left: the number that each position adds to each dimension of the embedding; red is positive, blue "
        "negative, and the pale middle is zero. Right: cosine similarity between the codes of two "
        "positions, against their distance. "
    )
    return Picture("position_codes", "Fixed position codes", caption + " ".join(captions), figure)


def _code_table(figure: Figure, ax: Axes, name: str, codes: Floats) -> None:
    largest = float(np.nanmax(np.abs(codes))) or 1.0
    image = ax.imshow(codes, cmap="RdBu_r", vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest")
    bar = figure.colorbar(image, ax=ax, ticks=[-largest, 0, largest], pad=0.02)
    bar.ax.set_yticklabels([f"−{largest:.2g}", "0 (pale)", f"+{largest:.2g}"])
    low_first = changes(codes)
    label = "dimension"
    if low_first:
        label += " (left: high frequencies, right: low)" if low_first > 0 else " (left: low frequencies, right: high)"
    ax.set(title=safe(name), xlabel=label, ylabel="position")
    ax.grid(visible=False)


def _similarity(ax: Axes, name: str, codes: Floats) -> None:
    similar = similarity(codes)
    references = sorted({round(x) for x in np.linspace(0, len(codes) - 1, REFERENCES)})
    shades = sns.color_palette("viridis", REFERENCES + 1)
    for place, (shade, dashes) in enumerate(zip(shades, ("-", "--", ":"), strict=False)):
        if place < len(references):
            reference = references[place]
            ax.plot(
                np.arange(len(codes)) - reference,
                similar[reference],
                dashes,
                color=shade,
                label=f"from position {reference}",
            )
    ax.axhline(0, color=MUTED, lw=0.8)
    ax.set(
        title=f"{safe(name)}: similarity", xlabel="distance in positions", ylabel="cosine similarity", ylim=(None, 1.04)
    )
    ax.legend(fontsize=6.5, handlelength=1.8, loc="best")


def similarity(codes: Floats) -> Floats:
    """Cosine similarity of every two positions' codes, `(positions, positions)`."""
    norms = np.linalg.norm(codes, axis=1, keepdims=True)
    unit = codes / np.where(norms == 0, 1, norms)
    return unit @ unit.T


def changes(codes: Floats) -> int:
    """+1 if the lowest dimensions change fastest from position to position, −1 if the highest do, else 0."""
    if len(codes) < 2:
        return 0
    speed = np.abs(np.diff(codes, axis=0)).mean(axis=0)
    quarter = max(1, len(speed) // 4)
    low, high = speed[:quarter].mean(), speed[-quarter:].mean()
    return int(np.sign(low - high)) if abs(low - high) > 0.05 * max(low, high) else 0


def describe_codes(name: str, codes: Floats) -> str:
    """What the table shows, measured on the table itself."""
    similar = similarity(codes)
    parts = []
    order = changes(codes)
    if order > 0:
        parts.append(
            "low dimensions have the high frequencies and tell neighbours apart; high dimensions have the "
            "low frequencies and change slowly"
        )
    elif order < 0:
        parts.append("low dimensions have the low frequencies, high dimensions the high ones")
    if len(codes) > 1:
        parts.append("every position's code is unique" if _unique(codes) else "some positions share a code")
    if len(codes) > 2:
        neighbours, far = similar.diagonal(1).mean(), similar[0, -1]
        parts.append(
            f"neighbours have similarity {neighbours:.2f} on average, the first and the last position {far:.2f}"
        )
        if _depends_on_distance(similar):
            parts.append("similarity depends on the distance alone, so all curves lie on one")
    text = "; ".join(parts)
    return f"{name}: {text}." if name else f"{text[:1].upper()}{text[1:]}." if text else ""


def _unique(codes: Floats) -> bool:
    return len(np.unique(codes.round(6), axis=0)) == len(codes)


def _depends_on_distance(similar: Floats) -> bool:
    return all(np.ptp(similar.diagonal(k)) < 1e-3 for k in range(1, len(similar)))
