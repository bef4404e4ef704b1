"""What lies in a study's folder, and how much of it a store still lacks. No store is asked here."""

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from harness.record import RunRecord, read_curves, read_plan, set_aside
from harness.schema import UserError
from harness.tracking import received as ledger
from harness.tracking.content import NOTE, PICTURES, STATUSES, artifact_address, study_tags, study_text
from harness.tracking.entities import StoreError
from harness.tracking.received import Label, Received, RunMirror, StudyMirror
from harness.tracking.views import view_tags

STUDY_FILES = (
    "study.json",
    "report.md",
    "report.html",
    "runs.csv",
    "scores.csv",
    "comparison.csv",
    "figures/*",
    "tables/*",
    "tables/as_shown/*",
)

logger = logging.getLogger("harness")


@dataclass(frozen=True)
class RunFolder:
    """A run's folder as it is now; each file is read at most once."""

    path: Path

    @property
    def fingerprint(self) -> str:
        """The folder's name."""
        return self.path.name

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The RunSpec document.

        Raises:
            StoreError: it cannot be read, so that no store would take the run; the next attempt at the run mends it.
        """
        if self.record:
            return self.record.spec
        path = self.path / "spec.json"
        try:
            return dict(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read ({error}); run the study again", refused=True) from error

    @cached_property
    def record(self) -> RunRecord | None:
        """The outcome, None while there is none; a corrupt one counts as none, the study sets it aside."""
        try:
            return RunRecord.of_run(self.path)
        except (FileNotFoundError, UserError):
            return None

    @cached_property
    def curves(self) -> list[dict[str, float]]:
        """The points of the training curves."""
        return read_curves(self.path / "curves.jsonl")

    @cached_property
    def images(self) -> dict[int, Path]:
        """Attention maps by step."""
        return {int(path.stem): path for path in sorted((self.path / "attention").glob("*.npz"))}

    @property
    def began(self) -> int | None:
        """Unix ms of the first thing that happened, None if nothing has."""
        if self.curves:
            return int(self.curves[0]["time"])
        return round(self.record.started * 1000) if self.record else None

    @property
    def ended(self) -> int | None:
        """Unix ms of the last thing that happened, None if nothing has."""
        if self.record:
            return round(self.record.ended * 1000)
        return int(self.curves[-1]["time"]) if self.curves else None

    def was_redone(self, received: Received) -> bool:
        """Whether the store has an earlier attempt that was thrown away, and not the one that lies here."""
        replaced = received.outcome not in (0, self.ended if self.record else None)
        return replaced or received.began != self.began or received.lines > len(self.curves)

    def has_news(self, received: Received) -> bool:
        """Whether curves or attention maps have grown."""
        return received.lines < len(self.curves) or not self.images.keys() <= set(received.images)

    def status(self, received: Received, *, live: bool) -> str:
        """The status that MLflow should show: while a study runs, only what moves in it is RUNNING."""
        if self.record:
            return STATUSES[self.record.status]
        if live:
            return "RUNNING" if self.has_news(received) else received.status
        return "KILLED"

    def lacks(self, received: Received | None, *, live: bool) -> bool:
        """Whether a store with this state lacks something of the run."""
        if self.began is None:
            return False
        if received is None or self.was_redone(received) or bool(received.outcome) != bool(self.record):
            return True
        return self.has_news(received) or received.status != self.status(received, live=live)


@dataclass(frozen=True)
class StudyFolder:
    """A study's folder as it is now."""

    path: Path

    @cached_property
    def document(self) -> dict[str, Any] | None:
        """study.json, None before the first plan.

        Raises:
            UserError: it is corrupt.
        """
        try:
            return read_plan(self.path)
        except FileNotFoundError:
            return None

    @property
    def budget(self) -> str:
        """The budget of the present plan."""
        return str((self.document or {})["budget"])

    @cached_property
    def mirror(self) -> StudyMirror:
        """What stores have received of the study's own runs."""
        return cast(StudyMirror, ledger.read(self.path, StudyMirror) or StudyMirror())

    def runs(self, besides: Collection[str] = ()) -> list[tuple[RunFolder, RunMirror]]:
        """All runs but the named ones, with what stores have of them; each gets its label when it is first seen."""
        planned = {run["fingerprint"]: run for run in (self.document or {})["runs"]}
        found = []
        for path in sorted(self.path.glob("runs/*")):
            if path.name in besides or not path.is_dir():
                continue
            mirror = cast(RunMirror | None, ledger.read(path, RunMirror))
            if mirror is None:
                place = planned.get(path.name, {"variant": "unplanned", "task": "?", "seed": 0})
                label = Label(variant=place["variant"], task=place["task"], seed=place["seed"], budget=self.budget)
                mirror = RunMirror(label=label)
                ledger.write(path, mirror)
            found.append((RunFolder(path), mirror))
        return found

    def texts(self, run_id: str) -> dict[str, str]:
        """Tags and description of the parent run, which has that id in the store."""
        study = self.document or {}
        report = self.path / "report.md"
        note = study_text(study, report.read_text() if report.exists() else "", self._pictures(run_id))
        return {key: text for key, text in {**study_tags(study), NOTE: note}.items() if text}

    def _pictures(self, run_id: str) -> dict[str, str]:
        """Where a store's server has the figures that a description shows."""
        shown = {name: self.path / "figures" / f"{name}.png" for name in PICTURES}
        return {
            PICTURES[name]: artifact_address(run_id, f"figures/{path.name}")
            for name, path in shown.items()
            if path.exists()
        }

    def views(self) -> dict[str, str]:
        """Tags of the experiment: the pages that the study's links open."""
        return view_tags(self.document or {})

    def files(self) -> dict[str, str]:
        """The parent run's artifacts, each with the size and time of its present version."""
        paths = [path for pattern in STUDY_FILES for path in sorted(self.path.glob(pattern)) if path.is_file()]
        return {str(path.relative_to(self.path)): f"{path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths}

    @property
    def planned(self) -> int:
        """Unix ms of the present plan."""
        return int((self.path / "study.json").stat().st_mtime * 1000)

    @property
    def ended(self) -> int:
        """Unix ms of the last record, of the plan if there is none."""
        times = [record.stat().st_mtime for record in self._records() if record.exists()]
        return int(max(times) * 1000) if times else self.planned

    def _records(self) -> list[Path]:
        return [self.path / "runs" / run["fingerprint"] / "record.json" for run in (self.document or {})["runs"]]

    @property
    def reported(self) -> bool:
        """Whether the report, whose page is written last, is younger than every record; by what the records say, as
        the files of a copied folder are all young.
        """
        page = self.path / "report.html"
        records = [RunFolder(path.parent).record for path in self._records()]
        return page.exists() and all(record is None or record.ended <= page.stat().st_mtime for record in records)

    def status(self, received: Received, *, live: bool, unfinished: str | None = None) -> str:
        """The parent run's status: FINISHED with a record for every planned run and the report, else as it was or is
        to be.
        """
        complete = all(record.exists() for record in self._records())
        if live:
            return received.status if complete else "RUNNING"
        if complete and self.reported:
            return "FINISHED"
        return unfinished or (received.status if received.status != "RUNNING" else "KILLED")

    def lacks(self, received: Received | None, *, live: bool) -> bool:
        """Whether a store with this state of the parent run lacks something of it."""
        if received is None:
            return True
        wanted = (self.texts(received.run_id), self.views(), self.files(), self.status(received, live=live))
        return wanted != (received.texts, received.views, received.files, received.status)


def read_attention(path: Path) -> tuple[NDArray[np.floating], list[str]] | None:
    """Weights `(layers, heads, T, T)` and token names of an attention map; a corrupt file is set aside."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return arrays["weights"], [str(label) for label in arrays["labels"]]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        aside = set_aside(path)
        logger.warning("%s is corrupt (%s); kept as %s, its image is left out", path, error, aside.name)
        return None
