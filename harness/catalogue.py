"""What there is: components by axis, tasks, ablations; read from the classes, so that nothing needs registering."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from harness.cost import (
    BYTES,
    active_parameters,
    all_score_elements,
    cache_elements,
    decoding_flops,
    empty_model,
    operations,
    parameters,
    parameters_by_part,
    score_elements,
    training_passes,
)
from harness.locate import ablation_files, ablations_in, is_file_name, the_ablation
from harness.presets import PRESETS
from harness.schema import Level, Spec, UserError, nearest, read_json
from harness.sources import load_source
from harness.spec import ModelSpec, RunSpec, TrainSpec
from harness.study import Ablation
from tasks.task import Task

AUTHORS = r"[A-Z][\w-]+(?:(?:, | & | and )[A-Z][\w-]+)*(?: et al\.)? \d{4}"
PAPER = re.compile(rf"({AUTHORS}), arXiv:(\d{{4}}\.\d{{4,5}})|arXiv:(\d{{4}}\.\d{{4,5}})")
CITATION = re.compile(r"\s*\([^()]*arXiv:[^()]*\)")
BOUNDS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"), (MinLen, "min_length", "length ≥"))


@dataclass(frozen=True)
class FieldEntry:
    """A field of a spec: its name, type, default and bounds, as text; the bounds say also what no value means."""

    name: str
    type: str
    default: str
    bounds: str

    def __str__(self) -> str:
        """`base = 10000.0 (> 1)`."""
        return f"{self.name} = {self.default}" + (f" ({self.bounds})" if self.bounds else "")


@dataclass(frozen=True)
class LevelEntry:
    """A level of an axis: what it is, where it comes from, what can be set; `fields` in the order of the class;
    whether it is what a spec has when nothing is said; of a level that decides about the kernel of attention, where
    flash runs, and why it does not elsewhere.
    """

    name: str
    module: str
    what: str
    papers: tuple[str, ...]
    fields: tuple[FieldEntry, ...]
    default: bool = False
    kernel: str = ""


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
    found = {}
    for path, field in _fields():
        if _is_axis(field):
            axis = cast("type[Level]", field.annotation)
            entries = [
                _with_kernel(entry, kind, path)
                for entry, kind in zip(levels(axis), axis.levels().values(), strict=True)
            ]
            found[path] = [_as_default(entry, field.default) for entry in entries]
    return found


def _with_kernel(entry: LevelEntry, kind: type[Level], path: str) -> LevelEntry:
    """The entry of a level that flash attention may be kept off by says so, of its defaults in a decoder."""
    if not hasattr(kind, "flash_obstacle") or any(field.is_required() for field in kind.model_fields.values()):
        return entry
    model = ModelSpec().replaced({path.removeprefix("model."): kind()})
    obstacles = {device: model.flash_obstacle(device) for device in ("cpu", "cuda")}
    free = " and ".join(device for device, obstacle in obstacles.items() if not obstacle)
    kept_off = "; ".join(f"not on {device}: {obstacle}" for device, obstacle in obstacles.items() if obstacle)
    if not free:
        kept_off = f"no flash: {obstacles['cuda']}"
    return replace(entry, kernel="; ".join(filter(None, (f"flash on {free}" if free else "", kept_off))))


def _as_default(entry: LevelEntry, default: Level) -> LevelEntry:
    """The entry of the level that is the default says which fields that one has."""
    if entry.name != default.kind:
        return entry
    fields = (replace(field, default=_text(getattr(default, field.name))) for field in entry.fields)
    return replace(entry, fields=tuple(fields), default=True)


def sizes() -> list[FieldEntry]:
    """The fields of model and training that are numbers, by path: axes too, without levels."""
    return [_field(path, field) for path, field in _fields() if not _is_axis(field)]


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    for prefix, spec in (("model", ModelSpec), ("train", TrainSpec)):
        yield from _walk(prefix, spec)


def _walk(prefix: str, spec: type[Spec]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in spec.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Spec) and not issubclass(inner, Level):
            yield from _walk(f"{prefix}.{name}", inner)
        else:
            yield f"{prefix}.{name}", field


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
    return LevelEntry(kind.__name__, kind.__module__, CITATION.sub("", text), papers, fields)


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
    bounds += [field.description] if field.description else []
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
    if what in (None, "presets"):
        parts["presets"] = [{"name": name, "what": preset.what} for name, preset in PRESETS.items()]
    return parts


LONGEST = 10_000_000  # tokens: far beyond, torch cannot number the elements of a score matrix
AS_USUAL = TrainSpec()
NAME_A_SPEC = "name a preset, or a spec's JSON such as the spec.json of a run"


def model_named(name: str, vocab_size: int | None) -> tuple[str, ModelSpec, int, TrainSpec]:
    """The model of a preset, or of a file that holds a ModelSpec or a RunSpec as JSON: its name, spec, vocabulary and
    training.

    Raises:
        UserError: neither a preset nor such a file.
    """
    if name in PRESETS:
        return name, PRESETS[name].model, vocab_size or PRESETS[name].vocab_size, PRESETS[name].train
    spec = spec_named(name)
    if isinstance(spec, RunSpec):
        return name, spec.model, vocab_size or spec.task.vocab_size, spec.train
    return name, spec, vocab_size or 32_000, AS_USUAL


def spec_named(name: str) -> ModelSpec | RunSpec:
    """The model of a preset, or the spec that a file holds as JSON.

    Raises:
        UserError: neither a preset nor such a file.
    """
    if name in PRESETS:
        return PRESETS[name].model
    file = Path(name).expanduser()
    if not is_file_name(name) and not file.exists():
        raise UserError(f"{name!r} is neither a preset nor a file; {nearest(name, PRESETS)}")
    if not file.is_file():
        raise UserError(f"{file}: {'this is a folder' if file.is_dir() else 'there is no such file'}; {NAME_A_SPEC}")
    if file.suffix == ".py":
        raise UserError(f"{file}: this is Python, not JSON; {NAME_A_SPEC}")
    try:
        document = read_json(file.read_text())
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: this is not text ({error}); {NAME_A_SPEC}") from error
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"{file}: a spec is a JSON object; {NAME_A_SPEC}")
    try:
        return RunSpec.parse(document) if "task" in document else ModelSpec.parse(document)
    except UserError as error:
        hint = " (levels and tasks of your own file: --load FILE)" * ("unknown " in str(error))
        raise UserError(f"{file}: {error}{hint}") from error


def cost_document(
    name: str, spec: ModelSpec, vocab_size: int, lengths: list[int], number: str, train: TrainSpec = AS_USUAL
) -> dict[str, Any]:
    """What `harness cost` says, as plain data; of `forward_flops` those of attention's products stand beside them,
    `longest` is how many tokens the positions take, None without end.

    Raises:
        UserError: the model cannot take a length.
    """
    if lengths[-1] > LONGEST:
        raise UserError(f"--length {lengths[-1]}: this cannot be counted; choose lengths up to {LONGEST}")
    model = empty_model(spec, vocab_size)
    return {
        "model": name,
        "vocab_size": vocab_size,
        "number": number,
        "longest": spec.position.limit(),
        "parameters": parameters(model),
        "active_parameters": active_parameters(model),
        "parameters_by_part": parameters_by_part(model),
        "lengths": [_cost_at(spec, vocab_size, length, BYTES[number], training_passes(train)) for length in lengths],
    }


def _cost_at(spec: ModelSpec, vocab_size: int, length: int, size: int, passes: int) -> dict[str, Any]:
    forward, products = operations(spec, vocab_size, length, length if spec.architecture.has_encoder() else 0)
    cache = cache_elements(spec, length) * size
    return {
        "length": length,
        "forward_flops": forward,
        "attention_product_flops": products,
        "training_flops": forward * passes,
        "decoding_flops": decoding_flops(spec, vocab_size, length),
        "score_elements_a_head": score_elements(spec, length),
        "score_bytes_a_head": score_elements(spec, length) * size,
        "score_bytes": all_score_elements(spec, length) * size,
        "cache_bytes_a_layer": cache,
        "cache_bytes": cache * spec.num_layers,
    }
