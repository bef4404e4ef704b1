"""The report's chapter on generalisation and calibration: when it stands there, and that its numbers are the runs'."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
import pytest
from hand_made import blocks, pictures, seen
from small_study import plan, small

from harness.evaluate import METRICS
from harness.record import RunRecord, Score
from harness.report import write_report
from harness.report.blocks import Items, Table
from harness.report.chapters.generalisation import CHAPTER
from harness.report.tables import Findings, findings
from harness.results import load_study
from harness.spec import Finite, TrainSpec
from harness.stats import summary_interval
from harness.study import Ablation, write_plan

Final = Callable[[str, str, int], dict[str, float]]

TRAIN = TrainSpec(steps=20, batch_size=4, eval_samples=4)
SMOOTHED: dict[str, Any] = {
    "axes": ("train.label_smoothing",),
    "baseline": "hard",
    "variants": {"hard": {}, "smoothed": {"train.label_smoothing": 0.1}},
}


def answers(variant: str, task: str, seed: int) -> dict[str, float]:
    """What a run measures on any data."""
    place = len(variant) / 20 + seed / 50
    return {
        "eval/in_distribution": 0.9 - place / 2, "eval/loss": 0.4 + place, "eval/accuracy": 0.8 - place / 3,
        "eval/confidence": 0.9, "eval/calibration_error": 0.02 + place / 10,
    }  # fmt: skip


def by_heart(variant: str, task: str, seed: int) -> dict[str, float]:
    """And on finite data."""
    return {**answers(variant, task, seed), "seen/exact_match": 0.99, "seen/loss": 0.01}


def never(variant: str, task: str, seed: int) -> dict[str, float]:
    """What runs left before any of this was measured."""
    return {"eval/in_distribution": 0.5}


def studied(folder: Path, ablation: Ablation, final: Final, status: Callable[[int], str] = lambda i: "finished") -> Any:
    """A study whose runs have ended with these final metrics."""
    made = plan(ablation)
    write_plan(made, folder, {"command": "harness ablate small"})
    for index, cell in enumerate(made.cells):
        scores = tuple(Score(length=n, metric=m, value=0.5) for n in range(1, 6) for m in METRICS)
        measured = final(cell.variant, cell.task, cell.seed)
        if status(index) != "finished":
            measured = dict.fromkeys(measured, math.nan)
        RunRecord(
            fingerprint=cell.fingerprint, spec=cell.spec.document(), status=status(index), scores=scores, final=measured
        ).write(folder / "runs" / cell.fingerprint / "record.json")
    return load_study(folder)


def tables(found: Findings) -> list[Table]:
    return [block for block in blocks(CHAPTER, found) if isinstance(block, Table)]


FINITE: dict[str, Any] = {"train": TRAIN.replace("sampling", Finite())}
DROPPED: dict[str, Any] = {
    "axes": ("model.attention_dropout",),
    "baseline": "none",
    "variants": {"none": {}, "some": {"model.attention_dropout": 0.1}},
}
GAP, CALIBRATION = "generalisation_gap", "generalisation_calibration"


@pytest.mark.parametrize(
    ("changes", "final", "shown"),
    [
        ({}, never, []),
        ({}, answers, []),  # a study about position on fresh data
        (SMOOTHED, never, []),  # its runs were made before this was measured
        (SMOOTHED, answers, [CALIBRATION]),
        (DROPPED, answers, [CALIBRATION]),
        (FINITE, by_heart, [GAP, CALIBRATION]),
        (FINITE, never, []),
    ],
)
def test_it_stands_where_the_study_calls_for_it(
    changes: dict[str, Any], final: Final, shown: list[str], tmp_path: Path
) -> None:
    found = findings(studied(tmp_path, small(**changes), final))
    assert [picture.name for picture in pictures(CHAPTER, found)] == shown
    said = blocks(CHAPTER, found)
    assert len(said) == (3 if shown else 0)  # a table for each of two tasks, and the terms
    if shown:
        assert isinstance(said[-1], Items)
        assert len(said[-1].items) == len(shown)


def test_the_table_has_the_means_of_the_runs_and_their_intervals(tmp_path: Path) -> None:
    found = findings(studied(tmp_path, small(**FINITE), by_heart))
    table = tables(found)[1]
    assert table.columns[0] == "on reverse"
    (row,) = (row for row in table.rows if row[0].text == "rope")
    cells = dict(zip(table.columns, (cell.text for cell in row), strict=False))
    runs = [by_heart("rope", "reverse", seed) for seed in range(3)]
    gaps = [run["seen/exact_match"] - run["eval/in_distribution"] for run in runs]
    assert cells["seeds"] == "3"
    assert cells["exact match, fresh"] == f"{mean(run['eval/in_distribution'] for run in runs):.3f}"
    assert cells["gap"] == f"+{mean(gaps):.3f}"
    _, low, high = summary_interval(gaps)
    assert row[5].text == f"[+{low:.3f}, +{high:.3f}]"
    assert cells["loss, training samples"] == "0.010"
    assert cells["calibration error"] == f"{mean(run['eval/calibration_error'] for run in runs):.3f}"
    assert "no test was made" in table.caption


def test_its_clause_has_the_baselines_numbers_and_those_of_the_others(tmp_path: Path) -> None:
    said = seen(CHAPTER, findings(studied(tmp_path / "finite", small(**FINITE), by_heart)))
    assert said.startswith("generalisation gap on copy +0.35 with sinusoidal, +0.20 with none, +0.20 with rope; ")
    assert "calibration error on reverse 0.07 with sinusoidal, 0.04 with" in said
    smoothed = seen(CHAPTER, findings(studied(tmp_path / "fresh", small(**SMOOTHED), answers)))
    assert smoothed.startswith("calibration error on copy ")


def test_without_finite_data_there_is_no_word_of_training_samples(tmp_path: Path) -> None:
    found = findings(studied(tmp_path, small(**SMOOTHED), answers))
    assert all("training samples" not in head and head != "gap" for head in tables(found)[0].columns)


def test_runs_that_diverged_are_left_out_and_counted(tmp_path: Path) -> None:
    ablation = small(**SMOOTHED)
    last = len(plan(ablation).cells) - 1
    study = studied(tmp_path, ablation, answers, lambda index: "diverged" if index == last else "finished")
    seeds = {(table.columns[0], row[0].text): row[1].text for table in tables(findings(study)) for row in table.rows}
    assert sorted(seeds.values()) == ["2", "3", "3", "3"]


def test_a_variant_that_diverged_everywhere_has_dashes(tmp_path: Path) -> None:
    ablation = small(**SMOOTHED)
    cells = plan(ablation).cells
    study = studied(tmp_path, ablation, answers, lambda i: "diverged" if cells[i].variant == "smoothed" else "finished")
    found = findings(study)
    assert {cell.text for cell in tables(found)[0].rows[1][2:]} == {"–"}
    assert [picture.name for picture in pictures(CHAPTER, found)] == [CALIBRATION]


def test_the_report_has_the_chapter_with_its_figures(tmp_path: Path) -> None:
    study = studied(tmp_path / "s", small(**FINITE), by_heart)
    write_report(study, tmp_path / "r", publish=True)
    assert set(by_heart("rope", "copy", 0)) <= set(pd.read_csv(tmp_path / "r" / "runs.csv").columns)
    text = (tmp_path / "r" / "report.md").read_text()
    chapter = text.split("## Generalisation and calibration")[1].split("\n## ")[0]
    assert "figures/generalisation_gap.png" in chapter
    assert "figures/generalisation_calibration.png" in chapter
    assert "arXiv:1706.04599" in chapter
    assert "## Generalisation" not in text.split("## Verdicts")[0]
