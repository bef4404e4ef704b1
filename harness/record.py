"""RunRecord: what one run left behind. On disk it is the truth; everything else is made from it.

Reading records needs neither torch nor the specs that made them.
"""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.schema import UserError, quoted

Status = Literal["finished", "diverged", "out_of_memory", "failed"]
Mark = Literal["", "unsupported", "diverged", "seen"]

REMEDY = "run the study again, which sets it aside and does that run anew"


class Score(BaseModel):
    """One metric at one length.

    `mark` says what a reader must know: *unsupported* (the model cannot take the length; scored 0), *diverged* (scored
    0), *seen* (so few sources of this length exist that training saw most of them or all).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    length: int
    metric: str
    value: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    mark: Mark = ""


class Diagnosed(BaseModel):
    """One thing that a diagnosis said of a run: an alarm, or a remark about what is unusual and often healthy.

    `rank` is its place in the order of triage, `value` what was measured, `where` it was worst, `healthy` its bounds in
    words, `evidence` other numbers behind it; the rest are sentences.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    probe: str
    alarm: bool
    rank: int
    value: float
    where: str = ""
    symptom: str
    measures: str
    healthy: str
    cause: str
    remedy: str
    source: str
    evidence: dict[str, float] = {}


def mean_score(scores: Iterable[Score], lengths: Iterable[int], metric: str = "exact_match") -> float:
    """The mean of a metric over lengths, each weighing the same; NaN where nothing was scored."""
    wanted = set(lengths)
    values = [score.value for score in scores if score.metric == metric and score.length in wanted]
    return sum(values) / len(values) if values else float("nan")


PLANNED = {"study", "question", "baseline", "variants", "tasks", "budget"}  # in every study.json
RUN = {"variant", "task", "seed", "fingerprint"}  # in every run that it plans


class RunRecord(BaseModel):
    """The outcome of a RunSpec: status and cause, scores by length, final metrics, ledger, environment, and what a
    diagnosis found, the most telling first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    fingerprint: str
    spec: dict[str, Any]
    status: Status
    cause: str = ""
    scores: tuple[Score, ...] = ()
    final: dict[str, float] = Field(default_factory=dict)
    ledger: dict[str, int | float | str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    findings: tuple[Diagnosed, ...] = ()
    started: Annotated[float, Field(ge=0)] = 0.0
    ended: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _scored(self) -> "RunRecord":
        if self.status == "finished" and not self.scores:
            raise ValueError("a finished run has scores")
        return self

    @property
    def was_examined(self) -> bool:
        """Whether diagnostics looked at the run."""
        return bool(self.findings) or self.ledger.get("diagnostics", "off") != "off"

    @property
    def diagnosis(self) -> str:
        """The name of the first alarm; empty where nothing alarms."""
        return next((found.probe for found in self.findings if found.alarm), "")

    def write(self, path: Path) -> None:
        """Write the record whole or not at all."""
        write_atomically(path, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """The record in a file.

        Raises:
            UserError: the file is corrupt; set it aside and run again.
        """
        try:
            return cls.model_validate_json(path.read_text())
        except (ValidationError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: this is not a run record ({_reason(error)}); {REMEDY}") from error

    @classmethod
    def of_run(cls, directory: Path, spec: dict[str, Any] | None = None) -> "RunRecord":
        """The record of the run that a study keeps in a directory, which is called after its fingerprint; `spec` is the
        document of the one that is planned there, where that is known.

        Raises:
            UserError: the file is corrupt or another run's; set it aside and run again.
        """
        path = directory / "record.json"
        record = cls.read(path)
        if record.fingerprint != directory.name:
            raise UserError(f"{path}: this is the record of another run, {record.fingerprint!r}; {REMEDY}")
        if spec not in (None, record.spec):
            raise UserError(f"{path}: its spec is not the one that this run is called after; {REMEDY}")
        return record


def _reason(error: ValidationError | UnicodeDecodeError) -> str:
    """What is wrong first, and where."""
    if isinstance(error, UnicodeDecodeError):
        return str(error)
    first = error.errors()[0]
    place, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{place}: {said}" if place else said


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step, so that a reader or a kill at any moment finds the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a folder without rights: name the file
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk does not say where
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def has_record(folder: Path, fingerprint: str) -> bool:
    """Whether a run of a study has left its record."""
    return (folder / "runs" / fingerprint / "record.json").exists()


def read_plan(folder: Path) -> dict[str, Any]:
    """The content of a study's `study.json`.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is corrupt.
    """
    path = folder / "study.json"
    try:
        document = json.loads(path.read_text())
        _check_plan(document)
    except ValueError as error:
        raise UserError(f"{path} is corrupt ({error}); run the study again, finished runs are kept") from error
    return document


def _check_plan(document: Any) -> None:
    """Raise ValueError for what is no plan: of a file cut short or of another program."""
    if not isinstance(document, dict) or not isinstance(document.get("runs"), list):
        raise ValueError("it plans no runs")
    if missing := PLANNED - document.keys():
        raise ValueError(f"it lacks {quoted(min(missing))}")
    if not all(isinstance(planned, dict) and planned.keys() >= RUN for planned in document["runs"]):
        raise ValueError(f"a run of it lacks one of {', '.join(sorted(RUN))}")


def read_curves(path: Path) -> list[dict[str, float]]:
    """The lines of a `curves.jsonl`, without what is torn or spoilt and without a step's second telling."""
    if not path.exists():
        return []
    lines: dict[int, dict[str, float]] = {}
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # torn, or no text at all
            continue
        if isinstance(line, dict) and "step" in line:
            lines.setdefault(line["step"], line)
    return list(lines.values())


def set_aside(path: Path) -> Path:
    """Rename a corrupt file so that it is neither used nor lost; the new path."""
    aside = path.with_name(f"{path.name}.corrupt")
    return path.replace(aside)
