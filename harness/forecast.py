"""What a study would still run and what that costs, for `harness ablate NAME --plan`. Writes nothing."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch

from harness.cost import counting, empty_model, parameters, training_flops
from harness.record import RunRecord, read_curves
from harness.schema import UserError, canonical_json
from harness.spec import RunSpec
from harness.study import Cell, Plan, earlier_plan, stale_runs

NEIGHBOURS = 10  # records of each other study that are read
SAMPLED_STEPS = 64  # batches drawn to see how many tokens a training step reads

Basis = Literal["runs of this cell", "FLOPs", "unknown"]


@dataclass(frozen=True)
class CellForecast:
    """A variant on a task: how many runs are done and left, and what one run costs.

    Attributes:
        left: runs to do, the partial ones among them.
        steps_left: steps of all runs that are left.
        flops: operations of training one run, forward and backward.
        tokens: tokens that one run reads, padding included.
        seconds: of one run in one worker; None where nothing comparable has been run in this results folder.
        basis: what `seconds` rests on.
    """

    variant: str
    task: str
    done: int
    failed: int
    partial: int
    left: int
    steps_left: int
    steps: int
    parameters: int
    flops: float
    tokens: int
    seconds: float | None
    basis: Basis

    @property
    def seconds_left(self) -> float | None:
        """Worker-seconds that the cell still takes."""
        return None if self.seconds is None else self.seconds * self.steps_left / self.steps


@dataclass(frozen=True)
class Forecast:
    """Everything that `--plan` shows."""

    cells: tuple[CellForecast, ...]
    notices: tuple[str, ...]

    @property
    def left(self) -> int:
        """Runs to do."""
        return sum(cell.left for cell in self.cells)

    @property
    def flops_left(self) -> float:
        """Operations of the steps that are left."""
        return sum(cell.flops * cell.steps_left / cell.steps for cell in self.cells)

    def seconds(self, workers: int) -> float | None:
        """Wall time of the rest; None where a cell's is unknown."""
        times = [cell.seconds_left for cell in self.cells if cell.left]
        known = [time for time in times if time is not None]
        return sum(known) / min(workers, max(1, self.left)) if len(known) == len(times) else None


def forecast(plan: Plan, folder: Path) -> Forecast:
    """What is done of a plan and what the rest costs, judged by what the folder holds; where it holds nothing, by
    what the studies beside it took.
    """
    records, notices = _records(plan, folder)
    speeds = _Speeds(records.values() if records else _neighbours(folder))
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in plan.cells:
        groups[cell.task, cell.variant].append(cell)
    cells = tuple(_cell(group, folder, records, speeds) for group in groups.values())
    return Forecast(cells, tuple(notices + _stale(plan, folder, records)))


def _cell(group: list[Cell], folder: Path, records: dict[str, RunRecord], speeds: "_Speeds") -> CellForecast:
    spec, steps = group[0].spec, group[0].spec.train.steps
    statuses = Counter(records[cell.fingerprint].status for cell in group if cell.fingerprint in records)
    progress = [_progress(folder / "runs" / cell.fingerprint) for cell in group if cell.fingerprint not in records]
    with counting(f"{group[0].variant} on {group[0].task}"):
        tokens, flops = training_cost(spec)
    seconds, basis = speeds.of(spec, flops)
    return CellForecast(
        variant=group[0].variant,
        task=group[0].task,
        done=statuses.total(),
        failed=statuses.total() - statuses["finished"],
        partial=sum(step > 0 for step in progress),
        left=len(progress),
        steps_left=sum(steps - step for step in progress),
        steps=steps,
        parameters=parameters(empty_model(spec.model, spec.task.vocab_size)),
        flops=flops,
        tokens=tokens,
        seconds=seconds,
        basis=basis,
    )


def _progress(directory: Path) -> int:
    """The step that an interrupted run has reached; 0 where there is no checkpoint to go on from."""
    if not (directory / "checkpoint.ckpt").exists():
        return 0
    return max((int(line["step"]) for line in read_curves(directory / "curves.jsonl")), default=0)


def training_cost(spec: RunSpec) -> tuple[int, float]:
    """Tokens and operations of one run, from the shapes of batches drawn at evenly spread steps."""
    steps = spec.train.steps
    drawn = range(0, steps, -(-steps // SAMPLED_STEPS))
    sequences: Counter[tuple[int, int]] = Counter()
    for step in drawn:
        batch = spec.training_batch(step, torch.device("cpu"))
        count, length, source = batch.shape
        sequences[length, source] += count
    share = steps / len(drawn)
    tokens = sum((length + source) * count for (length, source), count in sequences.items())
    costs = np.polyval(_quadratic(spec, sorted(sequences, key=sum)), list(map(sum, sequences)))
    return round(tokens * share), float(np.round(costs @ list(sequences.values()) * share))


def _quadratic(spec: RunSpec, lengths: list[tuple[int, int]]) -> np.ndarray:
    """Operations to train on one sequence, as a polynomial in its length and its source's together: three lengths
    tell all about linear maps and T×T attention (and nearly all about blocks of a window), and counting at every
    length would take seconds.
    """
    known = {sum(length): length for length in (lengths[0], lengths[len(lengths) // 2], lengths[-1])}
    costs = [training_flops(spec, [(length, 1)]) for length in known.values()]
    return np.polyfit(list(known), costs, len(known) - 1)


def _records(plan: Plan, folder: Path) -> tuple[dict[str, RunRecord], list[str]]:
    """All records of a study by fingerprint, and a notice for each that is corrupt."""
    specs = {cell.fingerprint: cell.spec.document() for cell in plan.cells}
    found, notices = {}, []
    for path in sorted(folder.glob("runs/*/record.json")):
        try:
            found[path.parent.name] = RunRecord.of_run(path.parent, specs.get(path.parent.name))
        except UserError:
            notices.append(f"{path} is corrupt; it would be set aside and its run done again")
    return found, notices


def _neighbours(folder: Path) -> Iterator[RunRecord]:
    """Some records of each other study in the same results folder."""
    for study in sorted(folder.parent.glob("*/study.json")):
        for path in sorted(study.parent.glob("runs/*/record.json"))[:NEIGHBOURS]:
            with suppress(UserError):  # corrupt: that study's own affair
                yield RunRecord.read(path)


def _stale(plan: Plan, folder: Path, records: dict[str, RunRecord]) -> list[str]:
    """A notice if runs of this budget and device were recorded under other fingerprints."""
    path = folder / "study.json"
    if path.exists() and not earlier_plan(folder):
        return [f"{path} is corrupt; it would be written anew"]
    count = stale_runs(plan, folder, records.__contains__)
    return [f"{count} earlier runs no longer fit their spec or result version and would be done again"] if count else []


class _Speeds:
    """How long recorded runs took."""

    def __init__(self, records: Iterable[RunRecord]) -> None:
        self._own: dict[str, list[float]] = defaultdict(list)
        self._per_flop: dict[str, list[float]] = defaultdict(list)  # by device, of training
        self._beside: dict[str, list[float]] = defaultdict(list)  # seconds of the rest: it does not grow with the steps
        for record in records:
            if record.status == "finished" and {"wall_seconds", "flops"} <= record.ledger.keys():
                training, device = float(record.ledger["wall_seconds"]), record.spec["device"]
                seconds = max(training, record.ended - record.started)
                self._own[_without_seed(record.spec)].append(seconds)
                self._per_flop[device].append(training / float(record.ledger["flops"]))
                self._beside[device].append(seconds - training)

    def of(self, spec: RunSpec, flops: float) -> tuple[float | None, Basis]:
        """Seconds of one run, and what they rest on: the median of the same cell's, else others' by FLOPs."""
        if own := self._own.get(_without_seed(spec.document())):
            return median(own), "runs of this cell"
        if others := self._per_flop.get(spec.device):
            return median(self._beside[spec.device]) + median(others) * flops, "FLOPs"
        return None, "unknown"


def _without_seed(document: dict[str, Any]) -> str:
    return canonical_json({name: value for name, value in document.items() if name != "seed"})
