"""Locks between processes, held on files with `flock`: they end with their holder, however it dies.

Knows the standard library alone.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PAUSE = 0.05  # seconds between two attempts


@contextmanager
def held(path: Path, seconds: float = 0, *, stop: Callable[[], bool] = lambda: False) -> Iterator[int]:
    """An exclusive lock on a file (made if need be) or folder, waited for up to so many seconds; its descriptor.

    Raises:
        TimeoutError: somebody else still holds it then, or `stop` says that the wait is over.
    """
    end = time.monotonic() + seconds
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while not _taken(handle, fcntl.LOCK_EX):
            if stop() or time.monotonic() >= end:
                raise TimeoutError(f"{path} is locked by another process")
            time.sleep(PAUSE)
        yield handle
    finally:
        os.close(handle)


@contextmanager
def signed(path: Path) -> Iterator[None]:
    """`held` at once or not at all, and says in the file who holds it, for `holder`.

    Raises:
        TimeoutError: somebody else holds it.
    """
    with held(path) as handle:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        os.truncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
        yield


def holder(path: Path) -> dict[str, Any] | None:
    """Who holds a `signed` lock (pid, host, since): empty while it is signing, None where nobody does."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return None if _taken(handle, fcntl.LOCK_SH) else _signature(handle)
    finally:
        os.close(handle)


def _signature(handle: int) -> dict[str, Any]:
    try:
        document = json.loads(os.pread(handle, 4096, 0))
    except ValueError:
        return {}
    return document if isinstance(document, dict) and {"pid", "host", "since"} <= document.keys() else {}


def _taken(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
