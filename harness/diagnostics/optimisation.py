"""Detectors of the optimiser: whether it does what is declared, and whether its steps have a healthy size."""

import math
from statistics import median

from harness.diagnostics.finding import Measured, NotApplicable
from harness.diagnostics.history import History
from harness.diagnostics.signals import furthest

FIRST = 0.01  # of the steps: while a warm-up is at work
SETTLED = (0.2, 0.8)  # of the steps: after it, and before the rate has gone down
USUAL = 1e-3  # a relative update of a model that trains well
LARGE = 1e-2  # a relative update that no model trains well with
RISES = 1.5  # times, from the first step to the eighth
SAME = 1.002  # times: losses that differ by the order of their sums alone
RATES_APART = 1.5  # times: how far rates of a schedule that is not the declared one lie from each other
WORDS = {
    "beta1": "1 − β₁ is {:.3g} times the declared one",
    "beta2": "1 − β₂ is {:.3g} times the declared one",
    "eps": "ε is {:.3g} times the declared one",
    "weight_decay": "weight decay is {:.3g} times the declared one",
    "clip": "clipped gradients have {:.3g} times the norm that they should have",
    "elsewhere": "weights are changed outside of the optimiser's step",
    "age": "Adam has counted {:.3g} times the steps that were taken: its moments were lost",
}


def batch_fit(history: History) -> Measured | NotApplicable:
    """The least share of a batch's numbers that are the declared ones."""
    points = history.series("step/batch_fit")
    if not points:
        return NotApplicable("no data are declared")
    step, share = min(points, key=lambda point: point[1])
    return Measured(share, f"step {step}")


def loss_fit(history: History) -> Measured | NotApplicable:
    """The loss of a step over that which is declared for its batch, where they are furthest apart."""
    points = history.series("step/loss_fit")
    if not points:
        return NotApplicable("no loss is declared")
    step, fit = max(points, key=lambda point: abs(math.log(point[1])) if 0 < point[1] < math.inf else math.inf)
    return Measured(fit, f"step {step}")


def gradient_fit(history: History) -> Measured | NotApplicable:
    """How far gradients that reach the optimiser are from those of the declared loss, where they are furthest apart."""
    lost = loss_fit(history)
    if isinstance(lost, NotApplicable):
        return lost
    if not 1 / SAME <= lost.value <= SAME:
        return NotApplicable("the loss itself is not the declared one")
    found = [
        (error, int(line["step"]), name.partition("error")[2], line.get("gradient/fit", math.nan))
        for line in history.lines
        for name, error in line.items()
        if name.startswith("gradient/error")
    ]
    if not found:
        return NotApplicable("gradients were not compared")
    left_over = max(history.values("gradient/left_over"), default=0.0)
    error, step, place, fit = max(found, key=lambda each: each[0])  # the first of the largest
    where = f"block {int(place[1:]) + 1}" if place else "outside of the blocks"
    cause = ""
    if math.isinf(error):
        cause = "gradients that should be finite are not when they reach the optimiser"
    elif left_over > 0:
        cause = "gradients of earlier steps are still there: they are not set to zero before a step"
    elif fit < -0.01 or 1.99 < error < 2.01:
        cause = "the sign of gradients is wrong: steps climb"
    elif fit < 0.01:
        cause = "gradients do not reach the optimiser"
    elif abs(math.log(fit)) > 0.1 and abs(error - abs(fit - 1)) < 0.1 * error:
        cause = f"gradients reach the optimiser {fit:.3g} times as large as they are"
    elif 0.99 < error < 1.01:
        cause = "some gradients do not reach the optimiser: weights or rows of them are frozen, masked or cut off"
    return Measured(error, f"{where}, step {step}", cause, {"factor": fit})


def learning_rate_fit(history: History) -> Measured | NotApplicable:
    """The learning rate that acts, over the declared one, where they are furthest apart."""
    points = history.series("optimizer/learning_rate_fit")
    if not points:
        return NotApplicable("no learning rate is declared")
    fits = [fit for _, fit in points]
    early = [fit for step, fit in points if step <= max(1, FIRST * history.steps)]
    later = [fit for step, fit in points if step > FIRST * history.steps]
    settled = bool(later) and furthest(later) < RATES_APART and furthest(early or [1.0]) > RATES_APART
    cause = ""
    if settled and min(later) > 1 / RATES_APART:
        cause = "the declared warm-up is not applied"
    elif max(fits) > RATES_APART * max(min(fits), 1e-12):
        cause = "the schedule is not the declared one, or is not moved at every step"
    elif abs(fits[0] - 1) > 0.1:
        cause = f"the learning rate is {median(fits):.3g} times the declared one throughout"
    found = furthest(fits)
    return Measured(found, f"step {points[fits.index(found)][0]}", cause)


def optimizer_fit(history: History) -> Measured | NotApplicable:
    """What acts over what is declared, for the optimiser's other numbers and for the step as a whole."""
    found: dict[str, float] = {}
    for name in WORDS:
        if fits := history.values(f"optimizer/{name}_fit"):
            found[name] = furthest(fits)
    for name, curve in (("step", "optimizer/step_error"), ("elsewhere", "update/elsewhere")):
        if errors := history.values(curve):
            found[name] = 1 + max(errors)
    if not found:
        return NotApplicable("nothing is declared of the optimiser")
    name = next(name for name, fit in found.items() if fit == furthest(found.values()))
    cause = WORDS.get(name, "a step is not the one that the declared rule makes of these moments").format(found[name])
    if found.get("beta1") == found.get("beta2") == 0:
        cause = "another optimiser than the declared Adam acts"
    return Measured(found[name], name, cause, found)


def stopped(history: History) -> Measured | NotApplicable:
    """The largest share of weight matrices that a step left as they were, of the steps that moved any."""
    return _largest(history, "update/unmoved")


def no_warmup(history: History) -> Measured | NotApplicable:
    """The largest relative update of the first steps over the median of the later ones; over a usual one, where those
    have become smaller, as of a model that has learned.
    """
    points = history.series("update/ratio")
    first, eighth = (dict(points).get(step, math.nan) for step in (1, 8))
    if eighth > RISES * first:
        return NotApplicable("updates rise from the first step on: a warm-up acts")
    early = [ratio for step, ratio in points if step <= max(1, FIRST * history.steps)]
    later = history.values("update/ratio", *SETTLED)
    if not early or not later:
        return NotApplicable("updates were not looked at early and late")
    if median(later) > LARGE:
        return NotApplicable("later updates are too large as well")
    return Measured(max(early) / max(median(later), USUAL), evidence={"early": max(early), "later": median(later)})


def update_peak(history: History) -> Measured | NotApplicable:
    """The largest relative update of a step that was looked at."""
    return _largest(history, "update/ratio")


def update_ratio(history: History) -> Measured | NotApplicable:
    """The median relative update, once warm-up is over; of a run that diverged before, of all its steps."""
    ratios = history.values("update/ratio", *SETTLED)
    if history.status == "diverged" and not ratios:
        ratios = history.values("update/ratio")
    if not ratios:
        return NotApplicable("updates were not looked at between warm-up and the end")
    middle = median(ratios)
    return Measured(middle, cause="the learning rate is too low" if middle < 1e-3 else "the learning rate is too high")


def stale_adam(history: History) -> Measured | NotApplicable:
    """The largest √mean(g²/v) once Adam has seen some gradients."""
    return _largest(history, "update/stale", FIRST)


def adam_eps(history: History) -> Measured | NotApplicable:
    """The root mean square of gradients over ε."""
    found = history.values("update/gradient_over_eps")
    return Measured(median(found)) if found else NotApplicable("the optimiser is not Adam")


def spike(history: History) -> Measured | NotApplicable:
    """How far a loss stood out from the steps before it, in σ."""
    found = _largest(history, "spike/loss")
    if isinstance(found, Measured):
        norms = history.values("spike/gradient")
        return Measured(found.value, found.where, evidence={"gradient": max(norms, default=math.nan)})
    return found


def _largest(history: History, name: str, begin: float = 0.0) -> Measured | NotApplicable:
    points = [(step, x) for step, x in history.series(name) if step > begin * history.steps and math.isfinite(x)]
    if not points:
        return NotApplicable(f"{name} was not looked at")
    step, value = max(points, key=lambda point: point[1])
    return Measured(value, f"step {step}")
