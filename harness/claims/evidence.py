"""Reads what the records hold for a piece of evidence: studies, reports, faults, tests. Needs no torch.

A study is read from the results folder where it is finished there, else from the published one; of both the tuned one
(`NAME-tuned`) first, whose variants have each its own learning rate.
"""

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from harness.claims import laws
from harness.claims.rules import (
    Compared,
    Contrasted,
    Diagnosed,
    Evidence,
    Found,
    Law,
    Learned,
    OfStudy,
    Scored,
    Tabled,
)
from harness.claims.tables import cell, number
from harness.results import number_of_looks
from harness.schema import UserError
from harness.sources import ROOT
from harness.stats import clopper_pearson, compare, summary_interval
from harness.wording import PENDING

SMOKE = "smoke"
FEWEST = 5  # runs from which on a mean is judged by its interval, as in `stats` for equivalence
Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Study:
    """A finished study, from its folder."""

    name: str
    folder: Path
    facts: Mapping[str, Any]
    tuned: bool

    @cached_property
    def compared(self) -> Rows:
        """`comparison.csv`."""
        return _rows(self.folder / "comparison.csv")

    @cached_property
    def runs(self) -> Rows:
        """`runs.csv`."""
        return _rows(self.folder / "runs.csv")

    @cached_property
    def gates(self) -> Rows:
        """`tables/verdicts.csv`, which counts the runs that learned."""
        return _rows(self.folder / "tables" / "verdicts.csv")

    def source(self, *variants: str, task: str) -> dict[str, Any]:
        """What stands behind a number: the study, and the runs of some variants on a task."""
        mine = [run for run in self.runs if run["variant"] in variants and task in ("", run["task"])]
        return {
            "kind": "study",
            "study": self.folder.name,
            "folder": self.folder.as_posix(),
            "tuned": self.tuned,
            "task": task,
            "variants": list(variants),
            "commits": sorted({run["commit"] for run in mine}),
            "runs": [run["fingerprint"] for run in mine],
        }


@dataclass(frozen=True)
class Records:
    """A results folder; with `published_only` what is committed below `reference` alone. `told` are outcomes of tests
    that count instead of the recorded ones.
    """

    results: Path
    published_only: bool = False
    told: laws.Outcomes | None = None
    _known: dict[str, Study | None] = field(default_factory=dict)

    def study(self, name: str) -> Study | None:
        """The best record of a study; None where there is none that is finished."""
        if name not in self._known:
            self._known[name] = next(filter(None, map(_published_or_local, self._folders(name))), None)
        return self._known[name]

    def page(self, name: str) -> Path | None:
        """The report of a study, or of a folder below `reference`."""
        study = self.study(name)
        folder = study.folder if study else self.reference / name
        return folder / "report.md" if (folder / "report.md").exists() else None

    @property
    def reference(self) -> Path:
        """Where published records lie."""
        return self.results / "reference"

    @cached_property
    def faults(self) -> Rows:
        """The planted faults, with how many of their cases were named first."""
        return _rows(self.reference / "diagnostics" / "faults.csv")

    @cached_property
    def laws(self) -> laws.Outcomes:
        """What became of the tests: the last run here, else the published record."""
        if self.told is not None:
            return self.told
        return laws.published(self.results) | ({} if self.published_only else laws.recorded(self.results))

    def _folders(self, name: str) -> list[Path]:
        places = [self.reference] if self.published_only else [self.results, self.reference]
        return [place / folder for folder in (f"{name}-tuned", name) for place in places]


def _published_or_local(folder: Path) -> Study | None:
    """The study in a folder if it is finished and no smoke test."""
    facts = next((folder / name for name in ("study.json", "provenance.json") if (folder / name).exists()), None)
    if facts is None or not all((folder / f"{name}.csv").exists() for name in ("comparison", "runs")):
        return None
    try:
        document = json.loads(facts.read_text())
    except ValueError as error:
        raise UserError(f"{facts} is corrupt ({error}); write the report again") from error
    study = Study(folder.name.removesuffix("-tuned"), folder, document, folder.name.endswith("-tuned"))
    done = not any(run["status"] in PENDING for run in study.runs)
    return study if done and document.get("budget") != SMOKE and not document.get("pilot", False) else None


def read(evidence: Evidence, records: Records) -> list[Found]:
    """What there is for a piece of evidence, one for each task where it asks for several."""
    if isinstance(evidence, Compared | Contrasted | Scored | Learned):
        return _of_study(evidence, records)
    if isinstance(evidence, Tabled):
        return [_tabled(evidence, records)]
    if isinstance(evidence, Diagnosed):
        return [_diagnosed(evidence, records)]
    if isinstance(evidence, Law):
        return [_law(evidence, records)]
    return [Found(source={"kind": "nothing"})]


def _of_study(evidence: OfStudy, records: Records) -> list[Found]:
    study = records.study(evidence.study)
    if study is None:
        unrun, tasks = _unrun(evidence.study), evidence.tasks or ("",)
        return [replace(unrun, where=task, key=_key(evidence, task)) for task in tasks]
    readers: dict[type, Callable[[Any, Study, str], Found]] = {
        Compared: _compared,
        Contrasted: _contrasted,
        Scored: _scored,
        Learned: _learned,
    }
    tasks = evidence.tasks or tuple(study.facts["tasks"])
    found = [readers[type(evidence)](evidence, study, task) for task in tasks]
    looks = number_of_looks(study.facts)  # each had its share of the error rate
    found = [each if each.p is None else replace(each, p=min(1.0, looks * each.p)) for each in found]
    return found if len(study.facts["tasks"]) > 1 else [replace(each, where="") for each in found]


def _key(evidence: OfStudy, task: str) -> tuple[str, ...]:
    """What names the test in the family; empty of what is no test."""
    if isinstance(evidence, Compared):
        return evidence.study, evidence.variant, task
    if isinstance(evidence, Contrasted):
        names = "+".join(evidence.plus), "+".join(evidence.minus), "+".join(name for name, _ in evidence.measure)
        return evidence.study, *names, task
    return ()


def _compared(evidence: Compared, study: Study, task: str) -> Found:
    key = _key(evidence, task)
    row = _row(study.compared, evidence.variant, task)
    if row is None:
        return _absent(study, evidence.variant, task, key)
    reference = row.get("reference") or str(study.facts["baseline"])
    return Found(
        where=task,
        effect=_number(row["difference"]),
        low=_number(row["low"]),
        high=_number(row["high"]),
        unit=f"against {reference}, {_scored_as(study)}",
        p=_number(row["p"]),
        key=key,
        verdict=row["verdict"],
        seeds=int(row["n_pairs"]),
        seeds_needed=int(row["seeds_needed"]) if row["verdict"] == "undecided" else None,
        source={**study.source(evidence.variant, reference, task=task), "reference": reference},
    )


def _contrasted(evidence: Contrasted, study: Study, task: str) -> Found:
    arms = {"plus": evidence.plus, "minus": evidence.minus}
    sums = {arm: _sums(study, variants, task, evidence.measure) for arm, variants in arms.items()}
    if not all(sums.values()):
        return _absent(study, " or ".join({*evidence.plus, *evidence.minus}), task, _key(evidence, task))
    scores = pd.DataFrame(
        [(arm, seed, score) for arm, mine in sums.items() for seed, score in mine.items()],
        columns=["variant", "seed", "score"],
    )
    (row,) = compare(scores, "minus", evidence.margin).to_dict("records")
    return Found(
        where=task,
        effect=_finite(row["difference"]),
        low=_finite(row["low"]),
        high=_finite(row["high"]),
        unit="a difference in " + " + ".join(name for name, _ in evidence.measure),
        p=row["p"],
        key=_key(evidence, task),
        verdict=str(row["verdict"]),
        seeds=int(row["n_pairs"]),
        seeds_needed=int(row["seeds_needed"]) if row["verdict"] == "undecided" else None,
        source=study.source(*evidence.plus, *evidence.minus, task=task),
    )


def _sums(study: Study, variants: Iterable[str], task: str, measure: Iterable[tuple[str, float]]) -> dict[int, float]:
    """By seed, the measure summed over variants; seeds that one of them lacks are left out."""
    found = []
    for variant in variants:
        runs = [run for run in study.runs if (run["variant"], run["task"]) == (variant, task)]
        values = {int(run["seed"]): [_number(run.get(column, "")) for column, _ in measure] for run in runs}
        weights = [weight for _, weight in measure]
        found.append(
            {
                seed: sum(weight * part for weight, part in zip(weights, parts, strict=True) if part is not None)
                for seed, parts in values.items()
                if None not in parts
            }
        )
    shared = set.intersection(*map(set, found)) if found else set()
    return {seed: sum(each[seed] for each in found) for seed in sorted(shared)}


def _scored(evidence: Scored, study: Study, task: str) -> Found:
    values = _sums(study, (evidence.variant,), task, ((evidence.column, 1.0),))
    if len(values) < FEWEST:
        return _absent(study, evidence.variant, task, ())
    mean, low, high = map(_finite, summary_interval(list(values.values())))
    source = study.source(evidence.variant, task=task)
    return Found(where=task, effect=mean, low=low, high=high, unit=evidence.column, seeds=len(values), source=source)


def _learned(evidence: Learned, study: Study, task: str) -> Found:
    row = _row(study.gates, evidence.variant, task)
    if row is None or not float(row["gate_of"]):
        return _absent(study, evidence.variant, task, ())
    passed, of = int(float(row["gate_passed"])), int(float(row["gate_of"]))
    low, high = clopper_pearson(passed, of)
    return Found(
        where=task,
        effect=passed / of,
        low=low,
        high=high,
        unit="of its runs learned",
        seeds=of,
        source=study.source(evidence.variant, task=task),
    )


def _tabled(evidence: Tabled, records: Records) -> Found:
    page, study = records.page(evidence.folder), records.study(evidence.folder)
    source: dict[str, Any] = {"kind": "report", "file": page.as_posix() if page else "", "row": evidence.row}
    if study is not None:
        source |= {"study": study.folder.name, "tuned": study.tuned}
    if page is None and (ROOT / "ablations" / f"{evidence.folder.replace('-', '_')}.py").exists():
        return _unrun(evidence.folder)
    if page is None:
        return Found(missing=f"the report {evidence.folder}", source=source)
    text = page.read_text()
    cells = [cell(text, row, evidence.column, evidence.on) for row in (evidence.row, evidence.over) if row]
    numbers = [number(each) for each in cells if each is not None]
    known = [each for each in numbers if each is not None]
    if len(known) < len(cells):
        return Found(missing=f"{evidence.column} of {evidence.row} in {page}", source=source)
    if evidence.over:
        ratio = known[0][0] / known[1][0] if known[1][0] else None
        return Found(effect=ratio, unit=f"{evidence.column}, a ratio to {evidence.over}", source=source)
    effect, low, high = known[0]
    return Found(effect=effect, low=low, high=high, unit=evidence.column, source=source)


def _diagnosed(evidence: Diagnosed, records: Records) -> Found:
    rows = [row for row in records.faults if _fault(row) in evidence.faults]
    source = {
        "kind": "faults",
        "faults": list(evidence.faults),
        "folder": (records.reference / "diagnostics").as_posix(),
    }
    if {_fault(row) for row in rows} != set(evidence.faults):
        return Found(missing="the faults: `make faults`", source=source)
    cases = sum(int(row["cases"]) for row in rows)
    named = sum(round(float(row["recall"]) * int(row["cases"])) for row in rows)
    low, high = clopper_pearson(named, cases)
    return Found(effect=named / cases, low=low, high=high, unit=f"of {cases} cases named", source=source)


def _fault(row: Mapping[str, str]) -> str:
    """A fault's name; structural ones are numbered."""
    number, _, name = row["fault"].partition(" ")
    return name if number.isdecimal() else row["fault"]


def _law(evidence: Law, records: Records) -> Found:
    known = {test: records.laws.get(test, {}) for test in evidence.tests}
    source = {
        "kind": "tests",
        "tests": [{"test": test, **({"outcome": "not run"} | dict(found))} for test, found in known.items()],
    }
    if absent := [test for test in evidence.tests if not laws.there(test)]:
        return Found(outcome="missing", missing=f"the test {absent[0]}", source=source)
    if failed := [test for test, found in known.items() if found.get("outcome", "passed") != "passed"]:
        return Found(outcome="failed", missing=f"{failed[0]} to pass", source=source)
    if not all(known.values()):
        return Found(missing="its tests to be run: `harness claims --run`", source=source)
    return Found(outcome="passed", source=source)


def _unrun(study: str) -> Found:
    """Of a study that is not there; without a folder in its source, which says that it can be run."""
    return Found(missing=f"the study: `harness ablate {study}`", source={"kind": "study", "study": study})


def _absent(study: Study, variant: str, task: str, key: tuple[str, ...]) -> Found:
    where = f" on {task}" if task else ""
    return Found(where=task, key=key, missing=f"{variant}{where} in {study.folder}", source=study.source(task=task))


def _row(rows: Rows, variant: str, task: str) -> Mapping[str, str] | None:
    return next((row for row in rows if (row["variant"], row["task"]) == (variant, task)), None)


def _rows(path: Path) -> Rows:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> float | None:
    return _finite(float(text)) if text else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _scored_as(study: Study) -> str:
    return str(study.facts.get("scored") or study.facts.get("score", "score")).replace("_", " ")
