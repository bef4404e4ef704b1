"""The chapter on diagnosis, and what else shows people the findings of a run: tables, tags, the live table, lines."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hand_made import blocks, study
from test_progress import missing, planned, screen, shown

from harness import progress
from harness.engine import Ended
from harness.progress import LiveTable, PlainLines
from harness.record import Diagnosed, RunRecord, Score
from harness.report.blocks import Items, Text
from harness.report.chapters.diagnosis import CHAPTER
from harness.report.tables import Findings, findings
from harness.results import load_study
from harness.tracking.content import outcome_tags, run_text
from harness.tracking.received import Label


def found(probe: str, rank: int, *, alarm: bool = True, **changes: Any) -> Diagnosed:
    """A finding; its sentences name its probe."""
    words = {name: f"{name} of {probe}" for name in ("symptom", "measures", "cause", "remedy", "source")}
    return Diagnosed(
        **{"probe": probe, "rank": rank, "alarm": alarm, "value": 2.5, "healthy": "at most 1", **words, **changes}
    )


SCALE = found("scale_fit", 3, where="layer 1")
RATE = found("update_ratio", 40)
CLIFF = found("extrapolation_cliff", 60, alarm=False, value=0.125)
LOST = found("divergence", 58, value=math.inf)


def made(folder: Path, said: dict[tuple[str, int], tuple[Diagnosed, ...]]) -> Findings:
    """A study of two variants and two seeds, with findings by variant and seed."""
    study(folder, ("one", "two"), axes=("model.position",), seeds=2)
    document = json.loads((folder / "study.json").read_text())
    for cell in document["runs"]:
        path = folder / "runs" / cell["fingerprint"] / "record.json"
        own = said.get((cell["variant"], cell["seed"]), ())
        RunRecord.read(path).model_copy(update={"findings": own}).write(path)
    return findings(load_study(folder))


ILL = {("one", 0): (SCALE, RATE), ("two", 0): (CLIFF,), ("two", 1): (SCALE, CLIFF.model_copy(update={"value": 0.25}))}


def test_a_study_without_findings_has_no_such_chapter(tmp_path: Path) -> None:
    assert blocks(CHAPTER, made(tmp_path, {})) == []


def test_alarms_stand_in_the_order_of_triage_with_cause_and_remedy(tmp_path: Path) -> None:
    said, alarms, _, heading, remarks = blocks(CHAPTER, made(tmp_path, ILL))
    assert said == Text("Of 3 runs that were looked at, 2 raised an alarm.")
    assert isinstance(alarms, Items)
    first, second = alarms.items
    assert first.startswith("scale_fit: symptom of scale_fit, in one on copy (seed 0), two on copy (seed 1).")
    assert "Seen: measures of scale_fit: 2.5; healthy: at most 1." in first
    assert first.endswith("Likely cause: cause of scale_fit. Try: remedy of scale_fit (source of scale_fit).")
    assert second.startswith("update_ratio: symptom of update_ratio, in one on copy (seed 0).")
    assert isinstance(heading, Text)
    assert isinstance(remarks, Items)
    (remark,) = remarks.items
    assert "extrapolation_cliff, in 2 of 3 runs. Seen: " in remark
    assert "0.125 to 0.25; healthy: at most 1." in remark
    assert "Likely cause" not in remark


def test_remarks_alone_and_alarms_alone_make_one_list(tmp_path: Path) -> None:
    said, *rest = blocks(CHAPTER, made(tmp_path / "remarks", {("one", 0): (CLIFF,)}))
    assert said == Text("Of 1 run that were looked at, none raised an alarm.")
    assert [len(block.items) for block in rest if isinstance(block, Items)] == [1]
    _, *rest = blocks(CHAPTER, made(tmp_path / "alarms", {("one", 0): (LOST,)}))
    (alarms,) = (block for block in rest if isinstance(block, Items))
    assert "inf" in alarms.items[0]


def test_another_cause_has_an_item_of_its_own(tmp_path: Path) -> None:
    other = SCALE.model_copy(update={"cause": "not scaled at all"})
    found = blocks(CHAPTER, made(tmp_path, {("one", 0): (SCALE,), ("two", 0): (other,)}))
    (alarms,) = (block for block in found if isinstance(block, Items))
    assert ["Likely cause: not scaled at all." in item for item in alarms.items] == [False, True]


def test_the_table_of_runs_has_the_diagnosis(tmp_path: Path) -> None:
    runs = made(tmp_path, ILL).data.runs.set_index(["variant", "seed"])["diagnosis"]
    assert runs.to_dict() == {("one", 0): "scale_fit", ("two", 0): "", ("one", 1): "", ("two", 1): "scale_fit"}


def record(*said: Diagnosed, status: str = "finished", **changes: Any) -> RunRecord:
    scores = (Score(length=4, metric="exact_match", value=0.5), Score(length=3, metric="exact_match", value=1.0))
    fields = {"fingerprint": "0" * 16, "spec": {}, "status": status, "scores": scores, "findings": said}
    return RunRecord.model_validate(fields | {"ledger": {"diagnostics": "training"}} | changes)


def test_findings_make_the_round_trip_through_a_record(tmp_path: Path) -> None:
    record(SCALE, LOST, CLIFF.model_copy(update={"value": math.nan})).write(tmp_path / "record.json")
    again = RunRecord.read(tmp_path / "record.json").findings
    assert again[:2] == (SCALE, LOST)
    assert math.isnan(again[2].value)
    assert again[2].model_copy(update={"value": 0.125}) == CLIFF


def test_the_diagnosis_is_the_first_alarm() -> None:
    assert record(CLIFF, SCALE, RATE).diagnosis == "scale_fit"
    assert record(CLIFF).diagnosis == record().diagnosis == ""


def test_records_without_findings_are_read(tmp_path: Path) -> None:
    document = record().model_dump()
    del document["findings"]
    (tmp_path / "record.json").write_text(json.dumps(document))
    assert RunRecord.read(tmp_path / "record.json").findings == ()


def test_tags_name_the_alarms_and_each_finding() -> None:
    tags = outcome_tags(record(SCALE, RATE, CLIFF))
    assert tags["diagnosis"] == "scale_fit, update_ratio"
    assert tags["diagnosis.scale_fit"] == "alarm: 2.5 at layer 1 (healthy: at most 1)"
    assert tags["diagnosis.extrapolation_cliff"] == "remark: 0.125 (healthy: at most 1)"
    assert outcome_tags(record(CLIFF))["diagnosis"] == outcome_tags(record())["diagnosis"] == "none"


@pytest.mark.parametrize("ledger", [{}, {"diagnostics": "off"}], ids=["an older record", "off"])
def test_runs_that_nobody_looked_at_have_no_diagnosis(ledger: dict[str, str]) -> None:
    assert not [name for name in outcome_tags(record(ledger=ledger)) if name.startswith("diagnosis")]


def test_the_text_of_a_run_has_the_alarms_with_cause_and_remedy() -> None:
    plan = {"differences": {}, "baseline": "one"}
    text = run_text(plan, Label(variant="one", task="copy", seed=0, budget="quick"), record(SCALE, CLIFF))
    assert "**scale_fit**: symptom of scale_fit. Likely cause: cause of scale_fit. Try: remedy of scale_fit." in text
    assert "extrapolation_cliff" not in text


def end(folder: Path, fingerprint: str, *said: Diagnosed) -> Ended:
    record(*said, fingerprint=fingerprint).write(folder / "runs" / fingerprint / "record.json")
    return Ended(fingerprint, "finished")


def test_the_live_table_marks_runs_with_an_alarm(tmp_path: Path) -> None:
    plan = planned()
    table = LiveTable(tmp_path, screen())
    prints = [cell.fingerprint for cell in plan.cells if (cell.task, cell.variant) == ("copy", "original")]
    quiet = next(cell.fingerprint for cell in plan.cells if (cell.task, cell.variant) == ("copy", "variant 1"))
    ended = end(tmp_path, prints[0], SCALE, RATE)  # before this invocation
    table.begin(plan, missing(plan) | {ended.fingerprint: "finished"}, [])
    assert re.search(r"copy +original +1/2 !1 ", shown(table))
    table.event(end(tmp_path, prints[1], CLIFF, RATE))
    table.event(end(tmp_path, quiet, CLIFF))
    assert re.search(r"copy +original +2/2 !2 ", shown(table))
    assert re.search(r"variant 1 +1/2 +0.500", shown(table))


def test_a_plain_line_tells_the_diagnosis(tmp_path: Path) -> None:
    plan, out = planned(seeds=1), io.StringIO()
    lines = PlainLines(tmp_path, progress.console(out))
    lines.begin(plan, missing(plan), [])
    lines.event(end(tmp_path, plan.cells[0].fingerprint, SCALE, RATE))
    lines.event(end(tmp_path, plan.cells[1].fingerprint, CLIFF))
    said = out.getvalue().splitlines()
    assert said[1].startswith("[1/4] copy · original · seed 0: finished, score 0.500, diagnosis scale_fit")
    assert "diagnosis" not in said[2]
