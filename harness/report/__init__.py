"""The report of a study: tables and figures; the only seaborn import.

`write_report` turns a study in any state into a folder that explains itself. It draws on bare `Figure`s, never through
pyplot, so that it can run while other threads work. Beyond DESIGN.md's files it writes `tables/`, the page's tables
unrounded, and in `tables/as_shown/` as CSV, Markdown and LaTeX; and `scores.csv` has two more columns (`mark`,
`split`), without which an unsupported length's 0 misleads.
"""

import base64
import io
import json
import time
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from PIL import Image as Raster

from harness.record import write_atomically
from harness.report.answer import answer, score_phrase
from harness.report.blocks import Image, Page
from harness.report.chapters import called_for, seen
from harness.report.chapters.chapter import Chapters
from harness.report.figures import Picture, score_pictures
from harness.report.inside import inside_pictures
from harness.report.look import drawing
from harness.report.page import compose
from harness.report.tables import Findings, findings, outcome_counts, runs_table, scores_table
from harness.report.typeset import typeset
from harness.wording import PENDING, markdown

if TYPE_CHECKING:
    from harness.results import StudyData

__all__ = ["answer", "write_report"]

ONE_TABLE = '{% from "table.md.j2" import table %}{{ table(shown) }}'
DPI = 200
SMALL_DPI = 130  # published reports are committed


def write_report(data: "StudyData", folder: Path, *, publish: bool = False) -> None:
    """Write a study's report into a folder, over an earlier one.

    Args:
        data: the study, finished or not.
        folder: gets `runs.csv`, `scores.csv`, `comparison.csv`, `tables/`, `report.md`, `report.html` (needs no other
            file) and `figures/` (PNG and SVG).
        publish: the small form that is committed: no HTML, coarser PNGs and no SVG, but `provenance.json`; what an
            earlier report left there is removed.
    """
    found = findings(data)
    chapters = called_for(found)
    images = _draw(found, chapters, folder / "figures", publish=publish)
    untested = seen(found, chapters)
    page = compose(found, chapters, images, untested)
    tables = _write_tables(found, untested, folder)
    write_atomically(folder / "report.md", render(page, "report.md.j2"))
    if publish:
        write_atomically(folder / "provenance.json", _provenance(found))
        _remove_others(folder, {*tables, *chain.from_iterable(image.files for image in images.values())})
    else:
        write_atomically(folder / "report.html", render(page, "report.html.j2"))
        _write_as_shown(page, folder / "tables" / "as_shown")


def _write_as_shown(page: Page, folder: Path) -> None:
    """The page's tables, and none that an earlier page had."""
    folder.mkdir(parents=True, exist_ok=True)
    files = typeset(page, lambda table: environment().from_string(ONE_TABLE).render(shown=table).strip("\n") + "\n")
    for name, content in files.items():
        write_atomically(folder / name, content)
    for path in set(folder.iterdir()) - {folder / name for name in files}:
        path.unlink()


def _draw(found: Findings, chapters: Chapters, folder: Path, *, publish: bool) -> dict[str, Image]:
    folder.mkdir(parents=True, exist_ok=True)
    with drawing():
        theirs = (chapter.pictures(found, table) for chapter, table in chapters)
        pictures = chain(score_pictures(found), *theirs, inside_pictures(found))
        return {picture.name: save(picture, folder, publish=publish) for picture in pictures}


def save(picture: Picture, folder: Path, *, publish: bool) -> Image:
    """Write a picture as PNG, and as SVG if it is not to be small; each is drawn once, on a canvas of its own
    (`savefig` draws everything twice).
    """
    figure = picture.figure
    figure.dpi = SMALL_DPI if publish and not picture.wide else DPI
    raster: Any = FigureCanvasAgg(figure)
    raster.draw()
    images = {"png": few_colours(np.asarray(raster.buffer_rgba()))}
    if not publish:
        images["svg"] = _svg(picture)
    for kind, content in images.items():
        write_atomically(folder / f"{picture.name}.{kind}", content)
    files = [f"figures/{picture.name}.{kind}" for kind in images]
    return Image(picture.title, picture.caption, base64.b64encode(images["png"]).decode(), files, picture.wide)


def _svg(picture: Picture) -> bytes:
    picture.figure.set_layout_engine("none")  # it has done its work
    svg = io.BytesIO()
    vector: Any = FigureCanvasSVG(picture.figure)
    vector.print_svg(svg, metadata={"Date": None, "Title": picture.title})
    return svg.getvalue()


def few_colours(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Pixels `(height, width, 4)` as a PNG of 256 colours: a third of the bytes, and no eye can tell."""
    out = io.BytesIO()
    raster = Raster.fromarray(pixels).convert("RGB")
    raster.quantize(256, Raster.Quantize.MEDIANCUT, dither=Raster.Dither.NONE).save(out, "png")
    return out.getvalue()


def _write_tables(found: Findings, untested: pd.DataFrame, folder: Path) -> list[str]:
    """Write all tables; their files' names."""
    tables = {
        "runs": runs_table(found.data),
        "scores": scores_table(found.data),
        "comparison": found.compared,
        "tables/verdicts": found.verdicts,
        "tables/lengths": found.lengths,
        "tables/ledger": found.ledger,
        "tables/failures": found.failures,
        "tables/unsupported": found.unsupported,
        "tables/steps_to_threshold": found.speed,
        "tables/seen": untested,
    }
    for name, table in tables.items():
        write_atomically(folder / f"{name}.csv", csv(table))
    return [f"{name}.csv" for name in tables]


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Remove the parts of a report that this one has not: they would be published with it."""
    for path in (folder / "report.html", *folder.glob("figures/*"), *folder.glob("tables/*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in kept:
            path.unlink()


def csv(table: pd.DataFrame) -> str:
    """CSV whose numbers read back as the same floats, with the same bytes on every system."""
    return str(table.to_csv(index=False, lineterminator="\n"))


def render(page: Page, template: str) -> str:
    """A page through one of the templates; HTML escapes whatever users wrote, Markdown by its own filter."""
    return environment().get_template(template).render(page=page)


def environment() -> jinja2.Environment:
    """The templates, and how they are read."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["md"] = markdown
    return made


def _times(found: Findings) -> dict[str, Any]:
    """When the study ran, and how many seconds after its first run had begun each task was complete, with its verdicts.

    By the clock: pauses between invocations count, and a run that was interrupted began when it was taken up again.
    """
    records = found.data.records
    if found.data.runs["status"].isin(PENDING).any() or not all(record.started for _, record in records):
        return {}
    began = min(record.started for _, record in records)
    complete = {task: max(r.ended for (_, of, _), r in records if of == task) for task in found.document["tasks"]}
    return {
        "first_run_began": _moment(began),
        "last_run_ended": _moment(max(complete.values())),
        "complete_after_seconds": {task: round(ended - began) for task, ended in complete.items()},
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _provenance(found: Findings) -> str:
    document = found.document
    named = ("study", "question", "claims", "baseline", "tasks", "command", "budget", "seeds", "looks")
    facts = {name: document[name] for name in named if name in document}
    environment = found.data.environment
    facts |= {"commit": environment["commit"], "environment": environment, **_times(found)}
    facts |= {"scored": score_phrase(document), "outcomes": outcome_counts(found.data)}
    return json.dumps({**facts, "published": _moment(time.time())}, indent=1) + "\n"
