"""Numbers out of the tables of a report in Markdown: chapters and benches publish theirs nowhere else."""

import re
from collections.abc import Iterator

from harness.stats import clopper_pearson

Number = tuple[float, float | None, float | None]  # with its interval, where it has one

_NUMBER = r"[+−-]?(?:\d{1,3}(?:[,\u202f ]\d{3})+|\d+)(?:\.\d*)?"
_WITH_INTERVAL = re.compile(rf"^[≥≤≈]?\s*({_NUMBER})\s*\[({_NUMBER}),\s*({_NUMBER})\]$")
_SHARE = re.compile(r"^(\d+) of (\d+)$")
_PLAIN = re.compile(rf"^[≥≤≈]?\s*({_NUMBER})$")


def tables(text: str) -> Iterator[list[list[str]]]:
    """The tables of a page, each a list of rows of cells, the head first."""
    rows: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
            rows.append([re.sub(r"\\(.)", r"\1", cell).strip() for cell in cells])
        elif rows:
            yield [row for row in rows if not set("".join(row)) <= set("-: ")]
            rows = []


def cell(text: str, row: str, column: str, on: str = "") -> str | None:
    """The cell of the first table with such a row and such a column; `on`: the name of its first column."""
    for head, *rows in tables(text):
        if column not in head or (on and head[0] != on):
            continue
        named = {each[0]: each for each in rows}
        if row in named and len(named[row]) > head.index(column):
            return named[row][head.index(column)]
    return None


def number(text: str) -> Number | None:
    """`0.50 [0.41, 0.59]`, `3 of 9` as a share with its Clopper–Pearson interval, or `1.02`; None for anything else."""
    if found := _SHARE.match(text):
        hits, of = int(found[1]), int(found[2])
        return (hits / of, *clopper_pearson(hits, of)) if 0 <= hits <= of and of else None
    if found := _WITH_INTERVAL.match(text):
        return _float(found[1]), _float(found[2]), _float(found[3])
    if found := _PLAIN.match(text):
        return _float(found[1]), None, None
    return None


def _float(text: str) -> float:
    return float(re.sub(r"[,\u202f ]", "", text).replace("−", "-"))
