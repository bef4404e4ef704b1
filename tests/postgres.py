"""A PostgreSQL cluster of one's own for the tests that need a real one: in a temporary folder, on a socket, no root."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOUND = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
OWNER = "postgres" if os.getuid() == 0 else None  # the server refuses to run as root; Debian's package makes this user


def is_missing() -> bool:
    """Whether no server is installed here; .ci/run installs Debian's."""
    return not FOUND


def _tool(name: str, *arguments: str) -> None:
    done = subprocess.run([FOUND[-1] / name, *arguments], user=OWNER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


@contextmanager
def cluster(*databases: str) -> Iterator[dict[str, str]]:
    """A running cluster; the URL of each database."""
    folder = Path(tempfile.mkdtemp(prefix="harness-pg-"))
    try:
        if OWNER:
            shutil.chown(folder, OWNER)
        _tool("initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "postgres", "--no-sync")
        options = f"-c unix_socket_directories={folder} -c listen_addresses='' -c fsync=off"
        _tool("pg_ctl", "-D", str(folder / "data"), "-l", str(folder / "log"), "-o", options, "-w", "start")
        try:
            for name in databases:
                _tool("createdb", "-h", str(folder), "-U", "postgres", name)
            yield {name: f"postgresql+psycopg://postgres@/{name}?host={folder}" for name in databases}
        finally:
            _tool("pg_ctl", "-D", str(folder / "data"), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
