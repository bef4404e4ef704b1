"""From records to verdicts: what was found for every claim, corrected for all of them together, judged by the rules.

The family is every comparison that any claim rests on, each once, also those whose study is missing (p = 1). Its
correction is Benjamini and Hochberg's and not Holm's, which every study uses within itself: the sign-flip p of nine
seeds is 1/256 at the least, which Holm lets pass with 12 comparisons and never with the family's several dozen, so that
no claim could be decided whatever its difference is. What a reader takes from a list of verdicts is how many of them
are wrong, and that is what the false discovery rate bounds. A difference counts only if its study shows it by Holm
*and* it survives here (contrasts, which no study makes, have this correction alone); what Holm over the family would
leave is said beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.claims.catalogue import CLAIMS
from harness.claims.evidence import Records, read
from harness.claims.rules import ALPHA, VERDICTS, Claim, Evidence, Found, Law, State, Term, Verdict, needs, settle
from harness.stats import false_discovery, fewest_seeds, holm
from harness.wording import counted, is_known, listed, with_interval

DECIDED = ("better", "worse")
SHOWN = 3  # parts of a claim that its sentence names in a state, the rest by their number


@dataclass(frozen=True)
class Family:
    """The tests behind all claims, and what correcting for their number does.

    Attributes:
        p: raw, by the test's name; 1 for what is planned and not there.
        corrected: Benjamini–Hochberg, by the test's name.
        shown: names of the tests that show a difference before it: within their study, or (contrasts) by themselves.
    """

    p: Mapping[tuple[str, ...], float]
    corrected: Mapping[tuple[str, ...], float]
    shown: frozenset[tuple[str, ...]]

    @property
    def size(self) -> int:
        """How many tests there are."""
        return len(self.p)

    @property
    def lost(self) -> int:
        """Differences found before it that the correction takes away."""
        return sum(not self.corrected[name] <= ALPHA for name in self.shown)

    @property
    def left_by_holm(self) -> int:
        """Differences that would be left if the family-wise error rate were bounded instead."""
        names = list(self.p)
        corrected = dict(zip(names, holm([self.p[name] for name in names]), strict=True))
        return sum(bool(corrected[name] <= ALPHA) for name in self.shown)

    @property
    def most_seeds(self) -> int:
        """With so many seeds a difference can survive any correction for so many tests."""
        return fewest_seeds(self.size)


@dataclass(frozen=True)
class Judged:
    """A claim with its terms."""

    claim: Claim
    terms: tuple[Term, ...]
    most_seeds: int

    @property
    def verdict(self) -> Verdict:
        """Computed from the terms."""
        return settle(self.terms)

    @property
    def headline(self) -> Found:
        """The measurement that stands for the claim: the first that there is, as the catalogue names them."""
        measured = (term.found for term in self.terms if term.found.effect is not None)
        return next(measured, Found())

    @property
    def tuned(self) -> bool | None:
        """Whether all its studies gave each variant its own learning rate; None where it rests on no study."""
        found = [term.found.source["tuned"] for term in self.terms if "tuned" in term.found.source]
        return all(found) if found else None

    @cached_property
    def parts(self) -> dict[State, list[str]]:
        """The parts of the claim by what became of them, each with the places where that is so."""
        return {
            state: _parts([term for term in self.terms if term.state == state]) for state in ("holds", "fails", "open")
        }

    @property
    def explanation(self) -> str:
        """One sentence: what holds, what fails, what is open and would be decided by what."""
        against = [term for term in self.terms if term.state == "fails" and refuting(term)]
        denied = [term for term in self.terms if term.state == "fails" and not refuting(term)]
        groups = {
            "Holds": self.parts["holds"],
            "Does not hold": _parts(denied),
            "Against it": _parts(against),
            "Open": self.parts["open"],
        }
        said = [f"{words}: {_few(parts)}" for words, parts in groups.items() if parts]
        if remedies := self.remedies:
            said[-1] += f" (it takes {listed(remedies)})"
        return f"{'; '.join([said[0], *(_small(each) for each in said[1:])])}."

    @property
    def remedies(self) -> list[str]:
        """What would decide its open terms."""
        found = dict.fromkeys(needs(term, self.most_seeds) for term in self.terms if term.state == "open")
        seeds = [int(each.split()[0]) for each in found if each.endswith(("seed", "seeds"))]
        others = [each for each in found if not each.endswith(("seed", "seeds"))]
        return [counted(max(seeds), "seed"), *others] if seeds else others


def judge(records: Records, claims: Iterable[Claim] = tuple(CLAIMS.values())) -> tuple[list[Judged], Family]:
    """Every claim, judged by what a results folder holds."""
    found = [(claim, [(evidence, read(evidence, records)) for evidence in claim.settled_by]) for claim in claims]
    family = family_of(each for _, pieces in found for _, several in pieces for each in several)
    judged = [
        Judged(claim, tuple(_term(evidence, each, family) for evidence, several in pieces for each in several), seeds)
        for seeds in [family.most_seeds]
        for claim, pieces in found
    ]
    return judged, family


def family_of(found: Iterable[Found]) -> Family:
    """The tests among what was found, each once."""
    tested = {each.key: each for each in found if each.key}
    p = {key: 1.0 if each.p is None or np.isnan(each.p) else each.p for key, each in tested.items()}
    corrected = dict(zip(p, map(float, false_discovery(list(p.values()))), strict=True)) if p else {}
    return Family(p, corrected, frozenset(key for key, each in tested.items() if each.verdict in DECIDED))


def counts(judged: Iterable[Judged]) -> dict[Verdict, list[str]]:
    """The ids of claims by verdict."""
    every = list(judged)
    return {verdict: [each.claim.id for each in every if each.verdict == verdict] for verdict in VERDICTS}


def missing_studies(judged: Iterable[Judged]) -> list[str]:
    """Studies that a claim asks for and that are not there."""
    sources = [term.found.source for each in judged for term in each.terms]
    return list(dict.fromkeys(s["study"] for s in sources if s.get("kind") == "study" and "folder" not in s))


def laws_of(judged: Iterable[Judged]) -> list[str]:
    """The tests that claims rest on."""
    pieces = [evidence for each in judged for evidence in each.claim.settled_by if isinstance(evidence, Law)]
    return list(dict.fromkeys(test for law in pieces for test in law.tests))


def refuting(term: Term) -> bool:
    """Whether a piece of evidence names what speaks against the claim, and not a part of it."""
    return bool(getattr(term.evidence, "refutes", False))


def effect(found: Found) -> str:
    """A measurement with its interval, and what it is of; empty where there is none."""
    if not is_known(found.effect):
        return ""
    signed = found.verdict != ""
    value, interval = with_interval(found.effect, found.low, found.high)
    value, interval = (value, interval) if signed else (value.lstrip("+"), interval.replace("+", ""))
    return value if found.low is None else f"{value} {interval}"


def _term(evidence: Evidence, found: Found, family: Family) -> Term:
    corrected = family.corrected[found.key] if found.key else None
    state: State = "open" if found.missing else evidence.state(found, 1.0 if corrected is None else corrected)
    return Term(evidence=evidence, found=found, corrected=corrected, state=state)


def _parts(terms: Sequence[Term]) -> list[str]:
    places: dict[str, list[str]] = {}
    for term in terms:
        places.setdefault(term.evidence.of, []).extend([term.found.where] if term.found.where else [])
    return [of + (f" on {listed(where)}" if where else "") for of, where in places.items()]


def _few(parts: Sequence[str]) -> str:
    if len(parts) <= SHOWN + 1:
        return listed(parts)
    return f"{', '.join(parts[:SHOWN])} and {len(parts) - SHOWN} more"


def _small(text: str) -> str:
    return text[:1].lower() + text[1:]
