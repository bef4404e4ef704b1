"""Chapters of the report that only some studies call for, a file each; a study gets those that find something."""

from harness.report.chapters import costs, generalisation, heads, reach, routing, stability
from harness.report.chapters.chapter import Chapter

CHAPTERS: tuple[Chapter, ...] = (
    stability.CHAPTER,
    generalisation.CHAPTER,
    reach.CHAPTER,
    costs.CHAPTER,
    routing.CHAPTER,
    heads.CHAPTER,
)
