"""The chapter about stability: what a spike is, what becomes of a run, the largest stable learning rate."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_made import blocks, pictures, seen
from hypothesis import given
from hypothesis import strategies as st
from small_study import plan, small

import harness.report
from harness.components.norm import PostNorm, PreNorm
from harness.components.position import NoPE, RoPE
from harness.record import RunRecord, Score
from harness.report import write_report
from harness.report.chapters.stability import CHAPTER, configurations, largest_rate, outcomes, spikes, swept
from harness.report.tables import Findings, findings
from harness.results import StudyData, load_study
from harness.stats import clopper_pearson

UNTRAINED = 2.8
LEARNED = [2.5, 2.0, 1.0, 0.4, 0.1, 0.02]
SPIKED = [2.5, 1.0, 0.1, 0.1, 0.1, 2.5, 0.2, 0.02]
STUCK = [2.8, 2.75, 2.8, 2.7, 2.75, 2.7]
LOST = [2.5, 1.0, 3.5, 9.0]
HELD = [1.0, 0.1, 0.1, 0.1, 0.1, 0.1]  # the untrained loss is 1, and it trains
Runs = dict[tuple[str, str, int], tuple[str, list[float]]]  # variant, task, seed -> status, loss curve


def write_study(folder: Path, runs: Runs, *, recorded: bool = True, **changes: Any) -> StudyData:
    """A study's folder with these runs; `recorded`: whether their records hold the untrained loss."""
    variants, tasks, seeds = (list(dict.fromkeys(key[i] for key in runs)) for i in range(3))
    cells = [{"variant": v, "task": t, "seed": s, "fingerprint": f"{i:016d}"} for i, (v, t, s) in enumerate(runs)]
    document = {
        "study": "s", "question": "Is it stable?", "axes": ["model.norm_placement"], "baseline": variants[0],
        "variants": variants, "tasks": tasks, "seeds": seeds, "budget": "quick", "device": "cpu",
        "score": "exact_match", "higher_is_better": True, "margin": 0.1, "gate": 0.98,
        "train_lengths": {task: [1, 1] for task in tasks}, "test_lengths": {task: [2] for task in tasks},
        "spec": {"model": {"d_model": 64}, "train": {"learning_rate": 0.001, "gradient_clip": None}, "tasks": {}},
        "differences": {v: {"model.norm_placement": v} for v in variants[1:]}, "runs": cells,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps({**document, **changes}))
    for cell, (status, losses) in zip(cells, runs.values(), strict=True):
        directory = folder / "runs" / cell["fingerprint"]
        if status == "missing":
            continue
        directory.mkdir(parents=True)
        lines = [
            {"step": 10 * i + 10, "train/loss": x, "train/gradient_norm": 10 * x, "train/exact_match": 0}
            for i, x in enumerate(losses)
        ]
        (directory / "curves.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        final = {"eval/in_distribution": float(losses[-1] < 0.05), "train/loss": losses[-1]}
        RunRecord(
            fingerprint=cell["fingerprint"], spec={}, status=status,
            scores=tuple(Score(length=n, metric="exact_match", value=0.5) for n in (1, 2)),
            final=final | ({"train/initial_loss": UNTRAINED} if recorded else {}),
        ).write(directory / "record.json")  # type: ignore[arg-type]  # fmt: skip
    return load_study(folder)


def two_norms(tasks: tuple[str, ...] = ("copy",)) -> Runs:
    """Pre-LN trains; of Post-LN's four runs one spikes, one is stuck, one diverges, one trains."""
    fates = [("finished", LEARNED), ("finished", SPIKED), ("finished", STUCK), ("diverged", LOST)]
    runs: Runs = {("Pre-LN", t, s): ("finished", LEARNED) for t in tasks for s in range(4)}
    return runs | {("Post-LN", t, s): fate for t in tasks for s, fate in enumerate(fates)}


def ladder(rates: tuple[float, ...], seeds: int, *, limits: dict[str, float]) -> tuple[Runs, dict[str, dict[str, Any]]]:
    """Runs of two placements at several learning rates, each diverging above its limit; and their differences."""
    runs: Runs = {}
    differences: dict[str, dict[str, Any]] = {}
    for norm, limit in limits.items():
        for rate in rates:
            name = f"{norm} {rate:g}"
            differences[name] = {"model.norm_placement": norm} if norm != "PreNorm" else {}
            differences[name] |= {"train.learning_rate": rate} if rate != rates[0] else {}
            for seed in range(seeds):
                end = [*LEARNED[:-1], 0.02 * (1 + seed / 10)]
                runs[name, "copy", seed] = ("diverged", LOST) if rate > limit else ("finished", end)
    return runs, differences


def found(data: StudyData) -> Findings:
    return findings(data)


# Spikes


@given(
    falls=st.lists(st.floats(0, 1), min_size=2, max_size=60),
    seed=st.integers(0, 99),
)
def test_a_curve_that_falls_with_little_noise_has_no_spike(falls: list[float], seed: int) -> None:
    smooth = UNTRAINED * np.exp(-np.cumsum(falls))
    noise = np.random.default_rng(seed).uniform(-0.16, 0.16, len(smooth)) * UNTRAINED
    assert spikes([UNTRAINED, *(smooth + noise)], UNTRAINED) == 0


@given(
    bumps=st.lists(st.floats(0.34, 50), max_size=8),
    width=st.integers(1, 4),
    rest=st.integers(1, 5),
    scale=st.floats(0.1, 9),
)
def test_every_bump_counts_once_whatever_its_width_and_the_unit(
    bumps: list[float], width: int, rest: int, scale: float
) -> None:
    curve = [1.0] + [0.1] * 5
    for bump in bumps:
        curve += [0.1 + bump] * width + [0.1] * rest
    assert spikes(curve, 1.0) == len(bumps)
    assert spikes([scale * loss for loss in curve], scale) == len(bumps)


@pytest.mark.parametrize(
    ("curve", "count"),
    [
        ([*HELD, 0.45], 1),  # just above a third
        ([*HELD, 0.42], 0),  # just below
        ([*HELD, 0.8, 0.3, 0.8, 0.3, 0.8], 1),  # never back
        ([*HELD, 0.8, 0.2, 0.8], 2),
        ([*HELD, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8], 1),  # it collapsed, and stayed there
        ([1.0, 9.0, 0.5, 0.1], 1),  # it exploded in the first steps
        ([*HELD, -0.5, 0.4], 0),  # one point below is no level
        ([*HELD, math.nan, 0.1, math.inf], 0),
        ([], 0),
    ],
)
def test_spikes_by_hand(curve: list[float], count: int) -> None:
    assert spikes(curve, 1.0) == count


@pytest.mark.parametrize("seed", range(20))
def test_a_plateau_that_swings_with_the_lengths_of_its_batches_is_no_spike(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 9, (200, 10))  # ten batches a point; the longest fails by half
    assert spikes([1.0, *(0.5 * (lengths - 1) / 7).mean(axis=1)], 1.0) == 0


# Outcomes


def test_outcomes_are_what_the_curves_and_the_status_say(tmp_path: Path) -> None:
    table = outcomes(write_study(tmp_path / "s", two_norms()))
    post = table[table["variant"] == "Post-LN"].sort_values("seed")
    assert post["diverged"].tolist() == [False, False, False, True]
    assert post["spikes"].tolist() == [0, 1, 0, 1]
    assert post["trained"].tolist() == [True, True, False, False]
    assert post["stable"].tolist() == [True, False, False, False]
    assert post["gradient"].tolist() == [25, 25, 28, 90]
    assert table[table["variant"] == "Pre-LN"]["stable"].all()


def test_a_run_that_diverged_has_not_trained_however_low_its_last_loss(tmp_path: Path) -> None:
    table = outcomes(write_study(tmp_path / "s", {("a", "t", 0): ("diverged", LEARNED)}))
    assert table[["diverged", "trained", "stable"]].to_numpy().tolist() == [[True, False, False]]


def test_an_initialisation_far_worse_than_guessing_makes_no_run_look_trained(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", {("a", "t", 0): ("finished", STUCK), ("b", "t", 0): ("finished", STUCK)})
    runs = data.runs.assign(**{"train/initial_loss": [UNTRAINED, 40.0]})
    assert not outcomes(StudyData(data.folder, data.document, runs, data.scores))["trained"].any()


def test_runs_without_an_outcome_are_left_out(tmp_path: Path) -> None:
    runs: Runs = {("a", "t", s): (status, LEARNED) for s, status in enumerate(("finished", "failed", "missing"))}
    assert outcomes(write_study(tmp_path / "s", runs))["seed"].tolist() == [0]


# Which studies it is for


def silent(data: StudyData) -> bool:
    return not pictures(CHAPTER, found(data)) and not blocks(CHAPTER, found(data))


def test_it_speaks_of_studies_without_clipping(tmp_path: Path) -> None:
    assert not silent(write_study(tmp_path / "s", two_norms()))
    clipped = {"model": {}, "train": {"learning_rate": 0.001, "gradient_clip": 1.0}, "tasks": {}}
    assert silent(write_study(tmp_path / "clipped", two_norms(), spec=clipped))
    some = {"Post-LN": {"model.norm_placement": "PostNorm", "train.gradient_clip": 1.0}}
    assert silent(write_study(tmp_path / "some", two_norms(), differences=some))


def test_it_speaks_of_studies_that_sweep_the_learning_rate(tmp_path: Path) -> None:
    clipped = {"model": {}, "train": {"learning_rate": 0.001, "gradient_clip": 1.0}, "tasks": {}}
    rates = {"Post-LN": {"train.learning_rate": 0.004}}
    assert not silent(write_study(tmp_path / "swept", two_norms(), spec=clipped, differences=rates))
    tuned = {"Post-LN": {"train.learning_rate": 0.004, "model.norm_placement": "PostNorm"}}
    assert silent(write_study(tmp_path / "tuned", two_norms(), spec=clipped, differences=tuned))


def test_it_is_silent_about_records_without_an_untrained_loss_and_about_nothing(tmp_path: Path) -> None:
    assert silent(write_study(tmp_path / "old", two_norms(), recorded=False))
    assert silent(write_study(tmp_path / "none", {("a", "t", 0): ("missing", [])}))


# Learning rates


def test_configurations_of_a_real_plan_are_the_variants_that_differ_in_the_rate_alone() -> None:
    variants = {
        f"{name} {rate}": {"model.norm_placement": norm, "train.learning_rate": rate}
        for name, norm in {"pre": PreNorm(), "post": PostNorm()}.items()
        for rate in (1e-3, 4e-3)
    }
    axes = ("model.norm_placement", "train.learning_rate")
    document = plan(small(axes=axes, variants=variants, baseline="pre 0.004")).document({})
    assert configurations(document) == {
        "norm_placement = PreNorm": ["pre 0.004", "pre 0.001"],
        "norm_placement = PostNorm": ["post 0.001", "post 0.004"],
    }
    assert swept(document)


def test_configurations_of_one_kind_are_told_apart_by_their_fields() -> None:
    variants = {
        f"{base} {rate}": {"model.position": RoPE(base=base), "train.learning_rate": rate}
        for base in (100.0, 10.0)
        for rate in (1e-3, 4e-3)
    }
    variants |= {"none": {"model.position": NoPE(), "train.learning_rate": 1e-3}}
    axes = ("model.position", "train.learning_rate")
    groups = configurations(plan(small(axes=axes, variants=variants, baseline="none")).document({}))
    assert list(groups.values()) == [["none"], ["100.0 0.001", "100.0 0.004"], ["10.0 0.001", "10.0 0.004"]]
    assert "100" in list(groups)[1]
    assert len(groups) == 3


@pytest.mark.parametrize(
    ("stable", "said"),
    [
        ({0.001: [True, True], 0.004: [True, True]}, "≥ 0.004, the largest tried"),
        ({0.001: [True, True], 0.004: [True, False]}, "0.001"),
        ({0.001: [False, True], 0.004: [False]}, "none of 0.001, 0.004"),
        ({0.001: [False], 0.004: [True], 0.016: [False]}, "0.004 (but not 0.001)"),
        ({}, "–"),
    ],
)
def test_the_largest_stable_rate_holds_for_every_seed(stable: dict[float, list[bool]], said: str) -> None:
    rows = [{"rate": rate, "stable": each} for rate, seeds in stable.items() for each in seeds]
    assert largest_rate(pd.DataFrame(rows, columns=["rate", "stable"]), "stable") == said


# The page


def table_of(data: StudyData, head: str) -> dict[str, dict[str, str]]:
    """A table of the chapter by its first column's head: row -> column -> text."""
    (table,) = [block for block in blocks(CHAPTER, found(data)) if block.kind == "table" and block.columns[0] == head]
    rows = [[cell.text for cell in row] for row in table.rows]
    return {row[0]: dict(zip(table.columns[1:], row[1:], strict=True)) for row in rows}


def test_the_table_counts_runs(tmp_path: Path) -> None:
    row = table_of(write_study(tmp_path / "s", two_norms()), "on copy")["Post-LN"]
    low, high = clopper_pearson(1, 4)
    assert row == {
        "runs": "4", "diverged": "1 of 4", "95 % interval": f"[{low:.2f}, {high:.2f}]", "with spikes": "2 of 4",
        "median spikes": "0.5", "trained": "2 of 4", "passed gate": "2 of 4", "largest gradient norm": "26.50",
    }  # fmt: skip


def test_the_page_names_the_largest_stable_rate_of_each_configuration(tmp_path: Path) -> None:
    runs, differences = ladder((0.001, 0.004, 0.016), 3, limits={"PreNorm": 1.0, "PostNorm": 0.001})
    runs["PostNorm 0.004", "copy", 0] = ("finished", LEARNED)  # one of three: the line still ends before
    spec = {"model": {"norm_placement": "PreNorm"}, "train": {"learning_rate": 0.001, "gradient_clip": 1.0}}
    data = write_study(tmp_path / "s", runs, differences=differences, spec=spec)
    rows = table_of(data, "largest learning rate")
    assert rows["norm_placement = PreNorm"]["stable on copy"] == "≥ 0.016, the largest tried"
    assert rows["norm_placement = PostNorm"] == {
        "stable on copy": "0.001", "learned on copy": "0.001", "rates tried": "0.001, 0.004, 0.016", "seeds a rate": "3"
    }  # fmt: skip
    shares, losses = pictures(CHAPTER, found(data))
    assert (shares.name, losses.name) == ("stability_outcomes", "stability_learning_rate")
    (panel,) = losses.figure.axes
    medians = [line.get_ydata() for line in panel.lines if len(np.atleast_1d(line.get_xdata())) == 3]
    assert np.allclose(medians, [[0.022] * 3, [0.022, np.nan, np.nan]], equal_nan=True)


def test_its_clause_counts_runs_and_names_the_largest_rate_that_was_learned(tmp_path: Path) -> None:
    assert seen(CHAPTER, found(write_study(tmp_path / "s", two_norms()))) == (
        "of 8 runs 1 diverged, 1 spiked and 1 did not train"
    )
    calm = {key: fate for key, fate in two_norms().items() if key[0] == "Pre-LN"}
    assert seen(CHAPTER, found(write_study(tmp_path / "calm", calm))) == "of 4 runs none diverged or spiked"
    runs, differences = ladder((0.001, 0.004), 3, limits={"PreNorm": 1.0, "PostNorm": 0.001, "RMS": 0.0})
    data = write_study(
        tmp_path / "rates", runs, differences=differences,
        spec={"model": {"norm_placement": "PreNorm"}, "train": {"learning_rate": 0.001}},
    )  # fmt: skip
    assert seen(CHAPTER, found(data)) == (
        "of 18 runs 9 diverged; the largest learning rate at which every seed learned copy is ≥ 0.004 with "
        "norm_placement = PreNorm, 0.001 with norm_placement = PostNorm, none with norm_placement = RMS"
    )


def test_every_bar_is_whole(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", two_norms(("copy", "reverse")))
    (picture,) = pictures(CHAPTER, found(data))
    for panel in picture.figure.axes:
        widths: dict[float, list[float]] = {}
        for bar in panel.patches:
            widths.setdefault(round(bar.get_y(), 3), []).append(bar.get_width())
        assert [sum(row) for row in widths.values()] == pytest.approx([1.0, 1.0])
        assert sorted(map(len, widths.values())) == [1, 4]


def test_it_stands_before_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.report, "DPI", 40)
    data = write_study(tmp_path / "s", two_norms())
    write_report(data, tmp_path / "r")
    text = (tmp_path / "r" / "report.md").read_text()
    assert text.index("## Stability") < text.index("stability_outcomes.png") < text.index("## Accuracy by length")
    assert "no test was made" in text
