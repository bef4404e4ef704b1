"""Tunes named fields for each variant with Optuna, equal budgets for all: the only import of optuna.

Each variant has an Optuna study; a trial of it is a set of ordinary runs, one a task and pilot seed, on samples that
the final comparison never sees. They lie in the sweep's own folder, `results/NAME/sweep/runs/`, although their
fingerprints differ from those of all final runs, too: thousands of them would drown the study's own.

This process alone suggests, judges and records trials, and `harness.engine`'s workers run what they consist of. So a
killed worker costs steps and never a trial, no worker needs Optuna, and the journal file has one writer. Several
machines share a sweep through `storage`, a database: each runs this, and takes over the trials of one that is gone.

What is known of a trial is its `outcome`, an attribute that is set before Optuna is told. A trial that was closed
without one was interrupted: it counts for nothing, and its parameters wait to be tried again.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from harness.conduct import HASTE, PATIENCE, heeded, locked, make_writable, resolve_jobs
from harness.machine import commit, environment
from harness.record import write_atomically
from harness.study import Ablation
from harness.sweep.found import SweepOutcome, best_of, write_found
from harness.sweep.nodes import note_all
from harness.sweep.plan import SweepPlan, option_sources, plan_sweep
from harness.sweep.storage import closing, database, open_storage
from harness.sweep.sweeper import Sweeper
from harness.sweep.trials import close_interrupted, study_of
from harness.tuned import sweep_folder
from harness.wording import listed

__all__ = ["SweepOutcome", "SweepPlan", "best_of", "open_storage", "plan_sweep", "run_sweep"]


def run_sweep(
    ablation: Ablation,
    *,
    name: str,
    storage: str | None = None,
    jobs: int | Literal["auto"] = "auto",
    results: str | Path = "results",
    say: Callable[[str], None] = lambda line: None,
    tracking_uri: str | None = None,
    command: str = "",
    **asked: Any,
) -> SweepOutcome:
    """Run what is left of a sweep (`plan_sweep` takes what is `asked`) and write what it found into
    `results/name/sweep`.

    Finished trials are not done again, interrupted ones are closed and their parameters tried again. Ctrl-C (and
    SIGTERM, SIGHUP) saves and stops.

    Raises:
        UserError: the plan cannot be made, folder or storage cannot be written, another process runs the sweep.
    """
    from harness.tracking import TreeMirror, default_uri
    from harness.tracking.uri import check

    planned = plan_sweep(name, ablation, **asked)
    sources = tuple(sorted({*map(str, planned.plan.sources()), *option_sources(planned.dimensions)}))
    results = Path(results).expanduser().absolute()
    folder = sweep_folder(results, name)
    uri = tracking_uri or default_uri(results)
    check(uri)
    with contextlib.ExitStack() as stack:
        if storage is not None:  # nothing is written where it cannot be opened
            store = stack.enter_context(closing(open_storage(storage, folder)))
            stack.enter_context(database(storage))
        make_writable(folder)
        if storage is None:
            stack.enter_context(locked(folder, f"{name}/sweep"))
            store = open_storage(storage, folder)
        signals = stack.enter_context(heeded())
        _announce(planned, folder, say)
        studies = {variant: study_of(planned, variant, store) for variant in planned.variants}
        if storage is None:
            for variant, study in studies.items():
                close_interrupted(study, variant, say)
        write_atomically(folder / "sweep.json", json.dumps(_describe(planned, storage, command, uri), indent=1))
        workers = resolve_jobs(jobs, planned.plan.device)
        sweeper = Sweeper(planned, studies, store, folder, sources, say)
        mirror = TreeMirror(uri, folder, f"{name}-sweep")
        note_all(planned, studies, folder, "RUNNING")
        mirror.start()
        status = "KILLED"
        try:
            sweeper.work(workers, signals)
            outcome = write_found(planned, studies, folder, interrupted=signals.came)
            status = "KILLED" if signals.came else "FINISHED"
        finally:
            note_all(planned, studies, folder, status)
            mirror.close(HASTE if signals.came else PATIENCE)
        return outcome


def _describe(planned: SweepPlan, storage: str | None, command: str, uri: str) -> dict[str, Any]:
    from harness.tracking.uri import without_password

    return {
        "study": planned.name,
        "id": planned.id,
        "content": planned.content,
        "question": planned.ablation.question,
        "budget": planned.plan.budget,
        "device": planned.plan.device,
        "sampler": planned.sampler,
        "pruning": planned.pruning,
        "asked": planned.trials,
        "seeds": list(planned.plan.seeds),
        "variants": planned.variants,
        "tasks": list(planned.ablation.tasks),
        "fields": {path: dimension.document() for path, dimension in planned.dimensions.items()},
        "score": planned.ablation.score,
        "higher_is_better": planned.ablation.higher_is_better,
        "costs": list(planned.costs),
        "gate": planned.document["gate"],
        "baseline": planned.ablation.baseline,
        "storage": "journal.log" if storage is None else without_password(storage),
        "tracking_uri": without_password(uri),
        "command": without_password(command),
        "began": round(time.time() * 1000),
        "commit": commit(),
        "environment": environment(),
    }


def _announce(planned: SweepPlan, folder: Path, say: Callable[[str], None]) -> None:
    """What is about to be done, and what of an earlier sweep is not used."""
    runs = len(planned.plan.seeds) * len(planned.ablation.tasks)
    say(
        f"{planned.name}: {planned.trials} trials of {listed(list(planned.dimensions))} for each of "
        f"{len(planned.variants)} variants, {runs} runs each, budget {planned.plan.budget}, {planned.plan.device}, "
        f"{planned.sampler}{'' if planned.pruning else ', no pruning'}"
    )
    if planned.costs:
        say(f"several objectives (score, {listed(planned.costs)}): a Pareto front, and no pruning")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if json.loads((folder / "sweep.json").read_text()).get("id") != planned.id:
            say("an earlier sweep had another content, sampler or device; its trials are kept and not used")
