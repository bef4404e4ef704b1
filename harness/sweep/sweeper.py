"""One process's part of a sweep: asks for trials, has the engine run them, says how they ended."""

import math
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage, fail_stale_trials
from optuna.trial import TrialState

from harness.conduct import Signals
from harness.engine import Ended, Event, Job, LocalEngine, Pruned, Reached, Started, Tick
from harness.record import RunRecord, read_curves, set_aside
from harness.results import planned_data
from harness.schema import UserError
from harness.spec import RunSpec
from harness.sweep import storage
from harness.sweep.nodes import trial_node
from harness.sweep.plan import REDUCTION, RUNGS, SweepPlan
from harness.sweep.storage import try_again
from harness.sweep.trials import OUTCOME, counts, sampler_of, tell, unit
from harness.tracking.tree import append
from harness.wording import decimal


@dataclass
class Flight:
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


class Sweeper:
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
        self.flights: dict[str, Flight] = {}  # by the fingerprint of the present run
        self.rungs = [unit(planned) * REDUCTION**k for k in range(RUNGS)] if planned.pruning else []
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
                    try_again(study, frozen)
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
        return sum(counts(trial) and trial.state not in states for trial in trials)

    def _has_more(self, variant: str) -> bool:
        trials = self.studies[variant].get_trials(deepcopy=False)
        waiting = any(trial.state == TrialState.WAITING for trial in trials)
        return waiting or sum(map(counts, trials)) < self.planned.trials

    def _begin(self, variant: str) -> None:
        """Ask for a trial and start its first run, unless its result is known or the budget is spent."""
        study = self.studies[variant]
        study.sampler = sampler_of(self.planned, sum(map(counts, study.get_trials(deepcopy=False))))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Heartbeat of storage is supposed")  # `_beat` sees to it
            trial = study.ask(fixed_distributions=self.planned.distributions)
        trials = study.get_trials(deepcopy=False)
        if sum(counts(each) and each.number <= trial.number for each in trials) > self.planned.trials:
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
            flight = Flight(variant, trial, changes, self.planned.runs(variant, changes))
        except UserError as error:
            failed = _outcome("failed", f"these values do not fit together: {error}", started=time.time())
            self._conclude(variant, trial, failed)
            return
        self._advance(flight)

    def _advance(self, flight: Flight) -> None:
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

    def _rungs_within(self, flight: Flight) -> tuple[int, ...]:
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

    def _is_over(self, flight: Flight, record: RunRecord) -> bool:
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

    def _is_promising(self, flight: Flight, step: int, loss: float) -> bool:
        """Whether a trial belongs to the better part of those that have come to this rung."""
        if not math.isfinite(loss):
            return True  # it diverges, which the run itself will say
        flight.trial.report(self.sign * loss, step)
        return not flight.trial.should_prune()

    def _beat(self) -> None:
        """In a database, say that our trials live, and put up those of whoever is gone."""
        if not isinstance(self.store, RDBStorage) or time.monotonic() < self.beaten + storage.HEARTBEAT:
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

    def _finish(self, flight: Flight) -> None:
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

    def _end(self, flight: Flight, status: str, cause: str, *, score: float = math.nan, steps: int = 0) -> None:
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
        tell(study, trial.number, outcome)
        trials = study.get_trials(deepcopy=False)
        append(self.folder, trial_node(self.planned, variant, trials[trial.number]))
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
