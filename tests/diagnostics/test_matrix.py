"""The published matrix counts what it says it counts, and its halves share no case."""

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from faults.matrix import (
    CALIBRATION,
    EVALUATION,
    by_fault,
    cases,
    confusion,
    diagnosis,
    publish,
    read,
    run_all,
    summary,
)

from harness.diagnostics import DETECTORS, PROBES


def row(kind: str, fault: str, named: list[str], alarms: list[str], accuracy: float, **more: Any) -> dict[str, Any]:
    first = diagnosis(alarms)
    return {
        "kind": kind,
        "fault": fault,
        "strength": 1.0,
        "seed": 17,
        "half": EVALUATION,
        "named": [named] if named else [],
        "alarms": alarms,
        "remarks": ["spike"] if kind == "healthy" else [],
        "accuracy": accuracy,
        "detected": 10,
        "first": first,
        "right": first in named if named else first == "nothing",
        "all_named": bool(set(named) & set(alarms)),
    } | more


TABLE = pd.DataFrame(
    [
        row("structural", "0 no_mask", ["causal_leak"], ["causal_leak", "visibility"], float("nan"), detected=0),
        row("structural", "1 frozen", ["wiring"], [], float("nan"), detected=-1),
        row("broken", "rate too high", ["learning_rate_fit"], ["learning_rate_fit"], 1.0),
        row("broken", "rate too high", ["learning_rate_fit"], ["spike", "learning_rate_fit"], 0.2, seed=27),
        row("unwise", "too few steps", ["slow_convergence"], ["not_learned"], 0.5),
        row("unwise", "too few samples", ["finite_gap"], [], 1.0),
        row("healthy", "pre, Copy, seed 100", [], [], 1.0),
        row("healthy", "post, Copy, seed 100", [], ["spike"], 0.99),
        row("healthy", "linear, Copy, seed 100", [], ["slow_convergence"], 0.5),
        row("pair", "rate too low + same batches", ["fresh_gap"], ["spike", "fresh_gap"], 0.1),
    ]
)


def test_halves_share_no_case_and_no_name_is_used_twice() -> None:
    found = list(cases())
    assert max(Counter(case.key for case in found).values()) == 1
    halves = {half: {case.key for case in found if case.half == half} for half in (CALIBRATION, EVALUATION)}
    assert all(halves.values())
    assert not {case.seed for case in found if case.half == CALIBRATION} & {
        case.seed for case in found if case.half == EVALUATION
    }


def test_every_fault_is_named_by_what_there_is() -> None:
    from faults.matrix import FAULTS, PAIRS, TRAINED

    known = {probe.name for probe in PROBES} | {detector.name for detector in DETECTORS}
    assert {name for fault in TRAINED.values() for name in fault.named} | {fault.named for fault in FAULTS} <= known
    assert {name for pair in PAIRS for name in pair} <= TRAINED.keys()


def test_healthy_runs_are_those_that_pass_and_unwise_ones_those_that_came_to_harm() -> None:
    counts = summary(TABLE).set_index("what")[["cases", "right"]].apply(tuple, axis=1).to_dict()
    assert counts == {
        "structural faults, named first": (2, 1),
        "broken training, named first": (2, 1),
        "unwise declarations that came to harm, named first": (1, 0),
        "pairs of faults, both named": (1, 1),
        "healthy runs that pass their gate, no alarm": (2, 1),
    }


def test_a_fault_has_its_recall_what_was_said_instead_and_whether_it_hurts() -> None:
    found = by_fault(TABLE).set_index("fault")
    assert found.loc["rate too high", ["recall", "instead", "hurts", "steps_to_detect"]].tolist() == [
        0.5,
        "spike",
        "no",
        10,
    ]
    assert found.loc["1 frozen", ["recall", "instead", "hurts"]].tolist() == [0.0, "nothing", ""]


def test_the_confusion_counts_single_faults_and_healthy_runs() -> None:
    counted = confusion(TABLE)
    assert counted.to_numpy().sum() == 8  # without the pair, and without the run that is not healthy
    assert counted.loc["nothing", "nothing"] == 1
    assert counted.loc["slow_convergence", "unknown"] == 1
    assert counted.loc["wiring", "nothing"] == 1


def test_what_is_published_can_be_read(tmp_path: Path) -> None:
    publish(TABLE, tmp_path, "make faults")
    assert (tmp_path / "confusion.png").stat().st_size > 10_000
    page = (tmp_path / "report.md").read_text()
    assert "| rate too high (broken) | 1 | learning_rate_fit | 0.50 | spike | 10 | no |" in page
    assert "- post, Copy, seed 100: spike" in page
    assert "came to harm: spike (2)." in page
    assert len(pd.read_csv(tmp_path / "cases.csv")) == len(TABLE)


def test_cases_that_are_not_done_are_left_out(tmp_path: Path) -> None:
    todo = [case for case in cases() if case.kind == "structural"][:2]
    assert read(todo, tmp_path).empty
    run_all(todo[:1], tmp_path, jobs=1)
    done = read(todo, tmp_path)
    assert done[["fault", "right", "half"]].to_numpy().tolist() == [[todo[0].fault, True, CALIBRATION]]
