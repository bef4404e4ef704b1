"""What a probe is, and what it finds: a number, and where it lies outside its bounds the cause and what to try."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from harness.record import Diagnosed
from harness.wording import at

Examined = TypeVar("Examined")  # a Subject before training, a History after it
Speaks = Literal["always", "of harm", "aside"]


SAID = {"always": "", "of harm": "; an alarm where training came to harm", "aside": "; never an alarm"}


Key = TypeVar("Key")


def worst_of(found: Mapping[Key, float]) -> Key:
    """The name of the largest number; what is no number is worse than any."""
    return max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])


@dataclass(frozen=True)
class Measured:
    """What a probe measured.

    Attributes:
        value: compared with the probe's bounds; NaN counts as outside.
        where: the module, parameter or tokens at which it was worst.
        cause: what the pattern of the evidence names; empty: the probe's own sentence.
        evidence: other numbers behind it.
    """

    value: float
    where: str = ""
    cause: str = ""
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class NotApplicable:
    """Why a probe has nothing to measure in this model."""

    reason: str


@dataclass(frozen=True)
class Probe(Generic[Examined]):
    """One row of the catalogue: a structural probe of a Subject, or a detector, which reads a History.

    Attributes:
        name: its key in tags and documents.
        symptom: what is seen, in words.
        measures: what the number is.
        measure: measures it, pure: the subject is afterwards as it was.
        low: an alarm below it.
        high: an alarm above it.
        cause: the likely cause.
        remedy: what to try.
        source: paper or origin.
        on_request: too dear to run before every training.
        speaks: when a number outside of its bounds is an alarm: always, as where something declared is broken; only
            where training came to harm, as what is unusual is often healthy; or never, and it is only said.
    """

    name: str
    symptom: str
    measures: str
    measure: Callable[[Examined], Measured | NotApplicable]
    cause: str
    remedy: str
    source: str
    low: float = -math.inf
    high: float = math.inf
    on_request: bool = False
    speaks: Speaks = "always"

    @property
    def bounds(self) -> dict[str, float]:
        """The finite ones."""
        return {name: bound for name, bound in (("low", self.low), ("high", self.high)) if math.isfinite(bound)}

    def document(self) -> dict[str, Any]:
        """As plain JSON data."""
        words = ("name", "symptom", "measures", "cause", "remedy", "source", "on_request", "speaks")
        return {word: getattr(self, word) for word in words} | self.bounds

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"{self.name}: {self.symptom} ({self.source})",
            f"  measures: {self.measures}; healthy: {self.healthy}{SAID[self.speaks]}",
            f"  cause: {self.cause}",
            f"  try: {self.remedy}",
        ]

    @property
    def healthy(self) -> str:
        """The bounds in words."""
        said = {"low": "at least", "high": "at most"}
        return ", ".join(f"{said[name]} {bound:g}" for name, bound in self.bounds.items())

    def examine(self, examined: Examined, *, harmed: bool = False) -> "Finding":
        """Measure, and compare with the bounds; `harmed` says whether training came to harm."""
        begun = time.perf_counter()
        found = self.measure(examined)
        return Finding(self, found, time.perf_counter() - begun, harmed)


@dataclass(frozen=True)
class Finding:
    """What came of one probe; `seconds` is what it cost, `harmed` whether training came to harm."""

    probe: Probe[Any]
    found: Measured | NotApplicable
    seconds: float
    harmed: bool = False

    @property
    def outside(self) -> bool:
        """Whether the measure lies outside the bounds."""
        return isinstance(self.found, Measured) and not self.probe.low <= self.found.value <= self.probe.high

    @property
    def alarms(self) -> bool:
        """Whether that is an alarm."""
        speaks = {"always": True, "of harm": self.harmed, "aside": False}
        return self.outside and speaks[self.probe.speaks]

    @property
    def remarks(self) -> bool:
        """Whether it is only said."""
        return self.outside and not self.alarms

    @property
    def measured(self) -> bool:
        """Whether there was something to measure."""
        return isinstance(self.found, Measured)

    @property
    def cause(self) -> str:
        """The most particular cause that is known."""
        return (isinstance(self.found, Measured) and self.found.cause) or self.probe.cause

    def diagnosed(self, rank: int) -> Diagnosed:
        """What a record keeps of an alarm or a remark, with its place in the order of triage."""
        assert isinstance(self.found, Measured)
        return Diagnosed(
            probe=self.probe.name,
            alarm=self.alarms,
            rank=rank,
            value=self.found.value,
            where=self.found.where,
            symptom=self.probe.symptom,
            measures=self.probe.measures,
            healthy=self.probe.healthy,
            cause=self.cause,
            remedy=self.probe.remedy,
            source=self.probe.source,
            evidence=dict(self.found.evidence),
        )

    def lines(self) -> list[str]:
        """An alarm or a remark for people: the symptom with its number, the likely cause, what to try."""
        assert isinstance(self.found, Measured)
        probe, found = self.probe, self.found
        place = f",{at(found.where)}" if found.where else ""
        return [
            f"{probe.name}: {probe.symptom}",
            f"  seen: {probe.measures}: {found.value:.3g} (healthy: {probe.healthy}){place}",
            f"  cause: {self.cause}",
            f"  try: {probe.remedy}",
        ]

    def document(self) -> dict[str, Any]:
        """As plain JSON data."""
        probe, found = self.probe, self.found
        known = {"probe": probe.name, "measures": probe.measures, **probe.bounds, "seconds": self.seconds}
        if isinstance(found, NotApplicable):
            return known | {"alarm": False, "remark": False, "not_applicable": found.reason}
        known |= {
            "alarm": self.alarms,
            "remark": self.remarks,
            "value": found.value,
            "where": found.where,
            "evidence": dict(found.evidence),
        }
        told = {"symptom": probe.symptom, "cause": self.cause, "remedy": probe.remedy, "source": probe.source}
        return known | told if self.outside else known
