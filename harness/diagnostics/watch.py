"""The Lightning callback that watches training: it takes the signals, and keeps them for whoever writes curves."""

from collections import deque
from typing import Any

import pytorch_lightning as pl
import torch

from harness.diagnostics.signals import (
    Contract,
    Signals,
    Surprise,
    adam,
    block_gradients,
    hyperparameters,
    inside,
    matrices,
    update,
)
from harness.diagnostics.subject import Subject
from harness.spec import RunSpec
from tasks.task import Batch

OBSERVATIONS = 12  # looks inside of a run
APART = 50  # steps between them at least: each costs about what a step does
EARLY = (1, 2, 4, 8)  # steps at which the optimiser alone is looked at
EVERY = 10  # steps between looks at the losses
PROBED = 4  # sequences of the probe batch


class Watch(pl.Callback):
    """Watches a LightningModule's training. `points` holds the signals of each step that nobody has taken yet,
    `trouble` why it cannot look inside.

    It works for any module that returns its loss; `subject` names what to look at inside, and `contract` what is
    declared of the optimiser; `probe` are the sequences that are looked at inside. It leaves the model as it is.
    """

    def __init__(
        self, subject: Subject, contract: Contract | None = None, *, steps: int, probe: Batch | None = None
    ) -> None:
        self.subject, self.contract, self.steps = subject, contract or Contract(), steps
        self.probe = probe or (subject.tokens if subject.batch is None else subject.batch.rows(slice(PROBED)))
        self.observed = observed(steps)
        self.points: dict[int, Signals] = {}
        self.surprise = Surprise()
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.before: list[torch.Tensor] = []
        self.seen: Signals = {}
        self.trouble = ""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know."""
        return {"past": list(self.surprise.past), "first": self.surprise.first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what an interrupted run left."""
        self.surprise.past = deque(map(tuple, state_dict["past"]), maxlen=self.surprise.past.maxlen)
        self.surprise.first = state_dict["first"]

    def take(self, step: int) -> Signals:
        """The signals of a step, which are then forgotten."""
        return self.points.pop(step, {})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the model as it is before the first step."""
        if trainer.global_step == 0:
            self._put(0, self._inside())

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keep the weights of a step that is looked at, and see its gradients before they are clipped."""
        if trainer.global_step + 1 in self.observed:
            self.before = [w.detach().clone() for w in matrices(self.subject)]
            numbers = hyperparameters(optimizer, trainer.global_step, self.contract)
            self.seen = block_gradients(self.subject) | numbers

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the step's signals."""
        step = trainer.global_step
        self._count(pl_module, outputs)
        if self.before:
            after = matrices(self.subject)
            self._put(step, self.seen | update(self.before, [w.detach() for w in after]) | self._clipped())
            self._put(step, adam(trainer.optimizers[0], self.before, after, step - 1, self.contract))
            self.before = []
            if step not in EARLY:
                self._put(step, self._inside())
        if step % EVERY == 0 or step == self.steps:
            losses, norms = (torch.stack(each).tolist() for each in zip(*(p[1:] for p in self.pending), strict=True))
            lengths = [length for length, _, _ in self.pending]
            self._put(step, self.surprise.of(list(zip(lengths, losses, norms, strict=True))))
            self.pending = []

    def _count(self, module: Any, outputs: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        norm = getattr(module, "gradient_norm", torch.zeros(()))
        self.pending.append((getattr(module, "shape", (0, 0, 0))[1], loss.detach().float(), norm.float()))

    def _inside(self) -> Signals:
        if self.trouble:
            return {}
        try:
            return inside(self.subject, self.probe)
        except Exception as error:  # of a user's own module, anything: the record says it, and the run is not lost
            self.trouble = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return {}

    def _clipped(self) -> Signals:
        if self.contract.clip is None:
            return {}
        gradients = [p.grad for p in self.subject.model.parameters() if p.grad is not None]
        norm = torch.stack(list(torch._foreach_norm(gradients))).norm().item()
        return {"optimizer/clip_fit": norm / self.contract.clip}

    def _put(self, step: int, signals: Signals) -> None:
        self.points.setdefault(step, {}).update(signals)


def observed(steps: int) -> set[int]:
    """The steps after which a run of so many is looked at."""
    apart = max(APART, round(steps / OBSERVATIONS / EVERY) * EVERY)
    return {*EARLY, *range(apart, steps, apart), steps}


def contract_of(spec: RunSpec) -> Contract:
    """What a spec declares of the optimiser."""
    train = spec.train

    def learning_rate(taken: int) -> float:
        return train.learning_rate * train.schedule.factor(taken, train.steps, spec.model.d_model)

    return Contract(learning_rate, train.beta1, train.beta2, train.eps, train.weight_decay, train.gradient_clip)
