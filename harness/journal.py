"""The Lightning callback that writes a run's directory while it trains: curves, attention maps, checkpoints."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytorch_lightning as pl
import torch

from harness.evaluate import score_lengths
from harness.module import TransformerModule
from harness.record import mean_score, read_curves
from harness.spec import RunSpec
from harness.trace import Trace

LOG_EVERY = 10  # steps between points of a curve; checkpoints fall on such steps, so that no mean is cut in two
CHECKPOINT_SECONDS = 5.0  # a kill loses at most so much work
SNAPSHOTS = 5  # attention maps a run keeps, the untrained and the trained model's among them
MONITOR_SHARE = 4  # evaluations during training use a quarter of the final one's samples


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint holds everything up to `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped at step {step}")
        self.step = step


class Diverged(Exception):
    """Loss or gradient are no longer finite."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands; `loss` in nats, mean over the last `LOG_EVERY` steps."""

    step: int
    steps: int
    loss: float
    steps_per_second: float


class Journal(pl.Callback):
    """Writes curves, attention maps and checkpoints of one run; stops it when asked or when it has diverged."""

    def __init__(
        self,
        spec: RunSpec,
        directory: Path,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        watched: Callable[[int], dict[str, float]] | None = None,
    ) -> None:
        self.spec, self.directory = spec, directory
        self.on_progress = on_progress or (lambda progress: None)
        self.should_stop = should_stop or (lambda: False)
        self.watched = watched or (lambda step: {})  # what else is known of a step by then
        self.curves = directory / "curves.jsonl"
        self.torn = self.curves.exists() and not self.curves.read_bytes().endswith(b"\n")  # by a kill, in mid-line
        self.written = {int(line["step"]) for line in read_curves(self.curves)}
        self.snapshots = {round(i * spec.train.steps / (SNAPSHOTS - 1)) for i in range(SNAPSHOTS)}
        self.spent = 0.0  # seconds of training before the last interruption
        self.sequences: dict[tuple[int, int], int] = {}  # tokens of a sequence, of its source -> how many were read
        self.stopping = False
        self._forget()

    @property
    def seconds(self) -> float:
        """Wall time of training, interruptions left out."""
        return self.spent + time.perf_counter() - self.begun

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know."""
        return {"seconds": self.seconds, "sequences": dict(self.sequences)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what an interrupted run left."""
        self.spent, self.sequences = state_dict["seconds"], dict(state_dict["sequences"])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clocks."""
        self.begun = self.saved = self.logged = time.perf_counter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the attention of the untrained model."""
        if trainer.global_step == 0:
            self._snapshot(cast(TransformerModule, pl_module), 0)
            if line := self.watched(0):
                self.write(0, line)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sum up the step; write a point, evaluate, save or stop if it is time."""
        module, step = cast(TransformerModule, pl_module), trainer.global_step
        self._count(module)
        if step in self.snapshots:
            self._snapshot(module, step)
        last = step == self.spec.train.steps
        logs = last or step % LOG_EVERY == 0
        line = self._point(module, step) if logs else {}
        if step % self.spec.train.eval_every == 0 and not last:
            line |= self._monitor(module)
        line |= self.watched(step)
        if line:
            self.write(step, line)
        if logs:
            self._forget()
            self._save_or_stop(trainer, step)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append a point to the curves, once a step: a resumed run repeats steps to the bit."""
        if step in self.written:
            return
        self.written.add(step)
        line = json.dumps({"step": step, "time": time.time_ns() // 1_000_000, **metrics})
        with self.curves.open("a") as file:
            file.write("\n" * self.torn + line + "\n")
        self.torn = False

    def _forget(self) -> None:
        self.loss, self.exact_match, self.steps = torch.zeros(()), torch.zeros(()), 0

    def _count(self, module: TransformerModule) -> None:
        self.loss = self.loss + module.loss
        self.exact_match = self.exact_match + module.exact_match
        self.steps += 1
        batch, tokens, source = module.shape
        self.sequences[tokens, source] = self.sequences.get((tokens, source), 0) + batch

    def _point(self, module: TransformerModule, step: int) -> dict[str, float]:
        loss, norm = self.loss.item() / self.steps, module.gradient_norm.item()
        now = time.perf_counter()
        speed, self.logged = self.steps / (now - self.logged), now
        self.on_progress(Progress(step, self.spec.train.steps, loss, speed))
        if not np.isfinite([loss, norm]).all():
            what = "loss" if not np.isfinite(loss) else "gradient norm"
            raise Diverged(f"the {what} was not finite any more between steps {step - self.steps} and {step}")
        return {
            "train/loss": loss,
            "train/exact_match": self.exact_match.item() / self.steps,
            "train/learning_rate": module.learning_rate,
            "train/gradient_norm": norm,
            **_router_points(module),
        }

    def _monitor(self, module: TransformerModule) -> dict[str, float]:
        lengths, samples = self.spec.task.lengths, max(1, self.spec.train.eval_samples // MONITOR_SHARE)
        with evaluating(module):
            near = score_lengths(module, self.spec, lengths.training, stream="monitor", samples=samples)
            far = score_lengths(module, self.spec, lengths.test, stream="monitor", samples=samples)
        points = {"eval/in_distribution": mean_score(near, lengths.training)}
        return points | ({"eval/extrapolation": mean_score(far, lengths.test)} if far else {})

    def _save_or_stop(self, trainer: pl.Trainer, step: int) -> None:
        stop = self.should_stop()
        if step < self.spec.train.steps and (stop or time.perf_counter() - self.saved > CHECKPOINT_SECONDS):
            target = self.directory / "checkpoint.ckpt"
            partial = target.with_suffix(".partial")
            trainer.save_checkpoint(partial)
            partial.replace(target)
            self.saved = time.perf_counter()
        if stop and step < self.spec.train.steps:  # a run that has come to its end is evaluated
            raise Interrupted(step)

    def _snapshot(self, module: TransformerModule, step: int) -> None:
        file = self.directory / "attention" / f"{step:06d}.npz"
        if file.exists():
            return
        file.parent.mkdir(exist_ok=True)
        task = self.spec.task
        batch = task.batch(0, "probe", 0, 1, task.lengths.train[1], module.device, self.spec.layout)
        trace = Trace()
        with evaluating(module):
            module.model(*batch.reading, trace=trace)
        labels = np.array([task.label(token) for token in batch.inputs[0].tolist()])
        weights = trace.stacked("attention")[:, 0].half().cpu().numpy()
        partial = file.with_suffix(".partial")
        with partial.open("wb") as opened:
            np.savez_compressed(opened, weights=weights, labels=labels)
        partial.replace(file)


def _router_points(module: TransformerModule) -> dict[str, float]:
    """What the routers did at the last step, mean over the mixtures of experts; nothing without any.

    Loads are the smallest and the largest expert's share of the choices, times the number of experts: 1 when even.
    """
    if not module.routing:
        return {}
    found = {
        "router/loss": [routing.loss for routing in module.routing],
        "router/entropy": [routing.entropy for routing in module.routing],
        "router/max_violation": [routing.max_violation for routing in module.routing],
        "router/dropped": [routing.dropped for routing in module.routing],
        "router/load_min": [routing.load.min() * len(routing.load) for routing in module.routing],
        "router/load_max": [routing.load.max() * len(routing.load) for routing in module.routing],
    }
    return {name: torch.stack(values).mean().item() for name, values in found.items()}


@contextmanager
def evaluating(module: TransformerModule) -> Iterator[None]:
    """No gradients, evaluation mode, the spec's precision; training mode is restored."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), module.autocast():
            yield
    finally:
        module.train(was_training)
