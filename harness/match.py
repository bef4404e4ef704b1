"""Variants that cost as much as the baseline: the value of a field that brings them there, found before training."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from typing import Annotated, Any

from annotated_types import MinLen

from harness.cost import counting, empty_model, forward_flops, parameters, sequence_at
from harness.schema import Spec, UserError, is_within
from harness.space import Cost
from harness.spec import RunSpec
from harness.wording import MATCHED, excess, percent, whole


class Match(Spec):
    """That every variant has as many parameters, or FLOPs, as the baseline: `field`, a whole number of the model, gets
    the value that brings a variant's `cost` nearest to the baseline's, after the budget's changes.

    *flops* are those of one forward pass over a sequence of the longest training length, which stand in for those of
    training: it reads shorter sequences too. The cost must rise with the field. Values that a model cannot have (a
    width that its heads do not divide) are passed over. A variant is one model: its value is found on the first task,
    and must bring it within 5 % on every task.
    """

    cost: Cost
    field: Annotated[str, MinLen(1)]

    def check(self, axes: Iterable[str], variants: Mapping[str, Mapping[str, Any]], tuned: Iterable[str]) -> None:
        """Raise ValueError where the field lies along no axis, is set by a variant (of `variants`, which leave out the
        baseline), or a sweep's fields would undo the match.
        """
        if not self.field.startswith("model."):
            raise ValueError(f"match.field = {self.field!r}: name a whole number of the model, e.g. "
                             f"'model.feedforward.d_ff'")  # fmt: skip
        if not is_within(self.field, axes):
            raise ValueError(f"match.field = {self.field!r} is not within axes = {list(axes)}; add it there")
        for variant, changes in variants.items():
            if any(_sets(path, value, self.field) for path, value in changes.items()):
                raise ValueError(f"variants.{variant} sets {self.field}, which match solves for; leave it out there")
        if others := [path for path in tuned if path.startswith("model.")]:
            raise ValueError(f"space.fields: {others[0]} would undo the match; tune fields of train")

    def value(self, spec: RunSpec, baseline: RunSpec) -> int:
        """The field's value in `spec` with which it comes nearest to the baseline's cost; of two the smaller.

        Raises:
            UserError: the spec has no such field, or no whole number there; its cost cannot be counted.
        """
        start = spec.at(self.field)
        if not isinstance(start, int) or isinstance(start, bool):
            raise UserError(f"match.field = {self.field!r} is {start!r} there, no whole number; name another field")
        return _solved(self, spec, cost_of(baseline, self.cost))

    def check_equal(self, spec: RunSpec, baseline: RunSpec) -> None:
        """Raise UserError where a spec's cost is more than 5 % off the baseline's."""
        target = cost_of(baseline, self.cost)
        if share := excess(cost_of(spec, self.cost), target):
            raise UserError(
                f"the nearest match, {self.field} = {spec.at(self.field)}, is {percent(share)} off the baseline's "
                f"{whole(target)} {MATCHED[self.cost]}; match by another field or change the variant"
            )


def _sets(path: str, value: Any, field: str) -> bool:
    """Whether a change of a variant says which value a field has; a level that leaves it at its default does not, and
    what was read from JSON names every field.
    """
    if path == field:
        return True
    if not is_within(field, (path,)):
        return False
    for name in field.removeprefix(f"{path}.").split("."):
        if not isinstance(value, Spec) or name not in value.model_fields_set:
            return False
        value = getattr(value, name)
    return True


@lru_cache(maxsize=1024)
def cost_of(spec: RunSpec, cost: Cost) -> int:
    """What a run's model costs, counted without memory for it.

    Raises:
        UserError: it cannot be counted, as a user's own level may not run without numbers.
    """
    with counting(f"a {spec.task.kind} model"):
        if cost == "parameters":
            return parameters(empty_model(spec.model, spec.task.vocab_size))
        return forward_flops(spec.model, spec.task.vocab_size, *sequence_at(spec, spec.task.lengths.train[1]))


@lru_cache(maxsize=1024)
def _solved(match: Match, spec: RunSpec, target: int) -> int:
    @cache
    def possible(value: int) -> bool:
        try:
            spec.replace(match.field, value)
        except UserError:
            return False
        return True

    def cost(value: int) -> int:
        return cost_of(spec.replace(match.field, value), match.cost)

    return nearest_value(cost, possible, target, spec.at(match.field))


def nearest_value(cost: Callable[[int], int], possible: Callable[[int], bool], target: int, start: int) -> int:
    """The possible whole number, 1 at least, whose cost is nearest to a target, of two the smaller. `cost` rises with
    it; `start` is possible.
    """
    low, high = 0, max(1, start)
    while cost(high) <= target:
        beyond = _possible(possible, high, 4 * high)
        if beyond is None or cost(beyond) <= cost(high):  # there is no more, or it would change nothing
            return high
        low, high = high, beyond
    # Now `low` costs no more than the target, `high` costs more, and what is possible between them is halved each time.
    while (middle := _possible(possible, low, high)) is not None:
        low, high = (middle, high) if cost(middle) <= target else (low, middle)
    return min(filter(None, (low, high)), key=lambda value: abs(cost(value) - target))


def _possible(possible: Callable[[int], bool], low: int, high: int) -> int | None:
    """The possible value nearest to the middle between two others; None where there is none."""
    middle = (low + high) // 2
    near = (value for distance in range(high - low) for value in (middle - distance, middle + distance))
    return next((value for value in near if low < value < high and possible(value)), None)
