"""`harness compare`: what differs between runs and between studies, what is refused, what is printed."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hand_made import study as made
from hypothesis import given
from hypothesis import strategies as st
from small_study import plan, small

from harness import run
from harness.comparison import Run, Study, find, of_runs, of_studies, read_run, tables
from harness.comparison.curve import LOST, Scale, binned, drawing
from harness.comparison.differences import differing
from harness.comparison.runs import exact_match, loss_curve
from harness.comparison.tables import value
from harness.components.position import NoPE, Sinusoidal
from harness.record import Diagnosed, RunRecord, Score
from harness.report.tables import Findings, score_summaries
from harness.results import load_study
from harness.schema import UserError
from harness.stats import clopper_pearson, summary_interval
from harness.study import write_plan

SPEC = {
    "model": {"position": {"kind": "RoPE", "base": 10000.0}, "num_heads": 2},
    "task": {"kind": "Copy", "lengths": {"train": [1, 2], "test": [3]}},
    "train": {"sampling": {"kind": "Fresh"}, "eval_samples": 64},
    "seed": 0,
}
ALARM = Diagnosed(
    probe="causal_leak", alarm=True, rank=1, value=1.0, symptom="it sees the future", measures="m", healthy="h",
    cause="c", remedy="r", source="s",
)  # fmt: skip
Caller = Callable[..., tuple[int, str, str]]


def record(name: str = "one", **changes: Any) -> RunRecord:
    scores = tuple(
        Score(length=n, metric=m, value=x) for n, x in ((1, 1.0), (3, 0.75)) for m in ("exact_match", "other")
    )
    fields: dict[str, Any] = {"fingerprint": name, "spec": SPEC, "status": "finished", "scores": scores}
    return RunRecord(**fields | changes)


def run_of(found: RunRecord | None, curves: list[dict[str, float]] | None = None, spec: Any = SPEC) -> Run:
    return Run(Path("somewhere"), found.spec if found else spec, found, curves or [], {})


# Fields


FLAT = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([None, 1, True, "x", [1, 2]]))


@given(st.lists(FLAT, min_size=2, max_size=4))
def test_exactly_the_fields_that_differ_are_named_and_nothing_is_lost(documents: list[dict[str, Any]]) -> None:
    keyed = dict(zip("ABCD", documents, strict=False))
    rows = {row["field"]: row["values"] for row in differing(keyed)}
    for field in "abcd":
        told = [json.dumps(own[field]) if field in own else "absent" for own in documents]  # in JSON True is no 1
        assert (field in rows) == (len(set(told)) > 1)
        if field in rows:
            assert rows[field] == {key: own[field] for key, own in keyed.items() if field in own}


def test_a_level_and_its_fields_are_dotted_paths_and_what_is_absent_is_not_none() -> None:
    other = SPEC | {"model": {"position": {"kind": "NoPE"}, "num_heads": None}}
    document = of_runs([run_of(record()), run_of(record(spec=other))])
    assert document["spec"] == [
        {"field": "model.position", "values": {"A": "RoPE", "B": "NoPE"}},
        {"field": "model.position.base", "values": {"A": 10000.0}},
        {"field": "model.num_heads", "values": {"A": 2, "B": None}},
    ]
    table = next(each for each in tables(document, 80) if "fields of the spec" in each.title)
    assert table.title.startswith("3 of ")
    assert [list(row) for row in table.rows] == [
        ["model.position", "RoPE", "NoPE"], ["model.position.base", "10000.0", "–"], ["model.num_heads", "2", "none"],
    ]  # fmt: skip


def test_equal_specs_are_said_to_be_equal() -> None:
    document = of_runs([run_of(record("one")), run_of(record("two"))])
    assert document["spec"] == []
    assert f"all {document['spec_fields']} fields of the spec are the same" in [t.title for t in tables(document, 80)]


def test_values_are_short_and_unambiguous() -> None:
    assert value([1, 8]) == "[1, 8]"  # a range's ends: no list of two
    assert value([5, 6, 7, 9]) == "5–7, 9"
    assert value([6, 5, 7]) == "[6, 5, 7]"
    assert (value(True), value(None), value("x"), value(0.003)) == ("yes", "none", "x", "0.003")
    assert value("0123456789" * 4 + " (2 runs)") == "0123456789 (2 runs)"


# Exact match


def test_an_interval_is_that_of_the_sequences_at_a_length() -> None:
    first, second = exact_match(record())
    low, high = clopper_pearson(16, 64)  # failures
    assert (second["length"], second["split"], second["value"], second["samples"]) == (3, "test", 0.75, 64)
    assert (second["low"], second["high"]) == pytest.approx((1 - high, 1 - low))
    assert second["low"] < 0.75 < second["high"]
    assert (first["split"], first["high"]) == ("train", 1.0)
    assert first["low"] == pytest.approx(0.025 ** (1 / 64))  # none failed of 64: its closed form


@pytest.mark.parametrize("mark", ["unsupported", "diverged"])
def test_what_was_not_measured_has_no_interval(mark: Any) -> None:
    (only,) = exact_match(record(scores=(Score(length=3, metric="exact_match", value=0.0, mark=mark),)))
    assert (only["low"], only["high"], only["mark"]) == (None, None, mark)


def test_an_unknown_number_of_sequences_gives_no_interval() -> None:
    finite = SPEC | {"train": {"sampling": {"kind": "Finite"}, "eval_samples": 64}}
    scores = [
        Score(length=1, metric="exact_match", value=1.0, mark="seen"),  # of which all are kept
        Score(length=2, metric="exact_match", value=1.0),
        Score(length=3, metric="exact_match", value=1.0),
    ]
    found = list(exact_match(record(spec=finite, scores=tuple(scores))))
    assert [score["low"] is None for score in found] == [False, True, False]
    (odd,) = exact_match(record(scores=(Score(length=3, metric="exact_match", value=0.333),)))
    assert odd["low"] is None  # no whole number of 64
    (bare,) = exact_match(record(spec={}, scores=scores[:1]))
    assert bare["low"] is None


# Curves


def test_a_curve_has_its_first_last_and_smallest_loss() -> None:
    lines = [{"step": 10, "train/loss": 2.0}, {"step": 20, "gradient": 1.0}, {"step": 30, "train/loss": 0.5}]
    curve = loss_curve([*lines, {"step": 40, "train/loss": 1.0}])
    assert curve is not None
    assert (curve["first"], curve["last"], curve["minimum"], curve["minimum_step"]) == (2.0, 1.0, 0.5, 30)
    assert curve["steps"] == [10, 30, 40]
    assert loss_curve(lines[1:2]) is None
    lost = loss_curve([{"step": 1, "train/loss": math.nan}])
    assert lost is not None
    assert lost["minimum_step"] is None


def test_curves_share_their_steps_and_end_where_they_end() -> None:
    assert binned([0, 50, 100], [3.0, 2.0, 1.0], 100, 4) == [3.0, 3.0, 2.0, 1.0]
    assert binned([0, 50], [3.0, 2.0], 100, 4) == [3.0, 3.0, 2.0, None]
    assert binned([50, 60], [3.0, 2.0], 100, 4) == [None, None, 2.5, None]
    lost = binned([0, 100], [3.0, math.inf], 100, 2)
    assert lost[0] == 3.0
    assert lost[1] is not None
    assert math.isnan(lost[1])


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), st.integers(1, 4))
def test_a_higher_loss_is_never_drawn_lower(losses: list[float], height: int) -> None:
    scale = Scale(min(losses), max(losses))
    lines = drawing(losses, scale, height)
    assert len(lines) == height
    drawn = [sum(" ▁▂▃▄▅▆▇█".index(line[i]) for line in lines) for i in range(len(losses))]
    assert min(drawn) == 1
    assert max(drawn) in (1, 8 * height)
    assert max(drawn) == 8 * height or scale.low == scale.high or math.log(scale.high / scale.low) < 1e-9
    for one, its in zip(losses, drawn, strict=True):
        assert all(its <= other for larger, other in zip(losses, drawn, strict=True) if larger >= one)


def test_what_is_not_finite_has_a_mark_and_no_bar() -> None:
    assert drawing([1.0, math.nan, None, 2.0], Scale(1.0, 2.0), 2) == ["   █", f"▁{LOST} █"]
    assert not Scale(0.0, 1.0).logarithmic
    assert Scale(0.0, 1.0).level(0.5, 9) == 5
    assert Scale(0.01, 1.0).level(0.1, 9) == 5


def test_two_curves_are_drawn_on_one_scale() -> None:
    high = [{"step": 0, "train/loss": 100.0}, {"step": 10, "train/loss": 10.0}]
    low = [{"step": 0, "train/loss": 10.0}, {"step": 5, "train/loss": math.nan}, {"step": 10, "train/loss": 1.0}]
    document = of_runs([run_of(record("one"), high), run_of(record("two"), low)])
    table = next(each for each in tables(document, 60) if each.title.startswith("train/loss"))
    assert table.title == f"train/loss over 10 steps, logarithmic from 1 to 100 ({LOST}: not finite)"
    (one, two), width = ([row[1].split("\n") for row in table.rows]), 60 - 44
    assert [len(lines) for lines in (one, two)] == [3, 3]
    assert all(len(line) == width for line in one + two)
    assert [line[0] for line in one] == ["█", "█", "█"]
    assert [line[-1] for line in one] == [line[0] for line in two]  # 10 is as high in both
    assert [line[-1] for line in two] == [" ", " ", "▁"]
    assert [list(row[2:]) for row in table.rows] == [["100", "10", "10 at 10"], ["10", "1", "1 at 10"]]


# Outcomes


def test_costs_that_are_unequal_are_marked_and_absent_ones_are_a_dash() -> None:
    costs = {"cache_bytes": 2048, "inference_flops": 5e6}
    one = record("one", ledger={"parameters": 1000, "flops": 1e9, "wall_seconds": 10.0, "device": "cpu", **costs})
    two = record("two", ledger={"parameters": 1200, "flops": 1.01e9, "device": "cuda"}, final={"eval/loss": math.nan})
    (table,) = (t for t in tables(of_runs([run_of(one), run_of(two)]), 80) if t.title.startswith("final"))
    assert [list(row) for row in table.rows] == [
        ["parameters", "1,000", "1,200 (+20 %)"], ["flops", "1.00e+09", "1.01e+09"],
        ["inference_flops", "5.00e+06", "–"], ["wall_seconds", "10 s", "–"], ["cache_bytes", "2,048", "–"],
        ["device", "cpu", "cuda"],
    ]  # fmt: skip


def test_each_run_has_its_diagnosis() -> None:
    ill, well = record("ill", findings=(ALARM,)), record("well", ledger={"diagnostics": "training"})
    document = of_runs([run_of(ill), run_of(well), run_of(record("dark")), run_of(None)])
    *_, table = tables(document, 80)
    assert [list(row) for row in table.rows] == [
        ["A", "causal_leak", "it sees the future"], ["B", "–", "nothing alarms"], ["C", "–", "not examined"],
        ["D", "–", "not started"],
    ]  # fmt: skip
    assert [run["diagnosis"] for run in document["runs"]] == ["causal_leak", "", "", ""]


def test_a_run_that_failed_or_has_not_ended_is_compared_all_the_same() -> None:
    failed = record("failed", status="failed", cause="ValueError: boom", scores=())
    document = of_runs([run_of(failed), run_of(None, [{"step": 1, "train/loss": 2.0}])])
    first, *rest = tables(document, 80)
    assert [row[-1] for row in first.rows] == ["failed: ValueError: boom", "interrupted"]
    assert not any(table.title.startswith("exact match") for table in rest)


# Studies


def studies(*found: Findings) -> dict[str, Any]:
    return of_studies([Study(each.data, score_summaries(each.data), each.verdicts) for each in found])


def by_variant(variant: str, task: str, seed: int) -> float:
    return {"base": 0.2, "one": 0.6, "two": 0.4}[variant] + 0.01 * (seed % 3)


@pytest.fixture
def two_studies(tmp_path: Path) -> tuple[Findings, Findings]:
    here = made(tmp_path / "here", ("base", "one"), axes=("model.norm",), seeds=9, score=by_variant)
    there = made(
        tmp_path / "there", ("base", "two", "one"), axes=("model.norm",), tasks=("copy", "sort"), score=by_variant,
        model={"d_model": 32}, budget="full", differences={"one": {"model.norm": "RMSNorm"}},
    )  # fmt: skip
    return here, there


def test_studies_differ_in_their_plans(two_studies: tuple[Findings, Findings]) -> None:
    rows = {row["field"]: row["values"] for row in studies(*two_studies)["plan"]}
    assert rows == {
        "budget": {"A": "quick", "B": "full"},
        "seeds": {"A": list(range(9)), "B": [0, 1, 2]},
        "model.d_model": {"A": 16, "B": 32},
        "variants.one.model.norm": {"B": "RMSNorm"},
    }


def test_scores_are_those_of_the_report_and_verdicts_each_study_s_own(two_studies: tuple[Findings, Findings]) -> None:
    document = studies(*two_studies)
    assert [(row["task"], row["variant"], row["study"]) for row in document["scores"]] == [
        ("copy", "base", "A"), ("copy", "base", "B"), ("copy", "one", "A"), ("copy", "one", "B"),
    ]  # fmt: skip
    for row in document["scores"]:
        data = two_studies["AB".index(row["study"])].data
        scores = data.primary()
        own = scores[(scores["variant"] == row["variant"]) & (scores["task"] == row["task"])]["score"]
        assert (row["mean"], row["low"], row["high"]) == pytest.approx(summary_interval(own))
        assert row["low"] < row["mean"] < row["high"]
        verdicts = data.compare()
        said = verdicts[(verdicts["variant"] == row["variant"]) & (verdicts["task"] == row["task"])]["verdict"]
        assert [row["verdict"]] == (said.to_list() or ["baseline"])
    assert document["only"] == {
        "A": {"variants": [], "tasks": []}, "B": {"variants": ["two"], "tasks": ["sort"]},
    }  # fmt: skip
    assert "only in B: variants two; tasks sort" in [table.title for table in tables(document, 80)]


def test_equal_differences_of_variants_are_no_difference(tmp_path: Path) -> None:
    common: dict[str, Any] = {"axes": ("model.norm",), "differences": {"one": {"model.norm": "RMSNorm"}}}
    one = made(tmp_path / "one", ("base", "one"), **common)
    two = made(tmp_path / "two", ("base", "one"), **common)
    document = studies(one, two)
    assert document["plan"] == []
    assert "the plans are the same" in [table.title for table in tables(document, 80)]


def test_scores_of_different_things_are_marked(tmp_path: Path) -> None:
    one = made(tmp_path / "one", ("base", "one"), axes=("model.norm",))
    two = made(tmp_path / "two", ("base", "one"), axes=("model.norm",), test_lengths={"copy": [5]}, pilot=True)
    notes = studies(one, two)["notes"]
    assert notes[0].startswith("on copy the studies score different things")
    assert notes[1:] == ["B is a pilot, which gets no verdict"]
    assert studies(one, one)["notes"] == []


def test_studies_without_a_common_variant_say_so(tmp_path: Path) -> None:
    one = made(tmp_path / "one", ("a", "b"), axes=("model.norm",))
    two = made(tmp_path / "two", ("c", "d"), axes=("model.norm",))
    titles = [table.title for table in tables(studies(one, two), 80)]
    assert "the studies have no variant and task in common" in titles
    assert "only in A: variants a, b" in titles


# Names, and the command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with two studies of real runs: `small`, and `smaller`, which has one variant's runs of it."""
    results = tmp_path_factory.mktemp("results")
    variants = {"sinusoidal": {"model.position": Sinusoidal()}, "none": {"model.position": NoPE()}}
    made = plan(small(tasks={"copy": small().tasks["copy"]}, variants=variants), "smoke")
    write_plan(made, results / "small", {})
    for cell in made.cells:
        run(cell.spec, directory=results / "small" / "runs" / cell.fingerprint)
    (results / "small" / "runs" / made.cells[0].fingerprint / "mirror.json").write_text('{"run_id": "an-mlflow-id"}')
    shutil.copytree(results / "small", results / "smaller")
    document = json.loads((results / "smaller" / "study.json").read_text())
    document |= {"study": "smaller", "commit": "another", "seeds": [0], "runs": document["runs"][:2]}
    (results / "smaller" / "study.json").write_text(json.dumps(document))
    for cell in made.cells[2:]:
        shutil.rmtree(results / "smaller" / "runs" / cell.fingerprint)
    (results / "smaller" / "runs" / made.cells[0].fingerprint / "mirror.json").unlink()
    return results


@pytest.fixture
def results(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "results")


@pytest.fixture
def call(call: Caller, results: Path) -> Caller:
    """Run `harness compare` in this process: exit code, stdout, stderr."""
    return lambda *arguments: call("compare", *arguments, "--results", results)


def prints(results: Path, study: str = "small") -> list[str]:
    """Fingerprints in the plan's order: sinusoidal and none with seed 0, then with seed 1."""
    return [cell["fingerprint"] for cell in json.loads((results / study / "study.json").read_text())["runs"]]


def test_runs_and_studies_are_found_by_every_name(results: Path) -> None:
    runs = results / "small" / "runs"
    first, _, third, _ = prints(results)
    for name in ("an-mlflow-id", runs / first, runs / first / "model.pt"):
        assert find([str(name), third], results) == ("run", [runs / first, runs / third])
    for name in ("small", "small.py", results / "small", results / "small" / "study.json"):
        assert find([str(name), "smaller"], results) == ("study", [results / "small", results / "smaller"])


REFUSED = {
    "one name": (["small"], "a comparison takes 2 to 26 names, not 1; name runs, or studies"),
    "no name": ([], "missing: NAME; see `harness compare --help`"),
    "unknown": (["small", "smal"], "'smal' is neither a run nor a study; name a run's fingerprint, MLflow run id or"),
    "nearest": (["small", "smalle"], "did you mean 'smaller'? known: small, smaller (studies)"),
    "a folder of neither": (["small", "."], ".: this is neither a run nor a study"),
    "a name as long as a novel": (["small", "x" * 5000], "is neither a run nor a study"),
    "both kinds": (["small", "{third}"], "'{third}' is a run and 'small' a study; compare runs with runs, or studies"),
    "twice": (["{third}", "{results}/small/runs/{third}"], "are the same run; name two different ones"),
    "in two studies": (["{first}", "{third}"], "'{first}' means the run {results}/small/runs/{first} and the run {res"),
    "published": (["small", "{results}/reference/heads"], "a published report holds no records; run `harness ablate h"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused_in_a_sentence(
    case: str, call: Caller, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (results / "reference" / "heads").mkdir(parents=True)
    (results / "reference" / "heads" / "provenance.json").write_text("{}")
    first, _, third, _ = prints(results)
    names, sentence = REFUSED[case]
    words = {"results": str(results), "first": first, "third": third}
    code, out, err = call(*(name.format(**words) for name in names))
    assert (code, out) == (2, "")
    assert err.startswith("harness: ")
    assert err.count("\n") == 1
    assert sentence.replace("{res", "{results}").replace("{results}ults}", "{results}").format(**words) in err
    code, out, _ = call(*(name.format(**words) for name in names), "--json")
    assert code == 2
    assert json.loads(out)["exit_code"] == 2


def test_a_study_here_and_one_of_the_same_name_in_the_results_are_two(
    call: Caller, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(results / "small", tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    code, _, err = call("small", "smaller")
    assert code == 2
    assert f"'small' means the study small and the study {results / 'small'}; name the folder of one" in err
    assert call("./small", "smaller")[0] == 0
    assert call("./small", results / "small")[0] == 0


def test_a_corrupt_record_plan_or_spec_is_said_in_a_sentence(call: Caller, results: Path) -> None:
    _, second, third, _ = prints(results)
    folder = results / "small" / "runs" / third
    path = folder / "record.json"
    path.write_text(path.read_text()[:100])
    for names in (("small", "smaller"), (third, results / "smaller" / "runs" / second)):
        code, out, err = call(*names)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"{path}: this is not a run record" in err
    shutil.copy(results / "small" / "runs" / second / "record.json", path)
    assert "this is the record of another run" in call(third, results / "smaller" / "runs" / second)[2]
    path.unlink()
    for content in ("{", "[]"):
        (folder / "spec.json").write_text(content)
        assert "spec.json: " in call(third, results / "smaller" / "runs" / second)[2]
    (results / "small" / "study.json").write_text("{")
    code, _, err = call("small", "smaller")
    assert code == 2
    assert "study.json is corrupt" in err


def test_a_run_outside_of_a_study_needs_no_name(results: Path, tmp_path: Path) -> None:
    first, second, *_ = prints(results)
    shutil.copytree(results / "small" / "runs" / first, tmp_path / "mine")
    (tmp_path / "mine" / "mirror.json").write_text("[]")  # of no use, and no reason to fail
    alone = of_runs([read_run(tmp_path / "mine"), read_run(results / "small" / "runs" / second)])
    assert [run["variant"] for run in alone["runs"]] == [None, "none"]
    assert [run["fingerprint"] for run in alone["runs"]] == [first, second]


def test_runs_are_compared_in_text_and_as_json(call: Caller, results: Path) -> None:
    _, _, third, fourth = prints(results)
    code, out, err = call(third, fourth)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [" ".join(line.split()) for line in lines[1:3]] == [
        f"A {third} small sinusoidal copy 1 finished", f"B {fourth} small none copy 1 finished",
    ]  # fmt: skip
    assert "model.position       Sinusoidal  NoPE" in lines
    assert any(line.startswith("exact match, with its 95 % interval") for line in lines)
    assert any(line.startswith("train/loss over 10 steps, logarithmic") for line in lines)
    code, out, _ = call(third, fourth, "--json")
    document = json.loads(out)  # one document and nothing else
    assert (code, document["kind"], [run["key"] for run in document["runs"]]) == (0, "runs", ["A", "B"])
    found = RunRecord.read(results / "small" / "runs" / fourth / "record.json")
    second = document["runs"][1]
    assert second["final"]["eval/loss"] == found.final["eval/loss"]
    assert second["ledger"]["parameters"] == found.ledger["parameters"]
    assert second["loss"]["last"] == found.final["train/loss"]
    assert [score["value"] for score in second["exact_match"]] == [
        score.value for score in found.scores if score.metric == "exact_match"
    ]
    assert all(score["low"] <= score["value"] <= score["high"] for score in second["exact_match"])
    assert {score["split"] for score in second["exact_match"]} == {"train", "test"}


def test_studies_are_compared_in_text_and_as_json(call: Caller, results: Path) -> None:
    code, out, err = call("small", "smaller")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"A small smoke 4/4 0–1 exact match {results / 'small'}" in lines
    assert "seeds [0, 1] [0]" in lines
    assert any(line.startswith("copy none A 0.0") and "undecided" in line for line in lines)
    code, out, _ = call("small", "smaller", "--json")
    document = json.loads(out)
    assert (code, document["kind"]) == (0, "studies")
    one = load_study(results / "small").primary().groupby("variant")["score"].mean()
    means = {row["variant"]: row["mean"] for row in document["scores"] if row["study"] == "A"}
    assert means == pytest.approx(dict(one))
    lonely = next(row for row in document["scores"] if row["study"] == "B")
    assert lonely["low"] is None  # of one seed


def test_more_than_two_are_compared(call: Caller, results: Path) -> None:
    _, second, third, fourth = prints(results)
    code, out, _ = call(results / "small" / "runs" / second, third, fourth, "--json")
    assert code == 0
    assert [run["key"] for run in json.loads(out)["runs"]] == ["A", "B", "C"]


def test_neither_runs_nor_studies_need_torch(results: Path) -> None:
    _, _, third, fourth = prints(results)
    code = (
        "import sys\nfrom harness.cli import main\n"
        f"assert main(['compare', '{third}', '{fourth}', '--results', '{results}']) == 0\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"assert main(['compare', 'small', 'smaller', '--results', '{results}']) == 0\n"
        "assert not {'torch', 'mlflow', 'pytorch_lightning'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_too_many_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a comparison takes 2 to 26 names, not 27"):
        find(["x"] * 27, tmp_path)
