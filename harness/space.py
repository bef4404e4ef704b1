"""What a sweep varies: typed ranges of named fields, as data. What searches them is `harness.sweep`'s business."""

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le, MinLen
from pydantic import Field, PlainSerializer, model_validator

from harness.schema import Level, Spec, UserError, canonical_json, is_within, shown

EDGE = 0.05  # of a range: an optimum so near to an end may well lie beyond it
FACTOR = 16.0  # that the learning rate is searched within, up and down, where nothing else is declared
FIXED = ("train.steps", "train.eval_samples", "train.eval_every")  # more of them is a larger budget, or another score

Cost = Literal["flops", "parameters"]


class Dimension(Level):
    """Base of the values that a field may take in a sweep."""

    @abstractmethod
    def ends(self) -> tuple[Any, ...]:
        """Values that must be possible for all to be: both ends of a range, every option."""

    @abstractmethod
    def grid(self) -> tuple[Any, ...]:
        """The values that a grid has, in their order."""

    @abstractmethod
    def holds(self, value: Any) -> bool:
        """Whether the field may take this value."""

    def edge(self, value: Any) -> str:
        """`low` or `high` where a value is so near to that end that better ones may lie beyond; else empty."""
        return ""


class _Range(Dimension):
    """Base of ranges from `low` to `high`, the ends included; with `log` each factor is as likely as another."""

    low: float
    high: float
    log: bool = False
    points: Annotated[int, Ge(2), Le(1000)] = 5

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(
                f"low = {self.low} is not below high = {self.high}; widen the range, or set the field in the ablation"
            )
        if self.log and self.low <= 0:
            raise ValueError(f"low = {self.low} has no logarithm; use a positive one, or log = False")
        return self

    def ends(self) -> tuple[Any, ...]:
        """Both."""
        return self.low, self.high

    def spread(self) -> tuple[float, ...]:
        """`points` numbers, both ends among them."""
        inner = (_between(self.low, self.high, i / (self.points - 1), log=self.log) for i in range(1, self.points - 1))
        return self.low, *inner, self.high

    def edge(self, value: Any) -> str:
        """By the share of the range that lies on either side of it."""
        return _edge(self.low, self.high, value, log=self.log)


class FloatRange(_Range):
    """Numbers from `low` to `high`, the ends included; with `log` each factor is as likely as another. A grid has
    `points` of them, at equal distances or factors.
    """

    def grid(self) -> tuple[float, ...]:
        """`points` of them."""
        return self.spread()

    def holds(self, value: Any) -> bool:
        """Whether it is a number of the range."""
        return _is_number(value) and self.low <= value <= self.high


class IntegerRange(_Range):
    """Whole numbers from `low` to `high`, the ends included; with `log` each factor is about as likely as another. A
    grid has up to `points` of them, at about equal distances or factors.
    """

    low: int
    high: int

    def grid(self) -> tuple[int, ...]:
        """The whole numbers nearest to `points` of the range, each once."""
        return tuple(dict.fromkeys(map(round, self.spread())))

    def holds(self, value: Any) -> bool:
        """Whether it is a whole number of the range."""
        return _is_number(value) and value == int(value) and self.low <= value <= self.high


def _plain_options(options: tuple[Any, ...]) -> list[Any]:
    return [option.document() if isinstance(option, Spec) else option for option in options]


class Choice(Dimension):
    """One of several values: numbers, text, levels."""

    options: Annotated[tuple[Any, ...], MinLen(2), PlainSerializer(_plain_options)]

    @model_validator(mode="after")
    def _distinct(self) -> "Choice":
        labels = [self.label(option) for option in self.options]
        if twin := next((label for label in labels if labels.count(label) > 1), None):
            raise ValueError(f"{twin} stands twice among the options; drop one")
        return self

    @staticmethod
    def label(option: Any) -> str:
        """An option as text that no other has."""
        try:
            return canonical_json(option.document() if isinstance(option, Spec) else option)
        except (TypeError, ValueError):
            raise ValueError(
                f"option {shown(option)}: a spec holds numbers, text and levels; give one of them"
            ) from None

    def ends(self) -> tuple[Any, ...]:
        """All options."""
        return self.options

    def grid(self) -> tuple[Any, ...]:
        """All options."""
        return self.options

    def holds(self, value: Any) -> bool:
        """Whether it is one of the options."""
        return self.label(value) in map(self.label, self.options)


class Space(Spec):
    """What is tuned for each variant, over which values, and how a setting is judged.

    `fields` maps a RunSpec's dotted path to its values; every variant must have the path, and no axis may lie along it.
    Without any the learning rate (within a factor of 16 of the ablation's own), the weight decay and the warm-up are
    tuned, as far as variants have them and they are no axes; where that leaves nothing, β₂. A setting is run with
    `seeds` pilot seeds on every task. `costs` are further objectives, to be small: with some there is no pruning, and
    the answer is a Pareto front.
    """

    fields: dict[str, Dimension] = Field(default_factory=dict)
    seeds: Annotated[int, Ge(1), Le(100)] = 2
    costs: tuple[Cost, ...] = ()

    @model_validator(mode="after")
    def _sound(self) -> "Space":
        for path in self.fields:
            if other := next((o for o in self.fields if o != path and is_within(path, (o,))), None):
                raise ValueError(f"fields: {path} lies within {other}; name one of them")
        if len(set(self.costs)) < len(self.costs):
            raise ValueError(f"costs = {list(self.costs)}: one stands twice; drop it")
        return self

    def check(self, specs: dict[str, Spec], axes: Iterable[str]) -> None:
        """Raise ValueError for a field that cannot be tuned in each of these specs (by variant) beside these axes."""
        for path, dimension in self.fields.items():
            if path.split(".")[0] not in ("model", "train") or path in FIXED or "." not in path:
                raise ValueError(f"space.fields: {path} cannot be tuned; name a field of model or train that keeps the "
                                 f"budget equal")  # fmt: skip
            if axis := next((axis for axis in axes if is_within(path, (axis,)) or is_within(axis, (path,))), None):
                raise ValueError(f"space.fields: {path} lies along the axis {axis}, which the variants set; drop it")
            for variant, spec in specs.items():
                try:
                    spec.at(path)
                except UserError as error:
                    remedy = "tune what every variant has"
                    raise ValueError(f"space.fields: variants.{variant} has no such field: {error}; {remedy}") from None
                for value in dimension.ends():
                    try:
                        spec.replace(path, value)
                    except UserError as error:
                        raise ValueError(f"space.fields.{path}: for variants.{variant}: {error}") from None

    def dimensions(self, specs: Iterable[Spec], axes: Iterable[str]) -> dict[str, Dimension]:
        """The declared fields, or those that are tuned where none are.

        Raises:
            UserError: nothing is left to tune.
        """
        if self.fields:
            return dict(self.fields)
        specs, axes = list(specs), tuple(axes)

        def free(dimensions: dict[str, Dimension]) -> dict[str, Dimension]:
            return {
                path: dimension
                for path, dimension in dimensions.items()
                if not is_within(path, axes) and all(_has(spec, path) for spec in specs)
            }

        found = free(_usual(specs)) or free({"train.beta2": FloatRange(low=0.9, high=0.999)})
        if not found:
            raise UserError(
                f"space: what is usually tuned lies along the axes {', '.join(axes)}; name other fields in the "
                f"ablation's space"
            )
        return found


def _usual(specs: list[Spec]) -> dict[str, Dimension]:
    """What is tuned where nothing is declared."""
    rates = [spec.at("train.learning_rate") for spec in specs]
    return {
        "train.learning_rate": FloatRange(low=min(rates) / FACTOR, high=min(10.0, max(rates) * FACTOR), log=True),
        "train.weight_decay": FloatRange(low=1e-4, high=1.0, log=True),
        "train.schedule.warmup": FloatRange(low=0.01, high=0.5),
    }


def _has(spec: Spec, path: str) -> bool:
    try:
        spec.at(path)
    except UserError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _between(low: float, high: float, share: float, *, log: bool) -> float:
    """The number at a share of a range; never outside of it, whatever rounding does."""
    if log:
        return min(max(math.exp(math.log(low) + share * (math.log(high) - math.log(low))), low), high)
    return min(max(low * (1 - share) + high * share, low), high)


def _edge(low: float, high: float, value: float, *, log: bool) -> str:
    if value <= low or value >= high:
        return "low" if value <= low else "high"
    if log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    share = (value - low) / (high - low)
    return "low" if share <= EDGE else "high" if share >= 1 - EDGE else ""
