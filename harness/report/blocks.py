"""What the page is made of: paragraphs, lists, tables and pictures, which HTML and Markdown both show."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.wording import ABSENT

NUMERIC = re.compile(rf"^({ABSENT}|\[?([<≥≤≈] )?[+−]?[\d∞].*)$")


@dataclass(frozen=True)
class Cell:
    """A table's cell; `tone` is a verdict or `marked`, which only changes its looks."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Items:
    """A list."""

    items: Sequence[str]
    kind: str = "items"


@dataclass(frozen=True)
class Table:
    """A table; `folded` ones are opened by a click."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    folded: str = ""
    kind: str = "table"

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, and so stand flush right; names may begin with one, too."""
        return [
            i > 0 and name != "variant" and all(NUMERIC.match(row[i].text) for row in self.rows)
            for i, name in enumerate(self.columns)
        ]


@dataclass(frozen=True)
class Image:
    """A picture as it stands in the page: `data` is its PNG in base64, `files` its names under figures/."""

    title: str
    caption: str
    data: str
    files: Sequence[str]
    wide: bool = False
    kind: str = "image"


Block = Text | Items | Table | Image


@dataclass(frozen=True)
class Section:
    """A heading with its blocks."""

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """The heading's address in the page."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Page:
    """The whole report."""

    title: str
    question: str
    answer: tuple[str, str]
    seen: str
    state: str
    glance: Table | None
    sections: Sequence[Section]
