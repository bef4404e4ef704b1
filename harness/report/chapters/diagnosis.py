"""What diagnostics say of the runs: what went wrong, why we think so, what to try."""

from collections.abc import Iterator, Sequence

import pandas as pd

from harness.report.blocks import Block, Items, Text
from harness.report.chapters.chapter import Chapter
from harness.report.figures import Picture
from harness.report.tables import RUN, Findings, records, which
from harness.wording import counted

ORDER = (
    "An alarm is something declared that is broken, or something unusual in a run that came to harm; alarms stand in "
    "the order in which they are to be looked at (what is declared and broken, what is there "
    "before training, learning rate and warm-up, what training has made, the rest). The first one is a run's diagnosis."
)
REMARKS = "Out of the usual bounds, in runs that came to no harm, where that is often healthy:"


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
    unseen = table["value"].isna()  # what could not look at a model
    alarms = table[table["alarm"].astype(bool)]
    remarks = table[~table["alarm"].astype(bool) & ~unseen]
    ended = sum(record.was_examined for _, record in found.data.records)
    ill = len(alarms.drop_duplicates(RUN)) or "none"
    said: list[Block] = [Text(f"Of {counted(ended, 'run')} that were looked at, {ill} raised an alarm.")]
    if len(alarms):
        said += [Items([_alarm(own, ended) for own in _groups(alarms, "cause")]), Text(ORDER)]
    if len(remarks):
        counts = (_told(own, ended, runs=f"{len(own)} of {counted(ended, 'run')}") for own in _groups(remarks))
        said += [Text(REMARKS), Items(list(counts))]
    if unseen.any():
        lost = [
            f"{records(own)[0]['probe']}: {records(own)[0]['cause']}, in {which(own)}."
            for own in _groups(table[unseen])
        ]
        said += [Text("What could not look at a model:"), Items(lost)]
    return said


def _groups(table: pd.DataFrame, *besides: str) -> Iterator[pd.DataFrame]:
    for _, own in table.groupby(["rank", "probe", *besides], sort=False):
        yield own


def _alarm(own: pd.DataFrame, ended: int) -> str:
    first = records(own)[0]
    return f"{_told(own, ended)} Likely cause: {first['cause']}. Try: {first['remedy']} ({first['source']})."


def _told(own: pd.DataFrame, ended: int, runs: str = "") -> str:
    """The symptom with the runs, by name if need be, and its measure."""
    first = records(own)[0]
    low, high = own["value"].min(), own["value"].max()
    values = f"{low:.3g}" if low == high or len(own) == 1 else f"{low:.3g} to {high:.3g}"
    runs = runs or (f"all {counted(ended, 'run')}" if len(own) == ended else which(own))
    seen = f"{first['measures']}: {values}; healthy: {first['healthy']}"
    return f"{first['probe']}: {first['symptom']}, in {runs}. Seen: {seen}."


CHAPTER = Chapter("diagnosis", "Diagnosis", found_in, pictures, blocks)
