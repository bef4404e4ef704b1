"""Judged claims as a document, as a page in Markdown and as the summary of README."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.claims.catalogue import GROUPS
from harness.claims.judge import Family, Judged, counts, effect
from harness.claims.rules import ALPHA, Law, Term
from harness.wording import counted, listed, markdown, probability

MEANINGS = {
    "supported": "every term of it holds",
    "refuted": "no term of it holds, and a part of it fails wherever it was asked",
    "depends": "parts of it hold and parts fail",
    "undecided": "something that it says is open",
}
BEGIN, END = "<!-- claims: the head of results/reference/claims.md -->", "<!-- /claims -->"


def row(judged: Judged, family: Family) -> dict[str, Any]:
    """A claim as data."""
    headline = judged.headline
    return {
        "id": judged.claim.id,
        "where": judged.claim.where,
        "sentence": judged.claim.sentence,
        "verdict": judged.verdict,
        "effect": headline.effect,
        "low": headline.low,
        "high": headline.high,
        "unit": headline.unit,
        "explanation": judged.explanation,
        "right": judged.claim.right,
        "depends_on": {state: list(parts) for state, parts in judged.parts.items()},
        "needs": judged.remedies,
        "tuned": judged.tuned,
        "evidence": [_term(term, family) for term in judged.terms],
    }


def _term(term: Term, family: Family) -> dict[str, Any]:
    found = term.found
    return {
        "of": term.name,
        "kind": type(term.evidence).__name__,
        "rule": term.evidence.rule,
        "state": term.state,
        "effect": found.effect,
        "low": found.low,
        "high": found.high,
        "unit": found.unit,
        "p": family.p[found.key] if found.key else None,
        "p_corrected": term.corrected,
        "verdict": found.verdict or found.outcome,
        "seeds": found.seeds,
        "seeds_needed": found.seeds_needed,
        "missing": found.missing,
        "source": dict(found.source),
    }


def summary(judged: Sequence[Judged], family: Family) -> dict[str, Any]:
    """How many claims have which verdict, and how their tests were corrected."""
    return {
        "claims": len(judged),
        "verdicts": counts(judged),
        "family": {
            "tests": family.size,
            "correction": "Benjamini-Hochberg",
            "alpha": ALPHA,
            "differences_before": len(family.shown),
            "lost_to_the_correction": family.lost,
            "left_by_holm": family.left_by_holm,
            "seeds_for_any_correction": family.most_seeds,
        },
    }


def lines(judged: Judged) -> list[str]:
    """A whole claim in words: its sentence and the right one, each term with rule and numbers, how to repeat it."""
    claim = judged.claim
    found = [f"{claim.id} ({claim.where}): {claim.sentence}", f"{judged.verdict}. {judged.explanation}"]
    if claim.right:
        found.append(f"Right: {claim.right}")
    for term in judged.terms:
        found += ["", f"{term.state}: {term.name}", f"  rule: {term.evidence.rule}"]
        found += [f"  {text}" for text in (_measured(term), *_sources(term)) if text]
    return [*found, "", *(f"again: {command}" for command in commands(judged))]


def _measured(term: Term) -> str:
    found = term.found
    if found.missing:
        return f"found: nothing yet; it takes {found.missing}"
    parts = [" ".join(filter(None, (effect(found), found.unit)))]
    if found.verdict:
        parts.append(found.verdict)
    if term.corrected is not None:
        parts.append(f"p {probability(found.p)}, corrected for all claims {probability(term.corrected)}")
    if found.seeds is not None:
        parts.append(counted(found.seeds, "seed"))
    if found.seeds_needed is not None:
        parts.append(f"{found.seeds_needed} needed")
    return f"found: {'; '.join(filter(None, parts))}" if any(parts) else ""


def _sources(term: Term) -> list[str]:
    source = term.found.source
    if source.get("kind") == "tests":
        return [f"{each['test']}: {each['outcome']}{_at(each.get('commit', ''))}" for each in source["tests"]]
    if source.get("kind") == "study" and "folder" in source:
        return [
            f"runs of {source['folder']}{_at(', '.join(source['commits']))}, {_tuning(source['tuned'])}: "
            f"{', '.join(source['runs'])}"
        ]
    place = source.get("file") or source.get("folder", "")
    return [f"in {place}"] if place else []


def _at(commit: str) -> str:
    return f" at {commit[:9]}" if commit else ""


def _tuning(tuned: bool) -> str:
    return "each variant with its own learning rate" if tuned else "one learning rate for all variants"


def commands(judged: Judged) -> list[str]:
    """What reproduces the evidence of a claim."""
    found = []
    for term in judged.terms:
        source = term.found.source
        if study := source.get("study"):
            name = study.removesuffix("-tuned")
            found.append(f"harness ablate {name}{' --tuned' if study != name else ''}")
        elif source.get("kind") == "report":
            found.append("make bench-attention")
        elif source.get("kind") == "faults":
            found.append("make faults")
        elif source.get("kind") == "tests":
            found.append(f"harness claims --run {judged.claim.id}")
    return list(dict.fromkeys(found))


# The published page


def page(judged: Sequence[Judged], family: Family, folder: Path, facts: Mapping[str, str]) -> str:
    """`claims.md`, whose links are relative to `folder`; `facts`: commit and day of the record."""
    known = {each.claim.id: each for each in judged}
    parts = [
        "# The articles' claims",
        f"Written by `harness claims --publish` at {facts.get('commit', '')[:9] or 'an unknown commit'}; the same as "
        "data, with every run and test, is [claims.json](claims.json). `harness claims ID` shows one claim whole.",
        *_in_short(judged, family),
        _undecided(judged),
    ]
    for group, claims in GROUPS.items():
        rows = [_line(known[claim.id], folder) for claim in claims if claim.id in known]
        head = "| claim | where | verdict | effect | what was found | evidence |\n|---|---|---|---|---|---|"
        parts += [f"## {group}", "\n".join([head, *rows])]
    return "\n\n".join(parts) + "\n"


def block(judged: Sequence[Judged], family: Family) -> str:
    """The summary that README shows between two marks."""
    return "\n\n".join([BEGIN, *_in_short(judged, family), END])


def _in_short(judged: Sequence[Judged], family: Family) -> list[str]:
    found = counts(judged)
    numbers = listed([f"{len(ids)} {verdict}" for verdict, ids in found.items()])
    table = ["| verdict | meaning | claims |", "|---|---|---|"]
    table += [f"| {len(ids)} {verdict} | {MEANINGS[verdict]} | {', '.join(ids)} |" for verdict, ids in found.items()]
    tuned = [each.tuned for each in judged if each.tuned is not None]
    own = (
        f"Of {counted(len(tuned), 'claim')} that rest on training {sum(tuned)} had a learning rate tuned for each "
        "variant; the others had one for all, chosen on pilot seeds."
    )
    return [
        f"Of {len(judged)} testable claims of the two articles: {numbers}. Models are small and tasks synthetic: a "
        "verdict speaks of these, not of large models.",
        "\n".join(table),
        f"{_correction(family)} {own}",
    ]


def _correction(family: Family) -> str:
    """What the family is and what was done to it."""
    return (
        f"{counted(family.size, 'comparison')} of trained models stand behind the claims. They are corrected as one "
        f"family, beyond the correction within each study: false discovery rate {ALPHA:g} (Benjamini–Hochberg). Of "
        f"{len(family.shown)} differences found before it, {_taken(family.lost)}. Holm's correction of the whole "
        f"family would leave {family.left_by_holm}: it asks for {family.most_seeds} seeds before any difference can "
        "survive so many tests. *Equivalent*, and what is read off an interval (a score, a share of runs, a curve), is "
        "not corrected."
    )


def _taken(lost: int) -> str:
    return f"it takes {lost} away" if lost else "it takes none away"


def _undecided(judged: Sequence[Judged]) -> str:
    """What would decide the undecided ones."""
    rows = [f"- {each.claim.id}: {markdown(listed(each.remedies))}" for each in judged if each.verdict == "undecided"]
    return "\n".join(["What would decide the undecided ones:", "", *rows]) if rows else "None is undecided."


def _line(judged: Judged, folder: Path) -> str:
    claim = judged.claim
    said = f"{markdown(claim.sentence)}" + (f" *Right:* {markdown(claim.right)}" if claim.right else "")
    cells = [
        f"**{claim.id}** {said}",
        claim.where,
        f"**{judged.verdict}**",
        markdown(effect(judged.headline)),
        markdown(judged.explanation),
        ", ".join(_links(judged, folder)),
    ]
    return f"| {' | '.join(cells)} |"


def _links(judged: Judged, folder: Path) -> list[str]:
    """Studies with their pages, faults, benches; tests by their file."""
    found = {}
    for term in judged.terms:
        source = term.found.source
        if source.get("file"):
            found[Path(source["file"]).parent.name] = source["file"]
        elif source.get("folder"):
            found[Path(source["folder"]).name] = f"{source['folder']}/report.md"
    names = [f"[{name}]({os.path.relpath(place, folder)})" for name, place in found.items()]
    laws = [term.evidence for term in judged.terms if isinstance(term.evidence, Law)]
    files = dict.fromkeys(test.partition("::")[0] for law in laws for test in law.tests)
    tested = [f"[{Path(file).stem}](../../{file})" for file in files]
    state = judged.tuned
    return [*names, *tested, *(["untuned" if state is False else "tuned"] if state is not None else [])]
