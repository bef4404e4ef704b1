"""Sweeps and MLflow on a real PostgreSQL that the tests start: workers killed, writers at once."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from postgres import cluster, is_missing
from small_study import SWEPT

import harness.sweep.storage
from harness.locate import find_ablation
from harness.schema import UserError
from harness.sweep import open_storage, run_sweep

ROOT = Path(__file__).parents[1]
RATE = "train.learning_rate"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(is_missing(), reason="PostgreSQL is not installed (Debian: apt-get install postgresql-15)"),
]


@pytest.fixture(scope="module")
def databases() -> Iterator[dict[str, str]]:
    with cluster("sweeps", "mlflow", "both") as urls:
        yield urls


MINE = SWEPT.replace("steps=300", "steps=400")


def test_what_a_killed_machine_had_begun_another_tries_again_within_the_budget(
    databases: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    asked = ["--trials", "3", "--jobs", "2", "--sampler", "random", "--no-pruning", "--storage", databases["sweeps"]]
    given = [sys.executable, "-m", "harness", "sweep", str(tmp_path / "mine.py"), "--results", str(tmp_path / "one")]
    process = subprocess.Popen([*given, *asked], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "/3: " not in (line := process.stderr.readline()):
        assert line, "it ended"
    process.kill()
    process.wait()
    process.stderr.close()
    monkeypatch.setattr(harness.sweep.storage, "HEARTBEAT", 1)
    monkeypatch.setattr(harness.sweep.storage, "GRACE", 3)
    outcome = run_sweep(
        find_ablation(str(tmp_path / "mine.py")).ablation, name="mine", results=tmp_path / "other", trials=3, jobs=2,
        sampler="random", pruning=False, storage=databases["sweeps"],
    )  # fmt: skip
    table = outcome.table
    counted = table[table["status"] != "interrupted"]
    assert counted.groupby("variant").size().tolist() == [3, 3]
    assert (counted["status"] == "finished").all()
    abandoned = table[table["status"] == "interrupted"]
    assert len(abandoned) >= 1
    assert set(abandoned[RATE]) <= set(counted[RATE])
    ours = {path.parent.name for path in (tmp_path / "other").glob("mine/sweep/runs/*/record.json")}
    theirs = {path.parent.name for path in (tmp_path / "one").glob("mine/sweep/runs/*/record.json")}
    assert len(ours & theirs) <= 2  # what was told is not done again; what was in flight may have ended after the kill
    assert len(ours | theirs) >= 6
    assert pd.read_csv(outcome.folder / "trials.csv")["variant"].tolist() == table["variant"].tolist()


def test_two_machines_at_once_share_a_budget_and_never_exceed_it(databases: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.replace("steps=400", "steps=20").replace("seeds=1", "seeds=2"))
    asked = ["--trials", "5", "--jobs", "1", "--sampler", "random", "--storage", databases["sweeps"], "--seeds", "1"]
    given = [sys.executable, "-m", "harness", "sweep", str(tmp_path / "mine.py"), *asked, "--results"]
    both = [
        subprocess.Popen([*given, str(tmp_path / name)], cwd=ROOT, stderr=subprocess.DEVNULL) for name in ("one", "two")
    ]
    assert [process.wait(500) for process in both] == [0, 0]
    tables = [pd.read_csv(tmp_path / name / "mine/sweep/trials.csv") for name in ("one", "two")]
    last = max(tables, key=lambda table: int(table["status"].isin(["finished", "pruned"]).sum()))
    assert last[~last["status"].isin(["running", "interrupted"])].groupby("variant").size().tolist() == [5, 5]


WRITERS = """
import multiprocessing, sys
from pathlib import Path
from harness.tracking.entities import Point
from harness.tracking.store import Store

uri, folder, writers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def write(number):
    store = Store(uri, folder)
    experiment = store.experiment("shared")
    for run in range(4):
        run_id = store.create(experiment, f"{number} {run}", {"writer": str(number), "run": str(run)}, 1)
        for batch in range(3):
            steps = range(batch * 100, batch * 100 + 100)
            points = [Point("loss", float(step), step, step) for step in steps]
            store.send(run_id, points=points, params={f"p{batch}": "1"})
        store.close(run_id, "FINISHED", 2)

if __name__ == "__main__":
    if not writers:
        Store(uri, folder).experiment("shared")  # the tables are made once, first
    processes = [multiprocessing.get_context("fork").Process(target=write, args=(n,)) for n in range(writers)]
    [process.start() for process in processes]
    [process.join() for process in processes]
    sys.exit(any(process.exitcode for process in processes))
"""


def test_of_eight_writers_at_once_mlflow_loses_nothing(databases: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "writers.py").write_text(WRITERS)
    for writers in ("0", "8"):
        command = [sys.executable, str(tmp_path / "writers.py"), databases["mlflow"], str(tmp_path), writers]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    from mlflow import MlflowClient

    client = MlflowClient(databases["mlflow"])
    (shared,) = client.search_experiments(filter_string="name = 'shared'")
    runs = client.search_runs([shared.experiment_id])
    assert sorted((r.data.tags["writer"], r.data.tags["run"]) for r in runs) == sorted(
        (str(n), str(r)) for n in range(8) for r in range(4)
    )
    for run in runs:
        assert run.info.status == "FINISHED"
        assert run.data.params == {"p0": "1", "p1": "1", "p2": "1"}
        assert [m.value for m in client.get_metric_history(run.info.run_id, "loss")] == [float(n) for n in range(300)]


def test_a_database_that_is_mlflows_is_refused_for_trials(databases: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from harness.tracking.store import Store; "
        "Store(sys.argv[1], Path(sys.argv[2])).experiment('taken')"
    )
    done = subprocess.run([sys.executable, "-c", code, databases["both"], str(tmp_path)], cwd=ROOT, check=False)
    assert done.returncode == 0
    with pytest.raises(UserError, match=r"give it a database of its own"):
        open_storage(databases["both"], tmp_path)
