"""The Lightning callback that watches training: it takes the signals, and keeps them for whoever writes curves."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch

from harness.diagnostics.contract import Contract, declared_step, gradient_error, same_batch
from harness.diagnostics.signals import (
    Signals,
    Surprise,
    adam,
    block_gradients,
    clip_fit,
    elsewhere,
    gradient_norm,
    hyperparameters,
    inside,
    lengths,
    matrices,
    numbers,
    update,
)
from harness.diagnostics.subject import Subject
from harness.module import TransformerModule
from harness.wording import in_words
from tasks.task import Batch

OBSERVATIONS = 8  # looks inside of a run
APART = 50  # steps between them at least: each costs about what a step does
EARLY = (1, 2, 4, 8)  # steps at which the optimiser alone is looked at
EVERY = 10  # steps between looks at the losses
PROBED = 4  # sequences of the probe batch


class Watch(pl.Callback):
    """Watches a LightningModule's training. `points` holds the signals of each step that nobody has taken yet,
    `trouble` why it cannot look any more.

    It works for any module that returns its loss; `subject` names what to look at inside, and `contract` what is
    declared of training; `probe` are the sequences that are looked at inside. It leaves the model as it is.
    """

    def __init__(
        self, subject: Subject, contract: Contract | None = None, *, steps: int, probe: Batch | None = None
    ) -> None:
        self.subject, self.contract, self.steps = subject, contract or Contract(), steps
        self.probe = probe or (subject.tokens if subject.batch is None else subject.batch.rows(slice(PROBED)))
        self.observed, self.compared = observed(steps), compared(steps)
        self.points: dict[int, Signals] = {}
        self.surprise = Surprise()
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []  # the weights as a step that was looked at left them,
        self.moved: list[float] = []  # and how far it moved each
        self.names: list[str] = []
        self.norm = 0.0
        self.started: tuple[Any, list[torch.Tensor]] | None = None  # a step that is compared: its batch, the buffers
        self.due: torch.Tensor | None = None  # the loss that it should have
        self.trained: set[str] = set()
        self.last = 0
        self.trouble = ""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know."""
        return {"past": list(self.surprise.past), "first": self.surprise.first, "moved": self.moved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what an interrupted run left."""
        self.surprise.past = deque(map(tuple, state_dict["past"]), maxlen=self.surprise.past.maxlen)
        self.surprise.first = state_dict["first"]
        self.moved = state_dict["moved"]

    def take(self, step: int) -> Signals:
        """The signals of a step, which are then forgotten."""
        return self.points.pop(step, {})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what is trained, and look at the model as it is before the first step."""
        self.names = matrices(self.subject)
        self.trained = {name for name, p in self.subject.model.named_parameters() if p.requires_grad}
        self.last = trainer.global_step
        self.after = [w.detach().clone() for w in self._weights()] if self.moved else []  # as it was left
        if trainer.global_step == 0:
            self._look(0, self._inside)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep what a step that is compared starts from; not one that reads several batches."""
        compares = trainer.global_step + 1 in self.compared and trainer.accumulate_grad_batches == 1
        if compares and self.contract.losses is not None:
            self.started = batch, [buffer.clone() for buffer in self.subject.model.buffers()]

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        """See what gradients a step that is compared begins with."""
        if self.started is not None:
            self._look(trainer.global_step + 1, self._left_over)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Keep the weights of a step that is looked at, and see its gradients before they are clipped."""
        taken = trainer.global_step
        if self.moved:
            moved, self.moved = self.moved, []
            self._look(taken + 1, lambda: elsewhere(moved, self.after, [w.detach() for w in self._weights()]))
        if taken + 1 not in self.observed:
            return
        self._look(taken + 1, self._keep)
        names = {id(p): name for name, p in self.subject.model.named_parameters()}
        self._look(taken + 1, lambda: hyperparameters(optimizer, taken, self.contract, names))
        self._look(taken + 1, lambda: block_gradients(self.subject))
        if self.started is not None:
            (batch, buffers), self.started = self.started, None
            read = pl_module.read if isinstance(pl_module, TransformerModule) else batch
            self._look(taken + 1, lambda: self._compare(read, taken, buffers))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the step's signals, once all its micro-batches are read."""
        step = trainer.global_step
        self._count(pl_module, outputs)
        if step == self.last:
            return
        self.last = step
        if self.due is not None:
            due, self.due = self.due, None
            self._look(step, lambda: {"step/loss_fit": (self.pending[-1][1] / due).item()})
        if step in self.observed and self.contract.batch is not None and isinstance(pl_module, TransformerModule):
            self._look(step, lambda: self._same(pl_module.read, step - 1))
        if self.before:
            before, self.before = self.before, []
            self._look(step, lambda: self._moved(before, keep=step not in EARLY))
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

    def _keep(self) -> Signals:
        self.before = [w.detach().clone() for w in self._weights()]
        self.norm = gradient_norm(list(self.subject.model.parameters())).item()
        return {}

    def _moved(self, before: list[torch.Tensor], *, keep: bool) -> Signals:
        """How far the step went; the next one may want to see that nothing else moved the weights."""
        after = [w.detach() for w in self._weights()]
        moved = lengths(before, after)
        if keep:
            self.after, self.moved = [w.clone() for w in after], moved.tolist()
        return update(before, moved)

    def _left_over(self) -> Signals:
        return {"gradient/left_over": gradient_norm(list(self.subject.model.parameters())).item()}

    def _compare(self, read: Any, taken: int, buffers: list[torch.Tensor]) -> Signals:
        """The gradients that are there with those of the declared step; nothing where that is lost itself."""
        middle = taken + 1 not in (1, self.steps)  # the noise scale is a curve that no detector needs
        step = declared_step(self.subject.model, self.contract, read, taken, buffers, noise=middle)
        if not step.loss.isfinite():
            return {}
        self.due = step.loss
        named = {name: p for name, p in self.subject.model.named_parameters() if name in self.trained}
        found = numbers(gradient_error(named, step, self.subject.blocks) | step.others)
        return {f"gradient/{name}": value for name, value in found.items() if not math.isnan(value)}

    def _same(self, read: Batch | None, taken: int) -> Signals:
        assert self.contract.batch is not None
        assert read is not None
        return {"step/batch_fit": same_batch(self.contract.batch(taken), read)}

    def _inside(self) -> Signals:
        return inside(self.subject, self.probe)

    def _clipped(self) -> Signals:
        if self.contract.clip is None:
            return {}
        after = gradient_norm(list(self.subject.model.parameters())).item()
        return clip_fit(self.norm, after, self.contract.clip)

    def _look(self, step: int, take: Callable[[], Signals]) -> None:
        try:
            self.points.setdefault(step, {}).update(take())
        except Exception as error:  # of a user's own module, anything: the record says it, and the run is not lost
            self.trouble = self.trouble or in_words(error)


def observed(steps: int) -> set[int]:
    """The steps after which a run of so many is looked at."""
    apart = max(APART, round(steps / OBSERVATIONS / EVERY) * EVERY)
    return {*EARLY, *range(apart, steps, apart), steps}


def compared(steps: int) -> set[int]:
    """The first, that half way or the next one, and the last: the step is compared with the declared one, which costs
    up to two more.
    """
    seen = sorted(observed(steps))
    return {1, next(step for step in seen if 2 * step >= steps), steps}
