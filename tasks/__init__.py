"""Synthetic sequence tasks: vocabulary, vectorised batches, a pure-Python oracle; one task a file."""

from tasks.copy import Copy
from tasks.lengths import Lengths
from tasks.reverse import Reverse
from tasks.task import Batch, Task

__all__ = ["Batch", "Copy", "Lengths", "Reverse", "Task"]
