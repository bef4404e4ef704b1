"""Every level of every axis: reachable, buildable, trainable, serialisable, explained and tested."""

import math
import re
from collections.abc import Iterator
from inspect import isabstract
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from harness.runner import run
from harness.schema import Level, Spec, UserError, is_foreign
from harness.space import Dimension
from harness.spec import ModelSpec, RunSpec, TrainSpec
from tasks import Copy, Lengths, Task

TESTS = Path(__file__).parent
LENGTHS = Lengths(train=(1, 2), test=(3,))
TINY = ModelSpec(d_model=16, num_heads=2, num_layers=1)
RUN = RunSpec(
    model=TINY, task=Copy(lengths=LENGTHS), train=TrainSpec(steps=2, batch_size=2, eval_samples=2)
)  # fmt: skip
PAPER = re.compile(r"arXiv:\d{4}\.\d{4,5}")
EQUATION = re.compile(r"[=√·⊙²Σ/]")


class Axis(NamedTuple):
    """A field that takes a level: its path, the axis's base, and the levels around it by path (`QKNorm.norm`)."""

    path: str
    base: type[Level]
    around: dict[str, type[Level]]


def axes(kind: type[Spec] = RunSpec, prefix: str = "", around: dict[str, type[Level]] | None = None) -> Iterator[Axis]:
    """Every field that takes a level, those of levels included, but for levels of an axis within the same axis."""
    outer = around or {}
    for name, field in kind.model_fields.items():
        for annotation in (field.annotation, *get_args(field.annotation)):
            if (
                isinstance(annotation, type)
                and issubclass(annotation, Level)
                and not any(issubclass(level, annotation) for level in outer.values())
            ):
                yield Axis(prefix + name, annotation, outer)
                for level in own_levels(annotation):
                    yield from axes(level, f"{prefix}{name}.", {**outer, prefix + name: level})
            elif isinstance(annotation, type) and issubclass(annotation, Spec) and not issubclass(annotation, Level):
                yield from axes(annotation, f"{prefix}{name}.", outer)


def own_levels(base: type[Level]) -> list[type[Level]]:
    return [level for level in base.levels().values() if not is_foreign(level)]


def subclasses(kind: type) -> Iterator[type]:
    for sub in kind.__subclasses__():
        yield sub
        yield from subclasses(sub)


def with_level(path: str, level: type[Level]) -> RunSpec:
    return RUN.replaced({**{outer: made(kind) for outer, kind in AROUND[path].items()}, path: made(level)})


def made(level: type[Level]) -> Level:
    return level(lengths=LENGTHS) if issubclass(level, Task) else level()


def can_be(path: str, level: type[Level]) -> bool:
    try:
        return with_level(path, level) is not None
    except UserError:
        assert AROUND[path], f"{path} = {level.__name__} cannot be combined with the defaults"
        return False


AXES = {axis.path: axis.base for axis in axes()}
AROUND = {axis.path: axis.around for axis in axes()}
EVERY = [
    pytest.param(path, level, id=f"{path}={level.__name__}")
    for path, base in AXES.items()
    for level in own_levels(base)
    if can_be(path, level)
]


def test_the_axes_are_found() -> None:
    assert {"model.position", "model.norm", "model.norm_placement", "model.scale", "model.feedforward"} <= set(AXES)
    assert {"train.schedule", "train.sampling", "train.kernel", "task"} <= set(AXES)


def test_every_level_of_ours_can_be_reached_from_a_run_spec() -> None:
    reached = {level for base in AXES.values() for level in base.levels().values()}
    ours = {sub for sub in subclasses(Level) if not is_foreign(sub) and not issubclass(sub, Dimension)}  # of a sweep
    bases = {sub for sub in ours if Level in sub.__bases__}
    ours -= {sub for sub in ours - bases if isabstract(sub)}  # what some levels of an axis have in common
    assert ours - bases == {level for level in reached if not is_foreign(level)}
    assert bases == set(AXES.values())


@pytest.mark.parametrize(("path", "level"), EVERY)
def test_every_level_builds_and_trains_two_steps(path: str, level: type[Level]) -> None:
    record = run(with_level(path, level))
    assert record.status == "finished", record.cause
    assert math.isfinite(record.final["train/loss"])
    assert record.ledger["steps"] == 2
    assert {score.length for score in record.scores} == {1, 2, 3}


@pytest.mark.parametrize(("path", "level"), EVERY)
def test_every_level_parses_back_to_itself(path: str, level: type[Level]) -> None:
    spec = with_level(path, level)
    made = spec.at(path)
    assert type(made) is level
    assert made.document()["kind"] == level.__name__
    assert AXES[path].parse(made.document()) == level.parse(made.document()) == made
    assert RunSpec.parse(spec.document()) == spec
    assert hash(made) == hash(level.parse(made.document()))


@pytest.mark.parametrize(("path", "level"), EVERY)
def test_every_level_says_what_it_is(path: str, level: type[Level]) -> None:
    text = level.__dict__.get("__doc__") or ""
    assert len(text) > 20
    if path.startswith("model."):
        assert PAPER.search(text) or EQUATION.search(text), "no paper and no equation"


@pytest.mark.parametrize("task", own_levels(Task), ids=lambda task: task.__name__)
def test_every_task_is_drawn(task: type[Level]) -> None:
    text = __import__(task.__module__, fromlist=["*"]).__doc__
    assert re.search(r"^    BOS .* SEP .* EOS$", text, re.MULTILINE)


@pytest.mark.parametrize(("path", "level"), EVERY)
def test_every_level_is_named_in_the_test_file_of_its_module(path: str, level: type[Level]) -> None:
    *folders, name = level.__module__.split(".")
    folders = [folder for folder in folders if folder != "harness"]
    file = TESTS.joinpath(*folders, f"test_{name}.py")
    assert re.search(rf"\b{level.__name__}\(", file.read_text()), f"{file.name} never makes a {level.__name__}"


@pytest.mark.parametrize("base", AXES.values(), ids=lambda base: base.__name__)
def test_every_base_explains_its_axis_and_makes_nothing_itself(base: type[Level]) -> None:
    assert base.__doc__
    assert base.__name__ not in base.levels()
    assert own_levels(base)
    if any(getattr(getattr(base, name), "__isabstractmethod__", False) for name in dir(base)):
        with pytest.raises(TypeError, match="abstract"):
            base()
