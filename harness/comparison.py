"""What differs between runs, or between studies: data in, data out, from the files of runs and studies alone.

`find` turns names into folders, `of_runs` and `of_studies` make a document of what they hold (that of `--json`), and
`tables` puts a document into words. Runs and studies are called A, B, … in the order in which they were named.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase as KEYS
from typing import TYPE_CHECKING, Any, Literal

from harness.locate import study_name
from harness.record import RunRecord, Score, read_curves, read_plan
from harness.results import StudyData, existing, run_folders, run_id
from harness.schema import UserError, flatten, nearest, quoted
from harness.stats import clopper_pearson
from harness.wording import ABSENT, STATUSES, decimal, interval, listed, metric_name, ranges, unequal, with_interval
from harness.wording import seconds as duration

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["run", "study"]
Document = dict[str, Any]

LOSS = "train/loss"
BLOCKS = " ▁▂▃▄▅▆▇█"
LOST = "×"  # stands in a curve where the loss was not finite
HEIGHT = 3  # lines of a curve: 24 levels
LEAST, MOST = 10, 72  # columns of a curve
BESIDE_CURVE = 44  # columns of the numbers beside it
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
WORDS = ("attention_backend", "device", "precision", "diagnostics")  # of a ledger: shown where runs differ in them


@dataclass(frozen=True)
class Table:
    """A title, and below it rows under names of columns (`progress.table`); without rows the title says it all."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


# Names


def find(names: Sequence[str], results: Path) -> tuple[Kind, list[Path]]:
    """The folders of what is to be compared, in its order, and what it is.

    Raises:
        UserError: fewer than two names or too many, one that means nothing or several things, the same thing twice, or
            runs and studies together.
    """
    if not 2 <= len(names) <= len(KEYS):
        raise UserError(f"a comparison takes 2 to {len(KEYS)} names, not {len(names)}; name runs, or studies")
    found = [_meant(name, results) for name in names]
    kinds = {kind: name for name, (kind, _) in zip(names, found, strict=True)}
    if len(kinds) > 1:
        raise UserError(
            f"{kinds['run']!r} is a run and {kinds['study']!r} a study; compare runs with runs, or studies with studies"
        )
    seen: dict[Path, str] = {}
    for name, (kind, folder) in zip(names, found, strict=True):
        if folder.resolve() in seen:
            raise UserError(f"{seen[folder.resolve()]!r} and {name!r} are the same {kind}; name two different ones")
        seen[folder.resolve()] = name
    return found[0][0], [folder for _, folder in found]


def _meant(name: str, results: Path) -> tuple[Kind, Path]:
    """The one run or study that a name means."""
    candidates: list[tuple[Kind, Path]] = [("study", folder) for folder in _study_folders(name, results)]
    candidates += [("run", folder) for folder in run_folders(name, results)]
    found = {folder.resolve(): (kind, folder) for kind, folder in candidates}
    if not found:
        raise UserError(_unknown(name, results))
    if len(found) > 1:
        each = listed([f"the {kind} {folder}" for kind, folder in found.values()])
        raise UserError(f"{name!r} means {each}; name the folder of one, with a slash in it")
    return next(iter(found.values()))


def _study_folders(name: str, results: Path) -> list[Path]:
    """A study's folder or its `study.json`, or the name of one in the results folder, as other commands take it."""
    given = existing(name)
    folders = [given.parent if given.name == "study.json" else given] if given is not None else []
    if "/" not in name or name.endswith((".py", ".json")):
        folders.append(results / study_name(name))
    return [folder for folder in folders if existing(str(folder / "study.json"))]


def _unknown(name: str, results: Path) -> str:
    given = existing(name)
    if given is not None and (given / "provenance.json").exists():
        study = given.resolve().name
        return f"{given}: a published report holds no records; run `harness ablate {study}` and compare {study!r}"
    known = [path.parent.name for path in sorted(results.glob("*/study.json"))]
    place = f"{given}: this is" if given is not None else f"{name!r} is"
    remedy = f"{nearest(study_name(name), known)} (studies)" if known else f"there is no study in {results}"
    return (
        f"{place} neither a run nor a study; name a run's fingerprint, MLflow run id or folder (a study's runs.csv has "
        f"them), or a study: {remedy}"
    )


# Runs


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it; `planned` is its row of the study's plan, empty outside of studies."""

    folder: Path
    spec: Document
    record: RunRecord | None
    curves: list[dict[str, float]]
    planned: Document

    @property
    def status(self) -> str:
        """The record's, or *partial*, *missing*."""
        return self.record.status if self.record else "partial" if self.curves else "missing"


def read_run(folder: Path) -> Run:
    """The run in a folder, finished or not.

    Raises:
        UserError: its record or, without one, its spec is corrupt.
    """
    planned = _planned(folder)
    path, record = folder / "record.json", None
    if path.exists():
        record = RunRecord.of_run(folder) if planned else RunRecord.read(path)
    spec = record.spec if record else _read_spec(folder / "spec.json")
    return Run(folder, spec, record, read_curves(folder / "curves.jsonl"), planned)


def _planned(folder: Path) -> Document:
    """What a run's study calls it; a plan that cannot be read says nothing, the run is compared all the same."""
    place = folder.resolve()
    plan: Document = {"runs": []}
    with suppress(OSError, UserError):
        plan = read_plan(place.parents[1]) if place.parent.name == "runs" else plan
    rows = [{"study": plan["study"], **row} for row in plan["runs"] if row["fingerprint"] == place.name]
    return rows[0] if rows else {}


def _read_spec(path: Path) -> Document:
    try:
        spec = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: this is not a spec ({error}); run its study again, which writes it anew") from error
    if not isinstance(spec, dict):
        raise UserError(f"{path}: a spec is a JSON object; run its study again, which writes it anew")
    return spec


def of_runs(runs: Sequence[Run]) -> Document:
    """What differs between runs and what came of each: the spec's fields and the environment's where they differ, final
    metrics, ledger, exact match by length, loss curve, diagnosis.
    """
    keyed = dict(zip(KEYS, runs, strict=False))
    flat = {key: flatten(run.spec) for key, run in keyed.items()}
    worlds = {key: run.record.environment if run.record else {} for key, run in keyed.items()}
    return {
        "kind": "runs",
        "runs": [{"key": key, **_run(run)} for key, run in keyed.items()],
        "spec_fields": len(dict.fromkeys(field for fields in flat.values() for field in fields)),
        "spec": differing(flat),
        "environment": differing({key: world for key, world in worlds.items() if world}),
    }


def differing(fields: Mapping[str, Mapping[str, Any]]) -> list[Document]:
    """The fields in which flat documents differ, `{"field": …, "values": {"A": …}}`; where a document lacks the field,
    its key is missing.
    """
    names = dict.fromkeys(name for own in fields.values() for name in own)
    rows: list[Document] = [
        {"field": name, "values": {key: own[name] for key, own in fields.items() if name in own}} for name in names
    ]
    return [row for row in rows if len(row["values"]) < len(fields) or _distinct(row["values"].values()) > 1]


def _distinct(values: Iterable[Any]) -> int:
    return len({json.dumps(value, sort_keys=True) for value in values})


def _run(run: Run) -> Document:
    record = run.record
    return {
        "folder": str(run.folder),
        "fingerprint": record.fingerprint if record else run.folder.resolve().name,
        "mlflow_run_id": run_id(run.folder),
        **{name: run.planned.get(name) for name in ("study", "variant", "task", "seed")},
        "status": run.status,
        "cause": record.cause if record else "",
        "final": record.final if record else {},
        "ledger": record.ledger if record else {},
        "exact_match": list(exact_match(record)) if record else [],
        "loss": loss_curve(run.curves),
        "examined": bool(record and record.was_examined),
        "diagnosis": record.diagnosis if record else "",
        "findings": [found.model_dump() for found in record.findings] if record else [],
    }


def exact_match(record: RunRecord) -> Iterator[Document]:
    """Exact match at each length, with its 95 % Clopper–Pearson interval over the evaluated sequences.

    `low` and `high` are None where nothing was measured (*unsupported*, *diverged*) or where the number of sequences is
    not known: evaluation leaves out what stands among finite training samples, and no record says how much.
    """
    flat = flatten(record.spec)
    samples, finite = flat.get("train.eval_samples"), flat.get("train.sampling") == "Finite"
    ends = flat.get("task.lengths.train")
    first, last = ends if isinstance(ends, list) and len(ends) == 2 else (math.inf, -math.inf)
    for score in record.scores:
        if score.metric != "exact_match":
            continue
        trained = first <= score.length <= last
        complete = isinstance(samples, int) and not (finite and trained and score.mark != "seen")
        low, high = _limits(score, samples) if complete else (None, None)
        yield {
            "length": score.length, "split": "train" if trained else "test", "value": score.value, "low": low,
            "high": high, "samples": samples if complete else None, "mark": score.mark,
        }  # fmt: skip


def _limits(score: Score, samples: Any) -> tuple[float | None, float | None]:
    failed = round((1 - score.value) * samples)
    if score.mark in ("unsupported", "diverged") or abs((1 - score.value) * samples - failed) > 1e-6 * samples:
        return None, None
    low, high = clopper_pearson(failed, samples)
    return 1 - high, 1 - low


def loss_curve(lines: Iterable[Mapping[str, float]]) -> Document | None:
    """The loss at each step that reports one, with its first, last and smallest value; None without any."""
    points = sorted((int(line["step"]), float(line[LOSS])) for line in lines if LOSS in line)
    if not points:
        return None
    finite = [(value, step) for step, value in points if math.isfinite(value)]
    lowest, where = min(finite, default=(math.nan, None))
    return {
        "steps": [step for step, _ in points], "values": [value for _, value in points], "first": points[0][1],
        "last": points[-1][1], "minimum": lowest, "minimum_step": where,
    }  # fmt: skip


# Studies


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
            _distinct([plan["score"], *(plan[f"{of}_lengths"].get(task) for of in ("train", "test"))] for plan in own)
            > 1
        ):
            yield f"on {task} the studies score different things (score or lengths differ): its means do not compare"
    if pilots := [key for key, plan in plans.items() if plan.get("pilot")]:
        yield f"{listed(pilots)} {'is a pilot' if len(pilots) == 1 else 'are pilots'}, which gets no verdict"


# In words


def tables(document: Document, width: int) -> Iterator[Table]:
    """A document of `of_runs` or `of_studies` as tables for a terminal that is so many columns wide."""
    yield from _run_tables(document, width) if document["kind"] == "runs" else _study_tables(document)


def _run_tables(document: Document, width: int) -> Iterator[Table]:
    runs = {run["key"]: run for run in document["runs"]}
    columns = ["field…", *(f"{key}…" for key in runs)]
    yield Table("", ["", "run", "study…", "variant…", "task…", ">seed", "status…"], list(map(_identity, runs.values())))
    differ = len(document["spec"])
    total = document["spec_fields"]
    said = (
        f"{differ} of {total} fields of the spec differ" if differ else f"all {total} fields of the spec are the same"
    )
    yield Table(said, columns, _field_rows(document["spec"], list(runs)))
    if document["environment"]:
        yield Table("code and machine differ", columns, _field_rows(document["environment"], list(runs)))
    if rows := list(_outcome_rows(runs)):
        yield Table("final metrics and costs", columns, rows)
    if rows := list(_length_rows(runs)):
        title = "exact match, with its 95 % interval (Clopper–Pearson) over the sequences of a length"
        yield Table(title, [">length", *columns[1:]], rows)
    yield from _loss_table(runs, width)
    yield Table("diagnosis", ["", "alarm", "symptom…"], [row for run in runs.values() for row in _diagnosis(run)])


def _identity(run: Document) -> list[str]:
    said = STATUSES[run["status"]] + (f": {run['cause']}" if run["cause"] else "")
    names = [ABSENT if run[name] is None else str(run[name]) for name in ("study", "variant", "task", "seed")]
    return [run["key"], run["fingerprint"], *names, said]


def _field_rows(differences: Iterable[Document], keys: Sequence[str]) -> list[list[str]]:
    return [
        [row["field"], *(value(row["values"][key]) if key in row["values"] else ABSENT for key in keys)]
        for row in differences
    ]


def value(given: Any) -> str:
    """A field's value: JSON's, but shorter; *none* is a null, a dash a field that is not there."""
    if isinstance(given, str):
        return re.sub(r"\b([0-9a-f]{10})[0-9a-f]{30}\b", r"\1", given)  # commits
    if given is None or isinstance(given, bool):
        return {None: "none", True: "yes", False: "no"}[given]
    if (
        isinstance(given, list)
        and len(given) > 2
        and all(type(n) is int for n in given)
        and given == sorted(set(given))
    ):
        return ranges(given)
    return json.dumps(given, ensure_ascii=False)


def _outcome_rows(runs: Mapping[str, Document]) -> Iterator[list[str]]:
    for name in dict.fromkeys(name for run in runs.values() for name in run["final"]):
        values = [run["final"].get(name) for run in runs.values()]
        if any(each is not None and not math.isnan(each) for each in values):
            yield [name, *map(number, values)]
    ledgers = [run["ledger"] for run in runs.values()]
    for name, said in (("parameters", number), ("flops", _power), ("tokens", number), ("wall_seconds", duration)):
        if any(name in ledger for ledger in ledgers):
            yield [name, *(_cost(ledger.get(name), ledgers[0].get(name), said) for ledger in ledgers)]
    for name in WORDS:
        words = [str(ledger.get(name, ABSENT)) for ledger in ledgers]
        if len({*words} - {ABSENT}) > 1:
            yield [name, *words]


def _cost(own: Any, first: Any, said: Any) -> str:
    """A cost, and how far it is from the first run's where that is much."""
    return said(own) + (f" ({mark})" if (mark := unequal(own, first)) else "")


def _power(given: float | None) -> str:
    return ABSENT if given is None else f"{given:.2e}"


def number(given: float | None) -> str:
    """A number with four significant digits, a whole one with all of its digits; a dash where there is none."""
    if given is None or math.isnan(given):
        return ABSENT
    if math.isinf(given):
        return decimal(given)
    return f"{given:,.0f}" if given == round(given) else f"{given:.4g}".replace("-", "−")


def _length_rows(runs: Mapping[str, Document]) -> Iterator[list[str]]:
    scores = {key: {score["length"]: score for score in run["exact_match"]} for key, run in runs.items()}
    for length in sorted({length for own in scores.values() for length in own}):
        yield [str(length), *(_score(own.get(length)) for own in scores.values())]


def _score(score: Document | None) -> str:
    if score is None:
        return ABSENT
    limits = "" if score["low"] is None else interval(score["low"], score["high"], signed=False)
    return " ".join(filter(None, (decimal(score["value"]), limits, score["mark"])))


def _diagnosis(run: Document) -> list[list[str]]:
    alarms = [[run["key"], found["probe"], found["symptom"]] for found in run["findings"] if found["alarm"]]
    if alarms:
        return alarms
    said = "nothing alarms" if run["examined"] else "not examined"
    return [[run["key"], ABSENT, said if run["status"] not in ("partial", "missing") else STATUSES[run["status"]]]]


def _loss_table(runs: Mapping[str, Document], width: int) -> Iterator[Table]:
    """Loss curves on one scale, logarithmic unless a loss is 0 or below, and over the same steps."""
    curves = {key: run["loss"] for key, run in runs.items() if run["loss"]}
    finite = [each for curve in curves.values() for each in curve["values"] if math.isfinite(each)]
    if not curves:
        return
    last = max(curve["steps"][-1] for curve in curves.values())
    scale = Scale(min(finite, default=0.0), max(finite, default=0.0))
    room = max(LEAST, min(MOST, width - BESIDE_CURVE))
    rows = []
    for key, curve in curves.items():
        drawn = drawing(binned(curve["steps"], curve["values"], last, room), scale)
        lowest = ABSENT if curve["minimum_step"] is None else f"{number(curve['minimum'])} at {curve['minimum_step']:,}"
        rows.append([key, "\n".join(drawn), number(curve["first"]), number(curve["last"]), lowest])
    kind = "logarithmic" if scale.logarithmic else "linear"
    title = f"{LOSS} over {last:,} steps, {kind} from {number(scale.low)} to {number(scale.high)}"
    lost = f" ({LOST}: not finite)" if any(LOST in row[1] for row in rows) else ""
    yield Table(title + lost, ["", "curve", ">first", ">last", ">smallest"], rows)


@dataclass(frozen=True)
class Scale:
    """Where a value stands between a low and a high one."""

    low: float
    high: float

    @property
    def logarithmic(self) -> bool:
        """Whether it is by ratios."""
        return self.low > 0

    def level(self, given: float, levels: int) -> int:
        """1 (the lowest value) to `levels` (the highest)."""
        low, high, own = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, given))
        return 1 if high <= low else 1 + round((levels - 1) * (own - low) / (high - low))


def binned(steps: Sequence[int], values: Sequence[float], last: int, width: int) -> list[float | None]:
    """A curve in so many columns, from step 0 to `last`: the mean of a column's values, NaN where one is not finite;
    between points the value before; None before the first point and after the last.
    """
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, each in zip(steps, values, strict=True):
        columns[min(width - 1, step * width // max(last, 1))].append(each if math.isfinite(each) else math.nan)
    means = [sum(column) / len(column) if column else None for column in columns]
    ends = [i for i, mean in enumerate(means) if mean is not None]
    for i in range(ends[0], ends[-1]) if ends else ():
        means[i] = means[i - 1] if means[i] is None else means[i]
    return means


def drawing(columns: Sequence[float | None], scale: Scale, height: int = HEIGHT) -> list[str]:
    """Columns as lines of block characters, the uppermost first."""
    levels = [
        None if each is None else 0 if math.isnan(each) else scale.level(each, 8 * height) for each in columns
    ]  # 0 is no level
    lines = []
    for row in reversed(range(height)):
        marks = (" " if n is None else (LOST if row == 0 else " ") if n == 0 else _block(n - 8 * row) for n in levels)
        lines.append("".join(marks))
    return lines


def _block(eighths: int) -> str:
    return BLOCKS[max(0, min(8, eighths))]


def _study_tables(document: Document) -> Iterator[Table]:
    studies = {study["key"]: study for study in document["studies"]}
    yield Table(
        "", ["", "study…", "budget", ">finished", ">seeds", "score…", "folder…"], list(map(_named, studies.values()))
    )
    same = "" if document["plan"] else "the plans are the same"
    yield Table(same or "the plans differ", *_plan_columns(document, list(studies)))
    if document["scores"]:
        title = "mean score and difference to the baseline, with their 95 % intervals over seeds; verdict"
        columns = ["task…", "variant…", "", "score", "difference…", "verdict…", ">learned"]
        yield Table(title, columns, list(_verdict_rows(document["scores"], studies)))
    else:
        yield Table("the studies have no variant and task in common")
    for key, only in document["only"].items():
        if parts := [f"{part} {', '.join(map(quoted, names))}" for part, names in only.items() if names]:
            yield Table(f"only in {key}: {'; '.join(parts)}")
    for note in document["notes"]:
        yield Table(f"note: {note}")


def _plan_columns(document: Document, keys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    return ["field…", *(f"{key}…" for key in keys)], _field_rows(document["plan"], keys)


def _named(study: Document) -> list[str]:
    finished = f"{study['counts'].get('finished', 0)}/{study['runs']}"
    seeds = ranges(study["seeds"] or [])
    return [
        study["key"],
        study["study"],
        study["budget"],
        finished,
        seeds,
        metric_name(study["score"]),
        study["folder"],
    ]


def _verdict_rows(scores: Iterable[Document], studies: Mapping[str, Document]) -> Iterator[list[str]]:
    told: tuple[str, str] | None = None
    for row in scores:
        cell = (row["task"], row["variant"])
        names = ["", ""] if cell == told else list(cell)
        mean = _said(decimal(row["mean"]), interval(row["low"], row["high"], signed=False))
        far = row["compared"]
        gap = _said(*with_interval(far["difference"], far["low"], far["high"], bound=far["bound"])) if far else ""
        is_other = row["reference"] not in (None, studies[row["study"]]["baseline"])
        verdict = row["verdict"] + (f" (to {quoted(row['reference'])})" if is_other else "")
        yield [*names, row["study"], mean, gap, verdict, f"{row['learned']}/{row['ended']}"]
        told = cell


def _said(number: str, limits: str) -> str:
    """A number and its interval, one dash where there is neither."""
    return number if limits == ABSENT else f"{number} {limits}"
