"""From names to the folders of runs or studies."""

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase as KEYS
from typing import Literal

from harness.locate import study_name
from harness.results import existing, run_folders
from harness.schema import UserError, nearest
from harness.wording import listed

Kind = Literal["run", "study"]


def find(names: Sequence[str], results: Path) -> tuple[Kind, list[Path]]:
    """The folders of what is to be compared, in its order, and what it is.

    Raises:
        UserError: fewer than two names or too many, one that means nothing or several things, the same thing twice, or
            runs and studies together.
    """
    if not 2 <= len(names) <= len(KEYS):
        raise UserError(f"a comparison takes 2 to {len(KEYS)} names, not {len(names)}; name runs, or studies")
    found = [_meant(name, results) for name in names]
    kinds = {kind: name for name, (kind, _) in zip(names, found, strict=True)}
    if len(kinds) > 1:
        raise UserError(
            f"{kinds['run']!r} is a run and {kinds['study']!r} a study; compare runs with runs, or studies with studies"
        )
    seen: dict[Path, str] = {}
    for name, (kind, folder) in zip(names, found, strict=True):
        if folder.resolve() in seen:
            raise UserError(f"{seen[folder.resolve()]!r} and {name!r} are the same {kind}; name two different ones")
        seen[folder.resolve()] = name
    return found[0][0], [folder for _, folder in found]


def _meant(name: str, results: Path) -> tuple[Kind, Path]:
    """The one run or study that a name means."""
    candidates: list[tuple[Kind, Path]] = [("study", folder) for folder in _study_folders(name, results)]
    candidates += [("run", folder) for folder in run_folders(name, results)]
    found = {folder.resolve(): (kind, folder) for kind, folder in candidates}
    if not found:
        raise UserError(_unknown(name, results))
    if len(found) > 1:
        each = listed([f"the {kind} {folder}" for kind, folder in found.values()])
        raise UserError(f"{name!r} means {each}; name the folder of one, with a slash in it")
    return next(iter(found.values()))


def _study_folders(name: str, results: Path) -> list[Path]:
    """A study's folder or its `study.json`, or the name of one in the results folder, as other commands take it."""
    given = existing(name)
    folders = [given.parent if given.name == "study.json" else given] if given is not None else []
    if "/" not in name or name.endswith((".py", ".json")):
        folders.append(results / study_name(name))
    return [folder for folder in folders if existing(str(folder / "study.json"))]


def _unknown(name: str, results: Path) -> str:
    given = existing(name)
    if given is not None and (given / "provenance.json").exists():
        study = given.resolve().name
        return f"{given}: a published report holds no records; run `harness ablate {study}` and compare {study!r}"
    known = [path.parent.name for path in sorted(results.glob("*/study.json"))]
    place = f"{given}: this is" if given is not None else f"{name!r} is"
    remedy = f"{nearest(study_name(name), known)} (studies)" if known else f"there is no study in {results}"
    return (
        f"{place} neither a run nor a study; name a run's fingerprint, MLflow run id or folder (a study's runs.csv has "
        f"them), or a study: {remedy}"
    )
