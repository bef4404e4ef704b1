"""MLflow's pages on a results folder's store: child processes that serve loopback only and end with the dashboard.

`dashboard` starts a keeper (this module run as a program), which starts `python -m mlflow server`. The keeper ends the
server when its standard input closes, so that nothing is left even if the dashboard itself is killed. mlflow is not
imported here.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import IO, NoReturn
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from harness.schema import UserError
from harness.tracking import Link, default_uri, store_lock, study_links

HOST = "127.0.0.1"
PORT = 5000  # MLflow's own, taken if it is free
STARTING = 120.0  # seconds the server may take to answer
STOPPING = 5.0  # seconds it may take to end before it is killed
ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # 2 processes instead of 10, ready in half the time
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_AI_GATEWAY": "false",
    "MLFLOW_ENABLE_ASSISTANT_SANDBOX": "true",  # the pages' assistant never runs a command on this machine itself
}


@dataclass(frozen=True)
class Dashboard:
    """A running server: where it is, and what to look at of the study that was planned last."""

    address: str
    study: str
    links: list[Link]
    keeper: "subprocess.Popen[bytes]"

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit code."""
        return self.keeper.wait()


@contextmanager
def dashboard(results: Path, port: int | None = None) -> Iterator[Dashboard]:
    """Serve the local store of a results folder until the block ends; SIGTERM and SIGHUP end it too, as SystemExit.

    Args:
        results: the results folder.
        port: by default 5000, or any free one if that is taken.

    Raises:
        UserError: there is no local store, the port is taken or is none, or the server does not start.
    """
    if not (results / "mlflow.db").is_file():
        raise UserError(
            f"{results} holds no tracking store yet; run a study, or bring in finished ones with `harness sync`"
        )
    address = f"http://{HOST}:{_free_port(port)}"
    with TemporaryFile() as log, _signals_raise():
        keeper = _start(results, address, log)
        try:
            with store_lock(default_uri(results)):  # not while somebody creates the tables
                _wait_until_ready(keeper, address, log)
            yield Dashboard(address, *_last_study(results, address), keeper)
        finally:
            _stop(keeper)


def _free_port(port: int | None) -> int:
    """The port asked for, else MLflow's own or any free one."""
    for candidate in (PORT, 0) if port is None else (port,):
        with socket.socket() as probe, suppress(OSError, OverflowError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, candidate))
            return int(probe.getsockname()[1])
    raise UserError(f"port = {port} is taken or may not be used; choose another, or none for any free one")


def _start(results: Path, address: str, log: IO[bytes]) -> "subprocess.Popen[bytes]":
    host, port = address.removeprefix("http://").split(":")
    artifacts = results.resolve() / "mlartifacts"
    server = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", port, "--workers", "1"]
    server += ["--backend-store-uri", default_uri(results), "--default-artifact-root", str(artifacts)]
    return subprocess.Popen(
        [sys.executable, "-m", "harness.dashboard", *server],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,  # Ctrl-C is for the dashboard, which then ends the rest
    )


def _wait_until_ready(keeper: "subprocess.Popen[bytes]", address: str, log: IO[bytes]) -> None:
    opener = build_opener(ProxyHandler({}))
    end = time.monotonic() + STARTING
    while time.monotonic() < end and keeper.poll() is None:
        with suppress(URLError, OSError), opener.open(f"{address}/health", timeout=5):
            return
        time.sleep(0.2)
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    raise UserError(f"MLflow's server at {address} did not start: {lines[-1] if lines else 'it said nothing'}")


def _last_study(results: Path, address: str) -> tuple[str, list[Link]]:
    """The study planned last, and what to look at there."""
    plans = sorted(results.glob("*/study.json"), key=lambda plan: plan.stat().st_mtime)
    if not plans:
        return "", []
    return plans[-1].parent.name, study_links(address, plans[-1].parent, default_uri(results))


def _stop(keeper: "subprocess.Popen[bytes]") -> None:
    """Let the keeper end the server, and wait for both."""
    assert keeper.stdin is not None
    keeper.stdin.close()
    keeper.wait(STOPPING + 5)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that what was started is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def keep(command: list[str]) -> NoReturn:
    """Run a command until it ends or this process's standard input closes; end all of its processes then."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    ended = threading.Event()

    def end_after(wait: Callable[[], object]) -> None:
        wait()
        ended.set()

    for wait in (server.wait, sys.stdin.buffer.read):
        threading.Thread(target=end_after, args=(wait,), daemon=True).start()
    ended.wait()
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(STOPPING)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    os._exit(server.wait() & 0xFF)  # a thread may still be reading: no tidy exit


if __name__ == "__main__":
    keep(sys.argv[1:])
