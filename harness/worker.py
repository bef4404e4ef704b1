"""A worker process: `python -m harness.worker FD` runs the jobs that come through a pipe until it closes.

Lines of JSON in: a job each, or the answer to a `rung`. Lines of JSON out: `ready`, then for each job `started`,
`progress` … (and `note`, a sentence for people; `rung`, which asks whether to go on), and at its end `ended`, `pruned`,
`interrupted`, or `refused` where the spec cannot be made any more or the disk is full, which is no result. The end of
the input, SIGTERM and SIGHUP mean: save and exit. SIGINT means nothing here: Ctrl-C reaches every process of the
terminal, and the one that started us decides.
"""

import contextlib
import faulthandler
import gc
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from harness.engine import STOP_SIGNALS, Job, heeded_signals, write_failure
from harness.locks import held
from harness.record import Status
from harness.schema import UserError
from harness.sources import load_source
from harness.wording import full_disk, in_words

if TYPE_CHECKING:  # imported late: the pipe and the signals are heeded while torch loads
    from harness.runner import Progress
    from harness.spec import RunSpec

PROGRESS_INTERVAL = 0.25  # seconds


class Pipe:
    """Our half of the pipe. Listens from the start, in threads of its own."""

    def __init__(self, handle: int) -> None:
        self._socket = socket.socket(fileno=handle)
        self._socket.set_inheritable(False)
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._answers: SimpleQueue[bool] = SimpleQueue()
        self._received = 0  # jobs; counted by the listening thread
        self._done = 0  # counted by the main thread
        self.stop = threading.Event()  # set when the run is to be saved and the process to end
        # Blocked, they wait for sigwait below; Lightning's own handler, which would raise, never sees them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *STOP_SIGNALS})
        threading.Thread(target=self._listen, name="pipe", daemon=True).start()
        threading.Thread(target=self._await_signal, name="signals", daemon=True).start()

    def jobs(self) -> Iterator[Job]:
        """The jobs as they come."""
        while True:
            yield self._jobs.get()
            self._done += 1
            if self.stop.is_set():
                return

    def send(self, kind: str, **content: Any) -> None:
        """Tell the engine. When it is gone, stop: what is said does not matter any more."""
        try:
            self._socket.sendall(json.dumps({"kind": kind, **content}).encode() + b"\n")
        except OSError:
            self.stop.set()

    def go_on(self, step: int, loss: float) -> bool:
        """Ask the engine, and wait; yes where it is time to stop, as the run is saved then."""
        self.send("rung", step=step, loss=loss)
        while not self.stop.is_set():
            with contextlib.suppress(Empty):
                return self._answers.get(timeout=PROGRESS_INTERVAL)
        return True

    def _listen(self) -> None:
        with contextlib.suppress(ConnectionResetError), self._socket.makefile("rb") as lines:
            for line in lines:
                document = json.loads(line)
                if "go_on" in document:
                    self._answers.put(document["go_on"])
                    continue
                self._received += 1
                whole = {**document, "directory": Path(document["directory"]), "rungs": tuple(document["rungs"])}
                self._jobs.put(Job(**whole))
        self._leave()

    def _await_signal(self) -> None:
        signal.sigwait(heeded_signals())
        self._leave()

    def _leave(self) -> None:
        """Stop the run, or exit at once where there is none.

        `jobs` counts first and then looks at `stop`, so one of both threads sees that it is time to go.
        """
        self.stop.set()
        if self._received == self._done:
            os._exit(0)


def main(handle: int) -> None:
    """Work until told to stop."""
    faulthandler.enable()  # a segmentation fault leaves its stack in the run's log
    pipe = Pipe(handle)

    import torch

    import harness.runner  # noqa: F401  (paid once a worker)

    torch.set_num_threads(1)
    gc.freeze()  # what the imports made stays: collections need not look at it again
    pipe.send("ready")
    for job in pipe.jobs():
        status = work(job, pipe)
        if status in ("failed", "out_of_memory") and torch.cuda.is_initialized():
            break  # a CUDA error stays with its process and would fail every run after
        gc.collect()  # trainer and model refer to each other; the next run would find their memory taken
    sys.stdout.flush()
    os._exit(0)  # taking torch down would cost more than starting it did


def work(job: Job, pipe: Pipe) -> Status | None:
    """Run a job and tell how it ended; its status, None if it was interrupted, pruned or refused."""
    if pipe.stop.is_set():
        return None
    pipe.send("started")
    try:
        return attempt(job, pipe)
    except OSError as error:  # not even the log may take a line then
        if not (sentence := full_disk(error)):
            raise
        pipe.send("refused", reason=sentence)
        return None


def attempt(job: Job, pipe: Pipe) -> Status | None:
    """Run a job whatever happens in it.

    Raises:
        OSError: nothing can be written.
    """
    from harness.runner import Interrupted, Pruned

    started = time.time()
    job.directory.mkdir(parents=True, exist_ok=True)
    with output_to(job.directory / "run.log"):
        try:
            spec = planned(job)
        except Exception as error:
            traceback.print_exc()
            pipe.send("refused", reason=cause_of(error))
            return None
        try:
            with alone_in(job.directory, pipe.stop):
                status = execute(spec, job, pipe)
        except Pruned as pruned:
            pipe.send("pruned", step=pruned.step)
            return None
        except Interrupted as stopped:
            pipe.send("interrupted", step=stopped.step)
            return None
        except Exception as error:
            if full_disk(error):
                raise
            traceback.print_exc()
            status = "out_of_memory" if isinstance(error, MemoryError) else "failed"
            write_failure(job, status, cause_of(error), started)
    pipe.send("ended", status=status)
    return status


def planned(job: Job) -> "RunSpec":
    """The spec of a job, made after its user's files are loaded.

    Raises:
        UserError: it cannot be made here, or it is no longer what was planned.
    """
    from harness.spec import RunSpec

    for source in job.sources:
        load_source(source)
    spec = RunSpec.parse(job.spec)
    if spec.fingerprint() != job.fingerprint:
        files = ", ".join(job.sources) or "the project's code"
        raise UserError(f"{files} changed while the study ran; run the command again")
    return spec


def execute(spec: "RunSpec", job: Job, pipe: Pipe) -> Status:
    """Run a spec, or what is left of it; what structural probes find is kept beside the study's runs.

    Raises:
        UserError: this machine cannot run it.
        Interrupted: the pipe said stop; the run is saved.
        Pruned: the engine said that it is not worth going on with.
    """
    from harness import runner

    record = runner.run(
        spec,
        directory=job.directory,
        on_progress=throttled(pipe),
        should_stop=pipe.stop.is_set,
        on_notice=lambda sentence: tell(sentence, pipe),
        diagnose=job.diagnose,
        probes=job.directory.parent.parent / "probes",
        rungs=job.rungs,
        go_on=pipe.go_on if job.rungs else None,
    )
    return record.status


def tell(sentence: str, pipe: Pipe) -> None:
    """What a person should know: into the run's log, and to the engine."""
    logging.getLogger("harness").warning(sentence)
    pipe.send("note", text=sentence)


def throttled(pipe: Pipe) -> "Callable[[Progress], None]":
    """Reports progress, at most once every `PROGRESS_INTERVAL` seconds."""
    due = 0.0

    def report(progress: "Progress") -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + PROGRESS_INTERVAL
            pipe.send(
                "progress",
                step=progress.step,
                steps=progress.steps,
                loss=progress.loss,
                steps_per_second=progress.steps_per_second,
            )

    return report


def cause_of(error: Exception) -> str:
    """What the record says about an exception: where it was raised too, as nobody foresaw it there."""
    if isinstance(error, UserError):
        return in_words(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{in_words(error)} ({Path(place.filename).name}, line {place.lineno})"


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Everything printed in this process, by C libraries too, goes to the end of a file."""
    with log.open("ab") as file, contextlib.ExitStack() as after:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            kept = os.dup(number)
            after.callback(os.close, kept)
            after.callback(os.dup2, kept, number)
            after.callback(stream.flush)
            os.dup2(file.fileno(), number)
        yield


@contextlib.contextmanager
def alone_in(directory: Path, stop: threading.Event) -> Iterator[None]:
    """Hold a run's directory. A worker of a killed engine may still be saving there; it is gone in a moment.

    Raises:
        Interrupted: told to stop while waiting.
    """
    from harness.runner import Interrupted

    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(directory, math.inf, stop=stop.is_set))
        except TimeoutError:
            raise Interrupted(0) from None
        yield


if __name__ == "__main__":
    main(int(sys.argv[1]))
