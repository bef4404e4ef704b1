"""Every detector fires on a history that was made for it, is quiet on a healthy one, and speaks when it should."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness import ModelSpec, RunSpec, TrainSpec
from harness.components.norm import BatchNorm
from harness.components.position import NTKRoPE, Randomised, RoPE
from harness.diagnostics import DETECTORS, PROBES, Finding, History, Measured, Probe, detect, history_of
from harness.diagnostics.watch import EARLY, observed
from harness.evaluate import GATE
from harness.record import RunRecord, Score
from harness.spec import Finite
from tasks import Copy, Lengths

Curve = float | Callable[[int], float]

STEPS = 1000
LOGGED = ("train/", "spike/", "router/load", "router/dropped")  # every ten steps
STEPPED = ("optimizer/", "update/", "gradient/", "step/")  # when a step is looked at; the rest also before training
HEALTHY: dict[str, Curve] = {
    "train/loss": lambda step: 0.02 + 3 * math.exp(-step / 50),
    "train/exact_match": lambda step: min(1.0, step / 300),
    "spike/loss": 2.0,
    "spike/gradient": 2.0,
    "router/load_max": 1.3,
    "router/load_min": 0.7,
    "router/dropped": 0.0,
    **{f"optimizer/{name}_fit": 1.0 for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay")},
    "optimizer/clip_fit": 1.0,
    "optimizer/age_fit": 1.0,
    "optimizer/step_error": 1e-4,
    "update/ratio": 1e-3,
    "update/unmoved": 0.0,
    "update/stale": 1.1,
    "update/gradient_over_eps": 1e4,
    "step/batch_fit": 1.0,
    "step/loss_fit": 1.0,
    **{f"gradient/error{place}": 0.0 for place in ("", ".0", ".1")},
    "gradient/fit": 1.0,
    "gradient/auxiliary": 0.01,
    "gradient/block.0": 1.0,
    "gradient/block.1": 2.0,
    **{f"heads/logit_max.{layer}": 1.5 for layer in (0, 1)},
    **{f"heads/sharp.{layer}": 0.0 for layer in (0, 1)},
    "heads/uniform.0": 1.0,  # one layer of two
    "heads/uniform.1": 0.0,
    "residual/rms.0": 1.0,
    "residual/rms.1": 2.0,
    **{f"residual/distinct.{layer}": 0.5 for layer in (0, 1)},
    **{f"feedforward/dead.{layer}": 0.1 for layer in (0, 1)},
    **{f"router/logsumexp.{layer}": lambda step: 1.4 + step / STEPS for layer in (0, 1)},
}
FINAL = {"train/initial_loss": 3.0, "eval/in_distribution": 1.0, "seen/exact_match": 1.0}


def steps_of(name: str) -> set[int]:
    if name.startswith(LOGGED):
        return set(range(10, STEPS + 1, 10))
    return observed(STEPS) if name.startswith(STEPPED) else {0, *observed(STEPS)} - set(EARLY)


def exact(values: Mapping[int, float]) -> tuple[Score, ...]:
    return tuple(Score(length=length, metric="exact_match", value=value) for length, value in values.items())


def history(
    curves: Mapping[str, Curve] | None = None, final: Mapping[str, float] | None = None, begun: int = 0, **how: Any
) -> History:
    """A healthy run of two layers with experts, but for what is given, looked at from some step on."""
    lines: dict[int, dict[str, float]] = {}
    for name, curve in (HEALTHY | dict(curves or {})).items():
        for step in steps_of(name):
            lines.setdefault(step, {"step": step})[name] = curve(step) if callable(curve) else curve
    known: dict[str, Any] = {
        "steps": STEPS,
        "status": "finished",
        "scores": exact({1: 1.0, 2: 1.0, 3: 0.9}),
        "training": (1, 2),
        "comparable": True,
    }
    return History(
        [lines[step] for step in sorted(lines) if step >= begun], final=FINAL | dict(final or {}), **known | how
    )


def late(value: float, before: float, begin: int = STEPS // 2) -> Callable[[int], float]:
    return lambda step: value if step > begin else before


def falling(over: float) -> Callable[[int], float]:
    return lambda step: 3 * math.exp(-step / over)


@dataclass(frozen=True)
class Case:
    """A history made for a detector; `says` is in its cause or in its place."""

    detector: str
    curves: dict[str, Curve] = field(default_factory=dict)
    says: str = ""
    final: dict[str, float] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def history(self) -> History:
        return history(self.curves, self.final, **self.how)


HALF = {"eval/in_distribution": 0.5}
NEITHER = HALF | {"seen/exact_match": 0.5}
LOST = {"gradient/fit": 0.7}
CASES = (
    Case("batch_fit", {"step/batch_fit": late(0.9, 1.0)}, "step 600"),
    Case("loss_fit", {"step/loss_fit": late(1.1, 1.0)}, "step 600"),
    Case("loss_fit", {"step/loss_fit": late(math.nan, 1.0)}, "step 600"),
    Case("gradient_fit", {"gradient/error.1": late(1.0, 0.0)} | LOST, "block 2, step 600"),
    Case("gradient_fit", {"gradient/error": 1.0} | LOST, "outside of the blocks"),
    Case("gradient_fit", {"gradient/error": 1.0} | LOST, "some gradients do not reach"),
    Case("gradient_fit", {"gradient/error.0": 1.0, "gradient/fit": 0.0}, "gradients do not reach"),
    Case("gradient_fit", {"gradient/error.0": 2.0, "gradient/fit": -1.0}, "sign"),
    Case("gradient_fit", {"gradient/error.0": 2.0, "gradient/fit": 0.6}, "sign"),
    Case("gradient_fit", {"gradient/error.0": 2.3, "gradient/fit": -0.16}, "sign"),
    Case("gradient_fit", {"gradient/error.0": 99.0, "gradient/fit": 100.0}, "100 times as large"),
    Case("gradient_fit", {"gradient/error.0": math.inf, "gradient/fit": math.nan}, "should be finite"),
    Case("gradient_fit", {"gradient/error.0": 0.3, "gradient/fit": 1.1}, "something between"),
    Case("learning_rate_fit", {"optimizer/learning_rate_fit": 2.0}, "2 times the declared one throughout"),
    Case("learning_rate_fit", {"optimizer/learning_rate_fit": 0.2}, "0.2 times the declared one throughout"),
    Case("learning_rate_fit", {"optimizer/learning_rate_fit": late(1.0, 20.0, 10)}, "warm-up is not applied"),
    Case("learning_rate_fit", {"optimizer/learning_rate_fit": lambda step: 1 + step / 100}, "schedule"),
    Case("learning_rate_fit", {"optimizer/learning_rate_fit": late(0.1, 1.0)}, "schedule"),
    Case("optimizer_fit", {"optimizer/beta2_fit": 0.1}, "1 − β₂ is 0.1 times"),
    Case("optimizer_fit", {"optimizer/beta1_fit": 2.0, "optimizer/step_error": 0.2}, "1 − β₁ is 2 times"),
    Case("optimizer_fit", {"optimizer/eps_fit": 100.0}, "ε is 100 times"),
    Case("optimizer_fit", {"optimizer/weight_decay_fit": 0.0}, "weight decay is 0 times"),
    Case("optimizer_fit", {"optimizer/clip_fit": late(3.0, 1.0)}, "have 3 times the norm"),
    Case("optimizer_fit", {"optimizer/clip_fit": 0.1}, "have 0.1 times the norm"),
    Case("optimizer_fit", {"optimizer/age_fit": late(0.2, 1.0)}, "counted 0.2 times"),
    Case("optimizer_fit", {"optimizer/step_error": 2.0}, "not the one that the declared rule makes"),
    Case("optimizer_fit", {f"optimizer/{name}_fit": 0.0 for name in ("beta1", "beta2")}, "another optimiser"),
    Case("fresh_gap", {"train/exact_match": 1.0}, final=HALF),
    Case("stopped", {"update/unmoved": late(0.25, 0.0)}, "step 600"),
    Case("residual_jump", {"residual/rms.1": 20.0}, "block 2"),
    Case("depth_gradients", {"gradient/block.1": 30.0}, "block 2"),
    Case("depth_gradients", {"gradient/block.1": 0.03}, "block 1"),
    Case("rank_collapse", {"residual/distinct.1": 0.01}, "layer 2"),
    Case("initial_logits", {"heads/logit_max.0": 60.0}, "layer 1"),
    Case("ascent", {"train/loss": lambda step: 1.0 + max(0, step - 500) / 1000}),
    Case("no_warmup", {"update/ratio": late(2e-3, 2e-2, 8)}),
    Case("update_peak", {"update/ratio": late(1e-3, 0.05, 300)}, "step 1"),
    Case("update_ratio", {"update/ratio": 0.05}, "too high"),
    Case("update_ratio", {"update/ratio": 1e-5}, "too low"),
    Case("stale_adam", {"update/stale": late(4.0, 1.0)}, "step 600"),
    Case("adam_eps", {"update/gradient_over_eps": 1.0}),
    Case("dead_units", {"feedforward/dead.1": late(0.8, 0.0, STEPS - 1)}, "layer 2"),
    Case("attention_logits", {"heads/logit_max.1": lambda step: 1 + step / 5}, "layer 2"),
    Case("attention_saturated", {"heads/sharp.1": 0.5, "heads/logit_max.1": lambda step: 1 + step / 100}, "layer 2"),
    Case("attention_uniform", {"heads/uniform.1": 1.0}),
    Case("auxiliary_gradient", {"gradient/auxiliary": 0.5}),
    Case("moe_balance", {"router/load_max": lambda step: 3.0 if 300 < step <= 400 else 1.3}),
    Case("moe_idle", {"router/load_min": late(0.02, 0.7)}),
    Case("moe_dropped", {"router/dropped": late(0.3, 0.0)}),
    Case("router_logits", {"router/logsumexp.1": lambda step: 1 + step / 50}, "layer 2"),
    Case("finite_gap", final=HALF, how={"comparable": False}),
    Case("spike", {"spike/loss": lambda step: 20.0 if step == 500 else 2.0}, "step 500"),
    Case("slow_convergence", {"train/loss": falling(500)}, final=NEITHER),
    Case("divergence", {"train/loss": late(4.0, 2.0)}, how={"status": "diverged"}),
    Case("divergence", {"train/loss": 2.0}, how={"status": "diverged"}),
    Case("divergence", {"train/loss": late(math.nan, 2.0, STEPS - 1)}),
    Case("not_learned", final={"eval/in_distribution": 0.3, "seen/exact_match": 0.3}),
    Case("extrapolation_cliff", says="length 3", how={"scores": exact({1: 1.0, 2: 1.0, 3: 0.2, 4: 0.9})}),
)


def named(name: str) -> Probe[History]:
    return next(detector for detector in DETECTORS if detector.name == name)


def place(finding: Finding) -> str:
    return f"{finding.cause} {finding.found.where}" if isinstance(finding.found, Measured) else ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.detector}: {case.says}")
def test_a_detector_fires_on_a_history_that_was_made_for_it(case: Case) -> None:
    finding = named(case.detector).examine(case.history)
    assert finding.outside, finding.document()
    assert case.says in place(finding)


def test_every_detector_has_such_a_history() -> None:
    assert {case.detector for case in CASES} == {detector.name for detector in DETECTORS}


def test_every_detector_looks_at_a_healthy_history_and_finds_nothing() -> None:
    findings = detect(history())
    assert not [finding.document() for finding in findings if finding.outside]
    assert [finding.probe.name for finding in findings if not finding.measured] == ["slow_convergence"]
    slow = named("slow_convergence").examine(history({"train/loss": late(1.0, 3.0, 400)}, NEITHER))
    assert (slow.measured, slow.outside) == (True, False)


def test_nothing_was_looked_at_and_nothing_is_said() -> None:
    findings = detect(History([], steps=STEPS))
    assert not any(finding.measured for finding in findings)
    assert all(finding.document()["not_applicable"] for finding in findings)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.detector}: {case.says}")
def test_it_is_an_alarm_always_or_where_training_came_to_harm_or_never(case: Case) -> None:
    detector = named(case.detector)
    unharmed, harmed = (detector.examine(case.history, harmed=harm).alarms for harm in (False, True))
    assert (unharmed, harmed) == {"always": (True, True), "of harm": (False, True), "aside": (False, False)}[
        detector.speaks
    ]
    for harm in (False, True):
        finding = detector.examine(case.history, harmed=harm)
        assert finding.remarks != finding.alarms
        assert finding.document()["remark"] == finding.remarks
        assert finding.document()["cause"] == finding.cause


def test_what_lies_inside_is_neither_alarm_nor_remark() -> None:
    for finding in (detector.examine(history(), harmed=True) for detector in DETECTORS):
        assert not finding.alarms
        assert not finding.remarks
        assert "remedy" not in finding.document()


def test_harm_decides_what_alarms_in_a_run() -> None:
    curves = {"update/ratio": 0.05}
    unharmed, harmed = history(curves), history(curves, HALF | {"seen/exact_match": 0.5})
    assert [finding.probe.name for finding in detect(unharmed) if finding.alarms] == []
    assert [finding.probe.name for finding in detect(unharmed) if finding.remarks] == ["update_peak", "update_ratio"]
    assert [finding.probe.name for finding in detect(harmed) if finding.alarms] == ["update_peak", "update_ratio"]


HARMS: dict[str, tuple[History, str]] = {
    "learned": (history(), ""),
    "diverged": (history(status="diverged"), "training diverged"),
    "above its start": (history({"train/loss": late(4.0, 2.0)}), "far above its start at 3"),
    "no number": (history({"train/loss": late(math.nan, 2.0)}), "far above its start"),
    "not learned": (history(final={"eval/in_distribution": 0.97}), "below the gate 0.98"),
    "at the gate": (history(final={"eval/in_distribution": GATE}), ""),
    "failed for another reason": (history(final=HALF, status="failed"), ""),
    "out of memory": (history(final=HALF, status="out_of_memory"), ""),
    "too early to say": (history(final=HALF, status="", steps=2 * STEPS), ""),
    "never asked, learned": (History(history().lines, STEPS, final={"train/initial_loss": 3.0}), ""),
    "never asked, not learned": (
        History(history({"train/loss": 2.0}).lines, STEPS, final={"train/initial_loss": 3.0}),
        "fell from 3 to 2 only",
    ),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_what_harm_is(harm: tuple[History, str]) -> None:
    run, words = harm
    assert (run.harm() != "") == (words != "")
    assert words in run.harm()


QUIET: dict[str, tuple[str, History]] = {
    "layers that were not looked at before training": (
        "initial_logits", history({"heads/logit_max.0": 60.0}, begun=10)
    ),
    "heads that are sharp and whose logits are small": (
        "attention_saturated", history({"heads/sharp.0": 1.0, "heads/sharp.1": 1.0})
    ),
    "an imbalance of ninety steps": (
        "moe_balance", history({"router/load_max": lambda step: 3.0 if 300 < step <= 390 else 1.3})
    ),
    "experts that were idle at first": ("moe_idle", history({"router/load_min": late(0.7, 0.0, 400)})),
    "stale mean squares of the first steps": ("stale_adam", history({"update/stale": late(1.1, 9.0, 10)})),
    "units that were dead before training": ("dead_units", history({"feedforward/dead.1": late(0.0, 1.0)})),
    "tokens that have become alike in training": ("rank_collapse", history({"residual/distinct.1": late(0.0, 0.5)})),
    "a model that has learned and hardly moves": (
        "no_warmup", history({"update/ratio": late(1e-5, 3e-3, 8)})
    ),
    "updates that a warm-up lets rise": (
        "no_warmup", history({"update/ratio": lambda step: 0.01 * step if step < 9 else 1e-3})
    ),
    "a loss that climbs for a while": (
        "ascent", history({"train/loss": lambda step: 1 + 0.1 * math.sin(step / 10)})
    ),
    "training and evaluation are declared to differ": (
        "fresh_gap", history({"train/exact_match": 1.0}, HALF, comparable=False)
    ),
    "samples that are seen once": (
        "finite_gap",
        History(history().lines, STEPS, "finished", {"train/initial_loss": 3.0} | HALF),
    ),
    "a loss that is not the declared one has other gradients": (
        "gradient_fit", history({"gradient/error.0": 1.0, "step/loss_fit": 1.5})
    ),
    "a run that is not over": ("not_learned", history(final=HALF, status="", steps=2 * STEPS)),
    "a task that is learned": ("slow_convergence", history({"train/loss": falling(500)})),
    "a task that is not learned": ("extrapolation_cliff", history(final=HALF, scores=exact({1: 0.5, 3: 0.0}))),
}  # fmt: skip


@pytest.mark.parametrize("quiet", QUIET.values(), ids=QUIET)
def test_a_detector_is_quiet_where_it_might_err(quiet: tuple[str, History]) -> None:
    name, run = quiet
    finding = named(name).examine(run)
    assert not finding.outside, finding.document()


def test_findings_come_in_the_order_of_triage() -> None:
    findings = detect(history({"update/ratio": 0.05, "optimizer/step_error": 2.0}, {"eval/in_distribution": 0.2}))
    assert [finding.probe for finding in findings] == list(DETECTORS)
    alarms = [finding.probe.name for finding in findings if finding.alarms]
    assert alarms == ["optimizer_fit", "fresh_gap", "finite_gap", "update_peak", "update_ratio"]


def test_that_nothing_is_learned_is_an_alarm_of_its_own_where_no_other_explains_it() -> None:
    ignorant = {"eval/in_distribution": 0.3, "seen/exact_match": 0.3}
    alone, explained = detect(history(final=ignorant)), detect(history({"update/ratio": 0.05}, ignorant))
    assert [finding.probe.name for finding in alone if finding.alarms] == ["not_learned"]
    (last,) = (finding for finding in explained if finding.probe.name == "not_learned")
    assert last.document()["not_applicable"] == "explained by update_peak"


def test_what_is_declared_and_broken_comes_first_and_what_merely_went_wrong_last() -> None:
    names = [detector.name for detector in DETECTORS]
    always = [detector.name for detector in DETECTORS if detector.speaks == "always"]
    in_order = ["batch_fit", "loss_fit", "gradient_fit", "learning_rate_fit", "optimizer_fit", "fresh_gap", "stopped"]
    assert names[:7] == always[:7] == in_order
    assert names[-3:] == ["divergence", "not_learned", "extrapolation_cliff"]
    before_training = {"residual_jump", "depth_gradients", "rank_collapse", "initial_logits"}
    made_by_training = {"attention_logits", "attention_saturated", "dead_units", "moe_balance", "spike"}
    assert max(map(names.index, before_training)) < min(map(names.index, made_by_training))


CATALOGUE: list[Probe[Any]] = [*PROBES, *DETECTORS]


def test_names_of_the_catalogue_are_unique() -> None:
    names = [row.name for row in CATALOGUE]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: row.name)
def test_rows_of_the_catalogue_are_complete(row: Probe[Any]) -> None:
    document = row.document()
    assert json.loads(json.dumps(document)) == document
    for word in ("name", "symptom", "measures", "cause", "remedy", "source"):
        assert document[word].strip() == document[word] != ""
        assert not document[word].endswith(".")
    assert document["speaks"] in ("always", "of harm", "aside")
    assert row.low <= row.high
    assert row.bounds
    assert all(f"{bound:g}" in row.healthy for bound in row.bounds.values())
    assert row.healthy in "\n".join(row.lines())


def test_the_history_of_a_run_is_what_it_left() -> None:
    spec = RunSpec(task=Copy(lengths=Lengths(train=(2, 4), test=(5,))), train=TrainSpec(steps=30))
    lines: list[dict[str, float]] = [{"step": 10, "train/loss": 2.0}, {"step": 30, "train/loss": 1.0}]
    running = history_of(spec, lines)
    assert (running.status, running.steps, running.training) == ("", 30, (2, 3, 4))
    assert (running.first_loss, running.last_loss, running.is_over) == (2.0, 1.0, True)
    scores, final = exact({2: 1.0, 5: 0.5}), {"train/initial_loss": 2.5, "eval/in_distribution": 0.99}
    record = RunRecord(
        fingerprint="f", spec={}, status="finished", cause="", scores=scores, final=final
    )  # fmt: skip
    ended = history_of(spec, lines, record)
    assert (ended.status, ended.scores, ended.first_loss, ended.accuracy) == ("finished", scores, 2.5, 0.99)


@pytest.mark.parametrize(
    ("model", "train", "comparable"),
    [
        ({}, {}, True),
        ({"residual_dropout": 0.1}, {}, True),
        ({"norm": BatchNorm()}, {}, False),
        ({"position": Randomised(inner=RoPE())}, {}, False),
        ({"position": NTKRoPE()}, {}, False),
        ({}, {"sampling": Finite(num_samples=10)}, False),
    ],
)
def test_training_and_evaluation_are_compared_where_they_compute_the_same(
    model: dict[str, Any], train: dict[str, Any], comparable: bool
) -> None:
    spec = RunSpec(model=ModelSpec(**model), task=Copy(), train=TrainSpec(**train))
    assert history_of(spec, []).comparable == comparable
