"""Finds the ablation that a name or a file means, and the name that its study has on disk.

`position` is `ablations/position.py`; anything that ends in `.py` or `.json` or has a slash in it is a user's file.
A study is called after its file, with dashes: `output_projection.py` is the study `output-projection`.
"""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from harness.schema import UserError, nearest
from harness.sources import ROOT, load_source

if TYPE_CHECKING:
    from harness.study import Ablation

ABLATIONS = ROOT / "ablations"
TAKEN = ("reference", "mlartifacts")  # folders of results that are no study's


@dataclass(frozen=True)
class Found:
    """An ablation, its study's name and the file that defines it."""

    name: str
    ablation: "Ablation"
    file: Path


def find_ablation(given: str) -> Found:
    """The one ablation that a name or a file means.

    Raises:
        UserError: no such name or file, the file raises, or it defines no ablation or several.
    """
    file = Path(given).expanduser() if is_file_name(given) else _file_of(given)
    name = study_name(given)
    if is_file_name(given) and name in ablation_files() and file.resolve() != ablation_files()[name]:
        raise UserError(f"{file}: the project has an ablation {name!r} of its own; give the file another name")
    if name in TAKEN:
        raise UserError(f"{file}: results/{name} is no study's folder; give the file another name")
    return Found(name, _read_json(file) if file.suffix == ".json" else the_ablation(load_source(file), file), file)


def is_file_name(given: str) -> bool:
    """Whether the user named a file, not an ablation of the project."""
    return "/" in given or given.endswith((".py", ".json"))


def study_name(given: str) -> str:
    """The study's folder in results: the file's stem, underscores as dashes."""
    return (Path(given).stem if is_file_name(given) else given).replace("_", "-")


def ablation_files() -> dict[str, Path]:
    """The project's ablations by name; `baseline.py` holds what they share."""
    files = sorted(set(ABLATIONS.glob("[!_]*.py")) - {ABLATIONS / "baseline.py"})
    return {study_name(file.name): file for file in files}


def _file_of(name: str) -> Path:
    known = ablation_files()
    if study_name(name) in known:
        return known[study_name(name)]
    here = Path(f"{name}.py")
    hint = f"for your own file write {here.name}" if here.exists() else nearest(name, list(known))
    raise UserError(f"there is no ablation {name!r}; {hint}")


def the_ablation(module: ModuleType, file: Path) -> "Ablation":
    """The one ablation that a module defines.

    Raises:
        UserError: it defines none, or several.
    """
    found = ablations_in(module)
    if not found:
        raise UserError(
            f"{file} defines no ablation; write `ablation = Ablation(...)` in it, as ablations/position.py does"
        )
    if len(found) > 1:
        raise UserError(f"{file} defines {len(found)} ablations ({', '.join(found)}); keep one a file")
    (ablation,) = found.values()
    return ablation


def ablations_in(module: ModuleType) -> dict[str, "Ablation"]:
    """The ablations in a module by the names they have there, each once."""
    from harness.study import Ablation

    found = {id(value): (name, value) for name, value in vars(module).items() if isinstance(value, Ablation)}
    return dict(found.values())


def _read_json(file: Path) -> "Ablation":
    from harness.study import Ablation

    try:
        return Ablation.parse(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from error
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
