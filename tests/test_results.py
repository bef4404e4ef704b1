import json
import math
from pathlib import Path
from typing import Any

import pytest
from small_study import plan, small

from harness.evaluate import METRICS
from harness.record import RunRecord, Score
from harness.results import load_study
from harness.schema import UserError
from harness.study import Budget, Plan, make_plan, write_plan
from tasks import Lengths, Reverse


def write_records(folder: Path, made: Plan, statuses: dict[int, str]) -> None:
    """Records for the cells by index; a finished run scores length / 10 everywhere."""
    for index, status in statuses.items():
        cell = made.cells[index]
        scored = {"finished": lambda n: n / 10, "diverged": lambda n: 0.0}.get(status)
        scores = tuple(
            Score(length=n, metric=m, value=scored(n)) for n in range(1, 6) for m in METRICS if scored is not None
        )
        fields: dict[str, Any] = {"status": status, "cause": "" if status == "finished" else "why", "scores": scores}
        fields |= {"final": {"train/loss": 1.5}, "ledger": {"parameters": 7, "attention_backend": "flash"}}
        RunRecord(fingerprint=cell.fingerprint, spec=cell.spec.document(), **fields).write(
            folder / "runs" / cell.fingerprint / "record.json"
        )


@pytest.fixture
def study(tmp_path: Path) -> Path:
    write_plan(plan(), tmp_path, {"command": "harness ablate small"})
    write_records(tmp_path, plan(), {0: "finished", 1: "diverged", 2: "failed", 3: "out_of_memory"})
    (tmp_path / "runs" / plan().cells[4].fingerprint).mkdir()
    (tmp_path / "runs" / plan().cells[4].fingerprint / "curves.jsonl").write_text(
        '{"step": 10, "time": 1, "train/loss": 2}\n'
    )
    return tmp_path


def test_every_planned_run_has_a_row_whatever_became_of_it(study: Path) -> None:
    runs = load_study(study).runs
    assert len(runs) == len(plan().cells)
    assert runs["status"].tolist()[:6] == ["finished", "diverged", "failed", "out_of_memory", "partial", "missing"]
    assert runs["cause"].tolist()[:4] == ["", "why", "why", "why"]
    assert runs.loc[0, "train/loss"] == 1.5
    assert runs.loc[0, "parameters"] == 7
    first = ["study", "variant", "task", "seed", "status", "cause", "diagnosis"]
    first += ["fingerprint", "mlflow_run_id", "commit"]
    assert runs.columns.tolist()[: len(first)] == first


def test_commits_and_machines_are_those_of_the_records(study: Path) -> None:
    for cell, commit in zip(plan().cells, ("aaa", "aaa", "bbb"), strict=False):
        path = study / "runs" / cell.fingerprint / "record.json"
        RunRecord.read(path).model_copy(update={"environment": {"commit": commit, "torch": "2.0"}}).write(path)
    data = load_study(study)
    assert data.runs["commit"].tolist()[:5] == ["aaa", "aaa", "bbb", "", ""]
    assert data.environment["commit"] == "aaa (2 runs), bbb (1 run)"
    assert data.environment["torch"] == "2.0"
    assert data.environment["cores"] == data.document["environment"]["cores"]  # no record says


def test_the_primary_score_is_the_mean_over_test_lengths(study: Path) -> None:
    primary = load_study(study).primary()
    assert len(primary) == len(plan().cells)
    assert primary["score"].tolist()[:2] == pytest.approx([0.45, 0.0])
    assert all(math.isnan(score) for score in primary["score"].tolist()[2:])


def test_a_task_without_test_lengths_is_scored_on_its_training_lengths(tmp_path: Path) -> None:
    tasks = {"copy": small().tasks["copy"], "short": Reverse(lengths=Lengths(train=(1, 3), test=()))}
    made = plan(small(tasks=tasks))
    write_plan(made, tmp_path, {})
    write_records(tmp_path, made, {0: "finished", len(made.cells) - 1: "finished"})
    primary = load_study(tmp_path).primary()
    assert primary["score"].iloc[0] == pytest.approx(0.45)
    assert primary["score"].iloc[-1] == pytest.approx(0.3)  # of all lengths, 1 to 5, that its record scores


def test_learning_time_is_the_share_of_the_steps_and_1_for_what_never_learned(tmp_path: Path) -> None:
    variants = {**small().variants, "longer": {"train.steps": 80}}
    timed = small(
        score="learning_time", higher_is_better=False, axes=("model.position", "train.steps"), variants=variants,
        budgets={"quick": Budget(seeds=3)},
    )  # fmt: skip
    made = plan(timed)
    write_plan(made, tmp_path, {})
    write_records(tmp_path, made, {0: "finished", 1: "finished", 2: "diverged", 3: "finished", 4: "failed"})
    for index, final, *passed in ((0, 1.0, 5, 10), (1, 0.9, 5), (2, 1.0, 5), (3, 1.0, 20)):
        folder = tmp_path / "runs" / made.cells[index].fingerprint
        lines = [{"step": step, "time": 0, "eval/in_distribution": 1.0} for step in passed]
        lines.insert(0, {"step": 2, "time": 0, "eval/in_distribution": 0.97})
        (folder / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        record = RunRecord.read(folder / "record.json")
        record.model_copy(update={"final": {"eval/in_distribution": final}}).write(folder / "record.json")
    data = load_study(tmp_path)
    assert [cell.variant for cell in made.cells[:5]] == ["sinusoidal", "none", "rope", "longer", "sinusoidal"]
    assert data.primary()["score"].tolist()[:4] == [5 / 20, 1.0, 1.0, 20 / 80]
    assert data.primary()["score"].iloc[4:].isna().all()
    assert data.metric == "exact_match"


def test_a_pilot_gives_no_verdict(tmp_path: Path) -> None:
    verdicts = {}
    for name, pilot in (("real", False), ("pilot", True)):
        made = make_plan("small", small(), budget="quick", seeds=9, device="cpu", pilot=pilot)
        write_plan(made, tmp_path / name, {})
        for cell in made.cells:
            value = 0.9 + cell.seed % 10 / 100 if cell.variant == "rope" else 0.1
            scores = tuple(Score(length=n, metric=m, value=value) for n in range(1, 6) for m in METRICS)
            RunRecord(fingerprint=cell.fingerprint, spec=cell.spec.document(), status="finished", scores=scores).write(
                tmp_path / name / "runs" / cell.fingerprint / "record.json"
            )
        compared = load_study(tmp_path / name).compare()
        verdicts[name] = compared.loc[compared["variant"] == "rope", "verdict"].tolist()
    assert verdicts == {"real": ["better", "better"], "pilot": ["undecided", "undecided"]}


def test_scores_are_long_and_know_their_split(study: Path) -> None:
    scores = load_study(study).scores
    assert len(scores) == 2 * 5 * 3
    assert set(scores.loc[scores["length"] <= 3, "split"]) == {"train"}
    assert set(scores.loc[scores["length"] > 3, "split"]) == {"test"}


def test_curves_of_unfinished_runs_are_there(study: Path) -> None:
    curves = load_study(study).curves
    assert curves[["step", "metric", "value"]].to_numpy().tolist() == [[10, "train/loss", 2]]


def test_a_planned_study_without_any_record_is_empty_not_broken(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path, {})
    data = load_study(tmp_path)
    assert set(data.runs["status"]) == {"missing"}
    assert len(data.scores) == len(data.curves) == len(data.attention) == 0
    assert data.primary()["score"].isna().all()


def test_no_study_and_a_corrupt_one_are_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no study here; run `harness ablate"):
        load_study(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "study.json").write_text(content)
        with pytest.raises(UserError, match=r"study\.json is corrupt"):
            load_study(tmp_path)


def test_a_record_that_is_another_run_s_is_refused_not_averaged(study: Path) -> None:
    first, second = (study / "runs" / cell.fingerprint / "record.json" for cell in plan().cells[:2])
    second.write_text(first.read_text())
    with pytest.raises(UserError, match=f"{second}: this is the record of another run"):
        load_study(study)


def test_all_corrupt_records_are_named_at_once(study: Path) -> None:
    first, second = (cell.fingerprint for cell in plan().cells[:2])
    for name in (first, second):
        (study / "runs" / name / "record.json").write_text("{")
    with pytest.raises(UserError) as caught:
        load_study(study)
    said = f"2 records are corrupt, in {study / 'runs'}: {first}, {second}; the first, {study / 'runs' / first}/record"
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith("; run the study again, which sets it aside and does that run anew")
