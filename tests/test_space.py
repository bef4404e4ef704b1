import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_study import plan, small

from harness.components.position import RoPE
from harness.locate import ablation_files, find_ablation
from harness.schema import UserError
from harness.space import Choice, Dimension, FloatRange, IntegerRange, Space
from harness.spec import Constant, RunSpec, WarmupCosine
from harness.study import Ablation
from tasks import Copy

POSITIVE = st.floats(1e-12, 1e12)


@st.composite
def float_ranges(draw: st.DrawFn) -> FloatRange:
    log = draw(st.booleans())
    low, high = sorted(draw(st.tuples(*[POSITIVE if log else st.floats(-1e12, 1e12)] * 2)))
    return FloatRange(low=low, high=math.nextafter(high, math.inf), log=log, points=draw(st.integers(2, 9)))


@st.composite
def integer_ranges(draw: st.DrawFn) -> IntegerRange:
    log = draw(st.booleans())
    low = draw(st.integers(1 if log else -(10**9), 10**9))
    return IntegerRange(low=low, high=low + draw(st.integers(1, 10**9)), log=log, points=draw(st.integers(2, 9)))


CHOICES = st.lists(st.one_of(st.integers(), st.text(), st.none()), min_size=2, max_size=5, unique=True).map(
    lambda options: Choice(options=tuple(options))
)
DIMENSIONS = st.one_of(float_ranges(), integer_ranges(), CHOICES)


@given(DIMENSIONS)
def test_a_dimension_survives_the_round_trip(dimension: Dimension) -> None:
    again = Dimension.parse(json.dumps(dimension.document()))
    assert type(again) is type(dimension)
    assert again.document() == dimension.document()


@given(DIMENSIONS)
def test_ends_and_grid_lie_in_the_dimension_and_the_grid_has_each_value_once(dimension: Dimension) -> None:
    grid = dimension.grid()
    assert all(dimension.holds(value) for value in (*grid, *dimension.ends()))
    assert set(map(str, dimension.ends())) <= set(map(str, grid))
    assert len(grid) == len(set(grid)) or isinstance(dimension, FloatRange)  # a few floats apart, points fall together


@given(float_ranges() | integer_ranges())
def test_both_ends_are_edges_and_what_lies_outside_is_not_held(dimension: FloatRange | IntegerRange) -> None:
    assert (dimension.edge(dimension.low), dimension.edge(dimension.high)) == ("low", "high")
    assert not dimension.holds(dimension.low - abs(dimension.low) - 1)
    assert not dimension.holds("text")


def test_the_middle_of_a_range_is_no_edge_by_factors_where_it_is_searched_so() -> None:
    assert FloatRange(low=1e-4, high=1.0, log=True).edge(1e-2) == ""
    assert FloatRange(low=1e-4, high=1.0).edge(1e-2) == "low"
    assert IntegerRange(low=0, high=100).edge(96) == "high"


def test_options_may_be_levels() -> None:
    choice = Choice(options=(Constant(), WarmupCosine(warmup=0.1)))
    assert choice.holds(WarmupCosine(warmup=0.1))
    assert not choice.holds(WarmupCosine(warmup=0.2))
    space = Space(fields={"train.schedule": choice})
    again = Ablation.parse(json.dumps(small(space=space).document()))
    assert again.document() == small(space=space).document()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FloatRange(low=1.0, high=1.0), r"low = 1.0 is not below high = 1.0; widen"),
        (lambda: FloatRange(low=0.0, high=1.0, log=True), r"low = 0.0 has no logarithm; use a positive one"),
        (lambda: FloatRange(low=0.0, high=1.0, points=1), r"FloatRange\.points = 1: .*; use at least 2"),
        (lambda: FloatRange(low=0.0, high=math.inf), r"high = inf: .* finite"),
        (lambda: IntegerRange(low=0.5, high=2), r"low = 0.5: .*; give a plain whole number"),
        (lambda: Choice(options=(1,)), r"options = \(1,\): .* at least 2"),
        (lambda: Choice(options=(1, 2, 1)), r"1 stands twice among the options; drop one"),
        (lambda: Choice(options=(1, object())), r"option <object .*: a spec holds numbers, text and levels"),
        (lambda: Space(seeds=0), r"Space\.seeds = 0: .*; use at least 1"),
        (lambda: Space(costs=("flops", "flops")), r"costs = \['flops', 'flops'\]: one stands twice; drop it"),
        (
            lambda: Space(fields=dict.fromkeys(("train.schedule", "train.schedule.warmup"), Choice(options=(1, 2)))),
            r"train\.schedule\.warmup lies within train\.schedule; name one of them",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_in_a_sentence(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


@pytest.mark.parametrize(
    ("path", "dimension", "said"),
    [
        ("model.position", Choice(options=(1, 2)), "lies along the axis model.position, which the variants set; drop"),
        ("model.position.base", FloatRange(low=1.0, high=2.0), "lies along the axis model.position"),
        ("train.steps", IntegerRange(low=1, high=2), "cannot be tuned; name a field of model or train that keeps"),
        ("task.lengths", Choice(options=(1, 2)), "cannot be tuned"),
        ("model", Choice(options=(1, 2)), "cannot be tuned"),
        ("train.lerning_rate", FloatRange(low=1.0, high=2.0), "did you mean 'learning_rate'"),
        ("train.learning_rate", FloatRange(low=1.0, high=20.0), r"train.learning_rate = 20.0: .*; use at most 10"),
        ("model.num_layers", FloatRange(low=1.0, high=2.0), "model.num_layers = 1.0: .*; give a plain whole number"),
        ("model.num_heads", Choice(options=(2, 3)), "num_heads = 3 does not divide d_model = 16"),
    ],
)
def test_a_space_that_does_not_fit_its_ablation_is_refused(path: str, dimension: Dimension, said: str) -> None:
    with pytest.raises(UserError, match=rf"space\.fields.*{said}"):
        small(space=Space(fields={path: dimension}))


def test_a_field_that_one_variant_lacks_is_refused_and_which_is_said() -> None:
    variants = {"cosine": {}, "constant": {"train.schedule": Constant()}}
    space = Space(fields={"train.schedule.warmup": FloatRange(low=0.0, high=0.5)})
    with pytest.raises(UserError, match=r"axis train\.schedule"):
        small(axes=("train.schedule",), baseline="cosine", variants=variants, space=space)
    lacking = {"one": {}, "two": {"model.position": RoPE()}}
    with pytest.raises(UserError, match=r"variants\.one has no such field"):
        small(
            axes=("model.position.kind", "model.position"),
            baseline="one",
            variants=lacking,
            space=Space(fields={"model.feedforward.num_experts": IntegerRange(low=2, high=4)}),
        )


@pytest.mark.parametrize("name", ablation_files())
def test_every_ablation_of_the_project_has_something_to_tune_that_no_axis_moves(name: str) -> None:
    ablation = find_ablation(name).ablation
    for budget in ablation.budgets:
        specs = [
            ablation.run_spec(v, next(iter(ablation.tasks)), seed=0, device="cpu", budget=budget)
            for v in ablation.variants
        ]
        found = ablation.space.dimensions(specs, ablation.axes)
        assert found
        Space(fields=found).check(dict(zip(ablation.variants, specs, strict=True)), ablation.axes)
        rate = found.get("train.learning_rate")
        assert rate is None or all(rate.holds(spec.train.learning_rate) for spec in specs)


def test_tuning_samples_make_another_run_and_the_final_ones_keep_their_fingerprint() -> None:
    final = RunSpec(task=Copy())
    tuning = final.replace("samples", "tuning")
    assert "samples" not in final.document()
    assert RunSpec.parse(tuning.model_dump_json()) == tuning
    assert final.fingerprint() != tuning.fingerprint()
    assert final.fingerprint() == "b34421799c253d7f"  # as it was before there were sweeps
    assert tuning.replace("samples", "final").fingerprint() == final.fingerprint()


def test_a_space_changes_no_run() -> None:
    with_one = small(space=Space(fields={"train.beta2": Choice(options=(0.9, 0.99))}, seeds=3))
    assert [c.fingerprint for c in plan(with_one).cells] == [c.fingerprint for c in plan().cells]
