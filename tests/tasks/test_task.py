"""What holds for every task: layout, purity, independent streams, uniform draws."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.schema import UserError
from tasks import Batch, Copy, Lengths, Reverse, SymbolTask, Task
from tasks.task import BOS, EOS, FIRST_SYMBOL, IGNORED, PAD, SEP, padded

CPU = torch.device("cpu")
TASKS: list[Task] = [Copy(), Reverse()]  # whose sources are plain; test_every_task.py has the laws of all
STREAMS = ("train", "eval", "monitor", "finite", "probe")


def named(task: Task) -> str:
    return task.kind


def same(one: Batch, other: Batch) -> bool:
    return torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)


# --- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [type(task) for task in TASKS], ids=lambda kind: kind.__name__)
@given(
    length=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    symbols=st.integers(2, 30),
    end=st.booleans(),
    step=st.integers(0),
)
def test_a_batch_is_laid_out_as_its_oracle_says(
    kind: type[Task], length: int, batch_size: int, symbols: int, end: bool, step: int
) -> None:
    task = kind(num_symbols=symbols, train_end_token=end)
    batch = task.batch(0, "train", step, batch_size, length, CPU)
    assert batch.inputs.shape == batch.targets.shape == (batch_size, task.tokens(length))
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    for read, wanted in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        source = read[1 : length + 1]
        answer = task.oracle(source)
        assert read == [BOS, *source, SEP, *answer]
        assert wanted == [IGNORED] * (length + 1) + [*answer, EOS if end else IGNORED]
        assert all(FIRST_SYMBOL <= token < task.vocab_size == FIRST_SYMBOL + symbols for token in source)


@pytest.mark.parametrize("task", TASKS, ids=named)
def test_tokens_have_names(task: Task) -> None:
    assert [task.label(token) for token in range(6)] == ["PAD", "BOS", "SEP", "EOS", "0", "1"]
    assert len({task.label(token) for token in range(task.vocab_size)}) == task.vocab_size


def test_special_tokens_are_four_different_ones() -> None:
    assert sorted({PAD, BOS, SEP, EOS}) == [0, 1, 2, 3]
    assert FIRST_SYMBOL == 4


@pytest.mark.parametrize("symbols", [0, 1, -3])
def test_a_task_needs_two_symbols(symbols: int) -> None:
    with pytest.raises(UserError, match="greater than or equal to 2"):
        Copy(num_symbols=symbols)


@given(st.integers(2, 5), st.integers(1, 5))
def test_the_space_is_the_number_of_different_sources(symbols: int, length: int) -> None:
    assert Copy(num_symbols=symbols).space(length) == len(list(itertools.product(range(symbols), repeat=length)))


# --- purity ----------------------------------------------------------------------------------------------------------

arguments = st.tuples(st.integers(0, 2**40), st.sampled_from(STREAMS), st.integers(0, 2**20), st.integers(6, 12))


@given(arguments)
def test_a_batch_is_a_pure_function_of_its_arguments(arguments: tuple[int, str, int, int]) -> None:
    seed, stream, step, length = arguments
    first = Copy().batch(seed, stream, step, 4, length, CPU)
    torch.manual_seed(step % 1000)
    Copy().batch(seed, stream, step + 1, 4, length, CPU)
    assert same(Copy().batch(seed, stream, step, 4, length, CPU), first)


@given(arguments)
def test_each_argument_gives_other_samples(arguments: tuple[int, str, int, int]) -> None:
    seed, stream, step, length = arguments
    first = Copy(num_symbols=1000).batch(seed, stream, step, 4, length, CPU).inputs
    other_stream = STREAMS[(STREAMS.index(stream) + 1) % len(STREAMS)]
    for other in ((seed + 1, stream, step), (seed, other_stream, step), (seed, stream, step + 1)):
        assert not torch.equal(Copy(num_symbols=1000).batch(*other, 4, length, CPU).inputs, first)


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Copy().batch(0, "train", 0, 4, 6, CPU)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("task", TASKS, ids=named)
def test_streams_share_no_samples(task: Task) -> None:
    # 30 steps of 20 samples a stream, of 16⁸ possible: a repetition between streams is a bug, not chance.
    seen = [
        {tuple(row) for step in range(30) for row in task.batch(0, stream, step, 20, 8, CPU).inputs.tolist()}
        for stream in STREAMS
    ]
    for one, other in itertools.combinations(seen, 2):
        assert not one & other
    assert all(len(rows) == 600 for rows in seen)


def test_tasks_draw_the_same_sources_for_a_seed() -> None:
    # Paired by seed: what differs between tasks is the answer.
    sources = {tuple(task.batch(3, "train", 7, 4, 6, CPU).inputs[:, 1:7].flatten().tolist()) for task in TASKS}
    assert len(sources) == 1


# --- uniform ---------------------------------------------------------------------------------------------------------


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize(("low", "high"), [(1, 10), (3, 6), (5, 5)])
def test_training_lengths_are_uniform(low: int, high: int) -> None:
    task = Copy(lengths=Lengths(train=(low, high), test=()))
    drawn = [task.training_length(seed, "train", step) for seed in range(4) for step in range(1000)]
    counts = [drawn.count(length) for length in range(low, high + 1)]
    assert sum(counts) == len(drawn)
    assert chi_square(counts) < 27.9  # 99.9 % point for 9 degrees of freedom; fewer have a lower one


def test_training_lengths_of_successive_steps_are_independent() -> None:
    task = Copy(lengths=Lengths(train=(1, 3), test=()))
    drawn = [task.training_length(0, "train", step) for step in range(4000)]
    pairs = list(itertools.pairwise(drawn))
    counts = [pairs.count((a, b)) for a in (1, 2, 3) for b in (1, 2, 3)]
    assert chi_square(counts) < 26.1  # 99.9 % point for 8 degrees of freedom
    assert drawn != [task.training_length(1, "train", step) for step in range(4000)]


@pytest.mark.parametrize("place", [0, 3, 7])
def test_symbols_are_uniform_at_every_place(place: int) -> None:
    source = Copy(num_symbols=10).source(5000, 8, torch.Generator().manual_seed(0))
    counts = [int((source[:, place] == FIRST_SYMBOL + symbol).sum()) for symbol in range(10)]
    assert sum(counts) == 5000
    assert chi_square(counts) < 27.9


def test_symbols_of_a_source_are_independent() -> None:
    source = Copy(num_symbols=3).source(9000, 2, torch.Generator().manual_seed(0)) - FIRST_SYMBOL
    counts = [int((source == torch.tensor(pair)).all(dim=1).sum()) for pair in itertools.product(range(3), repeat=2)]
    assert chi_square(counts) < 26.1


# --- padding ---------------------------------------------------------------------------------------------------------


def test_padding_stands_at_the_end_and_is_no_target() -> None:
    batches = [Copy().batch(0, "train", 0, 2, length, CPU) for length in (2, 5, 3)]
    joined = padded(batches)
    assert joined.inputs.shape == (6, 12)
    row = 0
    for batch in batches:
        width = batch.inputs.shape[1]
        for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            assert joined.inputs[row].tolist() == tokens + [PAD] * (12 - width)
            assert joined.targets[row].tolist() == targets + [IGNORED] * (12 - width)
            row += 1


def test_padding_one_length_changes_nothing() -> None:
    batch = Copy().batch(0, "train", 0, 3, 4, CPU)
    assert same(padded([batch]), batch)


# --- users' own ------------------------------------------------------------------------------------------------------


def test_a_users_task_needs_an_answer_and_an_oracle() -> None:
    class Doubled(SymbolTask):
        def answer(self, source: torch.Tensor) -> torch.Tensor:
            return source.repeat_interleave(2, dim=1)

        def oracle(self, source: list[int]) -> list[int]:
            return [token for token in source for _ in range(2)]

    task = Doubled()
    batch = task.batch(0, "train", 0, 2, 3, CPU)
    assert task.tokens(3) == batch.inputs.shape[1] == 11
    for read, wanted in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert [token for token in wanted if token != IGNORED] == [*task.oracle(read[1:4]), EOS]
    with pytest.raises(TypeError, match="abstract"):
        type("Silent", (SymbolTask,), {"__module__": __name__})()
