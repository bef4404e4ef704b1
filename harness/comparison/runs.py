"""Runs as their folders tell them, and a document of what differs between them."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase as KEYS
from typing import Any

from harness.comparison.differences import Document, differing
from harness.record import RunRecord, Score, read_curves, read_plan
from harness.results import run_id
from harness.schema import UserError, flatten
from harness.stats import clopper_pearson

LOSS = "train/loss"


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it; `planned` is its row of the study's plan, empty outside of studies."""

    folder: Path
    spec: Document
    record: RunRecord | None
    curves: list[dict[str, float]]
    planned: Document

    @property
    def status(self) -> str:
        """The record's, or *partial*, *missing*."""
        return self.record.status if self.record else "partial" if self.curves else "missing"


def read_run(folder: Path) -> Run:
    """The run in a folder, finished or not.

    Raises:
        UserError: its record or, without one, its spec is corrupt.
    """
    planned = _planned(folder)
    path, record = folder / "record.json", None
    if path.exists():
        record = RunRecord.of_run(folder) if planned else RunRecord.read(path)
    spec = record.spec if record else _read_spec(folder / "spec.json")
    return Run(folder, spec, record, read_curves(folder / "curves.jsonl"), planned)


def _planned(folder: Path) -> Document:
    """What a run's study calls it; a plan that cannot be read says nothing, the run is compared all the same."""
    place = folder.resolve()
    plan: Document = {"runs": []}
    with suppress(OSError, UserError):
        plan = read_plan(place.parents[1]) if place.parent.name == "runs" else plan
    rows = [{"study": plan["study"], **row} for row in plan["runs"] if row["fingerprint"] == place.name]
    return rows[0] if rows else {}


def _read_spec(path: Path) -> Document:
    try:
        spec = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: this is not a spec ({error}); run its study again, which writes it anew") from error
    if not isinstance(spec, dict):
        raise UserError(f"{path}: a spec is a JSON object; run its study again, which writes it anew")
    return spec


def of_runs(runs: Sequence[Run]) -> Document:
    """What differs between runs and what came of each: the spec's fields and the environment's where they differ, final
    metrics, ledger, exact match by length, loss curve, diagnosis.
    """
    keyed = dict(zip(KEYS, runs, strict=False))
    flat = {key: flatten(run.spec) for key, run in keyed.items()}
    worlds = {key: run.record.environment if run.record else {} for key, run in keyed.items()}
    return {
        "kind": "runs",
        "runs": [{"key": key, **_run(run)} for key, run in keyed.items()],
        "spec_fields": len(dict.fromkeys(field for fields in flat.values() for field in fields)),
        "spec": differing(flat),
        "environment": differing({key: world for key, world in worlds.items() if world}),
    }


def _run(run: Run) -> Document:
    record = run.record
    return {
        "folder": str(run.folder),
        "fingerprint": record.fingerprint if record else run.folder.resolve().name,
        "mlflow_run_id": run_id(run.folder),
        **{name: run.planned.get(name) for name in ("study", "variant", "task", "seed")},
        "status": run.status,
        "cause": record.cause if record else "",
        "final": record.final if record else {},
        "ledger": record.ledger if record else {},
        "exact_match": list(exact_match(record)) if record else [],
        "loss": loss_curve(run.curves),
        "examined": bool(record and record.was_examined),
        "diagnosis": record.diagnosis if record else "",
        "findings": [found.model_dump() for found in record.findings] if record else [],
    }


def exact_match(record: RunRecord) -> Iterator[Document]:
    """Exact match at each length, with its 95 % Clopper–Pearson interval over the evaluated sequences.

    `low` and `high` are None where nothing was measured (*unsupported*, *diverged*) or where the number of sequences is
    not known: evaluation leaves out what stands among finite training samples, and no record says how much.
    """
    flat = flatten(record.spec)
    samples, finite = flat.get("train.eval_samples"), flat.get("train.sampling") == "Finite"
    ends = flat.get("task.lengths.train")
    first, last = ends if isinstance(ends, list) and len(ends) == 2 else (math.inf, -math.inf)
    for score in record.scores:
        if score.metric != "exact_match":
            continue
        trained = first <= score.length <= last
        complete = isinstance(samples, int) and not (finite and trained and score.mark != "seen")
        low, high = _limits(score, samples) if complete else (None, None)
        yield {
            "length": score.length, "split": "train" if trained else "test", "value": score.value, "low": low,
            "high": high, "samples": samples if complete else None, "mark": score.mark,
        }  # fmt: skip


def _limits(score: Score, samples: Any) -> tuple[float | None, float | None]:
    failed = round((1 - score.value) * samples)
    if score.mark in ("unsupported", "diverged") or abs((1 - score.value) * samples - failed) > 1e-6 * samples:
        return None, None
    low, high = clopper_pearson(failed, samples)
    return 1 - high, 1 - low


def loss_curve(lines: Iterable[Mapping[str, float]]) -> Document | None:
    """The loss at each step that reports one, with its first, last and smallest value; None without any."""
    points = sorted((int(line["step"]), float(line[LOSS])) for line in lines if LOSS in line)
    if not points:
        return None
    finite = [(value, step) for step, value in points if math.isfinite(value)]
    lowest, where = min(finite, default=(math.nan, None))
    return {
        "steps": [step for step, _ in points], "values": [value for _, value in points], "first": points[0][1],
        "last": points[-1][1], "minimum": lowest, "minimum_step": where,
    }  # fmt: skip
