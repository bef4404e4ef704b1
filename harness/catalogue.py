"""What there is: components by axis, tasks, ablations; read from the classes, so that nothing needs registering."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from harness.locate import ablation_files, ablations_in, the_ablation
from harness.schema import Level, Spec, UserError
from harness.sources import load_source
from harness.spec import ModelSpec, TrainSpec
from harness.study import Ablation
from tasks.task import Task

AUTHORS = r"[A-Z][\w-]+(?:(?:, | & | and )[A-Z][\w-]+)*(?: et al\.)? \d{4}"
PAPER = re.compile(rf"({AUTHORS}), arXiv:(\d{{4}}\.\d{{4,5}})|arXiv:(\d{{4}}\.\d{{4,5}})")
CITATION = re.compile(r"\s*\([^()]*arXiv:[^()]*\)")
BOUNDS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"), (MinLen, "min_length", "length ≥"))


@dataclass(frozen=True)
class FieldEntry:
    """A field of a spec: its name, type, default and bounds, as text."""

    name: str
    type: str
    default: str
    bounds: str

    def __str__(self) -> str:
        """`base = 10000.0 (> 1)`."""
        return f"{self.name} = {self.default}" + (f" ({self.bounds})" if self.bounds else "")


@dataclass(frozen=True)
class LevelEntry:
    """A level of an axis: what it is, where it comes from, what can be set; `fields` in the order of the class."""

    name: str
    what: str
    papers: tuple[str, ...]
    fields: tuple[FieldEntry, ...]


@dataclass(frozen=True)
class AblationEntry:
    """An ablation of the project; `error` says why it cannot be loaded, and then the rest is empty."""

    name: str
    question: str = ""
    claims: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ()
    error: str = ""


def components() -> dict[str, list[LevelEntry]]:
    """The levels of every axis, by its path in a RunSpec (`model.position`)."""
    return {path: levels(axis) for path, axis in axes().items()}


def sizes() -> list[FieldEntry]:
    """The fields of model and training that are numbers, by path: axes too, without levels."""
    return [_field(path, field) for path, field in _fields() if not _is_axis(field)]


def axes() -> dict[str, type[Level]]:
    """The fields of a RunSpec's model and training that are chosen among levels, each with the base of these."""
    return {path: cast("type[Level]", field.annotation) for path, field in _fields() if _is_axis(field)}


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    for name, field in ModelSpec.model_fields.items():
        yield f"model.{name}", field
    for name, field in TrainSpec.model_fields.items():
        yield f"train.{name}", field


def _is_axis(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Level)


def tasks() -> list[LevelEntry]:
    """Every task."""
    return levels(Task)


def levels(axis: type[Level]) -> list[LevelEntry]:
    """The levels of an axis as entries."""
    return [level(kind) for kind in axis.levels().values()]


def level(kind: type[Level]) -> LevelEntry:
    """What a level's class says of itself."""
    text = " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split())
    papers = tuple(_paper(*found) for found in PAPER.findall(" ".join((kind.__doc__ or "").split())))
    fields = tuple(_field(name, field) for name, field in kind.model_fields.items())
    return LevelEntry(kind.__name__, CITATION.sub("", text), papers, fields)


def _paper(authors: str, cited: str, bare: str) -> str:
    return f"{authors.strip()}, arXiv:{cited}" if cited else f"arXiv:{bare}"


def _field(name: str, field: FieldInfo) -> FieldEntry:
    kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    bounds = [
        f"{sign} {getattr(bound, attribute)}"
        for bound in field.metadata
        for mark, attribute, sign in BOUNDS
        if isinstance(bound, mark)
    ]
    return FieldEntry(name, kind, "required" if field.is_required() else _text(field.default), ", ".join(bounds))


def _text(value: Any) -> str:
    if not isinstance(value, Spec):
        return str(value)
    return f"{value.kind}({', '.join(f'{name}={_text(inner)}' for name, inner in value)})"


def ablations() -> list[AblationEntry]:
    """The project's ablations, without files that hold none; one that cannot be loaded hides none of the others."""
    return [entry for name, file in ablation_files().items() for entry in _ablations_of(name, file)]


def _ablations_of(name: str, file: Path) -> Iterator[AblationEntry]:
    try:
        module = load_source(file)
        if ablations_in(module):
            yield _entry(name, the_ablation(module, file))
    except UserError as error:
        yield AblationEntry(name, error=str(error))


def _entry(name: str, found: Ablation) -> AblationEntry:
    return AblationEntry(
        name=name,
        question=found.question,
        claims=found.claims,
        axes=found.axes,
        variants=tuple(found.variants),
        tasks=tuple(found.tasks),
        budgets=tuple(found.budgets),
    )


def document(what: str | None) -> dict[str, Any]:
    """The catalogue, or the part of it that is asked for, as plain data."""
    parts: dict[str, Any] = {}
    if what in (None, "components"):
        parts["components"] = {path: [asdict(entry) for entry in entries] for path, entries in components().items()}
        parts["sizes"] = [asdict(entry) for entry in sizes()]
    if what in (None, "tasks"):
        parts["tasks"] = [asdict(entry) for entry in tasks()]
    if what in (None, "ablations"):
        parts["ablations"] = [asdict(entry) for entry in ablations()]
    return parts
