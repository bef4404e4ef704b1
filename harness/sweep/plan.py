"""What a sweep is going to do, with everything decided."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from harness.conduct import resolve_device
from harness.schema import Spec, UserError, canonical_json, is_foreign, shown, source_file
from harness.seeding import stable_hash
from harness.space import Choice, Dimension, FloatRange, IntegerRange
from harness.spec import RunSpec
from harness.study import Ablation, Device, Plan, make_plan
from harness.tuned import asked_for, content, dimensions
from harness.wording import listed

Sampler = Literal["tpe", "random", "grid"]
SAMPLERS: tuple[Sampler, ...] = ("tpe", "random", "grid")
TRIALS = 20  # a variant, where nobody says otherwise
REDUCTION = 3  # of the trials at a rung one in so many goes on
RUNGS = 2  # at 1/9 and 1/3 of a trial's steps


@dataclass(frozen=True)
class SweepPlan:
    """A sweep with everything decided."""

    plan: Plan  # on pilot seeds
    dimensions: dict[str, Dimension]
    trials: int
    sampler: Sampler
    pruning: bool
    content: str

    @cached_property
    def name(self) -> str:
        """The ablation's name."""
        return self.plan.name.removesuffix("-pilot")

    @property
    def variants(self) -> list[str]:
        """The baseline first."""
        return self.plan.variants

    @property
    def ablation(self) -> Ablation:
        """What is tuned."""
        return self.plan.ablation

    @property
    def costs(self) -> tuple[str, ...]:
        """Objectives beside the score."""
        return self.ablation.space.costs

    @cached_property
    def id(self) -> str:
        """Trials of sweeps with another id are not of the same kind."""
        how = [self.content, self.plan.device, self.sampler, self.pruning]
        return f"{stable_hash(canonical_json(how)):016x}"

    @cached_property
    def document(self) -> dict[str, Any]:
        """The pilot's plan as `study.json` would have it."""
        return self.plan.document({})

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The space in Optuna's words."""
        return {path: _distribution(dimension) for path, dimension in self.dimensions.items()}

    @property
    def steps(self) -> int:
        """Of a trial, all its runs together; the baseline's, as variants may have steps of their own."""
        runs = len(self.plan.seeds) * len(self.ablation.tasks)
        return self.plan.first(self.variants[0], next(iter(self.ablation.tasks))).train.steps * runs

    def runs(self, variant: str, changes: Mapping[str, Any]) -> list[tuple[str, int, RunSpec]]:
        """Task, seed and spec of each run of a trial, in their order: what is compared at a rung is alike.

        Raises:
            UserError: the variant cannot have these values together.
        """
        return [
            (task, seed, self.plan.first(variant, task).replaced({**changes, "seed": seed, "samples": "tuning"}))
            for seed in self.plan.seeds
            for task in self.ablation.tasks
        ]

    def changes(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """A trial's parameters as changes of a RunSpec."""
        return {path: _value(self.dimensions[path], value) for path, value in params.items()}

    def own(self, variant: str) -> dict[str, Any] | None:
        """The ablation's own setting of a variant as parameters; None where it lies outside the space."""
        spec, found = self.plan.first(variant, next(iter(self.ablation.tasks))), {}
        for path, dimension in self.dimensions.items():
            value = spec.at(path)
            if not dimension.holds(value):
                return None
            found[path] = dimension.label(value) if isinstance(dimension, Choice) else value
        return found


def plan_sweep(
    name: str,
    ablation: Ablation,
    *,
    budget: str | None = None,
    trials: int | None = None,
    seeds: int | None = None,
    sampler: Sampler = "tpe",
    pruning: bool = True,
    costs: Sequence[str] | None = None,
    device: Device | Literal["auto"] = "auto",
) -> SweepPlan:
    """The plan of a sweep.

    Raises:
        UserError: unknown budget or sampler, nothing to tune, a number that cannot be, a grid larger than the budget.
    """
    if sampler not in SAMPLERS:
        raise UserError(f"sampler = {shown(sampler)}: choose {listed(SAMPLERS, 'or')}")
    ablation = asked_for(ablation, seeds, costs)
    budget = budget or ablation.default_budget
    plan = make_plan(
        name, ablation, budget=budget, seeds=ablation.space.seeds, device=resolve_device(device), pilot=True
    )
    found = dimensions(ablation, budget)
    count = _grid_size(found, trials) if sampler == "grid" else TRIALS if trials is None else trials
    if count < 1:
        raise UserError(f"trials = {count}: it takes at least one")
    return SweepPlan(plan, found, count, sampler, pruning and not ablation.space.costs, content(ablation, budget))


def _grid_size(found: dict[str, Dimension], trials: int | None) -> int:
    size = math.prod(len(dimension.grid()) for dimension in found.values())
    if trials is not None and trials < size:
        points = " × ".join(f"{len(dimension.grid())} of {path}" for path, dimension in found.items())
        raise UserError(f"--trials {trials}: the grid has {size} settings ({points}); give it as many trials, or fewer "
                        f"points in the ablation's space")  # fmt: skip
    return size


def _distribution(dimension: Dimension) -> BaseDistribution:
    match dimension:
        case FloatRange():
            return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
        case IntegerRange():
            return IntDistribution(dimension.low, dimension.high, log=dimension.log)
        case Choice():
            return CategoricalDistribution([dimension.label(option) for option in dimension.options])
    raise UserError(f"space: {dimension.kind} is no range that can be searched; use FloatRange, IntegerRange or Choice")


def _value(dimension: Dimension, value: Any) -> Any:
    return json.loads(value) if isinstance(dimension, Choice) else value


def option_sources(dimensions: Mapping[str, Dimension]) -> set[str]:
    """Files of the user's own that define levels among the options; those of a document are known by their names."""
    options = [option for d in dimensions.values() if isinstance(d, Choice) for option in d.options]
    kinds = {type(part) for option in options if isinstance(option, Spec) for part in option.specs()}
    return {str(file) for kind in kinds if is_foreign(kind) and (file := source_file(kind)) is not None}
