"""Addresses of MLflow's pages. They are its user interface's own, which no API gives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from harness.tracking.disk import StudyFolder
from harness.tracking.received import Received, run_ids
from harness.tracking.uri import store_key
from harness.tracking.views import TAG, View, study_views

_WORKFLOW = "workflowType=machine_learning"


class Link(NamedTuple):
    """An address and what one sees there."""

    text: str
    address: str


def view_link(server: str, experiment_id: str, view: View) -> str:
    """An experiment's runs as a saved view shows them."""
    mode = "compareRunsMode=CHART&" if view.is_charts else ""
    return f"{server}/#/experiments/{experiment_id}/runs?{mode}viewStateShareKey={view.key}&{_WORKFLOW}"


def compare_link(server: str, experiment_id: str, ids: list[str]) -> str:
    """Some runs side by side: parameters, metrics, what differs."""
    runs, experiments = quote(json.dumps(ids)), quote(json.dumps([experiment_id]))
    return f"{server}/#/compare-runs?runs={runs}&experiments={experiments}&{_WORKFLOW}"


def run_link(server: str, experiment_id: str, run_id: str, page: str = "") -> str:
    """A run's overview; `page` is `model-metrics` (curves, image slider) or `artifacts/…` (a file)."""
    return f"{server}/#/experiments/{experiment_id}/runs/{run_id}{f'/{page}' if page else ''}?{_WORKFLOW}"


def study_links(server: str, study_folder: Path, uri: str) -> list[Link]:
    """What to look at of a study, as far as its store has received it.

    Args:
        server: where MLflow's pages are served, e.g. `http://127.0.0.1:5000`.
        study_folder: the study's folder.
        uri: the tracking store that the server shows.
    """
    study = StudyFolder(study_folder)
    if study.document is None:
        return []
    parent = study.mirror.stores.get(store_key(uri, study_folder), {}).get(study.budget)
    return [] if parent is None else [*_links(server, study, parent, run_ids(study_folder, uri))]


def _links(server: str, study: StudyFolder, parent: Received, ids: dict[str, str]) -> Iterator[Link]:
    experiment, document = parent.experiment_id, study.document or {}
    yield Link("the report", run_link(server, experiment, parent.run_id, "artifacts/report.html"))
    yield Link("the study: its runs, answer and figures", run_link(server, experiment, parent.run_id))
    for view in study_views(document):
        if TAG + view.key in parent.views:
            yield Link(view.name, view_link(server, experiment, view))
    for task in document["tasks"]:
        if len(chosen := _one_seed(document, task, ids)) > 1:
            text = f"all variants on {task} side by side, seed {document['seeds'][0]}: every parameter and metric"
            yield Link(text, compare_link(server, experiment, chosen))
    if run := _to_diagnose(study, ids):
        name, run_id = run
        yield Link(f"diagnosis of {name}: tags, description", run_link(server, experiment, run_id))
        yield Link(f"curves of {name}", run_link(server, experiment, run_id, "model-metrics"))


def _to_diagnose(study: StudyFolder, ids: dict[str, str]) -> tuple[str, str] | None:
    """Name and id of a run with an alarm; of the first run if there is none."""
    known = [(run, mirror) for run, mirror in study.runs() if run.fingerprint in ids]
    planned = [run["fingerprint"] for run in (study.document or {})["runs"]]
    known = sorted(
        (pair for pair in known if pair[0].fingerprint in planned), key=lambda p: planned.index(p[0].fingerprint)
    )
    ill = (pair for pair in known if pair[0].record and any(found.alarm for found in pair[0].record.findings))
    run, mirror = next(ill, known[0] if known else (None, None))
    return (mirror.label.name, ids[run.fingerprint]) if run and mirror else None


def _one_seed(study: dict[str, Any], task: str, ids: dict[str, str]) -> list[str]:
    seed = study["seeds"][0]
    cells = [run for run in study["runs"] if (run["task"], run["seed"]) == (task, seed)]
    return [ids[run["fingerprint"]] for run in cells if run["fingerprint"] in ids]
