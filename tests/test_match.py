"""Variants of equal cost against a search of every width."""

import json
import re
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_study import LENGTHS, plan, small

from harness.components.attention import GroupedQuery, MultiQuery
from harness.components.feedforward import GELU, FeedForward, MoE, ReLU, SwiGLU
from harness.components.position import NoPE, Sinusoidal
from harness.conduct import check_comparisons
from harness.cost import forward_flops
from harness.match import Match, nearest_value
from harness.schema import UserError
from harness.space import Choice, Space
from harness.spec import ModelSpec, RunSpec
from harness.study import Ablation, Budget
from harness.transformer import Transformer
from tasks import Copy, Reverse

WIDTH = "model.feedforward.d_ff"
AXES = ("model.attention", "model.feedforward")
VARIANTS: dict[str, dict[str, Any]] = {
    "relu": {},
    "gated": {"model.feedforward": SwiGLU()},
    "smooth": {"model.feedforward": GELU()},
    "shared": {"model.attention": MultiQuery()},
}


def matched(cost: Any = "parameters", field: str = WIDTH, **changes: Any) -> Ablation:
    """The small study with four variants of equal cost; the baseline's width is 40."""
    fields: dict[str, Any] = {
        "model": ModelSpec(d_model=16, num_heads=2, num_layers=1, feedforward=ReLU(d_ff=40)),
        "axes": AXES,
        "baseline": "relu",
        "variants": VARIANTS,
        "match": Match(cost=cost, field=field),
    }
    return small(**{**fields, **changes})


def size(spec: RunSpec) -> int:
    """Parameters of the real model."""
    return sum(p.numel() for p in Transformer(spec.model, spec.task.vocab_size).parameters())


def work(spec: RunSpec) -> int:
    """FLOPs of the longest training sequence: BOS, source, SEP, answer."""
    return forward_flops(spec.model, spec.task.vocab_size, 2 * LENGTHS.train[1] + 2)


COST = {"parameters": size, "flops": work}


@pytest.mark.parametrize("budget", ["smoke", "wide"])
@pytest.mark.parametrize("cost", list(COST))
def test_the_width_is_the_best_of_all_after_the_budgets_changes(cost: str, budget: str) -> None:
    budgets = {"smoke": Budget(seeds=2), "wide": Budget(seeds=2, changes={"model.d_model": 24, "model.num_layers": 2})}
    ablation = matched(cost, budgets=budgets)
    planned = plan(ablation, budget=budget)
    base = planned.first("relu", "copy")
    target = COST[cost](base)
    assert base.model.feedforward == ReLU(d_ff=40)
    for variant in ("gated", "smooth", "shared"):
        spec = planned.first(variant, "copy")
        found = spec.at(WIDTH)
        every = {width: abs(COST[cost](spec.replace(WIDTH, width)) - target) for width in range(1, 120)}
        assert every[found] == min(every.values())
        assert COST[cost](spec) == pytest.approx(target, rel=0.05)
        assert spec.model.d_model == base.model.d_model


def test_what_is_matched_depends_on_cost_and_field() -> None:
    shared = {cost: plan(matched(cost)).first("shared", "copy").at(WIDTH) for cost in COST}
    assert shared["parameters"] > 40  # what shared keys and values save
    assert shared["flops"] != 40
    deep = {"relu": {}, "narrow": {"model.feedforward": ReLU(d_ff=8)}}
    model = ModelSpec(d_model=16, num_heads=2, num_layers=4, feedforward=ReLU(d_ff=40))
    by_depth = matched(field="model.num_layers", axes=(*AXES, "model.num_layers"), variants=deep, model=model)
    spec = plan(by_depth).first("narrow", "copy")
    assert spec.model.feedforward == ReLU(d_ff=8)
    assert spec.model.num_layers == 7
    assert plan(matched(match=None)).first("gated", "copy").model.feedforward == SwiGLU()


def test_widths_that_heads_do_not_divide_are_passed_over() -> None:
    variants = {"relu": {}, "short": {"model.num_layers": 1}}
    model = ModelSpec(d_model=24, num_heads=6, num_layers=2, feedforward=ReLU(d_ff=40))
    axes = ("model.d_model", "model.num_layers")
    planned = plan(matched(field="model.d_model", axes=axes, variants=variants, model=model))
    target, spec = size(planned.first("relu", "copy")), planned.first("short", "copy")
    possible = {width: abs(size(spec.replace("model.d_model", width)) - target) for width in range(6, 120, 6)}
    assert spec.model.d_model % 6 == 0
    assert possible[spec.model.d_model] == min(possible.values())


@given(
    step=st.integers(1, 9),
    slope=st.integers(1, 50),
    square=st.integers(0, 3),
    base=st.integers(0, 500),
    target=st.integers(1, 20_000),
    at=st.integers(1, 20),
    most=st.integers(20, 400),
)
def test_the_search_finds_the_nearest_of_all(
    step: int, slope: int, square: int, base: int, target: int, at: int, most: int
) -> None:
    """Of costs that rise, over the multiples of a number up to a limit."""
    asked = []

    def cost(value: int) -> int:
        asked.append(value)
        return base + slope * value + square * value * value

    def possible(value: int) -> bool:
        return 1 <= value <= step * most and value % step == 0

    found = nearest_value(cost, possible, target, at * step)
    best = min(range(step, step * most + 1, step), key=lambda value: (abs(cost(value) - target), value))
    assert found == best
    assert all(map(possible, asked))


def test_a_field_that_changes_no_cost_stays_as_it_is() -> None:
    assert nearest_value(lambda value: 100, lambda value: value > 0, 102, 4) == 4


def test_a_variant_has_one_width_on_all_tasks_and_seeds() -> None:
    planned = plan(matched("flops"))
    widths = {(cell.variant, cell.spec.at(WIDTH)) for cell in planned.cells}
    assert len(widths) == len(VARIANTS)


def test_a_matched_study_says_so_and_names_the_widths() -> None:
    document = plan(matched()).document({})
    assert document["match"] == {"cost": "parameters", "field": WIDTH}
    assert document["differences"]["gated"] == {"model.feedforward": "SwiGLU", WIDTH: 28}
    assert "match" not in plan().document({})
    assert json.loads(json.dumps(document)) == document


def test_a_matched_ablation_survives_the_round_trip() -> None:
    again = Ablation.parse(json.dumps(matched().document()))
    assert again.document() == matched().document()
    assert [cell.fingerprint for cell in plan(again).cells] == [cell.fingerprint for cell in plan(matched()).cells]


def test_runs_are_named_as_those_of_variants_that_set_the_width_themselves() -> None:
    planned = plan(matched())
    widths = {variant: planned.first(variant, "copy").at(WIDTH) for variant in VARIANTS}
    by_hand = {variant: {**changes, WIDTH: widths[variant]} for variant, changes in VARIANTS.items()}
    same = plan(matched(match=None, variants=by_hand))
    assert [cell.fingerprint for cell in same.cells] == [cell.fingerprint for cell in planned.cells]


def test_matched_variants_are_pure() -> None:
    check_comparisons(plan(matched(), seeds=1))
    assert torch.is_grad_enabled()


def feedforward(level: FeedForward) -> dict[str, Any]:
    return {"variants": {"relu": {}, "x": {"model.feedforward": level}}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cost": "params"}, "Match.cost = 'params': input should be 'flops' or 'parameters'"),
        ({"field": "train.steps"}, "match.field = 'train.steps': name a whole number of the model"),
        ({"axes": ("model.attention",), "variants": {"relu": {}, "shared": VARIANTS["shared"]}},
         f"match.field = '{WIDTH}' is not within axes = ['model.attention']; add it there"),
        ({"variants": {"relu": {}, "x": {"model.feedforward": SwiGLU(), WIDTH: 27}}},
         f"variants.x sets {WIDTH}, which match solves for; leave it out there"),
        (feedforward(SwiGLU(d_ff=27)), f"variants.x sets {WIDTH}, which match solves for; leave it out there"),
        (feedforward(MoE()), f"variants.x: with budget 'smoke' on copy, {WIDTH}: MoE has no field 'd_ff'"),
        ({"field": "model.d_head", "axes": (*AXES, "model.d_head")}, "match.field = 'model.d_head' is None there"),
        ({"field": "model.feedforward", "axes": AXES, "variants": {"relu": {}, "shared": VARIANTS["shared"]}},
         "match.field = 'model.feedforward' is ReLU(d_ff=40) there, no whole number; name another field"),
        ({"space": Space(fields={"model.num_layers": Choice(options=(1, 2))})},
         "space.fields: model.num_layers would undo the match; tune fields of train"),
        (feedforward(ReLU()), "variants.x is the same as variants.relu"),
    ],
)  # fmt: skip
def test_what_cannot_be_matched_is_refused_with_path_value_and_remedy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        matched(**changes)
    assert "\n" not in str(caught.value)


def test_a_variant_that_cannot_come_near_is_refused_with_the_nearest_value_and_how_far_it_is_off() -> None:
    variants = {"relu": {}, "deep": {"model.num_layers": 8}}
    said = (
        rf"variants\.deep: with budget 'smoke' on copy, the nearest match, {WIDTH} = 1, is \+\d+ % off the baseline's"
    )
    remedy = r"parameters; match by another field or change the variant$"
    with pytest.raises(UserError, match=f"{said} .*{remedy}"):
        matched(variants=variants, axes=("model.num_layers", "model.feedforward"))


def test_a_match_on_one_task_that_is_none_on_another_is_refused() -> None:
    """The vocabulary's part of the parameters grows with the width that is matched."""
    model = ModelSpec(d_model=16, num_heads=2, num_layers=2, feedforward=ReLU(d_ff=40))
    tasks = {"few": Copy(lengths=LENGTHS), "many": Reverse(lengths=LENGTHS, num_symbols=5000)}
    with pytest.raises(UserError, match=r"variants\.short: with budget 'smoke' on many, the nearest match, model"):
        matched(
            field="model.d_model",
            axes=("model.d_model", "model.num_layers"),
            variants={"relu": {}, "short": {"model.num_layers": 1}},
            model=model,
            tasks=tasks,
        )


def test_the_baseline_may_set_the_field_itself() -> None:
    own = {**VARIANTS, "relu": {"model.feedforward": ReLU(d_ff=32)}}
    assert plan(matched(variants=own)).first("relu", "copy").at(WIDTH) == 32
    assert 18 <= plan(matched(variants=own)).first("gated", "copy").at(WIDTH) <= 23


@cache
def _default() -> str:
    return plan(matched()).first("gated", "copy").fingerprint()


@pytest.mark.parametrize("level", [SwiGLU(), {"kind": "SwiGLU", "d_ff": 500}], ids=["as a level", "as JSON"])
def test_where_the_search_starts_does_not_matter(level: Any) -> None:
    variants = {"relu": {}, "gated": {"model.feedforward": level}}
    assert plan(matched(variants=variants)).first("gated", "copy").fingerprint() == _default()


def test_grouped_keys_of_another_field_are_no_obstacle() -> None:
    variants = {
        "relu": {},
        "none": {"model.position": NoPE()},
        "grouped": {"model.attention": GroupedQuery(num_groups=1)},
    }
    planned = plan(matched(axes=(*AXES, "model.position"), variants=variants))
    assert planned.first("none", "copy").at(WIDTH) == 40  # what costs the same keeps its width
    assert planned.first("none", "copy").model.position != Sinusoidal()
    assert planned.first("grouped", "copy").at(WIDTH) > 40
