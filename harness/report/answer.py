"""The answer in two sentences, made from the verdicts alone: what they show, then what they leave open."""

from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.report.tables import (
    LABELS,
    bounds,
    ledger,
    missed_gate,
    outcome_counts,
    records,
    unequal_costs,
    variants_of,
)
from harness.results import LEARNING_TIME, number_of_looks
from harness.schema import quoted
from harness.stats import fewest_seeds
from harness.wording import (
    FAILURES,
    PENDING,
    STATUSES,
    counted,
    decimal,
    listed,
    metric_name,
    percent,
    span,
    with_interval,
)

if TYPE_CHECKING:
    from harness.results import StudyData

DECIDED = ("better", "worse", "equivalent")
FEW = 3  # different costs that are named variant by variant


def answer(data: "StudyData", comparison: pd.DataFrame) -> str:
    """What a study shows, in two sentences.

    The first names every comparison with the verdict *better*, *worse* or *equivalent*, with its difference and
    interval and what of their costs is unequal, and nothing else; the second those that are *undecided*, runs that
    failed, missed the gate or are still to come.
    """
    return " ".join(sentences(data, comparison))


def sentences(data: "StudyData", comparison: pd.DataFrame) -> tuple[str, str]:
    """The answer's two sentences, apart."""
    return _shown(data, comparison), _open(data, comparison)


def score_phrase(document: dict[str, Any]) -> str:
    """`mean exact match at lengths 11–20`: the primary score, as the document declares it."""
    name = f"mean {metric_name(document['score'])}"
    if document["score"] == LEARNING_TIME:
        direction = "higher" if document.get("higher_is_better", True) else "lower"
        return f"{name} (share of the training steps, {direction} is better)"
    tests = {tuple(lengths) for lengths in document["test_lengths"].values() if lengths}
    trained = {tuple(lengths) for lengths in document["train_lengths"].values()}
    if len(tests) == 1:
        return f"{name} at {lengths_phrase(list(tests.pop()))}"
    if not tests and len(trained) == 1:
        return f"{name} at the training {lengths_phrase(list(trained.pop()))}"
    return f"{name} over each task's {'test' if tests else 'training'} lengths"


def lengths_phrase(lengths: list[int]) -> str:
    """`lengths 11–20`, `length 11`."""
    return f"length{'s' if len(set(lengths)) > 1 else ''} {span(lengths)}"


def _shown(data: "StudyData", comparison: pd.DataFrame) -> str:
    document = data.document
    baseline, score = f"“{document['baseline']}”", score_phrase(document)
    if data.primary()["score"].notna().sum() == 0:
        return f"No run of this study has a score yet, so nothing can be said about {listed(document['tasks'])}."
    if comparison.empty:
        return f"The study has only its baseline, {baseline}, and so compares nothing: {_means(data)} ({score})."
    if not comparison["verdict"].isin(DECIDED).any():
        return (
            f"No variant is shown to be better than, worse than or equivalent to "
            f"{'what it is compared with' if document.get('against') else f'the baseline {baseline}'} on "
            f"{listed(document['tasks'], 'or')}, judged by {score}."
        )
    limited = comparison.assign(bound=_bounds_of(data, comparison))
    clauses = [_on_task(task, limited, document) for task in document["tasks"]]
    so_far = "So far, by" if pending(data) else "By"
    named = " where nothing else is named" if document.get("against") else ""
    return (
        f"{so_far} {score} and against the baseline {baseline}{named}, {'; '.join(clauses)} "
        f"(differences with 95 % intervals){_at_unequal_cost(data, comparison)}."
    )


def _at_unequal_cost(data: "StudyData", comparison: pd.DataFrame) -> str:
    """`, at unequal cost: SwiGLU (parameters +12 %)`; of many costs the ends alone."""
    decided = comparison[comparison["verdict"].isin(DECIDED)]
    unequal = unequal_costs(ledger(data), data.document)
    shares: dict[str, dict[str, list[float]]] = {}
    for row in records(decided):
        for cost, share in unequal.get((row["variant"], row["task"]), {}).items():
            shares.setdefault(row["variant"], {}).setdefault(cost, []).append(share)
    groups: dict[str, list[str]] = {}
    for variant, own in shares.items():
        groups.setdefault(_between(own), []).append(quoted(variant))
    if not groups:
        return ""
    if len(groups) <= FEW:
        return f", at unequal cost: {', '.join(f'{listed(names)} ({costs})' for costs, names in groups.items())}"
    every = {cost: [share for own in shares.values() for share in own.get(cost, ())] for cost in LABELS}
    names = [quoted(variant) for variant in shares]
    who = "all of them" if len(names) == decided["variant"].nunique() else listed(names)
    return f", at unequal cost: {who} ({_between({cost: found for cost, found in every.items() if found})})"


def _between(shares: dict[str, list[float]]) -> str:
    """`parameters −12 % to +150 %, training FLOPs +9 %`."""
    ends = {cost: dict.fromkeys((percent(min(found)), percent(max(found)))) for cost, found in shares.items()}
    return ", ".join(f"{LABELS[cost]} {' to '.join(found)}" for cost, found in ends.items())


def _bounds_of(data: "StudyData", comparison: pd.DataFrame) -> list[str]:
    found = bounds(data)
    return [found.get((row["variant"], row["task"]), "") for row in records(comparison)]


def _on_task(task: str, comparison: pd.DataFrame, document: dict[str, Any]) -> str:
    """`on copy, ALiBi (+0.41 [+0.30, +0.52]) is better and RoPE (…) is worse by less than the margin of 0.10`."""
    rows = comparison[comparison["task"] == task]
    margin = decimal(document["margin"], 2)
    small = rows["difference"].abs() < document["margin"]
    groups = [
        (rows[(rows["verdict"] == verdict) & (small == is_small)], f"{verdict}{ending}")
        for verdict in ("better", "worse")
        for is_small, ending in ((False, ""), (True, f" by less than the margin of {margin}"))
    ]
    groups.append((rows[rows["verdict"] == "equivalent"], f"equivalent within ±{margin}"))
    parts = []
    for group, ending in groups:
        names = [_with_difference(row, document) for row in records(group)]
        if names:
            parts.append(f"{listed(names)} {'is' if len(names) == 1 else 'are'} {ending}")
    return f"on {task}, {', '.join(parts)}" if parts else f"on {task}, nothing is decided"


def _with_difference(row: dict[Any, Any], document: dict[str, Any]) -> str:
    size = " ".join(with_interval(row["difference"], row["low"], row["high"], bound=row["bound"]))
    other = document.get("against", {}).get(row["variant"])
    return f"{quoted(row['variant'])} ({f'to {quoted(other)} ' if other else ''}{size})"


def _means(data: "StudyData") -> str:
    means = data.primary().groupby("task", sort=False)["score"].mean()
    return listed([f"{decimal(mean, 2)} on {task}" for task, mean in means.items()])


def _open(data: "StudyData", comparison: pd.DataFrame) -> str:
    parts = [_undecided(comparison, data.document), _failed(data), _gate(data), _to_come(data)]
    text = "; ".join(part for part in parts if part)
    if not text:
        text = f"every comparison is decided, and all {counted(len(data.runs), 'run')} finished"
    return f"{text[0].upper()}{text[1:]}."


def _undecided(comparison: pd.DataFrame, document: dict[str, Any]) -> str:
    """Which comparisons are open; too few seeds to tell is not the same as no difference."""
    rows = comparison[comparison["verdict"] == "undecided"]
    if rows.empty:
        return ""
    fewest = fewest_seeds(len(comparison) * number_of_looks(document))
    is_few = rows["n_pairs"].max() < fewest and not document.get("pilot")  # a pilot's seeds decide nothing, many or few
    few = f" (no difference can be significant below {fewest} seeds here)" if is_few else ""
    if len(rows) == len(comparison) and len(rows) > 1:
        return f"all {len(rows)} comparisons are undecided, which is no proof that the variants are equal{few}"
    arms, clauses = len(variants_of(document)) - 1, []
    for task in document["tasks"]:
        names = [quoted(name) for name in rows.loc[rows["task"] == task, "variant"]]
        if names:
            clauses.append(f"on {task}, {f'all {arms} variants' if len(names) == arms > 2 else listed(names)}")
    return f"undecided, which is no proof of equality: {'; '.join(clauses)}{few}"


def _failed(data: "StudyData") -> str:
    counts = outcome_counts(data)
    parts = [f"{counts[status]} {STATUSES[status]}" for status in FAILURES if counts.get(status)]
    return f"of {counted(len(data.runs), 'run')}, {listed(parts)}" if parts else ""


def _gate(data: "StudyData") -> str:
    missed = missed_gate(data)
    if not missed:
        return ""
    gate = decimal(data.document["gate"], 2)
    finished = counted(outcome_counts(data)["finished"], "finished run")
    return f"{missed} of {finished} missed the gate, an exact match of {gate} at the training lengths"


def _to_come(data: "StudyData") -> str:
    left = pending(data)
    return f"{left} of {counted(len(data.runs), 'run')} still to come, so this is preliminary" if left else ""


def pending(data: "StudyData") -> int:
    """How many planned runs have no outcome yet."""
    return sum(outcome_counts(data).get(status, 0) for status in PENDING)
