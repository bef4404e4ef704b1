"""What people see of a running study: the live table, the plain lines, and when which."""

import io
import math
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from harness import progress
from harness.components.position import RoPE, Sinusoidal
from harness.engine import Died, Ended, Interrupted, Noted, Progressed, Started, Tick
from harness.progress import Board, LiveTable, PlainLines, clock, verdict_table, watch
from harness.record import RunRecord, Score
from harness.study import Ablation, Budget, Plan, make_plan
from tasks import Copy, Lengths, Reverse


def planned(variants: int = 2, seeds: int = 2) -> Plan:
    """A plan of copy and reverse with that many variants."""
    lengths = Lengths(train=(1, 3), test=(4,))
    changes = {f"variant {i}": {"model.position": RoPE(base=1000.0 + i)} for i in range(1, variants)}
    ablation = Ablation(
        question="What does one see?",
        tasks={"copy": Copy(lengths=lengths), "reverse": Reverse(lengths=lengths)},
        axes=("model.position",),
        baseline="original",
        variants={"original": {"model.position": Sinusoidal()}, **changes},
        budgets={"quick": Budget(seeds=seeds, changes={"train.steps": 100})},
    )
    return make_plan("seen", ablation, budget="quick", seeds=None, device="cpu")


def end(folder: Path, fingerprint: str, score: float, status: str = "finished") -> Ended:
    """Leave a run's record, and tell of it."""
    scores = (Score(length=4, metric="exact_match", value=score), Score(length=3, metric="exact_match", value=1.0))
    RunRecord.model_validate(
        {"fingerprint": fingerprint, "spec": {}, "status": status, "scores": scores if status == "finished" else ()}
        | ({} if status == "finished" else {"cause": "it grew"})
    ).write(folder / "runs" / fingerprint / "record.json")
    return Ended(fingerprint, status)  # type: ignore[arg-type]


def missing(plan: Plan) -> dict[str, str]:
    """Nothing has been run."""
    return {cell.fingerprint: "missing" for cell in plan.cells}


def screen(width: int = 100, height: int = 40) -> Console:
    """A terminal that keeps what is written to it."""
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, highlight=False)


def shown(table: LiveTable) -> str:
    """The table as text."""
    paper = screen(table.console.width, table.console.height)  # printing on its own console would draw it twice
    with paper.capture() as captured:
        paper.print(table.render())
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.get())


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test moves."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_follows_from_the_steps_done_in_this_invocation(tmp_path: Path, clocked: list[float]) -> None:
    plan = planned()
    first, second, *others = [cell.fingerprint for cell in plan.cells]
    states = missing(plan) | {second: "partial"}
    board = Board(plan, states, tmp_path)
    assert board.seconds_left() is None
    board.take(Started(first, 0))
    board.take(Started(second, 1))
    board.take(Progressed(first, 10, 100, 1.0, 5.0))
    board.take(Progressed(second, 60, 100, 1.0, 5.0))  # 50 of these were done before
    clocked[0] += 10
    board.take(Progressed(second, 70, 100, 1.0, 5.0))
    assert board.seconds_left() == pytest.approx((90 + 30 + 100 * len(others)) * 10 / 20)
    board.take(end(tmp_path, first, 0.5))
    assert board.seconds_left() == pytest.approx((30 + 100 * len(others)) * 10 / 110)


def test_a_run_whose_worker_died_goes_back_and_gains_nothing_twice(tmp_path: Path, clocked: list[float]) -> None:
    plan = planned()
    first = plan.cells[0].fingerprint
    board = Board(plan, missing(plan), tmp_path)
    board.take(Started(first, 0))
    board.take(Progressed(first, 50, 100, 1.0, 5.0))
    board.take(Died(first, 0, "was killed by signal 9"))
    board.take(Died(None, 1, "exited with code 1"))
    assert board.running == 0
    board.take(Started(first, 0))
    board.take(Progressed(first, 20, 100, 1.0, 5.0))
    clocked[0] += 10
    left = board.seconds_left()
    assert left == pytest.approx((80 + 100 * (len(plan.cells) - 1)) * 10 / 50)


def test_ended_runs_are_counted_with_their_scores_from_the_start(tmp_path: Path) -> None:
    plan = planned()
    first = plan.cells[0].fingerprint
    end(tmp_path, first, 0.25)
    board = Board(plan, missing(plan) | {first: "finished"}, tmp_path)
    assert board.ended == 1
    assert board.row(first).mean_score == 0.25  # test lengths alone


def test_the_table_shows_what_happens(tmp_path: Path) -> None:
    plan = planned(variants=3)
    table = LiveTable(tmp_path, screen())
    table.begin(plan, missing(plan), ["a notice"])
    prints = [cell.fingerprint for cell in plan.cells]
    table.event(end(tmp_path, prints[0], 0.5))
    table.event(end(tmp_path, prints[1], 0.0, "diverged"))
    table.event(Started(prints[2], 0))
    table.event(Progressed(prints[2], 50, 100, 1.2345, 47.6))
    rows = [("variant 1", "copy", "worse"), ("variant 2", "copy", "undecided")]  # of no run at all: not shown
    table.verdicts(pd.DataFrame(rows, columns=["variant", "task", "verdict"]))
    lines = shown(table).splitlines()
    assert lines[0].startswith("seen · quick · 2/12 runs · ")
    assert "1 worker" in lines[0]
    assert re.search(r"copy +original +1/2 +0.500 baseline", lines[2])
    assert re.search(r"variant 1 +1/2 ✗1 +worse", lines[3])
    assert re.search(r"▸ +variant 2 +0/2 +1.234 +48 *$", lines[4])
    assert re.search(r"reverse +original", lines[5])
    assert "a notice" in table.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("width", "height"), [(60, 24), (100, 40), (40, 10), (200, 100), (20, 3)])
def test_the_table_fits_the_terminal_however_many_variants_there_are(tmp_path: Path, width: int, height: int) -> None:
    plan = planned(variants=30, seeds=1)
    table = LiveTable(tmp_path, screen(width, height))
    table.begin(plan, missing(plan), [])
    running = plan.cells[-1].fingerprint
    table.event(Started(running, 0))
    table.event(Progressed(running, 50, 100, 1.5, 40.0))
    table.note("writing the report")
    lines = shown(table).splitlines()
    assert len(lines) <= max(height, 5)
    assert all(len(line) <= width for line in lines)
    assert any("▸" in line for line in lines)  # what runs is shown, though it is the last
    if height < 60:
        assert any(re.match(r"… \d+ more", line) for line in lines)
    if width >= 60:
        assert any("1.500" in line and "variant 29" in line for line in lines)


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    plan = planned()
    odd = plan.ablation.model_copy(
        update={
            "baseline": "[red]:smile:[/]",
            "variants": {
                "[red]:smile:[/]": plan.ablation.variants["original"],
                "b": plan.ablation.variants["variant 1"],
            },
        }
    )
    plan = make_plan("seen", odd, budget="quick", seeds=None, device="cpu")
    table = LiveTable(tmp_path, screen())
    table.begin(plan, missing(plan), ["[bold]notice"])
    assert "[red]:smile:[/]" in shown(table)
    assert "[bold]notice" in table.console.file.getvalue()  # type: ignore[attr-defined]


def test_redrawing_takes_a_hundredth_of_a_core_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = [1000.0], [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.time, "thread_time", lambda: spent[0])
    plan = planned()
    table = LiveTable(tmp_path, screen())
    table.begin(plan, missing(plan), [])
    draw = table.render

    def costly() -> object:
        spent[0] += 0.02
        return draw()

    monkeypatch.setattr(table, "render", costly)
    with table:
        for _ in range(200):  # ticks of 100 s
            now[0] += 0.5
            table.event(Tick())
    assert spent[0] <= 1.1


def test_plain_lines_tell_of_ends_deaths_and_verdicts(tmp_path: Path) -> None:
    plan = planned(seeds=1)
    out = io.StringIO()
    lines = PlainLines(tmp_path, progress.console(out))
    lines.begin(plan, missing(plan), ["a notice"])
    for number, cell in enumerate(plan.cells):
        lines.event(Started(cell.fingerprint, 0))
        lines.event(Tick())
        lines.event(end(tmp_path, cell.fingerprint, 0.5, "finished" if number else "out_of_memory"))
        lines.verdicts(pd.DataFrame({"variant": ["variant 1"], "task": [cell.task], "verdict": ["better"]}))
    lines.event(Died(None, 1, "exited with code 3"))
    lines.event(Died(plan.cells[-1].fingerprint, 1, "exited with code 3"))
    lines.event(Noted(plan.cells[0].fingerprint, "something was corrupt"))
    said = out.getvalue().splitlines()
    assert said[:2] == ["a notice", "seen: 4 of 4 runs to do (2 variants × 2 tasks × 1 seed, budget quick)"]
    assert said[2] == "[1/4] copy · original · seed 0: out of memory (it grew)"
    assert said[3].startswith("[2/4] copy · variant 1 · seed 0: finished, score 0.500")
    assert said[4] == "copy is complete. Against original: variant 1 better."
    assert said[7] == "reverse is complete. Against original: variant 1 better."
    assert said[8] == "A worker process is gone and is replaced: it exited with code 3."
    run = "reverse · variant 1 · seed 0"
    assert said[9].endswith(f"code 3. Its run, {run}, is taken up again from the last checkpoint.")
    assert said[10] == "something was corrupt"
    assert len(said) == 11


def test_a_verdict_names_what_it_is_about_where_that_is_not_the_baseline(tmp_path: Path) -> None:
    variants = {name: {"model.position": RoPE(base=1000.0 + i)} for i, name in enumerate(("RoPE", "low, far", "low"))}
    ablation = planned().ablation.model_copy(
        update={
            "tasks": {"copy": planned().ablation.tasks["copy"]},
            "baseline": "RoPE",
            "variants": variants,
            "against": {"low": "low, far"},
        }
    )
    plan, out = make_plan("seen", ablation, budget="quick", seeds=1, device="cpu"), io.StringIO()
    lines = PlainLines(tmp_path, progress.console(out))
    lines.begin(plan, missing(plan), [])
    for cell in plan.cells:
        lines.event(end(tmp_path, cell.fingerprint, 0.5))
    rows = [("low, far", "copy", "worse"), ("low", "copy", "better")]
    lines.verdicts(pd.DataFrame(rows, columns=["variant", "task", "verdict"]))
    assert out.getvalue().splitlines()[-1] == (
        "copy is complete. Against RoPE: “low, far” worse; low (to “low, far”) better."
    )


def test_a_stop_is_noted(tmp_path: Path) -> None:
    plan = planned()
    table = LiveTable(tmp_path, screen())
    table.begin(plan, missing(plan), [])
    table.event(Interrupted(plan.cells[0].fingerprint, 10))
    assert "stopping: what runs is saved" in shown(table)


def test_a_note_of_a_run_stays_above_the_table(tmp_path: Path) -> None:
    plan = planned()
    table = LiveTable(tmp_path, screen())
    table.begin(plan, missing(plan), [])
    table.event(Noted(plan.cells[0].fingerprint, "something was corrupt"))
    assert "something was corrupt" in table.console.file.getvalue()  # type: ignore[attr-defined]
    assert "something was corrupt" not in shown(table)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "kind"),
    [
        (Terminal(), {"TERM": "xterm"}, LiveTable),
        (io.StringIO(), {"TERM": "xterm"}, PlainLines),
        (Terminal(), {"TERM": "xterm", "CI": "true"}, PlainLines),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, PlainLines),
        (Terminal(), {"TERM": "dumb"}, PlainLines),
        (Terminal(), {}, PlainLines),
    ],
)
def test_the_live_table_is_for_terminals(
    stream: io.StringIO, environment: dict[str, str], kind: type, tmp_path: Path
) -> None:
    assert type(watch(tmp_path, stream, environment)) is kind


SCRIPT = """
import sys
from pathlib import Path
from types import SimpleNamespace as N
from harness.engine import Progressed, Started, Tick
from harness.progress import watch
spec = N(train=N(steps=100), task=N(lengths=N(test=(4,), training=(1,))))
cells = [N(fingerprint=v, task="copy", variant=v, seed=0, spec=spec) for v in ("original", "other")]
ablation = N(baseline="original", tasks={"copy": None}, score="exact_match")
plan = N(name="seen", budget="quick", cells=cells, ablation=ablation, seeds=[0], variants=["original", "other"])
with watch(Path("."), sys.stderr) as display:
    display.begin(plan, {"original": "missing", "other": "missing"}, [])
    display.event(Started("original", 0))
    display.event(Progressed("original", 50, 100, 1.5, 40.0))
    display.event(Tick())
    print("a warning of a library", file=sys.stderr)
    display.note("writing the report")
print("over", file=sys.stderr)
"""


def test_on_a_real_terminal_the_table_is_drawn_and_taken_away(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "COLUMNS")}
    environment = {**plain, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=tmp_path
    )
    os.close(theirs)
    written, limit = b"", time.monotonic() + 60
    while time.monotonic() < limit and select.select([ours], [], [], 60)[0]:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        written += part
    os.close(ours)
    assert process.wait(10) == 0
    text = written.decode()
    assert "seen · quick · 0/2 runs" in text
    assert "1.500" in text
    assert "a warning of a library" in text
    assert "\x1b[2K" in text  # lines are erased,
    assert "\x1b[?25h" in text  # the cursor comes back,
    assert text.rstrip().endswith("over")


def test_times_read_like_a_clock() -> None:
    assert [clock(seconds) for seconds in (0, 65, 3725)] == ["0:00", "1:05", "1:02:05"]


def test_the_verdict_table_shows_the_report_s_rows() -> None:
    none = math.nan
    rows = [
        {"task": "copy", "variant": "original", "score": 0.1, "gate_passed": 2, "gate_of": 2},
        {
            **{"task": "copy", "variant": "RoPE", "score": 0.4, "difference": 0.3, "low": -0.1, "high": 0.7},
            **{"p_holm": 0.04, "verdict": "better", "gate_passed": 1, "gate_of": 2, "reference": "original"},
        },
        {
            **{"task": "copy", "variant": "NoPE", "score": 0.9, "difference": 0.5, "low": none, "high": none},
            **{"verdict": "undecided", "gate_passed": 1, "gate_of": 2, "reference": "RoPE", "bound": "≥"},
        },
    ]
    console = screen(80)
    with console.capture() as captured:
        console.print(verdict_table(pd.DataFrame(rows)))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()
    assert re.search(r"copy +original +0.100 +baseline +2/2", lines[1])
    assert re.search(r"copy +RoPE +0.400 \+0.30 \[−0.10, \+0.70\] +0.040 better +1/2", lines[2])
    assert re.search(r"copy +NoPE \[RoPE\] +0.900 ≥ \+0.50 +undecided +1/2", lines[3])
    with console.capture() as captured:
        console.print(verdict_table(pd.DataFrame(rows).drop(columns="bound")))  # of a report that is a version older
    assert "0.900 +0.50" in re.sub(r"\x1b\[[0-9;]*m", "", captured.get())


def test_the_verdict_table_loses_no_sign_of_a_small_effect() -> None:
    row = {"task": "copy", "variant": "RoPE", "reference": "original", "score": 0.4, "gate_passed": 1, "gate_of": 1}
    small = {"difference": -0.004, "low": -0.009, "high": 0.001, "p_holm": 0.0004, "verdict": "worse"}
    none = {"difference": -0.0001, "low": -0.0002, "high": 0.0, "p_holm": 0.5, "verdict": "undecided"}
    console = screen(80)
    with console.capture() as captured:
        console.print(verdict_table(pd.DataFrame([row | small, row | none])))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()
    assert "−0.004 [−0.009, +0.001] " in lines[1]
    assert " < 0.001 worse" in lines[1]
    assert " 0.000 [0.000, 0.000] " in lines[2]
