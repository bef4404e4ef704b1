"""A sweep as the tracking store shows it: the sweep, its variants, their trials."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial

from harness.record import write_atomically
from harness.schema import canonical_json
from harness.sweep.plan import SweepPlan
from harness.sweep.trials import OUTCOME
from harness.tracking.content import NOTE
from harness.tracking.tree import NODES

STATUSES = {"finished": "FINISHED", "pruned": "KILLED"}  # MLflow's; what else may become of a trial is FAILED


def note_all(planned: SweepPlan, studies: dict[str, optuna.Study], folder: Path, status: str) -> None:
    """Write all that there is to mirror anew: the sweep, its variants, their trials."""
    nodes = [_sweep_node(planned, folder, status)]
    for variant, study in studies.items():
        trials = [trial for trial in study.get_trials(deepcopy=False) if OUTCOME in trial.user_attrs]
        nodes.append(_variant_node(planned, variant, trials, nodes[0]))
        nodes += [trial_node(planned, variant, trial) for trial in trials]
    write_atomically(folder / NODES, "".join(json.dumps(node) + "\n" for node in nodes))


def _sweep_node(planned: SweepPlan, folder: Path, status: str) -> dict[str, Any]:
    document = json.loads((folder / "sweep.json").read_text())
    kept = ("budget", "device", "sampler", "pruning", "asked", "score", "command", "commit", "question")
    text = folder / "summary.md"
    note = text.read_text().partition("## Sensitivity")[0][:4000] if text.exists() else document["question"]
    figures = sorted(str(path.relative_to(folder)) for path in folder.glob("figures/*.png"))
    return {
        "key": planned.id,
        "parent": "",
        "name": f"sweep of {planned.name} · {planned.plan.budget}",
        "status": status,
        "started": document["began"],
        "ended": None if status == "RUNNING" else round(time.time() * 1000),
        "tags": {"kind": "sweep", NOTE: note, **{name: str(document[name]) for name in kept}},
        "params": {path: canonical_json(field) for path, field in document["fields"].items()},
        "metrics": {},
        "runs": {},
        "files": ["summary.md", "trials.csv", "tuned.json", "budgets.csv", *figures],
    }


def _variant_node(
    planned: SweepPlan, variant: str, trials: Sequence[FrozenTrial], sweep: Mapping[str, Any]
) -> dict[str, Any]:
    """A variant: the scores of its trials by their number, and the best so far."""
    known = {trial.number: trial.user_attrs[OUTCOME]["score"] for trial in trials}
    scores = {number: float(score) for number, score in known.items() if score is not None}
    best = np.maximum if planned.ablation.higher_is_better else np.minimum
    so_far = best.accumulate(list(scores.values())).tolist() if scores else []
    return {
        **sweep,
        "key": f"{planned.id}/{variant}",
        "parent": planned.id,
        "name": variant,
        "tags": {"kind": "variant", "variant": variant},
        "params": {},
        "metrics": {"score": scores, "best": dict(zip(scores, so_far, strict=True))},
        "files": [],
    }


def trial_node(planned: SweepPlan, variant: str, trial: FrozenTrial) -> dict[str, Any]:
    """A trial that has ended: what it tried, what came of it, the curves of its runs."""
    outcome = trial.user_attrs[OUTCOME]
    names = [f"/{task}/{seed}" for seed in planned.plan.seeds for task in planned.ablation.tasks]
    runs = outcome["runs"] if outcome["same_as"] is None else []
    measured = ("score", "loss", "in_distribution", "steps", "seconds", "flops", "parameters")
    metrics: dict[str, dict[int, Any]] = {name: {0: outcome[name]} for name in measured}
    metrics["rung/loss"] = {step: abs(loss) for step, loss in trial.intermediate_values.items()}
    return {
        "key": f"{planned.id}/{variant}/{trial.number}",
        "parent": f"{planned.id}/{variant}",
        "name": f"{variant} · trial {trial.number}",
        "status": STATUSES.get(outcome["status"], "FAILED"),
        "started": round(outcome["started"] * 1000),
        "ended": round(outcome["ended"] * 1000),
        "tags": {"kind": "trial", "variant": variant, **{key: outcome[key] for key in ("status", "cause", "same_as")}},
        "params": planned.changes(trial.params),
        "metrics": metrics,
        "runs": dict(zip(names if len(names) > 1 else [""], runs, strict=False)),
        "files": [],
    }
