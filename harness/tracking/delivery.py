"""Sends to a store what it lacks of a study. A crash at any moment loses nothing and doubles nothing.

What was sent is noted only after the store confirmed it, so nothing is skipped. Sending again changes nothing: metrics
keep the time of their origin, artifacts their name. And a run is looked for by its tags before it is created; should a
slow server create one twice, one is removed at the next comparison. Images are named by us, in MLflow's own pattern,
and not by `MlflowClient.log_image`: its names are random, so that an image sent again would be there twice.
"""

import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from uuid import NAMESPACE_OID, uuid5

from harness.tracking import received as ledger
from harness.tracking.content import (
    NOTE,
    PARENT,
    WATCHED,
    dataset,
    metric,
    outcome_tags,
    outcome_values,
    parameters,
    run_tags,
    run_text,
)
from harness.tracking.disk import RunFolder, StudyFolder, read_attention
from harness.tracking.entities import Point, StoredRun, StoreError
from harness.tracking.received import Label, Received, RunMirror

if TYPE_CHECKING:
    from harness.tracking.store import Store

POINTS = 1000  # metrics in a call
LARGEST_LOG = 1_000_000  # bytes of run.log; a longer one stays on disk
IMAGE_KEY = "attention~maps"  # MLflow reads ~ as /, and shows the section `attention` above all others
RUN_FILES = ("spec.json", "record.json", "run.log")


class Delivery:
    """One process's dealings with one store about one study.

    `settled` holds the fingerprints of runs of which the store has all.
    """

    def __init__(self, store: "Store", folder: Path, key: str) -> None:
        self.store, self.folder, self.key = store, folder, key
        self.origin = f"{platform.node()}:{folder.resolve()}"
        self.settled: set[str] = set()
        self.experiment = ""
        self._stored: dict[str, StoredRun] = {}
        self._known = False

    def forget(self) -> None:
        """Look at what the store has before anything else is sent."""
        self._known = False

    def deliver(self, *, live: bool, unfinished: str | None = None) -> int:
        """Send what the store lacks; the number of runs for which something was sent.

        Args:
            live: whether the study is being run.
            unfinished: the study's status if it ends without a record for every planned run, or without its report.

        Raises:
            StoreError: the store cannot be reached, or it refuses something; all else is sent then.
        """
        study = StudyFolder(self.folder)
        if study.document is None:
            return 0
        with self._certain():
            self._compare()
            self._parent(study, study.budget)
            touched, refusals = 0, []
            for run, mirror in study.runs(besides=self.settled):
                try:
                    touched += self._deliver_run(study, run, mirror, live=live)
                except StoreError as error:
                    if not error.refused:
                        raise
                    refusals.append(error)
            self._finish_parent(study, live=live, unfinished=unfinished)
            if refusals:
                raise StoreError(f"{len(refusals)} runs are refused, the first: {refusals[0]}", refused=True)
        return touched

    def reap(self) -> int:
        """End our runs that the store believes RUNNING; nobody may be running this study. Their number."""
        with self._certain():
            self.forget()
            self._compare()
            study = StudyFolder(self.folder)
            stale = [run for run in self._stored.values() if self._is_ours(run) and run.status == "RUNNING"]
            for run in stale:
                folder = RunFolder(self.folder / "runs" / run.tags.get("fingerprint", "-"))
                self.store.close(run.run_id, "KILLED", folder.ended or study.ended)
            self._note_killed(study, {run.run_id for run in stale})
        return len(stale)

    def _note_killed(self, study: StudyFolder, killed: set[str]) -> None:
        for run, mirror in study.runs():
            received = mirror.stores.get(self.key)
            if received is not None and received.run_id in killed:
                received.status = "KILLED"
                ledger.write(run.path, mirror)
        for received in study.mirror.stores.get(self.key, {}).values():
            if received.run_id in killed:
                received.status = "KILLED"
                ledger.write(study.path, study.mirror)

    # What the store has

    @contextmanager
    def _certain(self) -> Iterator[None]:
        """After an error what the store has is not certain."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def _compare(self) -> None:
        if self._known:
            return
        self.settled.clear()
        self.experiment = self.store.experiment(self.folder.name)
        self._stored = {run.run_id: run for run in self.store.runs(self.experiment)}
        self._known = True

    def _is_ours(self, run: StoredRun) -> bool:
        return run.tags.get("origin") == self.origin

    def _claim(self, received: Received | None, identity: dict[str, str], began: int | None = None) -> Received | None:
        """The state of the run with these tags in the store: as noted, or found there; None if there is none.

        What else the store has under these tags is removed: another attempt than the one that began then, or a creation
        that came too late.
        """
        if received is not None and received.run_id not in self._stored:
            received = None  # deleted, or the store is a new one
        for run in list(self._stored.values()):
            if not self._is_ours(run) or any(run.tags.get(key) != value for key, value in identity.items()):
                continue
            if received is None and began in (None, run.started):
                received = Received(
                    experiment_id=self.experiment, run_id=run.run_id, began=run.started, status=run.status
                )
            if received is None or run.run_id != received.run_id:
                self._remove(run.run_id)
        return received

    def _remove(self, run_id: str) -> None:
        self.store.remove(run_id)
        self._stored.pop(run_id, None)

    def _create(self, name: str, tags: dict[str, str], began: int) -> Received:
        tags = {**{key: value for key, value in tags.items() if value}, "origin": self.origin}
        run_id = self.store.create(self.experiment, name, tags, began)
        self._stored[run_id] = StoredRun(run_id, "RUNNING", began, tags)
        return Received(experiment_id=self.experiment, run_id=run_id, began=began)

    # A run

    def _deliver_run(self, study: StudyFolder, run: RunFolder, mirror: RunMirror, *, live: bool) -> bool:
        """Send what is new of a run; whether anything was."""
        began = run.began
        if began is None:
            return False
        received = self._received_run(study, run, mirror, began)
        before = received.model_dump()
        status, grown = run.status(received, live=live), run.has_news(received)
        if status == "RUNNING" != received.status:
            self.store.reopen(received.run_id)
            received.status = status
            ledger.write(run.path, mirror)
        self._send_curves(run, mirror, received)
        self._send_files(run, mirror, received)
        self._send_outcome(study, run, mirror, received)
        if status != received.status or (grown and status != "RUNNING"):
            self.store.close(received.run_id, status, run.ended or began)
            received.status = status
            ledger.write(run.path, mirror)
        if received.outcome:
            self.settled.add(run.fingerprint)
        return received.model_dump() != before

    def _received_run(self, study: StudyFolder, run: RunFolder, mirror: RunMirror, began: int) -> Received:
        """What the store has of the run, which is created there if need be."""
        last = next(reversed(mirror.stores), None)
        noted = mirror.stores.pop(self.key, None)
        if noted is not None and run.was_redone(noted):
            if noted.run_id in self._stored:
                self._remove(noted.run_id)
            noted = None
        received = self._claim(noted, {"kind": "run", "fingerprint": run.fingerprint}, began)
        if received is None:
            parent = self._parent(study, mirror.label.budget)
            tags = run_tags(study.document or {}, mirror.label, run.fingerprint, run.spec)
            note = run_text(study.document or {}, mirror.label, None)
            received = self._create(mirror.label.name, {**tags, PARENT: parent.run_id, NOTE: note}, began)
        mirror.stores[self.key], mirror.run_id = received, received.run_id
        if received is not noted or last != self.key:
            ledger.write(run.path, mirror)
        return received

    def _send_curves(self, run: RunFolder, mirror: RunMirror, received: Received) -> None:
        params = {} if received.params else parameters(run.spec)
        new = run.curves[received.lines :]
        at_once = max(1, POINTS // max((len(line) for line in new), default=1))
        for first in range(0, max(len(new), bool(params)), at_once):
            lines = new[first : first + at_once]
            points = [point for line in lines for point in _points(line)]
            points.sort(key=lambda point: point.key.startswith(WATCHED))  # MLflow's overview has what came first on top
            self.store.send(received.run_id, points=points, params=params)
            if params:
                self.store.name_data(received.run_id, *dataset(run.spec))
            params, received.params = {}, True
            received.lines += len(lines)
            ledger.write(run.path, mirror)

    def _send_files(self, run: RunFolder, mirror: RunMirror, received: Received) -> None:
        """New attention maps as images; with the record the run's files."""
        new = {step: path for step, path in run.images.items() if step not in received.images}
        files = RUN_FILES if run.record and not received.outcome else ()
        if not new and not files:
            return
        with TemporaryDirectory(prefix="harness-") as staged:
            for step, path in new.items():
                _stage_image(Path(staged), path, step, run, mirror.label)
            for name in files:
                source = run.path / name
                if source.exists() and source.stat().st_size <= LARGEST_LOG:
                    shutil.copyfile(source, Path(staged) / name)
            self.store.upload(received.run_id, Path(staged))
        if new:
            self.store.send(received.run_id, tags={"mlflow.loggedImages": "True"})
            received.images = sorted({*received.images, *new})
            ledger.write(run.path, mirror)

    def _send_outcome(self, study: StudyFolder, run: RunFolder, mirror: RunMirror, received: Received) -> None:
        record, ended = run.record, run.ended
        if record is None or ended is None or received.outcome == ended:
            return
        points = [Point(key, value, ended, step) for key, value, step in outcome_values(record, run.curves)]
        tags = {**outcome_tags(record), NOTE: run_text(study.document or {}, mirror.label, record)}
        for first in range(0, len(points), POINTS):
            self.store.send(received.run_id, points=points[first : first + POINTS])
        self.store.send(received.run_id, tags=tags)
        received.outcome = ended
        ledger.write(run.path, mirror)

    # The study's own run

    def _parent(self, study: StudyFolder, budget: str) -> Received:
        """What the store has of a budget's parent run, which is created there if need be."""
        noted = study.mirror.stores.setdefault(self.key, {}).get(budget)
        received = self._claim(noted, {"kind": "study", "budget": budget})
        if received is None:
            document = study.document or {}
            tags = {"study": document["study"], "kind": "study", "budget": budget}
            received = self._create(f"{document['study']} · {budget}", tags, study.planned)
            if budget != study.budget:  # of an earlier plan; it takes its children in and moves no more
                self.store.close(received.run_id, "FINISHED", study.planned)
                received.status = "FINISHED"
        if received is not noted:
            study.mirror.stores[self.key][budget] = received
            study.mirror.stores[self.key] = study.mirror.stores.pop(self.key)
            ledger.write(study.path, study.mirror)
        return received

    def _finish_parent(self, study: StudyFolder, *, live: bool, unfinished: str | None) -> None:
        """Bring tags, description, artifacts and status of the present budget's parent run up to date."""
        received = self._parent(study, study.budget)
        texts, views, files = study.texts(received.run_id), study.views(), study.files()
        status = study.status(received, live=live, unfinished=unfinished)
        if received.texts != texts:
            self.store.send(received.run_id, tags={k: v for k, v in texts.items() if received.texts.get(k) != v})
            self.store.tag_experiment(self.experiment, {NOTE: texts[NOTE]})
            received.texts = texts
            ledger.write(study.path, study.mirror)
        if received.views != views:
            self.store.tag_experiment(self.experiment, {k: v for k, v in views.items() if received.views.get(k) != v})
            received.views = views
            ledger.write(study.path, study.mirror)
        if received.files != files:
            self._upload(study, received.run_id, [name for name in files if received.files.get(name) != files[name]])
            received.files = files
            ledger.write(study.path, study.mirror)
        if received.status != status:
            if status == "RUNNING":
                self.store.reopen(received.run_id)
            else:
                self.store.close(received.run_id, status, study.ended)
            received.status = status
            ledger.write(study.path, study.mirror)

    def _upload(self, study: StudyFolder, run_id: str, names: list[str]) -> None:
        with TemporaryDirectory(prefix="harness-") as staged:
            for name in names:
                target = Path(staged) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(study.path / name, target)
            self.store.upload(run_id, Path(staged))


def _points(line: dict[str, float]) -> Iterator[Point]:
    """The metrics of a line of curves.jsonl."""
    for key, value in line.items():
        if key not in ("step", "time") and isinstance(value, int | float):
            yield Point(metric(key), float(value), int(line["time"]), int(line["step"]))


def _stage_image(staged: Path, attention: Path, step: int, run: RunFolder, label: Label) -> None:
    """Draw an attention map into the two files that MLflow's pages look for."""
    from harness.attention_map import draw

    content = read_attention(attention)
    if content is None:
        return
    folder = staged / "images"
    folder.mkdir(exist_ok=True)
    identity = uuid5(NAMESPACE_OID, f"{run.fingerprint} {step}")
    name = folder / f"{IMAGE_KEY}+step+{step}+timestamp+{run.began}+{identity}"
    draw(*content, title=f"{label.name} · step {step}").save(f"{name}.png")
    # MLflow's grids show the "compressed" copy. A smaller one would cost more to make and could not be read.
    shutil.copyfile(f"{name}.png", f"{name}+compressed.png")
