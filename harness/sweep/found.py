"""What a sweep has found, as far as it has come: tables, the answer, importances."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from optuna.trial import FrozenTrial, TrialState

from harness.record import write_atomically
from harness.schema import canonical_json
from harness.seeding import stable_hash
from harness.sweep.plan import SweepPlan
from harness.sweep.trials import OUTCOME


@dataclass(frozen=True)
class SweepOutcome:
    """How an invocation ended."""

    folder: Path
    table: pd.DataFrame  # a row a trial
    answer: dict[str, Any]  # the content of tuned.json
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 done, 1 a variant has no setting that trained, 130 interrupted."""
        if self.interrupted:
            return 130
        return int(any(each["changes"] is None for each in self.answer["variants"].values()))


def write_found(
    planned: SweepPlan, studies: dict[str, optuna.Study], folder: Path, *, interrupted: bool
) -> SweepOutcome:
    """Write the sweep's tables, figures and answer, as far as it has come."""
    from harness.report.sweep import write_sweep

    table = pd.concat([_table(planned, variant, study) for variant, study in studies.items()], ignore_index=True)
    answer = _answer(planned, studies, table)
    importances = pd.concat([_importance(planned, variant, study) for variant, study in studies.items()])
    write_atomically(folder / "tuned.json", json.dumps(answer, indent=1))
    write_atomically(folder / "trials.csv", table.to_csv(index=False))
    document = json.loads((folder / "sweep.json").read_text())
    write_sweep(folder, document, table, answer, importances)
    return SweepOutcome(folder, table, answer, interrupted)


COLUMNS = ("status", "cause", "score", "loss", "in_distribution", "steps", "seconds", "flops", "parameters", "same_as")


def _table(planned: SweepPlan, variant: str, study: optuna.Study) -> pd.DataFrame:
    """A row a trial of a variant, interrupted ones too, surplus ones not."""
    front = {trial.number for trial in study.best_trials} if planned.costs else set()
    rows = []
    for trial in study.get_trials(deepcopy=False):
        outcome = trial.user_attrs.get(OUTCOME)
        if outcome is None and (trial.state == TrialState.WAITING or not trial.params):
            continue
        row: dict[str, Any] = {"variant": variant, "trial": trial.number}
        changes = planned.changes(trial.params)
        row |= {path: canonical_json(value) if isinstance(value, dict) else value for path, value in changes.items()}
        status = "running" if trial.state == TrialState.RUNNING else "interrupted"
        row |= {name: (outcome or {"status": status}).get(name) for name in COLUMNS}
        row["front"] = trial.number in front
        row["rungs"] = json.dumps({step: abs(loss) for step, loss in sorted(trial.intermediate_values.items())})
        row["runs"] = " ".join((outcome or {}).get("runs", ()))
        row["host"] = (outcome or {}).get("host", "")
        rows.append(row)
    kept = ["variant", "trial", *planned.dimensions, *COLUMNS, "front", "rungs", "runs", "host"]
    numbers = ["score", "loss", "in_distribution", "steps", "seconds", "flops", "parameters", "same_as"]
    found = pd.DataFrame(rows, columns=kept)
    return found.assign(**{name: pd.to_numeric(found[name]).astype(float) for name in numbers})


def best_of(table: pd.DataFrame, *, higher_is_better: bool) -> pd.Series | None:
    """The trial with the best score of a variant's rows; among equal ones that with the lowest loss at the training
    lengths, then the first. Only those count whose runs all trained to the end: where nobody scores, one that
    diverged would do as well.
    """
    trained = table[table["status"] == "finished"]
    if trained.empty:
        return None
    ordered = trained.sort_values(["score", "loss", "trial"], ascending=[not higher_is_better, True, True])
    return ordered.iloc[0]


def _answer(planned: SweepPlan, studies: dict[str, optuna.Study], table: pd.DataFrame) -> dict[str, Any]:
    """The content of tuned.json."""
    return {
        "study": planned.name,
        "content": planned.content,
        "budget": planned.plan.budget,
        "device": planned.plan.device,
        "sampler": planned.sampler,
        "pruning": planned.pruning,
        "asked": planned.trials,
        "pilot_seeds": len(planned.plan.seeds),
        "costs": list(planned.costs),
        "score": planned.ablation.score,
        "higher_is_better": planned.ablation.higher_is_better,
        "fields": {path: dimension.document() for path, dimension in planned.dimensions.items()},
        "variants": {variant: _tuned(planned, variant, study, table) for variant, study in studies.items()},
    }


def _tuned(planned: SweepPlan, variant: str, study: optuna.Study, table: pd.DataFrame) -> dict[str, Any]:
    rows = table[table["variant"] == variant]
    tried = int((~rows["status"].isin(("interrupted", "running"))).sum())
    best = best_of(rows, higher_is_better=planned.ablation.higher_is_better)
    if best is None:
        return {"changes": None, "score": None, "loss": None, "setting": None, "tried": tried, "edges": {}}
    params = study.get_trials(deepcopy=False)[int(best["trial"])].params
    edges = {path: planned.dimensions[path].edge(value) for path, value in params.items()}
    return {
        "changes": planned.changes(params),
        "score": float(best["score"]),
        "loss": None if math.isnan(best["loss"]) else float(best["loss"]),
        "setting": int(best["trial"]),
        "tried": tried,
        "edges": {path: end for path, end in edges.items() if end},
    }


RESAMPLES = 50  # of a variant's trials, drawn with replacement
FEWEST = 8  # trials with a score, below which importances say nothing


def _importance(planned: SweepPlan, variant: str, study: optuna.Study) -> pd.DataFrame:
    """How much of the score's variance among the better quarter of settings each field explains (PED-ANOVA, Watanabe
    et al. 2023, arXiv:2304.10255): the mean over resampled trials, with the 5 % and the 95 % quantile. A field whose
    interval holds about what all would have alike, 1/number of fields, was not shown to matter more than the others.
    """
    columns = ["variant", "field", "importance", "low", "high", "settings"]
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    trials = [trial for trial in trials if trial.user_attrs.get(OUTCOME, {}).get("same_as") is None]
    if len(trials) < FEWEST or len({trial.values[0] for trial in trials}) < 2:
        rows = [(variant, path, math.nan, math.nan, math.nan, len(trials)) for path in planned.dimensions]
        return pd.DataFrame(rows, columns=columns)
    draw = np.random.default_rng(stable_hash(planned.id, variant))
    drawn = [_importances(study.directions, [trials[i] for i in draw.integers(0, len(trials), len(trials))])
             for _ in range(RESAMPLES)]  # fmt: skip
    found = pd.DataFrame([each for each in drawn if each])
    rows = []
    for path in planned.dimensions:
        values = found[path] if path in found else pd.Series(dtype=float)
        low, high = values.quantile(0.05), values.quantile(0.95)
        rows.append((variant, path, float(values.mean()), float(low), float(high), len(trials)))
    return pd.DataFrame(rows, columns=columns)


def _importances(directions: Sequence[optuna.study.StudyDirection], trials: list[FrozenTrial]) -> dict[str, float]:
    """Of some trials; empty where they cannot be told apart."""
    if len({trial.values[0] for trial in trials}) < 2:
        return {}
    study = optuna.create_study(directions=[directions[0]])
    study.add_trials(
        optuna.create_trial(params=t.params, distributions=t.distributions, value=t.values[0]) for t in trials
    )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
    try:
        return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
    except (ValueError, RuntimeError, ZeroDivisionError):  # a sample in which nothing varies
        return {}
