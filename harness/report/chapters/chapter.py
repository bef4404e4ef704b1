"""What a chapter is."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from harness.report.blocks import Block
from harness.report.figures import Picture
from harness.report.tables import Findings


def _nothing(found: Findings, table: pd.DataFrame) -> str:
    """For a chapter that answers no question in a sentence."""
    return ""


@dataclass(frozen=True)
class Chapter:
    """A section that only some studies call for: those in which it finds something.

    Attributes:
        name: what its pictures' names begin with.
        title: its heading.
        read: the table that it tells of, read once a report; without rows there is no such chapter.
        pictures: its figures from that table, one after the other, so that each can be saved and let go.
        blocks: its tables and sentences from it, which follow the figures.
        leads: whether it stands before accuracy.
        seen: what it shows in one short clause, which no test covers; empty where there is nothing to say.
    """

    name: str
    title: str
    read: Callable[[Findings], pd.DataFrame]
    pictures: Callable[[Findings, pd.DataFrame], Iterator[Picture]]
    blocks: Callable[[Findings, pd.DataFrame], Sequence[Block]]
    leads: bool = False
    seen: Callable[[Findings, pd.DataFrame], str] = _nothing


Chapters = list[tuple[Chapter, pd.DataFrame]]  # those of a study, each with what it has read
