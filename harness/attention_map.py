"""Attention weights as a picture that can be read: a panel a head, token names along both edges, one colour scale.

Colours are lightness steps of one hue, so that they survive colour blindness and print. The scale is a square root:
attention spread over twenty tokens (.05 each) would look white on a linear one. What a causal query cannot see is grey,
not white, so that "may not look" and "does not look" differ.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]

PANELS_A_ROW = 4
WIDTH = 1600  # pixels that a row of panels is fitted into, while cells stay visible
CELL = (3, 16)  # smallest and largest edge of a cell, in pixels
TEXT, HEADING = 12, 15
GAP = 18
TICKS = (0.0, 0.05, 0.25, 0.5, 1.0)

# One byte a pixel: greys for text and paper first, then shades for weights. A third of the bytes of a colour picture,
# and a quarter of the time to encode it.
GREYS, SHADES = 64, 192
INK, GRID, FUTURE, PAPER = 7, 50, 56, 63
# Weights 0, ¼, ½, ¾, 1 after the square root: white to dark blue.
HUES = np.array([(255, 255, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 34, 92)])


class _Layout(NamedTuple):
    """Pixels: edge of a cell, edge of a panel, room for token names (left and below) and for a heading."""

    cell: int
    panel: int
    margin: int
    heading: int

    @property
    def pitch(self) -> tuple[int, int]:
        """Distance from panel to panel, across and down."""
        return self.margin + self.panel + GAP, self.heading + self.panel + self.margin + GAP


def render(weights: NDArray[np.floating], labels: NDArray[np.str_] | list[str], title: str = "") -> Pixels:
    """The picture of `draw` as `(H, W, 3)` pixels."""
    return np.asarray(draw(weights, labels, title).convert("RGB"))


def draw(weights: NDArray[np.floating], labels: NDArray[np.str_] | list[str], title: str = "") -> Image.Image:
    """A picture of all heads of all layers, with a palette.

    Args:
        weights: `(layers, heads, T, T)`, rows are queries, each row of a softmax sums to 1 over the keys that the
        query sees.
        labels: the T tokens' names.
        title: a line above everything.

    Returns:
        Layers from top to bottom, heads from left to right, at most four a row.

    Raises:
        ValueError: the shapes do not fit.
    """
    layers, heads, length = weights.shape[:3]
    if weights.shape != (layers, heads, length, length) or len(labels) != length:
        raise ValueError(f"weights {weights.shape} and {len(labels)} labels do not fit (layers, heads, T, T) and T")
    names = [str(label) for label in labels]
    columns = min(heads, PANELS_A_ROW)
    layout = _layout(length, columns, names)
    across, down = layout.pitch
    rows = layers * -(-heads // columns)
    top = _height(HEADING) + 2 * GAP if title else GAP
    legend = _height(TEXT) * 3 + GAP
    width = max(columns * across + GAP, _legend_width() + 2 * GAP, int(_font(HEADING).getlength(title)) + 2 * GAP)
    image = Image.new("L", (width, top + rows * down + legend), PAPER)
    ImageDraw.Draw(image).text((GAP, GAP), title, INK, _font(HEADING))
    for layer in range(layers):
        for head in range(heads):
            row = layer * -(-heads // columns) + head // columns
            corner = (GAP // 2 + head % columns * across, top + row * down)
            _panel(image, corner, layout, weights[layer, head], names, f"layer {layer + 1} · head {head + 1}")
    _legend(image, (GAP, top + rows * down))
    image.putpalette(_palette())
    return image


@cache
def _palette() -> bytes:
    """`GREYS` from black to white, then `SHADES` from weight 0 to 1."""
    greys = np.repeat(np.linspace(0, 255, GREYS)[:, None], 3, axis=1)
    at = np.linspace(0, 1, SHADES)
    shades = np.stack([np.interp(at, np.linspace(0, 1, len(HUES)), HUES[:, channel]) for channel in range(3)], axis=1)
    return np.concatenate([greys, shades]).round().astype(np.uint8).tobytes()


def _layout(length: int, columns: int, names: list[str]) -> _Layout:
    margin = max(int(_font(TEXT).getlength(name)) for name in names) + 8
    fitting = ((WIDTH - GAP) // columns - GAP - margin) // length
    cell = min(max(fitting, CELL[0]), CELL[1])
    return _Layout(cell, cell * length + 1, margin, _height(TEXT) + 6)


def _panel(
    image: Image.Image,
    corner: tuple[int, int],
    layout: _Layout,
    weights: NDArray[np.floating],
    names: list[str],
    heading: str,
) -> None:
    """One head: heading, cells, query names at the left, key names below."""
    pen = ImageDraw.Draw(image)
    left, top = corner[0] + layout.margin, corner[1] + layout.heading
    pen.text((left, corner[1]), heading, INK, _font(TEXT))
    cells = Image.fromarray(_cells(weights))
    edge = layout.panel - 1
    image.paste(cells.resize((edge, edge), Image.Resampling.NEAREST), (left, top))
    pen.rectangle((left - 1, top - 1, left + edge, top + edge), outline=GRID)
    for index in _shown(names, -(-_height(TEXT) // layout.cell)):
        middle = index * layout.cell + layout.cell // 2
        pen.text((left - 5, top + middle), names[index], INK, _font(TEXT), anchor="rm")
        _paste_upright(image, names[index], (left + middle, top + edge + 4))


def _shown(names: list[str], distance: int) -> list[int]:
    """Tokens whose names are drawn: at least `distance` cells apart, special tokens before numbered symbols."""
    shown: list[int] = []
    for index in sorted(range(len(names)), key=lambda i: (names[i].isdigit(), i)):
        if all(abs(index - other) >= distance for other in shown):
            shown.append(index)
    return shown


def _paste_upright(image: Image.Image, text: str, place: tuple[int, int]) -> None:
    """Text below `place`, centred on it: as it is if it is as narrow as a cell, else turned to read upwards."""
    picture = _upright(text)
    image.paste(picture, (place[0] - picture.width // 2, place[1]))


@cache
def _upright(text: str) -> Image.Image:
    width = int(_font(TEXT).getlength(text)) + 2
    picture = Image.new("L", (width, _height(TEXT)), PAPER)
    ImageDraw.Draw(picture).text((1, _height(TEXT) // 2), text, INK, _font(TEXT), anchor="lm")
    return picture if width <= CELL[1] else picture.rotate(90, expand=True)


def _cells(weights: NDArray[np.floating]) -> Pixels:
    """`(T, T)` weights as palette entries; above the diagonal grey where nothing is seen."""
    cells = _shade(np.sqrt(np.clip(np.nan_to_num(np.asarray(weights, dtype=float)), 0, 1)))
    future = np.triu(np.ones(cells.shape, dtype=bool), 1)
    if not np.any(weights[future]):
        cells[future] = FUTURE
    return cells


def _shade(level: NDArray[np.floating]) -> Pixels:
    return (GREYS + np.round(level * (SHADES - 1))).astype(np.uint8)


def _legend(image: Image.Image, corner: tuple[int, int]) -> None:
    """What rows and columns are, and the colour scale with its ticks."""
    pen = ImageDraw.Draw(image)
    left, top = corner
    pen.text((left, top), _READING, INK, _font(TEXT))
    bar_left, bar_top, length = left, top + _height(TEXT) + 8, 240
    ramp = _shade(np.broadcast_to(np.linspace(0, 1, length), (_height(TEXT), length)))
    image.paste(Image.fromarray(ramp), (bar_left, bar_top))
    pen.rectangle((bar_left - 1, bar_top - 1, bar_left + length, bar_top + _height(TEXT)), outline=GRID)
    for tick in TICKS:
        place = (bar_left + tick**0.5 * (length - 1), bar_top + _height(TEXT) + 3)
        pen.text(place, f"{tick:g}", INK, _font(TEXT), anchor="mt")
    pen.text((bar_left + length + 14, bar_top), "attention weight", INK, _font(TEXT))


_READING = "row: the token that looks (query) · column: the token looked at (key) · grey: not yet visible"


def _legend_width() -> int:
    return int(_font(TEXT).getlength(_READING))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)  # type: ignore[return-value]  # with a size it is FreeType's


@cache
def _height(size: int) -> int:
    ascent, descent = _font(size).getmetrics()
    return ascent + descent
