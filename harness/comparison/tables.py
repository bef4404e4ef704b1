"""Documents of a comparison in words."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.comparison.curve import LOST, Scale, binned, drawing
from harness.comparison.differences import Document
from harness.comparison.runs import LOSS
from harness.schema import quoted
from harness.wording import ABSENT, STATUSES, decimal, interval, metric_name, ranges, unequal, with_interval
from harness.wording import seconds as duration

LEAST, MOST = 10, 72  # columns of a curve
BESIDE_CURVE = 44  # columns of the numbers beside it
WORDS = ("attention_backend", "device", "precision", "diagnostics")  # of a ledger: shown where runs differ in them


@dataclass(frozen=True)
class Table:
    """A title, and below it rows under names of columns (`progress.table`); without rows the title says it all."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


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
    costs = {
        "parameters": number, "active_parameters": number, "flops": _power, "inference_flops": _power,
        "tokens": number, "wall_seconds": duration, "cache_bytes": number,
    }  # fmt: skip
    for name, said in costs.items():
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
