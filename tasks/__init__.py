"""Synthetic sequence tasks: vocabulary, vectorised batches, a pure-Python oracle; one task a file."""

from tasks.addition import Addition
from tasks.associative_recall import AssociativeRecall
from tasks.copy import Copy
from tasks.lengths import Lengths
from tasks.repeat_token import RepeatToken
from tasks.retrieval import Retrieval
from tasks.reverse import Reverse
from tasks.sort import Sort
from tasks.task import Batch, SymbolTask, Task
from tasks.translate import BPE, Characters, Translate, Words

__all__ = [
    "BPE",
    "Addition",
    "AssociativeRecall",
    "Batch",
    "Characters",
    "Copy",
    "Lengths",
    "RepeatToken",
    "Retrieval",
    "Reverse",
    "Sort",
    "SymbolTask",
    "Task",
    "Translate",
    "Words",
]
