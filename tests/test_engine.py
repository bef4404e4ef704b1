"""The engine with real worker processes, really killed: by themselves, by us, with their parent."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import psutil
import pytest

from harness import engine as engine_module
from harness.engine import (
    INSIDE,
    ROOT,
    Died,
    Ended,
    Interrupted,
    Job,
    LocalEngine,
    Progressed,
    Started,
    Tick,
)
from harness.record import RunRecord, read_curves
from harness.schema import UserError
from harness.sources import load_source

# A user's file: tasks whose training batches do harm, once or every time, on the way to the same result as Slow's.
SOURCE = """
    import ctypes, os, signal, time
    from pathlib import Path
    from tasks import Copy

    if "HARNESS_WORKER" in os.environ:
        import harness.journal

        harness.journal.CHECKPOINT_SECONDS = 0.0  # at every point of the curves

    class Slow(Copy):
        seconds: float = 0.0
        until: str = ""  # slow only until this file is there
        harm_at: int = -1
        how: str = ""
        once: str = ""  # a file that says that it has happened

        def batch(self, seed, stream, step, *shape):
            if stream == "train":
                time.sleep(0 if self.until and Path(self.until).exists() else self.seconds)
                if step == self.harm_at and not (self.once and Path(self.once).exists()):
                    self.once and Path(self.once).touch()
                    harm(self.how)
            return super().batch(seed, stream, step, *shape)

    def harm(how):
        if how == "hang":
            time.sleep(3600)
        elif how == "segfault":
            print("about to crash")
            ctypes.string_at(0)
        elif how == "exit":
            os._exit(3)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    file = tmp_path_factory.mktemp("user") / "levels.py"
    file.write_text(textwrap.dedent(SOURCE))
    return file


def spec_of(source, seed, harm, steps=60):
    from harness.spec import ModelSpec, RunSpec, TrainSpec
    from tasks import Lengths

    return RunSpec(
        model=ModelSpec(d_model=8, num_layers=1, num_heads=2),
        task=load_source(source).Slow(lengths=Lengths(train=(1, 3), test=(4,)), **harm),
        train=TrainSpec(steps=steps, batch_size=4, learning_rate=1e-2, eval_samples=16),
        seed=seed,
    )


@pytest.fixture
def make_job(source, tmp_path):
    def make_job(seed=0, steps=60, **harm):
        spec = spec_of(source, seed, harm, steps)
        name = spec.fingerprint()
        return Job(name, json.dumps(spec.document()), tmp_path / "runs" / name, (str(source),))

    return make_job


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    """The outcome of a seed when nothing happens, run in this process without any engine."""
    from harness.runner import run

    @cache
    def undisturbed(seed, steps=60):
        folder = tmp_path_factory.mktemp("undisturbed")
        run(spec_of(source, seed, {}, steps), directory=folder, probes=folder / "probes")
        return outcome(folder)

    return undisturbed


def outcome(folder):
    """What must be equal to the bit, and is the same whatever harm the task does on the way."""
    record = RunRecord.read(folder / "record.json")
    timed = {"wall_seconds", "peak_memory_bytes"}
    return {
        "status": record.status,
        "scores": record.scores,
        "final": json.dumps(record.final),  # as text NaN equals NaN
        "findings": json.dumps([found.model_dump() for found in record.findings]),
        "ledger": {key: value for key, value in record.ledger.items() if key not in timed},
        "curves": [{**line, "time": 0} for line in read_curves(folder / "curves.jsonl")],
    }


def workers_of(pid):
    return [child for child in psutil.Process(pid).children() if is_worker(child)]


def is_worker(process):
    try:
        return "harness.worker" in process.cmdline()
    except psutil.NoSuchProcess:  # gone or a zombie
        return False


def handles():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def nothing_is_left_behind(undisturbed):
    undisturbed(0)  # what torch and Lightning open and keep is open from here on
    before = handles(), threading.active_count()
    yield
    assert psutil.Process().children() == []  # zombies are children too
    end = time.monotonic() + 5  # a thread that has done its work may still be on its way out
    while (handles(), threading.active_count()) != before and time.monotonic() < end:
        time.sleep(0.05)
    assert (handles(), threading.active_count()) == before


def comes_to_be(path, seconds=300):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


@pytest.mark.slow
def test_jobs_run_in_order_on_workers_that_are_started_once(make_job, tmp_path, monkeypatch):
    for name in ("tasks.py", "copy.py"):  # what lies in the working directory hides no module
        (tmp_path / name).write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(tmp_path)
    jobs = [make_job(seed) for seed in range(5)]
    events, pids = [], set()
    with LocalEngine(2) as engine:
        for batch in (jobs[:3], jobs[3:]):
            for event in engine.run(batch):
                events.append(event)
                pids |= {worker.pid for worker in workers_of(os.getpid())}
                if isinstance(event, Ended) and batch[0] is jobs[0]:  # a consumer that is busy holds no worker up
                    assert comes_to_be(jobs[2].directory)
    assert len(pids) == 2
    places = {job.fingerprint: place for place, job in enumerate(jobs)}
    started = [places[event.fingerprint] for event in of(Started, events)]
    assert sorted(started) == list(range(5))
    assert all(
        abs(place - turn) <= 1 for turn, place in enumerate(started)
    )  # two that begin at once tell it in any order
    assert sorted(event.fingerprint for event in of(Ended, events)) == sorted(job.fingerprint for job in jobs)
    assert {event.status for event in of(Ended, events)} == {"finished"}
    assert {event.worker for event in of(Started, events)} <= {0, 1}
    assert {type(event) for event in events} == {Started, Progressed, Ended, Tick}
    assert all(event.steps == 60 >= event.step > 0 < event.loss for event in of(Progressed, events))


@pytest.mark.slow
def test_a_users_file_that_breaks_meanwhile_stops_the_study_and_leaves_no_record(make_job, source, tmp_path):
    under_way, waiting = make_job(seconds=0.05, steps=1000), make_job(seed=1)
    broken = tmp_path / "broken.py"
    broken.write_text(source.read_text())
    waiting = replace(waiting, sources=(str(broken),))
    broken.write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"broken\.py, line 1: ZeroDivisionError"), LocalEngine(2) as engine:
        for _ in engine.run([under_way, waiting]):
            pass
    assert not (waiting.directory / "record.json").exists()
    assert not (under_way.directory / "record.json").exists()


@pytest.mark.slow
def test_workers_that_die_are_replaced_and_their_jobs_tried_once_more(make_job, tmp_path, undisturbed):
    once = make_job(how="segfault", harm_at=35, once=str(tmp_path / "has happened"))
    always, last = make_job(how="kill", harm_at=5), make_job()
    jobs = [once, always, last]
    with LocalEngine(2) as engine:
        events = list(engine.run(jobs))
    assert [len(of(Started, of_job(job, events))) for job in jobs] == [2, 2, 1]

    # Once: replaced, resumed from the last checkpoint, and nobody can tell.
    assert [died.cause for died in of(Died, of_job(once, events))] == ["was killed by signal 11 (SIGSEGV)"]
    again = max(i for i, event in enumerate(events) if event in of(Started, of_job(once, events)))
    assert of(Progressed, of_job(once, events[again:]))[0].step > 30
    assert outcome(once.directory) == outcome(last.directory) == undisturbed(0)
    log = (once.directory / "run.log").read_text()
    assert "about to crash" in log
    assert "Fatal Python error: Segmentation fault" in log

    # Whenever it is tried: a record that says so, and the study goes on.
    assert {event.fingerprint: event.status for event in of(Ended, events)} == {
        once.fingerprint: "finished",
        always.fingerprint: "out_of_memory",
        last.fingerprint: "finished",
    }
    record = RunRecord.read(always.directory / "record.json")
    assert record.cause.startswith("its worker was killed by signal 9 (out of memory?), twice")
    assert record.spec == json.loads(always.spec)
    assert record.ended > record.started > 0
    assert record.environment["python"]


def of_job(job, events):
    return [event for event in events if getattr(event, "fingerprint", None) == job.fingerprint]


@pytest.mark.slow
def test_stopped_in_a_signal_handler_all_is_saved_and_resumes_with_the_same_bits(make_job, undisturbed, tmp_path):
    resumed = tmp_path / "resumed"
    jobs = [make_job(seed, steps=300, seconds=0.04, until=str(resumed)) for seed in range(3)]
    events, begun = [], 0.0
    with LocalEngine(2) as engine:
        before = signal.signal(signal.SIGALRM, lambda *_: engine.stop())
        for event in engine.run(jobs):
            events.append(event)
            if not begun and len({event.fingerprint for event in of(Progressed, events)}) == 2:
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                begun = time.monotonic()
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 10
    stopped = {event.fingerprint: event.step for event in of(Interrupted, events)}
    assert stopped.keys() == {job.fingerprint for job in jobs[:2]}
    assert len(of(Started, events)) == 2
    assert not of(Ended, events) + of(Died, events)

    resumed.touch()
    with LocalEngine(1) as engine:
        events = list(engine.run(jobs))
    for job in jobs[:2]:
        assert of(Progressed, of_job(job, events))[0].step == stopped[job.fingerprint] + 10 > 10
    assert [outcome(job.directory) for job in jobs] == [undisturbed(seed, steps=300) for seed in range(3)]


@pytest.mark.slow
def test_a_worker_that_does_not_stop_is_killed_when_grace_is_over_and_waiting_costs_nothing(make_job):
    job = make_job(how="hang", harm_at=15)
    events, hangs, stopped = [], 0.0, 0.0
    with LocalEngine(4) as engine:
        for event in engine.run([job]):
            events.append(event)
            if isinstance(event, Progressed):
                assert len(workers_of(os.getpid())) == 1  # no more than jobs
                hangs, cpu, ticks = time.monotonic(), time.process_time(), len(of(Tick, events))
            elif hangs and not stopped and time.monotonic() - hangs > 2:
                assert time.process_time() - cpu < 0.05
                assert len(of(Tick, events)) - ticks >= 3
                stopped = time.monotonic()
                engine.stop(grace=0.3)
    assert 0.3 < time.monotonic() - stopped < 3
    assert events[-1] == Interrupted(job.fingerprint, 10)


@pytest.mark.slow
def test_a_worker_told_to_exit_is_replaced_and_leaving_the_context_saves(make_job):
    job = make_job(seconds=0.03)
    events = []
    with contextlib.suppress(ZeroDivisionError), LocalEngine(1) as engine:
        for event in engine.run([job]):
            events.append(event)
            if isinstance(event, Progressed) and of(Died, events):
                raise ZeroDivisionError
            if isinstance(event, Progressed) and len(of(Progressed, events)) == 1:
                workers_of(os.getpid())[0].terminate()
    assert [(died.fingerprint, died.cause) for died in of(Died, events)] == [
        (job.fingerprint, "was told to exit by a signal and has saved its run")
    ]
    first, *_, last = of(Progressed, events)
    assert last.step > first.step
    assert (job.directory / "checkpoint.ckpt").exists()
    assert not (job.directory / "record.json").exists()


def test_stopped_before_it_begins_nothing_is_started(make_job):
    with LocalEngine(1) as engine:
        engine.stop()
        assert not of(Started, list(engine.run([make_job()])))


def test_stopped_while_workers_start_it_is_over_at_once(make_job):
    with LocalEngine(2) as engine:
        begun = time.monotonic()
        threading.Timer(0.2, engine.stop).start()
        assert not of(Started, list(engine.run([make_job(), make_job(1)])))
    assert time.monotonic() - begun < 3


def test_workers_that_cannot_start_are_given_up_with_the_reason(make_job, tmp_path, monkeypatch):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho torch is broken here >&2\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setattr(engine_module.sys, "executable", str(broken))
    with LocalEngine(2) as engine, pytest.raises(UserError, match=r"exited with code 4: torch is broken here$"):
        list(engine.run([make_job(), make_job(1)]))


@pytest.mark.slow
def test_a_record_that_its_worker_could_not_announce_counts(make_job, tmp_path):
    last_words = tmp_path / "dies_after_recording.py"
    last_words.write_text(
        "import os, pathlib, harness.runner as runner\n"
        "def run(*a, run=runner.run, **k):\n"
        "    run(*a, **k)\n"
        "    pathlib.Path(__file__).with_suffix('.done').touch()\n"
        "    os.kill(os.getpid(), 9)\n"
        "runner.run = run\n"
    )
    job = replace(make_job(), sources=(*make_job().sources, str(last_words)))
    with LocalEngine(1) as engine:
        events = list(engine.run([job]))
    assert of(Ended, events) == [Ended(job.fingerprint, "finished")]
    assert not of(Died, events)
    assert last_words.with_suffix(".done").exists()


def test_an_engine_has_a_worker():
    with pytest.raises(UserError, match="workers = 0"):
        LocalEngine(0)


def test_no_engine_in_a_worker(monkeypatch):
    monkeypatch.setenv(INSIDE, "1")
    with pytest.raises(UserError, match="__main__"):
        LocalEngine(1)


# What a command does, in a process that can be killed: it runs what has no record yet.
CONDUCT = """
    import json, sys
    from pathlib import Path
    from harness.engine import Job, LocalEngine

    jobs = [Job(j["fingerprint"], j["spec"], Path(j["directory"]), tuple(j["sources"])) for j in json.load(sys.stdin)]
    left = [job for job in jobs if not (job.directory / "record.json").exists()]
    with LocalEngine(2) as engine:
        for event in engine.run(left):
            print(type(event).__name__, getattr(event, "fingerprint", ""), flush=True)
"""


class Command:
    """A running command: its events can be read, its workers found, itself killed."""

    def __init__(self, jobs):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CONDUCT)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        json.dump([{**vars(job), "directory": str(job.directory)} for job in jobs], self.process.stdin)
        self.process.stdin.close()

    def progressed(self):
        """The fingerprint of the next run to give a sign of life; None when the command has ended."""
        for line in self.process.stdout:
            if line.startswith("Progressed"):
                return line.split()[1]
        return None

    def kill(self):
        self.process.kill()
        self.wait()

    def wait(self):
        self.process.stdout.close()
        return self.process.wait()


def kill_the_command(jobs, dice, *, patient):
    """Kill a command in the middle of its work; see that its workers save and go, or else kill one of them before."""
    command = Command(jobs)
    for _ in range(dice.randint(2, 4)):  # of six that each run gives
        command.progressed()
    workers = workers_of(command.process.pid)
    if not patient:
        dice.choice(workers).kill()
        time.sleep(dice.uniform(0, 0.5))
    command.kill()
    if patient:
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert not alive
        for job in jobs:
            if (job.directory / "curves.jsonl").exists() and not (job.directory / "record.json").exists():
                assert (job.directory / "checkpoint.ckpt").exists()


def kill_workers(jobs, dice):
    """Let a command run to its end, but kill the worker of every run once."""
    command = Command(jobs)
    killed = set()
    while fingerprint := command.progressed():
        if fingerprint in killed:
            continue
        time.sleep(dice.uniform(0, 0.3))
        for worker in workers_of(command.process.pid):
            if any(fingerprint in file.path for file in worker.open_files()):
                worker.kill()
                killed.add(fingerprint)
    assert command.wait() == 0
    return killed


long = pytest.mark.skipif("HARNESS_STRESS" not in os.environ, reason="minutes; set HARNESS_STRESS=1")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=long) for seed in range(1, 7))])
def test_whatever_is_killed_and_when_nothing_is_lost(make_job, undisturbed, seed):
    dice = random.Random(seed)
    jobs = [make_job(number, seconds=0.02 if seed else 0.06) for number in range(8 if seed else 2)]
    for turn in range(4 if seed else 1):
        kill_the_command(jobs, dice, patient=turn % 2 == 0)
    assert kill_workers(jobs, dice)
    assert [outcome(job.directory) for job in jobs] == [undisturbed(number) for number in range(len(jobs))]
    assert not any((job.directory / "checkpoint.ckpt").exists() for job in jobs)


@pytest.mark.parametrize(
    ("log", "tail"),
    [
        (b"", ""),
        (b"some\nwarning\n", "some warning"),
        (b"Traceback (most recent call last):\n  File x\nValueError: no\n", "ValueError: no"),
        (
            b"a tip\nFatal Python error: Aborted\n\nThread 1\n" + 99 * b"  File x\n",
            "Fatal Python error: Aborted Thread 1 File",
        ),
        (b"caf\xe9" + 999 * b"!", 300 * "!"),
    ],
)
def test_the_end_of_a_log_says_what_happened(log, tail):
    assert engine_module._tail(log).startswith(tail)
    assert len(engine_module._tail(log)) <= 300


def test_importing_the_engine_imports_no_torch():
    code = "import sys, harness.engine; print({'torch', 'numpy', 'pytorch_lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
