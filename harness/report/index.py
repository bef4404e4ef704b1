"""The index of published reports: each question with its measured answer, as a Markdown table."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.report.answer import DECIDED
from harness.report.tables import records
from harness.schema import quoted
from harness.wording import FAILURES, STATUSES, difference, is_known, listed, markdown, seen_phrase


@dataclass(frozen=True)
class PublishedAnswer:
    """One published report: `folder` relative to the working directory, where it lies below it."""

    study: str
    question: str
    measured: str
    folder: str


def answers(reference: Path) -> list[PublishedAnswer]:
    """One for every folder in `reference` that holds a published report, in the order of the alphabet."""
    return [_answer(path.parent, json.loads(path.read_text())) for path in sorted(reference.glob("*/provenance.json"))]


def _answer(folder: Path, facts: dict[str, Any]) -> PublishedAnswer:
    return PublishedAnswer(folder.name, str(facts["question"]), _measured(folder, facts), folder.as_posix())


def as_markdown(found: list[PublishedAnswer]) -> str:
    """The table of README."""
    rows = [f"| [{markdown(a.question)}]({a.folder}/report.md) | {markdown(a.measured)} |" for a in found]
    return "\n".join(["| question | measured answer |", "|---|---|", *rows])


def _measured(folder: Path, facts: dict[str, Any]) -> str:
    """Every comparison by its verdict, with the difference; what is tied in most pairs, runs without a model and those
    that missed the gate; then what chapters saw and no test covers, where the report was written since they say it.
    """
    verdicts = _table(folder, "verdicts")
    compared = verdicts[verdicts["variant"] != facts["baseline"]]
    tied = (compared["verdict"] == "undecided") & compared["note"].notna()
    groups = [(verdict, compared[compared["verdict"] == verdict]) for verdict in DECIDED]
    groups += [("undecided", compared[(compared["verdict"] == "undecided") & ~tied])]
    groups += [("mostly tied", compared[tied])]
    parts = [f"{label}: {_variants(group, facts)}" for label, group in groups if len(group)]
    outcomes = facts["outcomes"]
    bad = [f"{outcomes[status]} {STATUSES[status]}" for status in FAILURES if status in outcomes]
    if bad:
        parts.append(f"of {sum(outcomes.values())} runs {listed(bad)}")
    failed = sum(outcomes.get(status, 0) for status in FAILURES)
    if missed := int((verdicts["gate_of"] - verdicts["gate_passed"]).sum()) - failed:
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
