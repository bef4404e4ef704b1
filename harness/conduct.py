"""Conducts a study: plan → engine → mirror → report. Apart from `study`, which only plans, so that planning stays
light.
"""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import pandas as pd
import torch

from harness.cost import check_countable
from harness.engine import Ended, Event, Job, LocalEngine, heeded_signals
from harness.locks import holder, signed
from harness.record import RunRecord, has_record
from harness.results import ENDED, load_study, planned_data
from harness.schema import UserError, quoted, shown
from harness.stats import fewest_seeds
from harness.study import PILOT_SEED, Ablation, Device, Plan, earlier_plan, make_plan, name_store, survey, write_plan
from harness.wording import counted, listed

if TYPE_CHECKING:
    from harness.tracking import Mirror

PATIENCE = 30.0  # seconds that the end of a study waits for the tracking store; the rest is left to `harness sync`
SETTLE = 5.0  # seconds that the report waits for it
HASTE = 3.0  # the same after Ctrl-C

Ending = Literal["FINISHED", "KILLED", "FAILED"]  # of the study's own run in the store


class Display(Protocol):
    """Whoever watches a study: a live table, plain lines, or nobody."""

    def begin(self, plan: Plan, states: dict[str, str], notices: list[str]) -> None:
        """The plan, and a state for each of its fingerprints."""

    def event(self, event: Event) -> None:
        """Something happened in the engine; at least a Tick every half second."""

    def verdicts(self, comparison: pd.DataFrame) -> None:
        """`stats.compare` of what has ended so far."""

    def note(self, text: str) -> None:
        """A sentence for people."""


class Nobody:
    """A display that shows nothing."""

    def begin(self, plan: Plan, states: dict[str, str], notices: list[str]) -> None:
        """Nothing."""

    def event(self, event: Event) -> None:
        """Nothing."""

    def verdicts(self, comparison: pd.DataFrame) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Outcome:
    """How an invocation ended."""

    folder: Path
    counts: dict[str, int]
    interrupted: bool = False
    unchanged: bool = False

    @property
    def exit_code(self) -> int:
        """0 done, 1 done with failed runs, 130 interrupted."""
        if self.interrupted:
            return 130
        return int(any(count for status, count in self.counts.items() if status != "finished"))


def run_study(
    ablation: Ablation,
    *,
    name: str = "study",
    budget: str | None = None,
    seeds: int | None = None,
    pilot: bool = False,
    tuned: Mapping[str, Any] | None = None,
    cap: int | None = None,
    jobs: int | Literal["auto"] = "auto",
    device: Device | Literal["auto"] = "auto",
    tracking_uri: str | None = None,
    results: str | Path = "results",
    display: Display | None = None,
    diagnose: bool = True,
    command: str = "",
) -> Outcome:
    """Run what is left of a study and write its report into `results/name`, that of a pilot into `results/name-pilot`,
    that of an ablation whose variants have settings that a sweep found (`tuned` says of which) into
    `results/name-tuned`.

    With a `cap` the study runs until it is decided: `seeds` are those of its first look, and what is undecided then
    gets more, up to the cap (`stats.compare_in_turn` keeps the error rate).

    Ended runs are not done again, interrupted ones resume. Without `diagnose` neither structural probes nor detectors
    look at the runs, and their records say so. Ctrl-C (and SIGTERM, SIGHUP) saves and stops.

    Raises:
        UserError: `ablation` is no Ablation, the plan cannot be made, the folder cannot be written, another process
            conducts the study.
    """
    from harness.tracking import Mirror, default_uri, without_password

    if not isinstance(ablation, Ablation):
        raise UserError(f"run_study takes an Ablation, not {shown(ablation)}; `harness ablate` takes the name of one")
    display = display or Nobody()
    budget, device = budget or ablation.default_budget, resolve_device(device)
    plan = make_plan(name, ablation, budget=budget, seeds=seeds, device=device, pilot=pilot, tuned=tuned, cap=cap)
    plan.sources()  # refuses what no worker would find
    results = Path(results).expanduser().absolute()
    folder = results / plan.name
    mirror = Mirror(tracking_uri or default_uri(results), folder)
    if tracking_uri:
        mirror.prepare()
    is_new = not (folder / "study.json").exists()
    if is_new:  # of a study that does not start nothing is written
        for task in ablation.tasks:
            for variant in plan.variants:
                check_countable(plan.first(variant, task))
        check_comparisons(plan)
    make_writable(folder)
    with locked(folder, plan.name), heeded() as signals:
        check_looks(plan, folder)
        plan, states, notices = reached(plan, folder)
        notices += left_out(plan, folder)
        notices += unexamined(states, folder) if diagnose else []
        display.begin(plan, states, notices + undecidable(plan))
        store = without_password(mirror.uri)
        if is_current(plan, folder, states):
            name_store(folder, store)
            if mirror.pending():
                finish(mirror, "FINISHED", signals)
            return Outcome(folder, dict(Counter(states.values())), signals.came, unchanged=True)
        if not is_new:
            check_comparisons(plan)
        invocation = {"command": command, "tracking_uri": store}
        write_plan(plan, folder, invocation)
        work = rounds(plan, states, folder, display, invocation, diagnose=diagnose)
        mirrored(mirror, work, resolve_jobs(jobs, plan.device), display, folder, signals)
        _, states, _ = reached(plan, folder)
        return Outcome(folder, dict(Counter(states.values())), signals.came)


def reached(plan: Plan, folder: Path) -> tuple[Plan, dict[str, str], list[str]]:
    """A plan, the states of its runs, and notices (`survey`). One that looks at what is decided (`Plan.looks`) is that
    at its first look whose runs have not all ended, or where it stops.
    """
    states, notices = survey(plan, folder)
    while plan.looks and all(state in ENDED for state in states.values()):
        wider = plan.further(planned_data(folder, plan.document({})).compare())
        if wider is None:
            break
        plan = wider
        states, more = survey(plan, folder)
        notices += [notice for notice in more if notice not in notices]
    return plan, states, notices


def check_looks(plan: Plan, folder: Path) -> None:
    """Raise `UserError` where the verdicts of these runs were looked at by another plan: its error rate holds for that
    one, and to go on after a look that no plan had would raise it.
    """
    before = earlier_plan(folder)
    cells = {cell.fingerprint for cell in plan.cells}
    ended = any(
        run["fingerprint"] in cells and has_record(folder, run["fingerprint"]) for run in before.get("runs", ())
    )
    looks = before.get("looks", [])
    if not ended or looks == list(plan.looks):
        return
    if looks:
        told = f"looks at its verdicts after {listed([str(look) for look in looks])} seeds"
        remedy = f"go on with --seeds {looks[0]} --until decided --cap {looks[-1]}"
    else:
        told = f"was begun with {counted(len(before['seeds']), 'seed')} and without --until"
        remedy = "go on without it"
    raise UserError(
        f"{plan.name} {told}, and its error rate holds for that alone: {remedy}, or name another folder with --results"
    )


def left_out(plan: Plan, folder: Path) -> list[str]:
    """A notice where the last plan had more seeds of the same runs: the report will not show them."""
    before = earlier_plan(folder)
    cells = {cell.fingerprint for cell in plan.cells}
    runs = before.get("runs", [])
    more = [run for run in runs if run["fingerprint"] not in cells]
    ended = sum(has_record(folder, run["fingerprint"]) for run in more)
    if not ended or plan.looks or not cells < {run["fingerprint"] for run in runs}:
        return []
    return [f"{ended} runs of more seeds have ended and are left out; --seeds {len(before['seeds'])} counts them"]


def rounds(
    plan: Plan,
    states: dict[str, str],
    folder: Path,
    display: Display,
    invocation: dict[str, str],
    *,
    diagnose: bool,
) -> Iterator[list[Job]]:
    """The runs that are left of a plan in these states; of one that looks at what is decided, look by look."""
    yield jobs_of(plan, states, folder, diagnose=diagnose)
    while True:
        wider, states, notices = reached(plan, folder)
        if wider == plan:
            return
        notices.append(f"what is undecided after {len(plan.seeds)} seeds gets more")
        plan = wider
        write_plan(plan, folder, invocation)
        display.begin(plan, states, notices)
        yield jobs_of(plan, states, folder, diagnose=diagnose)


def jobs_of(plan: Plan, states: Mapping[str, str], folder: Path, *, diagnose: bool) -> list[Job]:
    """The runs of a plan that have not ended."""
    sources = tuple(map(str, plan.sources()))
    return [
        Job(cell.fingerprint, cell.spec.model_dump_json(), folder / "runs" / cell.fingerprint, sources, diagnose)
        for cell in plan.cells
        if states[cell.fingerprint] not in ENDED
    ]


def check_comparisons(plan: Plan) -> None:
    """Raise `UserError` where a variant computes nothing else than what it is compared with, or where something differs
    that its fields do not declare to change. What cannot be computed at all fails as a run, which is a result.
    """
    from harness.diagnostics import purity  # Lightning: a finished study should not wait for it

    for task, variant, reference in plan.comparisons():
        try:
            wrong = purity.impurities(plan.first(reference, task), plan.first(variant, task))
        except Exception:  # of a user's level, anything
            continue
        if wrong:
            compared = f"variants.{variant}: compared with {quoted(reference)} on {task}, {wrong[0]}"
            raise UserError(f"{compared}; change or drop that variant, or mend its level if that is yours")
    purity.shown.cache_clear()  # its models would stay in a GPU's memory as long as the study runs


def undecidable(plan: Plan) -> list[str]:
    """A notice where a plan can show no difference: it is a pilot, or its seeds are too few."""
    comparisons, seeds = (len(plan.variants) - 1) * len(plan.ablation.tasks), len(plan.seeds)
    if plan.seeds[0] >= PILOT_SEED:
        return ["a pilot: it chooses settings and decides nothing"]
    looks = plan.looks or (seeds,)
    if not comparisons or looks[-1] >= (fewest := fewest_seeds(comparisons * len(looks))):
        return []
    few = f"with {looks[-1]} seed{'s' * (looks[-1] != 1)} no difference can be significant"
    return [f"{few}: its comparisons ({comparisons}) need {fewest} ({'--cap' if plan.looks else '--seeds'} {fewest})"]


def unexamined(states: Mapping[str, str], folder: Path) -> list[str]:
    """A notice where diagnostics have not looked at runs that left a model."""
    ended = [name for name, state in states.items() if state in ("finished", "diverged")]
    count = sum(not RunRecord.of_run(folder / "runs" / name).was_examined for name in ended)
    if not count:
        return []
    return [
        f"{count} of {len(ended)} runs that have ended were not examined: they were made without diagnostics; "
        "`harness diagnose RUN` looks at one of them now, and one whose folder you remove from "
        f"{folder / 'runs'} is done again and examined"
    ]


def mirrored(
    mirror: "Mirror", rounds: Iterator[list[Job]], workers: int, display: Display, folder: Path, signals: "Signals"
) -> None:
    """Work jobs off, round after round, and write the report while a thread delivers to the tracking store; a signal
    ends each of it.
    """
    mirror.start()
    status: Ending = "FAILED"
    try:
        for jobs in rounds:
            execute(jobs, workers, display, folder, signals)
        with signals.telling(leave):
            mirror.flush(SETTLE)  # so that the report can name every run's id in the store
            publish(folder, display)
        status = "FINISHED"
    except Stopped:
        status = "KILLED"
    finally:
        finish(mirror, status, signals)


def execute(jobs: list[Job], workers: int, display: Display, folder: Path, signals: "Signals") -> None:
    """Work jobs off, until a signal comes."""
    if not jobs:
        return
    with LocalEngine(min(workers, len(jobs))) as engine, signals.telling(engine.stop):
        for event in engine.run(jobs):
            display.event(event)
            if isinstance(event, Ended):
                data = load_study(folder)
                display.verdicts(data.compare())


def finish(mirror: "Mirror", status: Ending, signals: "Signals") -> None:
    """Deliver the rest and stop; in haste if a signal has come, or comes meanwhile."""
    try:
        with signals.telling(leave):
            mirror.close(PATIENCE, status)
    except Stopped:
        mirror.close(HASTE, "KILLED")


def publish(folder: Path, display: Display) -> None:
    """Write the report of a study from its records."""
    from harness.report import write_report

    display.note("writing the report")
    write_report(load_study(folder), folder)


class Stopped(BaseException):
    """A signal came where there is nothing to save. No Exception, so that nobody takes it for an error of his own."""


def leave() -> NoReturn:
    """Raise `Stopped`."""
    raise Stopped


class Signals:
    """SIGINT, SIGTERM, SIGHUP (but for nohup) during a study: noted, and told to whatever can be stopped just now."""

    def __init__(self) -> None:
        self.came = False
        self._tell: Callable[[], None] | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """The handler of all three."""
        self.came = True
        if self._tell:
            self._tell()

    @contextmanager
    def telling(self, tell: Callable[[], None]) -> Iterator[None]:
        """Within, a signal also calls this; one that came before does at once."""
        try:
            self._tell = tell
            if self.came:
                tell()
            yield
        finally:
            self._tell = None


@contextmanager
def heeded() -> Iterator[Signals]:
    """Signals raise nowhere and kill nothing any more, but do what `Signals.telling` says."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield signals
        return
    numbers = (signal.SIGINT, *heeded_signals())
    before = {number: signal.signal(number, signals.take) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Holds a study's folder for this process.

    Raises:
        UserError: another process holds it, and which.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(signed(folder / "lock"))
        except TimeoutError as error:
            known = holder(folder / "lock")
            who = "process {pid} on {host} since {since}".format(**known) if known else "another process"
            raise UserError(f"study {name!r} is being run by {who}; wait for it or stop it") from error
        yield


def make_writable(folder: Path) -> None:
    """Make a study's folder if need be.

    Raises:
        UserError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); name another folder with --results") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: not writable; change its rights or name another folder with --results")


def is_current(plan: Plan, folder: Path, states: dict[str, str]) -> bool:
    """Whether every run has ended and the report on disk is of this plan and newer than every record."""
    if any(state not in ENDED for state in states.values()):
        return False
    report = folder / "report.html"
    if not report.exists():
        return False
    of_this_plan = {key: value for key, value in plan.document({}).items() if key not in CIRCUMSTANCES}
    on_disk = {key: value for key, value in earlier_plan(folder).items() if key not in CIRCUMSTANCES}
    records = [folder / "runs" / fingerprint / "record.json" for fingerprint in states]
    newest = max(record.stat().st_mtime for record in records)
    return json.loads(json.dumps(of_this_plan)) == on_disk and report.stat().st_mtime >= newest


CIRCUMSTANCES = ("command", "tracking_uri", "commit", "environment")  # of the invocation, not of the plan


def resolve_device(device: Device | Literal["auto"]) -> Device:
    """CUDA if there is any and nobody said otherwise.

    Raises:
        UserError: CUDA was asked for and there is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def resolve_jobs(jobs: int | Literal["auto"], device: Device) -> int:
    """Worker processes: one a core on the CPU, one on a GPU, unless a number is given."""
    if jobs == "auto":
        return 1 if device == "cuda" else len(os.sched_getaffinity(0))
    return jobs
