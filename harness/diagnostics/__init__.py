"""Instruments that name what is wrong with a model: probes of its structure, before training.

`subject_of(spec)` says what is to be examined of a run; a model that was built elsewhere is described by a `Subject`.
"""

from harness.diagnostics.catalogue import PROBES, examine
from harness.diagnostics.finding import Finding, Measured, NotApplicable, Probe
from harness.diagnostics.subject import AttentionSite, Positions, Subject, subject_of

__all__ = [
    "PROBES",
    "AttentionSite",
    "Finding",
    "Measured",
    "NotApplicable",
    "Positions",
    "Probe",
    "Subject",
    "examine",
    "subject_of",
]
