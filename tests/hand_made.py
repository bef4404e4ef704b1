"""A study's folder made by hand, for the tests of the report's chapters: no model is trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness.record import RunRecord, Score
from harness.report.blocks import Block
from harness.report.chapters import called_for
from harness.report.chapters.chapter import Chapter
from harness.report.figures import Picture
from harness.report.look import drawing
from harness.report.tables import Findings, findings
from harness.results import load_study

Maker = Callable[[str, str, int], Any]  # of variant, task, seed


def nothing(variant: str, task: str, seed: int) -> None:
    """A run without it."""


def half(variant: str, task: str, seed: int) -> float:
    """The same score for all."""
    return 0.5


def study(
    folder: Path,
    variants: tuple[str, ...],
    *,
    axes: tuple[str, ...],
    tasks: tuple[str, ...] = ("copy",),
    seeds: int = 3,
    model: dict[str, Any] | None = None,
    differences: dict[str, dict[str, Any]] | None = None,
    curve: Maker = nothing,
    maps: Maker = nothing,
    score: Maker = half,
    costs: Maker = nothing,
    **changes: Any,
) -> Findings:
    """Write a finished study and read it again.

    `curve` gives a run's points (`{"step": …, metric: value}`), `maps` its last attention as (weights, labels), `score`
    its score at the one test length, `costs` what its ledger has; `changes` goes into study.json. The first
    variant is the baseline.
    """
    cells = [
        {"variant": v, "task": t, "seed": s, "fingerprint": f"{tasks.index(t):02}{variants.index(v):02}{s:02}"}
        for t in tasks
        for s in range(seeds)
        for v in variants
    ]
    document = {
        "study": "made", "question": "Does it matter?", "claims": [], "why": "", "axes": list(axes),
        "baseline": variants[0], "against": {}, "variants": list(variants), "tasks": list(tasks),
        "seeds": list(range(seeds)), "budget": "quick", "device": "cpu", "score": "exact_match",
        "higher_is_better": True, "margin": 0.1, "gate": 0.98, "train_lengths": {t: [1, 3] for t in tasks},
        "test_lengths": {t: [4] for t in tasks}, "runs": cells,
        "spec": {"model": model or {"d_model": 16}, "train": {"steps": 100}, "tasks": {t: {} for t in tasks}},
        "differences": {v: {} for v in variants} | (differences or {}), **changes,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(document))
    for cell in cells:
        names = (cell["variant"], cell["task"], cell["seed"])
        directory = folder / "runs" / cell["fingerprint"]
        _write_run(directory, curve(*names) or [], maps(*names), score(*names), costs(*names) or {"parameters": 1234})
    return findings(load_study(folder))


def _write_run(
    folder: Path, points: list[dict[str, float]], maps: Any, score: float, ledger: dict[str, int | float | str]
) -> None:
    folder.mkdir(parents=True)
    (folder / "curves.jsonl").write_text("".join(json.dumps({"time": 0, **point}) + "\n" for point in points))
    if maps is not None:
        (folder / "attention").mkdir()
        np.savez(folder / "attention" / "000100.npz", weights=maps[0].astype(np.float16), labels=np.array(maps[1]))
    RunRecord(
        fingerprint=folder.name,
        spec={},
        status="finished",
        cause="",
        scores=tuple(Score(length=n, metric="exact_match", value=score) for n in (1, 2, 3, 4)),
        final={"eval/in_distribution": 1.0},
        ledger=ledger,
    ).write(folder / "record.json")


def pictures(chapter: Chapter, found: Findings) -> list[Picture]:
    """What a chapter draws of a study; nothing where it finds nothing."""
    with drawing():
        return [
            picture for each, table in called_for(found) if each is chapter for picture in each.pictures(found, table)
        ]


def blocks(chapter: Chapter, found: Findings) -> list[Block]:
    """What a chapter says of a study; nothing where it finds nothing."""
    return [block for each, table in called_for(found) if each is chapter for block in each.blocks(found, table)]


def seen(chapter: Chapter, found: Findings) -> str:
    """The clause that a chapter has for the answer; empty where it finds nothing."""
    return "".join(each.seen(found, table) for each, table in called_for(found) if each is chapter)
