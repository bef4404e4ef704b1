"""Probes of the optimisation path: whether every parameter learns, micro-batches add up, evaluation repeats itself."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.diagnostics.finding import Measured, NotApplicable
from harness.diagnostics.keeping import kept, mode, seed_draws
from harness.diagnostics.masking import apart
from harness.diagnostics.operators import WRONG_DIMENSION, attended
from harness.diagnostics.subject import Subject
from tasks.task import Batch

STEPS = 3
OVERFIT = 200  # steps
DRAWS = 4  # of training mode: one that leaves out whole layers may leave none out
MOVES = 1e-4  # deviations of the logits: more is no rounding


def wiring(subject: Subject) -> Measured | NotApplicable:
    """Parameters that the optimiser does not hold, that get no gradient or do not move within three steps, that are
    declared and missing or there and not declared.
    """
    wrong = dict(_undeclared(subject))
    if subject.optimizer is not None and has_loss(subject):
        wrong = dict(_unmoved(subject, subject.optimizer)) | wrong
    elif not subject.parameters:
        return NotApplicable("no optimiser with something to learn and no parameters are declared")
    where = next(iter(wrong), "")
    more = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
    return Measured(float(len(wrong)), where, f"{where} {wrong[where]}{more}" if wrong else "")


def _undeclared(subject: Subject) -> Iterator[tuple[str, str]]:
    if not subject.parameters:
        return
    there = {name for name, _ in subject.model.named_parameters()}
    for name in sorted(there - set(subject.parameters)):
        yield name, "is there and not declared: a tie that is broken, or a part that is doubled"
    for name in sorted(set(subject.parameters) - there):
        yield name, "is declared and not there"


def _unmoved(subject: Subject, make: Callable[[], torch.optim.Optimizer]) -> Iterator[tuple[str, str]]:
    model = subject.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    largest = dict.fromkeys(before, 0.0)
    with trained(subject):
        optimizer = make()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for step in range(STEPS):
            _step(subject, optimizer, step)
            for name, p in model.named_parameters():
                if p.grad is not None:
                    largest[name] = max(largest[name], float(p.grad.abs().max().nan_to_num(nan=math.inf)))
        for name, p in ((name, p) for name, p in model.named_parameters() if name not in subject.frozen):
            if not p.requires_grad:
                yield name, "is frozen"
            elif id(p) not in held:
                yield name, "is not in the optimiser"
            elif name in subject.idle:
                continue
            elif largest[name] == 0:
                yield name, "gets no gradient"
            elif p.detach().equal(before[name]):
                yield name, "does not move"


def _step(subject: Subject, optimizer: torch.optim.Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = training_loss(subject, step)
    loss.backward()
    optimizer.step()
    return loss.item()


def has_loss(subject: Subject) -> bool:
    """Whether there is something that training would learn from."""
    return subject.training_loss is not None or subject.batch is not None


def training_loss(subject: Subject, step: int) -> Tensor:
    """The loss of a training step, with the same draws for the same step."""
    seed_draws(step, "diagnostics")
    if subject.training_loss is not None:
        return subject.training_loss()
    assert subject.batch is not None
    return subject.loss(subject.predict(subject.model, subject.batch), subject.batch)


@contextmanager
def trained(subject: Subject) -> Iterator[None]:
    """Training mode, without gradients so far; afterwards parameters, buffers, gradients and draws are as before."""
    model = subject.model
    before = {p: (p.detach().clone(), p.grad) for p in model.parameters()}
    model.zero_grad()
    with mode(model, training=True), kept(model):
        try:
            yield
        finally:
            with torch.no_grad():
                for p, (value, gradient) in before.items():
                    p.copy_(value)
                    p.grad = gradient


def accumulation_parity(subject: Subject) -> Measured | NotApplicable:
    """How far gradients added up over micro-batches of unequal sizes are from those of the whole batch, relative."""
    if subject.accumulate is None or subject.batch is None:
        return NotApplicable("training reads one batch a step" if subject.batch else "there is no batch with targets")
    whole, count = subject.batch, len(subject.batch.inputs)
    cut = max(1, count // 3)
    parts = [whole.rows(slice(0, cut)), whole.rows(slice(cut, count))]
    one, many = (_gradients(subject, batches) for batches in ([whole], parts))
    return Measured(float((one - many).norm() / one.norm().clamp(min=1e-30)))


def _gradients(subject: Subject, batches: list[Batch]) -> Tensor:
    assert subject.accumulate is not None
    with trained(subject):
        seed_draws(0, "diagnostics")
        subject.accumulate(batches)
        return torch.cat([p.grad.flatten().clone() for p in subject.model.parameters() if p.grad is not None])


def finite(subject: Subject) -> Measured:
    """Numbers that are not finite, in weights and in the logits of both modes."""
    weights = [*subject.model.parameters(), *subject.model.buffers()]
    bad = {
        "weights": sum(int((~x.isfinite()).sum()) for x in weights),
        "logits in evaluation mode": int((~subject.logits(subject.tokens).isfinite()).sum()),
        "logits in training mode": int((~subject.logits(subject.tokens, training=True).isfinite()).sum()),
    }
    cause = ""
    if bad["weights"]:
        cause = "weights are not finite: training has diverged, or a file is damaged"
    elif any(bad.values()) and not all(call.over_keys for call in attended(subject)):
        cause = WRONG_DIMENSION
    return Measured(float(sum(bad.values())), next((name for name, n in bad.items() if n), ""), cause, bad)


def eval_determinism(subject: Subject) -> Measured:
    """How far two evaluations of the same tokens are apart."""
    before, after = (subject.logits(subject.tokens, draw=draw) for draw in (0, 1))
    return Measured(apart(after - before, before))


def mode_fit(subject: Subject) -> Measured | NotApplicable:
    """1 where training mode computes something else than evaluation mode and is not declared to, or the reverse."""
    if subject.draws is None:
        return NotApplicable("it is not declared what training mode draws")
    evaluated = subject.logits(subject.tokens)
    trained = (subject.logits(subject.tokens, training=True, draw=draw) for draw in range(DRAWS))
    differs = any(apart(each - evaluated, evaluated) > MOVES for each in trained)
    cause = "dropout, jitter or other statistics are alive in training mode that nothing declares"
    if subject.draws:
        cause = "the declared dropout, jitter, capacity or batch statistics do not act in training mode"
    return Measured(float(differs != subject.draws), cause=cause)


def overfit_one_batch(subject: Subject) -> Measured | NotApplicable:
    """The training loss after 200 steps on one batch, over its start."""
    if subject.optimizer is None or not has_loss(subject):
        return NotApplicable("no optimiser with something to learn is declared")
    with trained(subject):
        optimizer = subject.optimizer()
        losses = [_step(subject, optimizer, step) for step in range(OVERFIT)]
    return Measured(losses[-1] / losses[0] if math.isfinite(losses[-1]) else math.inf)
