"""Scores and calibration against slow pure-Python references; greedy decoding; marks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.components.architecture import Architecture, DecoderOnly, EncoderDecoder, EncoderOnly
from harness.components.position import Learned, RoPE
from harness.evaluate import (
    ANSWERED,
    CHUNK,
    GREEDY_SAMPLES,
    METRICS,
    SEEN,
    Model,
    all_lengths,
    answer_metrics,
    calibration_error,
    fresh_batch,
    greedy_agreement,
    read_batch,
    read_lengths,
    read_training_samples,
    score_lengths,
    score_reading,
    was_seen,
    whole,
    zero_scores,
)
from harness.spec import Finite, Fresh, ModelSpec, RunSpec, TrainSpec
from harness.transformer import Transformer, build_model
from tasks import Batch, Copy, Lengths, Reverse, Task, Translate
from tasks.task import EOS, IGNORED, PAD, SEP

CPU = torch.device("cpu")
LENGTHS = Lengths(train=(2, 4), test=(5, 7))
MODEL = ModelSpec(d_model=16, num_heads=2, num_layers=1, position=RoPE())


def reference(predictions: list[list[int]], targets: list[list[int]]) -> dict[str, float]:
    """Every metric, a sequence at a time."""
    exact, no_end, tokens_right, tokens = 0, 0, 0, 0
    for predicted, wanted in zip(predictions, targets, strict=True):
        asked = [(p, w) for p, w in zip(predicted, wanted, strict=True) if w != IGNORED]
        content = [(p, w) for p, w in asked if w != EOS]
        exact += all(p == w for p, w in asked)
        no_end += all(p == w for p, w in content)
        tokens_right += sum(p == w for p, w in content)
        tokens += len(content)
    return {
        "exact_match": exact / len(targets),
        "exact_match_no_end": no_end / len(targets),
        "token_accuracy": tokens_right / tokens,
    }


def guesser(task: Task, seed: int, skill: float) -> tuple[list[Tensor], Model]:
    """A model whose arg-max is right with a probability, and what it answered, a tensor a call."""
    draw, answers = torch.Generator().manual_seed(seed), []

    def guess(inputs: Tensor) -> Tensor:
        logits = torch.randn(*inputs.shape, task.vocab_size, generator=draw)
        for row, tokens in enumerate(inputs.tolist()):
            right = [*task.oracle(tokens[1 : tokens.index(SEP)]), EOS]
            for place, token in enumerate(right, start=tokens.index(SEP)):
                if float(torch.rand((), generator=draw)) < skill:
                    logits[row, place, token] = 9.0
        answers.append(logits.argmax(-1))
        return logits

    return answers, guess


@pytest.mark.parametrize("kind", [Copy, Reverse])
@pytest.mark.parametrize("end", [True, False])
@given(st.integers(1, 5), st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_scores_are_those_of_the_reference(kind: type[Task], end: bool, length: int, seed: int, skill: float) -> None:
    task = kind(train_end_token=end, num_symbols=3)
    batch = task.batch(seed, "eval", 0, 7, length, CPU)
    answers, guess = guesser(task, seed, skill)
    scores = score_reading(read_batch(guess, batch))
    assert tuple(scores) == METRICS
    assert scores == pytest.approx(reference(torch.cat(answers).tolist(), batch.targets.tolist()))
    if not end:
        assert scores["exact_match"] == scores["exact_match_no_end"]
    assert scores["exact_match"] <= scores["exact_match_no_end"]


def flawless(batch: Batch, vocabulary: int = 20) -> Tensor:
    """Logits that answer a batch, `(B, T, V)`."""
    return torch.nn.functional.one_hot(batch.targets.clamp(min=0), vocabulary).float()


def test_one_wrong_token_spoils_its_sequence_alone() -> None:
    batch = Copy().batch(0, "eval", 0, 4, 5, CPU)
    logits = flawless(batch)
    assert score_reading(read_batch(lambda _: logits, batch)) == dict.fromkeys(METRICS, 1.0)
    logits[1, 7] = -logits[1, 7]
    scores = score_reading(read_batch(lambda _: logits, batch))
    assert scores == {"exact_match": 0.75, "exact_match_no_end": 0.75, "token_accuracy": pytest.approx(19 / 20)}


def test_a_missed_end_costs_the_exact_match_with_the_end_only() -> None:
    batch = Copy().batch(0, "eval", 0, 4, 5, CPU)
    logits = flawless(batch)
    logits[2, -1] = -logits[2, -1]
    assert score_reading(read_batch(lambda _: logits, batch)) == {
        "exact_match": 0.75, "exact_match_no_end": 1.0, "token_accuracy": 1.0
    }  # fmt: skip


def test_what_the_model_says_about_the_source_does_not_count() -> None:
    batch = Copy().batch(0, "eval", 0, 4, 5, CPU)
    logits = flawless(batch)
    logits[:, :6] = torch.randn(4, 6, 20)
    assert score_reading(read_batch(lambda _: logits, batch)) == dict.fromkeys(METRICS, 1.0)


def test_more_sequences_than_fit_a_forward_pass_score_the_same() -> None:
    batch = Copy(num_symbols=2).batch(0, "eval", 0, 2 * CHUNK + 3, 1, CPU)
    answers, guess = guesser(Copy(num_symbols=2), 0, 0.7)
    scores = score_reading(read_batch(guess, batch))
    assert [len(answer) for answer in answers] == [CHUNK, CHUNK, 3]
    assert scores == pytest.approx(reference(torch.cat(answers).tolist(), batch.targets.tolist()))
    assert 0 < scores["exact_match"] < scores["token_accuracy"] < 1


def test_scoring_keeps_no_gradient() -> None:
    model = build_model(MODEL, 20, seed=0)
    batch = Copy().batch(0, "eval", 0, 2, 3, CPU)
    seen: list[Tensor] = []

    def watched(inputs: Tensor) -> Tensor:
        seen.append(model(inputs))
        return seen[-1]

    score_reading(read_batch(watched, batch))
    assert not seen[0].requires_grad


def test_whole_asks_only_where_asked() -> None:
    right = torch.tensor([[True, False], [False, True], [True, True], [False, False]])
    asked = torch.tensor([[True, False], [True, False], [True, True], [False, False]])
    assert whole(right, asked).tolist() == [True, False, True, True]


# --- by length -------------------------------------------------------------------------------------------------------


def spec(task: Task | None = None, **train: object) -> RunSpec:
    return RunSpec(
        task=task or Copy(lengths=LENGTHS), model=MODEL, train=TrainSpec(**{"steps": 3, "batch_size": 2, **train})
    )


def test_lengths_are_scored_on_their_own_stream_and_in_their_order() -> None:
    run = spec()
    model = build_model(run.model, run.task.vocab_size, seed=0)
    scores = score_lengths(model, run, all_lengths(run.task), stream="eval", samples=6)
    assert [(score.length, score.metric) for score in scores] == [(n, m) for n in (2, 3, 4, 5, 7) for m in METRICS]
    for score in scores:
        batch = run.task.batch(run.seed, "eval", 0, 6, score.length, CPU)
        assert score.value == score_reading(read_batch(model, batch))[score.metric]
        assert score.mark == ""


def test_a_length_that_the_model_cannot_take_scores_zero_and_is_marked() -> None:
    run = spec().replace("model.position", Learned(max_length=2 + 2 * 5))
    model = build_model(run.model, run.task.vocab_size, seed=0)
    scores = score_lengths(model, run, all_lengths(run.task), stream="eval", samples=6)
    marks = {score.length: score.mark for score in scores}
    assert marks == {2: "", 3: "", 4: "", 5: "", 7: "unsupported"}
    assert {score.metric: score.value for score in scores if score.length == 7} == dict.fromkeys(METRICS, 0.0)


def test_other_errors_of_a_model_are_not_taken_for_an_unsupported_length() -> None:
    def broken(inputs: Tensor) -> Tensor:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        score_lengths(broken, spec(), [2], stream="eval", samples=2)


@pytest.mark.parametrize(
    ("symbols", "steps", "seen"),
    [
        (4, 24, {2}),  # 24 · 2 samples over three lengths: 16 each; 4² = 16 sources of length 2
        (4, 23, set()),
        (4, 96, {2, 3}),
        (4, 100_000, {2, 3, 4}),  # never a length beyond training
    ],
)
def test_lengths_whose_space_training_exhausts_are_marked(symbols: int, steps: int, seen: set[int]) -> None:
    run = spec(Copy(lengths=LENGTHS, num_symbols=symbols), steps=steps)
    assert {length for length in all_lengths(run.task) if was_seen(run, length)} == seen
    model = build_model(run.model, run.task.vocab_size, seed=0)
    scores = score_lengths(model, run, all_lengths(run.task), stream="eval", samples=2)
    assert {score.length for score in scores if score.mark == "seen"} == seen


def test_finite_data_mark_no_more_than_they_hold() -> None:
    task = Copy(lengths=LENGTHS, num_symbols=4)
    fresh, finite = (
        spec(task, steps=10_000, sampling=Fresh()),
        spec(task, steps=10_000, sampling=Finite(num_samples=48)),
    )
    assert [length for length in (2, 3, 4) if was_seen(fresh, length)] == [2, 3, 4]
    assert [length for length in (2, 3, 4) if was_seen(finite, length)] == [2]


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderDecoder(), EncoderOnly()], ids=lambda level: level.kind)
def test_evaluation_leaves_out_what_finite_training_holds(architecture: Architecture) -> None:
    finite = spec(sampling=Finite(num_samples=300), steps=1000).replace("model.architecture", architecture)
    length = 2  # 100 of its 256 sources are trained on
    drawn, kept = finite.batch("eval", 0, 500, length, CPU), fresh_batch(finite, "eval", 500, length)
    pool = finite.training_pool(length, CPU)
    assert pool is not None

    def rows(batch: Batch) -> list[tuple[int, ...]]:
        return [tuple(row) for row in (batch.inputs if batch.source is None else batch.source).tolist()]

    known = set(rows(pool))
    assert rows(kept) == [row for row in rows(drawn) if row not in known]
    assert 0.5 < len(rows(kept)) / 500 < 0.8  # (1 − 1/256)¹⁰⁰ = .68 of the space is left


def test_evaluation_leaves_out_padded_sequences_too() -> None:
    task = Translate(lengths=Lengths(train=(2, 2), test=()))
    finite = spec(task, sampling=Finite(num_samples=45), steps=1000)
    drawn, kept = finite.batch("eval", 0, 200, 2, CPU), fresh_batch(finite, "eval", 200, 2)
    pool = finite.training_pool(2, CPU)
    assert pool is not None
    known = {tuple(task.oracle([t for t in row if t != PAD])) for row in sources_of(pool)}
    answers = [tuple(task.oracle([t for t in row if t != PAD])) for row in sources_of(drawn)]
    assert len(kept.inputs) == sum(answer not in known for answer in answers)


def sources_of(batch: Batch) -> list[list[int]]:
    """What stands between BOS and SEP."""
    return [row[1 : row.index(SEP)] for row in batch.inputs.tolist()]


def test_a_model_that_diverged_scores_zero_everywhere() -> None:
    scores = zero_scores(spec())
    assert {(score.value, score.mark) for score in scores} == {(0.0, "diverged")}
    assert {(score.length, score.metric) for score in scores} == {(n, m) for n in (2, 3, 4, 5, 7) for m in METRICS}


# --- how sure, and how right -----------------------------------------------------------------------------------------


def binned_error(confidence: list[float], hits: list[bool]) -> float:
    """The expected calibration error as Guo et al. write it, a bin at a time."""
    error = 0.0
    for m in range(1, 11):
        inside = [i for i, p in enumerate(confidence) if (m - 1) / 10 < p <= m / 10]
        if inside:
            accuracy = sum(hits[i] for i in inside) / len(inside)
            sure = sum(confidence[i] for i in inside) / len(inside)
            error += len(inside) / len(confidence) * abs(accuracy - sure)
    return error


judged = st.lists(
    st.tuples(st.floats(1e-3, 1) | st.sampled_from([m / 10 for m in range(1, 11)]), st.booleans()), min_size=1
)


@given(judged)
def test_the_calibration_error_is_that_of_the_reference(drawn: list[tuple[float, bool]]) -> None:
    confidence, hits = (list(part) for part in zip(*drawn, strict=True))
    found = calibration_error(torch.tensor(confidence, dtype=torch.float64), torch.tensor(hits))
    assert found == pytest.approx(binned_error(confidence, hits))
    assert 0 <= found <= 1
    # The whole is never further off than its parts.
    assert found >= abs(sum(confidence) - sum(hits)) / len(hits) - 1e-12


@pytest.mark.parametrize(("right", "error"), [(True, 0.0), (False, 1.0)])
def test_certainty_is_no_error_where_it_is_right_and_all_of_it_where_it_is_wrong(right: bool, error: float) -> None:
    assert calibration_error(torch.ones(7), torch.tensor([right] * 7)) == error


@pytest.mark.parametrize("shift", [0.0, 0.03, 0.25, -0.2])
def test_confidence_that_is_off_by_a_constant_errs_by_it(shift: float) -> None:
    # Of 100 answers at each probability p as many are right as p says; the confidence is p + shift.
    shares = (0.3, 0.5, 0.7)
    confidence = torch.tensor([p + shift for p in shares for _ in range(100)], dtype=torch.float64)
    hits = torch.tensor([i < round(100 * p) for p in shares for i in range(100)])
    assert calibration_error(confidence, hits) == pytest.approx(abs(shift))


def test_the_error_of_a_calibrated_model_vanishes_with_the_number_of_answers() -> None:
    draw = torch.Generator().manual_seed(0)
    errors = []
    for count in (100, 1_000_000):
        confidence = torch.rand(count, generator=draw, dtype=torch.float64)
        errors.append(calibration_error(confidence, torch.rand(count, generator=draw) < confidence))
    assert errors[1] < 0.002 < errors[0]


def test_no_answer_has_no_calibration_error() -> None:
    assert math.isnan(calibration_error(torch.zeros(0), torch.zeros(0, dtype=torch.bool)))


@pytest.mark.parametrize("end", [True, False])
def test_confidence_and_loss_are_those_of_a_softmax_over_the_answer_tokens(end: bool) -> None:
    batch = Copy(train_end_token=end).batch(0, "eval", 0, CHUNK + 3, 4, CPU)
    logits = 3 * torch.randn(*batch.inputs.shape, 20, generator=torch.Generator().manual_seed(0))
    parts = iter(logits.split(CHUNK))
    reading = read_batch(lambda _: next(parts), batch)
    confidence, loss, hits = [], [], []
    for row, wanted in zip(logits.tolist(), batch.targets.tolist(), strict=True):
        for scores, token in zip(row, wanted, strict=True):
            if token != IGNORED:
                exps = [math.exp(score) for score in scores]
                confidence.append(max(exps) / sum(exps))
                loss.append(-math.log(exps[token] / sum(exps)))
                hits.append(max(range(20), key=scores.__getitem__) == token)
    assert len(hits) == (CHUNK + 3) * (4 + end)
    assert reading.confidence.tolist() == pytest.approx(confidence, rel=1e-5)
    assert reading.loss.tolist() == pytest.approx(loss, rel=1e-4)
    assert reading.hits.tolist() == hits


@torch.no_grad()
def by_token(model: Model, batches: dict[int, Batch]) -> tuple[list[float], list[float], list[bool]]:
    """Loss, confidence and success of every answer token, by where it stands: behind BOS, source and SEP."""
    loss, sure, hits = [], [], []
    for length, batch in batches.items():
        chances, wanted = model(batch.inputs).softmax(-1)[:, length + 1 :], batch.targets[:, length + 1 :]
        loss += (-chances.gather(-1, wanted[..., None]).log()).flatten().tolist()
        sure += chances.max(-1).values.flatten().tolist()
        hits += (chances.argmax(-1) == wanted).flatten().tolist()
    return loss, sure, hits


def test_answer_metrics_are_means_over_tokens_and_exact_match_over_lengths() -> None:
    run = spec(sampling=Finite(num_samples=31), eval_samples=6)
    model = build_model(run.model, run.task.vocab_size, seed=0)
    fresh = read_lengths(model, run, all_lengths(run.task), stream="eval", samples=6)
    seen = read_training_samples(model, run, samples=6)
    found = answer_metrics(run, fresh, seen)
    assert tuple(found) == (*ANSWERED, *SEEN)
    assert list(seen) == [2, 3, 4]
    pools = {length: run.training_pool(length, CPU) for length in (2, 3, 4)}
    loss, sure, hits = by_token(model, {n: run.task.batch(0, "eval", 0, 6, n, CPU) for n in (2, 3, 4)})
    pool_loss, _, _ = by_token(model, {n: pool.rows(slice(6)) for n, pool in pools.items() if pool is not None})
    assert len(loss) == len(pool_loss) == 6 * (3 + 4 + 5)
    assert found["eval/loss"] == pytest.approx(sum(loss) / len(loss), rel=1e-5)
    assert found["seen/loss"] == pytest.approx(sum(pool_loss) / len(pool_loss), rel=1e-5)
    assert found["eval/accuracy"] == sum(hits) / len(hits)
    assert found["eval/confidence"] == pytest.approx(sum(sure) / len(sure), rel=1e-5)
    assert found["eval/calibration_error"] == pytest.approx(binned_error(sure, hits), rel=1e-4)


def test_finite_samples_are_counted_once_however_many_are_asked_for() -> None:
    run = spec(sampling=Finite(num_samples=4))  # two of length 2, one each of 3 and 4
    task = run.task

    def knows_short_ones(inputs: Tensor) -> Tensor:
        wanted = torch.full((*inputs.shape,), EOS)
        wanted[:, 3:5] = inputs[:, 1:3]
        return torch.nn.functional.one_hot(wanted, task.vocab_size).float()

    seen = read_training_samples(knows_short_ones, run, samples=100)
    assert {length: len(reading.targets) for length, reading in seen.items() if reading} == {2: 2, 3: 1, 4: 1}
    assert answer_metrics(run, {}, seen)["seen/exact_match"] == pytest.approx(1 / 3)


def test_lengths_without_a_training_sample_are_not_asked() -> None:
    run = spec(sampling=Finite(num_samples=2))
    model = build_model(run.model, run.task.vocab_size, seed=0)
    assert list(read_training_samples(model, run, samples=5)) == [2, 3]


def test_fresh_training_data_have_no_seen_metrics_and_no_answer_has_none() -> None:
    model = build_model(MODEL, 20, seed=0)
    assert read_training_samples(model, spec(), samples=5) == {}
    assert tuple(answer_metrics(spec(), {}, {})) == ANSWERED
    finite = answer_metrics(spec(sampling=Finite()), {}, {})
    assert tuple(finite) == (*ANSWERED, *SEEN)
    assert all(math.isnan(value) for value in finite.values())


# --- greedy ----------------------------------------------------------------------------------------------------------


def greedy(model: Transformer, prompt: list[int], tokens: int) -> list[int]:
    """Decoding as it is defined: predict one token, append it, again."""
    sequence = list(prompt)
    for _ in range(tokens):
        sequence.append(int(model(torch.tensor([sequence]))[0, -1].argmax()))
    return sequence[len(prompt) :]


def test_teacher_forcing_and_greedy_decoding_agree_on_exact_match() -> None:
    # On a half-trained model, so that both right and wrong answers occur.
    task = Copy(lengths=Lengths(train=(1, 3), test=()), num_symbols=2)
    run = RunSpec(task=task, model=MODEL, train=TrainSpec(eval_samples=8))
    model = build_model(run.model, task.vocab_size, seed=0)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(60):
        batch = Fresh().batch(task, 0, step, 16, CPU)
        loss = torch.nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert greedy_agreement(model.eval(), run) == 1
    batch = task.batch(0, "eval", 0, 40, 3, CPU)
    forced = whole(model(batch.inputs).argmax(-1) == batch.targets, batch.targets != IGNORED).tolist()
    decoded = [
        greedy(model, row[:5], 4) == wanted[4:]
        for row, wanted in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True)
    ]
    assert decoded == forced
    assert 0 < sum(forced) < 40


@pytest.mark.parametrize("end", [True, False])
def test_greedy_agreement_finds_a_model_that_looks_ahead(end: bool) -> None:
    # Reading the answer while predicting it is what teacher forcing alone cannot notice.
    task = Copy(lengths=LENGTHS, train_end_token=end)

    def cheat(inputs: Tensor) -> Tensor:
        following = torch.cat([inputs[:, 1:], torch.full((len(inputs), 1), EOS)], dim=1)
        return torch.nn.functional.one_hot(following, task.vocab_size).float()

    batch = task.batch(0, "eval", 0, GREEDY_SAMPLES, 4, CPU)
    assert score_reading(read_batch(cheat, batch))["exact_match"] == 1
    assert greedy_agreement(cheat, spec(task)) == 0


@pytest.mark.parametrize("end", [True, False])
def test_greedy_agreement_of_a_perfect_and_of_a_random_model_is_one(end: bool) -> None:
    task = Copy(lengths=LENGTHS, train_end_token=end)

    def perfect(inputs: Tensor) -> Tensor:
        logits = torch.zeros(*inputs.shape, task.vocab_size)
        for row, tokens in enumerate(inputs.tolist()):
            start = tokens.index(SEP)
            right = [*task.oracle(tokens[1:start]), EOS, EOS]
            for place in range(start, len(tokens)):
                logits[row, place, right[place - start]] = 1
        return logits

    assert greedy_agreement(perfect, spec(task)) == 1
    assert greedy_agreement(build_model(MODEL, task.vocab_size, seed=0).eval(), spec(task)) == 1
