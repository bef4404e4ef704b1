"""A variant's Optuna study: what it is asked first, and what becomes of its trials."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from harness.schema import canonical_json
from harness.seeding import stable_hash
from harness.space import Choice
from harness.sweep.plan import REDUCTION, RUNGS, SweepPlan
from harness.sweep.storage import FIELDS, try_again

OUTCOME = "outcome"  # what came of a trial: an attribute that is set before Optuna is told


def study_of(planned: SweepPlan, variant: str, store: BaseStorage) -> optuna.Study:
    """A variant's study, made if need be. Its first trial is the ablation's own setting; a grid's are all cells."""
    higher = planned.ablation.higher_is_better
    directions: list[Literal["maximize", "minimize"]] = ["maximize" if higher else "minimize"]
    directions += ["minimize"] * len(planned.costs)
    study = optuna.create_study(
        storage=store,
        study_name=f"{planned.name} · {variant} · {planned.id}",
        directions=directions,
        pruner=_pruner(planned),
        load_if_exists=True,
    )
    study.set_user_attr(FIELDS, len(planned.dimensions))
    if not study.get_trials(deepcopy=False):
        for params in _first(planned, variant):
            study.enqueue_trial(params, skip_if_exists=True)
    return study


def _first(planned: SweepPlan, variant: str) -> list[dict[str, Any]]:
    """Parameters that are tried before the sampler is asked."""
    if planned.sampler != "grid":
        own = planned.own(variant)
        return [] if own is None else [own]
    cells: list[dict[str, Any]] = [{}]
    for path, dimension in planned.dimensions.items():
        values = dimension.grid()
        labels = [dimension.label(value) for value in values] if isinstance(dimension, Choice) else values
        cells = [{**cell, path: label} for cell in cells for label in labels]
    return sorted(cells, key=lambda cell: stable_hash(planned.id, canonical_json(cell)))  # no corner comes last


def _pruner(planned: SweepPlan) -> optuna.pruners.BasePruner:
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934), or none."""
    if not planned.pruning:
        return optuna.pruners.NopPruner()
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=unit(planned), reduction_factor=REDUCTION)


def unit(planned: SweepPlan) -> int:
    """Steps of a trial at its first rung."""
    return max(1, planned.steps // REDUCTION**RUNGS)


def sampler_of(planned: SweepPlan, number: int) -> optuna.samplers.BaseSampler:
    """The sampler of the next trial. Seeded by how many count so far: a suggestion depends on what was told before it
    alone, and the first ones are the same for all variants.
    """
    seed = stable_hash(planned.id, "sampler", number) % 2**32
    return optuna.samplers.TPESampler(seed=seed) if planned.sampler == "tpe" else optuna.samplers.RandomSampler(seed)


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial is part of the budget: interrupted and surplus ones are not."""
    return trial.state != TrialState.FAIL or OUTCOME in trial.user_attrs


def close_interrupted(study: optuna.Study, variant: str, say: Callable[[str], None]) -> None:
    """Close what a killed sweep left running; nobody else may be running this one."""
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        if OUTCOME in trial.user_attrs:  # killed between the outcome and telling Optuna
            tell(study, trial.number, trial.user_attrs[OUTCOME])
            continue
        study.tell(trial.number, state=TrialState.FAIL)
        try_again(study, trial)
        say(f"{variant}: trial {trial.number} was interrupted; its parameters are tried again")


def tell(study: optuna.Study, number: int, outcome: Mapping[str, Any]) -> None:
    """Tell Optuna a trial's outcome. What diverged has a score as in a study; what failed or ran out of memory none."""
    values = outcome["values"]
    state = TrialState.COMPLETE if values else TrialState.FAIL
    state = TrialState.PRUNED if outcome["status"] == "pruned" else state
    study.tell(number, values, state=state, skip_if_finished=True)
