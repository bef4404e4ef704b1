"""What a training run left behind, as detectors read it: the points of its curves, how it ended, what it was to do."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from harness.components.norm import BatchNorm
from harness.components.position import Randomised, ScaledRoPE
from harness.evaluate import GATE
from harness.record import RunRecord, Score
from harness.spec import Finite, ModelSpec, RunSpec

Series = list[tuple[int, float]]  # (step, value)

GONE = 1.25  # times the first loss: no noise of a batch gets there
UNLEARNED = 0.5  # of the first loss: more is no learning, where nothing better is known


@dataclass(frozen=True)
class History:
    """A training run, over or not.

    Attributes:
        lines: points of the curves, each with its `step`.
        steps: that were planned.
        status: of the record; empty: the run is not over.
        final: the record's metrics.
        scores: the record's, by length.
        training: the lengths that training saw.
        comparable: whether training and evaluation are declared to ask and to compute the same, but for dropout.
    """

    lines: Sequence[Mapping[str, float]]
    steps: int
    status: str = ""
    final: Mapping[str, float] = field(default_factory=dict)
    scores: tuple[Score, ...] = ()
    training: tuple[int, ...] = ()
    comparable: bool = False

    def series(self, name: str) -> Series:
        """The points of a curve."""
        return [(int(line["step"]), line[name]) for line in self.lines if name in line]

    def values(self, name: str, begin: float = 0.0, end: float = 1.0) -> list[float]:
        """Its finite values within a part of the planned steps."""
        points = self.series(name)
        return [x for step, x in points if begin * self.steps <= step <= end * self.steps and math.isfinite(x)]

    def layers(self, name: str, begin: float = 0.0) -> list[list[float]]:
        """The values of each layer's curve from a part of the planned steps on."""
        found: list[list[float]] = []
        while any(f"{name}.{len(found)}" in line for line in self.lines):
            found.append(self.values(f"{name}.{len(found)}", begin))
        return found

    def start(self, name: str, step: int = 0) -> list[float]:
        """The value of each layer's curve at the first step that it has; empty where that is a later one."""
        line: Mapping[str, float] = next((line for line in self.lines if line["step"] == step), {})
        found: list[float] = []
        while f"{name}.{len(found)}" in line:
            found.append(line[f"{name}.{len(found)}"])
        return found if all(map(math.isfinite, found)) else []

    @property
    def first_loss(self) -> float:
        """Of the untrained model; of the first steps, where that is not known."""
        losses = self.values("train/loss")
        return self.final.get("train/initial_loss", losses[0] if losses else math.nan)

    @property
    def last_loss(self) -> float:
        """∞ where it is no number; NaN where there is none."""
        points = self.series("train/loss")
        return math.nan if not points else points[-1][1] if math.isfinite(points[-1][1]) else math.inf

    @property
    def accuracy(self) -> float:
        """Exact match at training lengths at the end; NaN where it was not asked."""
        asked = self.values("eval/in_distribution")
        return self.final.get("eval/in_distribution", asked[-1] if asked else math.nan)

    @property
    def seen(self) -> float:
        """Exact match on what training reads, at the end: over again where samples are finite; NaN if not known."""
        ended = self.values("train/exact_match", 0.9)
        return self.final.get("seen/exact_match", sum(ended) / len(ended) if ended else math.nan)

    @property
    def is_over(self) -> bool:
        """Whether all planned steps were made, or no more can be."""
        return self.status != "" or any(int(line["step"]) >= self.steps for line in self.lines)

    def harm(self) -> str:
        """What is wrong with the run, in words; empty where nothing is, or where it is too early to say."""
        if self.status == "diverged":
            return "training diverged"
        if self.last_loss > GONE * self.first_loss:
            return f"the training loss is {self.last_loss:.3g}, far above its start at {self.first_loss:.3g}"
        if not self.is_over or self.status not in ("", "finished"):
            return ""
        if not math.isnan(self.accuracy):
            below = f"exact match at training lengths ended at {self.accuracy:.3g}, below the gate {GATE:g}"
            return below if self.accuracy < GATE else ""
        ended = self.values("train/loss", 0.9)
        unlearned = bool(ended) and median(ended) > UNLEARNED * self.first_loss
        return f"the training loss fell from {self.first_loss:.3g} to {median(ended):.3g} only" if unlearned else ""


def computes_otherwise(model: ModelSpec) -> bool:
    """Whether evaluation is declared to compute another thing than training, beyond leaving dropout out."""
    position = model.position
    stretched = isinstance(position, ScaledRoPE) and position.train_factor != position.test_factor
    return stretched or isinstance(position, Randomised) or isinstance(model.norm, BatchNorm)


def history_of(spec: RunSpec, lines: Iterable[Mapping[str, float]], record: RunRecord | None = None) -> History:
    """The history of a run of ours."""
    return History(
        lines=tuple(lines),
        steps=spec.train.steps,
        status=record.status if record else "",
        final=record.final if record else {},
        scores=record.scores if record else (),
        training=tuple(spec.task.lengths.training),
        comparable=not isinstance(spec.train.sampling, Finite) and not computes_otherwise(spec.model),
    )
