"""Chapters of the report that only some studies call for, a file each; a study gets those that find something."""

from harness.report.chapters.chapter import Chapter
from harness.report.chapters.reach import REACH
from harness.report.chapters.stability import STABILITY

CHAPTERS: tuple[Chapter, ...] = (STABILITY, REACH)
