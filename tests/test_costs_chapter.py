"""Costs by length: counted with the plan as `harness cost` counts them, and a chapter that sets them side by side."""

from pathlib import Path
from typing import Any

import pytest
from hand_made import blocks, pictures, study
from small_study import plan, small

import harness.study
from harness.catalogue import cost_document
from harness.components.attention import (
    GroupedQuery,
    Linear,
    MultiHead,
    MultiQuery,
    SlidingWindow,
)
from harness.components.feedforward import MoE, ReLU
from harness.components.position import Learned, NoPE
from harness.cost import LENGTHS
from harness.report.blocks import Table
from harness.report.chapters.costs import CHAPTER
from harness.results import load_study
from harness.spec import ModelSpec, RunSpec
from harness.study import Plan, write_plan

MODEL = ModelSpec(d_model=16, num_heads=4, num_layers=2, feedforward=ReLU(d_ff=16), position=NoPE())
ATTENTIONS = {
    "full": {"model.attention": MultiHead()},
    "grouped": {"model.attention": GroupedQuery(num_groups=2)},
    "one": {"model.attention": MultiQuery()},
    "window": {"model.attention": SlidingWindow(window=64)},
    "linear": {"model.attention": Linear()},
}


def attention_plan(seeds: int = 1, **changes: Any) -> Plan:
    """Five attentions of one model."""
    given = {"model": MODEL, "axes": ("model.attention",), "baseline": "full", "variants": ATTENTIONS}
    return plan(small(**{**given, **changes}), seeds=seeds)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("attention")
    write_plan(attention_plan(), folder, {})
    return folder


def test_costs_are_what_harness_cost_says(counted: Path) -> None:
    costs = load_study(counted).costs
    assert len(costs) == len(ATTENTIONS) * len(LENGTHS)
    for cell in attention_plan().cells[: len(ATTENTIONS)]:
        own = costs[costs["variant"] == cell.variant]
        said = cost_document("x", cell.spec.model, cell.spec.task.vocab_size, [256, 1024], "fp32")
        assert set(own["parameters"]) == {said["parameters"]}
        for length in said["lengths"]:
            row = own[own["tokens"] == length["length"]].iloc[0]
            assert row["flops_per_token_forward"] == length["forward_flops"] / length["length"]
            assert row["score_elements"] * 4 == length["score_bytes"]
            assert row["cache_bytes"] == length["cache_bytes"]


def test_costs_follow_their_formulas(counted: Path) -> None:
    costs = load_study(counted).costs.set_index(["variant", "tokens"])
    for tokens in LENGTHS:
        full = costs.loc[("full", tokens)]
        assert full["score_elements"] == 2 * 4 * tokens**2
        assert full["cache_bytes"] == 4 * 2 * 2 * 16 * tokens
        assert costs.loc[("grouped", tokens), "cache_bytes"] * 2 == full["cache_bytes"]
        assert costs.loc[("one", tokens), "cache_bytes"] * 4 == full["cache_bytes"]
        assert costs.loc[("window", tokens), "score_elements"] == 2 * 4 * 64 * tokens
        assert costs.loc[("linear", tokens), "score_elements"] == 0
    flops = costs["flops_per_token_forward"]
    assert flops["window", 16_384] == pytest.approx(flops["window", 1024], rel=0.02)  # as long as the window is
    slope = (flops["full", 16_384] - flops["full", 4096]) / (16_384 - 4096)
    assert slope == pytest.approx(2 * 2 * 2 * 16)  # two products of d_model, two layers, a multiply-add is two


def test_the_cache_is_counted_in_the_precision_of_the_device(counted: Path) -> None:
    made = attention_plan()
    on_cuda = Plan(made.name, made.ablation, made.budget, made.seeds, "cuda").costs()
    on_cpu = load_study(counted).costs["cache_bytes"].tolist()
    assert [2 * row["cache_bytes"] for row in on_cuda] == on_cpu  # type: ignore[operator]


def test_a_length_that_a_model_cannot_take_has_no_row() -> None:
    model = MODEL.model_copy(update={"position": Learned(max_length=1100)})
    lengths = {row["tokens"] for row in attention_plan(model=model).costs()}
    assert lengths == {256, 1024}


def test_experts_cost_what_a_token_meets() -> None:
    sparse = MoE(expert=ReLU(d_ff=16), num_experts=4, top_k=1)
    variants = {"dense": {}, "sparse": {"model.feedforward": sparse}}
    made = attention_plan(axes=("model.feedforward",), baseline="dense", variants=variants)
    dense, mixture = (next(row for row in made.costs() if row["variant"] == name) for name in variants)
    routers = 2 * 16 * 4
    assert mixture["active_parameters"] == dense["parameters"] + routers  # type: ignore[operator]
    assert mixture["flops_per_token_forward"] == dense["flops_per_token_forward"] + 2 * routers  # type: ignore[operator]


def test_costs_are_counted_again_only_when_the_plan_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    monkeypatch.setattr(harness.study, "costs_by_length", lambda spec: counts.append(spec) or [{"tokens": 256}])
    write_plan(attention_plan(), tmp_path, {})
    assert len(counts) == len(ATTENTIONS)
    write_plan(attention_plan(), tmp_path, {"command": "again"})
    assert len(counts) == len(ATTENTIONS)
    write_plan(attention_plan(model=MODEL.model_copy(update={"num_layers": 1})), tmp_path, {})
    assert len(counts) == 2 * len(ATTENTIONS)
    write_plan(plan(), tmp_path, {})  # another axis: what is there now would mislead
    assert not (tmp_path / "costs.csv").exists()
    assert load_study(tmp_path).costs.empty


# The chapter


COSTS = """variant,tokens,parameters,active_parameters,flops_per_token_forward,score_elements,cache_bytes
none,1024,5000,5000,2000.0,1000000,4096
none,16384,5000,5000,8000.0,256000000,65536
NA,1024,4000,4000,1000.0,1000000,1024
NA,16384,4000,4000,4000.0,256000000,16384
linear,1024,4000,3000,1000.0,0,512
linear,16384,4000,3000,1000.0,0,512
"""


def made(folder: Path, costs: str = COSTS, **changes: Any) -> Any:
    """Three variants, two of which have names that pandas takes for missing values."""
    folder.mkdir(exist_ok=True)
    (folder / "costs.csv").write_text(costs)
    return study(folder, ("none", "NA", "linear"), axes=("model.attention",), seeds=1, **changes)


def rows(found: Any) -> dict[tuple[str, str], dict[str, str]]:
    """The table's rows by variant and length."""
    table, _ = blocks(CHAPTER, found)
    assert isinstance(table, Table)
    made = [dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows]
    return {(row["variant"], row["tokens"]): row for row in made}


def test_the_table_has_ratios_to_what_each_variant_is_compared_with(tmp_path: Path) -> None:
    table = rows(made(tmp_path, against={"linear": "NA"}))
    assert table["none", "1\u202f024"]["forward pass, FLOPs a token"] == "2 k"
    assert table["NA", "16\u202f384"]["forward pass, FLOPs a token"] == "4 k (× 0.5)"
    assert table["NA", "16\u202f384"]["cache of keys and values, bytes a sequence"] == "16.4 k (× 0.25)"
    assert table["linear [NA]", "16\u202f384"]["cache of keys and values, bytes a sequence"] == "512 (× 0.0312)"
    assert table["linear [NA]", "1\u202f024"]["active"] == "3\u202f000"


def test_the_caption_names_lines_that_coincide_and_costs_of_zero(tmp_path: Path) -> None:
    (picture,) = pictures(CHAPTER, made(tmp_path))
    assert "One line in score matrices: none and NA." in picture.caption
    assert "Zero in score matrices, and so not drawn: linear." in picture.caption
    assert [ax.get_xscale() for ax in picture.figure.axes] == ["log"] * 3


def test_without_counted_costs_there_is_no_such_chapter(tmp_path: Path) -> None:
    found = study(tmp_path, ("a", "b"), axes=("model.attention",), seeds=1)
    assert not blocks(CHAPTER, found)
    assert not pictures(CHAPTER, found)


def test_models_that_take_short_sequences_only_have_a_figure_and_no_table(tmp_path: Path) -> None:
    short = "\n".join([COSTS.splitlines()[0], "none,256,5,5,2.0,10,4", "NA,256,5,5,2.0,10,4"])
    found = made(tmp_path, short)
    assert len(pictures(CHAPTER, found)) == 1
    assert [block.kind for block in blocks(CHAPTER, found)] == ["text"]


def test_a_variant_that_cannot_be_counted_is_named_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(spec: RunSpec) -> list[dict[str, float]]:
        assert not isinstance(spec.model.attention, Linear)
        return [{"tokens": 256}]

    monkeypatch.setattr(harness.study, "costs_by_length", raising)
    write_plan(attention_plan(), tmp_path, {})
    assert set(load_study(tmp_path).costs["variant"]) == set(ATTENTIONS) - {"linear"}
    found = made(tmp_path, "\n".join(line for line in COSTS.splitlines() if "linear" not in line))
    assert blocks(CHAPTER, found)[-1].text.endswith("Not counted, as counting raised an error: linear.")  # type: ignore[union-attr]
