"""What a sweep found, as data: `results/NAME/sweep/tuned.json`, and the ablation that it makes of one.

Knows no optimiser: reading what was tuned costs no import of one.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.schema import UserError, canonical_json, is_within, quoted
from harness.space import Dimension
from harness.study import Ablation, Budget

FILE = "tuned.json"


def sweep_folder(results: Path, name: str) -> Path:
    """Where the sweep of an ablation lives."""
    return results / name / "sweep"


def dimensions(ablation: Ablation, budget: str) -> dict[str, Dimension]:
    """What is tuned, over which values, the same for every variant.

    Raises:
        UserError: there is no such budget, or nothing to tune.
    """
    first = next(iter(ablation.tasks))
    specs = [ablation.run_spec(v, first, seed=0, device="cpu", budget=budget) for v in ablation.variants]
    return ablation.space.dimensions(specs, ablation.axes)


def asked_for(ablation: Ablation, seeds: int | None, costs: Sequence[str] | None) -> Ablation:
    """The ablation with what a command line says of its space.

    Raises:
        UserError: a number of seeds or a cost that cannot be.
    """
    given = {"seeds": seeds, "costs": None if costs is None else list(costs)}
    said = {key: value for key, value in given.items() if value is not None}
    checked = ablation.space.replaced(said)
    # Only these two: levels among the options of a field stay what they are, and so known by their files.
    space = ablation.space.model_copy(update={key: getattr(checked, key) for key in said})
    return ablation.model_copy(update={"space": space})


def content(ablation: Ablation, budget: str) -> str:
    """16 hex digits of what a sweep's answer depends on: every variant's runs, how they are scored, what is tuned."""
    identity = {
        "runs": {
            f"{variant} · {task}": ablation.run_spec(variant, task, seed=0, device="cpu", budget=budget).fingerprint()
            for variant in ablation.variants
            for task in ablation.tasks
        },
        "score": [ablation.score, ablation.higher_is_better],
        "fields": {path: dimension.document() for path, dimension in dimensions(ablation, budget).items()},
        "seeds": ablation.space.seeds,
        "costs": list(ablation.space.costs),
    }
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]


def read_tuned(results: Path, name: str, ablation: Ablation, budget: str) -> dict[str, Any]:
    """The answer of an ablation's sweep.

    Raises:
        UserError: there is none, it is corrupt, of another content or budget, not done, or has nothing for a variant.
    """
    path = sweep_folder(results, name) / FILE
    command = f"`harness sweep {name} --budget {budget}`"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        known, swept, asked = found["variants"], found["budget"], found["asked"]
        tried = {variant: known[variant]["tried"] for variant in ablation.variants if variant in known}
    except FileNotFoundError:
        raise UserError(f"--tuned: {path} does not exist; run {command} first") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--tuned: {path} is corrupt ({error}); run {command} again, which rewrites it") from None
    if swept != budget:
        raise UserError(f"--tuned: {path} was tuned for budget {swept!r}, not {budget!r}; run {command} first")
    # What the sweep was asked for on its command line stands in its answer.
    if found.get("content") != content(asked_for(ablation, found.get("pilot_seeds"), found.get("costs")), budget):
        raise UserError(f"--tuned: {path} was tuned for another content of {name!r}; run {command} again")
    if len(set(tried.values())) > 1 or any(count != asked for count in tried.values()):
        counts = ", ".join(f"{quoted(variant)} {count}" for variant, count in tried.items())
        raise UserError(f"--tuned: {path} has unequal budgets or is not done ({counts} of {asked}); finish {command}")
    if without := [variant for variant in ablation.variants if known[variant]["changes"] is None]:
        raise UserError(
            f"--tuned: no setting of {quoted(without[0])} trained to the end; widen the ablation's space and run "
            f"{command} again"
        )
    return found


def tuned_ablation(ablation: Ablation, budget: str, found: Mapping[str, Any]) -> Ablation:
    """The ablation with each variant's own tuned fields, for one budget, whose other changes stay."""
    paths = list(found["fields"])
    own = ablation.budget(budget)
    changes = {path: value for path, value in own.changes.items() if not is_within(path, paths)}
    variants = {
        variant: {**fields, **found["variants"][variant]["changes"]} for variant, fields in ablation.variants.items()
    }
    fields = {name: getattr(ablation, name) for name in type(ablation).model_fields}
    return Ablation(
        **{
            **fields,
            "axes": (*ablation.axes, *paths),
            "variants": variants,
            "budgets": {budget: Budget(seeds=own.seeds, changes=changes)},
            "space": type(ablation.space)(),
        }
    )


def provenance(found: Mapping[str, Any]) -> dict[str, Any]:
    """What `study.json` says of the tuning."""
    kept = ("content", "sampler", "pruning", "asked", "pilot_seeds", "fields")
    edges = {variant: answer["edges"] for variant, answer in found["variants"].items() if answer["edges"]}
    return {key: found[key] for key in kept} | {"edges": edges}
