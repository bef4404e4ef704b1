import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.record import RunRecord, Score, mean_score, read_curves, read_plan, set_aside, write_atomically
from harness.schema import UserError

numbers = st.floats(allow_nan=True, allow_infinity=True)


def record(**changes: object) -> RunRecord:
    scores = [{"length": 3, "metric": "exact_match", "value": 0.5}]
    fields = {"fingerprint": "0" * 16, "spec": {"seed": 1}, "status": "finished", "scores": scores}
    return RunRecord.model_validate({**fields, **changes})


@given(value=st.floats(0, 1), final=st.dictionaries(st.text(max_size=8), numbers, max_size=3))
def test_a_record_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, value: float, final: dict[str, float]
) -> None:
    path = tmp_path_factory.mktemp("record") / "record.json"
    score = Score(length=3, metric="exact_match", value=value)
    record(scores=(score,), final=final).write(path)
    again = RunRecord.read(path)
    assert again.scores == (score,)
    assert again.final.keys() == final.keys()
    assert all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(again.final.values(), final.values(), strict=True)
    )


LACKING = json.dumps(dict.fromkeys(("study", "question", "baseline", "variants", "tasks", "budget")) | {"runs": [{}]})


@pytest.mark.parametrize("content", ["", "{", '{"fingerprint": "x"}', '{"a": 1}', "\x00\x01"])
def test_a_corrupt_record_is_refused_in_one_sentence_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(UserError, match="is not a run record") as caught:
        RunRecord.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def altered(path: Path, **changes: object) -> Path:
    """A good record's file, with other values in it."""
    record().write(path / "record.json")
    document = json.loads((path / "record.json").read_text())
    (path / "record.json").write_text(json.dumps(document | changes))
    return path


@pytest.mark.parametrize("value", [7.5, -1, float("nan"), float("inf"), "all"])
def test_a_score_is_a_share(tmp_path: Path, value: object) -> None:
    altered(tmp_path, scores=[{"length": 3, "metric": "exact_match", "value": value}])
    with pytest.raises(UserError, match=r"is not a run record \(scores\.0\.value: .*\); run the study again"):
        RunRecord.read(tmp_path / "record.json")


def test_a_finished_run_has_scores_and_a_failed_one_need_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run record \(a finished run has scores\)"):
        RunRecord.read(altered(tmp_path, scores=[]) / "record.json")
    assert RunRecord.read(altered(tmp_path, scores=[], status="failed") / "record.json").scores == ()


def test_a_record_belongs_to_the_folder_that_is_called_after_its_fingerprint(tmp_path: Path) -> None:
    own, other = tmp_path / ("0" * 16), tmp_path / ("1" * 16)
    assert RunRecord.of_run(altered(own)) == RunRecord.of_run(own, {"seed": 1}) == record()
    with pytest.raises(UserError, match="its spec is not the one that this run is called after; run the study again"):
        RunRecord.of_run(own, {"seed": 2})
    with pytest.raises(UserError, match=f"{other}/record.json: this is the record of another run, '{own.name}'"):
        RunRecord.of_run(altered(other))


@pytest.mark.parametrize("content", ["", "[]", "{}", "3", "\xff", '{"runs": 3}', '{"runs": []}', LACKING])
def test_a_corrupt_plan_is_refused_in_one_sentence_with_its_path(tmp_path: Path, content: str) -> None:
    (tmp_path / "study.json").write_text(content, "latin-1")
    with pytest.raises(UserError, match=r"study\.json is corrupt .*; run the study again, finished runs are kept"):
        read_plan(tmp_path)


def test_what_is_set_aside_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text("broken")
    assert set_aside(path).read_text() == "broken"
    assert not path.exists()


def test_an_atomic_write_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_atomically(tmp_path / "deep" / "file", "one")
    write_atomically(tmp_path / "deep" / "file", b"two")
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["file"]
    assert (tmp_path / "deep" / "file").read_text() == "two"


def test_a_failed_atomic_write_keeps_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    (target / "inside").mkdir(parents=True)  # a folder that is not empty cannot be replaced by a file
    with pytest.raises(OSError, match="folder"):
        write_atomically(target, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_where_no_file_can_be_made_the_error_names_the_one_that_was_meant() -> None:
    with pytest.raises(OSError, match=r"'/proc/report\.md'"):
        write_atomically(Path("/proc/report.md"), "new")


def test_curves_leave_out_a_torn_line_and_a_second_telling(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    lines = [{"step": 10, "time": 1, "train/loss": 2.0}, {"step": 20, "time": 2, "train/loss": float("nan")}]
    told_again = {"step": 10, "time": 9, "train/loss": 2.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, told_again]) + '{"step": 30, "ti')
    assert [line["step"] for line in read_curves(path)] == [10, 20]
    assert read_curves(path)[0]["time"] == 1
    assert math.isnan(read_curves(path)[1]["train/loss"])


def test_no_curves_are_no_lines(tmp_path: Path) -> None:
    assert read_curves(tmp_path / "absent.jsonl") == []


def test_the_mean_weighs_lengths_alike() -> None:
    metrics = ("exact_match", "token_accuracy")
    scores = [
        Score(length=n, metric=m, value=n / 10 + (m == "token_accuracy") / 10) for n in (2, 3, 7) for m in metrics
    ]
    assert mean_score(scores, (2, 7)) == pytest.approx(0.45)
    assert mean_score(scores, (2, 7), "token_accuracy") == pytest.approx(0.55)
    assert mean_score(scores, range(2, 4)) == pytest.approx(0.25)
    assert math.isnan(mean_score(scores, (99,)))
    assert math.isnan(mean_score([], (2,)))
