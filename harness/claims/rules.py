"""What settles a claim: kinds of evidence as data, each with its rule, and the rule that makes a verdict of them.

Nothing here reads a file, and no verdict is typed in: a piece of evidence names what is looked at and the threshold,
`state` turns what was found there into *holds*, *fails* or *open*, and `settle` turns the states of a claim into
*supported*, *refuted*, *depends* or *undecided*. Thresholds stand here and in the catalogue, and are committed before
the runs that are judged by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.stats import MOST_SEEDS
from harness.wording import counted, listed

State = Literal["holds", "fails", "open"]
Verdict = Literal["supported", "refuted", "depends", "undecided"]
Expectation = Literal["better", "worse", "equivalent", "not better", "not worse"]

VERDICTS: tuple[Verdict, ...] = ("supported", "refuted", "depends", "undecided")
ALPHA = 0.05
RECALL = 0.9  # of planted faults that must be named
HALF = 0.5  # what most runs, or most of a head's attention, means

# What an expectation says of each decided verdict of a comparison; what is not named is open.
HOLDS: Mapping[Expectation, tuple[str, ...]] = {
    "better": ("better",),
    "worse": ("worse",),
    "equivalent": ("equivalent",),
    "not better": ("worse", "equivalent"),
    "not worse": ("better", "equivalent"),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the records hold for one piece of evidence at one place, before any rule is applied.

    Attributes:
        where: the task, where there is more than one.
        effect, low, high: what was measured and its 95 % interval, in units of the evidence; None where there is none.
        unit: what stands behind the numbers, as words.
        p: raw, of a test that belongs to the family of all claims' tests; None for what is not tested.
        key: names the test within that family: claims that rest on the same comparison share it.
        verdict: of the study, or of the comparison made here, before the family's correction.
        seeds: how many there were; `seeds_needed`: how many would decide it; None where seeds decide nothing.
        outcome: of tests of the code: *passed*, *failed*, *missing*.
        missing: why there is nothing to judge; empty where there is.
        source: where it was found, for `--json`: kind, study, runs, commit, …
    """

    where: str = ""
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    p: float | None = None
    key: tuple[str, ...] = ()
    verdict: str = ""
    seeds: int | None = None
    seeds_needed: int | None = None
    outcome: str = ""
    missing: str = ""
    source: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A study's own comparison of a variant with its reference: each task is a term.

    A difference counts if the study shows it and it survives the correction for all claims. *Equivalent* is the study's
    (TOST within its margin), which is not corrected. Of a claim that says *better*, *equivalent* is the opposite:
    whatever difference there is does not matter.
    """

    of: str
    study: str
    variant: str
    expects: Expectation
    tasks: tuple[str, ...] = ()  # all

    @property
    def rule(self) -> str:
        """The rule in words."""
        return f"{self.variant} is {self.expects} in the study {self.study}"

    def state(self, found: Found, corrected: float) -> State:
        """Of a task, with the p that is corrected for all claims."""
        return expected(self.expects, found.verdict, corrected)


@dataclass(frozen=True, kw_only=True)
class Contrasted:
    """A comparison that the study does not make: a sum of variants with another sum, paired by seed, each task a term.

    Attributes:
        measure: columns of `runs.csv` with their weights, a number a run.
        plus, minus: variants; what is tested is the mean over seeds of the sum of `plus` − the sum of `minus`.
        margin: what does not matter, in units of the measure.
    """

    of: str
    study: str
    measure: tuple[tuple[str, float], ...]
    plus: tuple[str, ...]
    minus: tuple[str, ...]
    expects: Literal["better", "worse"]  # more is better here, whatever the measure
    margin: float
    tasks: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """The rule in words."""
        columns = " + ".join(name if weight == 1 else f"({weight:g}) · {name}" for name, weight in self.measure)
        more = "more" if self.expects == "better" else "less"
        return (
            f"{columns} of {' + '.join(self.plus)} is {more} than of {' + '.join(self.minus)}, margin {self.margin:g}, "
            f"in the runs of {self.study}"
        )

    def state(self, found: Found, corrected: float) -> State:
        """Of a task, with the p that is corrected for all claims."""
        return expected(self.expects, found.verdict, corrected)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """How a variant scores by itself: a column of `runs.csv`, its mean over seeds with a t interval, a term a task."""

    of: str
    study: str
    variant: str
    column: str = "eval/extrapolation"
    at_least: float | None = None
    at_most: float | None = None
    tasks: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """The rule in words."""
        return f"{self.column} of {self.variant} in {self.study} {_bounds(self.at_least, self.at_most)}"

    def state(self, found: Found, corrected: float) -> State:
        """By its interval."""
        return bounded(found, self.at_least, self.at_most)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """How many runs of a variant passed the gate at the training lengths: a share with its Clopper–Pearson interval."""

    of: str
    study: str
    variant: str
    at_least: float | None = HALF
    at_most: float | None = None
    tasks: tuple[str, ...] = ()

    @property
    def rule(self) -> str:
        """The rule in words."""
        return f"share of runs of {self.variant} in {self.study} that learned {_bounds(self.at_least, self.at_most)}"

    def state(self, found: Found, corrected: float) -> State:
        """By its interval."""
        return bounded(found, self.at_least, self.at_most)


@dataclass(frozen=True, kw_only=True)
class Tabled:
    """A number in a table of a published or local report: what chapters and benches measured.

    Attributes:
        folder: the study, or the folder below `results/reference`.
        row, column: the first table that has both; `on` names its first column where several have.
        over: another row, by whose number the row's is divided (a ratio of two has no interval).

    A cell `0 of 9` counts runs: it is a share with its Clopper–Pearson interval.
    """

    of: str
    folder: str
    row: str
    column: str
    at_least: float | None = None
    at_most: float | None = None
    on: str = ""
    over: str = ""

    @property
    def rule(self) -> str:
        """The rule in words."""
        ratio = f", divided by that of {self.over}," if self.over else ""
        return f"{self.column} of {self.row}{ratio} in {self.folder} {_bounds(self.at_least, self.at_most)}"

    def state(self, found: Found, corrected: float) -> State:
        """By its interval, or by the number itself where there is none."""
        return bounded(found, self.at_least, self.at_most)


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """Faults that were planted and are named first by `harness diagnose`: recall over all cases, Clopper–Pearson.

    It holds with a recall of `RECALL` or more, fails where the interval lies below it, and is open between: few cases.
    `refutes`: the claim is a piece of code, and what is named is its fault.
    """

    of: str
    faults: tuple[str, ...]
    refutes: bool = False

    @property
    def rule(self) -> str:
        """The rule in words."""
        return f"recall of {listed(self.faults)} ≥ {RECALL:g} in results/reference/diagnostics"

    def state(self, found: Found, corrected: float) -> State:
        """By recall."""
        if found.effect is None or found.high is None:
            return "open"
        if found.effect >= RECALL:
            return "fails" if self.refutes else "holds"
        return "fails" if found.high < RECALL and not self.refutes else "open"


@dataclass(frozen=True, kw_only=True)
class Law:
    """Tests of this repository that prove a sentence; with `refutes`, one that the claim contradicts.

    Attributes:
        of: what they prove.
        tests: `tests/…/test_x.py::test_name`.
    """

    of: str
    tests: tuple[str, ...]
    refutes: bool = False

    @property
    def rule(self) -> str:
        """The rule in words."""
        which = "this test passes" if len(self.tests) == 1 else f"these {len(self.tests)} tests pass"
        return f"{which}, which {'refutes the claim' if self.refutes else 'supports it'}"

    def state(self, found: Found, corrected: float) -> State:
        """A law counts only where all of its tests are there and pass."""
        if found.outcome != "passed":
            return "open"
        return "fails" if self.refutes else "holds"


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """A part of a claim that nothing here has measured, with the scale or machine that it would take: always open."""

    of: str
    needs: str

    @property
    def rule(self) -> str:
        """The rule in words."""
        return f"not measured; it takes {self.needs}"

    def state(self, found: Found, corrected: float) -> State:
        """Open."""
        return "open"


Evidence = Compared | Contrasted | Scored | Learned | Tabled | Diagnosed | Law | Unmeasured
OfStudy = Compared | Contrasted | Scored | Learned


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A testable sentence of the articles.

    Attributes:
        id: as in the ablation files (`claims=`) and the tests.
        where: article (ev: evolution, de: derivation) and section.
        sentence: what it says, in a line.
        settled_by: the evidence; the first piece gives the effect that is shown.
        right: the right statement, where the article is wrong or too broad; empty where it is not. It says what laws
            and other studies say, never what was measured here, which is computed.
    """

    id: str
    where: str
    sentence: str
    settled_by: tuple[Evidence, ...]
    right: str = ""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A piece of evidence at one place, judged."""

    evidence: Evidence
    found: Found
    corrected: float | None  # its p, corrected for all claims; None for what is not tested
    state: State

    @property
    def name(self) -> str:
        """What part of the claim it speaks of."""
        return f"{self.evidence.of} on {self.found.where}" if self.found.where else self.evidence.of


def tests(file: str, *names: str) -> tuple[str, ...]:
    """Tests of one file below `tests/`, as pytest names them."""
    return tuple(f"tests/{file}.py::{name}" for name in names)


def expected(expects: Expectation, verdict: str, corrected: float) -> State:
    """What a comparison says of an expectation; a difference must survive the correction for all claims."""
    if verdict in ("better", "worse") and not corrected <= ALPHA:
        return "open"
    if verdict not in ("better", "worse", "equivalent"):
        return "open"
    return "holds" if verdict in HOLDS[expects] else "fails"


def bounded(found: Found, at_least: float | None, at_most: float | None) -> State:
    """Whether a number keeps its bounds, with its whole interval where it has one."""
    if found.effect is None:
        return "open"
    low = found.effect if found.low is None else found.low
    high = found.effect if found.high is None else found.high
    if (at_least is not None and high < at_least) or (at_most is not None and low > at_most):
        return "fails"
    inside = (at_least is None or low >= at_least) and (at_most is None or high <= at_most)
    return "holds" if inside else "open"


def settle(terms: Sequence[Term]) -> Verdict:
    """The verdict on a claim.

    *Supported* if every term holds. *Depends* if some hold and some fail. *Refuted* if none holds and some part of the
    claim fails at every place where it was asked. *Undecided* otherwise: also if all but one hold and that one is open.
    """
    states = {term.state for term in terms}
    if states == {"holds"}:
        return "supported"
    if states >= {"holds", "fails"}:
        return "depends"
    parts: dict[str, set[State]] = {}
    for term in terms:
        parts.setdefault(term.evidence.of, set()).add(term.state)
    return "refuted" if {"fails"} in parts.values() else "undecided"


def needs(term: Term, most: int) -> str:
    """What would decide an open term; `most` is the number of seeds that the family's correction takes at most."""
    evidence, found = term.evidence, term.found
    if isinstance(evidence, Unmeasured):
        return evidence.needs
    if found.missing:
        return found.missing
    if found.verdict in ("better", "worse"):
        return f"{most} seeds, for the correction"
    if found.seeds_needed is None:
        return "more runs" if found.seeds is None else f"more seeds than {found.seeds}"
    if found.seeds_needed >= MOST_SEEDS:
        return "another setting: here no seed tells the arms apart"
    return counted(found.seeds_needed, "seed")


def _bounds(at_least: float | None, at_most: float | None) -> str:
    bounds = {"≥": at_least, "≤": at_most}
    return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)
