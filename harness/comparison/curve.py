"""Curves in block characters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = " ▁▂▃▄▅▆▇█"
LOST = "×"  # stands in a curve where the loss was not finite
HEIGHT = 3  # lines of a curve: 24 levels


@dataclass(frozen=True)
class Scale:
    """Where a value stands between a low and a high one."""

    low: float
    high: float

    @property
    def logarithmic(self) -> bool:
        """Whether it is by ratios."""
        return self.low > 0

    def level(self, given: float, levels: int) -> int:
        """1 (the lowest value) to `levels` (the highest)."""
        low, high, own = (math.log(v) if self.logarithmic else v for v in (self.low, self.high, given))
        return 1 if high <= low else 1 + round((levels - 1) * (own - low) / (high - low))


def binned(steps: Sequence[int], values: Sequence[float], last: int, width: int) -> list[float | None]:
    """A curve in so many columns, from step 0 to `last`: the mean of a column's values, NaN where one is not finite;
    between points the value before; None before the first point and after the last.
    """
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, each in zip(steps, values, strict=True):
        columns[min(width - 1, step * width // max(last, 1))].append(each if math.isfinite(each) else math.nan)
    means = [sum(column) / len(column) if column else None for column in columns]
    ends = [i for i, mean in enumerate(means) if mean is not None]
    for i in range(ends[0], ends[-1]) if ends else ():
        means[i] = means[i - 1] if means[i] is None else means[i]
    return means


def drawing(columns: Sequence[float | None], scale: Scale, height: int = HEIGHT) -> list[str]:
    """Columns as lines of block characters, the uppermost first."""
    levels = [
        None if each is None else 0 if math.isnan(each) else scale.level(each, 8 * height) for each in columns
    ]  # 0 is no level
    lines = []
    for row in reversed(range(height)):
        marks = (" " if n is None else (LOST if row == 0 else " ") if n == 0 else _block(n - 8 * row) for n in levels)
        lines.append("".join(marks))
    return lines


def _block(eighths: int) -> str:
    return BLOCKS[max(0, min(8, eighths))]
