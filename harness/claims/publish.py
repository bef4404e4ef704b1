"""Writes `results/reference/claims.md` and `claims.json`, from published records alone: anyone can repeat it."""

import json
from pathlib import Path
from typing import Any

from harness.claims import laws
from harness.claims.evidence import Records
from harness.claims.judge import judge, laws_of
from harness.claims.page import page, row, summary
from harness.machine import commit
from harness.record import write_atomically


def publish(results: Path) -> list[Path]:
    """Judge every claim by what is published and write it down; a study or a law of this machine alone does not count,
    but the outcomes of tests that were run here go into the record.
    """
    told = laws.published(results) | laws.recorded(results)
    records = Records(results, published_only=True, told=told)
    judged, family = judge(records)
    facts = {"commit": commit()}
    document: dict[str, Any] = {
        **facts,
        "summary": summary(judged, family),
        "claims": [_published(row(each, family), results) for each in judged],
        "laws": {test: told[test] for test in sorted(laws_of(judged)) if test in told},
    }
    folder = records.reference
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    found = {folder / "claims.json": f"{text}\n", folder / "claims.md": page(judged, family, folder, facts)}
    for path, content in found.items():
        write_atomically(path, content)
    return list(found)


def _published(claim: dict[str, Any], results: Path) -> dict[str, Any]:
    """A claim whose paths are those of the repository, wherever the results folder was."""
    for term in claim["evidence"]:
        for name in ("folder", "file"):
            if place := term["source"].get(name):
                term["source"][name] = (Path("results") / Path(place).relative_to(results)).as_posix()
    return claim


def republished(results: Path) -> str:
    """The page as it would be written from the published records, with the commit that it names."""
    records = Records(results, published_only=True)
    judged, family = judge(records)
    known = json.loads((records.reference / "claims.json").read_text())
    return page(judged, family, records.reference, {"commit": known["commit"]})
