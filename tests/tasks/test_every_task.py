"""What holds for every task: oracle, distributions, separate streams, chance, layouts."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ablations.baseline import core
from harness.evaluate import read_batch, score_reading
from harness.schema import is_foreign
from harness.transformer import build_model
from tasks import Lengths, SymbolTask, Task, Translate
from tasks.task import BOS, EOS, FIRST_SYMBOL, IGNORED, SEP

CPU = torch.device("cpu")
MODELS = 30
LENGTHS = Lengths(train=(1, 6), test=(7, 8))
TASKS = [kind(lengths=LENGTHS) for kind in Task.levels().values() if not is_foreign(kind) and not kind.ragged]
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
# Sources and answers of one length differ in tokens there, which most of these tests do not allow for.
RAGGED = Translate(lengths=Lengths(train=(1, 2), test=(3,)))
ragged_too = pytest.mark.parametrize("task", [*TASKS, RAGGED], ids=lambda task: task.kind)


def sources(task: Task, count: int, length: int, seed: int = 0) -> Tensor:
    return task.source(count, length, torch.Generator().manual_seed(seed))


@every_task
@given(st.integers(1, 8), st.integers(0, 1000))
def test_the_answer_is_the_oracles(task: Task, length: int, seed: int) -> None:
    source = sources(task, 8, length, seed)
    answer = task.answer(source)
    assert [task.oracle(row) for row in source.tolist()] == answer.tolist()
    assert task.widths(length) == (source.shape[1], answer.shape[1])
    assert int(torch.cat([source, answer], dim=1).min()) >= FIRST_SYMBOL
    assert int(torch.cat([source, answer], dim=1).max()) < task.vocab_size


@every_task
def test_symbols_of_a_place_are_equally_likely_among_those_that_stand_there(task: Task) -> None:
    # Of 4000 draws a symbol's share strays by less than five standard deviations.
    drawn = sources(task, 4000, 3)
    for place in range(drawn.shape[1]):
        counts = Counter(drawn[:, place].tolist())
        expected = 4000 / len(counts)
        assert all(abs(n - expected) < 5 * math.sqrt(expected) for n in counts.values()), (place, counts)


@ragged_too
def test_training_and_evaluation_draw_apart(task: Task) -> None:
    # Of long sources, whose space is huge, none is drawn twice; streams, steps and seeds all tell batches apart.
    length = task.lengths.test[-1]
    names = [(0, "train", 0), (0, "train", 1), (0, "eval", 0), (0, "monitor", 0), (1, "train", 0), (1, "eval", 0)]
    batches = [task.batch(seed, stream, step, 50, length, CPU).inputs for seed, stream, step in names]
    assert all(not torch.equal(a, b) for i, a in enumerate(batches) for b in batches[:i])
    if task.space(length) > 10**6:
        rows = {tuple(row) for batch in batches for row in batch.tolist()}
        assert len(rows) == 50 * len(names)


@every_task
def test_every_training_length_is_equally_likely(task: Task) -> None:
    counts = Counter(task.training_length(0, "train", step) for step in range(3000))
    assert set(counts) == set(LENGTHS.training)
    assert all(abs(n - 500) < 5 * math.sqrt(500) for n in counts.values())


@ragged_too
def test_guessing_tokens_scores_what_chance_gives(task: Task) -> None:
    # A token is right with probability 1 / vocab_size, an answer of m tokens with its m-th power.
    scores, asked = guessed(task, 3)
    chance = 1 / task.vocab_size
    deviation = math.sqrt(chance * (1 - chance) / int(asked.sum()))
    assert abs(scores["token_accuracy"] - chance) < 5 * deviation
    likely = (chance ** asked.double()).mean().item()
    assert scores["exact_match_no_end"] <= likely + 5 * math.sqrt(likely / len(asked)) + 1e-9


def guessed(task: Task, length: int) -> tuple[dict[str, float], Tensor]:
    """The scores of guessing every token of 2000 sequences of a length, and the answer tokens of each, without end."""
    draw = torch.Generator().manual_seed(0)

    def guess(inputs: Tensor, *others: Tensor) -> Tensor:
        return torch.rand(*inputs.shape, task.vocab_size, generator=draw)

    batch = task.batch(0, "eval", 0, 2000, length, CPU)
    asked = ((batch.targets != IGNORED) & (batch.targets != EOS)).sum(dim=1)
    return score_reading(read_batch(guess, batch)), asked


@pytest.mark.parametrize("kind", [type(task) for task in TASKS if isinstance(task, SymbolTask)])
def test_fewer_symbols_are_more_often_guessed(kind: type[SymbolTask]) -> None:
    lengths = Lengths(train=(1, 2), test=())
    few, many = (guessed(kind(lengths=lengths, num_symbols=count), 2)[0] for count in (4, 64))
    assert few["token_accuracy"] > 3 * many["token_accuracy"]
    assert few["exact_match_no_end"] > many["exact_match_no_end"]


@ragged_too
def test_an_untrained_model_scores_what_chance_gives(task: Task) -> None:
    # All rows of its output start alike, so that over seeds every token is guessed as often; but one model guesses few
    # of them again and again, so that models, not tokens, are what a deviation counts.
    batch = task.batch(0, "eval", 0, 100, 3, CPU)
    models = (build_model(core, task.vocab_size, seed=seed).eval() for seed in range(MODELS))
    scores = [score_reading(read_batch(model, batch)) for model in models]
    accuracy = torch.tensor([each["token_accuracy"] for each in scores], dtype=torch.float64)
    assert abs(accuracy.mean() - 1 / task.vocab_size) < 4 * accuracy.std() / math.sqrt(MODELS)
    assert sum(each["exact_match"] for each in scores) / MODELS < 0.005


@every_task
def test_the_space_counts_sources(task: Task) -> None:
    drawn = {tuple(row) for row in sources(task, 3000, 1).tolist()}
    assert len(drawn) <= task.space(1)
    assert all(task.space(n) <= task.space(n + 1) for n in range(1, 8))


@every_task
def test_a_decoders_sequence_is_source_and_answer_between_marks(task: Task) -> None:
    batch = task.batch(0, "eval", 0, 4, 3, CPU)
    source = sources(task, 1, 3)
    width = source.shape[1]
    assert batch.inputs[:, 0].tolist() == [BOS] * 4
    assert batch.inputs[:, width + 1].tolist() == [SEP] * 4
    assert batch.targets[:, -1].tolist() == [EOS] * 4
    assert (batch.targets[:, : width + 1] == IGNORED).all()
    assert [task.oracle(row) for row in batch.inputs[:, 1 : width + 1].tolist()] == batch.targets[
        :, width + 1 : -1
    ].tolist()


@every_task
def test_a_translated_batch_is_the_same_question_in_two_sequences(task: Task) -> None:
    one = task.batch(0, "eval", 0, 4, 3, CPU)
    two = task.batch(0, "eval", 0, 4, 3, CPU, "translate")
    assert two.source is not None
    width = two.source.shape[1] - 1
    assert torch.equal(two.source[:, :-1], one.inputs[:, 1 : width + 1])
    assert two.source[:, -1].tolist() == [EOS] * 4
    assert two.inputs[:, 0].tolist() == [BOS] * 4
    assert torch.equal(two.targets, one.targets[:, width + 1 :])


@every_task
def test_every_token_has_a_name(task: Task) -> None:
    names = [task.label(token) for token in range(task.vocab_size)]
    assert len(set(names)) == task.vocab_size
