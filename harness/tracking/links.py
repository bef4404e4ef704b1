"""Addresses of MLflow's pages. They are its user interface's own, which no API gives."""

import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from harness.tracking.disk import StudyFolder
from harness.tracking.received import Received, run_ids
from harness.tracking.uri import store_key

METRIC = "train/loss"  # every run has it
_WORKFLOW = "workflowType=machine_learning"


class Link(NamedTuple):
    """An address and what one sees there."""

    text: str
    address: str


def runs_link(server: str, experiment_id: str) -> str:
    """The table of an experiment's runs, children folded under the studies."""
    return f"{server}/#/experiments/{experiment_id}/runs?{_WORKFLOW}"


def chart_link(server: str, experiment_id: str, metric: str, search: str = "") -> str:
    """All runs of an experiment as charts; ordered by a metric, for else children are folded away and charts empty."""
    order = quote(f"metrics.`{metric}`", safe=".")
    found = f"&searchFilter={quote(search)}" if search else ""
    return (
        f"{server}/#/experiments/{experiment_id}/runs?compareRunsMode=CHART&orderByKey={order}&orderByAsc=true"
        f"{found}&{_WORKFLOW}"
    )


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
    return [] if parent is None else [*_links(server, study.document, parent, run_ids(study_folder, uri))]


def _links(server: str, study: dict[str, Any], parent: Received, ids: dict[str, str]) -> list[Link]:
    experiment, budget = parent.experiment_id, study["budget"]
    links = [
        Link("the report", run_link(server, experiment, parent.run_id, "artifacts/report.html")),
        Link("the study: answer, description, its runs", run_link(server, experiment, parent.run_id)),
        Link("all runs as a table", runs_link(server, experiment)),
    ]
    for task in study["tasks"]:
        seed = study["seeds"][0]
        search = f"tags.task = '{task}' and tags.seed = '{seed}' and tags.budget = '{budget}'"
        links.append(
            Link(f"{task}: curves of all variants, seed {seed}", chart_link(server, experiment, METRIC, search))
        )
        if len(chosen := _one_seed(study, task, ids)) > 1:
            text = f"{task}: all variants side by side, seed {seed}"
            links.append(Link(text, compare_link(server, experiment, chosen)))
    first = next((ids[run["fingerprint"]] for run in study["runs"] if run["fingerprint"] in ids), None)
    if first:
        links.append(
            Link(
                "one run: curves, attention maps (enlarge the first card)",
                run_link(server, experiment, first, "model-metrics"),
            )
        )
    return links


def _one_seed(study: dict[str, Any], task: str, ids: dict[str, str]) -> list[str]:
    seed = study["seeds"][0]
    cells = [run for run in study["runs"] if (run["task"], run["seed"]) == (task, seed)]
    return [ids[run["fingerprint"]] for run in cells if run["fingerprint"] in ids]
