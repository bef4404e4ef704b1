"""A known-good model learns every task at some setting of its dial, well within a study's quick budget."""

import pytest

import tasks
from ablations.baseline import brief, core
from harness import RunSpec, run
from tasks import (
    Addition,
    AssociativeRecall,
    Copy,
    Lengths,
    RepeatToken,
    Retrieval,
    Reverse,
    Sort,
    SymbolTask,
    Task,
    Translate,
)

SOLVED = [
    Copy(lengths=Lengths(train=(1, 6), test=())),
    Reverse(lengths=Lengths(train=(1, 6), test=())),
    RepeatToken(lengths=Lengths(train=(1, 8), test=())),
    Sort(lengths=Lengths(train=(1, 4), test=()), num_symbols=8),
    Retrieval(lengths=Lengths(train=(1, 2), test=()), num_symbols=4),
    Retrieval(lengths=Lengths(train=(8, 8), test=()), distance=7),
    AssociativeRecall(lengths=Lengths(train=(1, 2), test=()), num_symbols=4),
    Addition(lengths=Lengths(train=(1, 2), test=()), num_symbols=4, reversed_digits=True),
    Translate(lengths=Lengths(train=(1, 3), test=())),
]


def test_every_task_is_here() -> None:
    kinds = {getattr(tasks, name) for name in tasks.__all__}
    wanted = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Task)} - {Task, SymbolTask}
    assert {type(task) for task in SOLVED} == wanted


@pytest.mark.slow
@pytest.mark.parametrize("task", SOLVED, ids=lambda task: f"{task.kind}-{task.vocab_size}")
def test_a_known_good_model_learns_the_task(task: Task) -> None:
    record = run(RunSpec(model=core, task=task, train=brief.replace("steps", 1200)))
    assert record.final["eval/in_distribution"] >= 0.98
