"""Scores by length: exact match with and without the end token, token accuracy; how sure the answers are, and how right
those of training samples; teacher-forced, greedy as a check.

Teacher forcing reads the right answer while predicting. For exact match its arg-max equals greedy decoding: the first
wrong token spoils both. It takes one forward pass instead of one a token.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.components.position import UnsupportedLength
from harness.decoding import Model, greedy
from harness.record import Mark, Score, mean_score
from harness.spec import Finite, RunSpec
from harness.transformer import Transformer
from tasks.task import EOS, IGNORED, PAD, Batch, Task

METRICS = ("exact_match", "exact_match_no_end", "token_accuracy")
GATE = 0.98  # in-distribution exact match from which on a task counts as learned
CHUNK = 256  # sequences in a forward pass: enough to fill the kernels, little memory
GREEDY_SAMPLES = 8
BINS = 10  # of equal width, over which the calibration error is averaged
ANSWERED = ("eval/loss", "eval/accuracy", "eval/confidence", "eval/calibration_error")
SEEN = ("seen/exact_match", "seen/loss")


@dataclass(frozen=True)
class Reading:
    """What a model made of a batch, teacher-forced.

    Attributes:
        targets: `(B, T)` the batch's own.
        right: `(B, T)` whether the most probable token is the target; never where that stands for unknown text.
        confidence: `(N,)` probability of the most probable token, at the N positions with a target, row by row.
        loss: `(N,)` minus the logarithm of the target's probability, in nats, without label smoothing.
    """

    targets: Tensor
    right: Tensor
    confidence: Tensor
    loss: Tensor

    @property
    def hits(self) -> Tensor:
        """`(N,)`: whether the most probable token is right, where there is a target."""
        return self.right[self.targets != IGNORED]


@torch.no_grad()
def read_batch(model: Model, batch: Batch, unknown: int | None = None) -> Reading:
    """One forward pass over a batch, `CHUNK` sequences at a time; the token `unknown` is never right."""
    parts = [_read(model(*chunk.reading), chunk.targets) for chunk in batch.split(CHUNK)]
    right, confidence, loss = (torch.cat(part) for part in zip(*parts, strict=True))
    return Reading(batch.targets, right if unknown is None else right & (batch.targets != unknown), confidence, loss)


def _read(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`right`, `confidence` and `loss` of logits `(B, T, V)`."""
    asked = targets != IGNORED
    answers = logits[asked].float()
    total = answers.logsumexp(-1)
    wanted = answers.gather(-1, targets[asked][:, None])[:, 0]
    return logits.argmax(-1) == targets, (answers.amax(-1) - total).exp(), total - wanted


def score_reading(reading: Reading) -> dict[str, float]:
    """Each metric's mean over a batch, within 0 … 1.

    `exact_match` asks for every answer token and the end token; where the task does not train the end token it equals
    `exact_match_no_end`. `token_accuracy` is over the answer's tokens without the end.
    """
    right, answered = reading.right, reading.targets != IGNORED
    content = answered & (reading.targets != EOS)
    values = (whole(right, answered), whole(right, content), right[content])
    return {metric: hits.double().mean().item() for metric, hits in zip(METRICS, values, strict=True)}


def whole(right: Tensor, asked: Tensor) -> Tensor:
    """`(B,)`: whether every asked position `(B, T)` of a sequence is right."""
    return (right | ~asked).all(dim=1)


def read_lengths(
    model: Model, spec: RunSpec, lengths: Iterable[int], *, stream: str, samples: int
) -> dict[int, Reading | None]:
    """What a model makes of `fresh_batch`'s sequences of every length; None where it cannot take the length."""
    readings: dict[int, Reading | None] = {}
    for length in lengths:
        try:
            readings[length] = read_batch(model, fresh_batch(spec, stream, samples, length), spec.task.unknown)
        except UnsupportedLength:
            readings[length] = None
    return readings


def fresh_batch(spec: RunSpec, stream: str, samples: int, length: int) -> Batch:
    """`samples` sequences of a length, less those that stand among finite training samples: of 90 000 numbers a pool of
    4000 holds one in 23. A length with too few sequences to go round keeps all, and is marked as seen.
    """
    device = torch.device(spec.device)
    batch = spec.batch(spec.stream(stream), 0, samples, length, device)
    if length not in spec.task.lengths.training or was_seen(spec, length):
        return batch
    pool = spec.training_pool(length, device)
    known = set() if pool is None else set(_questions(pool))
    new = torch.tensor([question not in known for question in _questions(batch)], device=device)
    return batch.rows(new) if known and new.any() else batch


def _questions(batch: Batch) -> list[tuple[int, ...]]:
    """What tells sequences of a task apart, without padding."""
    read = batch.inputs if batch.source is None else batch.source
    return [tuple(token for token in row if token != PAD) for row in read.tolist()]


def read_training_samples(model: Model, spec: RunSpec, *, samples: int) -> dict[int, Reading | None]:
    """The same of the samples that training saw again and again, at most `samples` a length; empty without such."""
    device = torch.device(spec.device)
    pools = {length: spec.training_pool(length, device) for length in spec.task.lengths.training}
    some = {n: pool.rows(slice(samples)) for n, pool in pools.items() if pool is not None}
    return {n: read_batch(model, pool, spec.task.unknown) for n, pool in some.items()}


def score_readings(spec: RunSpec, readings: Mapping[int, Reading | None]) -> tuple[Score, ...]:
    """Every metric at every length; a length that the model cannot take scores 0."""
    scores: list[Score] = []
    for length, reading in readings.items():
        mark: Mark = "unsupported" if reading is None else "seen" if was_seen(spec, length) else ""
        values = dict.fromkeys(METRICS, 0.0) if reading is None else score_reading(reading)
        scores += [Score(length=length, metric=m, value=v, mark=mark) for m, v in values.items()]
    return tuple(scores)


def score_lengths(
    model: Model, spec: RunSpec, lengths: Iterable[int], *, stream: str, samples: int
) -> tuple[Score, ...]:
    """Every metric at every length, on `samples` sequences a length; a length that the model cannot take scores 0."""
    return score_readings(spec, read_lengths(model, spec, lengths, stream=stream, samples=samples))


def calibration_error(confidence: Tensor, hits: Tensor) -> float:
    """Expected calibration error, 0 … 1, of N answers given with a `confidence` `(N,)` that were right or not (`hits`).

    Σ_m n_m/N · |share right in bin m − mean confidence in bin m|, over `BINS` bins ((m−1)/BINS, m/BINS] of confidence
    (Guo et al. 2017, arXiv:1706.04599). NaN without an answer.
    """
    sure, right = confidence.double().cpu(), hits.double().cpu()  # on CUDA index_add_ adds in any order
    edges = torch.arange(1, BINS, dtype=torch.float64) / BINS
    excess = torch.zeros(BINS, dtype=torch.float64).index_add_(0, torch.bucketize(sure, edges), right - sure)
    return excess.abs().sum().item() / len(sure) if len(sure) else math.nan


def answer_metrics(
    spec: RunSpec, fresh: Mapping[int, Reading | None], seen: Mapping[int, Reading | None]
) -> dict[str, float]:
    """How sure and how right a model is at the training lengths; NaN where it was not asked.

    `eval/loss` (nats), `eval/accuracy`, `eval/confidence` and `eval/calibration_error` are means over the answer tokens
    of fresh sequences, the end token included if it is trained. `seen/loss` is the same on training samples;
    `seen/exact_match` weighs lengths alike, as `eval/in_distribution` does. Fresh training data have no `seen`.
    """
    training = spec.task.lengths.training
    loss, confidence, hits = _answers(fresh.get(length) for length in training)
    values = (*map(_mean, (loss, hits, confidence)), calibration_error(confidence, hits))
    found = dict(zip(ANSWERED, values, strict=True))
    if isinstance(spec.train.sampling, Finite):
        exact = mean_score(score_readings(spec, seen), training)
        found |= dict(zip(SEEN, (exact, _mean(_answers(seen.values())[0])), strict=True))
    return found


def _answers(readings: Iterable[Reading | None]) -> tuple[Tensor, Tensor, Tensor]:
    """`loss`, `confidence` and `hits` `(N,)` of the answer tokens of several readings, of none where there are none."""
    parts = [(reading.loss, reading.confidence, reading.hits) for reading in readings if reading is not None]
    loss, confidence, hits = (torch.cat(part) for part in zip(*parts, strict=True)) if parts else torch.zeros(3, 0)
    return loss, confidence, hits


def _mean(x: Tensor) -> float:
    """In double precision; NaN of nothing."""
    return x.double().mean().item()


def all_lengths(task: Task) -> list[int]:
    """Training lengths, then test lengths."""
    return [*task.lengths.training, *task.lengths.test]


def was_seen(spec: RunSpec, length: int) -> bool:
    """Whether training drew at least as many sources of a length as there are: it saw 63 % of them or more."""
    training = spec.task.lengths.training
    samples = spec.train.sampling.distinct(spec.train.steps, spec.train.batch_size) / len(training)
    return length in training and spec.task.space(length) <= samples


def zero_scores(spec: RunSpec) -> tuple[Score, ...]:
    """What a model that diverged scores: nothing, everywhere."""
    lengths = all_lengths(spec.task)
    return tuple(Score(length=n, metric=m, value=0.0, mark="diverged") for n in lengths for m in METRICS)


@torch.no_grad()
def greedy_agreement(model: Model, spec: RunSpec) -> float:
    """Share of some sequences on which token-by-token decoding with a cache and teacher forcing agree on exact match:
    1 or a bug. NaN for an encoder, which predicts all at once.
    """
    if spec.layout == "in place":
        return float("nan")
    length = spec.task.lengths.train[1]
    batch = spec.batch(spec.stream("eval"), 0, GREEDY_SAMPLES, length, torch.device(spec.device))
    agreed = [_agrees(model, part) for part in (batch.unpadded() if spec.task.ragged else [batch])]
    return torch.cat(agreed).double().mean().item()


def _agrees(model: Model, batch: Batch) -> Tensor:
    """`(B,)`: whether decoding a batch without padding comes to the same as teacher forcing."""
    asked = batch.targets != IGNORED
    forced = whole(model(*batch.reading).argmax(-1) == batch.targets, asked)
    first = int(asked[0].int().argmax())
    prompt, count, cached = batch.inputs[:, : first + 1], batch.inputs.shape[1] - first, isinstance(model, Transformer)
    decoded = greedy(model, prompt, count, source=batch.source, cached=cached)
    return whole(decoded == batch.targets[:, first:], asked[:, first:]) == forced
