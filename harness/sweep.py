"""Tunes named fields for each variant with Optuna, equal budgets for all: the only import of optuna.

Each variant has an Optuna study; a trial of it is a set of ordinary runs, one a task and pilot seed, on samples that
the final comparison never sees. They lie in the sweep's own folder, `results/NAME/sweep/runs/`, although their
fingerprints differ from those of all final runs, too: thousands of them would drown the study's own.

This process alone suggests, judges and records trials, and `harness.engine`'s workers run what they consist of. So a
killed worker costs steps and never a trial, no worker needs Optuna, and the journal file has one writer. Several
machines share a sweep through `storage`, a database: each runs this, and takes over the trials of one that is gone.

What is known of a trial is its `outcome`, an attribute that is set before Optuna is told. A trial that was closed
without one was interrupted: it counts for nothing, and its parameters wait to be tried again.
"""

import contextlib
import json
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
import pandas as pd
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from harness.conduct import HASTE, PATIENCE, Signals, heeded, locked, make_writable, resolve_device, resolve_jobs
from harness.engine import Ended, Event, Job, LocalEngine, Pruned, Reached, Started, Tick
from harness.machine import commit, environment
from harness.record import RunRecord, read_curves, set_aside, write_atomically
from harness.results import planned_data
from harness.schema import Spec, UserError, canonical_json, is_foreign, shown, source_file
from harness.seeding import stable_hash
from harness.space import Choice, Dimension, FloatRange, IntegerRange
from harness.spec import RunSpec
from harness.study import Ablation, Device, Plan, make_plan
from harness.tracking.content import NOTE
from harness.tracking.tree import NODES, append
from harness.tuned import asked_for, content, dimensions, sweep_folder
from harness.wording import decimal, in_words, listed

Sampler = Literal["tpe", "random", "grid"]
SAMPLERS: tuple[Sampler, ...] = ("tpe", "random", "grid")

TRIALS = 20  # a variant, where nobody says otherwise
REDUCTION = 3  # of the trials at a rung one in so many goes on
RUNGS = 2  # at 1/9 and 1/3 of a trial's steps
HEARTBEAT, GRACE = 10, 40  # seconds between signs of life in a database, and after which a trial counts as abandoned
OUTCOME = "outcome"
FIELDS = "fields"

optuna.logging.set_verbosity(optuna.logging.WARNING)


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


@dataclass(frozen=True)
class SweepOutcome:
    """How an invocation ended."""

    folder: Path
    table: pd.DataFrame  # a row a trial
    answer: dict[str, Any]  # the content of tuned.json
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 done, 1 a variant has no setting that trained, 130 interrupted."""
        if self.interrupted:
            return 130
        return int(any(each["changes"] is None for each in self.answer["variants"].values()))


@dataclass
class _Flight:
    """A trial whose runs are being run, one after the other."""

    variant: str
    trial: optuna.Trial
    changes: dict[str, Any]
    runs: list[tuple[str, int, RunSpec]]
    done: int = 0
    started: float = field(default_factory=time.time)
    followers: list[optuna.Trial] = field(default_factory=list)  # trials with the same parameters, asked meanwhile

    @property
    def spec(self) -> RunSpec:
        """The present run."""
        return self.runs[self.done][2]


# Planning


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


def _sources(dimensions: Mapping[str, Dimension]) -> set[str]:
    """Files of the user's own that define levels among the options; those of a document are known by their names."""
    options = [option for d in dimensions.values() if isinstance(d, Choice) for option in d.options]
    kinds = {type(part) for option in options if isinstance(option, Spec) for part in option.specs()}
    return {str(file) for kind in kinds if is_foreign(kind) and (file := source_file(kind)) is not None}


# Storage


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """Optuna's storage: a journal in the sweep's folder, or a database that several machines share.

    Raises:
        UserError: the database cannot be reached, or its driver is missing.
    """
    if url is None:
        journal = folder / "journal.log"
        _mend(journal)
        return JournalStorage(JournalFileBackend(str(journal), JournalFileOpenLock(str(journal))))
    if "://" not in url:
        raise UserError(f"--storage {shown(url)}: this is no database; write postgresql+psycopg://user@host/name")
    from harness.tracking.uri import without_password

    with _database(url), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats, pinned and tested
        try:
            return RDBStorage(
                url,
                engine_kwargs={"poolclass": NullPool},  # each call its own connection: none goes stale, none is left
                heartbeat_interval=HEARTBEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=_try_again,
            )
        except RuntimeError as error:  # of tables with another version; MLflow's have that one's name, too
            reason = f"its tables are not those of this Optuna ({in_words(error)})"
            raise UserError(f"--storage {without_password(url)}: {reason}; give it a database of its own") from error


@contextlib.contextmanager
def _closing(store: BaseStorage) -> Iterator[BaseStorage]:
    """Gives a database's connections back."""
    try:
        yield store
    finally:
        store.remove_session()
        if isinstance(store, RDBStorage):
            store.engine.dispose()


def _mend(journal: Path) -> None:
    """Remove what a kill has torn. The caller holds the sweep's lock, so that nobody else writes."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if not journal.exists():
        return
    content = journal.read_bytes()
    if content and not content.endswith(b"\n"):
        write_atomically(journal, content[: content.rfind(b"\n") + 1])


def _try_again(study: optuna.Study, trial: FrozenTrial) -> None:
    """Put the parameters of a trial that was interrupted up to be tried again. One that was cut off while it was asked
    for has not drawn them all: it leaves nothing, for the sampler draws the same ones anew.
    """
    if len(trial.params) < study.user_attrs[FIELDS] and "fixed_params" not in trial.system_attrs:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        RetryHeartbeatStaleTrialCallback()(study, trial)


@contextlib.contextmanager
def _database(url: str) -> Iterator[None]:
    """Says in a sentence what is wrong with a database."""
    from harness.tracking.uri import without_password

    try:
        yield
    except (optuna.exceptions.StorageInternalError, ImportError) as error:
        cause = error.__cause__ or error
        reason = without_password(in_words(cause))
    except Exception as error:
        if not type(error).__module__.startswith(("sqlalchemy", "psycopg", "alembic")):
            raise
        reason = without_password(in_words(error))
    else:
        return
    raise UserError(f"--storage {without_password(url)}: {reason}; mend that and run it again, what was told is kept")


# Running


def run_sweep(
    ablation: Ablation,
    *,
    name: str,
    storage: str | None = None,
    jobs: int | Literal["auto"] = "auto",
    results: str | Path = "results",
    say: Callable[[str], None] = lambda line: None,
    tracking_uri: str | None = None,
    command: str = "",
    **asked: Any,
) -> SweepOutcome:
    """Run what is left of a sweep (`plan_sweep` takes what is `asked`) and write what it found into
    `results/name/sweep`.

    Finished trials are not done again, interrupted ones are closed and their parameters tried again. Ctrl-C (and
    SIGTERM, SIGHUP) saves and stops.

    Raises:
        UserError: the plan cannot be made, folder or storage cannot be written, another process runs the sweep.
    """
    from harness.tracking import TreeMirror, default_uri
    from harness.tracking.uri import check

    planned = plan_sweep(name, ablation, **asked)
    sources = tuple(sorted({*map(str, planned.plan.sources()), *_sources(planned.dimensions)}))
    results = Path(results).expanduser().absolute()
    folder = sweep_folder(results, name)
    uri = tracking_uri or default_uri(results)
    check(uri)
    with contextlib.ExitStack() as stack:
        if storage is not None:  # nothing is written where it cannot be opened
            store = stack.enter_context(_closing(open_storage(storage, folder)))
            stack.enter_context(_database(storage))
        make_writable(folder)
        if storage is None:
            stack.enter_context(locked(folder, f"{name}/sweep"))
            store = open_storage(storage, folder)
        signals = stack.enter_context(heeded())
        _announce(planned, folder, say)
        studies = {variant: _study(planned, variant, store) for variant in planned.variants}
        if storage is None:
            for variant, study in studies.items():
                _close_interrupted(study, variant, say)
        write_atomically(folder / "sweep.json", json.dumps(_describe(planned, storage, command, uri), indent=1))
        workers = resolve_jobs(jobs, planned.plan.device)
        sweeper = _Sweeper(planned, studies, store, folder, sources, say)
        mirror = TreeMirror(uri, folder, f"{name}-sweep")
        _note_all(planned, studies, folder, "RUNNING")
        mirror.start()
        status = "KILLED"
        try:
            sweeper.work(workers, signals)
            outcome = _write(planned, studies, folder, interrupted=signals.came)
            status = "KILLED" if signals.came else "FINISHED"
        finally:
            _note_all(planned, studies, folder, status)
            mirror.close(HASTE if signals.came else PATIENCE)
        return outcome


def _describe(planned: SweepPlan, storage: str | None, command: str, uri: str) -> dict[str, Any]:
    from harness.tracking.uri import without_password

    return {
        "study": planned.name,
        "id": planned.id,
        "content": planned.content,
        "question": planned.ablation.question,
        "budget": planned.plan.budget,
        "device": planned.plan.device,
        "sampler": planned.sampler,
        "pruning": planned.pruning,
        "asked": planned.trials,
        "seeds": list(planned.plan.seeds),
        "variants": planned.variants,
        "tasks": list(planned.ablation.tasks),
        "fields": {path: dimension.document() for path, dimension in planned.dimensions.items()},
        "score": planned.ablation.score,
        "higher_is_better": planned.ablation.higher_is_better,
        "costs": list(planned.costs),
        "gate": planned.document["gate"],
        "baseline": planned.ablation.baseline,
        "storage": "journal.log" if storage is None else without_password(storage),
        "tracking_uri": without_password(uri),
        "command": without_password(command),
        "began": round(time.time() * 1000),
        "commit": commit(),
        "environment": environment(),
    }


def _announce(planned: SweepPlan, folder: Path, say: Callable[[str], None]) -> None:
    """What is about to be done, and what of an earlier sweep is not used."""
    runs = len(planned.plan.seeds) * len(planned.ablation.tasks)
    say(
        f"{planned.name}: {planned.trials} trials of {listed(list(planned.dimensions))} for each of "
        f"{len(planned.variants)} variants, {runs} runs each, budget {planned.plan.budget}, {planned.plan.device}, "
        f"{planned.sampler}{'' if planned.pruning else ', no pruning'}"
    )
    if planned.costs:
        say(f"several objectives (score, {listed(planned.costs)}): a Pareto front, and no pruning")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / "sweep.json").read_text()).get("id") != planned.id:
            say("an earlier sweep had another content, sampler or device; its trials are kept and not used")


def _study(planned: SweepPlan, variant: str, store: BaseStorage) -> optuna.Study:
    """A variant's study, made if need be. Its first trial is the ablation's own setting; a grid's are all cells."""
    higher = planned.ablation.higher_is_better
    directions: list[Literal["maximize", "minimize"]] = ["maximize" if higher else "minimize"]
    directions += ["minimize"] * len(planned.costs)
    study = optuna.create_study(
        storage=store,
        study_name=f"{planned.name} · {variant} · {planned.id}",
        directions=directions,
        pruner=_pruner(planned),
        load_if_exists=True,
    )
    study.set_user_attr(FIELDS, len(planned.dimensions))
    if not study.get_trials(deepcopy=False):
        for params in _first(planned, variant):
            study.enqueue_trial(params, skip_if_exists=True)
    return study


def _first(planned: SweepPlan, variant: str) -> list[dict[str, Any]]:
    """Parameters that are tried before the sampler is asked."""
    if planned.sampler != "grid":
        own = planned.own(variant)
        return [] if own is None else [own]
    cells: list[dict[str, Any]] = [{}]
    for path, dimension in planned.dimensions.items():
        values = dimension.grid()
        labels = [dimension.label(value) for value in values] if isinstance(dimension, Choice) else values
        cells = [{**cell, path: label} for cell in cells for label in labels]
    return sorted(cells, key=lambda cell: stable_hash(planned.id, canonical_json(cell)))  # no corner comes last


def _pruner(planned: SweepPlan) -> optuna.pruners.BasePruner:
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934), or none."""
    if not planned.pruning:
        return optuna.pruners.NopPruner()
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=_unit(planned), reduction_factor=REDUCTION)


def _unit(planned: SweepPlan) -> int:
    return max(1, planned.steps // REDUCTION**RUNGS)


def _sampler(planned: SweepPlan, number: int) -> optuna.samplers.BaseSampler:
    """The sampler of the next trial. Seeded by how many count so far: a suggestion depends on what was told before it
    alone, and the first ones are the same for all variants.
    """
    seed = stable_hash(planned.id, "sampler", number) % 2**32
    return optuna.samplers.TPESampler(seed=seed) if planned.sampler == "tpe" else optuna.samplers.RandomSampler(seed)


def _counts(trial: FrozenTrial) -> bool:
    """Whether a trial is part of the budget: interrupted and surplus ones are not."""
    return trial.state != TrialState.FAIL or OUTCOME in trial.user_attrs


def _close_interrupted(study: optuna.Study, variant: str, say: Callable[[str], None]) -> None:
    """Close what a killed sweep left running; nobody else may be running this one."""
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        if OUTCOME in trial.user_attrs:  # killed between the outcome and telling Optuna
            _tell(study, trial.number, trial.user_attrs[OUTCOME])
            continue
        study.tell(trial.number, state=TrialState.FAIL)
        _try_again(study, trial)
        say(f"{variant}: trial {trial.number} was interrupted; its parameters are tried again")


def _tell(study: optuna.Study, number: int, outcome: Mapping[str, Any]) -> None:
    """Tell Optuna a trial's outcome. What diverged has a score as in a study; what failed or ran out of memory none."""
    values = outcome["values"]
    state = TrialState.COMPLETE if values else TrialState.FAIL
    state = TrialState.PRUNED if outcome["status"] == "pruned" else state
    study.tell(number, values, state=state, skip_if_finished=True)


class _Sweeper:
    """This process's part of a sweep."""

    def __init__(
        self,
        planned: SweepPlan,
        studies: dict[str, optuna.Study],
        store: BaseStorage,
        folder: Path,
        sources: tuple[str, ...],
        say: Callable[[str], None],
    ) -> None:
        self.planned, self.studies, self.store, self.folder = planned, studies, store, folder
        self.sources, self.say = sources, say
        self.flights: dict[str, _Flight] = {}  # by the fingerprint of the present run
        self.rungs = [_unit(planned) * REDUCTION**k for k in range(RUNGS)] if planned.pruning else []
        self.sign = -1.0 if planned.ablation.higher_is_better else 1.0  # pruners want losses the way scores go
        self.beaten = 0.0

    def work(self, workers: int, signals: Signals) -> None:
        """Run trials until every variant has had its budget or a signal comes."""
        try:
            with LocalEngine(workers) as self.engine, signals.telling(self.engine.stop):
                while not signals.came:
                    self._fill(workers)
                    if self.flights:
                        for event in self.engine.run([]):
                            self._heed(event)
                            if not signals.came:
                                self._fill(workers)
                    elif self._others_run():
                        time.sleep(1)
                        self._beat()
                    else:
                        break
        finally:
            self._interrupt()

    def _others_run(self) -> bool:
        """Whether other machines are at trials, one of which may yet be abandoned."""
        states = (TrialState.RUNNING, TrialState.WAITING)
        return any(study.get_trials(deepcopy=False, states=states) for study in self.studies.values())

    def _interrupt(self) -> None:
        """Close the trials that are not done, and put their parameters up again."""
        for flight in self.flights.values():
            study = self.studies[flight.variant]
            for trial in (flight.trial, *flight.followers):
                frozen = study.get_trials(deepcopy=True)[trial.number]
                if frozen.state == TrialState.RUNNING:
                    study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
                    _try_again(study, frozen)
        self.flights.clear()

    # Beginning

    def _fill(self, workers: int) -> None:
        """Start trials until all workers have one; the variant that has had fewest comes first."""
        while len(self.flights) < workers:
            left = {variant: self._tried(variant) for variant in self.studies if self._has_more(variant)}
            if not left:
                return
            self._begin(min(left, key=lambda variant: left[variant]))

    def _tried(self, variant: str) -> int:
        states = {TrialState.WAITING}
        trials = self.studies[variant].get_trials(deepcopy=False)
        return sum(_counts(trial) and trial.state not in states for trial in trials)

    def _has_more(self, variant: str) -> bool:
        trials = self.studies[variant].get_trials(deepcopy=False)
        waiting = any(trial.state == TrialState.WAITING for trial in trials)
        return waiting or sum(map(_counts, trials)) < self.planned.trials

    def _begin(self, variant: str) -> None:
        """Ask for a trial and start its first run, unless its result is known or the budget is spent."""
        study = self.studies[variant]
        study.sampler = _sampler(self.planned, sum(map(_counts, study.get_trials(deepcopy=False))))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Heartbeat of storage is supposed")  # `_beat` sees to it
            trial = study.ask(fixed_distributions=self.planned.distributions)
        trials = study.get_trials(deepcopy=False)
        if sum(_counts(each) and each.number <= trial.number for each in trials) > self.planned.trials:
            study.tell(trial.number, state=TrialState.FAIL)  # another machine was quicker: this one counts for nothing
            return
        self._sign_of_life(trial)
        twin = next((each for each in trials if each.params == trial.params and OUTCOME in each.user_attrs), None)
        if twin is not None:
            self._reuse(variant, trial, twin.number, twin.user_attrs[OUTCOME])
            return
        flying = next(
            (f for f in self.flights.values() if (f.variant, f.trial.params) == (variant, trial.params)), None
        )
        if flying is not None:
            flying.followers.append(trial)
            return
        changes = self.planned.changes(trial.params)
        try:
            flight = _Flight(variant, trial, changes, self.planned.runs(variant, changes))
        except UserError as error:
            failed = _outcome("failed", f"these values do not fit together: {error}", started=time.time())
            self._conclude(variant, trial, failed)
            return
        self._advance(flight)

    def _advance(self, flight: _Flight) -> None:
        """Run the next run of a trial, past those whose records are there."""
        while flight.done < len(flight.runs):
            directory = self._directory(flight.spec)
            if (record := self._record(flight.spec)) is None:
                fingerprint = directory.name
                self.flights[fingerprint] = flight
                rungs = self._rungs_within(flight)
                self.engine.add(Job(fingerprint, flight.spec.model_dump_json(), directory, self.sources, False, rungs))
                return
            if self._is_over(flight, record):
                return
        self._finish(flight)

    def _rungs_within(self, flight: _Flight) -> tuple[int, ...]:
        """Rungs that lie inside of the present run; a trial's steps are those of its runs, one after the other."""
        before, steps = flight.done * flight.spec.train.steps, flight.spec.train.steps
        return tuple(rung - before for rung in self.rungs if 0 < rung - before < steps)

    def _directory(self, spec: RunSpec) -> Path:
        return self.folder / "runs" / spec.fingerprint()

    def _record(self, spec: RunSpec) -> RunRecord | None:
        """The record of a run that has ended; a corrupt one is set aside."""
        path = self._directory(spec) / "record.json"
        if not path.exists():
            return None
        try:
            return RunRecord.of_run(path.parent, spec.document())
        except UserError:
            self.say(f"{path} is corrupt; kept as {set_aside(path).name}, the run is done again")
            return None

    # What happens

    def _heed(self, event: Event) -> None:
        if isinstance(event, Tick):
            self._beat()
        elif isinstance(event, Started):
            flight = self.flights[event.fingerprint]
            flight.started = flight.started if flight.done else time.time()  # a worker's own start is no trial's
        elif isinstance(event, Reached):
            flight = self.flights[event.fingerprint]
            step = flight.done * flight.spec.train.steps + event.step
            self.engine.answer(event.fingerprint, go_on=self._is_promising(flight, step, event.loss))
        elif isinstance(event, Pruned):
            flight = self.flights.pop(event.fingerprint)
            self._end(flight, "pruned", f"at step {event.step} of run {flight.done + 1}", steps=event.step)
        elif isinstance(event, Ended):
            flight = self.flights.pop(event.fingerprint)
            record = self._record(flight.spec)
            if record is None or not self._is_over(flight, record):
                self._advance(flight)

    def _is_over(self, flight: _Flight, record: RunRecord) -> bool:
        """Take note of a run that has ended; whether the trial has, too."""
        flight.done += 1
        if record.status in ("failed", "out_of_memory"):
            self._end(flight, record.status, record.cause)
            return True
        step, loss = flight.done * flight.runs[0][2].train.steps, record.final.get("eval/loss", math.nan)
        if flight.done < len(flight.runs) and step in self.rungs and not self._is_promising(flight, step, loss):
            self._end(flight, "pruned", f"after run {flight.done}")
            return True
        return False

    def _is_promising(self, flight: _Flight, step: int, loss: float) -> bool:
        """Whether a trial belongs to the better part of those that have come to this rung."""
        if not math.isfinite(loss):
            return True  # it diverges, which the run itself will say
        flight.trial.report(self.sign * loss, step)
        return not flight.trial.should_prune()

    def _beat(self) -> None:
        """In a database, say that our trials live, and put up those of whoever is gone."""
        if not isinstance(self.store, RDBStorage) or time.monotonic() < self.beaten + HEARTBEAT:
            return
        self.beaten = time.monotonic()
        for flight in self.flights.values():
            for trial in (flight.trial, *flight.followers):
                self._sign_of_life(trial)
        for study in self.studies.values():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                fail_stale_trials(study)

    def _sign_of_life(self, trial: optuna.Trial) -> None:
        if isinstance(self.store, RDBStorage):
            self.store.record_heartbeat(trial._trial_id)

    # Ending

    def _finish(self, flight: _Flight) -> None:
        """All runs have ended: score the trial by what the final comparison scores runs by."""
        records = [record for _, _, spec in flight.runs if (record := self._record(spec)) is not None]
        planned = [
            {"variant": flight.variant, "task": task, "seed": seed, "fingerprint": spec.fingerprint()}
            for task, seed, spec in flight.runs
        ]
        data = planned_data(self.folder, {**self.planned.document, "runs": planned})
        diverged = [record.cause for record in records if record.status == "diverged"]
        self._end(
            flight,
            "diverged" if diverged else "finished",
            diverged[0] if diverged else "",
            score=float(data.primary()["score"].mean()),
        )

    def _end(self, flight: _Flight, status: str, cause: str, *, score: float = math.nan, steps: int = 0) -> None:
        """Record how a trial ended, and with it all that asked for the same."""
        done = [spec for _, _, spec in flight.runs[: flight.done]]
        records = [record for spec in done if (record := self._record(spec)) is not None]
        taken = [_last_step(self._directory(spec)) for spec in done]
        outcome = _outcome(
            status,
            cause,
            started=flight.started,
            score=score,
            loss=_mean([record.final.get("eval/loss", math.nan) for record in records]),
            in_distribution=_mean([record.final.get("eval/in_distribution", math.nan) for record in records]),
            flops=_mean([float(record.ledger.get("flops", math.nan)) for record in records]),
            parameters=_mean([float(record.ledger.get("parameters", math.nan)) for record in records]),
            steps=sum(taken) + steps,
            runs=[spec.fingerprint() for _, _, spec in flight.runs[: flight.done + (status == "pruned" and steps > 0)]],
        )
        values = [outcome["score"], *(outcome[cost] for cost in self.planned.costs)]
        if status in ("finished", "diverged") and None not in values:
            outcome["values"] = values
        self._conclude(flight.variant, flight.trial, outcome)
        for trial in flight.followers:
            self._reuse(flight.variant, trial, flight.trial.number, outcome)

    def _reuse(self, variant: str, trial: optuna.Trial, number: int, outcome: Mapping[str, Any]) -> None:
        """Conclude a trial with what is known of its parameters."""
        number = outcome["same_as"] if outcome["same_as"] is not None else number
        now = time.time()
        self._conclude(
            variant, trial, {**outcome, "same_as": number, "steps": 0, "started": now, "ended": now, "seconds": 0.0}
        )

    def _conclude(self, variant: str, trial: optuna.Trial, outcome: dict[str, Any]) -> None:
        study = self.studies[variant]
        try:
            trial.set_user_attr(OUTCOME, outcome)
        except optuna.exceptions.UpdateFinishedTrialError:
            return  # taken for abandoned, and put up again: whoever does it finds our records
        _tell(study, trial.number, outcome)
        trials = study.get_trials(deepcopy=False)
        append(self.folder, _trial_node(self.planned, variant, trials[trial.number]))
        told = sum(OUTCOME in each.user_attrs for each in trials)
        self.say(_line(variant, told, self.planned.trials, trial.params, outcome))


def _outcome(status: str, cause: str, *, started: float, **known: Any) -> dict[str, Any]:
    """What is known of a trial, as data that any storage takes."""
    ended = time.time()
    found = {
        "status": status,
        "cause": cause,
        "score": None,
        "loss": None,
        "in_distribution": None,
        "flops": None,
        "parameters": None,
        "steps": 0,
        "runs": [],
        "same_as": None,
        "values": None,
        "host": platform.node(),
        "started": started,
        "ended": ended,
        "seconds": ended - started,
        **known,
    }
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in found.items()
    }


def _last_step(directory: Path) -> int:
    """Steps that a run has taken."""
    return max((int(line["step"]) for line in read_curves(directory / "curves.jsonl")), default=0)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _line(variant: str, tried: int, trials: int, params: Mapping[str, Any], outcome: Mapping[str, Any]) -> str:
    """A trial in a line: `RoPE 3/40: score 0.931 (learning_rate = 0.00312, …)`."""
    setting = ", ".join(f"{path.rpartition('.')[2]} = {shortly(value)}" for path, value in params.items())
    if outcome["same_as"] is not None:
        said = f"as trial {outcome['same_as']}"
    elif outcome["status"] == "finished":
        said = f"score {decimal(outcome['score'])}"
    else:
        said = outcome["status"].replace("_", " ") + (f": {outcome['cause']}" if outcome["cause"] else "")
    return f"{variant} {tried}/{trials}: {said} ({setting})"


def shortly(value: Any) -> str:
    """A value of a field for people."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# In the tracking store

STATUSES = {"finished": "FINISHED", "pruned": "KILLED"}  # MLflow's; what else may become of a trial is FAILED


def _note_all(planned: SweepPlan, studies: dict[str, optuna.Study], folder: Path, status: str) -> None:
    """Write all that there is to mirror anew: the sweep, its variants, their trials."""
    nodes = [_sweep_node(planned, folder, status)]
    for variant, study in studies.items():
        trials = [trial for trial in study.get_trials(deepcopy=False) if OUTCOME in trial.user_attrs]
        nodes.append(_variant_node(planned, variant, trials, nodes[0]))
        nodes += [_trial_node(planned, variant, trial) for trial in trials]
    write_atomically(folder / NODES, "".join(json.dumps(node) + "\n" for node in nodes))


def _sweep_node(planned: SweepPlan, folder: Path, status: str) -> dict[str, Any]:
    document = json.loads((folder / "sweep.json").read_text())
    kept = ("budget", "device", "sampler", "pruning", "asked", "score", "command", "commit", "question")
    text = folder / "summary.md"
    note = text.read_text().partition("## Sensitivity")[0][:4000] if text.exists() else document["question"]
    figures = sorted(str(path.relative_to(folder)) for path in folder.glob("figures/*.png"))
    return {
        "key": planned.id,
        "parent": "",
        "name": f"sweep of {planned.name} · {planned.plan.budget}",
        "status": status,
        "started": document["began"],
        "ended": None if status == "RUNNING" else round(time.time() * 1000),
        "tags": {"kind": "sweep", NOTE: note, **{name: str(document[name]) for name in kept}},
        "params": {path: canonical_json(field) for path, field in document["fields"].items()},
        "metrics": {},
        "runs": {},
        "files": ["summary.md", "trials.csv", "tuned.json", "budgets.csv", *figures],
    }


def _variant_node(
    planned: SweepPlan, variant: str, trials: Sequence[FrozenTrial], sweep: Mapping[str, Any]
) -> dict[str, Any]:
    """A variant: the scores of its trials by their number, and the best so far."""
    known = {trial.number: trial.user_attrs[OUTCOME]["score"] for trial in trials}
    scores = {number: float(score) for number, score in known.items() if score is not None}
    best = np.maximum if planned.ablation.higher_is_better else np.minimum
    so_far = best.accumulate(list(scores.values())).tolist() if scores else []
    return {
        **sweep,
        "key": f"{planned.id}/{variant}",
        "parent": planned.id,
        "name": variant,
        "tags": {"kind": "variant", "variant": variant},
        "params": {},
        "metrics": {"score": scores, "best": dict(zip(scores, so_far, strict=True))},
        "files": [],
    }


def _trial_node(planned: SweepPlan, variant: str, trial: FrozenTrial) -> dict[str, Any]:
    """A trial that has ended: what it tried, what came of it, the curves of its runs."""
    outcome = trial.user_attrs[OUTCOME]
    names = [f"/{task}/{seed}" for seed in planned.plan.seeds for task in planned.ablation.tasks]
    runs = outcome["runs"] if outcome["same_as"] is None else []
    measured = ("score", "loss", "in_distribution", "steps", "seconds", "flops", "parameters")
    metrics: dict[str, dict[int, Any]] = {name: {0: outcome[name]} for name in measured}
    metrics["rung/loss"] = {step: abs(loss) for step, loss in trial.intermediate_values.items()}
    return {
        "key": f"{planned.id}/{variant}/{trial.number}",
        "parent": f"{planned.id}/{variant}",
        "name": f"{variant} · trial {trial.number}",
        "status": STATUSES.get(outcome["status"], "FAILED"),
        "started": round(outcome["started"] * 1000),
        "ended": round(outcome["ended"] * 1000),
        "tags": {"kind": "trial", "variant": variant, **{key: outcome[key] for key in ("status", "cause", "same_as")}},
        "params": planned.changes(trial.params),
        "metrics": metrics,
        "runs": dict(zip(names if len(names) > 1 else [""], runs, strict=False)),
        "files": [],
    }


# What was found


def _write(planned: SweepPlan, studies: dict[str, optuna.Study], folder: Path, *, interrupted: bool) -> SweepOutcome:
    """Write the sweep's tables, figures and answer, as far as it has come."""
    from harness.report.sweep import write_sweep

    table = pd.concat([_table(planned, variant, study) for variant, study in studies.items()], ignore_index=True)
    answer = _answer(planned, studies, table)
    importances = pd.concat([_importance(planned, variant, study) for variant, study in studies.items()])
    write_atomically(folder / "tuned.json", json.dumps(answer, indent=1))
    write_atomically(folder / "trials.csv", table.to_csv(index=False))
    document = json.loads((folder / "sweep.json").read_text())
    write_sweep(folder, document, table, answer, importances)
    return SweepOutcome(folder, table, answer, interrupted)


COLUMNS = ("status", "cause", "score", "loss", "in_distribution", "steps", "seconds", "flops", "parameters", "same_as")


def _table(planned: SweepPlan, variant: str, study: optuna.Study) -> pd.DataFrame:
    """A row a trial of a variant, interrupted ones too, surplus ones not."""
    front = {trial.number for trial in study.best_trials} if planned.costs else set()
    rows = []
    for trial in study.get_trials(deepcopy=False):
        outcome = trial.user_attrs.get(OUTCOME)
        if outcome is None and (trial.state == TrialState.WAITING or not trial.params):
            continue
        row: dict[str, Any] = {"variant": variant, "trial": trial.number}
        changes = planned.changes(trial.params)
        row |= {path: canonical_json(value) if isinstance(value, dict) else value for path, value in changes.items()}
        status = "running" if trial.state == TrialState.RUNNING else "interrupted"
        row |= {name: (outcome or {"status": status}).get(name) for name in COLUMNS}
        row["front"] = trial.number in front
        row["rungs"] = json.dumps({step: abs(loss) for step, loss in sorted(trial.intermediate_values.items())})
        row["runs"] = " ".join((outcome or {}).get("runs", ()))
        row["host"] = (outcome or {}).get("host", "")
        rows.append(row)
    kept = ["variant", "trial", *planned.dimensions, *COLUMNS, "front", "rungs", "runs", "host"]
    numbers = ["score", "loss", "in_distribution", "steps", "seconds", "flops", "parameters", "same_as"]
    found = pd.DataFrame(rows, columns=kept)
    return found.assign(**{name: pd.to_numeric(found[name]).astype(float) for name in numbers})


def best_of(table: pd.DataFrame, *, higher_is_better: bool) -> pd.Series | None:
    """The trial with the best score of a variant's rows; among equal ones that with the lowest loss at the training
    lengths, then the first. Only those count whose runs all trained to the end: where nobody scores, one that
    diverged would do as well.
    """
    trained = table[table["status"] == "finished"]
    if trained.empty:
        return None
    ordered = trained.sort_values(["score", "loss", "trial"], ascending=[not higher_is_better, True, True])
    return ordered.iloc[0]


def _answer(planned: SweepPlan, studies: dict[str, optuna.Study], table: pd.DataFrame) -> dict[str, Any]:
    """The content of tuned.json."""
    return {
        "study": planned.name,
        "content": planned.content,
        "budget": planned.plan.budget,
        "device": planned.plan.device,
        "sampler": planned.sampler,
        "pruning": planned.pruning,
        "asked": planned.trials,
        "pilot_seeds": len(planned.plan.seeds),
        "costs": list(planned.costs),
        "score": planned.ablation.score,
        "higher_is_better": planned.ablation.higher_is_better,
        "fields": {path: dimension.document() for path, dimension in planned.dimensions.items()},
        "variants": {variant: _tuned(planned, variant, study, table) for variant, study in studies.items()},
    }


def _tuned(planned: SweepPlan, variant: str, study: optuna.Study, table: pd.DataFrame) -> dict[str, Any]:
    rows = table[table["variant"] == variant]
    tried = int((~rows["status"].isin(("interrupted", "running"))).sum())
    best = best_of(rows, higher_is_better=planned.ablation.higher_is_better)
    if best is None:
        return {"changes": None, "score": None, "loss": None, "setting": None, "tried": tried, "edges": {}}
    params = study.get_trials(deepcopy=False)[int(best["trial"])].params
    edges = {path: planned.dimensions[path].edge(value) for path, value in params.items()}
    return {
        "changes": planned.changes(params),
        "score": float(best["score"]),
        "loss": None if math.isnan(best["loss"]) else float(best["loss"]),
        "setting": int(best["trial"]),
        "tried": tried,
        "edges": {path: end for path, end in edges.items() if end},
    }


RESAMPLES = 50  # of a variant's trials, drawn with replacement
FEWEST = 8  # trials with a score, below which importances say nothing


def _importance(planned: SweepPlan, variant: str, study: optuna.Study) -> pd.DataFrame:
    """How much of the score's variance among the better quarter of settings each field explains (PED-ANOVA, Watanabe
    et al. 2023, arXiv:2304.10255): the mean over resampled trials, with the 5 % and the 95 % quantile. A field whose
    interval holds about what all would have alike, 1/number of fields, was not shown to matter more than the others.
    """
    columns = ["variant", "field", "importance", "low", "high", "settings"]
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    trials = [trial for trial in trials if trial.user_attrs.get(OUTCOME, {}).get("same_as") is None]
    if len(trials) < FEWEST or len({trial.values[0] for trial in trials}) < 2:
        rows = [(variant, path, math.nan, math.nan, math.nan, len(trials)) for path in planned.dimensions]
        return pd.DataFrame(rows, columns=columns)
    draw = np.random.default_rng(stable_hash(planned.id, variant))
    drawn = [_importances(study.directions, [trials[i] for i in draw.integers(0, len(trials), len(trials))])
             for _ in range(RESAMPLES)]  # fmt: skip
    found = pd.DataFrame([each for each in drawn if each])
    rows = []
    for path in planned.dimensions:
        values = found[path] if path in found else pd.Series(dtype=float)
        low, high = values.quantile(0.05), values.quantile(0.95)
        rows.append((variant, path, float(values.mean()), float(low), float(high), len(trials)))
    return pd.DataFrame(rows, columns=columns)


def _importances(directions: Sequence[optuna.study.StudyDirection], trials: list[FrozenTrial]) -> dict[str, float]:
    """Of some trials; empty where they cannot be told apart."""
    if len({trial.values[0] for trial in trials}) < 2:
        return {}
    study = optuna.create_study(directions=[directions[0]])
    study.add_trials(
        optuna.create_trial(params=t.params, distributions=t.distributions, value=t.values[0]) for t in trials
    )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
    try:
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except (ValueError, RuntimeError, ZeroDivisionError):  # a sample in which nothing varies
        return {}
