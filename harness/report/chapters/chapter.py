"""What a chapter is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from harness.report.blocks import Block
from harness.report.figures import Picture
from harness.report.tables import Findings


@dataclass(frozen=True)
class Chapter:
    """A section that only some studies call for: where it has nothing to say, it yields nothing.

    Attributes:
        name: what its pictures' names begin with.
        title: its heading.
        pictures: its figures, one after the other, so that each can be saved and let go.
        blocks: its tables and sentences, which follow the figures.
        leads: whether it stands before accuracy.
    """

    name: str
    title: str
    pictures: Callable[[Findings], Iterator[Picture]]
    blocks: Callable[[Findings], Sequence[Block]]
    leads: bool = False
