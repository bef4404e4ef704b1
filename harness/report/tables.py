"""The report's tables as DataFrames, numbers unrounded: what the page shows and what goes out as CSV."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from harness.results import IN_DISTRIBUTION, LEARNING_TIME
from harness.schema import flatten
from harness.stats import summary_interval
from harness.wording import PENDING, excess, listed, percent, ranges, unequal

if TYPE_CHECKING:
    from harness.results import StudyData

CELL = ["variant", "task"]
RUN = ["variant", "task", "seed"]
SCORES = ["variant", "task", "seed", "length", "metric", "value"]
RUNS = ["study", *RUN, "status", "cause", "fingerprint", "mlflow_run_id"]
LABELS = {  # of every cost in the ledger
    "parameters": "parameters",
    "active_parameters": "active parameters",
    "flops": "training FLOPs",
    "inference_flops": "inference FLOPs",
    "tokens": "training tokens",
    "steps": "steps",
    "wall_seconds": "wall time",
    "peak_memory_bytes": "peak memory",
    "cache_bytes": "KV cache",
    "tuning_trials": "tuning budget",
}
LEDGER = tuple(LABELS)
# A verdict at other amounts of these says so. Time and memory are noisy and a cache is often the very point: the ledger
# marks them.
STATED = ("parameters", "active_parameters", "flops", "inference_flops", "tokens", "steps")
WORDS = ("attention_backend", "attention_reason", "device", "precision")


def variants_of(document: dict[str, Any]) -> list[str]:
    """The study's variants, the baseline first."""
    return [document["baseline"], *(name for name in document["variants"] if name != document["baseline"])]


def reference_of(document: dict[str, Any], variant: str) -> str:
    """What a variant is compared with."""
    return str(document.get("against", {}).get(variant, document["baseline"]))


def versus(document: dict[str, Any], variant: str) -> str:
    """A variant's name, and in brackets what it is compared with where that is not the baseline."""
    other = document.get("against", {}).get(variant)
    return f"{variant} [{other}]" if other else variant


def field_of(document: dict[str, Any], variant: str, path: str) -> Any:
    """A field of a variant's model or training by its dotted path; None where neither it nor the baseline has it."""
    base = flatten({"model": document["spec"]["model"], "train": document["spec"]["train"]})
    return document["differences"].get(variant, {}).get(path, base.get(path))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A table's rows as dictionaries."""
    return cast("list[dict[str, Any]]", frame.to_dict("records"))


def comparison(data: "StudyData") -> pd.DataFrame:
    """The study's comparison, with the column `reference` where it is not always the baseline."""
    compared, against = data.compare(), data.document.get("against")
    if not against:
        return compared
    return compared.assign(reference=[reference_of(data.document, name) for name in compared["variant"]])


def in_order(frame: pd.DataFrame, document: dict[str, Any], *rest: str) -> pd.DataFrame:
    """Rows in the study's order of tasks and variants, then of other columns; the same rows give the same file."""
    places = {
        "task": {name: i for i, name in enumerate(document["tasks"])},
        "variant": {name: i for i, name in enumerate(variants_of(document))},
    }

    def place(column: pd.Series) -> pd.Series:
        known = places.get(str(column.name))
        return column.map(known).fillna(len(known)) if known is not None else column

    return frame.sort_values(["task", "variant", *rest], key=place, kind="stable", ignore_index=True)


def runs_table(data: "StudyData") -> pd.DataFrame:
    """runs.csv: identity and outcome first, then final metrics and ledger."""
    rest = [column for column in data.runs.columns if column not in RUNS]
    return in_order(data.runs.reindex(columns=[*RUNS, *rest]), data.document, "seed")


def scores_table(data: "StudyData") -> pd.DataFrame:
    """scores.csv: DESIGN.md's columns, then `mark` and `split`: without them an unsupported length's 0 misleads."""
    rest = [column for column in ("mark", "split") if column in data.scores.columns]
    scores = data.scores.reindex(columns=[*SCORES, *rest])
    return in_order(scores, data.document, "seed", "metric", "length")


def verdicts(data: "StudyData", compared: pd.DataFrame) -> pd.DataFrame:
    """A row a task and variant, the baseline's first: means, difference, verdict, gate, what the verdict leaves open.

    `score` and `baseline_score` (that of `reference`) are means over the pairs, so that `difference` is their
    difference; the baseline's own row is over all its seeds. `bound` is that of `bounds`. Ties (`failure_bound`,
    `note`) stand beside *undecided* alone: a pair ties within half a margin of an end of the scale, and a difference
    smaller than that may be significant all the same. `unequal` names the costs (`STATED`) that the verdict stands at.
    """
    document = data.document
    scores = data.primary().merge(gate_passed(data), on=RUN, how="left")
    notes, limits, costs = _ceiling_notes(data), bounds(data), unequal_costs(ledger(data), document)
    rows = []
    for task in document["tasks"]:
        for variant in variants_of(document):
            own = scores[(scores["task"] == task) & (scores["variant"] == variant)]
            row = {"task": task, "variant": variant, **_gate(own)}
            if variant == document["baseline"]:
                rows.append(row | {"score": own["score"].mean(), "seeds": int(own["score"].notna().sum())})
                continue
            row["reference"] = reference_of(document, variant)
            theirs = scores[(scores["task"] == task) & (scores["variant"] == row["reference"])]
            both = own.set_index("seed")["score"].to_frame().assign(theirs=theirs.set_index("seed")["score"]).dropna()
            row |= {"score": both["score"].mean(), "baseline_score": both["theirs"].mean(), "seeds": len(both)}
            row |= {"bound": limits.get((variant, task), "")} | _compared(compared, variant, task)
            row["unequal"] = _marked({name: percent(share) for name, share in costs.get((variant, task), {}).items()})
            rows.append(row | (notes.get((variant, task), {}) if row["verdict"] == "undecided" else {}))
    columns = [
        "task", "variant", "reference", "seeds", "score", "baseline_score", "bound", "difference", "low", "high", "p",
        "p_holm", "effect_size", "verdict", "seeds_needed", "gate_passed", "gate_of", "gated_score", "failure_bound",
        "note", "unequal",
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def _compared(compared: pd.DataFrame, variant: str, task: str) -> dict[str, Any]:
    rows = compared[(compared["variant"] == variant) & (compared["task"] == task)]
    if rows.empty:
        return {"verdict": "undecided"}
    return records(rows.drop(columns=["variant", "task", "n_pairs", "reference"], errors="ignore"))[0]


def gate_passed(data: "StudyData") -> pd.DataFrame:
    """Which runs with an outcome learned their task in distribution; a run without the metric did not."""
    ended = data.runs[~data.runs["status"].isin(PENDING)]
    metric = ended.get(IN_DISTRIBUTION, pd.Series(math.nan, index=ended.index)).astype("float64")
    return ended[RUN].assign(passed=(metric >= data.document["gate"]).astype("float64"))


def _gate(own: pd.DataFrame) -> dict[str, Any]:
    passed = own[own["passed"] == 1]
    return {
        "gate_passed": len(passed),
        "gate_of": int(own["passed"].notna().sum()),
        "gated_score": passed["score"].mean(),
    }


def _ceiling_notes(data: "StudyData") -> dict[tuple[str, str], dict[str, Any]]:
    found = data.ceilings()
    return {
        (row["variant"], row["task"]): {"failure_bound": row["failure_bound"], "note": row["sentence"]}
        for row in records(found)
    }


def seed_differences(data: "StudyData") -> pd.DataFrame:
    """`variant, task, seed, difference` to what each variant is compared with, a row a pair."""
    paired = _pairs(data.primary(), data.document)
    return paired.assign(difference=paired["score"] - paired["score_theirs"])[[*RUN, "difference"]]


def _pairs(scores: pd.DataFrame, document: dict[str, Any]) -> pd.DataFrame:
    """Scores beside those of what each variant is compared with, whose columns end in `_theirs`: a row a pair."""
    own = scores[scores["variant"] != document["baseline"]]
    own = own.assign(reference=[reference_of(document, str(name)) for name in own["variant"]])
    theirs = scores.rename(columns={"variant": "reference"})
    both = own.merge(theirs, on=["reference", "task", "seed"], suffixes=("", "_theirs"))
    return both.dropna(subset=["score", "score_theirs"])


def bounds(data: "StudyData") -> dict[tuple[str, str], str]:
    """Of (variant, task): `≥` where the difference is at least what it says, `≤` where at most, `≈` where neither.

    Learning time alone has such: a run that never learned counts as 1, the end of its training, and how much longer it
    would have taken is not known. `≈`: both arms have such runs.
    """
    if data.document["score"] != LEARNING_TIME:
        return {}
    scores = data.primary().merge(gate_passed(data), on=RUN, how="left")
    pairs = _pairs(scores.assign(never=scores["passed"] != 1), data.document)
    signs = {(True, False): "≥", (False, True): "≤", (True, True): "≈"}
    found = {}
    for (variant, task), group in pairs.groupby(CELL, sort=False):
        arms = bool(group["never"].any()), bool(group["never_theirs"].any())
        if arms in signs:
            found[str(variant), str(task)] = signs[arms]
    return found


def score_summaries(data: "StudyData") -> pd.DataFrame:
    """Of the primary scores; see `summaries`."""
    return summaries(data.primary(), "score")


def summaries(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """`variant, task, mean, low, high` of a column: each arm by itself, with its 95 % t interval."""
    rows = [
        dict(zip(("variant", "task", "mean", "low", "high"), (*names, *summary_interval(group)), strict=True))
        for names, group in frame.groupby(CELL, sort=False)[column]
    ]
    return pd.DataFrame(rows, columns=["variant", "task", "mean", "low", "high"])


def by_length(data: "StudyData") -> pd.DataFrame:
    """The study's metric by length: `task, variant, length, mean, worst, best, seeds, mark, split`.

    `mark` is what applies to every seed of the cell, or to some: `unsupported`, `seen`, `diverged (2 of 8)`.
    """
    scores = data.scores[data.scores["metric"] == data.metric]
    rows = []
    for (task, variant, length), cell in scores.groupby(["task", "variant", "length"], sort=False):
        values = cell["value"].astype("float64")
        rows.append(
            {
                "task": task,
                "variant": variant,
                "length": int(str(length)),
                "mean": values.mean(),
                "worst": values.min(),
                "best": values.max(),
                "seeds": int(values.notna().sum()),
                "mark": _marks(cell["mark"]),
                "split": cell["split"].iloc[0],
            }
        )
    columns = ["task", "variant", "length", "mean", "worst", "best", "seeds", "mark", "split"]
    return in_order(pd.DataFrame(rows, columns=columns), data.document, "length")


def _marks(marks: pd.Series) -> str:
    counts = marks[marks != ""].astype(str).value_counts()
    return ", ".join(str(m) if n == len(marks) else f"{m} ({n} of {len(marks)})" for m, n in counts.items())


def threshold_column(data: "StudyData") -> str | None:
    """The column of final metrics that holds the steps to threshold, if any run has it."""
    columns = [c for c in data.runs.columns if str(c).split("/")[-1] == "steps_to_threshold"]
    return next((c for c in columns if data.runs[c].notna().any()), None)


def learning_speed(data: "StudyData") -> pd.DataFrame:
    """Steps to threshold: `task, variant, reached, runs, median, fastest, slowest`, over the runs that reached it."""
    column = threshold_column(data)
    if column is None:
        return pd.DataFrame(columns=["task", "variant", "reached", "runs", "median", "fastest", "slowest"])
    ended = data.runs[~data.runs["status"].isin(PENDING)]
    groups = ended.assign(steps_needed=ended[column].astype("float64")).groupby(["task", "variant"], sort=False)
    table = groups["steps_needed"].agg(reached="count", runs="size", median="median", fastest="min", slowest="max")
    return in_order(table.reset_index(), data.document)


def ledger(data: "StudyData") -> pd.DataFrame:
    """What each cell cost, medians over finished runs; `unequal` is what is over 5 % off what it is compared with."""
    runs = data.runs[data.runs["status"] == "finished"]
    rows = []
    for task in data.document["tasks"]:
        costs: dict[str, dict[str, Any]] = {}
        for variant in variants_of(data.document):
            own = runs[(runs["task"] == task) & (runs["variant"] == variant)]
            costs[variant] = {"runs": len(own), **{name: _middle(own, name) for name in LEDGER}}
            costs[variant] |= {name: _distinct(own, name) for name in WORDS}
        for variant, row in costs.items():
            changes = deviations(row, costs[reference_of(data.document, variant)])
            rows.append({"task": task, "variant": variant, **row, "unequal": _marked(changes)})
    return pd.DataFrame(rows, columns=["task", "variant", "runs", *LEDGER, *WORDS, "unequal"])


def deviations(row: dict[str, Any], base: dict[str, Any]) -> dict[str, str]:
    """The costs that are far from the baseline's, as `+12 %`."""
    marks = {name: unequal(row[name], base[name]) for name in LEDGER}
    return {name: mark for name, mark in marks.items() if mark}


def _marked(changes: dict[str, str]) -> str:
    return "; ".join(f"{name} {change}" for name, change in changes.items())


def unequal_costs(ledger: pd.DataFrame, document: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Of (variant, task): by which shares its costs exceed those of what it is compared with, for costs that are
    `STATED` and unequal; only cells that have some. Where every parameter is active they are named once.
    """
    rows = {(row["variant"], row["task"]): row for row in records(ledger)}
    found = {}
    for (variant, task), row in rows.items():
        base = rows[reference_of(document, variant), task]
        shares = {name: excess(row[name], base[name]) for name in STATED}
        if shares["active_parameters"] == shares["parameters"]:
            del shares["active_parameters"]
        if any(shares.values()):
            found[variant, task] = {name: share for name, share in shares.items() if share}
    return found


def at_unequal(shares: dict[str, float]) -> str:
    """`at unequal parameters (+12 %), training FLOPs and inference FLOPs (+9 %)`."""
    groups: dict[str, list[str]] = {}
    for name, share in shares.items():
        groups.setdefault(percent(share), []).append(LABELS[name])
    return f"at unequal {', '.join(f'{listed(names)} ({change})' for change, names in groups.items())}"


def _middle(runs: pd.DataFrame, name: str) -> float:
    return float(runs[name].astype("float64").median()) if name in runs.columns and len(runs) else math.nan


def _distinct(runs: pd.DataFrame, name: str) -> str:
    return "; ".join(v for v in runs[name].dropna().astype(str).unique() if v) if name in runs.columns else ""


def failures(data: "StudyData") -> pd.DataFrame:
    """Every outcome that is not a finished run: `status, cause, count, which`; runs not done yet come last."""
    runs = data.runs[data.runs["status"] != "finished"].copy()
    runs["cause"] = runs["cause"].fillna("").astype(str)
    runs["pending"] = runs["status"].isin(PENDING)
    rows = [
        {"status": status, "cause": cause, "count": len(group), "which": which(group)}
        for (pending, status, cause), group in runs.groupby(["pending", "status", "cause"])
    ]
    return pd.DataFrame(rows, columns=["status", "cause", "count", "which"])


def which(runs: pd.DataFrame) -> str:
    """Runs by name: `rope on copy (seeds 0–2), nope on copy (seed 3)`."""
    parts = []
    for (variant, task), group in runs.groupby(CELL, sort=False):
        seeds = [int(seed) for seed in group["seed"]]
        parts.append(f"{variant} on {task} (seed{'s' if len(seeds) > 1 else ''} {ranges(seeds)})")
    return ", ".join(parts)


def unsupported(data: "StudyData") -> pd.DataFrame:
    """Lengths that a variant cannot take: `variant, task, lengths`."""
    scores = data.scores[data.scores["mark"] == "unsupported"]
    rows = [
        {"variant": variant, "task": task, "lengths": ranges(int(n) for n in group["length"])}
        for (variant, task), group in scores.groupby(CELL, sort=False)
    ]
    return pd.DataFrame(rows, columns=["variant", "task", "lengths"])


def missed_gate(data: "StudyData") -> int:
    """How many finished runs did not learn their training lengths to the gate."""
    finished = data.runs[data.runs["status"] == "finished"]
    passed = gate_passed(data).merge(finished[RUN], on=RUN)["passed"]
    return int((passed == 0).sum())


def outcome_counts(data: "StudyData") -> dict[str, int]:
    """How many runs have each status."""
    return {str(status): int(n) for status, n in data.runs["status"].value_counts().items()}


@dataclass(frozen=True)
class Findings:
    """A study's data and every table made from it, made once."""

    data: "StudyData"
    compared: pd.DataFrame
    verdicts: pd.DataFrame
    lengths: pd.DataFrame
    speed: pd.DataFrame
    ledger: pd.DataFrame
    failures: pd.DataFrame
    unsupported: pd.DataFrame

    @property
    def document(self) -> dict[str, Any]:
        """The study's plan, study.json."""
        return self.data.document


def findings(data: "StudyData") -> Findings:
    """All tables of a study in any state."""
    compared = comparison(data)
    return Findings(
        data=data,
        compared=compared,
        verdicts=verdicts(data, compared),
        lengths=by_length(data),
        speed=learning_speed(data),
        ledger=ledger(data),
        failures=failures(data),
        unsupported=unsupported(data),
    )
