"""Chapters of the report that only some studies call for, a file each; a study gets those that find something."""

from harness.report.chapters import costs, generalisation, heads, routing
from harness.report.chapters.chapter import Chapter

CHAPTERS: tuple[Chapter, ...] = (generalisation.CHAPTER, costs.CHAPTER, routing.CHAPTER, heads.CHAPTER)
