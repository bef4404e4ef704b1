"""Chapters of the report that only some studies call for, a file each; a study gets those that find something."""

import pandas as pd

from harness.report.chapters import costs, diagnosis, effects, generalisation, heads, reach, routing, stability
from harness.report.chapters.chapter import Chapter, Chapters
from harness.report.tables import Findings

CHAPTERS: tuple[Chapter, ...] = (
    stability.CHAPTER,
    effects.CHAPTER,
    generalisation.CHAPTER,
    reach.CHAPTER,
    costs.CHAPTER,
    routing.CHAPTER,
    heads.CHAPTER,
    diagnosis.CHAPTER,
)


def called_for(found: Findings) -> Chapters:
    """The chapters that a study gets, each with what it read."""
    return [(chapter, table) for chapter in CHAPTERS if not (table := chapter.read(found)).empty]


def seen(found: Findings, chapters: Chapters) -> pd.DataFrame:
    """What chapters show and no test covers: `chapter, finding`, a row a chapter that has a sentence for it."""
    said = [(chapter.name, chapter.seen(found, table)) for chapter, table in chapters]
    return pd.DataFrame([row for row in said if row[1]], columns=["chapter", "finding"])
