"""Scores by length: exact match with and without the end token, token accuracy; teacher-forced, greedy as a check.

Teacher forcing reads the right answer while predicting. For exact match its arg-max equals greedy decoding: the first
wrong token spoils both. It takes one forward pass instead of one a token.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from harness.components.position import UnsupportedLength
from harness.decoding import Model, greedy
from harness.record import Mark, Score
from harness.spec import RunSpec
from harness.transformer import Transformer
from tasks.task import EOS, IGNORED, Batch, Task

METRICS = ("exact_match", "exact_match_no_end", "token_accuracy")
GATE = 0.98  # in-distribution exact match from which on a task counts as learned
CHUNK = 256  # sequences in a forward pass: enough to fill the kernels, little memory
GREEDY_SAMPLES = 8


@torch.no_grad()
def score_batch(model: Model, batch: Batch) -> dict[str, float]:
    """Each metric's mean over a batch, within 0 … 1.

    `exact_match` asks for every answer token and the end token; where the task does not train the end token it equals
    `exact_match_no_end`. `token_accuracy` is over the answer's tokens without the end.
    """
    right = torch.cat([model(*chunk.reading).argmax(-1) == chunk.targets for chunk in batch.split(CHUNK)])
    answered = batch.targets != IGNORED
    content = answered & (batch.targets != EOS)
    values = (whole(right, answered), whole(right, content), right[content])
    return {metric: hits.double().mean().item() for metric, hits in zip(METRICS, values, strict=True)}


def whole(right: Tensor, asked: Tensor) -> Tensor:
    """`(B,)`: whether every asked position `(B, T)` of a sequence is right."""
    return (right | ~asked).all(dim=1)


def score_lengths(
    model: Model, spec: RunSpec, lengths: Iterable[int], *, stream: str, samples: int
) -> tuple[Score, ...]:
    """Every metric at every length, on `samples` sequences a length; a length that the model cannot take scores 0."""
    device = torch.device(spec.device)
    scores: list[Score] = []
    for length in lengths:
        mark: Mark = "seen" if was_seen(spec, length) else ""
        try:
            batch = spec.batch(stream, 0, samples, length, device)
            values = score_batch(model, batch)
        except UnsupportedLength:
            values, mark = dict.fromkeys(METRICS, 0.0), "unsupported"
        scores += [Score(length=length, metric=m, value=v, mark=mark) for m, v in values.items()]
    return tuple(scores)


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
    batch = spec.batch("eval", 0, GREEDY_SAMPLES, length, torch.device(spec.device))
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
