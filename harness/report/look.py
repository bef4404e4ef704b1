"""How figures look: sizes for a paper's column, one colour, marker and line style a variant, drawable text."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import seaborn as sns
from matplotlib import font_manager, style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

COLUMN = 3.5  # inches: one column of a two-column paper
PAGE = 7.1  # both columns
KEY, LETTER = 0.5, 0.06  # inches: a legend's line with the gaps beside it, a letter of its text
LINE, LINES = 0.17, 3  # inches of a legend's line of entries; as many lines as a figure has room for from the start
INK, MUTED, FAINT = "#1a1a1a", "#6b6b6b", "#e9ecef"

RC: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so that figures look the same everywhere
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 8,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e3e5e8",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",  # text in the vector copies stays text
    "svg.hashsalt": "harness",  # the same figure has the same bytes
    "savefig.facecolor": "white",
}

# seaborn's colour-blind safe palette, neighbours far apart, without its grey and yellow, which fade on white.
ORDER = (0, 1, 2, 4, 9, 3, 5)
MARKERS = ("s", "^", "D", "v", ">", "<", "p", "h")
DASHES: tuple[tuple[float, ...], ...] = ((4, 1.2), (1.2, 1), (5, 1.2, 1.2, 1.2), (2.5, 1), (6, 2), (3, 1, 1, 1, 1, 1))

_drawing = threading.Lock()


@dataclass(frozen=True)
class Style:
    """How one variant is drawn in every figure; `dashes` is empty for a solid line."""

    colour: str
    marker: str
    dashes: tuple[float, ...]

    @property
    def dash_pattern(self) -> Any:
        """matplotlib's own form of the dashes."""
        return (0, self.dashes) if self.dashes else "-"


def styles(variants: Sequence[str], baseline: str) -> dict[str, Style]:
    """A style a variant, by its place in the study: the baseline dark, solid and round."""
    palette = sns.color_palette("colorblind").as_hex()
    found = {baseline: Style(INK, "o", ())}
    for index, variant in enumerate(name for name in variants if name != baseline):
        found[variant] = Style(
            palette[ORDER[index % len(ORDER)]], MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)]
        )
    return found


@contextmanager
def drawing() -> Iterator[None]:
    """Our settings, whatever the user's matplotlibrc says; a thread at a time, as matplotlib's settings are global."""
    with _drawing, style.context(["default", RC]):
        yield


@cache
def _glyphs() -> frozenset[int]:
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    return frozenset(font.get_charmap())


def safe(text: str) -> str:
    """A user's text for a figure: no mathematics, no glyph that the font lacks, no leading underscore."""
    drawable = "".join(c if ord(c) in _glyphs() else "□" for c in text).replace("$", r"\$")
    return f" {drawable}" if drawable.startswith("_") else drawable


def panels(count: int, height: float = 2.5, *, share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure with a panel a task, two to a row; `height` in inches a row."""
    columns = min(2, count)
    rows = -(-count // columns)
    width = PAGE if columns == 2 else COLUMN * 1.35
    figure = Figure(figsize=(width, height * rows + 0.5))
    figure.set_layout_engine("constrained", h_pad=0.08)  # inches: the titles of the first row keep their tops
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def legend(figure: Figure, handles: Sequence[Line2D | Patch], columns: int | None = None) -> None:
    """One legend under all panels, in no more columns than the figure holds of its longest label; the figure grows
    with it, so that many entries do not press the panels flat.
    """
    wide = figure.get_figwidth() > COLUMN * 1.5
    columns = columns if wide or columns is None else min(columns, 2)
    longest = max((len(str(handle.get_label())) for handle in handles), default=0)
    room = max(1, int(figure.get_figwidth() / (KEY + LETTER * longest)))
    columns = min(room, columns or min(len(handles), 6 if wide else 3))
    lines = -(-len(handles) // max(1, columns))
    figure.set_figheight(figure.get_figheight() + LINE * max(0, lines - LINES))
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=columns,
        handlelength=2.6,
        columnspacing=1.3,
    )


def key(name: str, shape: Style, *, marker: bool = True) -> Line2D:
    """A variant's entry in a legend."""
    return Line2D(
        [], [], color=shape.colour, marker=shape.marker if marker else "", markersize=5, markeredgecolor="white",
        markeredgewidth=0.6, linestyle=shape.dash_pattern, label=safe(name),
    )  # fmt: skip
