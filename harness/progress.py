"""How a study is watched: a live table on a terminal, plain lines elsewhere, and a table of verdicts at the end.

`Board` keeps the state that events bring; the displays only show it, and implement `harness.conduct.Display`. Names
come from users, so nothing here is read as markup.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.engine import Died, Ended, Event, Interrupted, Noted, Progressed, Started, Tick
from harness.record import RunRecord, mean_score
from harness.results import ENDED
from harness.schema import quoted
from harness.wording import ABSENT, decimal, probability, with_interval

if TYPE_CHECKING:
    import pandas as pd

    from harness.study import Plan

WIDE = 60  # columns from which on a terminal shows loss and speed
PIPE_WIDTH = 200  # columns of tables that go to a file or a pipe, where nothing needs to be cut
SHARE = 0.01  # of one core, which redrawing may take
PATIENCE = 3.0  # seconds of work before the time left is more than a guess
STYLES = {"better": "green", "worse": "red", "equivalent": "cyan", "undecided": "dim", "baseline": "dim"}


@dataclass
class Row:
    """A variant on a task, as far as it has come."""

    task: str
    variant: str
    is_baseline: bool
    states: dict[str, str] = field(default_factory=dict)  # fingerprint -> a record's status, missing, partial, running
    latest: dict[str, Progressed] = field(default_factory=dict)  # of the runs that run
    scores: list[float] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)  # the diagnosis of each run that has one
    verdict: str = ""

    @property
    def ended(self) -> int:
        """Runs with a record."""
        return sum(state in ENDED for state in self.states.values())

    @property
    def failed(self) -> int:
        """Runs that ended without a model."""
        return sum(state in ENDED and state != "finished" for state in self.states.values())

    @property
    def running(self) -> int:
        """Runs that a worker has."""
        return sum(state == "running" for state in self.states.values())

    @property
    def complete(self) -> bool:
        """Whether all runs have ended."""
        return self.ended == len(self.states)

    @property
    def mean_score(self) -> float:
        """Mean primary score of the runs that have one."""
        known = [score for score in self.scores if not math.isnan(score)]
        return sum(known) / len(known) if known else math.nan

    @property
    def mark(self) -> str:
        """One character for the state."""
        return "▸" if self.running else "✓" if self.complete else " "


class Board:
    """Where every run of a plan stands, and how long the rest will take."""

    def __init__(self, plan: "Plan", states: Mapping[str, str], folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.cells = {cell.fingerprint: cell for cell in plan.cells}
        self.rows: dict[tuple[str, str], Row] = {}
        for cell in plan.cells:
            row = Row(cell.task, cell.variant, cell.variant == plan.ablation.baseline)
            self.rows.setdefault((cell.task, cell.variant), row).states[cell.fingerprint] = states[cell.fingerprint]
        for fingerprint, state in states.items():
            if state in ENDED:
                self._note(self.row(fingerprint), self.record(fingerprint))
        self.causes: dict[str, str] = {}  # why runs ended without a model
        self.diagnoses: dict[str, str] = {}  # what alarmed first
        self.begun = time.monotonic()
        self._first: float | None = None  # when the first run of this invocation began
        self._reached = {print_: None if states[print_] == "partial" else 0 for print_ in self.cells}  # steps
        self._gained = 0  # steps taken by this invocation

    def row(self, fingerprint: str) -> Row:
        """The row that a run belongs to."""
        cell = self.cells[fingerprint]
        return self.rows[cell.task, cell.variant]

    def score(self, record: RunRecord) -> float:
        """The primary score of an ended run, NaN if it has none."""
        lengths = self.cells[record.fingerprint].spec.task.lengths
        return mean_score(record.scores, lengths.test or lengths.training, self.plan.ablation.score)

    def record(self, fingerprint: str) -> RunRecord:
        """What an ended run left."""
        return RunRecord.of_run(self.folder / "runs" / fingerprint)

    def take(self, event: Event) -> None:
        """Note what has happened."""
        if isinstance(event, Tick | Noted) or (isinstance(event, Died) and event.fingerprint is None):
            return
        assert event.fingerprint is not None
        row = self.row(event.fingerprint)
        if isinstance(event, Started):
            row.states[event.fingerprint] = "running"
            self._first = self._first or time.monotonic()
        elif isinstance(event, Progressed):
            row.latest[event.fingerprint] = event
            self._advance(event.fingerprint, event.step)
        else:
            row.latest.pop(event.fingerprint, None)
            row.states[event.fingerprint] = event.status if isinstance(event, Ended) else "partial"
            if isinstance(event, Ended):
                record = self.record(event.fingerprint)
                self._note(row, record)
                self.causes[event.fingerprint], self.diagnoses[event.fingerprint] = record.cause, record.diagnosis
                if event.status == "finished":
                    self._advance(event.fingerprint, self.cells[event.fingerprint].spec.train.steps)

    def _note(self, row: Row, record: RunRecord) -> None:
        row.scores.append(self.score(record))
        if record.diagnosis:
            row.alarms.append(record.diagnosis)

    def _advance(self, fingerprint: str, step: int) -> None:
        """Count the steps since the last sign of life; the first one of a resumed run tells where it went on."""
        reached = self._reached[fingerprint]
        self._gained += max(0, step - (step if reached is None else reached))
        self._reached[fingerprint] = step

    def take_verdicts(self, comparison: "pd.DataFrame") -> None:
        """Note the verdicts so far."""
        for variant, task, verdict in zip(
            comparison["variant"], comparison["task"], comparison["verdict"], strict=True
        ):
            self.rows[task, variant].verdict = verdict

    @property
    def ended(self) -> int:
        """Runs with a record."""
        return sum(row.ended for row in self.rows.values())

    @property
    def running(self) -> int:
        """Runs that a worker has, and so the number of workers at work."""
        return sum(row.running for row in self.rows.values())

    def seconds_left(self) -> float | None:
        """Steps left over the speed of this invocation; None while that is unknown."""
        spent = time.monotonic() - self._first if self._first else 0.0
        if spent < PATIENCE or not self._gained:
            return None
        left = sum(
            self.cells[print_].spec.train.steps - (self._reached[print_] or 0)
            for row in self.rows.values()
            for print_, state in row.states.items()
            if state not in ENDED
        )
        return left * spent / self._gained

    def task_is_complete(self, task: str) -> bool:
        """Whether all runs of a task have ended."""
        return all(row.complete for row in self.rows.values() if row.task == task)


class _Watching:
    """What both displays have in common: a console on stderr, and being a context."""

    board: Board

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to clean up."""

    def say(self, text: str, style: str = "") -> None:
        """Print a sentence above whatever is live."""
        self.console.print(Text(text, style), soft_wrap=True)

    def _run(self, fingerprint: str) -> str:
        """A run by name."""
        cell = self.board.cells[fingerprint]
        return f"{cell.task} · {cell.variant} · seed {cell.seed}"

    def _died(self, event: Died) -> str:
        run = event.fingerprint
        lost = f" Its run, {self._run(run)}, is taken up again from the last checkpoint." if run else ""
        return f"A worker process is gone and is replaced: it {event.cause}.{lost}"


class LiveTable(_Watching):
    """A table of variants × tasks that is redrawn with the engine's ticks and goes away at the end.

    Twice a second, or less often where it would take more than `SHARE` of the processor from the runs.

    It takes no more room than the terminal has: the rows that run are shown, then those that have failed, then the
    rest in the order of execution.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        super().__init__(folder, console)
        # Redrawn by hand: a thread of rich's own would take the interpreter from the one that feeds the workers.
        self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._note = ""
        self._due = 0.0  # when the next redrawing may be

    def begin(self, plan: "Plan", states: dict[str, str], notices: list[str]) -> None:
        """Say what is special; the table comes with the first event, as there may be nothing to do."""
        self.board = Board(plan, states, self.folder)
        for notice in notices:
            self.say(notice, "yellow")

    def event(self, event: Event) -> None:
        """Redraw at ticks, whatever happened since the last."""
        self.board.take(event)
        if isinstance(event, Died):
            self.say(self._died(event), "yellow")
        if isinstance(event, Noted):
            self.say(event.text, "yellow")
        if isinstance(event, Ended) and (why := self.board.causes[event.fingerprint]):
            self.say(f"{self._run(event.fingerprint)}: {_in_words(event.status)} ({why})", "red")
        if isinstance(event, Interrupted):
            self._note = "stopping: what runs is saved"
        if isinstance(event, Tick) and time.monotonic() >= self._due:
            self._draw()

    def verdicts(self, comparison: "pd.DataFrame") -> None:
        """Shown with the next redrawing."""
        self.board.take_verdicts(comparison)

    def note(self, text: str) -> None:
        """A line below the table, until the next one."""
        self._note = text
        self._draw()

    def __exit__(self, *_: object) -> None:
        """Take the table away."""
        self._live.stop()

    def _draw(self) -> None:
        before = time.thread_time()
        self._live.update(self.render())
        if not self._live.is_started:
            self._live.start()
        self._live.refresh()
        self._due = time.monotonic() + (time.thread_time() - before) / SHARE

    def render(self) -> Group:
        """Header, table, and the note below."""
        height = max(1, self.console.size.height - 5)
        rows = list(self.board.rows.values())
        shown = most_telling(rows, height)
        hidden = [row for row in rows if not any(row is other for other in shown)]
        parts: list[Text | Table] = [Text(self._header(), "bold", no_wrap=True, overflow="ellipsis")]
        parts.append(self._table(shown))
        if hidden:
            parts.append(Text(_in_sum(hidden), "dim", no_wrap=True, overflow="ellipsis"))
        if self._note:
            parts.append(Text(self._note, "yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*parts)

    def _header(self) -> str:
        board, plan = self.board, self.board.plan
        left = board.seconds_left()
        return (
            f"{plan.name} · {plan.budget} · {board.ended}/{len(board.cells)} runs · "
            f"{'…' if left is None else clock(left)} left, {clock(time.monotonic() - board.begun)} gone · "
            f"{board.running} worker{'s' * (board.running != 1)}"
        )

    def _table(self, rows: Sequence[Row]) -> Table:
        wide = self.console.size.width >= WIDE
        columns = ["", "task…", "variant…", ">seeds", *([">loss", ">steps/s"] if wide else []), ">score", "verdict"]
        cells = []
        for last, row in zip([None, *rows], rows, strict=False):
            latest = list(row.latest.values())
            moving = [_decimal(_mean(p.loss for p in latest)), _rate(_mean(p.steps_per_second for p in latest))]
            verdict = "baseline" if row.is_baseline else row.verdict if row.ended else ""
            sure = "" if row.complete else " dim"
            cells.append(
                [
                    Text(row.mark, "bold" if row.running else "green"),
                    Text("" if last and last.task == row.task else row.task),
                    Text(row.variant, "bold" if row.running else ""),
                    Text(f"{row.ended}/{len(row.states)}").append(_marks(row), "red"),
                    *(map(Text, moving) if wide else ()),
                    Text(_decimal(row.mean_score)),
                    Text(verdict, STYLES.get(verdict, "") + sure),
                ]
            )
        return table(columns, cells, gap=1, cut=True)


class PlainLines(_Watching):
    """A line when a run ends, the verdicts when a task is complete: for logs, pipes and terminals without cursor."""

    def begin(self, plan: "Plan", states: dict[str, str], notices: list[str]) -> None:
        """What there is to do."""
        self.board = Board(plan, states, self.folder)
        self._announced = {task for task in plan.ablation.tasks if self.board.task_is_complete(task)}
        for notice in notices:
            self.say(notice)
        left, total = len(self.board.cells) - self.board.ended, len(self.board.cells)
        if left:
            sizes = (len(plan.variants), "variant"), (len(plan.ablation.tasks), "task"), (len(plan.seeds), "seed")
            what = " × ".join(f"{count} {name}{'s' * (count != 1)}" for count, name in sizes)
            self.say(f"{plan.name}: {left} of {total} runs to do ({what}, budget {plan.budget})")

    def event(self, event: Event) -> None:
        """Lines for ends, deaths and notes."""
        self.board.take(event)
        if isinstance(event, Died):
            self.say(self._died(event))
        if isinstance(event, Noted):
            self.say(event.text)
        if isinstance(event, Ended):
            row = self.board.row(event.fingerprint)
            left, total = self.board.seconds_left(), str(len(self.board.cells))
            score = "" if math.isnan(row.scores[-1]) else f", score {_decimal(row.scores[-1])}"
            cause = f" ({why})" if (why := self.board.causes[event.fingerprint]) else ""
            alarm = f", diagnosis {name}" if (name := self.board.diagnoses[event.fingerprint]) else ""
            outcome = f"{_in_words(event.status)}{cause}{score}{alarm}" + (f", {clock(left)} left" if left else "")
            count = f"{self.board.ended:{len(total)}}/{total}"
            self.say(f"[{count}] {self._run(event.fingerprint)}: {outcome}")

    def verdicts(self, comparison: "pd.DataFrame") -> None:
        """A task's verdicts, once, when it is complete."""
        self.board.take_verdicts(comparison)
        tasks = dict.fromkeys(row.task for row in self.board.rows.values())
        for task in tasks:
            if task not in self._announced and self.board.task_is_complete(task):
                self._announced.add(task)
                rows = [row for row in self.board.rows.values() if row.task == task and not row.is_baseline]
                each = "; ".join(f"{self._compared(row)} {row.verdict or 'undecided'}" for row in rows)
                baseline = quoted(self.board.plan.ablation.baseline)
                self.say(f"{task} is complete. Against {baseline}: {each or 'nothing'}.")

    def _compared(self, row: Row) -> str:
        """A variant, and what it is compared with where that is not the baseline."""
        other = self.board.plan.ablation.against.get(row.variant)
        return quoted(row.variant) + (f" (to {quoted(other)})" if other else "")

    def note(self, text: str) -> None:
        """A line."""
        self.say(text)


def watch(folder: Path, stream: IO[str], environment: Mapping[str, str] = os.environ) -> LiveTable | PlainLines:
    """The live table where it can be drawn, plain lines elsewhere."""
    is_plain = environment.get("CI") or environment.get("NO_COLOR") or environment.get("TERM", "dumb") == "dumb"
    if is_plain or not stream.isatty():
        return PlainLines(folder, console(stream))
    return LiveTable(folder, console(stream))


class _Console(Console):
    """A console that leaves a closed pipe to whoever called: rich would exit with 1, which means failed runs here."""

    def on_broken_pipe(self) -> None:
        """Called while a BrokenPipeError is handled."""
        raise BrokenPipeError


def console(stream: IO[str]) -> Console:
    """Prints to a stream as it is: nothing highlighted, nothing read as markup; whole lines where it is no terminal."""
    width = None if stream.isatty() else PIPE_WIDTH
    return _Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, gap: int = 2, cut: bool = False) -> Table:
    """Rows under a head.

    Args:
        columns: names; one that begins with `>` is flush right, one that ends in `…` gives way where room is short.
        rows: a cell a column.
        gap: blanks between columns.
        cut: whether what gives way is cut; else it takes more lines.
    """
    drawn = Table(box=None, pad_edge=False, padding=(0, gap), collapse_padding=True, header_style="bold")
    for name in columns:
        drawn.add_column(
            Text(name.strip(">…")),
            justify="right" if name.startswith(">") else "left",
            no_wrap=not name.endswith("…"),
            overflow="fold",
        )
    for row in rows:
        cells = [Text(cell) if isinstance(cell, str) else cell for cell in row]
        for cell in cells if cut else ():
            cell.no_wrap, cell.overflow = True, "ellipsis"
        drawn.add_row(*cells)
    return drawn


def most_telling(rows: Sequence[Row], count: int) -> list[Row]:
    """At most `count` rows in their order: what runs, what has failed, what is unfinished, what is done."""

    def rank(row: Row) -> int:
        return 0 if row.running else 1 if row.failed else 2 if not row.complete else 3

    chosen = sorted(range(len(rows)), key=lambda i: (rank(rows[i]), i))[:count]
    return [rows[i] for i in sorted(chosen)]


def verdict_table(verdicts: "pd.DataFrame") -> Table:
    """The report's verdicts (`tables/verdicts.csv`), a row a task and variant; what a variant is compared with, where
    that is not the baseline, stands in brackets.
    """
    columns = ["task…", "variant…", ">score", "difference [95 %]", ">p (Holm)", "verdict", ">learned"]
    rows: list[list[str | Text]] = []
    baselines = set(verdicts.loc[verdicts["verdict"].isna(), "variant"])
    for row in verdicts.to_dict("records"):
        verdict = row["verdict"] if isinstance(row["verdict"], str) else "baseline"
        other = "" if verdict == "baseline" or row["reference"] in baselines else f" [{row['reference']}]"
        bound = row.get("bound", "")  # reports of before December 2026 lack it
        size = with_interval(row["difference"], row["low"], row["high"], bound=bound)
        rows.append(
            [
                str(row["task"]),
                f"{row['variant']}{other}",
                _decimal(row["score"]),
                " ".join(filter(None, map(_known, size))),
                _known(probability(row["p_holm"])),
                Text(verdict, STYLES.get(verdict, "")),
                f"{row['gate_passed']}/{row['gate_of']}",
            ]
        )
    return table(columns, rows, gap=1)


def clock(seconds: float) -> str:
    """`4:05`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _marks(row: Row) -> str:
    """` ✗2 !3`: runs that ended without a model, and runs with an alarm."""
    return (f" ✗{row.failed}" if row.failed else "") + (f" !{len(row.alarms)}" if row.alarms else "")


def _in_sum(rows: Sequence[Row]) -> str:
    counts = Counter("running" if row.running else "done" if row.complete else "waiting" for row in rows)
    return f"… {len(rows)} more: " + ", ".join(f"{count} {state}" for state, count in counts.items())


def _in_words(status: str) -> str:
    return status.replace("_", " ")


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else math.nan


def _decimal(value: float) -> str:
    return _known(decimal(value))


def _known(text: str) -> str:
    """A number as the report has it, but nothing in place of its dash: a terminal is small."""
    return "" if text == ABSENT else text


def _rate(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0f}"
