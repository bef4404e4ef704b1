"""What a study's folder holds, as DataFrames; reading it needs neither torch nor the specs that made it."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.record import RunRecord, read_curves, read_plan
from harness.schema import UserError
from harness.stats import ceilings, compare, compare_in_turn

ENDED = ("finished", "diverged", "out_of_memory", "failed")
LEARNING_TIME = "learning_time"
IN_DISTRIBUTION = "eval/in_distribution"


def number_of_looks(document: Mapping[str, Any]) -> int:
    """How many times the study may look at what is decided, each time with that share of the error rate."""
    return max(1, len(document.get("looks", ())))


@dataclass(frozen=True)
class StudyData:
    """A study as planned (`document`, the content of `study.json`) and as far as it has come.

    Attributes:
        runs: a row a planned run: study, variant, task, seed, status (of the record, or *partial*, *missing*), cause,
            diagnosis (the first alarm), fingerprint, mlflow_run_id, commit, then final metrics, then the ledger, at its
            end `tuning_trials`: how many settings its variant was tuned over, 0 where none was.
        scores: long: variant, task, seed, length, metric, value, mark, split (*train*, *test*).
    """

    folder: Path
    document: dict[str, Any]
    runs: pd.DataFrame
    scores: pd.DataFrame

    @cached_property
    def curves(self) -> pd.DataFrame:
        """Long: variant, task, seed, step, metric, value."""
        rows = [
            (*cell, int(line["step"]), metric, value)
            for cell, directory in self._directories()
            for line in read_curves(directory / "curves.jsonl")
            for metric, value in line.items()
            if metric not in ("step", "time")
        ]
        return pd.DataFrame(rows, columns=["variant", "task", "seed", "step", "metric", "value"])

    @cached_property
    def attention(self) -> pd.DataFrame:
        """Attention maps: variant, task, seed, step, path of an npz with `weights` and `labels`."""
        rows = [
            (*cell, int(path.stem), path)
            for cell, directory in self._directories()
            for path in sorted((directory / "attention").glob("*.npz"))
        ]
        return pd.DataFrame(rows, columns=["variant", "task", "seed", "step", "path"])

    @cached_property
    def codes(self) -> dict[str, np.ndarray]:
        """Fixed position codes `(positions, d_model)` of the variants that add such to their embeddings."""
        path = self.folder / "codes.npz"
        if not path.exists():
            return {}
        with np.load(path) as archive:
            return dict(archive)

    @cached_property
    def costs(self) -> pd.DataFrame:
        """What each variant's model costs by length, a row a variant and length (`cost.costs_by_length`); empty where
        the plan did not count it.
        """
        path = self.folder / "costs.csv"
        if not path.exists():
            return pd.DataFrame(columns=["variant", "tokens"])
        # A variant may be called "none" or "NA".
        return pd.read_csv(path, dtype={"variant": str}, keep_default_na=False)

    @cached_property
    def records(self) -> list[tuple[tuple[str, str, int], RunRecord]]:
        """The record of every run that has ended, with the run's variant, task and seed."""
        found = _records(self.folder, self.document)
        return [((cell["variant"], cell["task"], cell["seed"]), record) for cell, record in found if record]

    @property
    def environment(self) -> dict[str, str]:
        """Where and with which code the runs were made, by their records; where these differ, each value with the
        number of its runs. The plan's own, of its last invocation, stands in for what no record says.
        """
        counts: dict[str, Counter[str]] = {}
        for _, record in self.records:
            for name, value in record.environment.items():
                counts.setdefault(name, Counter())[value] += 1
        planned = {**self.document.get("environment", {}), "commit": self.document.get("commit", "")}
        return planned | {name: _by_count(values) for name, values in counts.items()}

    @property
    def is_pilot(self) -> bool:
        """Whether the seeds are those that choose settings and conclude nothing."""
        return bool(self.document.get("pilot", False))

    def compare(self) -> pd.DataFrame:
        """`stats.compare` on the primary scores; a pilot gets no verdict but *undecided*."""
        terms = {key: self.document[key] for key in ("baseline", "margin", "higher_is_better")}
        against, looks = self.document.get("against", {}), self.document.get("looks")
        if looks:
            compared = compare_in_turn(self.primary(), **terms, looks=looks, against=against, ended=self._ended())
        else:
            compared = compare(self.primary(), **terms, against=against)
        return compared.assign(verdict="undecided") if self.is_pilot else compared

    def ceilings(self) -> pd.DataFrame:
        """`stats.ceilings` on the primary scores."""
        baseline, margin, against = self.document["baseline"], self.document["margin"], self.document.get("against", {})
        return ceilings(self.primary(), baseline, margin, against=against)

    def _ended(self) -> dict[tuple[str, str], int]:
        """Of (variant, task), how many seeds have ended before the first that has not."""
        found = {}
        for (variant, task), runs in self.runs.groupby(["variant", "task"], sort=False):
            ended = runs.sort_values("seed")["status"].isin(ENDED).to_numpy()
            found[str(variant), str(task)] = int(np.logical_and.accumulate(ended).sum())
        return found

    @property
    def metric(self) -> str:
        """The metric that is shown by length: the declared score, or exact match where that has no lengths."""
        return "exact_match" if self.document["score"] == LEARNING_TIME else str(self.document["score"])

    def _directories(self) -> Iterator[tuple[tuple[str, str, int], Path]]:
        for run in self.document["runs"]:
            yield (run["variant"], run["task"], run["seed"]), self.folder / "runs" / run["fingerprint"]

    def primary(self) -> pd.DataFrame:
        """variant, task, seed, score: the declared metric's mean over the test lengths, a row a planned run.

        A run that could not be trained to the end (diverged) scores 0. One that failed, ran out of memory or has not
        ended has no score (NaN), and still counts where a correction asks how many comparisons the study makes.
        For a task without test lengths the training lengths count. `learning_time` is the share of the training steps
        after which an evaluation at the training lengths first passed the gate, 1 for a run that misses it in the end
        or diverged.
        """
        planned = self.runs[["variant", "task", "seed"]]
        if self.document["score"] == LEARNING_TIME:
            return planned.assign(score=self._learning_time())
        scored = self.scores[self.scores["metric"] == self.document["score"]]
        untested = [task for task, lengths in self.document["test_lengths"].items() if not lengths]
        counted = scored[(scored["split"] == "test") | scored["task"].isin(untested)]
        means = counted.groupby(["variant", "task", "seed"], sort=False)["value"].mean()
        return planned.merge(means.rename("score").reset_index(), how="left", on=["variant", "task", "seed"])

    def _learning_time(self) -> pd.Series:
        planned = self.document["spec"]["train"]["steps"]
        changed = {v: fields.get("train.steps", planned) for v, fields in self.document["differences"].items()}
        curves = self.curves
        passed = curves[(curves["metric"] == IN_DISTRIBUTION) & (curves["value"] >= self.document["gate"])]
        first = passed.groupby(["variant", "task", "seed"])["step"].min().rename("learned").reset_index()
        learned = self.runs[["variant", "task", "seed"]].merge(first, how="left")["learned"]
        share = learned / self.runs["variant"].map(changed).fillna(planned)
        final = self.runs.get(IN_DISTRIBUTION, pd.Series(np.nan, index=self.runs.index)).astype("float64")
        share = share.where((self.runs["status"] == "finished") & (final >= self.document["gate"]), 1.0).fillna(1.0)
        return share.where(self.runs["status"].isin(("finished", "diverged")))


def load_study(folder: str | Path) -> StudyData:
    """The study in a folder.

    Raises:
        UserError: there is none, or its `study.json` or one of its records is corrupt.
    """
    folder = Path(folder)
    if not (folder / "study.json").exists():
        raise UserError(f"{folder}: there is no study here; run `harness ablate {folder.name}` first")
    return planned_data(folder, read_plan(folder))


def planned_data(folder: Path, document: dict[str, Any]) -> StudyData:
    """What a folder holds of the runs that a plan names, by the content of a `study.json`.

    Raises:
        UserError: one of the records is corrupt.
    """
    cells = _records(folder, document)
    return StudyData(folder, document, _runs(folder, document, cells), _scores(document, cells))


def _records(folder: Path, document: dict[str, Any]) -> list[tuple[dict[str, Any], RunRecord | None]]:
    """Every planned run with its record; all corrupt ones are named at once, so that nobody mends them one by one."""
    found, corrupt = [], {}
    for cell in document["runs"]:
        directory = folder / "runs" / cell["fingerprint"]
        try:
            record = RunRecord.of_run(directory) if (directory / "record.json").exists() else None
        except UserError as error:
            corrupt[directory.name] = error
        else:
            found.append((cell, record))
    if not corrupt:
        return found
    first = next(iter(corrupt.values()))
    if len(corrupt) == 1:
        raise first
    raise UserError(
        f"{len(corrupt)} records are corrupt, in {folder / 'runs'}: {', '.join(corrupt)}; the first, {first}"
    )


def _runs(folder: Path, document: dict[str, Any], cells: list[tuple[dict[str, Any], RunRecord | None]]) -> pd.DataFrame:
    rows, tuning = [], {"tuning_trials": int((document.get("tuned") or {}).get("asked", 0))}
    for cell, record in cells:
        directory = folder / "runs" / cell["fingerprint"]
        row: dict[str, Any] = {"study": document["study"], **{k: cell[k] for k in ("variant", "task", "seed")}}
        row |= {"status": "partial" if (directory / "curves.jsonl").exists() else "missing", "cause": ""}
        if record:
            row |= {"status": record.status, "cause": record.cause}
        row["diagnosis"] = record.diagnosis if record else ""
        row |= {"fingerprint": cell["fingerprint"], "mlflow_run_id": run_id(directory)}
        row["commit"] = record.environment.get("commit", "") if record else ""
        rows.append({**row, **(record.final if record else {}), **(record.ledger if record else {}), **tuning})
    return pd.DataFrame(rows)


def _by_count(values: Counter[str]) -> str:
    """What all share, or `a (40 runs), b (14 runs)`."""
    if len(values) == 1:
        return next(iter(values))
    return ", ".join(f"{value or 'unknown'} ({count} run{'s' * (count != 1)})" for value, count in values.items())


def run_id(directory: Path) -> str:
    """The tracking run of a run, as `tracking` noted it beside the run; empty where nothing was delivered yet."""
    path = directory / "mirror.json"
    try:
        noted = json.loads(path.read_text()) if path.exists() else {}
    except ValueError:  # torn, or no text at all
        return ""
    return str(noted.get("run_id", "")) if isinstance(noted, dict) else ""


def existing(name: str) -> Path | None:
    """The file or folder that a name is the path of; None where there is none."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long, not to be read, of a user that does not exist
        return None


def run_folders(name: str, results: Path) -> list[Path]:
    """The folders of the runs that a name means: a run's folder or a file in it, else its MLflow run id or its
    fingerprint, under which several studies may have the same run. A run's folder is one with a `spec.json`.
    """
    given = existing(name)
    if given is not None:
        folder = given if given.is_dir() else given.parent
        return [folder] if (folder / "spec.json").exists() else []
    runs = sorted(path.parent for path in results.glob("*/runs/*/spec.json"))
    return [run for run in runs if name in (run.name, run_id(run))]


def _scores(document: dict[str, Any], cells: list[tuple[dict[str, Any], RunRecord | None]]) -> pd.DataFrame:
    rows = [
        (cell["variant"], cell["task"], cell["seed"], score.length, score.metric, score.value, score.mark)
        for cell, record in cells
        if record
        for score in record.scores
    ]
    scores = pd.DataFrame(rows, columns=["variant", "task", "seed", "length", "metric", "value", "mark"])
    tested = {task: set(lengths) for task, lengths in document["test_lengths"].items()}
    is_test = [length in tested[task] for task, length in zip(scores["task"], scores["length"], strict=True)]
    return scores.assign(split=np.where(is_test, "test", "train") if len(scores) else pd.Series(dtype=str))
