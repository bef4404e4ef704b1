"""Sweeps with real studies, real workers and a real journal."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from small_study import LENGTHS, SWEPT, small

from harness.cli import main
from harness.components.position import NoPE
from harness.components.scale import InverseSqrt
from harness.record import RunRecord
from harness.report.sweep import budgets, stable_rates, write_sweep
from harness.schema import UserError
from harness.sources import load_source
from harness.space import Choice, FloatRange, Space
from harness.spec import RunSpec
from harness.study import Ablation, make_plan
from harness.sweep import SweepOutcome, best_of, open_storage, plan_sweep, run_sweep
from harness.tuned import content, read_tuned, tuned_ablation
from tasks import Copy, Reverse

ROOT = Path(__file__).parents[1]
RATE = "train.learning_rate"
RATES = FloatRange(low=1e-4, high=10.0, log=True)


def tiny(**changes: Any) -> Ablation:
    """Two variants on one task, one pilot seed, ten steps without clipping."""
    base = small()
    fields = {
        "tasks": {"copy": Copy(lengths=LENGTHS)},
        "variants": {"sinusoidal": {}, "none": {"model.position": NoPE()}},
        "train": base.train.replaced({"gradient_clip": None, "steps": 10, "eval_every": 5}),
        "space": Space(fields={RATE: RATES}, seeds=1),
    }
    return small(**{**fields, **changes})


def sweep(ablation: Ablation, results: Path, **asked: Any) -> SweepOutcome:
    return run_sweep(ablation, name="tiny", results=results, **{"budget": "quick", "jobs": 1, "trials": 3, **asked})


def settled(outcome: SweepOutcome) -> pd.DataFrame:
    """The trials that count, in columns that another sweep of the same must share."""
    found = outcome.table[~outcome.table["status"].isin(("interrupted", "running"))]
    return found.sort_values(["variant", "trial"]).reset_index(drop=True)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepOutcome]:
    """A sweep of four trials for each of two variants, three runs at a time."""
    results = tmp_path_factory.mktemp("sweep")
    return results, sweep(tiny(), results, trials=4, jobs=2)


def test_every_variant_has_the_same_budget_and_all_are_recorded(swept: tuple[Path, SweepOutcome]) -> None:
    results, outcome = swept
    table = pd.read_csv(results / "tiny/sweep/trials.csv")
    assert table.groupby("variant").size().to_dict() == {"sinusoidal": 4, "none": 4}
    assert set(table["status"]) <= {"finished", "pruned", "diverged"}
    assert table.loc[table["status"] == "finished", "score"].notna().all()
    assert outcome.exit_code == 0
    for name in ("summary.md", "tuned.json", "budgets.csv", "stable.csv", "importances.csv", "sweep.json"):
        assert (results / "tiny/sweep" / name).stat().st_size > 0
    assert (results / "tiny/sweep/figures/sensitivity_learning_rate.png").exists()


def test_the_first_settings_are_the_ablations_own_and_then_the_same_for_all(swept: tuple[Path, SweepOutcome]) -> None:
    rates = {variant: own[RATE].tolist() for variant, own in swept[1].table.groupby("variant")}
    assert rates["none"] == rates["sinusoidal"]
    assert rates["none"][0] == tiny().train.learning_rate


def test_runs_have_pilot_seeds_and_samples_that_no_final_run_has(swept: tuple[Path, SweepOutcome]) -> None:
    results, _ = swept
    specs = [json.loads(path.read_text()) for path in results.glob("tiny/sweep/runs/*/spec.json")]
    assert len(specs) == 8
    assert all(spec["seed"] >= 1000 and spec["samples"] == "tuning" for spec in specs)
    final = make_plan("tiny", tiny(), budget="quick", seeds=9, device="cpu", pilot=True)
    assert not {cell.fingerprint for cell in final.cells} & {path.name for path in results.glob("tiny/sweep/runs/*")}


def test_a_score_is_what_the_final_comparison_would_make_of_the_runs(swept: tuple[Path, SweepOutcome]) -> None:
    results, outcome = swept
    for row in outcome.table[outcome.table["status"] == "finished"].to_dict("records"):
        record = RunRecord.read(results / "tiny/sweep/runs" / row["runs"] / "record.json")
        exact = [score.value for score in record.scores if score.metric == "exact_match" and score.length in (4, 5)]
        assert row["score"] == pytest.approx(sum(exact) / 2)
        assert row["loss"] == record.final["eval/loss"]
        assert row["steps"] == 10


def test_a_finished_sweep_runs_nothing_and_a_larger_budget_only_what_is_new(swept: tuple[Path, SweepOutcome]) -> None:
    results, outcome = swept
    runs = {path: path.stat().st_mtime_ns for path in results.glob("tiny/sweep/runs/*/curves.jsonl")}
    said: list[str] = []
    again = sweep(tiny(), results, trials=4, say=said.append)
    assert len(said) == 1
    assert again.table.equals(outcome.table)
    more = sweep(tiny(), results, trials=5)
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    assert more.table.groupby("variant").size().tolist() == [5, 5]
    kept = more.table[more.table["trial"] < 4].reset_index(drop=True)
    assert kept.equals(outcome.table.reset_index(drop=True))


def test_tuned_variants_have_their_own_best_setting_in_a_study_of_their_own(swept: tuple[Path, SweepOutcome]) -> None:
    results, _ = swept
    ablation = tiny()
    found = read_tuned(results, "tiny", ablation, "quick")
    tuned = tuned_ablation(ablation, "quick", found)
    for variant, answer in found["variants"].items():
        spec = tuned.run_spec(variant, "copy", seed=0, device="cpu", budget="quick")
        assert spec.at(RATE) == answer["changes"][RATE]
        assert spec.samples == "final"
        before = ablation.run_spec(variant, "copy", seed=0, device="cpu", budget="quick")
        assert spec.replace(RATE, before.at(RATE)) == before
    plan = make_plan("tiny", tuned, budget="quick", seeds=1, device="cpu", tuned={"asked": 4})
    assert plan.name == "tiny-tuned"
    assert plan.document({})["tuned"] == {"asked": 4}
    assert "tuned" not in make_plan("tiny", ablation, budget="quick", seeds=1, device="cpu").document({})


def test_a_tuned_setting_wins_over_the_budget_that_it_was_found_for(tmp_path: Path) -> None:
    budgets = {"big": {"seeds": 2, "changes": {RATE: 0.5, "train.steps": 12}}}
    ablation = Ablation.parse({**tiny().document(), "budgets": budgets})
    answer = {"fields": {RATE: {}}, "variants": {v: {"changes": {RATE: 0.25}} for v in ablation.variants}}
    spec = tuned_ablation(ablation, "big", answer).run_spec("none", "copy", seed=0, device="cpu", budget="big")
    assert (spec.train.learning_rate, spec.train.steps) == (0.25, 12)


def write_answer(results: Path, ablation: Ablation, **changes: Any) -> None:
    """A tuned.json made by hand."""
    each = {"changes": {RATE: 0.01}, "score": 0.5, "loss": 1.0, "setting": 0, "tried": 4, "edges": {}}
    document = {
        "content": content(ablation, "quick"), "budget": "quick", "asked": 4, "pilot_seeds": 1, "costs": [],
        "sampler": "tpe", "pruning": True, "fields": {RATE: RATES.document()},
        "variants": {variant: each for variant in ablation.variants}, **changes,
    }  # fmt: skip
    folder = results / "tiny" / "sweep"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tuned.json").write_text(json.dumps(document))


def test_what_was_not_tuned_for_this_is_refused_in_a_sentence_with_the_remedy(tmp_path: Path) -> None:
    ablation = tiny()
    remedy = r"`harness sweep tiny --budget quick`"
    with pytest.raises(UserError, match=rf"tuned\.json does not exist; run {remedy} first"):
        read_tuned(tmp_path, "tiny", ablation, "quick")
    write_answer(tmp_path, ablation)
    assert read_tuned(tmp_path, "tiny", ablation, "quick")["asked"] == 4
    with pytest.raises(
        UserError, match=r"tuned for budget 'quick', not 'smoke'; run `harness sweep tiny --budget smoke"
    ):
        read_tuned(tmp_path, "tiny", ablation, "smoke")
    for other in (tiny(tasks={"reverse": Reverse(lengths=LENGTHS)}), tiny(space=Space(seeds=1))):
        with pytest.raises(UserError, match=rf"another content of 'tiny'; run {remedy} again"):
            read_tuned(tmp_path, "tiny", other, "quick")
    known = json.loads((tmp_path / "tiny/sweep/tuned.json").read_text())["variants"]
    write_answer(tmp_path, ablation, variants=known | {"none": known["none"] | {"tried": 3}})
    with pytest.raises(UserError, match=r"unequal budgets or is not done \(sinusoidal 4, none 3 of 4\); finish"):
        read_tuned(tmp_path, "tiny", ablation, "quick")
    write_answer(tmp_path, ablation, variants=known | {"none": known["none"] | {"changes": None}})
    with pytest.raises(UserError, match=r"no setting of none trained to the end; widen the ablation's space"):
        read_tuned(tmp_path, "tiny", ablation, "quick")
    (tmp_path / "tiny/sweep/tuned.json").write_text('{"variants"')
    with pytest.raises(UserError, match=rf"is corrupt .*; run {remedy} again"):
        read_tuned(tmp_path, "tiny", ablation, "quick")


# Spaces, samplers, ends of trials


HUNGRY = """
from harness.components.scale import InverseSqrt

class Hungry(InverseSqrt):
    def factor(self, *shape):
        raise MemoryError("so many logits")

    build = factor
"""


@pytest.mark.slow
def test_grids_have_each_cell_once_and_failures_are_recorded_with_their_cause(tmp_path: Path) -> None:
    space = Space(
        fields={"model.d_model": Choice(options=(16, 12)), "model.num_heads": Choice(options=(2, 8))}, seeds=1
    )
    outcome = sweep(tiny(space=space), tmp_path, sampler="grid", trials=None, pruning=False, jobs=2)
    assert outcome.table.groupby("variant").size().tolist() == [4, 4]
    assert not outcome.table.duplicated(["variant", "model.d_model", "model.num_heads"]).any()
    failed = outcome.table[outcome.table["status"] == "failed"]
    assert failed[["model.d_model", "model.num_heads"]].to_numpy().tolist() == [[12, 8]] * 2
    assert failed["cause"].str.contains("num_heads = 8 does not divide d_model = 12").all()
    assert (outcome.table["status"] != "failed").sum() == 6


@pytest.mark.slow
def test_known_results_are_reused_and_what_diverges_or_lacks_memory_ends_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    hungry = load_source(tmp_path / "hungry.py").Hungry()
    space = Space(
        fields={RATE: Choice(options=(1e-3, 10.0)), "model.scale": Choice(options=(InverseSqrt(), hungry))}, seeds=1
    )
    one = tiny(variants={"sinusoidal": {}}, space=space)
    outcome = sweep(one, tmp_path, sampler="random", trials=10, pruning=False)
    table = outcome.table
    assert len(table) == 10
    first = table[table["same_as"].isna()]
    assert not first.duplicated([RATE, "model.scale"]).any()
    assert set(table["status"]) == {"finished", "diverged", "out_of_memory"}
    assert table.loc[table["status"] == "out_of_memory", "cause"].str.contains("so many logits").all()
    again = table[table["same_as"].notna()]
    assert (again["steps"] == 0).all()
    for row in again.to_dict("records"):
        twin = table[table["trial"] == row["same_as"]].iloc[0]
        assert (row["status"], row["cause"], str(row["score"])) == (twin["status"], twin["cause"], str(twin["score"]))
    assert outcome.answer["variants"]["sinusoidal"]["changes"] == {
        RATE: 1e-3,
        "model.scale": InverseSqrt().document(),
    }


@pytest.mark.slow
def test_a_sweep_is_a_function_of_its_plan_in_one_go_or_in_two(tmp_path: Path) -> None:
    one = tiny(variants={"sinusoidal": {}})
    whole = sweep(one, tmp_path / "whole", trials=12, pruning=False)  # TPE has ten random trials first
    sweep(one, tmp_path / "parts", trials=11, pruning=False)
    parts = sweep(one, tmp_path / "parts", trials=12, pruning=False)
    columns = ["trial", RATE, "status", "score", "loss"]
    assert parts.table[columns].equals(whole.table[columns])


@pytest.mark.slow
def test_pruned_trials_keep_their_curves_and_the_better_part_goes_on(tmp_path: Path) -> None:
    options = tuple(10.0**-k for k in range(7, 0, -1))  # the smaller, the worse after a few steps
    space = Space(fields={RATE: Choice(options=options)}, seeds=1)
    train = tiny().train.replace("steps", 90)
    outcome = sweep(tiny(variants={"sinusoidal": {}}, train=train, space=space), tmp_path, sampler="grid", trials=None)
    pruned = outcome.table[outcome.table["status"] == "pruned"]
    assert 2 <= len(pruned) < 7
    for row in pruned.to_dict("records"):
        folder = tmp_path / "tiny/sweep/runs" / row["runs"]
        assert (folder / "curves.jsonl").exists()
        assert not (folder / "record.json").exists()
        assert row["steps"] in (10, 30)
        assert json.loads(row["rungs"])
    rung = {row["trial"]: json.loads(row["rungs"])["10"] for row in outcome.table.to_dict("records")}
    best = outcome.table.set_index("trial").loc[min(rung, key=rung.__getitem__)]
    assert best["steps"] > 10  # it went on; where the next rung is, another one may be better


@pytest.mark.slow
def test_several_objectives_have_a_front_that_nothing_dominates(tmp_path: Path) -> None:
    space = Space(
        fields={RATE: RATES, "model.feedforward.d_ff": Choice(options=(8, 16, 64))}, seeds=1, costs=("parameters",)
    )
    outcome = sweep(tiny(variants={"sinusoidal": {}}, space=space), tmp_path, trials=8)
    folder = tmp_path / "tiny/sweep"
    front = pd.read_csv(folder / "pareto.csv")
    scored = outcome.table[outcome.table["score"].notna()]
    for point in front.to_dict("records"):
        better = (scored["score"] >= point["score"]) & (scored["parameters"] <= point["parameters"])
        strictly = (scored["score"] > point["score"]) | (scored["parameters"] < point["parameters"])
        assert not (better & strictly).any()
    assert len(front) >= 1
    assert (folder / "figures/pareto_parameters.png").exists()
    assert not outcome.table["status"].isin(["pruned"]).any()


# Interruptions


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "harness", "sweep", str(folder / "mine.py"), "--trials", "4", "--jobs", "2",
            "--sampler", "random", "--no-pruning", "--results", str(folder), *more]  # fmt: skip


def started(folder: Path, lines: int, *more: str) -> subprocess.Popen[str]:
    """A sweep that has told of so many trials and is at the next."""
    process = subprocess.Popen(command(folder, *more), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told = 0
    while told < lines:
        line = process.stderr.readline()
        assert line, "it ended"
        told += "/4: " in line
    return process


@pytest.mark.slow
def test_interrupted_and_killed_sweeps_resume_without_doing_anything_twice(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SWEPT)
    folder = tmp_path / "mine/sweep"
    process = started(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads((folder / "tuned.json").read_text())["asked"] == 4
    process = started(tmp_path, 2)
    process.kill()
    process.communicate()
    with (folder / "journal.log").open("ab") as journal:
        journal.write(b'{"op_code": 5, "worker_id": "torn')
    (folder / "journal.log.lock").touch()
    done = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/record.json")}
    assert subprocess.run(command(tmp_path), cwd=ROOT, check=False, capture_output=True).returncode == 0
    table = pd.read_csv(folder / "trials.csv")
    counted = table[table["status"] != "interrupted"]
    assert counted.groupby("variant").size().tolist() == [4, 4]
    assert (counted["status"] == "finished").all()
    interrupted = table[table["status"] == "interrupted"]
    assert len(interrupted) >= 1
    assert set(interrupted[RATE]) <= set(counted[RATE])  # their parameters were tried again
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert len(list(folder.glob("runs/*/record.json"))) == 8


def test_another_process_that_sweeps_is_named(tmp_path: Path) -> None:
    from harness.conduct import locked

    folder = tmp_path / "tiny/sweep"
    folder.mkdir(parents=True)
    with locked(folder, "tiny"), pytest.raises(UserError, match=rf"being run by process {os.getpid()} on"):
        sweep(tiny(), tmp_path)


def test_a_torn_journal_is_mended_and_nothing_whole_is_lost(tmp_path: Path) -> None:
    import optuna

    store = open_storage(None, tmp_path)
    study = optuna.create_study(storage=store, study_name="one")
    study.tell(study.ask(), 1.0)
    journal = tmp_path / "journal.log"
    whole = journal.read_bytes()
    for torn in (b"{", b'{"op_code": 4, "x": "\xff'):
        journal.write_bytes(whole + torn)
        (tmp_path / "journal.log.lock").touch()
        began = time.monotonic()
        again = optuna.load_study(storage=open_storage(None, tmp_path), study_name="one")
        assert [trial.value for trial in again.trials] == [1.0]
        assert time.monotonic() - began < 10  # no wait for a lock whose holder is dead
        assert journal.read_bytes() == whole


# Refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["positon"], "there is no ablation 'positon'; did you mean 'position'?"),
        (["position", "--trials", "0"], "--trials: '0' is not a whole number from 1 on"),
        (["position", "--budget", "huge"], "budget 'huge': this ablation has no such budget"),
        (["position", "--sampler", "tpee"], "--sampler: there is no 'tpee'; did you mean 'tpe'"),
        (["position", "--sampler", "grid", "--trials", "9"], "--trials 9: the grid has 125 settings (5 of train."),
        (["position", "--storage", "here"], "--storage 'here': this is no database; write postgresql+psycopg://"),
        (["position", "--storage", "nosuch://x/y"], "--storage nosuch://x/y: "),
        (["position", "--storage", "postgresql+psycopg://me:secret@127.0.0.1:1/x"], "//me:…@127.0.0.1:1/x: "),
        (["position", "--tracking-uri", "file:x"], "MLflow no longer writes to plain folders"),
        (["position", "--cost", "time"], "--cost: there is no 'time'"),
    ],
)
def test_what_cannot_be_swept_is_said_in_a_sentence_and_nothing_is_written(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *options, "--results", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_tuned_without_a_sweep_is_refused_and_so_is_a_tuned_pilot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, said in (([], "does not exist; run `harness sweep position --budget quick`"), (["--pilot"], "exclude")):
        assert main(["ablate", "position", "--tuned", *more, "--results", str(tmp_path / "results")]) == 2
        assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# What is made of trials


def rows(*trials: tuple[str, float, str, float, float]) -> pd.DataFrame:
    """variant, learning rate, status, score, loss."""
    found = pd.DataFrame(trials, columns=["variant", RATE, "status", "score", "loss"])
    defaults = {"in_distribution": 1.0, "steps": 10.0, "seconds": 1.0, "flops": 100.0, "parameters": 9.0}
    return found.assign(trial=range(len(found)), cause="", same_as=math.nan, front=False, **defaults)


def document(**changes: Any) -> dict[str, Any]:
    return {
        "study": "made", "asked": 4, "fields": {RATE: RATES.document()}, "variants": ["a", "b"], "tasks": ["copy"],
        "seeds": [1000], "score": "exact_match", "higher_is_better": True, "costs": [], "baseline": "a", "gate": 0.98,
        "sampler": "tpe", "pruning": True, "budget": "quick", "device": "cpu", **changes,
    }  # fmt: skip


def test_the_best_has_the_best_score_then_the_lowest_loss_and_has_not_diverged() -> None:
    table = rows(
        ("a", 0.1, "finished", 0.0, 2.0), ("a", 0.2, "diverged", 0.0, 0.1), ("a", 0.3, "finished", 0.0, 1.0),
        ("a", 0.4, "finished", 0.0, 1.0), ("a", 0.5, "pruned", math.nan, 0.1),
    )  # fmt: skip
    best = best_of(table, higher_is_better=True)
    assert best is not None
    assert best[RATE] == 0.3
    low = rows(("a", 0.1, "finished", 0.4, 2.0), ("a", 0.2, "finished", 0.3, 3.0))
    found = best_of(low, higher_is_better=False)
    assert found is not None
    assert found[RATE] == 0.2
    assert best_of(table[table["status"] != "finished"], higher_is_better=True) is None


def test_the_largest_stable_rate_lies_below_all_that_diverged() -> None:
    table = rows(
        ("a", 0.1, "finished", 0.5, 1.0), ("a", 0.2, "diverged", 0.0, 9.0), ("a", 0.3, "finished", 0.5, 1.0),
        ("b", 0.1, "finished", 0.5, 1.0), ("b", 0.4, "pruned", math.nan, 1.0),
    )  # fmt: skip
    found = stable_rates(document(), table).set_index("variant")
    assert found.loc["a"].tolist() == [0.1, 0.2, 0.3, 0.3]
    assert found.loc["b", "stable"] == 0.1
    assert math.isnan(found.loc["b", "smallest_diverged"])


def test_the_budget_counts_what_was_tried_and_not_what_was_interrupted() -> None:
    table = rows(
        ("a", 0.1, "finished", 0.5, 1.0), ("a", 0.2, "pruned", math.nan, 9.0), ("a", 0.3, "interrupted", 0.5, 1.0),
    )  # fmt: skip
    table.loc[1, "steps"] = 5
    row = budgets(document(), table).set_index("variant").loc["a"]
    assert (row["tried"], row["finished"], row["pruned"], row["interrupted"], row["steps"]) == (2, 1, 1, 1, 15)
    assert row["flops"] == 150


def test_an_optimum_on_the_edge_is_warned_of_and_a_variant_without_one_too(tmp_path: Path) -> None:
    table = rows(("a", 9.9, "finished", 0.5, 1.0), ("b", 0.2, "diverged", 0.0, 9.0))
    each = {"score": 0.5, "loss": 1.0, "setting": 0, "tried": 1}
    answer = {
        "fields": document()["fields"],
        "variants": {
            "a": {**each, "changes": {RATE: 9.9}, "edges": {RATE: "high"}},
            "b": {**each, "changes": None, "score": None, "loss": None, "edges": {}},
        },
    }
    importances = pd.DataFrame(columns=["variant", "field", "importance", "low", "high", "settings"])
    write_sweep(tmp_path, document(), table, answer, importances)
    text = (tmp_path / "summary.md").read_text()
    assert "Warning: the best train.learning_rate of a, 9.9, lies on the high edge of the space (10)" in text
    assert "Warning: no setting of b has trained to the end." in text
    assert "Preliminary" in text


def test_what_is_compared_at_a_rung_is_alike() -> None:
    planned = plan_sweep("tiny", small(space=Space(fields={RATE: RATES}, seeds=2)), budget="quick")
    one, other = planned.runs("none", {RATE: 0.1}), planned.runs("none", {RATE: 0.2})
    cells = [(task, seed) for seed, task in itertools.product([1000, 1001], ["copy", "reverse"])]
    assert [(task, seed) for task, seed, _ in one] == cells
    for (task, seed, mine), (same, equal, theirs) in zip(one, other, strict=True):
        assert (task, seed) == (same, equal)
        assert mine == theirs.replace(RATE, 0.1)
        assert isinstance(mine, RunSpec)
