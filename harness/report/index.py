"""The index of published reports: each question with its measured answer."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.report.answer import DECIDED
from harness.report.tables import records
from harness.schema import quoted
from harness.wording import FAILURES, STATUSES, difference, is_known, listed, markdown, seen_phrase

OPEN = UNDECIDED, TIED = "undecided", "mostly tied"


@dataclass(frozen=True)
class PublishedAnswer:
    """One published report: `folder` relative to the working directory, where it lies below it; `measured` its answer
    with all numbers; `verdicts` variants by verdict, in brackets what they are compared with where that is not the
    baseline.
    """

    study: str
    question: str
    measured: str
    folder: str
    baseline: str
    verdicts: Mapping[str, Sequence[str]]
    missed_gate: str


def answers(reference: Path) -> list[PublishedAnswer]:
    """One for every folder in `reference` that holds a published report, in the order of the alphabet."""
    return [_answer(path.parent, json.loads(path.read_text())) for path in sorted(reference.glob("*/provenance.json"))]


def _answer(folder: Path, facts: dict[str, Any]) -> PublishedAnswer:
    verdicts = _table(folder, "verdicts")
    groups = _by_verdict(verdicts, facts)
    found = {label: _names(group, verdicts, facts) for label, group in groups}
    missed, finished = _missed(verdicts, facts), facts["outcomes"].get("finished", 0)
    return PublishedAnswer(
        study=folder.name,
        question=str(facts["question"]),
        measured=_measured(folder, facts, groups, missed),
        folder=folder.as_posix(),
        baseline=str(facts["baseline"]),
        verdicts=found,
        missed_gate=f"{missed} of {finished}" if missed else "",
    )


def as_markdown(found: Iterable[PublishedAnswer]) -> str:
    """The table of README: what is decided by name, what is open by number."""
    columns = ["question", "against", *DECIDED, "open", "missed the gate"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for each in found:
        decided = [", ".join(map(markdown, each.verdicts[verdict])) for verdict in DECIDED]
        tied, count = len(each.verdicts[TIED]), sum(len(each.verdicts[label]) for label in OPEN)
        share = "all" if tied == count else f"{tied} of them"
        left = f"{count} undecided{f', {share} {TIED}' * bool(tied)}" if count else ""
        link = f"[{markdown(each.question)}]({each.folder}/report.md)"
        lines.append(f"| {' | '.join([link, markdown(quoted(each.baseline)), *decided, left, each.missed_gate])} |")
    return "\n".join(lines)


def _by_verdict(verdicts: pd.DataFrame, facts: dict[str, Any]) -> list[tuple[str, pd.DataFrame]]:
    """Comparisons by verdict; those that are undecided as most pairs tie apart from the others."""
    compared = verdicts[verdicts["variant"] != facts["baseline"]]
    tied = (compared["verdict"] == "undecided") & compared["note"].notna()
    groups = [(verdict, compared[compared["verdict"] == verdict]) for verdict in DECIDED]
    return [*groups, (UNDECIDED, compared[(compared["verdict"] == "undecided") & ~tied]), (TIED, compared[tied])]


def _names(group: pd.DataFrame, verdicts: pd.DataFrame, facts: dict[str, Any]) -> list[str]:
    """Variants, with the tasks where it is not all on which they were compared."""
    found = []
    for variant, rows in group.groupby("variant", sort=False):
        on = "" if len(rows) == (verdicts["variant"] == variant).sum() else f" ({', '.join(rows['task'])})"
        other = rows["reference"].iloc[0]
        found.append(f"{quoted(str(variant))}{'' if other == facts['baseline'] else f' [{other}]'}{on}")
    return found


def _missed(verdicts: pd.DataFrame, facts: dict[str, Any]) -> int:
    """Finished runs that missed the gate."""
    failed = sum(facts["outcomes"].get(status, 0) for status in FAILURES)
    return int((verdicts["gate_of"] - verdicts["gate_passed"]).sum()) - failed


def _measured(folder: Path, facts: dict[str, Any], groups: list[tuple[str, pd.DataFrame]], missed: int) -> str:
    """Every comparison by its verdict, with the difference; what is tied in most pairs, runs without a model and those
    that missed the gate; then what chapters saw and no test covers, where the report was written since they say it.
    """
    parts = [f"{label}: {_variants(group, facts)}" for label, group in groups if len(group)]
    outcomes = facts["outcomes"]
    bad = [f"{outcomes[status]} {STATUSES[status]}" for status in FAILURES if status in outcomes]
    if bad:
        parts.append(f"of {sum(outcomes.values())} runs {listed(bad)}")
    if missed:
        parts.append(f"{missed} of {outcomes['finished']} finished runs missed the gate")
    said = (f"Against “{facts['baseline']}”, {facts['scored']}.", f"{_capital('; '.join(parts))}.", _seen(folder))
    return " ".join(filter(None, said))


def _seen(folder: Path) -> str:
    written = (folder / "tables" / "seen.csv").exists()
    return seen_phrase(_table(folder, "seen")["finding"]) if written else ""


def _table(folder: Path, name: str) -> pd.DataFrame:
    """One of the report's tables; a variant may be called "None" or "NA"."""
    names = dict.fromkeys(("variant", "task", "reference"), str)
    return pd.read_csv(folder / "tables" / f"{name}.csv", dtype=names, keep_default_na=False, na_values=[""])


def _variants(group: pd.DataFrame, facts: dict[str, Any]) -> str:
    """`ALiBi (copy +0.21, reverse +0.23), T5 bias (copy +0.19)`; one task is not named, another reference than the
    baseline is.
    """
    found = []
    for variant, rows in group.groupby("variant", sort=False):
        known = [row for row in records(rows) if is_known(row["difference"])]
        names = [f"{row['task']} " if len(facts["tasks"]) > 1 else "" for row in known]
        sizes = [n + difference(row["difference"], row.get("bound")) for n, row in zip(names, known, strict=True)]
        other = rows["reference"].iloc[0]
        sizes = sizes if other == facts["baseline"] else [f"to {quoted(other)}", *sizes]
        found.append(f"{quoted(str(variant))} ({', '.join(sizes)})" if sizes else quoted(str(variant)))
    return ", ".join(found)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
