"""Studies, and a document of what differs between them and what came of each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.results import StudyData
from harness.schema import flatten
from harness.wording import listed

if TYPE_CHECKING:
    import pandas as pd
from string import ascii_uppercase as KEYS

from harness.comparison.differences import Document, differing, distinct

PLAN = (
    "question",
    "axes",
    "baseline",
    "budget",
    "device",
    "pilot",
    "seeds",
    "score",
    "higher_is_better",
    "margin",
    "gate",
)


@dataclass(frozen=True)
class Study:
    """A study's data, and two tables of its report: `summaries` of the scores, and `verdicts` (`report.tables`)."""

    data: StudyData
    summaries: "pd.DataFrame"
    verdicts: "pd.DataFrame"


def of_studies(studies: Sequence[Study]) -> Document:
    """What differs between the plans of studies; score and verdict of the variants and tasks that at least two have;
    the names of those that only one has.
    """
    keyed = dict(zip(KEYS, studies, strict=False))
    plans = {key: study.data.document for key, study in keyed.items()}
    return {
        "kind": "studies",
        "studies": [{"key": key, **_study(study.data)} for key, study in keyed.items()],
        "plan": differing({key: _plan(study.data) for key, study in keyed.items()}) + _variants_that_differ(plans),
        "scores": list(_scores(keyed)),
        "only": {key: _only(key, plans) for key in plans},
        "notes": list(_notes(plans)),
    }


def _study(data: StudyData) -> Document:
    document = data.document
    counts = {str(status): int(n) for status, n in data.runs["status"].value_counts().items()}
    facts = {
        name: document.get(name) for name in ("study", "budget", "baseline", "score", "seeds", "variants", "tasks")
    }
    return {**facts, "folder": str(data.folder), "pilot": data.is_pilot, "runs": len(data.runs), "counts": counts}


def _plan(data: StudyData) -> Document:
    """A plan by dotted paths: what it decides, its environment, the baseline's model and training, the tasks."""
    document = data.document
    spec = document.get("spec", {})
    return {
        **{name: document[name] for name in PLAN if name in document},
        **flatten({"environment": data.environment}),
        **flatten({part: spec.get(part, {}) for part in ("model", "train", "tasks")}),
    }


def _variants_that_differ(plans: Mapping[str, Document]) -> list[Document]:
    """Fields of variants that studies share by name, where these differ otherwise than the baselines do."""
    rows = []
    for variant in _shared([plan["variants"] for plan in plans.values()]):
        own = {key: plan for key, plan in plans.items() if variant in plan["variants"]}
        base = {key: _baseline(plan) for key, plan in own.items()}
        changed = {key: base[key] | plan.get("differences", {}).get(variant, {}) for key, plan in own.items()}
        rows += [
            {"field": f"variants.{variant}.{row['field']}", "values": row["values"]}
            for row in differing(changed)
            if row["values"] != {key: base[key][row["field"]] for key in base if row["field"] in base[key]}
        ]
    return rows


def _baseline(plan: Document) -> dict[str, Any]:
    """The baseline on the first task by dotted paths: what `differences` of a plan are differences to."""
    spec = plan.get("spec", {})
    parts = {part: spec.get(part, {}) for part in ("model", "train")}
    return flatten({**parts, "task": spec.get("tasks", {}).get(plan["tasks"][0], {})})


def _shared(names: Iterable[Iterable[str]]) -> list[str]:
    """What at least two of several lists name, in the order of its first mention."""
    every = [name for own in names for name in dict.fromkeys(own)]
    return [name for name in dict.fromkeys(every) if every.count(name) > 1]


def _scores(studies: Mapping[str, Study]) -> Iterator[Document]:
    """A row a task, variant and study of the cells that at least two studies have."""
    cells = {
        key: [(t, v) for t in s.data.document["tasks"] for v in s.data.document["variants"]]
        for key, s in studies.items()
    }
    every = [cell for own in cells.values() for cell in own]
    for task, variant in dict.fromkeys(cell for cell in every if every.count(cell) > 1):
        for key, study in studies.items():
            if (task, variant) in cells[key]:
                yield {"task": task, "variant": variant, "study": key, **_cell(study, task, variant)}


def _cell(study: Study, task: str, variant: str) -> Document:
    def own(frame: "pd.DataFrame") -> "pd.DataFrame":
        return frame[(frame["task"] == task) & (frame["variant"] == variant)]

    score, judged = own(study.summaries).iloc[0], own(study.verdicts).iloc[0]
    is_baseline = variant == study.data.document["baseline"]
    names = ("bound", "difference", "low", "high", "p_holm", "seeds_needed")
    return {
        **{name: float(score[name]) for name in ("mean", "low", "high")},
        "scored": int(own(study.data.primary())["score"].notna().sum()),
        "learned": int(judged["gate_passed"]),
        "ended": int(judged["gate_of"]),
        "verdict": "baseline" if is_baseline else judged["verdict"],
        "reference": None if is_baseline else judged["reference"],
        "compared": None if is_baseline else {name: judged[name] for name in names},
    }


def _only(key: str, plans: Mapping[str, Document]) -> dict[str, list[str]]:
    """The variants and tasks that one study alone has."""
    found = {}
    for part in ("variants", "tasks"):
        others = {name for other, plan in plans.items() if other != key for name in plan[part]}
        found[part] = [name for name in plans[key][part] if name not in others]
    return found


def _notes(plans: Mapping[str, Document]) -> Iterator[str]:
    """What a reader of the scores must know."""
    for task in _shared([plan["tasks"] for plan in plans.values()]):
        own = [plan for plan in plans.values() if task in plan["tasks"]]
        if (
            distinct([plan["score"], *(plan[f"{of}_lengths"].get(task) for of in ("train", "test"))] for plan in own)
            > 1
        ):
            yield f"on {task} the studies score different things (score or lengths differ): its means do not compare"
    if pilots := [key for key, plan in plans.items() if plan.get("pilot")]:
        yield f"{listed(pilots)} {'is a pilot' if len(pilots) == 1 else 'are pilots'}, which gets no verdict"
