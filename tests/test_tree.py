"""A sweep's tree in a real MLflow store."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.tracking import TreeMirror, default_uri
from harness.tracking.tree import NODES, append, read


def node(key: str, parent: str, **changes: Any) -> dict[str, Any]:
    return {
        "key": key, "parent": parent, "name": key, "status": "FINISHED", "started": 1000, "ended": 2000,
        "tags": {"kind": "made"}, "params": {}, "metrics": {}, "runs": {}, "files": [], **changes,
    }  # fmt: skip


def stored(uri: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("made-sweep")
    assert experiment is not None
    return {run.data.tags["node"]: run for run in client.search_runs([experiment.experiment_id], max_results=1000)}


def test_nodes_come_parents_first_the_last_line_counts_and_a_torn_one_does_not(tmp_path: Path) -> None:
    for each in (node("s/v/1", "s/v"), node("s/v", "s"), node("s", "", status="RUNNING"), node("s", "")):
        append(tmp_path, each)
    with (tmp_path / NODES).open("a") as file:
        file.write('{"key": "s/v/2", "par')
    found = read(tmp_path)
    assert list(found) == ["s", "s/v", "s/v/1"]
    assert found["s"]["status"] == "FINISHED"


@pytest.mark.slow
def test_the_store_has_each_node_once_below_its_parent_with_all_that_is_known(tmp_path: Path) -> None:
    folder, uri = tmp_path / "made" / "sweep", default_uri(tmp_path)
    (folder / "runs" / "abc").mkdir(parents=True)
    lines = [{"step": step, "time": 1500 + step, "train/loss": 1 / step, "eval/none": 3.0} for step in (10, 20)]
    (folder / "runs/abc/curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.md").write_text("what was found")
    append(folder, node("s", "", files=["summary.md"], status="RUNNING", ended=None))
    append(folder, node("s/v", "s"))
    trials = [node(f"s/v/{n}", "s/v", metrics={"score": {0: n / 200}}, params={"rate": n}) for n in range(200)]
    trials[0] |= {"runs": {"": "abc"}, "status": "KILLED"}
    for each in trials:
        append(folder, each)
    assert TreeMirror(uri, folder, "made-sweep").deliver() == 202
    runs = stored(uri)
    assert len(runs) == 202
    assert runs["s"].info.status == "KILLED"  # nobody runs it, whatever its last line says
    assert runs["s/v"].data.tags["mlflow.parentRunId"] == runs["s"].info.run_id
    assert all(runs[f"s/v/{n}"].data.tags["mlflow.parentRunId"] == runs["s/v"].info.run_id for n in range(200))
    assert runs["s/v/7"].data.params == {"rate": "7"}
    assert runs["s/v/7"].data.metrics == {"score": 7 / 200}
    assert runs["s/v/0"].data.metrics == {"score": 0.0, "train/loss": 0.05}
    assert (runs["s/v/0"].info.status, runs["s/v/1"].info.status) == ("KILLED", "FINISHED")
    again = TreeMirror(uri, folder, "made-sweep")
    assert again.deliver() == 0
    (folder / "received.json").unlink()  # as after a kill between sending and noting
    append(folder, node("s/v/200", "s/v"))
    again.deliver()
    assert len(stored(uri)) == 203
