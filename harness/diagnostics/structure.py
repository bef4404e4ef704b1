"""What diagnostics say of a run: structural probes once for all seeds of a variant, detectors once it is over."""

import json
from collections.abc import Iterable, Mapping
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

NAMES = [probe.name for probe in PROBES] + [detector.name for detector in DETECTORS]
RANKS = {name: rank for rank, name in enumerate(NAMES)}
KEPT = TypeAdapter(tuple[Diagnosed, ...])


def structural(spec: RunSpec, folder: Path) -> tuple[Diagnosed, ...]:
    """What structural probes find out of bounds in the untrained model of a spec at seed 0: read where `folder` has it,
    else measured and kept there.
    """
    variant = spec.replaced({"seed": 0})
    path = folder / f"{variant.fingerprint()}.json"
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
        yield Diagnosed(
            probe=probe.name,
            alarm=False,
            rank=RANKS[probe.name],
            value=float("nan"),
            symptom="this probe could not look at the model",
            measures=probe.measures,
            healthy=probe.healthy,
            cause=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}",
            remedy="`harness diagnose --spec FILE` shows where",
            source=probe.source,
        )
    else:
        if finding.outside:
            yield finding.diagnosed(RANKS[probe.name])


def watched(spec: RunSpec, lines: Iterable[Mapping[str, Any]], record: RunRecord) -> tuple[Diagnosed, ...]:
    """What detectors find out of bounds in the curves of a run that has ended."""
    findings = detect(history_of(spec, lines, record))
    return tuple(finding.diagnosed(RANKS[finding.probe.name]) for finding in findings if finding.outside)
