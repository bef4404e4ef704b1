"""Where runs execute: worker processes on this machine, started once and reused.

Each worker has one pipe, and here one thread that reads it, hands the worker its next job the moment it is
free, and buries it when it dies; what happens comes out of one queue. Nothing is shared between workers, so
a SIGKILL of one cannot break another. Closing our half of the pipe is the one way to tell a worker to stop;
the kernel does the same when we are killed ourselves, so no worker outlives us and no work is lost with us.
Specs are handed out as text: no torch here.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from typing import Any, Self

from harness.machine import environment
from harness.record import RunRecord, Status
from harness.schema import UserError

TICK = 0.5  # seconds between two Ticks
GRACE = 5.0  # seconds that a worker has to save its run when it is told to stop
FALSE_STARTS = 3  # so often in a row may a worker die before it is ready, then it is not replaced
INSIDE = "HARNESS_WORKER"  # environment variable that marks a worker process
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGHUP})  # tell a worker to save and exit; SIGINT is for us alone
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Job:
    """One run to execute.

    Attributes:
        fingerprint: its name in every event.
        spec: the RunSpec as a JSON document.
        directory: where the run lives on disk.
        sources: users' files that define levels or tasks of the spec.
        diagnose: whether diagnostics look at it.
        rungs: steps at which the worker asks whether to go on, and waits for `LocalEngine.answer`.
    """

    fingerprint: str
    spec: str
    directory: Path
    sources: tuple[str, ...] = ()
    diagnose: bool = True
    rungs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Started:
    """A worker has begun the job, anew or from its checkpoint."""

    fingerprint: str
    worker: int


@dataclass(frozen=True)
class Progressed:
    """A sign of life, a few a second."""

    fingerprint: str
    step: int
    steps: int
    loss: float
    steps_per_second: float


@dataclass(frozen=True)
class Ended:
    """The job's record is on disk."""

    fingerprint: str
    status: Status


@dataclass(frozen=True)
class Interrupted:
    """The engine was stopped while a worker had the job at `step`; it resumes from its checkpoint."""

    fingerprint: str
    step: int


@dataclass(frozen=True)
class Died:
    """A worker is gone, and with it a job's work since its last checkpoint (None: it had no job)."""

    fingerprint: str | None
    worker: int
    cause: str


@dataclass(frozen=True)
class Noted:
    """A worker has something to say about the job that people should know."""

    fingerprint: str
    text: str


@dataclass(frozen=True)
class Reached:
    """The job stands at one of its rungs, with this loss at the training lengths, and waits for an answer."""

    fingerprint: str
    step: int
    loss: float


@dataclass(frozen=True)
class Pruned:
    """The job was given up at a rung, as the answer was no; it leaves curves and no record."""

    fingerprint: str
    step: int


@dataclass(frozen=True)
class Tick:
    """Time passes."""


Event = Started | Progressed | Reached | Pruned | Ended | Interrupted | Died | Noted | Tick


class LocalEngine:
    """Up to `workers` processes that work off jobs in order. A context manager: leaving it ends the workers.

    A worker that dies is replaced and its job tried once more from its checkpoint; when that dies too, the
    job ends with a record that says so.

    Raises:
        UserError: no workers asked for, or made in a worker: a user's script starts a study as it is imported.
    """

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise UserError(f"workers = {workers}: it takes at least one")
        if os.environ.get(INSIDE):
            raise UserError("a study starts while its own file is imported; put it under if __name__ == '__main__'")
        self._size = workers
        self._lock = threading.Lock()  # guards _pending, _workers and who has which job
        self._pending: deque[Job] = deque()
        self._left: dict[str, Job] = {}  # what `run` still waits for
        self._workers: list[_Worker] = []
        self._deaths: Counter[str] = Counter()  # of a job
        self._false_starts: Counter[int] = Counter()  # of a worker's number, in a row
        self._deadline: float | None = None  # set when stopping: when patience ends
        # Not queue.Queue: its put would deadlock in a signal handler that interrupts its get.
        self._happenings: SimpleQueue[Event | BaseException] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, jobs: Sequence[Job]) -> Iterator[Event]:
        """What happens until every job has ended or the engine is stopped, and a Tick every `TICK` seconds.

        Work goes on whether or not the next event is asked for. `add` may bring further jobs meanwhile.

        Raises:
            UserError: no worker can be started; a spec cannot be made in one, as a user's file has changed or broken;
                or the disk is full.
        """
        left = self._left
        for job in jobs:
            self.add(job)
        tick = time.monotonic() + TICK
        while left:
            if self._deadline is not None:
                self._enforce_stop(left)
            if time.monotonic() >= tick:  # however much else happens
                tick = time.monotonic() + TICK
                yield Tick()
            try:
                event = self._happenings.get(timeout=max(0.0, tick - time.monotonic()))
            except Empty:
                continue
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Ended | Interrupted | Pruned):
                left.pop(event.fingerprint, None)
            yield event

    def add(self, job: Job) -> None:
        """A further job for the `run` whose events are being read. After `stop` it is not taken."""
        if self._deadline is not None:
            return
        self._left[job.fingerprint] = job
        with self._lock:
            self._pending.append(job)
            self._hire()
        self._feed()

    def answer(self, fingerprint: str, *, go_on: bool) -> None:
        """Tell the worker that has reached a rung with this job. One that is gone by now is asked again later."""
        with self._lock:
            for worker in self._workers:
                if worker.job is not None and worker.job.fingerprint == fingerprint:
                    worker.answer(go_on)

    def stop(self, grace: float = GRACE) -> None:
        """Have every worker save its run and exit; after `grace` seconds `run` or `close` kills those left.

        Returns at once; `run` yields what comes of it. Takes no lock: safe in any thread and in a signal
        handler.
        """
        deadline = time.monotonic() + grace
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        for worker in tuple(self._workers):
            worker.stop()
        self._happenings.put(Tick())

    def close(self) -> None:
        """Stop, and wait until every worker is gone."""
        self.stop()
        with self._lock:  # from here on no worker is hired
            workers = list(self._workers)
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.thread.join(max(0.0, (self._deadline or 0.0) - time.monotonic()))
        for worker in workers:
            worker.process.kill()
            worker.thread.join()

    def _hire(self) -> None:
        """Start workers for the jobs that have none. Called with the lock held."""
        if self._deadline is not None:
            return
        numbers = {worker.number for worker in self._workers}
        wanted = len(self._pending) + sum(worker.job is not None for worker in self._workers)
        free = [n for n in range(self._size) if n not in numbers and self._false_starts[n] < FALSE_STARTS]
        for number in free[: max(0, wanted - len(self._workers))]:
            worker = _Worker(number)
            worker.thread = threading.Thread(target=self._attend, args=(worker,), name=f"worker {number}", daemon=True)
            self._workers.append(worker)
            worker.thread.start()

    def _feed(self) -> None:
        """Hand the next jobs to the workers that are free."""
        with self._lock:
            for worker in self._workers:
                if self._pending and worker.ready and worker.job is None and self._deadline is None:
                    worker.take(self._pending.popleft())

    def _attend(self, worker: "_Worker") -> None:
        """A worker's thread: heed what it says, bury it when it is gone."""
        try:
            for message in worker.messages():
                self._heed(worker, message)
            self._bury(worker)
        except BaseException as error:  # raised in `run`, which would else wait for ever
            self._happenings.put(error)

    def _heed(self, worker: "_Worker", message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "ready":
            worker.ready = True
            self._false_starts[worker.number] = 0
            self._feed()
            return
        assert worker.job is not None, kind
        fingerprint = worker.job.fingerprint
        if kind == "started":
            worker.begun = True
            self._happenings.put(Started(fingerprint, worker.number))
        elif kind == "progress":
            worker.step = message["step"]
            self._happenings.put(Progressed(fingerprint, **message))
        elif kind == "rung":
            self._happenings.put(Reached(fingerprint, **message))
        elif kind == "pruned":
            self._happenings.put(Pruned(fingerprint, **message))
            worker.job = None
            self._feed()
        elif kind == "note":
            self._happenings.put(Noted(fingerprint, **message))
        elif kind == "interrupted":  # it exits next, and is buried with its job saved
            worker.step, worker.saved = message["step"], True
        elif kind == "ended":
            self._happenings.put(Ended(fingerprint, message["status"]))
            worker.job = None
            self._feed()
        elif kind == "refused":  # as all other jobs of its file or disk would be; the study stops, no record
            self._happenings.put(UserError(message["reason"]))
            worker.job = None

    def _bury(self, worker: "_Worker") -> None:
        """Reap a worker that is gone, decide what becomes of its job, replace it if there is work."""
        cause = worker.reap()
        with self._lock:  # from here on nobody gives it a job
            false_start, worker.ready = not worker.ready, False
        self._false_starts[worker.number] += false_start and self._deadline is None
        for event in self._last_words(worker, cause):
            self._happenings.put(event)
        with self._lock:
            self._workers.remove(worker)
            self._hire()
            stranded = self._pending and not self._workers and self._deadline is None
        if stranded:
            raise UserError(f"no worker process can be started; the last one {cause}")
        self._feed()

    def _last_words(self, worker: "_Worker", cause: str) -> Iterator[Event]:
        """What a worker's end means for its job: done after all, interrupted, to be tried again or failed."""
        job = worker.job
        if job is None:
            if worker.process.returncode != 0:
                yield Died(None, worker.number, cause)
            return
        record = job.directory / "record.json"
        if worker.begun and record.exists():  # it died between writing the record and telling us
            yield Ended(job.fingerprint, RunRecord.read(record).status)
        elif self._deadline is not None:
            yield Interrupted(job.fingerprint, worker.step)
        elif not worker.begun:
            yield from [Died(None, worker.number, cause)] if worker.process.returncode else []
            self._try_again(job)
        else:
            yield Died(job.fingerprint, worker.number, cause)
            self._deaths[job.fingerprint] += not worker.saved
            if self._deaths[job.fingerprint] < 2:
                self._try_again(job)
            else:
                yield Ended(job.fingerprint, self._give_up(job, worker, cause))

    def _try_again(self, job: Job) -> None:
        with self._lock:
            self._pending.appendleft(job)

    def _give_up(self, job: Job, worker: "_Worker", cause: str) -> Status:
        """Record that a job has killed two workers."""
        status: Status = "out_of_memory" if worker.process.returncode == -signal.SIGKILL else "failed"
        log = job.directory / "run.log"
        tail = _tail(log.read_bytes()) if log.exists() else ""
        cause = f"its worker {cause}, twice" + (f"; run.log ends: {tail}" if tail else "")
        write_failure(job, status, cause, worker.since)
        return status

    def _enforce_stop(self, left: dict[str, Job]) -> None:
        """Forget the jobs that no worker has; kill the workers whose grace is over."""
        with self._lock:
            while self._pending:
                left.pop(self._pending.pop().fingerprint, None)
        if time.monotonic() >= (self._deadline or 0.0):
            for worker in tuple(self._workers):
                worker.process.kill()


class _Worker:
    """A worker process as seen from here, with the job that it has."""

    thread: threading.Thread

    def __init__(self, number: int) -> None:
        self.number = number
        self.ready = False
        self.job: Job | None = None
        self.begun = False  # whether it has said that it took the job
        self.saved = False  # whether it has said that the job is saved, before it exits
        self.step = 0
        self.since = 0.0
        self._log = TemporaryFile()  # what it prints outside runs  # noqa: SIM115
        self._pipe, theirs = socket.socketpair()
        handle = str(theirs.fileno())
        with theirs, _signals_blocked():
            self.process = subprocess.Popen(
                # -P: what lies in the working directory (a copy.py, a folder tasks) must not hide modules
                [sys.executable, "-P", "-u", "-m", "harness.worker", handle],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_worker_environment(),
            )

    def take(self, job: Job) -> None:
        """Send a job."""
        self.job, self.begun, self.saved, self.step, self.since = job, False, False, 0, time.time()
        document = {
            "fingerprint": job.fingerprint,
            "spec": job.spec,
            "directory": str(job.directory.resolve()),
            "sources": job.sources,
            "diagnose": job.diagnose,
            "rungs": job.rungs,
        }
        self._send(document)

    def answer(self, go_on: bool) -> None:
        """Whether the job goes on from the rung that it has reached."""
        self._send({"go_on": go_on})

    def _send(self, document: dict[str, Any]) -> None:
        # A worker that is gone or stopped takes nothing; its thread sees that, and to the job.
        with contextlib.suppress(OSError):
            self._pipe.sendall(json.dumps(document).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it says, until its half of the pipe closes; a line that a kill has torn is not heard."""
        with self._pipe.makefile("rb") as lines, contextlib.suppress(ConnectionResetError):
            for line in lines:
                if line.endswith(b"\n"):
                    yield json.loads(line)

    def stop(self) -> None:
        """Tell it to save and exit, by the end of what it reads."""
        with contextlib.suppress(OSError):  # already gone
            self._pipe.shutdown(socket.SHUT_WR)

    def reap(self) -> str:
        """Wait for the process's end, close what belongs to it; how it ended, in words."""
        try:
            code = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:  # it hangs on its way out
            self.process.kill()
            code = self.process.wait()
        self._pipe.close()
        with self._log:
            self._log.seek(0)
            tail = _tail(self._log.read())
        words = "was told to exit by a signal and has saved its run" if self.saved else _in_words(code)
        return words if self.job or not tail else f"{words}: {tail}"


def write_failure(job: Job, status: Status, cause: str, started: float) -> None:
    """The record of a run that could not write its own."""
    RunRecord(
        fingerprint=job.fingerprint,
        spec=json.loads(job.spec),
        status=status,
        cause=cause,
        environment=environment(),
        started=started,
        ended=time.time(),
    ).write(job.directory / "record.json")


def _in_words(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by signal 9 (out of memory?)"
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with code {code}"


def _tail(log: bytes) -> str:
    """What a log ends with, on one line: an exception, a crash of the interpreter, or just its last words."""
    text = log.decode(errors="replace").strip()
    crash = text.rfind("Fatal Python error")
    if crash >= 0:
        text = text[crash : crash + 300]
    elif "Traceback (most recent call last)" in text:
        text = text.splitlines()[-1]
    return " ".join(text[-300:].split())


def heeded_signals() -> set[signal.Signals]:
    """`STOP_SIGNALS` less those that are ignored: under nohup, SIGHUP, so that a study outlives its terminal."""
    return {number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN}


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started within never sees Ctrl-C, and stop signals wait until it asks for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *STOP_SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker_environment() -> dict[str, str]:
    """One thread in every numeric library: two in two processes are slower than one (and give other bits)."""
    libraries = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")
    paths = [os.environ.get("PYTHONPATH", "")]
    if ROOT.name != "site-packages":  # a checkout: it need not be installed
        paths.insert(0, str(ROOT))
    return {
        **os.environ,
        **{f"{library}_NUM_THREADS": "1" for library in libraries},
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        INSIDE: "1",
    }
