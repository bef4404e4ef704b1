"""Saved views of MLflow's run pages: which runs, columns and charts a study's links show.

A view is a tag of the experiment, and stands in the menu *Views* of its page. The documents are the user interface's
own, which no API gives: what they hold was read off MLflow 3.17, and tests/test_dashboard_pages.py looks at the pages.
Without them the table shows only parents, a chart's first card is whatever comes first in the alphabet, and the card of
attention maps is filled with the run's parameters.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

TAG = "mlflow.sharedViewState."
LOSS = "train/loss"
SHOWN = 20  # runs in a chart at most
FIELDS = 4  # columns of differing parameters at most
SECTIONS = ("attention", "eval", "router", "train", "Model metrics")  # MLflow's own, folded below ours


class View(NamedTuple):
    """A page of an experiment: its key, its name in words, whether it is charts, and MLflow's document."""

    key: str
    name: str
    is_charts: bool
    state: dict[str, Any]


def study_views(study: Mapping[str, Any]) -> list[View]:
    """A table of the study's runs; for each task curves, parameters and attention maps of one seed."""
    budget = study["budget"]
    table = "every run, best first: scores, differing fields, diagnosis"
    views = [View(f"harness-{budget}-runs", table, False, _table(study))]
    for number, task in enumerate(study["tasks"], 1):
        key, where = f"harness-{budget}-{number}", f"of all variants on {task}, seed {study['seeds'][0]}"
        search = f"tags.task = '{task}' and tags.seed = '{study['seeds'][0]}' and tags.budget = '{budget}'"
        views += [
            View(f"{key}-curves", f"loss curves and scores {where}", True, _curves(study, search)),
            View(f"{key}-parameters", f"parameters that differ {where}", True, _parameters(search)),
            View(f"{key}-attention", f"attention maps {where}: move the slider", True, _attention(search)),
        ]
    return views


def view_tags(study: Mapping[str, Any]) -> dict[str, str]:
    """The views as the experiment's tags, in the envelope that MLflow's menu reads."""
    budget = study["budget"]
    return {
        TAG + view.key: json.dumps({"name": f"{budget}: {view.name}", "createdAt": 0, "state": json.dumps(view.state)})
        for view in study_views(study)
    }


def _table(study: Mapping[str, Any]) -> dict[str, Any]:
    """All runs of the budget, without their parent: it would fold them away."""
    score, ascending = _score(study)
    fields = list(dict.fromkeys(path for changes in study["differences"].values() for path in changes))
    metrics = dict.fromkeys((score, "eval/in_distribution", LOSS))
    columns = [f"params.`{path}`" for path in fields[:FIELDS]] + [f"metrics.`{key}`" for key in metrics]
    search = f"tags.kind = 'run' and tags.budget = '{study['budget']}'"
    return {**_page(search, score, ascending), "selectedColumns": [*columns, "tags.`diagnosis`"]}


def _curves(study: Mapping[str, Any], search: str) -> dict[str, Any]:
    score, _ = _score(study)
    lines = [_line(key) for key in (LOSS, "eval/exact_match_by_length", "eval/in_distribution")]
    return _charts(search, "Curves of all variants", [*lines, _card("BAR", metricKey=score)], columns=2, height=360)


def _parameters(search: str) -> dict[str, Any]:
    card = _card("DIFFERENCE", chartName="Parameters that differ", compareGroups=["Parameters"], baselineColumnUuid="")
    card |= {"showChangeFromBaseline": False, "showDifferencesOnly": True}
    # The columns name the runs: without the list beside them more of them can be seen.
    return {**_charts(search, "Parameters that differ", [card], columns=1, height=480), "runListHidden": True}


def _attention(search: str) -> dict[str, Any]:
    card = _card("IMAGE", imageKeys=["attention/maps"], step=0, showRunParams=False)
    return {**_charts(search, "Attention maps", [card], columns=1, height=620), "runListHidden": True}


def _score(study: Mapping[str, Any]) -> tuple[str, bool]:
    """The metric that stands for the primary score in MLflow, and whether lower is better."""
    if study["score"] == "learning_time":
        return "train/steps_to_threshold", True
    return "eval/extrapolation", False


def _page(search: str, order: str, ascending: bool) -> dict[str, Any]:
    return {"searchFilter": search, "orderByKey": f"metrics.`{order}`", "orderByAsc": ascending}


def _charts(search: str, title: str, cards: list[dict[str, Any]], *, columns: int, height: int) -> dict[str, Any]:
    """Charts with a section of ours on top; ordered by a metric, for else children are folded away."""
    ours = {**_section("ours", title), "columns": columns, "cardHeight": height}
    return {
        **_page(search, LOSS, True),
        "runsHiddenMode": f"FIRST_{SHOWN}_RUNS",
        "compareRunCharts": [{**card, "uuid": f"ours-{number}"} for number, card in enumerate(cards)],
        "compareRunSections": [ours, *(_section(name, name, display=False) for name in SECTIONS)],
        "isAccordionReordered": True,
    }


def _section(uuid: str, name: str, *, display: bool = True) -> dict[str, Any]:
    state = {"isReordered": True, "deleted": False, "isGenerated": False}
    return {"uuid": uuid, "name": name, "display": display, **state}


def _card(kind: str, **fields: Any) -> dict[str, Any]:
    common = {"type": kind, "metricSectionId": "ours", "runsCountToCompare": SHOWN}
    return {**common, "deleted": False, "isGenerated": False, **fields}


def _line(metric: str) -> dict[str, Any]:
    axes = {"xAxisKey": "step", "useGlobalXaxisKey": False, "selectedXAxisMetricKey": "", "scaleType": "linear"}
    smooth = {"lineSmoothness": 0, "useGlobalLineSmoothing": False, "range": {}}
    return _card("LINE", metricKey=metric, selectedMetricKeys=[metric], **axes, **smooth)
