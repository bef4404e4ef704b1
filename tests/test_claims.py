"""Claims: rules with made-up records in both directions, the family, records of every kind, the catalogue's references,
the published page.
"""

import csv
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control

from harness.claims import CLAIMS, Records, block, judge, laws, laws_of, missing_studies, publish
from harness.claims.judge import Judged, family_of
from harness.claims.page import lines
from harness.claims.publish import republished
from harness.claims.rules import (
    Claim,
    Compared,
    Contrasted,
    Diagnosed,
    Evidence,
    Found,
    Law,
    Learned,
    Scored,
    State,
    Tabled,
    Term,
    Unmeasured,
    Verdict,
    bounded,
    expected,
    settle,
)
from harness.claims.tables import cell, number
from harness.locate import ablation_files, find_ablation
from harness.schema import UserError
from harness.stats import compare, false_discovery, fewest_seeds

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "results"
LAW = "tests/test_wording.py::test_a"
Caller = Callable[..., tuple[int, str, str]]


# --- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expects", "verdict", "corrected", "state"),
    [
        ("better", "better", 0.05, "holds"),
        ("better", "better", 0.051, "open"),
        ("better", "worse", 0.01, "fails"),
        ("better", "worse", 0.2, "open"),
        ("better", "equivalent", 1.0, "fails"),
        ("better", "undecided", 0.01, "open"),
        ("worse", "worse", 0.01, "holds"),
        ("worse", "better", 0.01, "fails"),
        ("worse", "equivalent", 1.0, "fails"),
        ("equivalent", "equivalent", 1.0, "holds"),
        ("equivalent", "worse", 0.01, "fails"),
        ("equivalent", "worse", 0.3, "open"),
        ("not worse", "better", 0.01, "holds"),
        ("not worse", "equivalent", 1.0, "holds"),
        ("not worse", "worse", 0.01, "fails"),
        ("not better", "worse", 0.01, "holds"),
        ("not better", "better", 0.01, "fails"),
        ("better", "better", float("nan"), "open"),
    ],
)
def test_a_difference_counts_if_it_survives_the_correction(
    expects: Any, verdict: str, corrected: float, state: State
) -> None:
    assert expected(expects, verdict, corrected) == state


@pytest.mark.parametrize(
    ("value", "low", "high", "at_least", "at_most", "state"),
    [
        (0.5, 0.4, 0.6, 0.4, None, "holds"),
        (0.5, 0.4, 0.6, 0.45, None, "open"),
        (0.5, 0.4, 0.6, 0.61, None, "fails"),
        (0.5, 0.4, 0.6, None, 0.6, "holds"),
        (0.5, 0.4, 0.6, None, 0.55, "open"),
        (0.5, 0.4, 0.6, None, 0.39, "fails"),
        (0.5, 0.4, 0.6, 0.3, 0.7, "holds"),
        (1.2, None, None, 1.1, None, "holds"),
        (1.0, None, None, 1.1, None, "fails"),
        (None, None, None, 1.1, None, "open"),
    ],
)
def test_a_number_keeps_its_bounds_with_its_whole_interval(
    value: Any, low: Any, high: Any, at_least: Any, at_most: Any, state: State
) -> None:
    assert bounded(Found(effect=value, low=low, high=high), at_least, at_most) == state


def test_a_law_counts_where_its_tests_pass() -> None:
    law = Law(of="it", tests=(LAW,))
    assert law.state(Found(outcome="passed"), 1.0) == "holds"
    assert replace(law, refutes=True).state(Found(outcome="passed"), 1.0) == "fails"
    for outcome in ("failed", "missing", ""):
        assert law.state(Found(outcome=outcome), 1.0) == replace(law, refutes=True).state(Found(), 1.0) == "open"


def test_faults_are_named_in_nine_of_ten_cases() -> None:
    named = Diagnosed(of="it", faults=("a",))
    assert named.state(Found(effect=0.9, low=0.5, high=1.0), 1.0) == "holds"
    assert named.state(Found(effect=0.5, low=0.1, high=0.95), 1.0) == "open"
    assert named.state(Found(effect=0.5, low=0.1, high=0.89), 1.0) == "fails"
    assert replace(named, refutes=True).state(Found(effect=0.9, low=0.5, high=1.0), 1.0) == "fails"
    assert replace(named, refutes=True).state(Found(effect=0.5, low=0.1, high=0.89), 1.0) == "open"


def term(state: State, of: str = "it") -> Term:
    return Term(evidence=Unmeasured(of=of, needs="time"), found=Found(), corrected=None, state=state)


@pytest.mark.parametrize(
    ("terms", "verdict"),
    [
        ([term("holds"), term("holds", "b")], "supported"),
        ([term("holds"), term("open")], "undecided"),
        ([term("holds"), term("fails")], "depends"),
        ([term("holds"), term("fails", "b"), term("open")], "depends"),
        ([term("fails"), term("fails")], "refuted"),
        ([term("fails"), term("open")], "undecided"),  # refuted on one task, open on the other
        ([term("fails"), term("open", "b")], "refuted"),  # one part of the claim fails wherever it was asked
        ([term("open")], "undecided"),
        ([], "undecided"),
    ],
)
def test_a_verdict_is_a_function_of_states(terms: list[Term], verdict: Verdict) -> None:
    assert settle(terms) == verdict
    assert settle(terms[::-1]) == verdict


# --- the family ------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_the_false_discovery_rate_is_scipys(p: list[float]) -> None:
    np.testing.assert_allclose(false_discovery(p), false_discovery_control(p), rtol=1e-12)


def test_no_tests_need_no_correction() -> None:
    assert false_discovery([]).size == 0
    assert family_of([Found()]).size == 0


def test_a_comparison_of_several_claims_counts_once_and_a_missing_one_counts() -> None:
    found = [
        Found(key=("a", "x", "copy"), p=0.01, verdict="better"),
        Found(key=("a", "x", "copy"), p=0.01, verdict="better"),
        Found(key=("b", "y", ""), missing="the study"),
        Found(effect=1.0),
    ]
    family = family_of(found)
    assert dict(family.p) == {("a", "x", "copy"): 0.01, ("b", "y", ""): 1.0}
    assert family.corrected["a", "x", "copy"] == 0.02
    assert (family.size, family.lost, family.left_by_holm) == (2, 0, 1)


def test_what_the_correction_takes_away_is_counted() -> None:
    shown = [Found(key=("a", str(i)), p=0.04, verdict="better") for i in range(2)]
    silent = [Found(key=("b", str(i)), p=0.9, verdict="undecided") for i in range(8)]
    family = family_of([*shown, *silent])
    assert (family.lost, family.left_by_holm) == (2, 0)
    assert family.most_seeds == fewest_seeds(10) == 9


# --- records ---------------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def study(
    folder: Path, scores: Mapping[str, list[float]], *, status: str = "finished", facts: Mapping[str, Any] | None = None
) -> Path:
    """A published study of one task, `base` its baseline; with `facts` a local one."""
    runs = [
        {"variant": variant, "task": "copy", "seed": seed, "score": score}
        for variant, own in scores.items()
        for seed, score in enumerate(own)
    ]
    import pandas as pd

    compared = compare(pd.DataFrame(runs), "base", 0.1).to_dict("records")
    known = {"baseline": "base", "tasks": ["copy"], "budget": "quick", "scored": "mean exact match"}
    write(folder / "comparison.csv", [{str(k): v for k, v in row.items()} for row in compared])
    more = {"status": status, "commit": "c0ffee", "eval/extrapolation": ""}
    write(
        folder / "runs.csv",
        [
            {**run, **more, "eval/extrapolation": run["score"], "fingerprint": f"{run['variant']}-{run['seed']}"}
            for run in runs
        ],
    )
    gates = [
        {"variant": name, "task": "copy", "gate_passed": f"{sum(s >= 0.98 for s in own)}.0", "gate_of": len(own)}
        for name, own in scores.items()
    ]
    write(folder / "tables" / "verdicts.csv", gates)
    name = "provenance.json" if facts is None else "study.json"
    (folder / name).write_text(json.dumps({**known, **(facts or {})}))
    return folder


LOW = [0.2, 0.3, 0.25, 0.22, 0.31, 0.28, 0.26, 0.24, 0.21]
HIGH = [score + 0.5 + 0.01 * (i % 3) for i, score in enumerate(LOW)]


def claim(*evidence: Evidence) -> Claim:
    return Claim(id="E99", where="ev 0", sentence="It matters.", settled_by=evidence)


def judged(results: Path, *evidence: Evidence, published_only: bool = False) -> Judged:
    ((found,), _) = judge(Records(results, published_only), [claim(*evidence)])
    return found


BETTER = Compared(of="it is better", study="s", variant="new", expects="better")


def test_the_verdict_follows_the_records(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    assert judged(tmp_path, BETTER).verdict == "undecided"
    assert judged(tmp_path, BETTER).remedies == ["the study: `harness ablate s`"]
    for scores, verdict in ((HIGH, "supported"), ([s - 0.2 for s in LOW], "undecided"), (LOW[::-1], "refuted")):
        study(reference / "s", {"base": LOW, "new": scores})
        if verdict == "undecided":  # a difference without variance convinces nobody
            assert judged(tmp_path, BETTER).remedies == ["10 seeds"]
        assert judged(tmp_path, BETTER).verdict == verdict
    study(reference / "s", {"base": HIGH, "new": LOW})
    found = judged(tmp_path, BETTER)
    assert found.verdict == "refuted"
    assert found.headline.effect == pytest.approx(-0.51)
    assert found.headline.low is not None
    assert found.headline.low < found.headline.effect
    assert found.terms[0].found.source["runs"] == [f"{arm}-{i}" for arm in ("base", "new") for i in range(9)]
    assert found.tuned is False
    assert "one learning rate for all variants" in "\n".join(lines(found))


def test_many_other_comparisons_take_a_difference_away(tmp_path: Path) -> None:
    study(tmp_path / "reference" / "s", {"base": LOW, "new": HIGH})
    others = [replace(BETTER, study=f"missing{i}") for i in range(13)]
    found = judged(tmp_path, BETTER, *others)  # p = 1/256, and fourteen of them
    assert found.terms[0].corrected == pytest.approx(14 / 256)
    assert found.terms[0].state == "open"
    assert "seeds" in found.remedies[0]


def test_a_finished_local_study_comes_before_the_published_one_and_a_tuned_one_before_both(tmp_path: Path) -> None:
    study(tmp_path / "reference" / "s", {"base": LOW, "new": HIGH})
    local = {"budget": "quick"}
    study(tmp_path / "s", {"base": HIGH, "new": LOW}, facts=local)
    assert judged(tmp_path, BETTER).verdict == "refuted"
    assert judged(tmp_path, BETTER, published_only=True).verdict == "supported"
    study(tmp_path / "reference" / "s-tuned", {"base": LOW, "new": HIGH})
    found = judged(tmp_path, BETTER)
    assert (found.verdict, found.tuned) == ("supported", True)
    assert found.terms[0].found.source["study"] == "s-tuned"


@pytest.mark.parametrize(("status", "budget"), [("partial", "quick"), ("missing", "full"), ("finished", "smoke")])
def test_an_unfinished_study_and_a_smoke_test_are_no_evidence(tmp_path: Path, status: str, budget: str) -> None:
    study(tmp_path / "reference" / "s", {"base": LOW, "new": HIGH})
    study(tmp_path / "s", {"base": HIGH, "new": LOW}, status=status, facts={"budget": budget})
    assert judged(tmp_path, BETTER).verdict == "supported"


def test_a_variant_that_a_study_lacks_is_open(tmp_path: Path) -> None:
    study(tmp_path / "reference" / "s", {"base": LOW, "new": HIGH})
    found = judged(tmp_path, replace(BETTER, variant="other"))
    assert found.verdict == "undecided"
    assert "other on copy in" in found.explanation


def test_a_corrupt_record_is_named(tmp_path: Path) -> None:
    study(tmp_path / "reference" / "s", {"base": LOW, "new": HIGH})
    (tmp_path / "reference" / "s" / "provenance.json").write_text("{")
    with pytest.raises(UserError, match=r"provenance.json is corrupt"):
        judged(tmp_path, BETTER)
    (tmp_path / "laws.json").write_text("[")
    with pytest.raises(UserError, match=r"laws.json is corrupt"):
        judged(tmp_path, Law(of="it", tests=(LAW,)))


def test_scores_shares_and_contrasts_are_read_from_runs(tmp_path: Path) -> None:
    solved = [1.0] * 9
    study(tmp_path / "reference" / "s", {"base": LOW, "new": HIGH, "solved": solved})
    scored = Scored(of="it scores", study="s", variant="new", at_least=0.5)
    assert judged(tmp_path, scored).verdict == "supported"
    assert judged(tmp_path, replace(scored, variant="base")).verdict == "refuted"
    assert judged(tmp_path, replace(scored, variant="base", at_least=0.25)).verdict == "undecided"
    learned = Learned(of="it learns", study="s", variant="solved")
    assert judged(tmp_path, learned).verdict == "supported"
    assert judged(tmp_path, learned).headline.low == pytest.approx(0.6637, abs=1e-4)
    assert judged(tmp_path, replace(learned, variant="base")).verdict == "refuted"
    contrast = Contrasted(
        of="it is more",
        study="s",
        measure=(("score", 1.0),),
        plus=("new", "solved"),
        minus=("base", "solved"),
        expects="better",
        margin=0.1,
    )
    found = judged(tmp_path, contrast)
    assert found.verdict == "supported"
    assert found.headline.effect == pytest.approx(0.51)
    swapped = replace(contrast, plus=contrast.minus, minus=contrast.plus)
    assert judged(tmp_path, swapped).verdict == "refuted"
    assert judged(tmp_path, replace(contrast, plus=("nobody",))).verdict == "undecided"
    assert judged(tmp_path, replace(contrast, measure=(("nothing", 1.0),))).verdict == "undecided"


PAGE = """
Words.

| on copy | spread | runs |
| --- | ---: | ---: |
| a\\|b | 0.50 \\[0.41, 0.59\\] | 0 of 9 |

| on sort | spread | 4,096 |
| --- | ---: | ---: |
| a\\|b | −1.5 | 1,234.5 |
| c | – | 2 |
"""


def test_numbers_are_read_from_tables_in_markdown(tmp_path: Path) -> None:
    assert number(cell(PAGE, "a|b", "spread") or "") == (0.5, 0.41, 0.59)
    assert number(cell(PAGE, "a|b", "spread", "on sort") or "") == (-1.5, None, None)
    assert number(cell(PAGE, "a|b", "4,096") or "") == (1234.5, None, None)
    share = number(cell(PAGE, "a|b", "runs") or "")
    assert share == (0.0, 0.0, pytest.approx(0.3363, abs=1e-4))
    assert number(cell(PAGE, "c", "spread") or "") is None
    assert cell(PAGE, "d", "spread") is None
    assert cell(PAGE, "c", "runs") is None
    (tmp_path / "reference" / "bench").mkdir(parents=True)
    (tmp_path / "reference" / "bench" / "report.md").write_text(PAGE)
    slower = Tabled(of="it is slower", folder="bench", row="a|b", over="c", column="4,096", at_least=600.0)
    assert judged(tmp_path, slower).verdict == "supported"
    assert judged(tmp_path, replace(slower, at_least=700.0)).verdict == "refuted"
    assert judged(tmp_path, replace(slower, row="d")).verdict == "undecided"
    assert judged(tmp_path, replace(slower, folder="none")).remedies == ["the report none"]


def test_faults_are_counted_over_their_cases(tmp_path: Path) -> None:
    rows = [
        {"fault": "3 no_mask", "cases": 4, "recall": 1},
        {"fault": "7 no_mask", "cases": 2, "recall": 0.5},
        {"fault": "rate too high", "cases": 40, "recall": 0.5},
    ]
    write(tmp_path / "reference" / "diagnostics" / "faults.csv", rows)
    found = judged(tmp_path, Diagnosed(of="it is named", faults=("no_mask",)))
    assert found.headline.effect == pytest.approx(5 / 6)
    assert found.verdict == "undecided"
    assert judged(tmp_path, Diagnosed(of="it is named", faults=("rate too high",))).verdict == "refuted"
    assert judged(tmp_path, Diagnosed(of="it is named", faults=("unknown",))).remedies == ["the faults: `make faults`"]


# --- laws ------------------------------------------------------------------------------------------------------------


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.components.test_a" name="test_x[1]"/>
<testcase classname="tests.components.test_a" name="test_x[2]"><failure/></testcase>
<testcase classname="tests.components.test_a" name="test_y"><skipped/></testcase>
<testcase classname="tests.components.test_a" name="test_z[1]"/>
<testcase classname="tests.components.test_a" name="test_z[2]"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_test_passes_if_all_of_its_cases_do() -> None:
    names = ("test_x", "test_x[1]", "test_y", "test_z", "test_absent")
    wanted = [f"tests/components/test_a.py::{name}" for name in names]
    outcomes = laws.outcomes_of(JUNIT, wanted)
    assert [*outcomes.values()] == ["failed", "passed", "missing", "passed", "missing"]


def test_laws_are_run_recorded_and_believed(tmp_path: Path) -> None:
    good = (
        "tests/test_wording.py::"
        + re.findall(r"^def (test_\w+)", (ROOT / "tests/test_wording.py").read_text(), re.M)[0]
    )
    law = Law(of="it", tests=(good,))
    assert judged(tmp_path, law).remedies == ["its tests to be run: `harness claims --run`"]
    assert laws.run([good, "tests/test_wording.py::test_of_nothing"], tmp_path)[good]["outcome"] == "passed"
    assert judged(tmp_path, law).verdict == "supported"
    assert judged(tmp_path, replace(law, refutes=True)).verdict == "refuted"
    gone = judged(tmp_path, Law(of="it", tests=(good, "tests/test_wording.py::test_of_nothing")))
    assert gone.remedies == ["the test tests/test_wording.py::test_of_nothing"]
    record = json.loads((tmp_path / "laws.json").read_text())
    record["laws"][good]["outcome"] = "failed"
    (tmp_path / "laws.json").write_text(json.dumps(record))
    assert judged(tmp_path, law).verdict == "undecided"
    assert judged(tmp_path, law).remedies == [f"{good} to pass"]


# --- the catalogue ---------------------------------------------------------------------------------------------------


def of_studies() -> list[tuple[str, Any]]:
    """Every piece of evidence that rests on a study's runs, with its claim."""
    kinds = Compared | Contrasted | Scored | Learned
    return [(c.id, each) for c in CLAIMS.values() for each in c.settled_by if isinstance(each, kinds)]


def test_claims_and_ablations_name_each_other() -> None:
    named = {name: set(find_ablation(name).ablation.claims) for name in ablation_files()}
    used: dict[str, set[str]] = {name: set() for name in named}
    for claim_ in CLAIMS.values():
        for each in claim_.settled_by:
            name = each.folder if isinstance(each, Tabled) else getattr(each, "study", "")
            if name in used:
                used[name].add(claim_.id)
    assert used == named


def test_every_variant_and_task_is_there() -> None:
    for name, each in of_studies():
        ablation = find_ablation(each.study).ablation
        variants = (each.plus + each.minus) if isinstance(each, Contrasted) else (each.variant,)
        assert set(variants) <= set(ablation.variants), name
        assert set(each.tasks) <= set(ablation.tasks), name
        assert not isinstance(each, Compared) or each.variant != ablation.baseline, name


def test_every_law_is_there() -> None:
    missing = [test for c in CLAIMS.values() for law in c.settled_by if isinstance(law, Law) for test in law.tests
               if not laws.there(test)]  # fmt: skip
    assert missing == []


def test_every_claim_that_a_test_names_is_there() -> None:
    named = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for line in file.read_text().splitlines()
        if "CLAIMS" in line and line.lstrip().startswith("#")
        for name in re.findall(r"\b[DE]\d\d\b", line)
    }
    assert named <= set(CLAIMS)


def test_claims_are_told_apart() -> None:
    assert len(CLAIMS) == 62
    for name, each in CLAIMS.items():
        assert re.fullmatch(r"[DE]\d\d", name)
        assert each.sentence.endswith(".")
        assert each.settled_by
        labels = [(type(piece), piece.of) for piece in each.settled_by]
        assert len(set(labels)) == len(labels), name
        assert not any("," in piece.of for piece in each.settled_by), name  # they are listed in a sentence


def test_each_published_number_is_found() -> None:
    # What a published record lacks would quietly leave a claim undecided.
    every, _ = judge(Records(REFERENCE, published_only=True))
    lacking = {
        f"{each.claim.id}: {piece.found.missing}" for each in every for piece in each.terms if piece.found.missing
    }
    assert lacking == set()
    assert missing_studies(every) == []


# --- what is published -----------------------------------------------------------------------------------------------


def test_the_published_page_is_what_the_published_records_say() -> None:
    assert (REFERENCE / "reference" / "claims.md").read_text() == republished(REFERENCE)
    record = json.loads((REFERENCE / "reference" / "claims.json").read_text())
    every, _ = judge(Records(REFERENCE, published_only=True))
    assert {c["id"]: c["verdict"] for c in record["claims"]} == {each.claim.id: each.verdict for each in every}
    assert set(record["laws"]) == set(laws_of(every))


def test_the_summary_in_readme_is_what_the_published_records_say() -> None:
    every, family = judge(Records(REFERENCE, published_only=True))
    assert block(every, family) in (ROOT / "README.md").read_text()


def test_publishing_repeats_itself(tmp_path: Path) -> None:
    shutil.copytree(REFERENCE / "reference", tmp_path / "reference", ignore=shutil.ignore_patterns("*.png", "*.svg"))
    before = json.loads((tmp_path / "reference" / "claims.json").read_text())
    publish(tmp_path)
    after = json.loads((tmp_path / "reference" / "claims.json").read_text())
    assert after | {"commit": ""} == before | {"commit": ""}


# --- the command -----------------------------------------------------------------------------------------------------


def test_every_claim_has_a_row(call: Caller) -> None:
    code, out, _ = call("claims", "--json", "--results", REFERENCE)
    document = json.loads(out)
    assert code == 0
    assert [row["id"] for row in document["claims"]] == list(CLAIMS)
    assert set(document["claims"][0]) >= {"id", "verdict", "effect", "low", "high", "evidence", "sentence"}
    by_verdict = {v: [row["id"] for row in document["claims"] if row["verdict"] == v]
                  for v in ("supported", "refuted", "depends", "undecided")}  # fmt: skip
    assert document["summary"]["verdicts"] == by_verdict
    code, out, _ = call("claims", "--results", REFERENCE)
    assert code == 0
    assert all(re.search(rf"^{name} ", out, re.M) for name in CLAIMS)


def test_one_claim_is_shown_whole(call: Caller) -> None:
    code, out, _ = call("claims", "e37", "--results", REFERENCE)
    assert code == 0
    for said in ("RoPE extrapolates much better", "rule: RoPE is better in the study position", "Kazemnejad",
                 "against sinusoidal", "corrected for all claims", "again: harness ablate position"):  # fmt: skip
        assert said in out
    runs = (REFERENCE / "reference/position/runs.csv").read_text()
    assert re.findall(r"\b[0-9a-f]{16}\b", out)[0] in runs


def test_without_records_everything_is_undecided(call: Caller, tmp_path: Path) -> None:
    code, out, _ = call("claims", "--json", "--results", tmp_path)
    assert code == 0
    assert {row["verdict"] for row in json.loads(out)["claims"]} == {"undecided"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["E370"], "there is no claim 'E370'; did you mean 'E37'?"), (["--publish", "E37"], "leave out E37")],
)
def test_a_bad_request_is_one_sentence(call: Caller, arguments: list[str], said: str) -> None:
    code, out, err = call("claims", *arguments, "--results", REFERENCE)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_what_is_missing_is_run(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import conduct

    asked: list[tuple[str, str]] = []
    ends = [conduct.Outcome(tmp_path, {"finished": 1}), conduct.Outcome(tmp_path, {}, interrupted=True)]

    def run_study(_: object, *, name: str, budget: str, **__: object) -> conduct.Outcome:
        asked.append((name, budget))
        return ends[len(asked) - 1]

    monkeypatch.setattr(conduct, "run_study", run_study)
    monkeypatch.setattr(laws, "run", lambda tests, results: {test: {"outcome": "failed"} for test in tests})
    code, _, _ = call("claims", "--run", "E12", "--results", tmp_path)
    assert (code, asked) == (130, [("position", "quick"), ("rope-scaling", "quick")])
    ends[1:] = [ends[0]] * 2
    asked.clear()
    code, _, _ = call("claims", "--run", "E12", "--results", tmp_path)
    assert (code, len(asked)) == (1, 2)  # a law failed
