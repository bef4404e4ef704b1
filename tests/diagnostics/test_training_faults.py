"""Faults of training, trained for a few steps: the first alarm names each, and is silent without it."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from faults.training import BROKEN, UNWISE, TrainingFault

from harness.diagnosis import of_run
from harness.record import RunRecord
from harness.runner import run
from harness.spec import RunSpec

FAULTS = {fault.name: fault for fault in (*BROKEN, *UNWISE)}
FEW = 60  # steps
QUICK = (
    ("rate too high", 5.0),
    ("warm-up left out", 1.0),
    ("β₂ changed", 0.95),
    ("stepped again", 0.5),
    ("unclipped", 1.0),
    ("frozen late", 20.0),
    ("targets shifted late", 20.0),
    ("smoothing undeclared", 0.05),
    ("gradients multiplied", 0.5),
    ("noise in training", 0.1),
    ("softmax twice", 1.0),
    ("averaged", 0.5),
    ("gradients kept", 2.0),
)
OTHERS = (
    ("rate too low", 0.2),
    ("schedule by epoch", 1.0),
    ("schedule moved rarely", 10.0),
    ("β₁ changed", 0.8),
    ("ε changed", 1e-06),
    ("decay changed", 0.1),
    ("plain descent", 1.0),
    ("labels of others", 0.3),
    ("dropout in training", 0.1),
    ("balance left out", 0.5),
    ("another seed late", 20.0),
    ("loss multiplied", 2.0),
    ("dropout asleep late", 20.0),
    ("embedding rows frozen", 1.0),
)
LONGER = (  # what shows only once something is learned, or lost again
    ("same batches", 1.0, 200),
    ("gradients lost", 100.0, 120),
    ("updates reversed", 50.0, 250),
    ("declared rate too high", 3.0, 200),
    ("declared rate too low", 3e-6, 100),
    ("ε declared too large", 10.0, 100),
    ("too few steps", 60.0, 60),
    ("too few samples", 12.0, 300),
    ("deep, no residual", 6.0, 100),
)


def shortened(name: str, steps: int) -> TrainingFault:
    return replace(FAULTS[name], train=FAULTS[name].train | {"steps": steps, "batch_size": 16, "eval_samples": 16})


def diagnosed(spec: RunSpec) -> RunRecord:
    with TemporaryDirectory() as folder:
        return run(spec, directory=Path(folder) / "run", probes=Path(folder) / "probes")


@lru_cache
def _sound(spec: RunSpec) -> set[str]:
    """What alarms where nothing is wrong, but for what comes of so few steps."""
    return {found.probe for found in diagnosed(spec).findings if found.alarm}


def named_first(fault: TrainingFault, strength: float) -> None:
    spec = fault.spec(strength, seed=0)
    with fault.injected(strength):
        record = diagnosed(spec)
    assert record.diagnosis in fault.named, [(found.probe, found.alarm, found.value) for found in record.findings]


def test_of_two_faults_both_act_and_both_are_named() -> None:
    one, other = shortened("frozen late", FEW), shortened("β₁ changed", FEW)
    with one.injected(20.0), other.injected(0.8):
        alarms = {found.probe for found in diagnosed(one.spec(20.0, seed=0)).findings if found.alarm}
    assert {"gradient_fit", "optimizer_fit"} <= alarms


CASES = [pytest.param(*case, id=case[0]) for case in QUICK]
CASES += [pytest.param(*case, id=case[0], marks=pytest.mark.slow) for case in OTHERS]


@pytest.mark.parametrize(("name", "strength"), CASES)
def test_a_fault_is_named_first_and_only_where_it_is(name: str, strength: float) -> None:
    fault = shortened(name, FEW)
    named_first(fault, strength)
    assert not _sound(fault.spec(strength, seed=0)) & set(fault.named)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strength", "steps"), LONGER, ids=[name for name, *_ in LONGER])
def test_a_fault_that_takes_longer_is_named_first(name: str, strength: float, steps: int) -> None:
    named_first(shortened(name, steps), strength)


def test_the_diagnosis_of_a_run_on_disk_is_that_of_its_record(tmp_path: Path) -> None:
    fault = shortened("β₂ changed", FEW)
    with fault.injected(0.95):
        record = run(fault.spec(0.95, seed=0), directory=tmp_path / "run", probes=tmp_path / "probes")
    found = of_run(str(tmp_path / "run"), tmp_path).findings(dear=False)
    first = next(finding for finding in found if finding.alarms)
    assert first.probe.name == record.diagnosis == "optimizer_fit"
    assert first.cause == "1 − β₂ is 2.5 times the declared one"
