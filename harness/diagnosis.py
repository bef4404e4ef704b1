"""Finds what a diagnosis is asked of: the spec of a preset or a file, a run by fingerprint, MLflow run id or files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.catalogue import spec_named
from harness.cost import empty_model, parameters
from harness.diagnostics import Finding, History, Subject, detect, examine, history_of, subject_of
from harness.machine import available_memory
from harness.module import TransformerModule
from harness.record import RunRecord, read_curves
from harness.results import existing, run_folders
from harness.schema import UserError
from harness.spec import RunSpec
from harness.wording import in_words, quantity
from tasks import Copy

FILES = ("model.pt", "checkpoint.ckpt")  # weights, the latest first
BYTES = 4 + 4 + 8 + 8  # a parameter: weight and gradient in fp32, and both in fp64


@dataclass(frozen=True)
class Examined:
    """A subject, and what to call it; of a run also its history, and the `outcome` once it has ended."""

    name: str
    subject: Subject
    outcome: str = ""
    history: History | None = None

    def findings(self, *, dear: bool) -> list[Finding]:
        """What probes find in the model, and detectors in the history, in the order of triage."""
        found = examine(self.subject, dear=dear)
        told = next((finding.probe.name for finding in found if finding.alarms), "")
        return found + ([] if self.history is None else detect(self.history, told))


def of_spec(name: str) -> Examined:
    """The untrained model of a preset, or of a file that holds a ModelSpec or a RunSpec as JSON; without a task of its
    own it is examined on copy.

    Raises:
        UserError: neither a preset nor such a file; the model is too large for this machine.
    """
    spec = _run_spec(name)
    check_room(name, parameters(empty_model(spec.model, spec.task.vocab_size)))
    return Examined(name, subject_of(spec))


def check_room(name: str, count: int) -> None:
    """Raise `UserError` where a model of so many parameters cannot be examined in the memory that is free."""
    free = available_memory()
    if free is not None and count * BYTES > free:
        raise UserError(
            f"{name}: to examine {quantity(count)} parameters takes some {count * BYTES / 2**30:.0f} GiB (weights and "
            f"gradients, in two precisions), and {free / 2**30:.0f} GiB are free; examine a smaller model of its kind"
        )


def _run_spec(name: str) -> RunSpec:
    spec = spec_named(name)
    return spec if isinstance(spec, RunSpec) else RunSpec(model=spec, task=Copy())


def of_run(name: str, results: Path) -> Examined:
    """The model of a run with the weights that it has left, or untrained where it has left none.

    Raises:
        UserError: there is no such run, or its spec or its weights cannot be read.
    """
    folder = _folder(name, results)
    spec = _run_spec(str(folder / "spec.json"))
    module = TransformerModule(spec)
    weights = next((folder / file for file in FILES if (folder / file).exists()), None)
    if weights is not None:
        _load(module, weights)
    said = f"{folder.name}, {weights.name if weights else 'untrained: it has left no weights'}"
    record = _record(folder)
    outcome = "" if record is None else f"{record.status}: {record.cause}" if record.cause else record.status
    lines = read_curves(folder / "curves.jsonl")
    history = history_of(spec, lines, record) if lines else None
    return Examined(said, subject_of(spec, module, trained=weights is not None), outcome, history)


def _folder(name: str, results: Path) -> Path:
    """The folder of a run; of those that several studies have, any."""
    if found := run_folders(name, results):
        return found[0]
    if given := existing(name):
        raise UserError(f"{given}: there is no run here; name a run's folder, fingerprint or MLflow run id")
    raise UserError(f"there is no run {name!r} in {results}; runs.csv of a study names fingerprints and run ids")


def _load(module: TransformerModule, weights: Path) -> None:
    try:
        state: dict[str, Any] = torch.load(weights, map_location="cpu", weights_only=True)
        (module if "state_dict" in state else module.model).load_state_dict(state.get("state_dict", state))
    except Exception as error:  # a torn or foreign file raises almost anything
        raise UserError(f"{weights}: these are not the weights of its spec ({in_words(error)}); remove it") from error


def _record(folder: Path) -> RunRecord | None:
    path = folder / "record.json"
    return RunRecord.read(path) if path.exists() else None
