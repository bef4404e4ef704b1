"""Numbers, names and errors as people read them: in tables, pages, figures and records."""

import errno
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.schema import UserError, quoted

ABSENT = "–"
MINUS = "−"
LONGEST = 300  # characters of an error's message: what lies below it, torch above all, can fill pages
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

METRICS = {
    "exact_match": "exact match",
    "exact_match_no_end": "exact match without the end token",
    "token_accuracy": "token accuracy",
    "learning_time": "learning time",
}
MEANINGS = {
    "exact_match": "the share of test sequences whose whole answer, end token included, is right",
    "exact_match_no_end": "the share of test sequences whose whole answer is right, the end token not counted",
    "token_accuracy": "the share of answer tokens that are right",
    "learning_time": "the share of the training steps after which the evaluation at the training lengths first passed "
    "the gate; 1: not learned in the end",
}
MATCHED = {"parameters": "parameters", "flops": "FLOPs of a forward pass at the longest training length"}
STATUSES = {
    "finished": "finished",
    "diverged": "diverged",
    "out_of_memory": "ran out of memory",
    "failed": "failed",
    "partial": "interrupted",
    "missing": "not started",
}
# A run with one of these has ended without a model worth scoring; the rest is finished or still to come.
FAILURES = ("diverged", "out_of_memory", "failed")
PENDING = ("partial", "missing")
UNEQUAL = 0.05  # a cost that is further than this from another is marked


def is_known(value: Any) -> bool:
    """Whether a table's cell holds something: neither None nor NaN nor NA."""
    return value is not None and value == value and str(value) not in ("<NA>", "NaT", "")


def decimal(value: Any, digits: int = 3, *, signed: bool = False) -> str:
    """A number with a fixed number of decimals and a real minus sign; a dash where there is none."""
    if not is_known(value):
        return ABSENT
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    text = f"{value:{'+' if signed else ''}.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def difference(value: Any, bound: Any = "") -> str:
    """A difference, signed: two decimals, or three where two would say 0.00 of what may well be significant. `bound` is
    the `≥`, `≤` or `≈` of one that was not measured to its end (`tables.bounds`).
    """
    return _bounded(bound, decimal(value, _decimals(value), signed=True))


def with_interval(value: Any, low: Any, high: Any, digits: int | None = None, *, bound: Any = "") -> tuple[str, str]:
    """A difference and its interval, `("−0.002", "[−0.004, −0.001]")`: all three with the same number of decimals, so
    that no interval looks as if it excluded its own mean: two, or three where two would say 0.00 of one, or `digits`.
    """
    places = _decimals(value, low, high) if digits is None else digits
    return _bounded(bound, decimal(value, places, signed=True)), interval(low, high, places)


def _decimals(*values: Any) -> int:
    return 3 if any(is_known(value) and abs(value) < 0.005 for value in values) else 2


def _bounded(bound: Any, text: str) -> str:
    return f"{bound} {text}" if is_known(bound) else text


def interval(low: Any, high: Any, digits: int = 3, *, signed: bool = True) -> str:
    """`[+0.102, +0.310]`, of a difference; a dash where there is none."""
    if not (is_known(low) and is_known(high)):
        return ABSENT
    return f"[{decimal(low, digits, signed=signed)}, {decimal(high, digits, signed=signed)}]"


def probability(value: Any) -> str:
    """A p value: three decimals, `< 0.001` below."""
    if not is_known(value):
        return ABSENT
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def quantity(value: Any, unit: str = "") -> str:
    """A count or an amount with three significant digits and a prefix: `1.20 M`, `3.41 TFLOP`."""
    if not is_known(value):
        return ABSENT
    value = float(value)
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".strip()


def whole(value: Any) -> str:
    """A count, its thousands apart; a dash where there is none."""
    return f"{round(value):,}".replace(",", "\u202f") if is_known(value) else ABSENT


def excess(value: Any, other: Any) -> float:
    """By which share of another a cost exceeds it; 0 up to `UNEQUAL` and where either is not known."""
    if not (is_known(value) and is_known(other) and other and abs(value / other - 1) > UNEQUAL):
        return 0.0
    return float(value / other - 1)


def percent(share: float) -> str:
    """A signed share, `+12 %`."""
    return f"{share:+.0%}".replace("%", " %").replace("-", MINUS)


def unequal(value: Any, other: Any) -> str:
    """How far a cost is from another, `+12 %`; empty up to `UNEQUAL` and where either is not known."""
    share = excess(value, other)
    return percent(share) if share else ""


def seconds(value: Any) -> str:
    """A duration: `41 s`, `3 min 20 s`, `2 h 5 min`."""
    if not is_known(value):
        return ABSENT
    if value < 60:
        return f"{value:.3g} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plain(value: Any) -> str:
    """A spec's or a record's value: no braces, no quotes, no needless decimals."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and is_known(value):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ranges(value) if value and all(isinstance(v, int) for v in value) else ", ".join(map(plain, value))
    return str(value) if is_known(value) else ABSENT


def ranges(values: Iterable[int]) -> str:
    """Whole numbers with runs drawn together: `0–3, 7`."""
    groups: list[list[int]] = []
    for value in sorted(set(values)):
        if groups and value == groups[-1][-1] + 1:
            groups[-1].append(value)
        else:
            groups.append([value])
    return ", ".join(f"{g[0]}–{g[-1]}" if len(g) > 1 else f"{g[0]}" for g in groups)


def span(values: Sequence[int]) -> str:
    """`11–20` for any lengths between 11 and 20, the ends included."""
    return f"{min(values)}–{max(values)}" if min(values) < max(values) else f"{min(values)}"


def listed(parts: Sequence[str], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} {last} {parts[-1]}"


def counted(number: int, noun: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def beside_baseline(means: Mapping[str, float], baseline: str, *, signed: bool = False) -> str:
    """`1.09 with none, others from 0.34 with much to 0.69 with little`: of many others the smallest and the largest."""
    known = {name: mean for name, mean in means.items() if is_known(mean)}

    def said(name: str) -> str:
        return f"{decimal(known[name], 2, signed=signed)} with {quoted(name)}"

    names = sorted((name for name in known if name != baseline), key=lambda name: known[name])
    first = [said(baseline)] if baseline in known else []
    if len(names) < 3:
        return ", ".join([*first, *map(said, names)])
    return ", ".join([*first, f"{'others ' * bool(first)}from {said(names[0])} to {said(names[-1])}"])


def seen_phrase(findings: Iterable[str]) -> str:
    """`Seen, not tested: …`; empty without findings."""
    text = "; ".join(findings)
    return f"Seen, not tested: {text}." if text else ""


def metric_name(metric: str) -> str:
    """A metric as people say it."""
    return METRICS.get(metric, metric.replace("_", " "))


def at(where: str) -> str:
    """A place behind what was found there; some are named with their preposition."""
    return "" if not where else f" {where}" if where.startswith(("in ", "behind ")) else f" at {where}"


def in_words(error: BaseException) -> str:
    """An exception on one line. A user's mistake speaks for itself, and whole: its sentence ends with the remedy."""
    message = " ".join(str(error).split())
    if isinstance(error, UserError):
        return message
    return f"{type(error).__name__}: {message[:LONGEST]}" if message else type(error).__name__


def full_disk(error: BaseException) -> str:
    """What to say of an error that means that a disk takes no more, which is no run's fault; empty of any other."""
    if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
        return ""
    where, what = error.filename2 or error.filename or "the disk", str(error.strerror).lower()  # a copy names both ends
    return f"{where}: {what}; mend that and run it again, what was recorded is kept"


def markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line, also inside a table's cell."""
    escaped = "".join(f"\\{c}" if c in "\\`*|[]<>#~" else c for c in text)
    return " ".join(escaped.split()).replace("&", "&amp;")
