"""Mirrors a tree of summaries, each with its parent, in the tracking store: a sweep, below it its variants, below each
what was tried.

The disk is the queue here too: whoever runs the tree appends a line to `nodes.jsonl` for each node that is new or has
changed, the last line of a key being its present state. What a store has confirmed stands in `received.json`; a node is
looked for by its tags before it is created, and what is sent twice arrives once, as metrics keep their times.
"""

import hashlib
import json
import logging
import platform
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from harness.locks import held, holder
from harness.record import read_curves, write_atomically
from harness.tracking.content import NOTE, PARENT
from harness.tracking.entities import Point, StoredRun, StoreError
from harness.tracking.uri import store_key, without_password

if TYPE_CHECKING:
    from harness.tracking.store import Store

NODES, RECEIVED = "nodes.jsonl", "received.json"
CYCLE = 3.0  # seconds between deliveries
PATIENCE = 30.0  # seconds to wait for another process that delivers
POINTS = 1000  # metrics in a call
CURVES = ("train/loss", "eval/in_distribution", "eval/extrapolation")  # of a node's runs, enough to look at hundreds

logger = logging.getLogger("harness")

Node = dict[str, Any]


def append(folder: Path, node: Node) -> None:
    """Note a node's present state.

    It has `key`, `parent` (a key, "" for the root), `name`, `status` (MLflow's), `started`, `ended` (unix ms, None
    while it is running), `tags`, `params`, `metrics` ({name: {step: value}}), `runs` ({suffix: fingerprint}: runs in
    the folder whose curves belong to it) and `files` (names in the folder that are kept with it).
    """
    with (folder / NODES).open("a") as file:
        file.write(json.dumps(node) + "\n")


def read(folder: Path) -> dict[str, Node]:
    """Every node by its key, parents first; a line that a kill has torn is left out."""
    found: dict[str, Node] = {}
    path = folder / NODES
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            node = json.loads(line)
        except ValueError:
            continue
        if isinstance(node, dict) and "key" in node:
            found[node["key"]] = node
    return dict(sorted(found.items(), key=lambda item: _depth(found, item[0])))


def _depth(nodes: Mapping[str, Node], key: str) -> int:
    depth = 0
    while nodes.get(key, {}).get("parent"):
        key, depth = nodes[key]["parent"], depth + 1
    return depth


class TreeMirror:
    """A folder's tree in one store. `start` lets a thread deliver every few seconds until `close`."""

    def __init__(self, uri: str, folder: Path, experiment: str) -> None:
        self.uri, self.folder, self.experiment = uri, folder, experiment
        self._key = store_key(uri, folder)
        self._origin = f"{platform.node()}:{folder.resolve()}"
        self._store: Store | None = None
        self._known: dict[str, StoredRun] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure = ""

    def deliver(self) -> int:
        """Send what the store lacks; the number of nodes of which something was sent.

        Raises:
            StoreError: the store cannot be reached or refuses; what it has is noted, the rest comes next time.
            UserError: a malformed URI.
        """
        nodes, sent = read(self.folder), 0
        try:
            with held(self.folder / "mirror.lock", PATIENCE):
                received = self._received()
                for key, node in nodes.items():
                    state = node if self._is_live() else {**node, "status": _at_rest(node)}
                    digest = self._digest(state)
                    if received.get(key, {}).get("digest") != digest:
                        self._send(state, nodes, received, digest)
                        sent += 1
        except TimeoutError as error:
            raise StoreError("another process is delivering this sweep; try again when it is done") from error
        except StoreError:
            self._known = None
            raise
        return sent

    def start(self) -> None:
        """Deliver every few seconds in a daemon thread."""
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Deliver a last time and stop; whether the store has everything. A store that hangs holds nobody up."""
        self._stop.set()
        if self._thread is None:
            self.start()
        assert self._thread is not None
        self._thread.join(timeout)
        if self._thread.is_alive() or self._failure:
            store = without_password(self.uri)
            why = f" ({self._failure})" if self._failure else ""
            logger.warning("the tracking store %s lacks some of the sweep%s; `harness sync` sends the rest", store, why)
            return False
        return True

    def _work(self) -> None:
        closing, pause, before = False, CYCLE, -1
        while not closing:
            closing = self._stop.wait(pause)
            path = self.folder / NODES
            size = path.stat().st_size if path.exists() else 0
            if size == before and not closing and not self._failure:
                continue
            try:
                self.deliver()
            except Exception as error:  # the thread's outermost frame: the sweep goes on, whatever the store does
                self._failure, pause = str(error), min(2 * pause, 60.0)
                logger.debug("delivery failed", exc_info=error)
            else:
                self._failure, pause, before = "", CYCLE, size

    def _is_live(self) -> bool:
        """Whether somebody runs what is mirrored: this process until `close`, or another."""
        return self._thread is not None or holder(self.folder / "lock") is not None

    def _received(self) -> dict[str, dict[str, str]]:
        """What the store has of each node, as noted, less what it has lost, and what it has that was not noted."""
        if self._known is None:
            self._experiment = self._open().experiment(self.experiment)
            self._known = {run.run_id: run for run in self._open().runs(self._experiment)}
        noted = _read_received(self.folder).get(self._key, {})
        found = {key: each for key, each in noted.items() if each["run_id"] in self._known}
        for run in self._known.values():
            if run.tags.get("origin") == self._origin and "node" in run.tags:
                found.setdefault(run.tags["node"], {"run_id": run.run_id, "digest": ""})
        return found

    def _send(self, node: Node, nodes: dict[str, Node], received: dict[str, dict[str, str]], digest: str) -> None:
        store, tags = self._open(), {key: str(value) for key, value in node["tags"].items() if value not in ("", None)}
        if node["key"] not in received:
            parent = received.get(node["parent"], {}).get("run_id", "")
            about = {"node": node["key"], "origin": self._origin, **({PARENT: parent} if parent else {})}
            run_id = store.create(self._experiment, node["name"], {**about, **tags}, node["started"])
            assert self._known is not None
            self._known[run_id] = StoredRun(run_id, "RUNNING", node["started"], about)
            received[node["key"]] = {"run_id": run_id, "digest": ""}
            self._note(received)
        run_id = received[node["key"]]["run_id"]
        points = list(_points(node, self.folder))
        params = {key: str(value) for key, value in node["params"].items()}
        for first in range(0, max(1, len(points)), POINTS):
            store.send(run_id, points=points[first : first + POINTS], params=params, tags=tags)
            params, tags = {}, {}
        if files := [self.folder / name for name in node["files"] if (self.folder / name).is_file()]:
            self._upload(run_id, files)
        if node["status"] == "RUNNING":
            store.reopen(run_id)
        else:
            store.close(run_id, node["status"], node["ended"] or round(time.time() * 1000))
        if not node["parent"] and (text := node["tags"].get(NOTE)):
            store.tag_experiment(self._experiment, {NOTE: text})
        received[node["key"]]["digest"] = digest
        self._note(received)

    def _upload(self, run_id: str, files: list[Path]) -> None:
        with TemporaryDirectory(prefix="harness-") as staged:
            for file in files:
                target = Path(staged) / file.relative_to(self.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
            self._open().upload(run_id, Path(staged))

    def _note(self, received: dict[str, dict[str, str]]) -> None:
        document = {**_read_received(self.folder), self._key: received}
        write_atomically(self.folder / RECEIVED, json.dumps(document))

    def _digest(self, node: Node) -> str:
        """What a node is now, its files included."""
        paths = [self.folder / name for name in node["files"]]
        stamps = [f"{path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths if path.is_file()]
        return hashlib.sha256(json.dumps([node, stamps], sort_keys=True).encode()).hexdigest()[:16]

    def _open(self) -> "Store":
        """The store, which is opened at first use: this imports mlflow."""
        if self._store is None:
            from harness.tracking.store import Store

            self._store = Store(self.uri, self.folder.parent.parent)
        return self._store


def _at_rest(node: Node) -> str:
    """The status of what nobody runs any more."""
    return "KILLED" if node["status"] == "RUNNING" else str(node["status"])


def _points(node: Node, folder: Path) -> Iterator[Point]:
    """A node's metrics, and the curves of its runs."""
    ended = node["ended"] or node["started"]
    for name, values in node["metrics"].items():
        for step, value in values.items():
            if value is not None:
                yield Point(name, float(value), ended, int(step))
    for suffix, fingerprint in node["runs"].items():
        for line in read_curves(folder / "runs" / fingerprint / "curves.jsonl"):
            for key in CURVES:
                if key in line:
                    yield Point(f"{key}{suffix}", float(line[key]), int(line["time"]), int(line["step"]))


def _read_received(folder: Path) -> dict[str, Any]:
    """A corrupt file counts as none: nodes are found again in the store by their tags."""
    try:
        document = json.loads((folder / RECEIVED).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
