"""What diagnostics say of the runs: what went wrong, why we think so, what to try."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from harness.report.blocks import Block, Cell, Table, Text
from harness.report.chapters.chapter import Chapter
from harness.report.figures import Picture
from harness.report.tables import RUN, Findings, records, which
from harness.report.wording import counted

ORDER = (
    "An alarm is something declared that is broken, or something unusual in a run that came to harm; alarms stand in "
    "the order in which they are to be looked at (what is declared and broken, what is there "
    "before training, learning rate and warm-up, what training has made, the rest). The first one is a run's diagnosis."
)
REMARKS = (
    "Outside of its usual bounds in runs that came to no harm, where that is often healthy, or nothing to be mended. "
    "Values are the most extreme ones of the runs named."
)


def found_in(found: Findings) -> pd.DataFrame:
    """A row a run and finding: `variant, task, seed`, then the finding's own fields, in the order of triage."""
    rows = [
        dict(zip(RUN, cell, strict=True)) | said.model_dump()
        for cell, record in found.data.records
        for said in record.findings
    ]
    columns = [*RUN, "probe", "alarm", "rank"]
    return pd.DataFrame(rows, columns=None if rows else columns).sort_values("rank", kind="stable")


def pictures(found: Findings, table: pd.DataFrame) -> Iterator[Picture]:
    """None: curves of what detectors watch are in the tracking store."""
    yield from ()


def blocks(found: Findings, table: pd.DataFrame) -> Sequence[Block]:
    """The alarms with cause and remedy, then the remarks."""
    alarms, remarks = table[table["alarm"].astype(bool)], table[~table["alarm"].astype(bool)]
    ill, ended = len(alarms.drop_duplicates(RUN)), len(found.data.records)
    said: list[Block] = [Text(f"Of {counted(ended, 'run')}, {ill or 'none'} alarmed a probe or a detector.")]
    if len(alarms):
        heads = ["what", "seen", "likely cause", "what to try", "runs"]
        said += [Table(heads, [_alarm(own) for own in _groups(alarms, "cause")], ORDER)]
    if len(remarks):
        said += [Table(["what", "seen", "runs"], [_remark(own) for own in _groups(remarks)], REMARKS)]
    return said


def _groups(table: pd.DataFrame, *besides: str) -> Iterator[pd.DataFrame]:
    for _, own in table.groupby(["rank", "probe", *besides], sort=False):
        yield own


def _alarm(own: pd.DataFrame) -> list[Cell]:
    first = records(own)[0]
    return [
        Cell(f"{first['probe']}: {first['symptom']}"),
        Cell(_seen(own, first)),
        Cell(first["cause"]),
        Cell(f"{first['remedy']} ({first['source']})"),
        Cell(which(own)),
    ]


def _remark(own: pd.DataFrame) -> list[Cell]:
    first = records(own)[0]
    return [Cell(f"{first['probe']}: {first['symptom']}"), Cell(_seen(own, first)), Cell(which(own))]


def _seen(own: pd.DataFrame, first: dict[str, Any]) -> str:
    low, high = own["value"].min(), own["value"].max()
    values = f"{low:.3g}" if low == high or len(own) == 1 else f"{low:.3g} to {high:.3g}"
    return f"{first['measures']}: {values} (healthy: {first['healthy']})"


CHAPTER = Chapter("diagnosis", "Diagnosis", found_in, pictures, blocks)
