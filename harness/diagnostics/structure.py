"""What diagnostics say of a run: structural probes once for all seeds of a variant, detectors once it is over."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.diagnostics.catalogue import PROBES
from harness.diagnostics.detectors import DETECTORS, detect
from harness.diagnostics.finding import Probe
from harness.diagnostics.history import history_of
from harness.diagnostics.subject import Subject, one_thread, subject_of
from harness.record import Diagnosed, RunRecord, write_atomically
from harness.spec import RunSpec
from harness.wording import in_words

NAMES = [probe.name for probe in PROBES] + [detector.name for detector in DETECTORS]
RANKS = {name: rank for rank, name in enumerate(NAMES)}
KEPT = TypeAdapter(tuple[Diagnosed, ...])


def structural(spec: RunSpec, folder: Path) -> tuple[Diagnosed, ...]:
    """What structural probes find out of bounds in the untrained model of a spec at seed 0: read where `folder` has it,
    else measured and kept there.
    """
    variant = spec.replaced({"seed": 0})
    path = folder / f"{variant.fingerprint()}-{probes_version()}.json"
    try:
        return KEPT.validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):  # not yet, or torn: it is made anew
        pass
    try:
        subject = subject_of(variant)
    except Exception:  # there is no model to look at; the run's own record says why
        return ()
    with one_thread():
        found = tuple(said for probe in PROBES if not probe.on_request for said in _said(probe, subject))
    write_atomically(path, json.dumps(KEPT.dump_python(found, mode="json"), indent=1))
    return found


def _said(probe: Probe[Subject], subject: Subject) -> Iterable[Diagnosed]:
    try:
        finding = probe.examine(subject)
    except Exception as error:  # of a user's own level, anything: it is said, and the run is not lost for it
        yield unseen(probe.name, in_words(error))
    else:
        if finding.outside:
            yield finding.diagnosed(RANKS[probe.name])


@cache
def probes_version() -> str:
    """Of the code of all diagnostics: what an earlier one found is not read."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def unseen(name: str, error: str) -> Diagnosed:
    """The remark that something could not be looked at."""
    return Diagnosed(
        probe=name,
        alarm=False,
        rank=RANKS.get(name, len(RANKS)),
        value=float("nan"),
        symptom="it could not look at the model",
        measures="nothing",
        healthy="a number",
        cause=error,
        remedy="`harness diagnose --spec FILE` shows where",
        source="house",
    )


def watched(
    spec: RunSpec, lines: Iterable[Mapping[str, Any]], record: RunRecord, before: Iterable[Diagnosed] = ()
) -> tuple[Diagnosed, ...]:
    """What detectors find out of bounds in the curves of a run that has ended, given what probes found `before` it."""
    told = next((found.probe for found in before if found.alarm), "")
    findings = detect(history_of(spec, lines, record), told)
    return tuple(finding.diagnosed(RANKS[finding.probe.name]) for finding in findings if finding.outside)
