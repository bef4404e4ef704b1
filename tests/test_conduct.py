"""Whole studies with real workers, a real sqlite store, and really killed processes."""

import io
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
from small_study import small

from harness.cli import main
from harness.components.attention import SlidingWindow
from harness.conduct import Nobody, left_out, locked, reached, resolve_jobs, run_study, unexamined
from harness.engine import Ended, Event
from harness.progress import PlainLines, console
from harness.record import RunRecord, Score
from harness.results import load_study, planned_data
from harness.schema import UserError
from harness.study import Ablation, Budget, Plan, make_plan
from harness.tracking import Mirror, default_uri


class Watcher(Nobody):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.compared = 0

    def event(self, event: Event) -> None:
        if isinstance(event, Ended):
            self.ended.append(event.fingerprint)

    def verdicts(self, comparison: pd.DataFrame) -> None:
        self.compared += 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watcher]:
    """A study run to its end."""
    results, watcher = tmp_path_factory.mktemp("results"), Watcher()
    outcome = run_study(small(), name="small", budget="smoke", jobs=2, results=results, display=watcher)
    assert (outcome.exit_code, outcome.counts) == (0, {"finished": 12})
    return results, watcher


def two_runs() -> Ablation:
    """Two variants on one task: with one seed, two runs."""
    variants = {"sinusoidal": {}, "none": small().variants["none"]}
    return small(variants=variants, tasks={"copy": small().tasks["copy"]})


def scores(folder: Path) -> pd.DataFrame:
    return load_study(folder).scores


def test_of_a_study_that_is_refused_nothing_is_written(tmp_path: Path) -> None:
    wide = {name: {"model.attention": SlidingWindow(window=window)} for name, window in (("plain", 64), ("other", 65))}
    said = r"^variants\.other: compared with plain on copy, .* has no effect on .*; change or drop that variant"
    with pytest.raises(UserError, match=said):
        run_study(
            small(axes=("model.attention",), baseline="plain", variants=wide),
            budget="smoke",
            results=tmp_path / "results",
        )
    assert list(tmp_path.iterdir()) == []


def test_a_study_leaves_its_whole_folder(finished: tuple[Path, Watcher]) -> None:
    results, watcher = finished
    folder = results / "small"
    for name in ("runs.csv", "scores.csv", "comparison.csv", "report.md", "report.html", "study.json"):
        assert (folder / name).stat().st_size > 0
    assert list((folder / "figures").glob("*.png"))
    assert len(pd.read_csv(folder / "runs.csv")) == 12
    assert len(pd.read_csv(folder / "comparison.csv")) == 4
    assert len(watcher.ended) == watcher.compared == 12


def test_each_variant_is_examined_once_for_all_its_seeds(finished: tuple[Path, Watcher]) -> None:
    folder = finished[0] / "small"
    assert len(list((folder / "probes").iterdir())) == 6  # three variants on two tasks, of two seeds each
    assert set(load_study(folder).runs["diagnostics"]) == {"structure, training"}


MINE = """
from harness import Ablation, Budget, ModelSpec, TrainSpec
from harness.components.position import NoPE
from tasks import Copy, Lengths

ablation = Ablation(
    question="Does it matter?",
    model=ModelSpec(d_model=16, num_heads=2, num_layers=1),
    train=TrainSpec(steps=4, batch_size=4, eval_samples=4),
    tasks={"copy": Copy(lengths=Lengths(train=(1, 3), test=(4,)))},
    axes=("model.position",),
    baseline="sinusoidal",
    variants={"sinusoidal": {}, "none": {"model.position": NoPE()}},
    budgets={"smoke": Budget(seeds=1)},
)
"""


@pytest.mark.slow
def test_without_diagnostics_nobody_looks_and_records_and_the_next_invocation_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    asked = ["ablate", str(tmp_path / "mine.py"), "--budget", "smoke", "--results", str(tmp_path), "--jobs", "1"]
    assert main([*asked, "--no-diagnostics"]) == 0
    runs = load_study(tmp_path / "mine").runs
    assert runs["diagnostics"].tolist() == ["off", "off"]
    assert runs["diagnosis"].tolist() == ["", ""]
    assert not (tmp_path / "mine" / "probes").exists()
    notice = "2 of 2 runs that have ended were not examined"
    assert main([*asked, "--no-diagnostics"]) == 0
    assert notice not in capsys.readouterr().err
    assert main(asked) == 0
    said = capsys.readouterr().err
    assert f"{notice}: they were made without diagnostics; `harness diagnose RUN` looks at one of them now" in said
    assert f"from {tmp_path / 'mine/runs'} is done again" in said
    assert "the report is up to date" in said


def test_runs_that_left_no_model_are_not_missed_by_diagnostics(finished: tuple[Path, Watcher], tmp_path: Path) -> None:
    document = json.loads(next(finished[0].glob("small/runs/*/record.json")).read_text())
    assert document["ledger"]["diagnostics"] != "off"
    ledgers = {"watched": document["ledger"], "older": {}, "off": {"diagnostics": "off"}}
    for name, ledger in ledgers.items():
        record = document | {"fingerprint": name, "ledger": ledger, "findings": []}
        RunRecord.model_validate(record).write(tmp_path / "runs" / name / "record.json")
    states = dict.fromkeys(ledgers, "finished") | {"lost": "failed", "to come": "missing"}
    (said,) = unexamined(states, tmp_path)
    assert said.startswith("2 of 3 runs that have ended were not examined")
    assert unexamined({"watched": "finished"}, tmp_path) == []


def test_every_run_is_in_the_store_under_the_id_that_runs_csv_names(finished: tuple[Path, Watcher]) -> None:
    results, _ = finished
    ids = pd.read_csv(results / "small" / "runs.csv")["mlflow_run_id"]
    assert ids.notna().all()
    assert ids.nunique() == 12
    assert (results / "mlflow.db").exists()


def test_written_scores_are_those_of_the_records_to_the_bit(finished: tuple[Path, Watcher]) -> None:
    folder = finished[0] / "small"
    written = pd.read_csv(folder / "scores.csv")
    held = scores(folder)
    keys = ["variant", "task", "seed", "length", "metric"]
    both = written.merge(held, on=keys, suffixes=("", "_held"))
    assert len(both) == len(written) == len(held)
    assert both["value"].tolist() == both["value_held"].tolist()


def test_a_finished_study_is_left_alone(finished: tuple[Path, Watcher]) -> None:
    results, watcher = finished[0], Watcher()
    stamps = {path: path.stat().st_mtime_ns for path in (results / "small").rglob("*") if path.name != "lock"}
    outcome = run_study(small(), name="small", budget="smoke", results=results, display=watcher)
    assert (outcome.unchanged, outcome.exit_code, watcher.ended) == (True, 0, [])
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_more_seeds_run_only_what_is_new(finished: tuple[Path, Watcher], tmp_path: Path) -> None:
    results, watcher = finished[0], Watcher()
    before = scores(results / "small")
    outcome = run_study(small(), name="small", budget="smoke", seeds=3, results=results, display=watcher)
    assert (outcome.counts, len(watcher.ended)) == ({"finished": 18}, 6)
    after = scores(results / "small")
    assert after[after["seed"] < 2].reset_index(drop=True).equals(before)


def test_a_study_until_decided_gives_more_seeds_to_what_is_open_and_to_nothing_else(tmp_path: Path) -> None:
    ablation = small(tasks={"copy": small().tasks["copy"]})
    first = make_plan("small", ablation, budget="smoke", seeds=8, device="cpu", cap=20)
    assert first.looks == (8, 16, 20)
    assert reached(first, tmp_path)[0] == first  # no run has ended

    def end(plan: Plan) -> None:
        """Every run ends; that of "none" is always better, that of "rope" now and then."""
        for cell in plan.cells:
            more = {"none": 0.4 + 0.01 * (cell.seed % 2), "rope": 0.3 * (-1) ** cell.seed}
            value = 0.3 + 0.01 * (cell.seed % 3) + more.get(cell.variant, 0.0)
            scores = tuple(Score(length=n, metric="exact_match", value=value) for n in (4, 5))
            folder = tmp_path / "runs" / cell.fingerprint
            RunRecord(fingerprint=cell.fingerprint, spec=cell.spec.document(), status="finished", scores=scores).write(
                folder / "record.json"
            )

    end(first)
    second = reached(first, tmp_path)[0]
    counted = Counter(cell.variant for cell in second.cells)
    assert counted == {"sinusoidal": 16, "none": 8, "rope": 16}
    assert {cell.fingerprint for cell in first.cells} < {cell.fingerprint for cell in second.cells}
    assert reached(second, tmp_path)[0] == second
    end(second)
    third = reached(first, tmp_path)[0]
    assert Counter(cell.variant for cell in third.cells) == {"sinusoidal": 20, "none": 8, "rope": 20}
    end(third)
    torn = tmp_path / "runs" / first.cells[0].fingerprint / "record.json"
    whole = torn.read_text()
    torn.write_text("{")
    assert "is corrupt" in " ".join(reached(first, tmp_path)[2])  # said, not only set aside
    torn.write_text(whole)
    assert reached(first, tmp_path)[0] == third  # the cap
    compared = planned_data(tmp_path, third.document({})).compare().set_index("variant")
    assert compared["verdict"].to_dict() == {"none": "better", "rope": "undecided"}
    assert compared["looked"].to_dict() == {"none": 8, "rope": 20}


def test_a_study_until_decided_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    ablation = small(
        variants={"sinusoidal": {}, "none": small().variants["none"]}, tasks={"copy": small().tasks["copy"]},
        margin=0.0001, budgets={"smoke": Budget(seeds=2, changes={"train.steps": 10})},
    )  # fmt: skip
    run_study(ablation, name="small", budget="smoke", cap=4, results=tmp_path, display=(watcher := Watcher()))
    assert len(watcher.ended) == 8
    for record in list((tmp_path / "small/runs").glob("*/record.json"))[:1]:
        record.unlink()
    run_study(ablation, name="small", budget="smoke", cap=4, results=tmp_path, display=(watcher := Watcher()))
    assert len(watcher.ended) == 1
    assert len(load_study(tmp_path / "small").runs) == 8
    page = (tmp_path / "small/report.md").read_text()
    assert "after 2 and 4 seeds" in page
    assert "up to 4 seeds" in page
    assert run_study(ablation, name="small", budget="smoke", cap=4, results=tmp_path).unchanged
    for other in ({"cap": 8}, {"seeds": 3, "cap": 4}, {"seeds": 4}, {}):  # what was seen would choose when to stop
        with pytest.raises(UserError, match=r"after 2 and 4 seeds.*--seeds 2 --until decided --cap 4"):
            run_study(ablation, name="small", budget="smoke", results=tmp_path, **other)


def test_a_cap_that_leaves_no_second_look_and_a_pilot_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cap = 2: choose more than the 2 seeds"):
        run_study(small(), budget="smoke", cap=2, results=tmp_path)
    with pytest.raises(UserError, match="a pilot decides nothing"):
        run_study(small(), budget="smoke", cap=8, pilot=True, results=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_study_that_was_looked_at_without_until_does_not_go_on_with_it(finished: tuple[Path, Watcher]) -> None:
    with pytest.raises(UserError, match=r"was begun with \d seeds and without --until.*go on without it"):
        run_study(small(), name="small", budget="smoke", cap=8, results=finished[0])


def test_runs_of_more_seeds_that_a_plan_leaves_out_are_named(finished: tuple[Path, Watcher]) -> None:
    folder = finished[0] / "small"
    document = json.loads((folder / "study.json").read_text())
    fewer = make_plan("small", small(), budget="smoke", seeds=1, device="cpu")
    left = len(document["runs"]) - len(fewer.cells)
    assert left_out(fewer, folder) == [
        f"{left} runs of more seeds have ended and are left out; --seeds {len(document['seeds'])} counts them"
    ]
    same = make_plan("small", small(), budget="smoke", seeds=len(document["seeds"]), device="cpu")
    assert left_out(same, folder) == []


def test_the_number_of_workers_changes_no_bit(finished: tuple[Path, Watcher], tmp_path: Path) -> None:
    run_study(small(), name="small", budget="smoke", jobs=1, results=tmp_path)
    one, two = scores(tmp_path / "small"), scores(finished[0] / "small")
    assert one.equals(two[two["seed"] < 2].reset_index(drop=True))


def test_a_corrupt_record_is_set_aside_and_its_run_done_again(tmp_path: Path) -> None:
    ablation = two_runs()
    run_study(ablation, name="small", budget="smoke", seeds=1, results=tmp_path)
    before = scores(tmp_path / "small")
    record = next((tmp_path / "small" / "runs").glob("*/record.json"))
    record.write_text("{")
    watcher = Watcher()
    run_study(ablation, name="small", budget="smoke", seeds=1, results=tmp_path, display=watcher)
    assert len(watcher.ended) == 1
    assert record.with_name("record.json.corrupt").exists()
    assert scores(tmp_path / "small").equals(before)


def test_failures_are_rows_and_the_exit_code_is_one(tmp_path: Path) -> None:
    wild = {"train.learning_rate": 10.0, "train.weight_decay": 1.0}  # weights × −9 a step
    ablation = small(
        axes=("train.learning_rate", "train.weight_decay"),
        variants={"sinusoidal": {}, "wild": wild},
        tasks={"copy": small().tasks["copy"]},
        budgets={"smoke": Budget(seeds=1, changes={"train.steps": 200, "train.batch_size": 8})},
    )
    outcome = run_study(ablation, name="small", budget="smoke", results=tmp_path)
    runs = load_study(outcome.folder).runs.set_index("variant")
    assert runs.loc["wild", "status"] == "diverged"
    assert runs.loc["wild", "cause"]
    assert outcome.exit_code == 1
    assert "diverged" in (outcome.folder / "report.md").read_text()


def test_a_corrupt_study_json_is_written_anew(finished: tuple[Path, Watcher]) -> None:
    results, watcher = finished[0], Watcher()
    for content in ('{"a', "{}", "[]"):
        (results / "small" / "study.json").write_text(content)
        outcome = run_study(small(), name="small", budget="smoke", results=results, display=watcher)
        assert (outcome.exit_code, outcome.unchanged, watcher.ended) == (0, False, [])
        assert json.loads((results / "small" / "study.json").read_text())["budget"] == "smoke"
        assert (results / "small" / "study.json.corrupt").read_text() == content


def test_another_store_gets_a_finished_study_too(finished: tuple[Path, Watcher], tmp_path: Path) -> None:
    run_study(small(), name="small", budget="smoke", results=finished[0])
    store = tmp_path / "other.db"
    outcome = run_study(small(), name="small", budget="smoke", results=finished[0], tracking_uri=f"sqlite:///{store}")
    assert outcome.unchanged
    assert store.exists()


def test_another_store_that_is_down_is_the_one_that_sync_asks_from_then_on(
    finished: tuple[Path, Watcher], capsys: pytest.CaptureFixture[str]
) -> None:
    results = finished[0]
    run_study(small(), name="small", budget="smoke", results=results)
    planned = (results / "small" / "study.json").stat().st_mtime_ns
    uri = "http://127.0.0.1:9"
    assert run_study(small(), name="small", budget="smoke", results=results, tracking_uri=uri).unchanged
    assert json.loads((results / "small" / "study.json").read_text())["tracking_uri"] == uri
    assert (results / "small" / "study.json").stat().st_mtime_ns == planned
    assert main(["sync", "--results", str(results), "--json"]) == 1
    assert list(json.loads(capsys.readouterr().out)["failed"]) == ["small"]


def test_people_are_told_of_the_corrupt_files_of_a_run(tmp_path: Path) -> None:
    made = make_plan("small", two_runs(), budget="smoke", seeds=1, device="cpu")
    first, second = (tmp_path / "small" / "runs" / cell.fingerprint for cell in made.cells)
    for directory, name, content in ((first, "checkpoint.ckpt", b"PK\x03\x04torn"), (second, "spec.json", b"{")):
        directory.mkdir(parents=True)
        (directory / name).write_bytes(content)
    said = io.StringIO()
    display = PlainLines(tmp_path / "small", console(said))
    outcome = run_study(two_runs(), name="small", budget="smoke", seeds=1, results=tmp_path, display=display)
    assert outcome.counts == {"finished": 2}
    for sentence in (
        f"{first}/checkpoint.ckpt is corrupt; kept as checkpoint.ckpt.corrupt, the run starts anew",
        f"{second}/spec.json is corrupt; kept as spec.json.corrupt, the run goes on without it",
    ):
        assert sentence in said.getvalue().splitlines()
    assert "is corrupt" in (first / "run.log").read_text()
    assert json.loads((second / "spec.json").read_text()) == made.cells[1].spec.document()


STUDY = """
import sys
sys.path.insert(0, {tests!r})
from harness.conduct import run_study
from harness.study import Budget
from small_study import small
if __name__ == "__main__":
    budgets = {{"smoke": Budget(seeds=1, changes={{"train.steps": 3000}})}}
    sys.exit(run_study(small(budgets=budgets), name="small", budget="smoke", jobs=2, results={results!r}).exit_code)
"""


def launch(results: Path, *wrapper: str) -> "subprocess.Popen[bytes]":
    script = results.parent / "study.py"
    script.write_text(STUDY.format(tests=str(Path(__file__).parent), results=str(results)))
    command = [*wrapper, sys.executable, str(script)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def under_way(results: Path) -> Callable[[], bool]:
    return lambda: any(path.stat().st_size > 1000 for path in results.glob("small/runs/*/curves.jsonl"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_exits_130_within_seconds(results: Path, number: signal.Signals) -> None:
    process = launch(results)
    wait_for(under_way(results))
    os.kill(process.pid, number)
    sent = time.monotonic()
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - sent < 15
    assert list(results.glob("small/runs/*/checkpoint.ckpt"))
    assert not orphans(results)


def test_under_nohup_a_study_outlives_its_terminal(results: Path) -> None:
    def written() -> int:
        return sum(path.stat().st_size for path in results.glob("small/runs/*/curves.jsonl"))

    process = launch(results, "nohup")
    wait_for(under_way(results))
    os.killpg(process.pid, signal.SIGHUP)  # as a terminal that closes does: to every process of the group
    before = written()
    wait_for(lambda: written() > before + 5000, seconds=30)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_a_second_invocation_says_who_is_running_and_corrupts_nothing(results: Path) -> None:
    process = launch(results)
    wait_for(under_way(results))
    with pytest.raises(UserError, match=f"study 'small' is being run by process {process.pid} on .* since .*; wait"):
        run_study(small(), name="small", budget="smoke", results=results)
    assert json.loads((results / "small" / "study.json").read_text())["budget"] == "smoke"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_killing_the_conductor_leaves_no_worker_and_loses_no_record(results: Path) -> None:
    process = launch(results)
    wait_for(lambda: bool(list(results.glob("small/runs/*/record.json"))))
    wait_for(lambda: "RUNNING" in stored(results).values())
    kept = {path: path.read_bytes() for path in results.glob("small/runs/*/record.json")}
    process.kill()
    process.communicate()
    wait_for(lambda: not orphans(results), seconds=30)
    assert {path: path.read_bytes() for path in kept} == kept
    with locked(results / "small", "small"):
        assert load_study(results / "small").runs["status"].isin(["finished", "partial", "missing"]).all()
    assert "RUNNING" in stored(results).values()
    Mirror(default_uri(results), results / "small").deliver()  # what `harness sync` does
    assert set(stored(results).values()) == {"FINISHED", "KILLED"}


def stored(results: Path) -> dict[str, str]:
    """The status of every run in the local store."""
    try:
        with closing(sqlite3.connect(f"file:{results}/mlflow.db?mode=rw", uri=True)) as database:
            return dict(database.execute("select name, status from runs"))
    except sqlite3.OperationalError:  # it is being made
        return {}


REPORTING = """
import sys
sys.path.insert(0, {tests!r})
from harness.conduct import Nobody, run_study
from test_conduct import two_runs

class Telling(Nobody):
    def note(self, text):
        print(text, flush=True)

if __name__ == "__main__":
    terms = dict(name="small", budget="smoke", seeds=1, results={results!r}, tracking_uri={uri!r})
    sys.exit(run_study(two_runs(), **terms, display=Telling()).exit_code)
"""


def reporting(results: Path, uri: str | None = None) -> "subprocess.Popen[bytes]":
    """A study in another process, which has come to its report."""
    script = results.parent / "study.py"
    script.write_text(REPORTING.format(tests=str(Path(__file__).parent), results=str(results), uri=uri))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"writing the report\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_report_is_written_leaves_a_study_that_was_killed(
    results: Path, number: signal.Signals
) -> None:
    process = reporting(results)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert not (results / "small" / "report.html").exists()
    Mirror(default_uri(results), results / "small").deliver()  # what did not arrive in haste
    assert stored(results)["small · smoke"] == "KILLED"
    outcome = run_study(two_runs(), name="small", budget="smoke", seeds=1, results=results)
    assert (outcome.exit_code, outcome.counts) == (0, {"finished": 2})
    assert (results / "small" / "report.html").exists()
    assert stored(results)["small · smoke"] == "FINISHED"


@pytest.mark.slow
def test_a_signal_while_the_store_is_waited_for_ends_the_wait(results: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = reporting(results, f"http://127.0.0.1:{silent.getsockname()[1]}")
        wait_for((results / "small" / "report.html").exists)
        process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        process.communicate(timeout=30)
        assert process.returncode == 130
        assert time.monotonic() - sent < 8


def orphans(results: Path) -> list[str]:
    """Worker processes whose open files lie under a results folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if b"harness.worker" in (process / "cmdline").read_bytes():
                found += [str(p.readlink()) for p in (process / "fd").iterdir() if str(results) in str(p.readlink())]
        except OSError:
            continue
    return found


def test_a_results_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/small: cannot be made .*--results"):
        run_study(small(), name="small", budget="smoke", results=tmp_path / "file")
    (tmp_path / "small").write_text("")
    with pytest.raises(UserError, match=r"small: cannot be made"):
        run_study(small(), name="small", budget="smoke", results=tmp_path)


def test_what_is_no_ablation_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^run_study takes an Ablation, not 'heads'; `harness ablate` takes the name of one$"
    ):
        run_study("heads")  # type: ignore[arg-type]


def test_a_malformed_uri_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tracking URI"):
        run_study(small(), name="small", budget="smoke", results=tmp_path / "results", tracking_uri="sqlit:///x.db")
    assert not (tmp_path / "results").exists()


def test_workers_are_as_many_as_cores_on_the_cpu_and_one_on_a_gpu() -> None:
    assert resolve_jobs("auto", "cpu") == len(os.sched_getaffinity(0))
    assert resolve_jobs("auto", "cuda") == 1
    assert resolve_jobs(5, "cpu") == 5
