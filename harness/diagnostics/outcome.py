"""Detectors of how training went as a whole: whether it learned, what, and whether that carries over."""

import math
from itertools import pairwise
from statistics import fmean

from harness.diagnostics.finding import Measured, NotApplicable
from harness.diagnostics.history import History
from harness.evaluate import GATE

SMOOTH = 5  # points
SOLVED = 0.9  # exact match on training samples: what is amiss then is not how they were learned


def diverged(history: History) -> Measured | NotApplicable:
    """The last loss over the first; ∞ where numbers are lost."""
    if history.status == "diverged" and not history.last_loss > history.first_loss:
        return Measured(math.inf)  # the curve ends before the point that was no number
    if math.isnan(history.last_loss) or math.isnan(history.first_loss):
        return NotApplicable("there is no loss")
    return Measured(history.last_loss / max(history.first_loss, 1e-30))


def fresh_gap(history: History) -> Measured | NotApplicable:
    """Exact match on training batches less that on evaluation batches, where both ask and compute the same."""
    return _gap(history) if history.comparable else NotApplicable("training and evaluation are not declared to agree")


def finite_gap(history: History) -> Measured | NotApplicable:
    """Exact match on training samples that are seen again and again, less that on fresh ones."""
    seen = history.final.get("seen/exact_match", math.nan)
    if math.isnan(seen):
        return NotApplicable("training samples are fresh, or were not asked again")
    return _gap(history) if seen >= SOLVED else NotApplicable("training samples are not solved either")


def _gap(history: History) -> Measured | NotApplicable:
    gap = history.seen - history.accuracy
    return NotApplicable("there is no evaluation at training lengths") if math.isnan(gap) else Measured(gap)


def ascent(history: History) -> Measured | NotApplicable:
    """In how many points in a row the loss, a mean of five points, has risen."""
    losses = history.values("train/loss")
    if len(losses) < SMOOTH + 1:
        return NotApplicable("there are not enough points")
    means = [fmean(losses[i : i + SMOOTH]) for i in range(len(losses) - SMOOTH + 1)]
    longest = current = 0
    for before, after in pairwise(means):
        current = current + 1 if after > before else 0
        longest = max(longest, current)
    return Measured(float(longest))


def slow_convergence(history: History) -> Measured | NotApplicable:
    """By which share of itself the loss still fell from the third to the last quarter of the run."""
    if history.accuracy >= GATE:
        return NotApplicable("the task is learned")
    if history.seen >= GATE:
        return NotApplicable("training samples are solved")
    third, last = history.values("train/loss", 0.5, 0.75), history.values("train/loss", 0.75)
    if not third or not last or history.status == "diverged":
        return NotApplicable("there are not enough points")
    return Measured(1 - fmean(last) / max(fmean(third), 1e-30))


def extrapolation_cliff(history: History) -> Measured | NotApplicable:
    """Exact match at the first length beyond training, over that at training lengths."""
    exact = {score.length: score.value for score in history.scores if score.metric == "exact_match"}
    beyond = min((length for length in exact if length > max(history.training, default=0)), default=None)
    if beyond is None or not history.accuracy >= GATE:
        return NotApplicable("nothing longer was asked, or training lengths are not learned")
    return Measured(exact[beyond] / history.accuracy, f"length {beyond}")


def not_learned(history: History) -> Measured | NotApplicable:
    """Exact match at training lengths at the end."""
    if not history.is_over or math.isnan(history.accuracy):
        return NotApplicable("the run is not over, or was not asked")
    return Measured(history.accuracy)
