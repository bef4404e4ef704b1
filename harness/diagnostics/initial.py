"""Probes of an untrained model and of its data: the first loss, what weights are drawn from, what is asked for."""

import math
from dataclasses import replace
from statistics import fmean, stdev

import torch

from harness.diagnostics.finding import Measured, NotApplicable, worst_of
from harness.diagnostics.subject import Subject
from tasks.task import IGNORED, PAD, Batch

FEWEST = 64  # numbers whose deviation says something
SURE = 5.0  # standard errors that a sample's deviation may miss the declared one by


def init_loss(subject: Subject) -> Measured | NotApplicable:
    """The first loss over the declared one; 1 where the draw of a model explains the difference."""
    if subject.batch is None or subject.trained:
        return NotApplicable("the model is trained" if subject.trained else "there is no batch with targets")
    logits = subject.logits(subject.batch, training=True)
    found = float(subject.loss(logits, subject.batch))
    guessing = math.log(logits.shape[-1])
    drawn = [guessing] if subject.first_loss is None else list(subject.first_loss())
    due, spread = fmean(drawn), stdev(drawn) if len(drawn) > 1 else 0.0
    ratio = found / due if abs(found - due) > SURE * spread else 1.0
    return Measured(ratio, evidence={"loss": found, "declared": due, "spread": spread, "guessing": guessing})


def init_std(subject: Subject) -> Measured | NotApplicable:
    """The deviation of drawn weights over the declared one, less what the sample is too small to tell: the furthest
    from 1 of all matrices.
    """
    if not subject.deviations or subject.trained:
        return NotApplicable("the model is trained" if subject.trained else "no initialisation is declared")
    parameters, ratios = dict(subject.model.named_parameters()), {}
    for name, deviation in subject.deviations.items():
        found = parameters[name].detach().double()
        if deviation == 0:
            ratios[name] = 1.0 if not found.any() else math.inf
        elif found.numel() >= FEWEST:
            ratio = float(found.std()) / deviation
            slack = SURE / math.sqrt(2 * found.numel())
            ratios[name] = ratio - max(-slack, min(slack, ratio - 1))
    worst = max(ratios, key=lambda name: abs(math.log(max(ratios[name], 1e-30))))
    return Measured(ratios[worst], worst if ratios[worst] != 1 else "", evidence=ratios)


def target_alignment(subject: Subject) -> Measured | NotApplicable:
    """The share of targets that are the next token of what is read, where the next one is read at all; the token itself
    where the loss moves targets on.
    """
    batch = subject.batch
    if batch is None:
        return NotApplicable("there is no batch with targets")
    if not subject.causal:
        return NotApplicable("an encoder answers in place")
    inputs = batch.inputs if batch.real is None else batch.inputs.where(batch.real, PAD)
    due = 0 if _moves_on(subject, batch) else 1
    shares = {offset: _share(inputs, batch.targets, offset) for offset in (-1, 0, 1, 2, 3)}
    best = worst_of(shares)
    cause = "" if best == due else f"targets are shifted: they fit tokens {best} places on, not {due}"
    if best == 0 and due == 1:
        cause = "the answer is leaked: what is asked for is the token that is being read"
    elif best == 1 and due == 0:
        cause = "targets are shifted twice: by the data, and by the loss"
    return Measured(shares[due], f"{best} places on fit best", cause, {str(k): v for k, v in shares.items()})


def _moves_on(subject: Subject, batch: Batch) -> bool:
    """Whether the loss itself compares logits with the next target: then neither the first target nor the last logits
    ever matter.
    """
    logits, targets = subject.logits(batch), subject.others(batch.inputs)
    other_logits, other_targets = logits.clone(), targets.clone()
    other_logits[:, -1] = logits[:, 0].flip(-1)
    other_targets[:, 0] = batch.inputs[:, 0]

    def loss(of: torch.Tensor, to: torch.Tensor) -> float:
        return float(subject.loss(of, replace(batch, targets=to)))

    return loss(logits, targets) == loss(other_logits, targets) == loss(logits, other_targets)


def _share(inputs: torch.Tensor, targets: torch.Tensor, offset: int) -> float:
    """Of the targets that have a token, not padding, read so many places on, the share that equal it."""
    length = inputs.shape[1]
    first, end = max(0, -offset), length - max(0, offset)
    asked = targets[:, first:end]
    read = inputs[:, first + offset : end + offset]
    counted = (asked != IGNORED) & (read != PAD)
    return float((asked == read)[counted].double().mean()) if counted.any() else 0.0
