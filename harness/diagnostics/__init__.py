"""Instruments that name what is wrong: probes of a model's structure, before training, and detectors of how it trained.

`subject_of(spec)` says what is to be examined of a run; a model that was built elsewhere is described by a `Subject`.
`watch.Watch` is the Lightning callback whose signals detectors read, here or from a run's curves.
"""

from harness.diagnostics.catalogue import PROBES, examine
from harness.diagnostics.detectors import DETECTORS, detect
from harness.diagnostics.finding import Finding, Measured, NotApplicable, Probe
from harness.diagnostics.history import History, history_of
from harness.diagnostics.subject import AttentionSite, Positions, Subject, subject_of

__all__ = [
    "DETECTORS",
    "PROBES",
    "AttentionSite",
    "Finding",
    "History",
    "Measured",
    "NotApplicable",
    "Positions",
    "Probe",
    "Subject",
    "detect",
    "examine",
    "history_of",
    "subject_of",
]
