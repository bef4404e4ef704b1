"""Tracking URIs: which we take, where their artifacts lie, and the lock under which a database is made."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from harness.locks import held
from harness.schema import UserError, nearest

SQLITE = "sqlite:///"
SQLITE_HEADER = b"SQLite format 3\0"
SERVERS = ("http", "https", "databricks")
DRIVERS = {"postgresql": "psycopg2", "mysql": "MySQLdb", "mssql": "pyodbc"}
SCHEMES = ("sqlite", *SERVERS, *DRIVERS)


def default_uri(results: Path) -> str:
    """The local store of a results folder."""
    return f"{SQLITE}{results.resolve() / 'mlflow.db'}"


def without_password(text: str) -> str:
    """A URI, or a text that holds one, as it may be written down and shown."""
    return re.sub(r"(://[^/@\s:]*:)[^/@\s]*@", r"\1…@", text)


def database_file(uri: str) -> Path | None:
    """The file of a sqlite store; None for every other store."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def artifact_root(uri: str, results: Path) -> Path | None:
    """Where artifacts go: beside a sqlite file, in the results folder for other databases, left to a server (None)."""
    if file := database_file(uri):
        return file.resolve().parent / "mlartifacts"
    return None if urlsplit(uri).scheme in SERVERS or uri == "databricks" else results.resolve() / "mlartifacts"


def store_key(uri: str, study_folder: Path) -> str:
    """The name of a store in `mirror.json`: relative for files, so that a results folder may be moved as a whole."""
    file = database_file(uri)
    return (
        f"{SQLITE}{os.path.relpath(file.resolve(), study_folder.resolve())}"
        if file
        else without_password(uri).rstrip("/")
    )


def check(uri: str) -> None:
    """Refuse what cannot be a tracking store, before anything is started or imported.

    Raises:
        UserError: no or an unknown scheme, a server without a name, a missing database driver, an sqlite file that
            cannot be there or is something else.
    """
    if wrong := _what_is_wrong(uri):
        raise UserError(f"tracking URI {without_password(uri)!r}: {wrong}")


def _what_is_wrong(uri: str) -> str:
    scheme = "databricks" if uri == "databricks" else uri.partition(":")[0].partition("+")[0]
    if ":" not in uri and scheme != "databricks":
        return "it has no scheme; write sqlite:////absolute/path/mlflow.db or http://host:5000"
    if scheme == "file":
        return "MLflow no longer writes to plain folders; write sqlite:////absolute/path/mlflow.db"
    if scheme not in SCHEMES:
        return f"unknown scheme {scheme!r}; {nearest(scheme, list(SCHEMES))}"
    if scheme == "sqlite":
        return _what_is_wrong_with_file(uri)
    if scheme in ("http", "https"):
        return "" if _names_server(uri) else "it names no server; write http://host:port"
    if scheme in DRIVERS and "+" not in uri.partition(":")[0] and find_spec(DRIVERS[scheme]) is None:
        return f"{scheme} needs the package {DRIVERS[scheme]}, which is not installed"
    return ""


def _names_server(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        return bool(parts.hostname) and parts.port != 0 and " " not in uri
    except ValueError:  # a port that is no number, a torn IPv6 address
        return False


def _what_is_wrong_with_file(uri: str) -> str:
    file = database_file(uri)
    if file is None or file.name == "" or "?" in uri:
        return "it names no file; write sqlite:////absolute/path/mlflow.db"
    if file.is_dir():
        return f"{file} is a folder; name a file in it, e.g. {SQLITE}{file / 'mlflow.db'}"
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is not a folder that can be written; name another file"
    if file.exists() and not os.access(file, os.R_OK | os.W_OK):
        return f"{file} cannot be read and written; mend its permissions or name another file"
    if file.exists() and file.stat().st_size and _head(file) != SQLITE_HEADER:
        return f"{file} is not an sqlite database; name another file"
    return ""


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(len(SQLITE_HEADER))


@contextmanager
def store_lock(uri: str) -> Iterator[None]:
    """Held while an sqlite store is opened: two processes that create its tables at once leave it unusable."""
    file = database_file(uri)
    if file is None:
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with held(file.with_name(f".{file.name}.lock"), seconds=60):
        yield
