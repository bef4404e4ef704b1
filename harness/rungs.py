"""The Lightning callback that asks at certain steps whether a run is worth going on with: what pruning a sweep takes.

Optuna's own callback imports `lightning`, which is not installed, and it would bring Optuna into every worker; here
whoever started the run decides, from a step and a loss.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl

from harness.evaluate import answer_metrics, read_lengths
from harness.journal import MONITOR_SHARE, evaluating
from harness.module import TransformerModule
from harness.spec import RunSpec


class Pruned(Exception):
    """Training was given up at `step`, where the in-distribution loss was `loss`; the curves up to there are kept."""

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"pruned at step {step} with an in-distribution loss of {loss:.3g}")
        self.step, self.loss = step, loss


class Rungs(pl.Callback):
    """At each of some steps, before the next one, measures the loss at the training lengths and asks `go_on(step,
    loss)`.

    A run that goes on is the same to the bit as one that was not asked. A resumed run is asked again where it stands.
    """

    def __init__(self, spec: RunSpec, steps: tuple[int, ...], go_on: Callable[[int, float], bool]) -> None:
        self.spec, self.steps, self.go_on = spec, frozenset(steps), go_on

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measure and ask, if it is time; the journal has written and saved the step before."""
        step = trainer.global_step
        if step in self.steps:
            loss = in_distribution_loss(cast(TransformerModule, pl_module), self.spec)
            if not self.go_on(step, loss):
                raise Pruned(step, loss)


def in_distribution_loss(module: TransformerModule, spec: RunSpec) -> float:
    """Nats an answer token, without label smoothing, at the training lengths, on as many samples as evaluations during
    training take.
    """
    samples = max(1, spec.train.eval_samples // MONITOR_SHARE)
    with evaluating(module):
        fresh = read_lengths(module, spec, spec.task.lengths.training, stream="monitor", samples=samples)
    return answer_metrics(spec, fresh, {})["eval/loss"]


def leave_nothing_to_resume(directory: Path) -> None:
    """Of a pruned run its curves stay; what it would be resumed from goes."""
    (directory / "checkpoint.ckpt").unlink(missing_ok=True)
