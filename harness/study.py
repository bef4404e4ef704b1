"""Ablation → variants × tasks × seeds → RunSpecs; what is done, what is left.

An ablation is data: a question, a baseline, the axes that vary, named variants. Planning it gives cells, each a RunSpec
with its fingerprint; the records on disk say which of them are done.
"""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from unicodedata import category

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import Field, PlainSerializer, model_validator

from harness.cost import costs_by_length
from harness.evaluate import GATE
from harness.machine import commit, environment
from harness.match import Match
from harness.record import RunRecord, has_record, read_plan, set_aside, write_atomically
from harness.schema import Spec, UserError, is_foreign, is_within, nearest, source_file
from harness.space import Space
from harness.spec import ModelSpec, RunSpec, TrainSpec
from tasks.task import Task

if TYPE_CHECKING:
    import pandas as pd

COUNTED = ("model.attention", "model.num_heads", "model.d_head", "model.feedforward")  # axes whose cost has a length
PILOT_SEED = 1000  # seeds from here on choose settings and conclude nothing

Device = Literal["cpu", "cuda"]


def _plain(changes: dict[str, Any]) -> dict[str, Any]:
    return {path: value.document() if isinstance(value, Spec) else value for path, value in changes.items()}


Overrides = Annotated[dict[str, Any], PlainSerializer(_plain)]  # dotted path of a RunSpec -> value


class Budget(Spec):
    """How much a study may cost: how many seeds, and what it changes in every run (`{"train.steps": 4000}`)."""

    seeds: Annotated[int, Ge(1), Le(PILOT_SEED)] = 8
    changes: Overrides = Field(default_factory=dict)


class Ablation(Spec):
    """One question, asked by training the same model with one component changed.

    `variants` maps a name to what it changes in the baseline's RunSpec, by dotted path (`{"model.position": RoPE()}`);
    `axes` names the paths that may differ, and nothing else may. Each variant is compared with the baseline, or with
    the variant that `against` names for it (the rung below on a ladder, its partner at another depth). `margin` is the
    difference in score that would matter: two variants closer than that count as equivalent. Budgets change every
    variant alike. `match` makes every variant cost what the baseline costs. `space` is what `harness sweep` tunes for
    each variant.

    `score` is a metric's mean over the test lengths, or `learning_time`: the share of the training steps after which
    an evaluation at the training lengths first passed the gate (1: it does not in the end), for tasks that variants
    solve in the end; lower is better, and `train.eval_every` is its resolution.
    """

    question: Annotated[str, MinLen(1)]
    claims: tuple[str, ...] = ()
    why: str = ""
    model: ModelSpec = ModelSpec()
    train: TrainSpec = TrainSpec()
    tasks: Annotated[dict[str, Task], MinLen(1)]
    axes: Annotated[tuple[str, ...], MinLen(1)]
    baseline: str
    variants: Annotated[dict[str, Overrides], MinLen(1)]
    against: dict[str, str] = Field(default_factory=dict)
    score: Literal["exact_match", "exact_match_no_end", "token_accuracy", "learning_time"] = "exact_match"
    higher_is_better: bool = True
    margin: Annotated[float, Gt(0), Lt(1)] = 0.1
    budgets: Annotated[dict[str, Budget], MinLen(1)] = Field(default_factory=lambda: {"quick": Budget()})
    match: Match | None = None
    space: Space = Space()

    @model_validator(mode="after")
    def _sound(self) -> "Ablation":
        self._check_names()
        if self.baseline not in self.variants:
            raise ValueError(f"baseline = {self.baseline!r} is no variant; {nearest(self.baseline, self.variants)}")
        self._check_references()
        if self.higher_is_better == (self.score == "learning_time"):
            right = not self.higher_is_better
            raise ValueError(f"higher_is_better = {not right} does not fit score = {self.score!r}; use {right}")
        if self.score == "exact_match" and not all(task.train_end_token for task in self.tasks.values()):
            raise ValueError(
                "score = 'exact_match' asks for the end token, which a task does not train; use 'exact_match_no_end'"
            )
        self._check_axes()
        for variant, changes in self.variants.items():
            if strays := [path for path in changes if not is_within(path, self.axes)]:
                raise ValueError(
                    f"variants.{variant}: {strays[0]} is not among axes = {list(self.axes)}; declare it there"
                )
        if self.match:
            others = {variant: changes for variant, changes in self.variants.items() if variant != self.baseline}
            self.match.check(self.axes, others, self.space.fields)
        tasks = list(self.tasks.items())
        for index, (name, task) in enumerate(tasks):
            if twin := next((other for other, same in tasks[:index] if same == task), None):
                raise ValueError(f"tasks.{name} is the same as tasks.{twin}; change one or drop it")
        for budget in self.budgets:
            self._differ(budget)
        return self

    def _check_names(self) -> None:
        """Names stand in tables and lines of text."""
        for where, names in (("variants", self.variants), ("tasks", self.tasks)):
            for name in names:
                if any(category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
                    raise ValueError(f"{where}: {name!r} has a line break or a control character; name it without")

    def _check_references(self) -> None:
        """Each comparison has two arms, and every chain of them ends at the baseline."""
        for variant, other in self.against.items():
            for name in (variant, other):
                if name not in self.variants:
                    raise ValueError(f"against.{variant}: {name!r} is no variant; {nearest(name, self.variants)}")
            seen, at = {variant}, other
            while at != self.baseline and at not in seen:
                seen.add(at)
                at = self.against.get(at, self.baseline)
            if at in seen or variant == self.baseline:
                raise ValueError(
                    f"against.{variant}: comparisons must lead to the baseline {self.baseline!r}, which has none; "
                    f"name a variant that does"
                )

    def _check_axes(self) -> None:
        """Axes exist, are the component's or the training's, and no budget moves along one."""
        specs = [self.run_spec(v, next(iter(self.tasks)), seed=0, device="cpu", budget=None) for v in self.variants]
        self.space.check({name: spec for name, spec in zip(self.variants, specs, strict=True)}, self.axes)
        for axis in self.axes:
            if axis.split(".")[0] not in ("model", "train", "task") or axis in ("task", "task.lengths"):
                raise ValueError(f"axes: {axis} cannot vary in a comparison; name a path of model, train or task")
            reasons = [reason for spec in specs if (reason := _missing(spec, axis))]
            if len(reasons) == len(specs):
                raise ValueError(f"axes: {reasons[0]}")
            for name, budget in self.budgets.items():
                if moved := [path for path in budget.changes if is_within(path, (axis,)) or is_within(axis, (path,))]:
                    raise ValueError(
                        f"budgets.{name}.changes: {moved[0]} lies along the axis {axis}; set it in each variant"
                    )

    def _differ(self, budget: str) -> None:
        """Every variant can be made, and no two are the same model under other names."""
        for task in self.tasks:
            named: dict[str, str] = {}
            for variant in self.variants:
                identity = json.dumps(self.run_spec(variant, task, seed=0, device="cpu", budget=budget).document())
                if identity in named:
                    raise ValueError(
                        f"variants.{variant} is the same as variants.{named[identity]}; change one or drop it"
                    )
                named[identity] = variant

    def run_spec(self, variant: str, task: str, *, seed: int, device: Device, budget: str | None) -> RunSpec:
        """The RunSpec of a cell; without a budget, what the ablation says before any, and before it is matched.

        Raises:
            UserError: a change names a field that does not exist, or a value or combination that cannot be; a variant
                cannot be matched.
        """
        spec = self._declared(variant, task, seed=seed, device=device, budget=budget)
        if self.match is None or budget is None or variant == self.baseline:
            return spec
        first = next(iter(self.tasks))

        def plain(variant: str, task: str) -> RunSpec:
            return self._declared(variant, task, seed=0, device="cpu", budget=budget)

        try:
            spec = spec.replace(self.match.field, self.match.value(plain(variant, first), plain(self.baseline, first)))
            self.match.check_equal(spec, plain(self.baseline, task))
        except UserError as error:
            raise UserError(f"variants.{variant}: with budget {budget!r} on {task}, {error}") from error
        return spec

    def _declared(self, variant: str, task: str, *, seed: int, device: Device, budget: str | None) -> RunSpec:
        """The same before it is matched."""
        base = {"model": self.model.document(), "train": self.train.document(), "task": self.tasks[task].document()}
        spec = RunSpec.parse({**base, "seed": seed, "device": device})
        origins = [(f"variants.{variant}", self.variants[variant])]
        if budget is not None:
            origins.insert(0, (f"budgets.{budget}.changes", self.budget(budget).changes))
        for origin, changes in origins:
            try:
                spec = spec.replaced(changes)
            except UserError as error:
                raise UserError(f"{origin}: {error}") from error
        return spec

    @property
    def default_budget(self) -> str:
        """*quick*, or the only budget that there is."""
        return next(iter(self.budgets)) if len(self.budgets) == 1 else "quick"

    def budget(self, name: str) -> Budget:
        """A budget by name.

        Raises:
            UserError: the ablation has no such budget.
        """
        if name not in self.budgets and name == self.default_budget:
            raise UserError(
                f"this ablation has no budget 'quick', which is meant where none is named; name one with "
                f"--budget: {', '.join(self.budgets)}"
            )
        if name not in self.budgets:
            remedy = f"add it to its budgets or choose one: {nearest(name, self.budgets)}"
            raise UserError(f"budget {name!r}: this ablation has no such budget; {remedy}")
        return self.budgets[name]


def _missing(spec: RunSpec, path: str) -> str:
    """Why a spec has no such path; empty if it has."""
    try:
        spec.at(path)
    except UserError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Cell:
    """One planned run."""

    variant: str
    task: str
    seed: int
    spec: RunSpec

    @cached_property
    def fingerprint(self) -> str:
        """The run's name on disk."""
        return self.spec.fingerprint()


@dataclass(frozen=True)
class Plan:
    """An ablation with everything decided: budget, seeds, device.

    A plan with `looks` stops after so many seeds, again and again, and goes on (`further`) with what is undecided then;
    `seeds` are those up to its present look, `wanted` says of (variant, task) how many of them, where not all.
    """

    name: str
    ablation: Ablation
    budget: str
    seeds: tuple[int, ...]
    device: Device
    tuned: Mapping[str, Any] | None = None  # what `study.json` says of a sweep whose settings the variants have
    looks: tuple[int, ...] = ()
    wanted: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every run, the baseline's first: one task after the other, so that its verdicts come early; then seed by
        seed.
        """
        return tuple(
            Cell(variant, task, seed, self._spec(variant, task, seed))
            for task in self.ablation.tasks
            for place, seed in enumerate(self.seeds)
            for variant in self.variants
            if place < self.wanted.get((variant, task), len(self.seeds))
        )

    def further(self, compared: "pd.DataFrame") -> "Plan | None":
        """The plan at its next look, by what `compare` says at this one: more seeds for both arms of each comparison
        that is undecided. None where there is no such look or nothing is undecided.
        """
        seeds = next((look for look in self.looks if look > len(self.seeds)), None)
        undecided = compared[compared["verdict"] == "undecided"]
        if seeds is None or undecided.empty:
            return None
        tasks, first = self.ablation.tasks, self.seeds[0]
        wanted = {(v, t): self.wanted.get((v, t), len(self.seeds)) for v in self.variants for t in tasks}
        still = set(zip(undecided["variant"], undecided["task"], strict=True))
        for task, variant, reference in self.comparisons():
            if (variant, task) in still:
                wanted |= {(variant, task): seeds, (reference, task): seeds}
        return replace(self, seeds=tuple(range(first, first + seeds)), wanted=wanted)

    @property
    def variants(self) -> list[str]:
        """Names of the variants, the baseline's first."""
        return sorted(self.ablation.variants, key=lambda name: name != self.ablation.baseline)

    def comparisons(self) -> Iterator[tuple[str, str, str]]:
        """Each (task, variant, what the variant is compared with)."""
        for task in self.ablation.tasks:
            for variant in self.variants[1:]:
                yield task, variant, self.ablation.against.get(variant, self.ablation.baseline)

    def first(self, variant: str, task: str) -> RunSpec:
        """The run of a variant with the first seed."""
        return self._spec(variant, task, self.seeds[0])

    def _spec(self, variant: str, task: str, seed: int) -> RunSpec:
        first = self._seedless[variant, task]
        return first.model_copy(update={"seed": seed})

    @cached_property
    def _seedless(self) -> dict[tuple[str, str], RunSpec]:
        make = self.ablation.run_spec
        return {
            (variant, task): make(variant, task, seed=0, device=self.device, budget=self.budget)
            for task in self.ablation.tasks
            for variant in self.variants
        }

    def sources(self) -> tuple[Path, ...]:
        """Files of the user's own that a worker must load before it knows the specs.

        Raises:
            UserError: a level was defined in an interactive session, where no worker finds it.
        """
        kinds = {type(part) for spec in self._seedless.values() for part in spec.specs() if is_foreign(type(part))}
        files = {kind: source_file(kind) for kind in kinds}
        for kind, file in files.items():
            if file is None:
                raise UserError(
                    f"{kind.__name__} was defined in an interactive session; define it in a file and import it"
                )
        return tuple(sorted({file for file in files.values() if file}))

    def document(self, invocation: dict[str, str]) -> dict[str, Any]:
        """The content of `study.json`: all that a report needs to know of the plan and of its `invocation`."""
        ablation, tasks = (
            self.ablation,
            {task: self._seedless[self.variants[0], task].task for task in self.ablation.tasks},
        )
        baseline = self._seedless[self.variants[0], next(iter(tasks))].flat()
        flat = {variant: self._seedless[variant, next(iter(tasks))].flat() for variant in self.variants}
        return {
            "study": self.name,
            "question": ablation.question,
            "claims": list(ablation.claims),
            "why": ablation.why,
            "axes": list(ablation.axes),
            "baseline": ablation.baseline,
            "against": ablation.against,
            "variants": self.variants,
            "tasks": list(tasks),
            "seeds": list(self.seeds),
            **({"looks": list(self.looks)} if self.looks else {}),
            "pilot": self.seeds[0] >= PILOT_SEED,
            "budget": self.budget,
            "device": self.device,
            "score": ablation.score,
            "higher_is_better": ablation.higher_is_better,
            "margin": ablation.margin,
            "gate": GATE,
            "train_lengths": {name: list(task.lengths.train) for name, task in tasks.items()},
            "test_lengths": {name: list(task.lengths.test) for name, task in tasks.items()},
            "runs": [
                {"variant": c.variant, "task": c.task, "seed": c.seed, "fingerprint": c.fingerprint} for c in self.cells
            ],
            "spec": {
                "model": self._seedless[self.variants[0], next(iter(tasks))].model.document(),
                "train": self._seedless[self.variants[0], next(iter(tasks))].train.document(),
                "tasks": {name: task.document() for name, task in tasks.items()},
            },
            "differences": {
                variant: {path: value for path, value in fields.items() if baseline.get(path, _ABSENT) != value}
                for variant, fields in flat.items()
            },
            **({} if self.tuned is None else {"tuned": dict(self.tuned)}),
            **({} if ablation.match is None else {"match": ablation.match.document()}),
            **invocation,
            "commit": commit(),
            "environment": environment(),
        }

    def codes(self) -> dict[str, np.ndarray]:
        """Fixed position codes `(longest sequence, d_model)` of the variants that have them."""
        found = {}
        for (variant, _), spec in self._seedless.items():
            longest = spec.task.tokens(max(spec.task.lengths.train[1], *spec.task.lengths.test, 0), spec.layout)
            codes = spec.model.position.codes(longest, spec.model.d_model)
            if codes is not None:
                found[variant] = codes.numpy()
        return found

    def costs(self) -> list[dict[str, str | float]]:
        """What each variant's model costs by length (`cost.costs_by_length`) on the first task; empty where the axes
        are none of `COUNTED`.
        """
        if not any(is_within(axis, COUNTED) for axis in self.ablation.axes):
            return []
        first = next(iter(self.ablation.tasks))
        rows: list[dict[str, str | float]] = []
        for variant in self.variants:
            # What cannot be counted has no rows, and the report says so: its runs may still train, or fail as results.
            with suppress(Exception):  # of a user's level, anything
                rows += [{"variant": variant, **row} for row in costs_by_length(self._seedless[variant, first])]
        return rows


_ABSENT = object()


def folder_name(name: str, *, pilot: bool = False, tuned: bool = False) -> str:
    """An ablation's name, or that of its pilot or of the tuned one, whose folders are others."""
    return f"{name}{'-tuned' * tuned}{'-pilot' * pilot}"


def make_plan(
    name: str,
    ablation: Ablation,
    *,
    budget: str,
    seeds: int | None,
    device: Device,
    pilot: bool = False,
    tuned: Mapping[str, Any] | None = None,
    cap: int | None = None,
) -> Plan:
    """The plan of an ablation; `seeds` overrides the budget's number. A pilot has its own seeds, and a name of its own,
    as has an ablation whose variants are `tuned` (`harness.tuned`). With a `cap` the seeds are those of the first look;
    each further one has twice as many, up to the cap.

    Raises:
        UserError: unknown budget, a number of seeds that cannot be.
    """
    number = ablation.budget(budget).seeds if seeds is None else seeds
    if not 1 <= number <= PILOT_SEED:
        raise UserError(f"seeds = {number}: choose 1 to {PILOT_SEED} (seeds from {PILOT_SEED} on are the pilot's)")
    if cap is not None and pilot:
        raise UserError("a pilot decides nothing, so it cannot run until something is decided; drop one of the two")
    first = PILOT_SEED if pilot else 0
    folder = folder_name(name, pilot=pilot, tuned=tuned is not None)
    return Plan(folder, ablation, budget, tuple(range(first, first + number)), device, tuned, looks_of(number, cap))


def looks_of(seeds: int, cap: int | None) -> tuple[int, ...]:
    """Numbers of seeds after which a study looks at what is decided: `seeds`, twice as many, …, `cap`. None without.

    Raises:
        UserError: the cap leaves no second look, or there are not so many seeds.
    """
    if cap is None:
        return ()
    if not seeds < cap <= PILOT_SEED:
        raise UserError(f"cap = {cap}: choose more than the {seeds} seeds of the first look, and at most {PILOT_SEED}")
    doubled = takewhile(lambda look: look < cap, (seeds * 2**k for k in count(0)))
    return *doubled, cap


def survey(plan: Plan, folder: Path) -> tuple[dict[str, str], list[str]]:
    """What the disk holds of a plan: a state for each fingerprint, and notices for people.

    States: a record's status, *partial* (a checkpoint to resume from), *missing*. A record that is corrupt or another
    run's is set aside and its run counts as missing. Runs whose earlier record no longer fits the spec or the result
    version are named stale.
    """
    notices: list[str] = []
    states = {cell.fingerprint: _state(cell, folder, notices) for cell in plan.cells}
    if (folder / "study.json").exists() and not earlier_plan(folder):
        kept = set_aside(folder / "study.json").name
        notices.append(f"{folder / 'study.json'} is corrupt; kept as {kept}, it is written anew")
    if stale := stale_runs(plan, folder, lambda name: has_record(folder, name)):
        notices.append(f"{stale} earlier runs no longer fit their spec or result version; they are kept and done again")
    return states, notices


def _state(cell: Cell, folder: Path, notices: list[str]) -> str:
    directory = folder / "runs" / cell.fingerprint
    path = directory / "record.json"
    if path.exists():
        try:
            return RunRecord.of_run(directory, cell.spec.document()).status
        except UserError:
            notices.append(f"{path} is corrupt; kept as {set_aside(path).name}, the run is done again")
    return "partial" if (directory / "checkpoint.ckpt").exists() else "missing"


def stale_runs(plan: Plan, folder: Path, recorded: Callable[[str], bool]) -> int:
    """Cells that the last plan of this budget and device ran under another fingerprint, and this one has yet to run."""
    before = earlier_plan(folder)
    if (before.get("budget"), before.get("device")) != (plan.budget, plan.device):
        return 0
    known = {(run["variant"], run["task"], run["seed"]): run["fingerprint"] for run in before["runs"]}
    old = {cell.fingerprint: known.get((cell.variant, cell.task, cell.seed), cell.fingerprint) for cell in plan.cells}
    return sum(then != now and not recorded(now) and recorded(then) for now, then in old.items())


def earlier_plan(folder: Path) -> dict[str, Any]:
    """The `study.json` of the last plan; empty if there is none or it is corrupt, as it is about to be written anew."""
    try:
        return read_plan(folder)
    except (FileNotFoundError, UserError):
        return {}


def write_plan(plan: Plan, folder: Path, invocation: dict[str, str]) -> None:
    """Write `study.json`, the position codes, and where the axes call for it what variants cost by length."""
    document = plan.document(invocation)
    codes = plan.codes()
    if codes:
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / "codes.npz", **codes)  # type: ignore[arg-type]
    costs = folder / "costs.csv"
    if not costs.exists() or earlier_plan(folder).get("runs") != document["runs"]:  # counting takes a second or two
        _write_costs(plan.costs(), costs)
    write_atomically(folder / "study.json", json.dumps(document, indent=1))


def name_store(folder: Path, uri: str) -> None:
    """Name in `study.json` the store that `harness sync` delivers to; the plan stays as old as it is."""
    path, document = folder / "study.json", earlier_plan(folder)
    if document.get("tracking_uri") != uri:
        planned = path.stat()
        write_atomically(path, json.dumps(document | {"tracking_uri": uri}, indent=1))
        os.utime(path, ns=(planned.st_atime_ns, planned.st_mtime_ns))


def _write_costs(rows: list[dict[str, str | float]], path: Path) -> None:
    """A table of costs; without rows none, and an earlier plan's is removed."""
    if not rows:
        path.unlink(missing_ok=True)
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def counts(states: dict[str, str]) -> Counter[str]:
    """How many runs are in which state."""
    return Counter(states.values())
