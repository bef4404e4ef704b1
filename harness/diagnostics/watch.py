"""The Lightning callback that watches training: it takes the signals, and keeps them for whoever writes curves."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch

from harness.diagnostics.finding import in_words
from harness.diagnostics.signals import (
    Contract,
    Signals,
    Surprise,
    adam,
    block_gradients,
    clip_fit,
    gradient_norm,
    hyperparameters,
    inside,
    matrices,
    update,
)
from harness.diagnostics.subject import Subject
from harness.module import TransformerModule, decay_groups
from harness.spec import RunSpec
from tasks.task import Batch

OBSERVATIONS = 12  # looks inside of a run
APART = 50  # steps between them at least: each costs about what a step does
EARLY = (1, 2, 4, 8)  # steps at which the optimiser alone is looked at
EVERY = 10  # steps between looks at the losses
PROBED = 4  # sequences of the probe batch


class Watch(pl.Callback):
    """Watches a LightningModule's training. `points` holds the signals of each step that nobody has taken yet,
    `trouble` why it cannot look any more.

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
        self.names: list[str] = []
        self.norm = 0.0
        self.last = 0
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
        """Note what is trained, and look at the model as it is before the first step."""
        self.names = matrices(self.subject)
        self.last = trainer.global_step
        if trainer.global_step == 0:
            self._look(0, self._inside)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keep the weights of a step that is looked at, and see its gradients before they are clipped."""
        taken = trainer.global_step
        if taken + 1 not in self.observed:
            return
        self.before = [w.detach().clone() for w in self._weights()]
        self.norm = gradient_norm(list(self.subject.model.parameters())).item()
        names = {id(p): name for name, p in self.subject.model.named_parameters()}
        self._look(taken + 1, lambda: hyperparameters(optimizer, taken, self.contract, names))
        self._look(taken + 1, lambda: block_gradients(self.subject))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the step's signals, once all its micro-batches are read."""
        step = trainer.global_step
        self._count(pl_module, outputs)
        if step == self.last:
            return
        self.last = step
        if self.before:
            before, self.before = self.before, []
            self._look(step, lambda: update(before, [w.detach() for w in self._weights()]))
            self._look(step, lambda: adam(trainer.optimizers[0], before, self._weights(), step - 1, self.contract))
            self._look(step, self._clipped)
            if step not in EARLY:
                self._look(step, self._inside)
        if self.pending and (step % EVERY == 0 or step == self.steps):
            losses, norms = (torch.stack(each).tolist() for each in zip(*(p[1:] for p in self.pending), strict=True))
            lengths = [length for length, _, _ in self.pending]
            self._look(step, lambda: self.surprise.of(list(zip(lengths, losses, norms, strict=True))))
            self.pending = []

    def _weights(self) -> list[torch.nn.Parameter]:
        named = dict(self.subject.model.named_parameters())
        return [named[name] for name in self.names]

    def _count(self, module: pl.LightningModule, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, torch.Tensor):  # a step that was left out
            return
        length, norm = 0, torch.zeros(())
        if isinstance(module, TransformerModule):
            length, norm = module.shape[1], module.gradient_norm
        self.pending.append((length, loss.detach().float(), norm.float()))

    def _inside(self) -> Signals:
        return inside(self.subject, self.probe)

    def _clipped(self) -> Signals:
        if self.contract.clip is None:
            return {}
        after = gradient_norm(list(self.subject.model.parameters())).item()
        return clip_fit(self.norm, after, self.contract.clip)

    def _look(self, step: int, take: Callable[[], Signals]) -> None:
        if self.trouble:
            return
        try:
            self.points.setdefault(step, {}).update(take())
        except Exception as error:  # of a user's own module, anything: the record says it, and the run is not lost
            self.trouble = in_words(error)


def observed(steps: int) -> set[int]:
    """The steps after which a run of so many is looked at."""
    apart = max(APART, round(steps / OBSERVATIONS / EVERY) * EVERY)
    return {*EARLY, *range(apart, steps, apart), steps}


def contract_of(spec: RunSpec, model: torch.nn.Module) -> Contract:
    """What a spec declares of the optimiser of its model."""
    train = spec.train

    def learning_rate(taken: int) -> float:
        return train.learning_rate * train.schedule.factor(taken, train.steps, spec.model.d_model)

    decays = {
        id(p): group["weight_decay"] for group in decay_groups(model, train.weight_decay) for p in group["params"]
    }
    decay = {name: decays[id(p)] for name, p in model.named_parameters() if id(p) in decays}
    return Contract(learning_rate, train.beta1, train.beta2, train.eps, decay, train.gradient_clip or math.inf)
