"""The strict base of every spec: frozen, unknown keys refused, tagged by kind, canonical JSON, fingerprint.

Knows pydantic and the standard library, nothing else of the project.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast, get_args, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelMetaclass
else:
    _ModelMetaclass = type(BaseModel)

UNKNOWN = "unknown_field"  # a type of error beside those of pydantic
STAYS = "a spec stays as it is; `spec.replace(path, value)` is a changed copy"

# Packages whose outputs are versioned by `result_version`; any other source is identified by its text.
OWN_PACKAGES = ("harness", "tasks", "ablations")


class UserError(ValueError):
    """Something the user wrote cannot be done: one sentence with the path, the value and the remedy."""


@dataclass(frozen=True)
class Changes:
    """Marks what a spec field changes when it is flipped; a test flips every field and sees exactly that.

    Raises:
        UserError: that is no word for it.
    """

    what: Literal["parameters", "outputs", "loss", "data", "schedule", "updates", "evaluation", "hardware"]

    def __post_init__(self) -> None:
        words = list(get_args(get_type_hints(Changes)["what"]))
        if self.what not in words:
            raise UserError(
                f"Changes({self.what!r}): this is nothing that a field changes; {nearest(self.what, words)}"
            )


def quoted(name: str) -> str:
    """A user's name in a sentence: in quotation marks where a comma in it would look like the sentence's own."""
    return f"“{name}”" if "," in name else name


def shown(value: object) -> str:
    """A user's value in a sentence: what Python calls it, on one line of 60 characters at most."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:59]}…"


def closest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """The known name that looks most like one; empty where none does."""
    close = get_close_matches(name.lower(), [k.lower() for k in known], n=1, cutoff=0.5)
    return next((k for k in known if close and k.lower() == close[0]), "")


def nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """The remedy clause for an unknown name: the closest known one, then all of them."""
    match = closest(name, known)
    hint = f"did you mean {match!r}? " if match else ""
    return f"{hint}known: {', '.join(repr(k) if ',' in k else k for k in sorted(known)) or 'none'}"


class _Refusing(_ModelMetaclass):
    """Has a spec that is written in Python refused in the sentence that its document would be.

    Not in `__init__`, which pydantic would call for the specs inside a document too: their paths would be lost.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args:
            name = next(iter(cast("type[BaseModel]", cls).model_fields), "")
            remedy = f"write {cls.__name__}({name}={shown(args[0])})" if name else "it has none"
            raise TypeError(f"{cls.__name__} takes its fields by name, not {shown(args[0])}; {remedy}")
        try:
            return super().__call__(**kwargs)
        except ValidationError as error:
            raise UserError(explain(error, owner=cls.__name__)) from None


class Spec(BaseModel, metaclass=_Refusing):
    """Strict data: frozen, keyword-only, no unknown keys, no coercion, no NaN.

    `result_version` is raised when the same fields start to give other results; fingerprints include it.

    Raises:
        UserError: a field is unknown or impossible, or fields do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)
    result_version: ClassVar[int] = 1

    @model_validator(mode="wrap")
    @classmethod
    def _itself(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Refuses a subclass of what is no axis: its own fields would vanish from the document."""
        if isinstance(value, cls) and type(value) is not cls and not issubclass(cls, Level):
            raise ValueError(f"{type(value).__name__} extends {cls.__name__}, which is no axis; use {cls.__name__}")
        return handler(value)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        """Names what is unknown together with its owner; reads a JSON list as the tuple that it stands for."""
        if not isinstance(value, Mapping):
            return value
        for name in value:
            if name not in cls.model_fields:
                words = {"owner": cls.__name__, "hint": nearest(str(name), cls._names())}
                unknown = PydanticCustomError(UNKNOWN, "there is no such field in {owner}; {hint}", words)
                raise ValidationError.from_exception_data(
                    cls.__name__, [InitErrorDetails(type=unknown, loc=(name,), input=value[name])]
                )
        return {name: _tuples(inner) for name, inner in value.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        self.at(name)
        raise UserError(f"{name} = {shown(value)}: {STAYS}")

    def __delattr__(self, name: str) -> None:
        self.at(name)
        raise UserError(f"del {name}: {STAYS}")

    def document(self) -> dict[str, Any]:
        """The spec as plain JSON data; `type(spec).parse(spec.document()) == spec`."""
        return self.model_dump(mode="json")

    @classmethod
    def parse(cls, document: Mapping[str, Any] | str) -> Self:
        """The spec that a JSON document (text or data) describes.

        Raises:
            UserError: naming the path and the value, where the document is not such a spec.
        """
        text = document if isinstance(document, str) else json.dumps(document)
        if isinstance(document, str):
            read_json(document)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise UserError(explain(error)) from None

    def replace(self, path: str, value: Any) -> Self:
        """A copy with the field at a dotted path (`model.position.base`) set to `value` and everything validated anew.

        Raises:
            UserError: unknown path (with the nearest name), impossible value or combination.
        """
        return self.replaced({path: value})

    def replaced(self, changes: Mapping[str, Any]) -> Self:
        """A copy with several fields set at once, so that they need to fit together only in the end; a level may come
        with fields of its own (`{"model.position": RoPE(), "model.position.base": 500.0}`).

        Raises:
            UserError: as `replace`.
        """
        document = self.document()
        for path, value in changes.items():
            if not any(path.startswith(f"{other}.") for other in changes):
                self.at(path)
            *parents, name = path.split(".")
            inner: Any = document
            for parent in parents:
                inner = inner.get(parent) if isinstance(inner, dict) else None
            if not isinstance(inner, dict):
                raise UserError(f"{path}: there is nothing to change inside of a value")
            inner[name] = _plain(value)
            _check_data(path, inner[name])
        return type(self).parse(document)

    def at(self, path: str) -> Any:
        """The value at a dotted path.

        Raises:
            UserError: there is no such field, with the nearest name.
        """
        value: Any = self
        for name in path.split("."):
            if not isinstance(value, Spec) or name not in type(value).model_fields:
                known = value._names() if isinstance(value, Spec) else []
                owner = value.kind if isinstance(value, Spec) else repr(value)
                raise UserError(f"{path}: {owner} has no field {name!r}; {nearest(name, known)}")
            value = getattr(value, name)
        return value

    def flat(self) -> dict[str, Any]:
        """`flatten` of this spec's document."""
        return flatten(self.document())

    def specs(self) -> Iterator["Spec"]:
        """This spec and every spec inside it."""
        yield self
        for name in type(self).model_fields:
            value = getattr(self, name)
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
            for part in inner:
                if isinstance(part, Spec):
                    yield from part.specs()

    @property
    def kind(self) -> str:
        """The name of the level: its class's name."""
        return type(self).__name__

    @classmethod
    def _names(cls) -> list[str]:
        return list(cls.model_fields)


class Level(Spec):
    """One level of an axis, open to users: subclass the axis's base, in any file, and use it.

    A level serialises as itself with its class name as `kind`, so that the fields of a user's subclass survive the
    round trip; parsing an axis's base finds the subclass by that name among those imported so far.
    """

    @model_serializer(mode="wrap")
    def _tagged(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return {"kind": self.kind, **{name: _plain(value) for name, value in fields.items()}}

    @model_validator(mode="wrap")
    @classmethod
    def _dispatch(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, Mapping):
            if isinstance(value, cls):
                return value
            raise ValueError(f"expected a level of {cls.__name__}{_written(cls, value)}")
        fields = dict(value)
        if "kind" not in fields and cls._is_base():
            raise ValueError(
                f"its `kind` is missing; name a level of {cls.__name__}, e.g. {_example(cls)}; "
                f"{nearest('', cls.levels())}"
            )
        name = str(fields.pop("kind", cls.__name__))
        kind = cls._named(name)
        return handler(fields) if kind is cls else kind.model_validate({"kind": name, **fields})

    @classmethod
    def levels(cls) -> dict[str, type[Self]]:
        """The concrete levels of this axis by name, users' own included."""
        return {kind.__name__: kind for kind in cls._concrete()}

    @classmethod
    def _is_base(cls) -> bool:
        """Whether only its subclasses are levels."""
        return inspect.isabstract(cls) or Level in cls.__bases__

    @classmethod
    def _concrete(cls) -> Iterator[type[Self]]:
        if not cls._is_base():
            yield cls
        for sub in cls.__subclasses__():
            yield from sub._concrete()

    @classmethod
    def _named(cls, name: str) -> type[Self]:
        """The level of a name; of a file that was loaded again, what it defined last."""
        found = {kind.__module__: kind for kind in cls._concrete() if kind.__name__ == name}
        if not found:
            raise ValueError(f"unknown {cls.__name__} level {name!r}; {nearest(name, cls.levels())}")
        if len(found) > 1:
            raise ValueError(f"{name} is defined in {' and in '.join(found)}; rename one")
        return next(iter(found.values()))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    return value.document() if isinstance(value, Spec) else value


def _check_data(path: str, value: Any) -> None:
    """Raise `UserError` for what no document can hold."""
    try:
        json.dumps(value)
    except TypeError as error:
        if isinstance(value, type):
            raise UserError(f"{path} = {value.__name__}: this is a class; write {value.__name__}()") from error
        raise UserError(f"{path} = {shown(value)}: a spec holds numbers, text and levels; give one of them") from error


def _example(cls: type[Level], name: str = "") -> str:
    name = name or next(iter(cls.levels()), cls.__name__)
    return f'{name}() (as JSON {{"kind": "{name}"}})'


def _written(cls: type[Level], value: Any) -> str:
    """How to write the level that a class or a text names; without one, how to write any."""
    if isinstance(value, type) and issubclass(value, cls):
        return f"; this is a class; write {value.__name__}()"
    if isinstance(value, str):
        return f", e.g. {_example(cls, closest(value, cls.levels()))}; {nearest('', cls.levels())}"
    return f", e.g. {_example(cls)}"


def read_json(text: str) -> Any:
    """A JSON document.

    Raises:
        UserError: it is none, or an object in it names a key twice, of which JSON's reader would keep the last and tell
            nobody.
    """
    try:
        return _without_repeated_keys(json.loads(text, object_pairs_hook=tuple))
    except json.JSONDecodeError as error:
        raise UserError(f"this is not JSON ({error}); mend it there, or name another document") from None


def _without_repeated_keys(value: Any, path: str = "") -> Any:
    """A document whose objects are tuples of pairs so far."""
    if isinstance(value, list):
        return [_without_repeated_keys(item, f"{path}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, tuple):
        return value
    found: dict[str, Any] = {}
    for key, inner in value:
        here = f"{path}.{key}".lstrip(".")
        if key in found:
            raise UserError(f"{here}: this key stands twice in its object; remove one")
        found[key] = _without_repeated_keys(inner, here)
    return found


def is_within(path: str, axes: Iterable[str]) -> bool:
    """Whether a dotted path is one of some others or lies below one."""
    return any(path == axis or path.startswith(f"{axis}.") for axis in axes)


def flatten(document: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A document by dotted paths, a level's kind at its own: `{"position": "RoPE", "position.base": 10000.0}`."""
    rows: dict[str, Any] = {}
    for name, value in document.items():
        here = path if name == "kind" else f"{path}.{name}".lstrip(".")
        rows |= flatten(value, here) if isinstance(value, Mapping) else {here: value}
    return rows


def canonical_json(data: Any) -> str:
    """JSON with sorted keys and no white space: equal data, equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(spec: Spec) -> str:
    """16 hex digits that identify what a spec computes.

    Hashes the document, the `result_version` of every spec class in it, and the source text of those that users
    defined outside the project.
    """
    kinds = sorted({type(part) for part in spec.specs()}, key=lambda kind: kind.__qualname__)
    bases = sorted({base for kind in kinds for base in _lineage(kind)}, key=lambda kind: kind.__qualname__)
    identity = {
        "spec": spec.document(),
        "versions": {kind.__qualname__: _version(kind) for kind in kinds},
        "sources": {base.__qualname__: source_text(base) for base in bases if is_foreign(base)},
    }
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]


def _lineage(kind: type[Spec]) -> list[type[Spec]]:
    return [base for base in kind.__mro__ if issubclass(base, Spec)]


def _version(kind: type[Spec]) -> int:
    """One number that rises whenever the `result_version` of a class or of one of its bases does."""
    return 1 + sum(vars(base).get("result_version", 1) - 1 for base in _lineage(kind))


def is_foreign(kind: type) -> bool:
    """Whether a class was defined outside the project's own packages."""
    return kind.__module__.split(".")[0] not in OWN_PACKAGES


def source_file(kind: type) -> Path | None:
    """The file that defines a class; None in a notebook or an interactive session."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return Path(file).resolve() if file else None


def source_text(kind: type) -> str:
    """The text that identifies a user's class: its whole file, or in a notebook the class itself."""
    file = source_file(kind)
    try:
        return file.read_text() if file else inspect.getsource(kind)
    except OSError as error:
        raise UserError(f"the source of {kind.__name__} cannot be read; define it in a file") from error


# What to do about an error of pydantic's, by its type; others say it themselves. Its sentence ends with the bound.
REMEDIES = {
    "greater_than_equal": "use at least {bound}",
    "greater_than": "use more than {bound}",
    "less_than_equal": "use at most {bound}",
    "less_than": "use less than {bound}",
    "int_type": "give a plain whole number, e.g. 3",
    "float_type": "give a plain number, e.g. 0.5",
    "tuple_type": "write (…,) around a single one, with the comma",
    "too_short": "name one at least",
}


def explain(error: ValidationError, owner: str = "") -> str:
    """One sentence for the first thing that is wrong: path, value, remedy; the path begins at `owner` if one is given,
    unless the reason names it.
    """
    first = error.errors()[0]
    location = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
    if owner and location and first["type"] != UNKNOWN:
        location.insert(0, owner)
    value = first.get("input")
    given = "" if isinstance(value, Mapping) else f" = {shown(value)}"
    reason = first["msg"].removeprefix("Value error, ")
    if reason == first["msg"]:  # pydantic's own sentences begin with a capital
        reason = reason[0].lower() + reason[1:]
    if first["type"] in REMEDIES:
        reason += "; " + REMEDIES[first["type"]].format(bound=reason.split()[-1])
    return f"{'.'.join(location) or error.title}{given}: {reason}"
