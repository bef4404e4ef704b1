"""The mirror against real stores: nothing missing, nothing twice, whatever dies and whenever."""

import fcntl
import itertools
import json
import logging
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest

from harness.locks import signed
from harness.record import RunRecord, Score
from harness.schema import UserError
from harness.tracking import Mirror, StoreError, default_uri, mirror, received, run_ids, study_links
from harness.tracking.content import parameters, report_head
from harness.tracking.links import compare_link
from harness.tracking.views import TAG

# MLflow calls SQLAlchemy in ways that the installed version deprecates.
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:mlflow\..*")

VARIANTS = ("sinusoidal", "rope")
T0 = 1_700_000_000_000  # unix ms at which the runs of these tests began
STEPS = 100


class Study:
    """A study's folder as runs leave it, written without training."""

    def __init__(self, results, budget="quick", seeds=(0,)):
        self.folder = results / "position"
        self.cells = {f"{index:016x}": cell for index, cell in enumerate(itertools.product(VARIANTS, seeds), 1)}
        self.plan(budget, seeds)

    def plan(self, budget="quick", seeds=(0,)):
        self.folder.mkdir(parents=True, exist_ok=True)
        document = {
            "study": "position",
            "question": "Which encoding extrapolates?",
            "claims": ["E10"],
            "axes": ["model.position"],
            "baseline": "sinusoidal",
            "variants": list(VARIANTS),
            "tasks": ["copy"],
            "seeds": list(seeds),
            "budget": budget,
            "score": "exact_match",
            "margin": 0.1,
            "runs": [
                {"variant": variant, "task": "copy", "seed": seed, "fingerprint": fingerprint}
                for fingerprint, (variant, seed) in self.cells.items()
            ],
            "differences": {"sinusoidal": {}, "rope": {"model.position": "RoPE"}},
            "command": f"harness ablate position --budget {budget}",
            "commit": "0123abc",
            "environment": {"cpu": "A processor", "cores": "2"},
        }
        (self.folder / "study.json").write_text(json.dumps(document))

    @property
    def fingerprints(self):
        return list(self.cells)

    def path(self, fingerprint):
        return self.folder / "runs" / fingerprint

    def spec(self, fingerprint):
        variant, seed = self.cells[fingerprint]
        position = {"kind": "RoPE", "base": 10000.0} if variant == "rope" else {"kind": "Sinusoidal"}
        return {
            "model": {"d_model": 64, "position": position},
            "task": {"kind": "Copy", "lengths": {"train": [1, 10], "test": [11, 12]}, "num_symbols": 16},
            "train": {"steps": STEPS, "batch_size": 64, "learning_rate": 0.001, "sampling": {"kind": "Fresh"}},
            "seed": seed,
            "device": "cpu",
        }

    def train(self, fingerprint, start=0, stop=STEPS, began=T0):
        """The lines and attention maps of steps `start` … `stop`."""
        path = self.path(fingerprint)
        (path / "attention").mkdir(parents=True, exist_ok=True)
        (path / "spec.json").write_text(json.dumps(self.spec(fingerprint)))
        with (path / "curves.jsonl").open("a") as file:
            for step in range(start + 10, stop + 1, 10):
                line = {"step": step, "time": began + step, "train/loss": 1 / step, "train/gradient_norm": 0.5}
                file.write(json.dumps(line | ({"eval/extrapolation": 0.1} if step == 50 else {})) + "\n")
        for step in (0, 50, 100):
            if start <= step <= stop:
                weights = np.tri(3, dtype=np.float16)[None, None] / 3
                np.savez(path / "attention" / f"{step:06d}.npz", weights=weights, labels=np.array(["BOS", "1", "2"]))
        (path / "run.log").write_text("hello\n")

    def end(self, fingerprint, status="finished", cause="", ended=T0 + 5000):
        scores = [Score(length=n, metric="exact_match", value=1 / n) for n in (*range(1, 11), 11, 12)]
        RunRecord(
            fingerprint=fingerprint,
            spec=self.spec(fingerprint),
            status=status,
            cause=cause,
            scores=scores if status == "finished" else (),
            final={"eval/extrapolation": 0.25, "train/loss": 0.01, "train/steps_to_threshold": float("nan")},
            ledger={"parameters": 1000, "steps": STEPS, "attention_backend": "flash", "attention_reason": "causal"},
            environment={"cpu": "A processor", "cores": "2", "commit": "0123abc"},
            started=T0 / 1000,
            ended=ended / 1000,
        ).write(self.path(fingerprint) / "record.json")

    def finish(self):
        for fingerprint in self.fingerprints:
            self.train(fingerprint)
            self.end(fingerprint)
        self.report()
        return self

    def report(self):
        (self.folder / "report.md").write_text("# Title\n\n**Question?**\n\n> The answer.\n\n## More\n\ntext\n")
        (self.folder / "figures").mkdir()
        (self.folder / "figures" / "curves.svg").write_text("<svg/>")
        (self.folder / "report.html").write_text("<p>The answer.</p>")


@pytest.fixture
def study(results):
    return Study(results)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A store with tables and nothing in them: creating them takes a second."""
    from harness.tracking.store import Store

    folder = tmp_path_factory.mktemp("empty")
    Store(default_uri(folder), folder)
    return folder / "mlflow.db"


@pytest.fixture
def uri(results, empty_store):
    shutil.copy(empty_store, results)
    return default_uri(results)


@pytest.fixture(autouse=True)
def _fast(monkeypatch, tmp_path):
    monkeypatch.setattr(mirror, "CYCLE", 0.1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # whatever MLflow drops in a working directory must not fall into the project


def stored(uri, name="position"):
    """All that a store has of an experiment, a row a run: readable, comparable, without ids."""
    from mlflow import MlflowClient
    from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(name)
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    names = {run.info.run_id: run.info.run_name for run in runs}
    return sorted(
        {
            "name": run.info.run_name,
            "status": run.info.status,
            "times": (run.info.start_time, run.info.end_time) if MLFLOW_PARENT_RUN_ID in run.data.tags else None,
            "parent": names.get(run.data.tags.get(MLFLOW_PARENT_RUN_ID)),
            "params": run.data.params,
            "tags": {  # a note shows its own run's figures
                key: tag.replace(run.info.run_id, "ID")
                for key, tag in run.data.tags.items()
                if key != MLFLOW_PARENT_RUN_ID
            },
            "data": [(entry.dataset.name, entry.dataset.digest) for entry in run.inputs.dataset_inputs],
            "metrics": {
                key: sorted(
                    (m.step, repr(m.value), m.timestamp) for m in client.get_metric_history(run.info.run_id, key)
                )
                for key in run.data.metrics
            },
            "artifacts": sorted(_artifacts(client, run.info.run_id)),
        }.items()
        for run in runs
    )


def _artifacts(client, run_id, path=None):
    for entry in client.list_artifacts(run_id, path):
        if entry.is_dir:
            yield from _artifacts(client, run_id, entry.path)
        else:
            yield entry.path


def rows(uri, name="position"):
    """`stored` by run name; fails on two runs of one name."""
    found = [dict(items) for items in stored(uri, name)]
    assert len({row["name"] for row in found}) == len(found)
    return {row["name"]: row for row in found}


@pytest.fixture
def undisturbed(study, tmp_path, empty_store):
    """What one delivery of the folder to a fresh store leaves."""

    def deliver(chosen=study):
        fresh = tmp_path / "fresh"
        fresh.mkdir()
        shutil.copy(empty_store, fresh)
        Mirror(default_uri(fresh), chosen.folder).deliver()
        return rows(default_uri(fresh), chosen.folder.name)

    return deliver


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.05)


# What arrives


def test_a_finished_study_arrives_whole(study, uri):
    study.finish()
    assert Mirror(uri, study.folder).deliver() == 2
    found = rows(uri)
    assert set(found) == {"position · quick", "sinusoidal · copy · seed 0", "rope · copy · seed 0"}

    run = found["rope · copy · seed 0"]
    assert run["status"] == "FINISHED"
    assert run["times"] == (T0 + 10, T0 + 5000)
    assert run["parent"] == "position · quick"
    assert run["params"]["model.position"] == "RoPE"
    assert run["params"]["model.position.base"] == "10000.0"
    assert run["params"]["task.lengths.train"] == "[1, 10]"
    assert (
        run["tags"] | {"variant": "rope", "seed": "0", "attention_backend": "flash", "commit": "0123abc"} == run["tags"]
    )
    assert run["data"] == [("Copy", run["data"][0][1])]
    assert [m[0] for m in run["metrics"]["train/loss"]] == list(range(10, STEPS + 1, 10))  # the final value is its last
    assert [(m[0], m[1]) for m in run["metrics"]["eval/extrapolation"]] == [(50, "0.1"), (100, "0.25")]
    assert [(m[0], m[1]) for m in run["metrics"]["eval/exact_match_by_length"]][-2:] == [
        (11, repr(1 / 11)),
        (12, repr(1 / 12)),
    ]
    assert run["metrics"]["train/steps_to_threshold"][0][1] == "nan"
    assert run["metrics"]["parameters"][0][1] == "1000.0"
    assert {"spec.json", "record.json", "run.log"} <= set(run["artifacts"])

    parent = found["position · quick"]
    assert parent["status"] == "FINISHED"
    assert parent["tags"]["mlflow.note.content"].startswith("The answer.\n\n**Question?**")
    assert {"report.md", "report.html", "figures/curves.svg", "study.json"} == set(parent["artifacts"])
    assert list(Path.cwd().glob("mlruns")) == []


def test_images_are_named_as_mlflow_names_its_own(study, uri):
    """Our names must follow MLflow's pattern, or its pages show no image."""
    import re

    from mlflow import MlflowClient

    study.finish()
    Mirror(uri, study.folder).deliver()
    client = MlflowClient(uri)
    own = client.create_run("0").info.run_id
    client.log_image(own, np.zeros((4, 4, 3), np.uint8), key="attention/maps", step=50, timestamp=T0 + 10)

    def pattern(name):
        return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", name).rpartition(".")[0]

    theirs = {pattern(path) for path in _artifacts(client, own)}
    ours = [path for path in rows(uri)["rope · copy · seed 0"]["artifacts"] if path.startswith("images/")]
    assert len(ours) == 6
    assert theirs <= {pattern(path) for path in ours}
    assert (
        rows(uri)["rope · copy · seed 0"]["tags"]["mlflow.loggedImages"]
        == client.get_run(own).data.tags["mlflow.loggedImages"]
    )


def test_a_second_delivery_sends_nothing_and_changes_nothing(study, uri):
    study.finish()
    Mirror(uri, study.folder).deliver()
    before = rows(uri)
    second = Mirror(uri, study.folder)
    assert not second.pending()
    assert second.deliver() == 0
    assert rows(uri) == before


def test_a_run_grows_in_portions(study, uri, undisturbed):
    fingerprint, other = study.fingerprints
    live = Mirror(uri, study.folder)
    for start, stop in ((0, 30), (30, 60), (60, STEPS)):
        study.train(fingerprint, start, stop)
        assert live.pending()
        assert live.deliver() == 1
    assert not live.pending()
    study.end(fingerprint)
    study.train(other)
    study.end(other, "diverged", "the loss was not finite any more")
    assert live.deliver() == 2
    assert rows(uri) == undisturbed()
    failed = rows(uri)["rope · copy · seed 0"]
    assert failed["status"] == "FAILED"
    assert failed["tags"]["cause"] == "the loss was not finite any more"
    assert "diverged" in failed["tags"]["mlflow.note.content"]


def test_a_run_that_failed_before_its_first_step_arrives(study, uri):
    first, second = study.fingerprints
    for fingerprint in (first, second):
        study.path(fingerprint).mkdir(parents=True)
        (study.path(fingerprint) / "spec.json").write_text(json.dumps(study.spec(fingerprint)))
    study.end(first, "out_of_memory", "can't allocate memory")
    Mirror(uri, study.folder).deliver()
    assert rows(uri)["sinusoidal · copy · seed 0"]["status"] == "FAILED"
    assert set(rows(uri)) == {"position · quick", "sinusoidal · copy · seed 0"}  # the other has not begun


def test_torn_last_line_is_sent_once_it_is_whole(study, uri, undisturbed):
    fingerprint = study.fingerprints[0]
    study.train(fingerprint, 0, 50)
    curves = study.path(fingerprint) / "curves.jsonl"
    whole = curves.read_text()
    curves.write_text(whole[:-20])
    live = Mirror(uri, study.folder)
    live.deliver()
    assert len(rows(uri)["sinusoidal · copy · seed 0"]["metrics"]["train/loss"]) == 4
    curves.write_text(whole)
    live.deliver()
    assert rows(uri) == undisturbed()
    assert len(rows(uri)["sinusoidal · copy · seed 0"]["metrics"]["train/loss"]) == 5


def test_infinite_and_undefined_values_arrive_once(study, uri):
    fingerprint = study.fingerprints[0]
    study.train(fingerprint, 0, 10)
    with (study.path(fingerprint) / "curves.jsonl").open("a") as file:
        file.write('{"step": 20, "time": 1700000000020, "train/loss": NaN, "train/gradient_norm": Infinity}\n')
    Mirror(uri, study.folder).deliver()
    forget(study)
    Mirror(uri, study.folder).deliver()
    metrics = rows(uri)["sinusoidal · copy · seed 0"]["metrics"]
    assert metrics["train/loss"][-1] == (20, "nan", T0 + 20)
    assert metrics["train/gradient_norm"][-1] == (20, repr(sys.float_info.max), T0 + 20)
    assert len(metrics["train/loss"]) == len(metrics["train/gradient_norm"]) == 2


def test_more_points_than_mlflow_takes_at_once(study, uri):
    fingerprint = study.fingerprints[0]
    study.train(fingerprint, 0, 10)
    with (study.path(fingerprint) / "curves.jsonl").open("a") as file:
        for step in range(20, 12_000, 10):
            file.write(
                json.dumps({"step": step, "time": T0 + step, "train/loss": 1.0, "train/gradient_norm": 2.0}) + "\n"
            )
    Mirror(uri, study.folder).deliver()
    assert len(rows(uri)["sinusoidal · copy · seed 0"]["metrics"]["train/loss"]) == 1199


def test_loss_and_scores_come_before_what_diagnostics_watched(study, uri):
    """In MLflow's charts, which follow the alphabet, and in its overview, which follows what it received."""
    fingerprint = study.fingerprints[0]
    study.train(fingerprint, 0, 10)
    path = study.path(fingerprint) / "curves.jsonl"
    watched = {"step": 0, "time": T0, "feedforward/dead.0": 0.5, "heads/entropy.0": 0.9}
    path.write_text(json.dumps(watched) + "\n" + path.read_text())
    Mirror(uri, study.folder).deliver()
    metrics = list(rows(uri)["sinusoidal · copy · seed 0"]["metrics"])
    assert metrics[0].startswith("train/")
    assert metrics[-2:] == ["watched/feedforward/dead.0", "watched/heads/entropy.0"]
    assert sorted(metrics)[-2:] == metrics[-2:]
    assert "feedforward/dead.0" in path.read_text()


def forget(study):
    """Lose every note of what was received."""
    for path in study.folder.rglob("mirror.json"):
        path.unlink()


# What was noted is lost, the store is another, the run is another


def test_lost_notes_are_made_again_from_the_store(study, uri):
    study.finish()
    Mirror(uri, study.folder).deliver()
    before = rows(uri)
    forget(study)
    Mirror(uri, study.folder).deliver()
    assert rows(uri) == before


def test_a_corrupt_note_is_set_aside_with_a_notice(study, uri, caplog):
    study.finish()
    Mirror(uri, study.folder).deliver()
    before = rows(uri)
    for path in study.folder.rglob("mirror.json"):
        path.write_text('{"stores": {"sqlite')
    Mirror(uri, study.folder).deliver()
    assert rows(uri) == before
    assert caplog.text.count("mirror.json is corrupt; kept as mirror.json.corrupt") == 3
    assert (study.folder / "mirror.json.corrupt").exists()


@pytest.mark.parametrize("what", ["runs", "experiments"])
def test_what_was_deleted_in_the_store_is_brought_again(study, uri, results, what):
    study.finish()
    Mirror(uri, study.folder).deliver()
    before = rows(uri)
    with sqlite3.connect(results / "mlflow.db") as database:
        database.execute("update runs set lifecycle_stage = 'deleted'")
        if what == "experiments":
            database.execute("update experiments set lifecycle_stage = 'deleted' where name = 'position'")
    database.close()
    Mirror(uri, study.folder).deliver()
    assert rows(uri) == before


def test_two_stores_each_get_everything(study, uri, tmp_path):
    study.finish()
    other = f"sqlite:///{tmp_path / 'with space' / 'other.db'}"
    Mirror(uri, study.folder).deliver()
    first = run_ids(study.folder)
    assert Mirror(other, study.folder).pending()
    Mirror(other, study.folder).deliver()
    assert rows(other) == rows(uri)
    assert set(first) == set(study.fingerprints)
    last = run_ids(study.folder)
    assert last != first  # those of the store used last
    notes = {name: json.loads((study.path(name) / "mirror.json").read_text()) for name in study.fingerprints}
    assert {name: note["run_id"] for name, note in notes.items()} == last
    assert run_ids(study.folder, uri) == first
    assert not Mirror(uri, study.folder).pending()


def test_a_moved_results_folder_stays_mirrored(study, uri, results):
    study.finish()
    Mirror(uri, study.folder).deliver()
    moved = results.rename(results.with_name("moved"))
    assert not Mirror(default_uri(moved), moved / "position").pending()
    assert Mirror(default_uri(moved), moved / "position").deliver() == 0


@pytest.mark.parametrize("seen_between", [True, False])
def test_a_run_done_anew_replaces_the_earlier_attempt(study, uri, tmp_path, undisturbed, seen_between):
    study.finish()
    live = Mirror(uri, study.folder)
    live.deliver()
    fingerprint = study.fingerprints[0]
    shutil.copy(study.path(fingerprint) / "mirror.json", tmp_path / "mirror.json")
    shutil.rmtree(study.path(fingerprint))
    study.train(fingerprint, began=T0 + 60_000)
    shutil.copy(tmp_path / "mirror.json", study.path(fingerprint) / "mirror.json")
    if seen_between:
        Mirror(uri, study.folder).deliver()
    study.end(fingerprint, ended=T0 + 70_000)
    Mirror(uri, study.folder).deliver()
    assert rows(uri) == undisturbed()


def test_a_run_created_twice_by_a_slow_server_is_one_again(study, uri):
    from mlflow import MlflowClient

    study.finish()
    Mirror(uri, study.folder).deliver()
    before = rows(uri)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("position").experiment_id
    for run in client.search_runs([experiment]):
        client.create_run(experiment, run.info.start_time, run.data.tags, run.info.run_name)
    Mirror(uri, study.folder).deliver()
    assert rows(uri) == before


def test_budgets_have_parents_of_their_own(study, uri, tmp_path):
    study.finish()
    quick = Mirror(uri, study.folder)
    assert quick.pending()  # which labels the runs, whether or not a store ever answers
    study.plan("smoke")
    Mirror(uri, study.folder).deliver()
    found = rows(uri)
    assert found["rope · copy · seed 0"]["parent"] == "position · quick"
    assert found["position · quick"]["status"] == found["position · smoke"]["status"] == "FINISHED"


def test_what_mlflow_refuses_holds_up_nothing_else(study, uri):
    study.finish()
    refused = study.fingerprints[0]
    with (study.path(refused) / "curves.jsonl").open("a") as file:
        file.write('{"step": 110, "time": 1700000000110, "train/loss @ 3": 1.0}\n')
    with pytest.raises(StoreError, match="1 runs are refused"):
        Mirror(uri, study.folder).deliver()
    assert rows(uri)["rope · copy · seed 0"]["status"] == "FINISHED"


def test_a_run_whose_spec_cannot_be_read_holds_up_nothing_else(study, uri):
    first, second = study.fingerprints
    study.train(first, 0, 40)
    (study.path(first) / "spec.json").write_text("{")
    study.train(second)
    study.end(second)
    with pytest.raises(StoreError, match=r"1 runs are refused, the first: .*spec.json cannot be read .*run the study"):
        Mirror(uri, study.folder).deliver()
    assert set(rows(uri)) == {"position · quick", "rope · copy · seed 0"}
    study.train(first, 40, STEPS)  # which writes the spec anew
    assert Mirror(uri, study.folder).deliver() == 1
    assert len(rows(uri)) == 3


def test_a_corrupt_attention_map_costs_its_image_only(study, uri, caplog):
    study.finish()
    broken = study.path(study.fingerprints[0]) / "attention" / "000050.npz"
    broken.write_bytes(broken.read_bytes()[:40])
    Mirror(uri, study.folder).deliver()
    images = [p for p in rows(uri)["sinusoidal · copy · seed 0"]["artifacts"] if p.startswith("images/")]
    assert len(images) == 4
    assert "000050.npz is corrupt" in caplog.text
    assert not Mirror(uri, study.folder).pending()


def test_a_corrupt_record_counts_as_none_and_a_corrupt_plan_is_an_error(study, uri):
    study.finish()
    (study.path(study.fingerprints[0]) / "record.json").write_text("{")
    Mirror(uri, study.folder).deliver()
    assert rows(uri)["sinusoidal · copy · seed 0"]["status"] == "KILLED"
    (study.folder / "study.json").write_text("{")
    with pytest.raises(UserError, match=r"study\.json is corrupt"):
        Mirror(uri, study.folder).deliver()


# Who runs the study


def test_a_live_study_runs_and_one_that_ends_early_is_killed_then_resumed(study, uri, undisturbed):
    first, second = study.fingerprints
    study.train(first)
    study.end(first)
    study.train(second, 0, 40)
    live = Mirror(uri, study.folder)
    live.start()
    wait_until(lambda: not live.pending())
    assert rows(uri)["position · quick"]["status"] == rows(uri)["rope · copy · seed 0"]["status"] == "RUNNING"
    assert live.close(60, "KILLED")
    assert rows(uri)["position · quick"]["status"] == rows(uri)["rope · copy · seed 0"]["status"] == "KILLED"
    assert rows(uri)["rope · copy · seed 0"]["times"][1] == T0 + 40

    again = Mirror(uri, study.folder)
    again.start()
    study.train(second, 40, 60)
    wait_until(lambda: rows(uri)["rope · copy · seed 0"]["status"] == "RUNNING")
    study.train(second, 60, STEPS)
    study.end(second)
    study.report()
    assert again.close(60, "FINISHED")
    assert rows(uri) == undisturbed()
    assert rows(uri)["rope · copy · seed 0"]["status"] == "FINISHED"


def test_runs_left_running_by_a_kill_are_reaped(study, uri):
    from mlflow import MlflowClient

    study.train(study.fingerprints[0], 0, 40)
    pid = in_child(
        lambda: (live := Mirror(uri, study.folder), live.start(), wait_until(lambda: not live.pending()), die())
    )
    os.waitpid(pid, 0)
    assert rows(uri)["sinusoidal · copy · seed 0"]["status"] == "RUNNING"
    client = MlflowClient(uri)
    foreign = client.create_run(client.get_experiment_by_name("position").experiment_id, run_name="not ours")
    assert Mirror(uri, study.folder).reap() == 2
    found = rows(uri)
    assert found["sinusoidal · copy · seed 0"]["status"] == found["position · quick"]["status"] == "KILLED"
    assert client.get_run(foreign.info.run_id).info.status == "RUNNING"
    assert Mirror(uri, study.folder).reap() == 0
    assert not Mirror(uri, study.folder).pending()


def test_a_study_that_another_process_runs_is_neither_reaped_nor_killed(study, uri):
    study.train(study.fingerprints[0], 0, 40)
    with signed(study.folder / "lock"):
        text = (study.folder / "lock").read_text()
        (study.folder / "lock").write_text(text.replace(str(os.getpid()), str(os.getppid())))
        Mirror(uri, study.folder).deliver()
        assert Mirror(uri, study.folder).reap() == 0
        assert rows(uri)["sinusoidal · copy · seed 0"]["status"] == "RUNNING"
    Mirror(uri, study.folder).deliver()
    assert rows(uri)["sinusoidal · copy · seed 0"]["status"] == "KILLED"


def test_our_own_lock_is_not_somebody_elses(study, uri):
    study.train(study.fingerprints[0], 0, 40)
    with signed(study.folder / "lock"):
        Mirror(uri, study.folder).deliver()
        assert rows(uri)["sinusoidal · copy · seed 0"]["status"] == "KILLED"


def test_two_deliveries_at_once_take_turns(study, uri, monkeypatch):
    study.finish()
    monkeypatch.setattr(mirror, "PATIENCE", 0.2)
    with (study.folder / "mirror.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process is delivering"):
            Mirror(uri, study.folder).deliver()
    assert Mirror(uri, study.folder).deliver() == 2


def test_flush_waits_for_what_lies_on_disk_but_not_for_a_dead_store(study, uri, monkeypatch):
    monkeypatch.setattr(mirror, "CYCLE", 60)
    study.train(study.fingerprints[0])
    live = Mirror(uri, study.folder)
    live.start()
    assert live.flush(60)
    study.end(study.fingerprints[0])
    assert live.flush(60)
    assert rows(uri)["sinusoidal · copy · seed 0"]["status"] == "FINISHED"
    assert live.close(60)
    dead = Mirror("http://127.0.0.1:9", study.folder)
    dead.start()
    begun = time.monotonic()
    assert not dead.flush(30)
    assert time.monotonic() - begun < 20
    dead.close(20)


def test_a_study_is_finished_with_its_report(study, uri):
    for fingerprint in study.fingerprints:
        study.train(fingerprint)
        study.end(fingerprint)
    live = Mirror(uri, study.folder)
    live.start()
    assert live.close(60, "KILLED")  # while the report was written
    assert rows(uri)["position · quick"]["status"] == "KILLED"
    assert not Mirror(uri, study.folder).pending()
    study.report()
    page = study.folder / "report.html"
    for written, status in ((T0 / 1000, "KILLED"), (T0 / 1000 + 60, "FINISHED")):  # before the last record, and after
        os.utime(page, (written, written))
        Mirror(uri, study.folder).deliver()
        assert rows(uri)["position · quick"]["status"] == status


def test_an_error_ends_the_study_as_failed(study, uri):
    study.train(study.fingerprints[0], 0, 40)
    live = Mirror(uri, study.folder)
    live.start()
    assert live.close(60, "FAILED")
    assert rows(uri)["position · quick"]["status"] == "FAILED"
    assert rows(uri)["sinusoidal · copy · seed 0"]["status"] == "KILLED"


# Kills, outages, locks


def in_child(work):
    """Do some work in a forked process; its pid. It ends without any tidying up."""
    pid = os.fork()
    if pid:
        return pid
    try:
        logging.disable()
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(moment):
    """Kill this process before or after the n-th thing that it tells the store or notes down."""
    from harness.tracking.store import Store

    left = itertools.count(moment, -1)

    def between(original):
        def wrapped(*args, **keywords):
            if next(left) == 1:
                die()
            result = original(*args, **keywords)
            if next(left) == 1:
                die()
            return result

        return wrapped

    for name in ("experiment", "create", "send", "name_data", "upload", "close", "tag_experiment"):
        setattr(Store, name, between(getattr(Store, name)))
    received.write = between(received.write)


@pytest.mark.slow
def test_killed_between_any_two_steps_and_delivered_again_nothing_is_missing_or_twice(study, uri, undisturbed):
    import harness.tracking.store  # noqa: F401 - imported once here, not in every child

    study.finish()
    deaths = 0
    for moment in itertools.cycle(range(3, 11)):
        pid = in_child(lambda moment=moment: (die_at(moment), Mirror(uri, study.folder).deliver()))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            break
        deaths += 1
        assert deaths < 200, "no progress"
    assert deaths > 10  # so many different moments were tried
    assert rows(uri) == undisturbed()


@pytest.mark.slow
def test_killed_at_random_moments_and_delivered_again_nothing_is_missing_or_twice(results, undisturbed):
    import harness.tracking.store  # noqa: F401

    study, uri = Study(results, seeds=range(3)).finish(), default_uri(results)
    moments = random.Random(0)
    for attempt in range(8):
        pid = in_child(lambda: Mirror(uri, study.folder).deliver())
        time.sleep(moments.uniform(0, 0.3 * (attempt + 1)))  # the first of them hit the creation of the tables
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    Mirror(uri, study.folder).deliver()
    assert len(rows(uri)) == 7
    assert rows(uri) == undisturbed(study)


@pytest.mark.slow
def test_a_locked_database_delays_and_loses_nothing(study, uri, results, undisturbed, caplog):
    study.train(study.fingerprints[0], 0, 40)
    live = Mirror(uri, study.folder)
    live.deliver()
    with sqlite3.connect(results / "mlflow.db", isolation_level=None) as database:
        database.execute("begin exclusive")
        live.start()
        study.train(study.fingerprints[0], 40, STEPS)
        begun = time.monotonic()
        wait_until(lambda: live._failures)
        assert time.monotonic() - begun > 2  # sqlite itself waits for a while
        database.execute("rollback")
    database.close()
    study.end(study.fingerprints[0])
    study.train(study.fingerprints[1])
    study.end(study.fingerprints[1])
    assert live.close(60)
    assert rows(uri) == undisturbed()
    assert "takes no data" not in caplog.text  # one hiccup is not worth a warning


@contextmanager
def mlflow_server(folder, port):
    """A real server that keeps its data in a folder; killed at the end."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        wait_until(lambda: answers(port), 180)
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(port):
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_has_everything_once(study, tmp_path, undisturbed, caplog):
    first, second = study.fingerprints
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    study.train(first, 0, 40)
    live = Mirror(address, study.folder)
    with mlflow_server(tmp_path / "server", port):
        live.start()
        wait_until(lambda: not live.pending())
        assert rows(address)["sinusoidal · copy · seed 0"]["status"] == "RUNNING"
    study.train(first, 40, STEPS)
    study.end(first)
    study.train(second, 0, 60)
    wait_until(lambda: live._failures > 2)
    begun = time.monotonic()
    assert not live.close(20)
    assert time.monotonic() - begun < 15
    assert caplog.text.count("takes no data") == 1
    assert "`harness sync` sends the rest" in caplog.text
    study.train(second, 60, STEPS)
    study.end(second)
    with mlflow_server(tmp_path / "server", port):
        assert Mirror(address, study.folder).deliver() == 2
        assert Mirror(address, study.folder).deliver() == 0
        assert rows(address) == undisturbed()


def test_a_server_that_hangs_holds_up_nobody(study, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    study.finish()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        live = Mirror(f"http://127.0.0.1:{silent.getsockname()[1]}", study.folder)
        live.prepare()
        live.start()
        assert time.monotonic() - begun < 0.5
        time.sleep(0.5)
        begun = time.monotonic()
        assert not live.close(0.5)
        assert time.monotonic() - begun < 2
        assert "`harness sync` sends the rest" in caplog.text
        live._thread.join(60)
        assert not live._thread.is_alive()


MINE = """
from harness import Ablation, Budget, ModelSpec, TrainSpec
from harness.components.position import NoPE
from tasks import Copy, Lengths

ablation = Ablation(
    question="Does an outage matter?",
    model=ModelSpec(d_model=16, num_layers=1, num_heads=2),
    train=TrainSpec(steps=200, batch_size=8, eval_samples=8),
    tasks={"copy": Copy(lengths=Lengths(train=(1, 4), test=(5,)))},
    axes=("model.position",),
    baseline="sinusoidal",
    variants={"sinusoidal": {}, "none": {"model.position": NoPE()}},
    budgets={"smoke": Budget(seeds=2)},
)
"""


def harness(*arguments):
    """A command as a user gives it: exit code, document, stderr."""
    command = [sys.executable, "-m", "harness", *arguments, "--results", "out", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_a_store_that_is_down_neither_stops_nor_slows_a_study_and_has_everything_later(tmp_path, undisturbed):
    Path("mine.py").write_text(MINE)
    first, second = free_port(), free_port()
    addresses = [f"http://127.0.0.1:{port}" for port in (first, second)]
    with socket.create_server(("127.0.0.1", first)):  # takes connections and never answers
        code, _, said = harness("ablate", "mine.py", "--tracking-uri", addresses[0])
    over = time.time()
    records = [RunRecord.read(path) for path in Path("out").glob("mine/runs/*/record.json")]
    assert (code, len(records)) == (0, 4)
    assert "`harness sync` sends the rest" in said
    assert max(record.ended for record in records) - min(record.started for record in records) < 60
    assert over - max(record.ended for record in records) < 60
    with mlflow_server(tmp_path / "first", first):
        assert harness("sync")[:2] == (0, {"delivered": {"mine": 4}, "failed": {}})
        assert harness("sync")[:2] == (0, {"delivered": {"mine": 0}, "failed": {}})
        found = [rows(addresses[0], "mine")]

    # The finished study is wanted in another store, which is down as well.
    code, answer, said = harness("ablate", "mine.py", "--tracking-uri", addresses[1])
    assert (code, answer["unchanged"]) == (0, True)
    assert "`harness sync` sends the rest" in said
    assert harness("sync")[0] == 1
    with mlflow_server(tmp_path / "second", second):
        assert harness("sync")[:2] == (0, {"delivered": {"mine": 4}, "failed": {}})
        found.append(rows(addresses[1], "mine"))
    assert found == [undisturbed(SimpleNamespace(folder=tmp_path / "out" / "mine"))] * 2


# Addresses


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("", "has no scheme"),
        ("mlruns", "has no scheme"),
        ("sqllite:////tmp/mlflow.db", "did you mean 'sqlite'"),
        ("file:///tmp/mlruns", "no longer writes to plain folders"),
        ("http://", "names no server"),
        ("http://host:port", "names no server"),
        ("http://[::1", "names no server"),
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite:////etc/hostname/mlflow.db", "not a folder"),
        ("sqlite:////etc", "is a folder"),
        ("sqlite:////etc/hostname", "not an sqlite database"),
        ("mssql://host/db", "needs the package pyodbc"),
    ],
)
def test_a_malformed_uri_is_refused_in_one_sentence(uri, words, study):
    with pytest.raises(UserError) as error:
        Mirror(uri, study.folder).prepare()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert repr(uri) in str(error.value)


def test_a_password_is_neither_shown_nor_written_down(study, caplog):
    study.finish()
    live = Mirror("http://me:secret@127.0.0.1:9", study.folder)
    with pytest.raises(StoreError) as error:
        live.deliver()
    assert not live.close(20)
    with pytest.raises(UserError) as malformed:
        Mirror("http://me:secret@host:port", study.folder).prepare()
    written = "".join(path.read_text() for path in study.folder.rglob("mirror.json"))
    assert "secret" not in caplog.text + str(error.value) + str(malformed.value) + written


def test_what_can_be_a_store_is_let_pass(results, study):
    for uri in (
        "http://127.0.0.1:5000",
        "https://user@host/path",
        "postgresql+psycopg://host/db",
        default_uri(results),
    ):
        Mirror(uri, study.folder).prepare()
    assert not (results / "mlflow.db").exists()  # nothing is written before it is needed


def test_a_finished_study_is_recognised_without_importing_mlflow(study, uri):
    study.finish()
    Mirror(uri, study.folder).deliver()
    code = (
        "import sys; from pathlib import Path; from harness.tracking import *\n"
        f"folder, uri = Path({str(study.folder)!r}), {uri!r}\n"
        "live = Mirror(uri, folder); live.prepare(); live.start(); assert live.close(10, 'FINISHED')\n"
        "assert len(run_ids(folder)) == 2 and study_links('http://x', folder, uri)\n"
        "assert not {'mlflow', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


def test_links_name_the_pages_that_compare_the_study(study, uri):
    assert study_links("http://x", study.folder, uri) == []
    study.finish()
    Mirror(uri, study.folder).deliver()
    links = study_links("http://x", study.folder, uri)
    ids = run_ids(study.folder)
    compare = next(link.address for link in links if "compare-runs" in link.address)
    assert all(run_id in compare for run_id in ids.values())
    assert all(link.address.startswith("http://x/#/") and " " not in link.address for link in links)
    assert compare_link("http://x", "1", ["a", "b"]).startswith(
        "http://x/#/compare-runs?runs=%5B%22a%22%2C%20%22b%22%5D"
    )


def test_saved_views_arrive_in_the_form_that_mlflow_reads(study, uri):
    from mlflow import MlflowClient

    study.finish()
    Mirror(uri, study.folder).deliver()
    tags = MlflowClient(uri).get_experiment_by_name("position").tags
    views = {key.removeprefix(TAG): json.loads(tag) for key, tag in tags.items() if key.startswith(TAG)}
    assert set(views) == {f"harness-quick-{name}" for name in ("runs", "1-curves", "1-parameters", "1-attention")}
    assert all(set(view) == {"name", "createdAt", "state"} for view in views.values())
    states = {key: json.loads(view["state"]) for key, view in views.items()}
    assert states["harness-quick-runs"]["selectedColumns"][0] == "params.`model.position`"
    assert states["harness-quick-1-attention"]["compareRunCharts"][0]["imageKeys"] == ["attention/maps"]
    linked = [link.address for link in study_links("http://x", study.folder, uri)]
    assert all(any(f"viewStateShareKey={key}&" in address for address in linked) for key in views)
    assert max(map(len, tags.values())) < 20_000  # characters that MLflow takes


def test_parameters_have_one_spelling_with_the_specs():
    from harness.spec import RunSpec
    from tasks import Copy

    spec = RunSpec(task=Copy(), seed=3)
    names = parameters(spec.document())
    assert set(names) == set(spec.flat())
    assert names["model.position"] == spec.flat()["model.position"]
    assert names["seed"] == "3"


def test_the_description_begins_with_the_answer_and_ends_before_the_first_section():
    answer, table = "> The answer\n> goes on.", "| a | b |\n|---|---|\n| 1 | 2 |"
    report = f"# Title\n\n**Question?**\n\n{answer}\n\n{table}\n\n## Curves\n\n![c](c.png)\n"
    assert report_head(report) == ["The answer\ngoes on.", "**Question?**", table]
    assert report_head("") == []
    assert sum(map(len, report_head("\n\n".join(["word " * 100] * 100)))) <= 4000
