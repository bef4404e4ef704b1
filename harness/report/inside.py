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
from harness.wording import decimal

Floats = npt.NDArray[np.float64]

MAPS = 8  # at most so many maps side by side
ROOM = 9  # tokens from which on a map is wide enough for its whole title
MOST_HEADS = 12  # a model with more shows each layer's mean over heads
WIDTH, SMALLEST, LARGEST = PAGE * 1.5, 0.05, 0.08  # inches: a figure, a map's cells
FOOT = 0.95  # inches below the maps, for the colour bar
GAP, HEADING, NAME, BESIDE, BELOW = 2, 3, 4, 5, 5  # cells: between maps, above a map, above, beside, below a block
NOTHING = 2.0  # a weight that cannot be, drawn white
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
    """A block a variant, a map a head."""
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
    """A block of maps a variant, all on one colour scale from 0 (pale) to 1 (dark).

    It is one image on one axes, in units of a map's cells: an axes a map, with ticks, takes seconds.
    """
    size = max(each.weights.shape[-1] for each in maps)
    blocks = [block(each.weights, maps_across(size)) for each in maps]
    per_line = min(len(maps), max(1, maps_across(size) // max(drawn.columns for drawn in blocks)))
    shared = all(each.labels == maps[0].labels for each in maps)
    height = max(len(drawn.image) for drawn in blocks) + NAME + (0 if shared else BELOW)
    width = max(drawn.image.shape[1] for drawn in blocks) + BESIDE
    lines = -(-len(maps) // per_line)
    sheet = np.full((lines * height + BELOW, per_line * width + GAP), NOTHING)
    corners = [(place // per_line * height + NAME, place % per_line * width + BESIDE) for place in range(len(maps))]
    for drawn, (top, left) in zip(blocks, corners, strict=True):
        sheet[top : top + drawn.image.shape[0], left : left + drawn.image.shape[1]] = drawn.image
    figure, ax, cell = _draw_sheet(sheet)
    for place, (each, drawn, corner) in enumerate(zip(maps, blocks, corners, strict=True)):
        is_last = place + per_line >= len(maps)
        _label_block(
            ax, each, drawn, corner, cell, queries=not shared or place % per_line == 0, keys=not shared or is_last
        )
    return figure


def maps_across(size: int) -> int:
    """How many maps of `size` tokens fit side by side."""
    return int(min(MAPS, max(1, WIDTH / SMALLEST // (size + GAP))))


@dataclass(frozen=True)
class MapBlock:
    """The maps of one variant as one image, `columns` across; `places` has each map's row, column and title."""

    image: Floats
    columns: int
    places: list[tuple[int, int, str]]


def block(weights: Floats, across: int) -> MapBlock:
    """A row a layer, a column a head; in models too large for that, one row with each layer's mean over heads.

    What is ahead of a query becomes NaN.
    """
    layers, heads, size, _ = weights.shape
    if heads <= across and layers * heads <= MOST_HEADS:
        grid = weights
        title = "layer {}, head {}" if size >= ROOM else "L{} H{}"
        titles = [[title.format(layer + 1, head + 1) for head in range(heads)] for layer in range(layers)]
    else:
        grid = weights.mean(axis=1)[None, -across:]
        titles = [[f"layer {layer + 1}, mean of {heads} heads" for layer in range(layers)][-across:]]
    ahead = np.triu(np.ones((size, size), dtype=bool), 1)
    if not np.nan_to_num(grid[..., ahead]).any():
        grid = np.where(ahead, np.nan, grid)
    rows, columns = grid.shape[:2]
    image = np.full((rows * (size + HEADING), columns * (size + GAP)), NOTHING)
    places = []
    for row in range(rows):
        for column in range(columns):
            top, left = row * (size + HEADING) + HEADING, column * (size + GAP)
            image[top : top + size, left : left + size] = grid[row, column]
            places.append((top, left, titles[row][column]))
    return MapBlock(image, columns, places)


def _draw_sheet(sheet: Floats) -> tuple[Figure, Axes, float]:
    """The sheet with its colour bar; also the size of a cell in inches."""
    rows, columns = sheet.shape
    cell = min(LARGEST, WIDTH / columns)
    width, height = columns * cell, rows * cell + FOOT
    figure = Figure(figsize=(width, height))
    ax = figure.add_axes((0, FOOT / height, 1, rows * cell / height))
    colours = sns.color_palette("rocket_r", as_cmap=True).with_extremes(bad="#d9dcdf", over="white")
    image = ax.imshow(sheet, cmap=colours, vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    ax.set_axis_off()
    scale = figure.add_axes((0.5 - 1.5 / width, 0.45 / height, 3 / width, 0.09 / height))
    label = "attention weight (grey: tokens ahead)"
    figure.colorbar(image, cax=scale, orientation="horizontal", label=label)
    return figure, ax, cell


def _label_block(
    ax: Axes, maps: Maps, drawn: MapBlock, corner: tuple[int, int], cell: float, *, queries: bool, keys: bool
) -> None:
    """Names of variant, maps and tokens; queries stand left of the first column of maps, keys below the last row."""
    top, left = corner
    labels = [safe(label[:6]) for label in maps.labels]
    size, small = len(labels), min(8.0, cell * 72 * 0.95)
    ax.text(left - 0.5, top - 0.5, safe(maps.variant), ha="left", va="bottom", fontsize=9.5, weight="bold", color=INK)
    last = drawn.places[-1][0]
    for row, column, title in drawn.places:
        y, x = top + row, left + column
        ax.text(x - 0.5, y - 0.8, title, ha="left", va="bottom", fontsize=7, color=MUTED)
        for place, label in enumerate(labels if queries and column == 0 else []):
            ax.text(x - 0.9, y + place, label, ha="right", va="center", fontsize=small)
        for place, label in enumerate(labels if keys and row == last else []):
            ax.text(x + place, y + size - 0.2, label, ha="center", va="top", rotation=90, fontsize=small)


def _attention_caption(maps: list[Maps]) -> str:
    seeds, steps = sorted({each.seed for each in maps}), sorted({each.step for each in maps})
    when = f"seed {seeds[0]}" if len(seeds) == 1 else "each variant's first seed"
    step = f"step {steps[0]}" if len(steps) == 1 else "its last recorded step"
    return (
        f"Attention weights on one fixed probe sequence, {when}, at {step}. A row of a map is the token that "
        "looks (query), a column the token looked at (key). A row of a softmax sums to 1, zero also where a window "
        "hides the token. Of an encoder-decoder the decoder's own attention is shown. Axes name the tokens."
    )


def codes_picture(found: Findings) -> Picture | None:
    """The fixed position codes of the variants that add some: table on the left, similarity on the right."""
    tables = {name: found.data.codes[name] for name in variants_of(found.document) if name in found.data.codes}
    distinct = {codes.tobytes(): (name, codes) for name, codes in reversed(tables.items()) if np.size(codes)}
    tables = {name: np.asarray(codes, dtype=np.float64) for name, codes in reversed(distinct.values())}  # each once
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
            f"neighbours have similarity {decimal(neighbours, 2)} on average, "
            f"the first and the last position {decimal(far, 2)}"
        )
        if _depends_on_distance(similar):
            parts.append("similarity depends on the distance alone, so all curves lie on one")
    text = "; ".join(parts)
    return f"{name}: {text}." if name else f"{text[:1].upper()}{text[1:]}." if text else ""


def _unique(codes: Floats) -> bool:
    return len(np.unique(codes.round(6), axis=0)) == len(codes)


def _depends_on_distance(similar: Floats) -> bool:
    return all(np.ptp(similar.diagonal(k)) < 1e-3 for k in range(1, len(similar)))
