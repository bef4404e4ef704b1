"""The chapter on routing: its numbers are the ends of the routers' curves."""

import math
from pathlib import Path
from typing import Any

import pytest
from hand_made import blocks, pictures, seen, study
from small_study import LENGTHS, plan, small

from harness.components.feedforward import MoE, ReLU
from harness.report.blocks import Table
from harness.report.chapters import costs, heads
from harness.report.chapters.routing import CHAPTER, ends, num_experts, router_curves
from harness.report.tables import findings
from harness.results import load_study
from harness.runner import run
from harness.spec import ModelSpec
from harness.stats import summary_interval
from harness.study import write_plan
from tasks import Copy

MIXTURE = {"d_model": 16, "feedforward": {"kind": "MoE", "num_experts": 8, "balance": 0.0}}
DIFFERENCES = {
    "four": {"model.feedforward.num_experts": 4},
    "dense": {"model.feedforward": "ReLU", "model.feedforward.d_ff": 64},
}


def routed(variant: str, task: str, seed: int) -> list[dict[str, float]]:
    """Imbalance falls from 3 to `seed` at step 91; the router is undecided among four."""
    if variant == "dense":
        return [{"step": 10, "train/loss": 1.0}]
    return [
        {
            "step": step,
            "train/loss": 1.0,
            "router/loss": 0.02,
            "router/entropy": math.log(4),
            "router/max_violation": 3.0 if step <= 90 else float(seed),
            "router/dropped": 0.125,
            "router/load_min": 0.5,
            "router/load_max": 4.0 if step <= 90 else 1.0 + seed,
        }
        for step in range(1, 101)
    ]


def made(folder: Path, **changes: Any) -> Any:
    """Eight experts, four experts, none."""
    given = {"axes": ("model.feedforward",), "model": MIXTURE, "differences": DIFFERENCES, "curve": routed}
    return study(folder, ("eight", "four", "dense"), **{**given, **changes})


def rows(found: Any) -> list[dict[str, str]]:
    """The first table's rows by column."""
    table, *_ = blocks(CHAPTER, found)
    assert isinstance(table, Table)
    return [dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows]


def test_the_end_is_the_last_tenth_of_the_steps(tmp_path: Path) -> None:
    end = ends(router_curves(made(tmp_path))).set_index(["variant", "seed"])["router/max_violation"]
    assert end.to_dict() == {(variant, seed): seed for variant in ("eight", "four") for seed in range(3)}


def test_the_table_has_means_over_seeds_with_intervals(tmp_path: Path) -> None:
    eight, four = rows(made(tmp_path))  # a variant without a router has no row
    mean, low, high = summary_interval([0.0, 1.0, 2.0])
    assert eight["MaxVio"] == f"{mean:.3f} [{low:.3f}, {high:.3f}]".replace("-", "−")
    assert eight["entropy / ln E"].startswith(f"{math.log(4) / math.log(8):.3f}")
    assert four["entropy / ln E"].startswith("1.000")
    assert eight["least and most loaded expert"] == "0.50, 2.00"
    assert (eight["dropped"][:5], eight["auxiliary loss"][:5], eight["seeds"]) == ("0.125", "0.020", "3")
    assert (eight["parameters"], eight["active parameters"]) == ("1\u202f234", "–")


def test_its_clause_is_how_uneven_the_routers_ended(tmp_path: Path) -> None:
    said = "1.00 with eight, 1.00 with four"
    found = made(tmp_path, tasks=("copy", "sort"))
    assert seen(CHAPTER, found) == f"MaxVio on copy {said}; MaxVio on sort {said} (0: every expert has an even share)"


def test_active_parameters_come_from_the_counted_costs(tmp_path: Path) -> None:
    costs = "variant,tokens,parameters,active_parameters\neight,256,900,300\neight,512,900,300\n"
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "costs.csv").write_text(costs)
    assert [row["active parameters"] for row in rows(made(tmp_path))] == ["300", "–"]


def test_the_number_of_experts_is_the_variants_own() -> None:
    dense = {"model": {"feedforward": {"kind": "ReLU"}}, "train": {}}
    document = {"spec": dense, "differences": {"x": DIFFERENCES["four"], "y": {}}}
    assert num_experts(document, "x") == 4
    assert num_experts(document, "y") is None


def test_curves_that_were_written_before_loads_were_have_a_dash(tmp_path: Path) -> None:
    def old(*names: Any) -> list[dict[str, float]]:
        return [{k: v for k, v in point.items() if "load" not in k} for point in routed(*names)]

    assert {row["least and most loaded expert"] for row in rows(made(tmp_path, curve=old))} == {"–"}


def test_pictures_are_the_curves_and_the_score_against_imbalance(tmp_path: Path) -> None:
    found = made(tmp_path, tasks=("copy", "sort"), score=lambda variant, task, seed: 0.2 * seed)
    curves, trade = pictures(CHAPTER, found)
    assert (curves.name, trade.name) == ("routing_curves", "routing_trade")
    assert len(curves.figure.axes) == 4  # two tasks by two metrics
    dots = trade.figure.axes[0].collections[0].get_offsets().tolist()  # type: ignore[union-attr]
    assert dots == [[0.0, 0.0], [1.0, pytest.approx(0.2)], [2.0, pytest.approx(0.4)]]


def test_a_study_without_routers_has_no_such_chapter(tmp_path: Path) -> None:
    for folder, curve in (("a", lambda *_: None), ("b", lambda *_: [{"step": 10, "train/loss": 1.0}])):
        found = made(tmp_path / folder, curve=curve)
        assert not blocks(CHAPTER, found)
        assert not pictures(CHAPTER, found)


def test_a_study_that_was_trained_has_all_that_the_chapters_ask_for(tmp_path: Path) -> None:
    model = ModelSpec(d_model=16, num_heads=2, num_layers=2, feedforward=MoE(expert=ReLU(d_ff=8), num_experts=4))
    made = plan(
        small(
            model=model,
            tasks={"copy": Copy(lengths=LENGTHS)},
            axes=("model.num_heads", "model.feedforward"),
            baseline="two",
            variants={"two": {}, "one": {"model.num_heads": 1}, "dense": {"model.feedforward": ReLU(d_ff=16)}},
        ),
        budget="smoke",
        seeds=1,
    )
    write_plan(made, tmp_path, {})
    for cell in made.cells:
        run(cell.spec, directory=tmp_path / "runs" / cell.fingerprint)
    found = findings(load_study(tmp_path))
    assert [row["on copy"] for row in rows(found)] == ["two", "one"]
    assert all("–" not in value for row in rows(found) for value in row.values())
    table, *_ = blocks(heads.CHAPTER, found)
    assert isinstance(table, Table)
    assert [row[0].text for row in table.rows] == ["two", "one", "dense"]
    assert len(heads.all_heads(found)) == 2 * (2 + 1 + 2)
    assert blocks(costs.CHAPTER, found)[0].kind == "table"
