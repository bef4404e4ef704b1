"""The worker's half of the protocol, spoken to real worker processes through a real pipe."""

import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest

from harness.engine import ROOT, STOP_SIGNALS, Job
from harness.record import RunRecord, read_curves
from harness.schema import UserError
from harness.sources import load_source
from harness.worker import alone_in, cause_of, output_to, throttled

# A user's file with levels that behave badly: where `answer` is called, training or evaluation is under way.
SOURCE = """
    import os, time, torch
    from tasks import Copy

    class Talking(Copy):
        def answer(self, source):
            print("said in Python,", torch.get_num_threads(), "thread")
            os.write(2, b"said in C\\n")
            return source

    class Slow(Copy):
        def answer(self, source):
            time.sleep(0.01)
            return source
"""


class Worker:
    """A worker process and the parent's half of its pipe."""

    def __init__(self, log):
        self.pipe, theirs = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *STOP_SIGNALS})  # as the engine does
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pipe.settimeout(300)
        self.lines = self.pipe.makefile("rb")

    def hear(self):
        return json.loads(self.lines.readline())

    def hear_until(self, *kinds):
        heard = [self.hear()]
        while heard[-1]["kind"] not in kinds:
            heard.append(self.hear())
        return heard

    def tell(self, job):
        document = {**vars(job), "directory": str(job.directory)}
        self.pipe.sendall(json.dumps(document).encode() + b"\n")

    def hang_up(self):
        self.pipe.shutdown(socket.SHUT_WR)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.lines.close()
        self.pipe.close()


@pytest.fixture
def worker(tmp_path):
    with (tmp_path / "worker.log").open("wb") as log:
        worker = Worker(log)
    yield worker
    worker.close()


@pytest.fixture
def make_job(tmp_path):
    source = tmp_path / "levels.py"
    source.write_text(textwrap.dedent(SOURCE))

    def make_job(task="Talking", steps=30, **changes):
        from harness.spec import ModelSpec, RunSpec, TrainSpec
        from tasks import Lengths

        kind = getattr(load_source(source), task)
        spec = RunSpec(
            model=ModelSpec(d_model=8, num_layers=1, num_heads=2),
            task=kind(lengths=Lengths(train=(1, 3), test=(4,))),
            train=TrainSpec(steps=steps, batch_size=4, learning_rate=1e-2, eval_samples=4),
        )
        print_of = spec.fingerprint()
        fields = {"fingerprint": print_of, "spec": json.dumps(spec.document()), "sources": (str(source),)}
        return Job(**{**fields, "directory": tmp_path / "runs" / print_of, **changes})

    return make_job


@pytest.mark.slow
def test_jobs_end_with_records_whatever_they_do_and_silence_between_them_means_exit(worker, make_job, tmp_path):
    assert worker.hear() == {"kind": "ready"}

    job = make_job()
    worker.tell(job)
    assert worker.hear() == {"kind": "started"}
    worker.process.send_signal(signal.SIGINT)  # Ctrl-C is not for workers
    heard = worker.hear_until("ended")
    assert heard[-1] == {"kind": "ended", "status": "finished"}
    progress = heard[0]
    assert (progress["kind"], progress["steps"]) == ("progress", 30)
    assert progress["loss"] > 0 < progress["steps_per_second"]
    assert RunRecord.read(job.directory / "record.json").fingerprint == job.fingerprint
    log = (job.directory / "run.log").read_text()
    assert "said in Python, 1 thread\n" in log
    assert "said in C\n" in log

    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\n1 / 0\n")
    refusals = {
        "broken.py, line 2: ZeroDivisionError": make_job(sources=(str(broken),), directory=tmp_path / "a"),
        "changed while the study ran": make_job(fingerprint="0" * 16, directory=tmp_path / "b"),
        "task: field required": make_job(spec="{}", directory=tmp_path / "c"),
    }
    for words, job in refusals.items():  # no results: whoever mends the file can run them
        worker.tell(job)
        assert words in worker.hear_until("refused")[-1]["reason"]
        assert not (job.directory / "record.json").exists()
        assert "Traceback" in (job.directory / "run.log").read_text()

    occupied = make_job(directory=job.directory)
    (occupied.directory / "spec.json").write_text("{}")
    worker.tell(occupied)
    assert worker.hear_until("ended")[-1]["status"] == "failed"
    record = RunRecord.read(occupied.directory / "record.json")
    assert (record.fingerprint, record.status) == (occupied.fingerprint, "failed")
    assert "holds the run of another spec" in record.cause
    assert record.environment["python"]

    worker.hang_up()
    assert worker.process.wait(2) == 0
    assert (tmp_path / "worker.log").read_bytes() == b""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["end of input", "SIGHUP"])
def test_told_to_stop_it_saves_says_so_and_exits(worker, make_job, how):
    job = make_job("Slow", steps=100_000)
    job.directory.mkdir(parents=True)
    handle = os.open(job.directory, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as a worker of a killed engine does while it saves
    worker.tell(job)  # before it is ready: it waits in the pipe
    worker.hear_until("started")
    time.sleep(0.5)
    assert not (job.directory / "spec.json").exists()
    os.close(handle)
    worker.hear_until("progress")
    if how == "end of input":
        worker.hang_up()
    else:
        worker.process.send_signal(getattr(signal, how))
    last = worker.hear_until("interrupted")[-1]
    assert worker.process.wait(5) == 0
    assert worker.lines.readline() == b""
    assert (job.directory / "checkpoint.ckpt").exists()
    assert not (job.directory / "record.json").exists()
    assert last["step"] == read_curves(job.directory / "curves.jsonl")[-1]["step"] > 0


@pytest.mark.parametrize("how", ["end of input", "SIGTERM"])
def test_told_to_stop_while_it_starts_it_exits_at_once(worker, how):
    time.sleep(0.3)  # the pipe is heeded long before torch is imported
    if how == "end of input":
        worker.hang_up()
    else:
        worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(3) == 0
    assert worker.lines.readline() == b""


def test_waiting_for_a_directory_ends_when_told_to_stop(tmp_path):
    from harness.runner import Interrupted

    stop = threading.Event()
    with alone_in(tmp_path, stop):
        threading.Timer(0.1, stop.set).start()
        with pytest.raises(Interrupted), alone_in(tmp_path, stop):
            pass
    with alone_in(tmp_path, threading.Event()):
        pass


def test_progress_is_told_four_times_a_second_at_most():
    told = []
    report = throttled(SimpleNamespace(send=lambda kind, **content: told.append(content)))
    begun = time.monotonic()
    while time.monotonic() - begun < 0.6:
        report(SimpleNamespace(step=len(told), steps=9, loss=float("nan"), steps_per_second=1.0))
        time.sleep(0.001)
    assert len(told) == 3
    assert told[0].keys() == {"step", "steps", "loss", "steps_per_second"}


def test_output_goes_to_the_log_of_the_run_and_back(tmp_path, capfd):
    for text in ("first", "second"):
        with output_to(tmp_path / "run.log"):
            os.write(1, f"{text}\n".encode())
            os.write(2, b"from C\n")
            subprocess.run(["echo", "from a child"], check=True)
    os.write(1, b"after\n")
    lines = (tmp_path / "run.log").read_text().split("\n")
    assert lines == ["first", "from C", "from a child", "second", "from C", "from a child", ""]
    assert capfd.readouterr().out == "after\n"


def test_output_comes_back_when_the_run_raises(tmp_path, capfd):
    with pytest.raises(ZeroDivisionError), output_to(tmp_path / "run.log"):
        raise ZeroDivisionError
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_a_full_disk_is_told_and_is_no_failure_of_the_run(worker, make_job):
    """A limit on the size of a file is what a test can set of a disk."""
    assert worker.hear() == {"kind": "ready"}
    resource.prlimit(worker.process.pid, resource.RLIMIT_FSIZE, (0, 0))
    job = make_job()
    worker.tell(job)
    assert worker.hear() == {"kind": "started"}
    heard = worker.hear()
    assert heard["kind"] == "refused"
    assert "file too large; mend that and run it again, what was recorded is kept" in heard["reason"]
    assert not (job.directory / "record.json").exists()


def test_an_exception_is_put_in_words():
    def caught(error):
        try:
            raise error
        except type(error) as raised:
            return cause_of(raised)

    assert caught(UserError("a user's mistake")) == "a user's mistake"
    assert caught(OSError("two\nlines")).startswith("OSError: two lines (test_worker.py, line ")
