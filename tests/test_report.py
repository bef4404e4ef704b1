"""harness.report: contracts of the files, an answer that claims no more than the verdicts, any state of a study."""

import base64
import html.parser
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_made import study as study_by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D

import harness.report
from harness.record import RunRecord, Score
from harness.report import answer, chapters, csv, write_report
from harness.report.answer import sentences
from harness.report.blocks import Cell, Table
from harness.report.chapters.chapter import Chapter
from harness.report.index import answers, as_markdown
from harness.report.inside import block, changes, maps_across, similarity
from harness.report.look import drawing, legend, panels
from harness.report.tables import (
    at_unequal,
    bounds,
    by_length,
    comparison,
    failures,
    ledger,
    missed_gate,
    runs_table,
    scores_table,
    seed_differences,
    unequal_costs,
    verdicts,
)
from harness.report.typeset import escaped
from harness.results import StudyData, load_study
from harness.schema import flatten
from harness.stats import compare
from harness.wording import (
    beside_baseline,
    decimal,
    difference,
    interval,
    quantity,
    ranges,
    seconds,
    with_interval,
)

# A realistic study, written to disk as runs leave it

VARIANTS = ("sinusoidal", "none", "learned", "RoPE", "ALiBi", "T5 bias")
FAR = {"sinusoidal": 0.1, "none": 0.35, "learned": 0.0, "RoPE": 0.08, "ALiBi": 0.5, "T5 bias": 0.55}
LEVELS = {
    "sinusoidal": {"kind": "Sinusoidal", "base": 10000.0},
    "none": {"kind": "NoPE"},
    "learned": {"kind": "Learned", "max_length": 32},
    "RoPE": {"kind": "RoPE", "base": 10000.0},
    "ALiBi": {"kind": "ALiBi"},
    "T5 bias": {"kind": "T5Bias", "num_buckets": 32, "max_distance": 128},
}
TRAIN, TEST = (1, 10), tuple(range(11, 21))
STEPS = 1200
METRICS = ("exact_match", "exact_match_no_end", "token_accuracy")

Fate = Callable[[str, str, int], str]


def finished(variant: str, task: str, seed: int) -> str:
    return "finished"


def some_fail(variant: str, task: str, seed: int) -> str:
    """Two runs diverge, one runs out of memory, one dies."""
    fates = {
        ("learned", "reverse", 2): "diverged",
        ("none", "copy", 5): "diverged",
        ("T5 bias", "reverse", 7): "out_of_memory",
        ("RoPE", "copy", 3): "failed",
    }
    return fates.get((variant, task, seed), "finished")


def write_study(
    folder: Path,
    *,
    variants: tuple[str, ...] = VARIANTS,
    tasks: tuple[str, ...] = ("copy", "reverse"),
    seeds: int = 8,
    fate: Fate = finished,
    attention: bool = True,
    codes: bool = True,
    **changes: Any,
) -> StudyData:
    """Write a study's folder and load it; `fate` gives each run's status, `changes` goes into study.json."""
    cells = [
        {"variant": v, "task": t, "seed": s, "fingerprint": sha256(f"{v}{t}{s}".encode()).hexdigest()[:16]}
        for t in tasks
        for s in range(seeds)
        for v in variants
    ]
    folder.mkdir(parents=True, exist_ok=True)
    document = {**study_document(variants, tasks, seeds), "runs": cells, **changes}
    (folder / "study.json").write_text(json.dumps(document))
    if codes:
        np.savez(folder / "codes.npz", **{variants[0]: sinusoidal_table(42, 64)})
    for cell in cells:
        write_run(
            folder / "runs" / cell["fingerprint"], cell, fate(cell["variant"], cell["task"], cell["seed"]), attention
        )
    return load_study(folder)


def study_document(variants: tuple[str, ...], tasks: tuple[str, ...], seeds: int) -> dict[str, Any]:
    return {
        "study": "position",
        "question": "Which position encoding lets a Transformer copy longer sequences than it was trained on?",
        "claims": ["E10", "E12"],
        "why": "two layers learn both tasks in a minute on one core",
        "axes": ["model.position"],
        "baseline": variants[0],
        "variants": list(variants),
        "tasks": list(tasks),
        "seeds": list(range(seeds)),
        "budget": "quick",
        "device": "cpu",
        "score": "exact_match",
        "higher_is_better": True,
        "margin": 0.1,
        "gate": 0.98,
        "train_lengths": {task: list(TRAIN) for task in tasks},
        "test_lengths": {task: list(TEST) for task in tasks},
        "spec": {
            "model": {"d_model": 64, "num_layers": 2, "position": level(variants[0]), "norm": {"kind": "LayerNorm"}},
            "train": {"steps": STEPS, "learning_rate": 1e-3, "schedule": {"kind": "WarmupCosine", "warmup": 0.05}},
            "tasks": {t: {"kind": t.title(), "lengths": {"train": TRAIN, "test": TEST}} for t in tasks},
        },
        "differences": {
            v: {} if v == variants[0] else flatten({"model": {"position": level(v)}}) for v in variants
        },
        "command": "harness ablate position --budget quick",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "environment": {"cpu": "Some CPU @ 2 GHz", "cores": "2", "torch": "2.13.0", "commit": "012345"},
    }  # fmt: skip


def level(variant: str) -> dict[str, Any]:
    return LEVELS.get(variant, {"kind": "Custom", "strength": 1.5})


def sinusoidal_table(length: int, width: int) -> np.ndarray:
    angle = np.arange(length)[:, None] * 10_000.0 ** -(np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, width)


def write_run(folder: Path, cell: dict[str, Any], status: str, attention: bool) -> None:
    """What a run with this status leaves: nothing if missing, curves alone if partial."""
    if status == "missing":
        return
    folder.mkdir(parents=True)
    draw = np.random.default_rng(int(cell["fingerprint"], 16))
    until = STEPS // 3 if status in ("diverged", "partial") else STEPS
    (folder / "curves.jsonl").write_text("".join(curve(draw, until, status)))
    (folder / "mirror.json").write_text(json.dumps({"run_id": sha256(cell["fingerprint"].encode()).hexdigest()[:32]}))
    if attention:
        write_attention(folder / "attention", cell["task"], draw, until)
    if status != "partial":
        record(cell, status, draw).write(folder / "record.json")


def curve(draw: np.random.Generator, until: int, status: str) -> list[str]:
    middle = draw.uniform(150, 400)
    lines = []
    for step in range(10, until + 1, 10):
        loss = 2.8 / (1 + math.exp((step - middle) / 60)) + 0.004 * draw.lognormal(0, 0.7)
        if status == "diverged" and step > until - 60:
            loss = 9.0 if step < until else math.nan
        line = {
            "step": step,
            "time": step,
            "train/loss": loss,
            "train/gradient_norm": 1.0,
            "train/exact_match": min(1.0, step / 800),
        }
        lines.append(json.dumps(line) + "\n")
    return lines


def write_attention(folder: Path, task: str, draw: np.random.Generator, last: int) -> None:
    folder.mkdir()
    source = [str(symbol) for symbol in np.random.default_rng(0).integers(0, 16, 10)]
    labels = ["BOS", *source, "SEP", *(source if task == "copy" else source[::-1])]
    for step in (0, last):
        logits = draw.normal(0, 0.2 + 3 * (step > 0), (2, 4, 22, 22)) + np.triu(np.full((22, 22), -np.inf), 1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.savez_compressed(folder / f"{step:06d}.npz", weights=weights.astype(np.float16), labels=np.array(labels))


def record(cell: dict[str, Any], status: str, draw: np.random.Generator) -> RunRecord:
    scores = tuple(run_scores(cell, status, draw))
    final = {}
    if scores:
        inside, beyond = (
            [s.value for s in scores if s.metric == "exact_match" and (s.length in TEST) == test]
            for test in (False, True)
        )
        final = {"eval/in_distribution": float(np.mean(inside)), "eval/extrapolation": float(np.mean(beyond)),
                 "train/loss": 0.004, "eval/greedy_agreement": 1.0,
                 "train/steps_to_threshold": 10.0 * draw.integers(30, 90) if learned(inside) else math.nan}  # fmt: skip
    flash = cell["variant"] != "T5 bias"
    ledger: dict[str, int | float | str] = {"device": "cpu", "precision": "fp32",
        "attention_backend": "flash" if flash else "math",
        "attention_reason": "no bias matrix, causal" if flash else "T5Bias adds a trained T×T bias",
        "parameters": 103_296 + 2048 * 3 * (cell["variant"] == "learned")}  # fmt: skip
    if status == "finished":
        ledger |= {"flops": 6.1e11 * (1 + 0.01 * (cell["variant"] == "ALiBi")), "tokens": 921_600, "steps": STEPS,
                   "wall_seconds": float(draw.uniform(9, 12)), "peak_memory_bytes": 412 * 2**20}  # fmt: skip
    causes = {
        "diverged": "the loss was not finite any more between steps 390 and 400",
        "out_of_memory": "killed by signal 9 (out of memory?)",
        "failed": "RuntimeError: something <b>broke</b> | badly",
    }
    return RunRecord(
        fingerprint=cell["fingerprint"],
        spec={},
        status=status,
        cause=causes.get(status, ""),
        scores=scores,
        final=final,
        ledger=ledger,
    )  # type: ignore[arg-type]


def learned(values: list[float]) -> bool:
    return float(np.mean(values)) >= 0.98


def run_scores(cell: dict[str, Any], status: str, draw: np.random.Generator) -> list[Score]:
    if status in ("failed", "out_of_memory"):
        return []
    level = FAR.get(cell["variant"], 0.3) * (1.0 if cell["task"] == "copy" else 0.15) * draw.uniform(0.7, 1.3)
    learns = draw.uniform() > 0.06
    scores = []
    for length in (*range(TRAIN[0], TRAIN[1] + 1), *TEST):
        inside = 1.0 if learns else min(1.0, max(0.0, 1.1 - length / 12))
        value = (
            inside
            if length <= TRAIN[1]
            else min(1.0, max(0.0, 2 * level * (1 - (length - 11) / 9) + draw.normal(0, 0.02)))
        )
        mark = "seen" if length <= 2 else ""
        if cell["variant"] == "learned" and length > 15:
            value, mark = 0.0, "unsupported"
        if status == "diverged":
            value, mark = 0.0, "diverged"
        scores += [
            Score(length=length, metric=m, value=value ** (1 / (1 + i)), mark=mark) for i, m in enumerate(METRICS)
        ]
    return scores


# The report of the whole study, written once


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rasters, for tests that look at everything but them."""
    monkeypatch.setattr(harness.report, "DPI", 40)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyData:
    return write_study(tmp_path_factory.mktemp("study") / "position", fate=some_fail)


@pytest.fixture(scope="module")
def report(study: StudyData) -> Path:
    write_report(study, study.folder)
    return study.folder


@pytest.fixture(scope="module")
def any_study(tmp_path_factory: pytest.TempPathFactory) -> StudyData:
    """A study to go with comparisons that are made up: the comparison given to `answer` need not come from it."""
    return write_study(
        tmp_path_factory.mktemp("small") / "s", variants=("base", "v1", "v2", "v3"), seeds=2, attention=False
    )


def table(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=False, na_values=[""])


def test_runs_csv_has_a_row_a_planned_run_identity_first(report: Path, study: StudyData) -> None:
    runs = table(report / "runs.csv")
    identity = ["study", "variant", "task", "seed", "status", "cause", "fingerprint", "mlflow_run_id"]
    assert list(runs.columns[:8]) == identity
    assert {"eval/in_distribution", "parameters", "flops", "tokens", "wall_seconds", "attention_backend"} <= set(
        runs.columns
    )
    assert len(runs) == 96
    assert set(runs["fingerprint"]) == set(study.runs["fingerprint"])
    assert runs["mlflow_run_id"].notna().all()
    assert runs["status"].value_counts().to_dict() == {"finished": 92, "diverged": 2, "failed": 1, "out_of_memory": 1}


def test_scores_csv_is_long_and_keeps_every_bit(report: Path, study: StudyData) -> None:
    scores = table(report / "scores.csv")
    assert list(scores.columns[:6]) == ["variant", "task", "seed", "length", "metric", "value"]
    keys = ["variant", "task", "seed", "length", "metric"]
    both = scores.merge(study.scores, on=keys, suffixes=("", "_then"))
    assert len(both) == len(scores) == len(study.scores)
    assert (both["value"] == both["value_then"]).all()
    assert set(scores.loc[scores["variant"] == "learned", "mark"].dropna()) == {"unsupported", "seen", "diverged"}


def test_comparison_csv_is_what_stats_says(report: Path, study: StudyData) -> None:
    written = table(report / "comparison.csv")
    expected = compare(study.primary(), "sinusoidal", 0.1)
    pd.testing.assert_frame_equal(written, expected, check_dtype=False, check_exact=True)


def test_tables_do_not_depend_on_the_order_in_which_runs_ended(study: StudyData) -> None:
    runs, scores = study.runs.sample(frac=1, random_state=1), study.scores.sample(frac=1, random_state=2)
    shuffled = StudyData(study.folder, study.document, runs, scores)
    for make in (runs_table, scores_table, ledger):
        assert csv(make(shuffled)) == csv(make(study))


def test_every_figure_is_a_png_and_an_svg_whose_text_is_text(report: Path) -> None:
    names = {path.stem for path in (report / "figures").iterdir()}
    assert names == {
        "accuracy_by_length", "scores", "differences", "loss", "steps_to_threshold", "attention_copy",
        "attention_reverse", "position_codes",
    }  # fmt: skip
    for name in names:
        assert (report / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<text" in (report / "figures" / f"{name}.svg").read_text()
    svg = (report / "figures" / "accuracy_by_length.svg").read_text()
    assert all(variant in svg for variant in VARIANTS)
    assert "SEP" in (report / "figures" / "attention_copy.svg").read_text()


class Elements(html.parser.HTMLParser):
    """All tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def assert_self_contained(page: str) -> Elements:
    elements = Elements(page)
    assert not {"script", "link", "iframe", "object", "base", "form"} & set(elements.tags)
    for name, value in elements.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "srcset", "action", "data"):
            assert value.startswith(("data:image/png;base64,", "#")), value
    assert not re.search(r"url\(|@import|http-equiv", page)
    return elements


def test_the_html_needs_no_other_file(report: Path) -> None:
    elements = assert_self_contained((report / "report.html").read_text())
    images = [value for name, value in elements.attributes if name == "src"]
    assert len(images) == 8
    inlined = base64.b64decode(images[0].split(",")[1])
    assert inlined == (report / "figures" / "accuracy_by_length.png").read_bytes()
    anchors = {value for name, value in elements.attributes if name == "href"}
    assert anchors <= {f"#{value}" for name, value in elements.attributes if name == "id"}
    assert ("name", "viewport") in elements.attributes


def test_the_page_says_what_was_compared_how_and_what_it_means(report: Path, study: StudyData) -> None:
    words = " ".join(Elements((report / "report.html").read_text()).words)
    for sentence in answer(study, comparison(study)).split(". "):
        assert sentence.strip(".") in words
    for said in (
        study.document["question"], "harness ablate position --budget quick", study.document["commit"],
        "Some CPU @ 2 GHz", "sign-flip", "Holm", "Clopper–Pearson", "passed gate", "seeds needed",
        "the loss was not finite any more", "T5Bias adds a trained T×T bias",
        "learned cannot take copy at lengths 16–20", "Low dimensions have the high frequencies",
        "the pale middle is zero", "model.num_layers", "of 96 runs, 2 diverged",
        study.runs["fingerprint"].iloc[-1], study.runs["mlflow_run_id"].iloc[-1],
    ):  # fmt: skip
        assert said in words, said


def test_markdown_shows_the_same_with_relative_links(report: Path) -> None:
    text = (report / "report.md").read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) == 16
    assert all((report / link).is_file() for link in links)
    page = " ".join(Elements((report / "report.html").read_text()).words)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert all(heading in page for heading in headings)
    assert study_tables_are_rectangular(text)


def study_tables_are_rectangular(text: str) -> bool:
    """Every row of every Markdown table has as many cells as its head."""
    width = 0
    for line in text.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if cells and width and cells != width:
            return False
        width = cells
    return True


def test_publishing_writes_little_and_says_where_it_comes_from(study: StudyData, tmp_path: Path) -> None:
    write_report(study, tmp_path, publish=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_500_000
    assert not [path for path in files if path.suffix not in (".csv", ".md", ".png", ".json")]
    assert "SVG" not in (tmp_path / "report.md").read_text().split("## Provenance")[0]
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["command"] == "harness ablate position --budget quick"
    assert provenance["environment"]["torch"] == "2.13.0"
    assert provenance["commit"] == study.document["commit"]


def test_publishing_removes_what_an_earlier_report_left(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", variants=("a", "b"), tasks=("copy",), seeds=2, attention=False)
    published = tmp_path / "published"
    stale = ["report.html", "figures/old.png", "figures/loss.svg", "tables/old.csv"]
    others = ["notes.md", "figures/mine/kept.png"]
    for name in (*stale, *others):
        (published / name).parent.mkdir(parents=True, exist_ok=True)
        (published / name).write_text("old")
    write_report(data, published, publish=True)
    assert [name for name in stale if (published / name).exists()] == []
    assert [name for name in others if (published / name).exists()] == others
    for written in ("report.md", "provenance.json", "runs.csv", "figures/loss.png", "tables/verdicts.csv"):
        assert (published / written).read_bytes() != b"old"


def test_provenance_names_the_commits_of_the_records_and_when_they_were_made(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", variants=("a", "b"), seeds=2, attention=False)
    for index, cell in enumerate(data.document["runs"]):
        path = data.folder / "runs" / cell["fingerprint"] / "record.json"
        changes = {"started": 1e9 + 10 * index, "ended": 1e9 + 10 * index + 15}
        changes["environment"] = {"commit": "begun here" if index < 3 else "ended there", "torch": "2.13.0"}
        RunRecord.read(path).model_copy(update=changes).write(path)
    write_report(load_study(data.folder), tmp_path / "r", publish=True)
    provenance = json.loads((tmp_path / "r" / "provenance.json").read_text())
    commits = "begun here (3 runs), ended there (5 runs)"
    assert provenance["commit"] == provenance["environment"]["commit"] == commits
    assert f"| commit | {commits} |" in (tmp_path / "r" / "report.md").read_text()
    assert pd.read_csv(tmp_path / "r" / "runs.csv")["commit"].value_counts().to_dict() == {
        "begun here": 3,
        "ended there": 5,
    }
    assert (provenance["first_run_began"], provenance["last_run_ended"]) == (
        "2001-09-09T01:46:40+00:00",
        "2001-09-09T01:48:05+00:00",
    )
    assert provenance["complete_after_seconds"] == {"copy": 45, "reverse": 85}
    path.unlink()
    write_report(load_study(data.folder), tmp_path / "r", publish=True)
    assert "first_run_began" not in json.loads((tmp_path / "r" / "provenance.json").read_text())


# Tables


def test_a_verdict_row_agrees_with_itself_and_counts_the_gate(study: StudyData) -> None:
    rows = verdicts(study, comparison(study)).set_index(["task", "variant"])
    others = rows[rows["verdict"].notna()]
    assert np.allclose(others["score"] - others["baseline_score"], others["difference"])
    assert rows.loc[("copy", "RoPE"), "seeds"] == 7  # one failed, so one pair is missing
    assert rows.loc[("copy", "none"), "seeds"] == 8  # one diverged, which is a score of 0
    runs = study.runs[(study.runs["task"] == "reverse") & (study.runs["variant"] == "learned")]
    passed = runs["eval/in_distribution"] >= 0.98
    assert rows.loc[("reverse", "learned"), "gate_passed"] == passed.sum()
    assert rows.loc[("reverse", "learned"), "gate_of"] == 8
    primary = study.primary().merge(runs[passed], on=["variant", "task", "seed"])["score"]
    assert rows.loc[("reverse", "learned"), "gated_score"] == pytest.approx(primary.mean())


@pytest.mark.usefixtures("coarse")
def test_a_variant_may_be_compared_with_another_than_the_baseline(tmp_path: Path) -> None:
    ladder = dict(zip(VARIANTS[2:], VARIANTS[1:], strict=False))
    data = write_study(tmp_path, tasks=("copy",), attention=False, against=ladder)
    table = verdicts(data, comparison(data)).set_index("variant")
    means = data.primary().groupby("variant")["score"].mean()
    for variant, other in {"none": "sinusoidal", **ladder}.items():
        assert table.loc[variant, "reference"] == other
        assert table.loc[variant, "difference"] == pytest.approx(means[variant] - means[other])
    seeds = seed_differences(data).groupby("variant")["difference"].mean()
    assert seeds.to_dict() == pytest.approx(table["difference"].dropna().to_dict())
    write_report(data, tmp_path)
    text = (tmp_path / "report.md").read_text()
    for variant, other in ladder.items():
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith(f"| {variant} \\[{other}\\] | ")]
        glance, verdict = rows
        row = table.loc[variant]
        assert row["verdict"] in glance[1]
        assert difference(row["difference"]) in glance[1]
        assert verdict[2:5] == [decimal(means[variant]), decimal(means[other]), decimal(row["difference"], signed=True)]
    assert not re.search(r"^\| (none|sinusoidal) \\\[", text, re.MULTILINE)
    assert "to RoPE +" in text
    assert pd.read_csv(tmp_path / "comparison.csv")["reference"].tolist() == ["sinusoidal", *ladder.values()]


def test_learning_time_is_scored_low_is_good_and_lengths_show_exact_match(tmp_path: Path) -> None:
    data = write_study(tmp_path, score="learning_time", higher_is_better=False, attention=False)
    write_report(data, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "learning time" in page
    assert "lower is better" in page
    assert "Exact match by length" in page
    better = comparison(data)[comparison(data)["verdict"] == "better"]
    assert (better["difference"] < 0).all()


def never_learns(variant: str, seed: int) -> bool:
    """Of the variants of `timed`, which runs do."""
    return variant in ("lost", "lost too") or (variant == "mostly" and seed == 0)


def timed(folder: Path) -> StudyData:
    """Learning time: the baseline and `quick` learn always, `mostly` but for one seed, `lost` and `lost too` never."""

    def curve(variant: str, task: str, seed: int) -> list[dict[str, float]]:
        learned = 30 + 10 * (seed % 3) - (10 + 10 * (seed % 2)) * (variant == "quick")
        steps = range(10, 101, 10)
        never = never_learns(variant, seed)
        return [{"step": n, "eval/in_distribution": float(n >= learned and not never)} for n in steps]

    variants, against = ("base", "quick", "mostly", "lost", "found", "lost too"), {"found": "lost", "lost too": "lost"}
    made = study_by_hand(
        folder, variants, axes=("model.position",), seeds=10, curve=curve, against=against, higher_is_better=False
    ).data
    final = [float(not never_learns(v, s)) for v, s in zip(made.runs["variant"], made.runs["seed"], strict=True)]
    runs = made.runs.assign(**{"eval/in_distribution": final})
    return replace(made, document={**made.document, "score": "learning_time"}, runs=runs)


def test_a_difference_to_runs_that_never_learned_is_a_bound(tmp_path: Path) -> None:
    data = timed(tmp_path / "timed")
    expected = {"mostly": "≥", "lost": "≥", "found": "≤", "lost too": "≈"}
    assert bounds(data) == {(variant, "copy"): sign for variant, sign in expected.items()}
    write_report(data, tmp_path / "reference" / "timed", publish=True)
    text = (tmp_path / "reference" / "timed" / "report.md").read_text()
    (found,) = answers(tmp_path / "reference")
    size = verdicts(data, comparison(data)).set_index("variant")["difference"]
    for variant, sign in expected.items():
        said = f"{sign} {difference(size[variant])}"
        assert re.search(rf"^\| {variant}.* \| . \w+ {re.escape(said)} \| $", text, re.MULTILINE)
        assert f"{sign} {decimal(size[variant], signed=True)} |" in text
        assert re.search(rf"{variant} \((to \w+, )?{re.escape(said)}\)", found.measured)
    assert f"lost (≥ {difference(size['lost'])} \\[" in text
    assert f"quick ({difference(size['quick'])} \\[" in text
    assert "≥ at least" in text
    assert "neither run learned" in text
    assert bounds(replace(data, document={**data.document, "score": "exact_match"})) == {}


def test_the_index_gives_each_question_with_every_comparison_and_failure(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    data = write_study(tmp_path / "position", fate=some_fail, attention=False)
    write_report(data, reference / "position", publish=True)
    (reference / "unpublished").mkdir()
    (found,) = answers(reference)
    assert found.question == data.document["question"]
    table = verdicts(data, comparison(data))
    for row in table[table["variant"] != "sinusoidal"].to_dict("records"):
        label = "mostly tied" if isinstance(row["note"], str) else str(row["verdict"])
        part = next(p for p in found.measured.split("; ") if label.upper() in p.upper())
        assert f"{row['variant']} (" in part
        assert f"{row['task']} {decimal(row['difference'], 2, signed=True)}" in part
    missed = missed_gate(data)
    assert missed
    assert (
        f"of 96 runs 2 diverged, 1 ran out of memory and 1 failed; {missed} of 92 finished runs missed the gate."
        in found.measured
    )
    head, _, line = as_markdown([found]).splitlines()
    shown = dict(zip(head.strip("| ").split(" | "), line[2:-2].split(" | "), strict=True))
    assert shown["question"].startswith("[Which position encoding")
    assert (shown["against"], shown["missed the gate"]) == ("sinusoidal", f"{missed} of 92")
    for verdict in ("better", "worse", "equivalent"):
        expected: dict[str, list[str]] = {}
        for row in table[table["verdict"] == verdict].to_dict("records"):
            expected.setdefault(row["variant"], []).append(row["task"])
        named = [v if len(tasks) == 2 else f"{v} ({tasks[0]})" for v, tasks in expected.items()]
        assert shown[verdict] == ", ".join(named)


def test_what_a_chapter_saw_stands_in_the_answer_and_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chapter = Chapter(
        "c", "C", lambda found: found.lengths, lambda *_: iter(()), lambda *_: [], seen=lambda *_: "a | b"
    )
    silent = Chapter("s", "S", lambda found: found.lengths, lambda *_: iter(()), lambda *_: [])
    monkeypatch.setattr(chapters, "CHAPTERS", (chapter, silent))
    write_report(write_study(tmp_path / "s", attention=False), tmp_path / "reference" / "s", publish=True)
    assert "\n>\n> Seen, not tested: a \\| b.\n" in (tmp_path / "reference" / "s" / "report.md").read_text()
    (found,) = answers(tmp_path / "reference")
    assert found.measured.endswith(" Seen, not tested: a | b.")
    (tmp_path / "reference" / "s" / "tables" / "seen.csv").unlink()  # a report of before
    (older,) = answers(tmp_path / "reference")
    assert found.measured == f"{older.measured} Seen, not tested: a | b."


def test_the_table_in_readme_is_what_the_published_reports_say() -> None:
    root = Path(__file__).parents[1]
    table = as_markdown(answers(root / "results" / "reference")).replace(f"{root.as_posix()}/", "")
    assert table in (root / "README.md").read_text()


def test_a_pilot_says_that_it_concludes_nothing(tmp_path: Path) -> None:
    write_report(write_study(tmp_path, pilot=True, attention=False, seeds=2), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "no difference can be significant below" not in text.split("## Method")[0]  # more of them decide no more
    assert "its seeds choose settings and conclude nothing" in text
    assert "▲" not in text.split("## Method")[0].replace("▲ better, ▼ worse", "")


def test_a_tie_at_the_ceiling_is_bounded_not_called_equal(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", variants=("a", "b"), tasks=("copy",), attention=False)
    perfect = StudyData(data.folder, data.document, data.runs, data.scores.assign(value=1.0))
    row = verdicts(perfect, comparison(perfect)).iloc[1]
    assert row["verdict"] == "undecided"
    assert row["failure_bound"] == pytest.approx(1 - 0.05 ** (1 / 8))
    write_report(perfect, tmp_path / "report")
    assert "up to 31% of seeds may still differ" in (tmp_path / "report" / "report.md").read_text()


def test_seeds_needed_are_the_fewest_that_can_decide_where_nothing_else_is_known(tmp_path: Path) -> None:
    for seeds, needed in ((4, 6), (6, 10_000)):  # as often better as worse, and no margin is as small
        data = study_by_hand(
            tmp_path / str(seeds), ("a", "b"), axes=("model.position",), seeds=seeds, margin=1e-9,
            score=lambda variant, task, seed: 0.5 + 0.2 * (variant == "b") * (-1) ** seed,
        ).data  # fmt: skip
        write_report(data, data.folder)
        assert f" | ≥ {needed} |" in (data.folder / "report.md").read_text()


def test_ties_ask_for_another_setting_and_not_for_seeds(tmp_path: Path) -> None:
    data = study_by_hand(tmp_path, ("a", "b"), axes=("model.position",), seeds=6).data  # every score is the same
    write_report(data, data.folder)
    assert " | another setting |" in (data.folder / "report.md").read_text()


def test_a_tie_is_no_note_to_a_difference_that_was_shown(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", variants=("a", "b"), tasks=("copy",), attention=False)
    value = np.where(data.scores["variant"] == "a", 1.0, 0.99 - 0.001 * data.scores["seed"])  # ties: a margin is 0.1
    near = StudyData(data.folder, data.document, data.runs, data.scores.assign(value=value))
    assert len(near.ceilings()) == 1
    row = verdicts(near, comparison(near)).iloc[1]
    assert row["verdict"] == "worse"
    assert pd.isna(row["note"])
    assert pd.isna(row["failure_bound"])
    write_report(near, tmp_path / "report")
    assert "may still differ" not in (tmp_path / "report" / "report.md").read_text().split("## Method")[0]


def test_unequal_costs_are_marked(study: StudyData, report: Path) -> None:
    rows = ledger(study).set_index(["task", "variant"])
    assert "parameters +6 %" in rows.loc[("copy", "learned"), "unequal"]
    assert "flops" not in rows.loc[("copy", "ALiBi"), "unequal"]  # 1 % more is not marked
    assert "109\u202f440 (≠ +6 %)" in (report / "report.html").read_text()


FULL = {
    "parameters": 1000, "active_parameters": 1000, "flops": 1e9, "inference_flops": 2e6, "tokens": 5000, "steps": 100,
    "wall_seconds": 10.0, "peak_memory_bytes": 2**28, "cache_bytes": 8192,
}  # fmt: skip


def costing(folder: Path, costs: dict[str, dict[str, Any]], **changes: Any) -> StudyData:
    """A study whose variants are better than `base`, all but `base` with costs of their own beside `FULL`."""

    def score(variant: str, task: str, seed: int) -> float:
        return 0.5 + 0.004 * seed + (0.2 + 0.003 * (seed % 3)) * (variant != "base")

    return study_by_hand(
        folder, ("base", *costs), axes=("model.feedforward",), seeds=12, score=score,
        costs=lambda variant, *_: FULL | costs.get(variant, {}), **changes,
    ).data  # fmt: skip


def in_section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.mark.usefixtures("coarse")
def test_the_ledger_has_every_cost_and_says_where_it_was_counted(tmp_path: Path) -> None:
    data = costing(tmp_path, {"x": {"inference_flops": 3e6, "cache_bytes": 4096, "active_parameters": 900}})
    write_report(data, tmp_path)
    said = in_section((tmp_path / "report.md").read_text(), "What it cost")
    heads = (
        "parameters | active parameters | training FLOPs | inference FLOPs | training tokens | steps | wall time | "
        "peak memory | KV cache | attention kernel"
    )
    assert heads in said
    assert "| 900 (≠ −10 %) | 1 G | 3 M (≠ +50 %) | 5 k | 100 | 10 s | 256 MiB | 4.1 kB (≠ −50 %) |" in said
    assert (
        "Inference FLOPs (one forward pass) and KV cache are those of one sequence at the longest test length, 4."
        in said
    )
    assert "Tuning budget: none" in said
    row = table(tmp_path / "tables" / "ledger.csv").set_index("variant").loc["x"]
    assert {name: row[name] for name in FULL} == FULL | {
        "inference_flops": 3e6, "cache_bytes": 4096, "active_parameters": 900,
    }  # fmt: skip
    assert {*FULL, "tuning_trials"} <= set(table(tmp_path / "runs.csv").columns)


@pytest.mark.usefixtures("coarse")
def test_costs_are_counted_at_training_lengths_where_there_are_no_others(tmp_path: Path) -> None:
    lengths = {"copy": [], "sort": [4]}
    data = costing(tmp_path / "s", {"x": {}}, tasks=("copy", "sort"), test_lengths=lengths)
    write_report(data, tmp_path)
    where = "one sequence on copy at the longest training length, 3; on sort at the longest test length, 4."
    assert where in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("coarse")
def test_records_from_before_a_cost_was_counted_have_no_column_or_a_dash(tmp_path: Path) -> None:
    write_report(study_by_hand(tmp_path / "a", ("a", "b"), axes=("model.position",)).data, tmp_path / "a")
    old = in_section((tmp_path / "a" / "report.md").read_text(), "What it cost")
    assert "| task | variant | runs | parameters | attention kernel |" in old
    assert "Inference" not in old
    assert table(tmp_path / "a" / "tables" / "ledger.csv")["cache_bytes"].isna().all()

    def costs(variant: str, task: str, seed: int) -> dict[str, Any]:
        return FULL if variant == "b" else {"parameters": 1000}

    write_report(study_by_hand(tmp_path / "b", ("a", "b"), axes=("m",), costs=costs).data, tmp_path / "b")
    mixed = in_section((tmp_path / "b" / "report.md").read_text(), "What it cost")
    assert "| copy | a | 3 | 1 000 | – | – | – | – | – | – | – | – |" in mixed
    assert "≠ +" not in mixed


@pytest.mark.usefixtures("coarse")
def test_the_tuning_budget_of_a_tuned_study_stands_beside_every_score(tmp_path: Path) -> None:
    tuned = {
        "content": "0",
        "sampler": "tpe",
        "pruning": True,
        "asked": 12,
        "pilot_seeds": 2,
        "fields": {},
        "edges": {},
    }
    data = costing(tmp_path, {"x": {}}, tuned=tuned | {"fields": {"train.learning_rate": {}}})
    write_report(data, tmp_path)
    said = in_section((tmp_path / "report.md").read_text(), "What it cost")
    assert "| KV cache | tuning budget |" in said
    assert said.count("| 12 trials |") == 2
    assert "Tuning budget: none" not in said
    assert set(table(tmp_path / "runs.csv")["tuning_trials"]) == {12}


@pytest.mark.usefixtures("coarse")
def test_a_verdict_at_unequal_cost_says_so(tmp_path: Path) -> None:
    more = {"parameters": 1120, "active_parameters": 1120, "flops": 1.04e9}
    noisy = {"wall_seconds": 99.0, "peak_memory_bytes": 2**30, "cache_bytes": 1}
    data = costing(tmp_path, {"more": more, "noisy": noisy})
    write_report(data, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| ▲ better, at unequal parameters (+12 %) |" in in_section(text, "Verdicts")
    assert "at unequal …: these costs are more than 5 % off" in text
    assert re.search(r"^\| noisy \| ▲ better \| ", in_section(text, "Verdicts"), re.MULTILINE)
    assert re.search(r"^\| more \| ▲ better \+0\.20 ≠ \|", text, re.MULTILINE)
    assert re.search(r"^\| noisy \| ▲ better \+0\.20 \|", text, re.MULTILINE)
    assert "≠: at unequal cost (see Verdicts)." in text
    first, _ = sentences(data, comparison(data))
    assert first.endswith(" are better (differences with 95 % intervals), at unequal cost: more (parameters +12 %).")
    rows = verdicts(data, comparison(data)).set_index("variant")["unequal"]
    assert (rows["more"], rows["noisy"]) == ("parameters +12 %", "")


def test_equal_costs_are_no_words(tmp_path: Path) -> None:
    data = costing(tmp_path, {"x": {"flops": 1.04e9}})
    assert "cost" not in answer(data, comparison(data))
    assert (verdicts(data, comparison(data))["unequal"].fillna("") == "").all()


def test_costs_that_are_the_same_share_off_are_named_together_and_idle_parameters_apart() -> None:
    shares = {"parameters": 1.5, "active_parameters": 0.2, "flops": 0.2}
    assert at_unequal(shares) == "at unequal parameters (+150 %), active parameters and training FLOPs (+20 %)"


def test_the_answer_names_costs_once_where_every_variant_is_unequal(tmp_path: Path) -> None:
    few = {name: {"flops": 2e9} for name in "vwxyz"}
    first, _ = sentences(*compared(costing(tmp_path / "few", few)))
    assert first.endswith(", at unequal cost: v, w, x, y and z (training FLOPs +100 %).")
    many = {name: {"flops": (1 + i) * 5e8, "steps": 100 + 50 * (i == 2)} for i, name in enumerate("vwxyz")}
    first, _ = sentences(*compared(costing(tmp_path / "many", many)))
    assert first.endswith(", at unequal cost: v, x, y and z (training FLOPs −50 % to +150 %, steps +50 %).")
    every = many | {"w": {"flops": 8e8}}
    first, _ = sentences(*compared(costing(tmp_path / "every", every)))
    assert first.endswith(", at unequal cost: all of them (training FLOPs −50 % to +150 %, steps +50 %).")


def compared(data: StudyData) -> tuple[StudyData, pd.DataFrame]:
    return data, comparison(data)


def test_costs_are_set_against_what_a_variant_is_compared_with(tmp_path: Path) -> None:
    costs = {"x": {"parameters": 2000}, "y": {"parameters": 2000}}
    data = costing(tmp_path, costs, against={"y": "x"})
    found = unequal_costs(ledger(data), data.document)
    assert found == {("x", "copy"): {"parameters": 1.0}}


@pytest.mark.usefixtures("coarse")
def test_a_matched_study_says_by_what(tmp_path: Path) -> None:
    match, fields = {"cost": "flops", "field": "model.feedforward.d_ff"}, {"model.feedforward.d_ff": 85}
    data = costing(tmp_path, {"x": {}}, match=match, differences={"x": fields})
    write_report(data, tmp_path)
    said = in_section((tmp_path / "report.md").read_text(), "What was compared")
    assert (
        "Matched in FLOPs of a forward pass at the longest training length by model.feedforward.d_ff: each variant has "
        "the value that comes nearest to base" in said.replace("\\_", "_")
    )
    assert "| x | model.feedforward.d_ff = 85 |" in said.replace("\\_", "_")


def test_failures_are_counted_by_status_and_cause(study: StudyData) -> None:
    rows = failures(study).set_index("status")
    assert rows["count"].to_dict() == {"diverged": 2, "failed": 1, "out_of_memory": 1}
    assert rows.loc["diverged", "which"] == "none on copy (seed 5), learned on reverse (seed 2)"


def test_unsupported_and_seen_lengths_keep_their_marks(study: StudyData) -> None:
    rows = by_length(study).set_index(["task", "variant", "length"])
    assert rows.loc[("copy", "learned", 16), "mark"] == "unsupported"
    assert rows.loc[("copy", "RoPE", 2), "mark"] == "seen"
    assert rows.loc[("copy", "none", 5), "mark"] == "diverged (1 of 8)"


def test_holm_covers_the_planned_study_from_the_first_run_on(tmp_path: Path) -> None:
    early = write_study(
        tmp_path / "s", attention=False, seeds=7, fate=lambda v, task, seed: "finished" if task == "copy" else "missing"
    )
    rows = comparison(early)
    assert len(rows) == 10
    # Ten comparisons cannot be significant at seven seeds, although five could.
    assert set(rows.loc[rows["task"] == "copy", "verdict"]) <= {"undecided", "equivalent"}


# The answer


VERDICTS = ("better", "worse", "equivalent", "undecided")


@st.composite
def comparisons(draw: st.DrawFn) -> pd.DataFrame:
    rows = []
    for task in ("copy", "reverse"):
        for variant in ("v1", "v2", "v3"):
            difference = draw(st.floats(-1, 1))
            rows.append(
                {"variant": variant, "task": task, "n_pairs": draw(st.integers(2, 12)), "difference": difference,
                 "low": difference - 0.1, "high": difference + 0.1, "p": 0.01, "p_holm": 0.02, "effect_size": 1.0,
                 "verdict": draw(st.sampled_from(VERDICTS)), "seeds_needed": 9}
            )  # fmt: skip
    return pd.DataFrame(rows)


@settings(max_examples=60)
@given(compared=comparisons())
def test_the_answer_claims_what_the_verdicts_say_and_no_more(any_study: StudyData, compared: pd.DataFrame) -> None:
    text = answer(any_study, compared)
    shown, left = re.fullmatch(r"(.+?\.) ([A-Z].+\.)", text).groups()  # type: ignore[union-attr]
    for row in compared.to_dict("records"):
        clause = re.search(rf"on {row['task']}, (.*?)(?:; on | \(differences)", shown)
        claimed = re.search(
            rf"{row['variant']} \(([^()]*)\).*?\b(better|worse|equivalent)\b", clause[1] if clause else ""
        )
        if row["verdict"] == "undecided":
            assert claimed is None
            undecided = re.search(rf"(?:equality: |; )on {row['task']}, ([^;(]*)", left)
            assert "all 6 comparisons are undecided" in left or undecided is not None
            assert undecided is None or row["variant"] in undecided[1] or "all 3 variants" in undecided[1]
        else:
            assert claimed is not None
            assert claimed[2] == row["verdict"]
            assert " ".join(with_interval(row["difference"], row["low"], row["high"])) in claimed[1]
    small = compared["verdict"].isin(["better", "worse"]) & (compared["difference"].abs() < 0.1)
    assert ("by less than the margin of 0.10" in shown) == small.any()
    if set(compared["verdict"]) == {"undecided"}:
        assert shown.startswith("No variant is shown to be better than, worse than or equivalent to")


def test_the_answer_counts_failures_and_what_is_to_come(tmp_path: Path) -> None:
    fates = {0: "finished", 1: "diverged", 2: "failed", 3: "partial", 4: "missing", 5: "out_of_memory"}
    data = write_study(
        tmp_path / "s", variants=("a", "b"), tasks=("copy",), seeds=6, attention=False, fate=lambda v, t, s: fates[s]
    )
    text = answer(data, comparison(data))
    assert "of 12 runs, 2 diverged, 2 ran out of memory and 2 failed" in text
    assert "4 of 12 runs still to come, so this is preliminary" in text


# Any state


def seed_zero(variant: str, task: str, seed: int) -> str:
    return "finished" if seed == 0 else "missing"


STATES: dict[str, dict[str, Any]] = {
    "nothing has run": {"fate": lambda v, t, s: "missing"},
    "everything is half done": {"fate": lambda v, t, s: "partial"},
    "only the baseline has run": {"fate": lambda v, t, s: "finished" if v == "a" else "missing"},
    "the baseline is missing": {"fate": lambda v, t, s: "missing" if v == "a" else "finished"},
    "one seed": {"seeds": 1},
    "one seed of two": {"fate": seed_zero},
    "all failed": {"fate": lambda v, t, s: "failed"},
    "all ran out of memory": {"fate": lambda v, t, s: "out_of_memory"},
    "all diverged": {"fate": lambda v, t, s: "diverged"},
    "a variant failed": {"fate": lambda v, t, s: "failed" if v == "b" else "finished"},
    "one variant": {"variants": ("a",)},
    "three tasks": {"tasks": ("copy", "reverse", "sort"), "seeds": 1},
    "twelve variants": {"variants": tuple("abcdefghijkl"), "seeds": 1},
    "attention maps": {"attention": True, "seeds": 1},
    "no codes": {"codes": False},
    "no test lengths": {"test_lengths": {"copy": []}},
    "lower is better": {"higher_is_better": False},
    "no claims, no reason, no commit": {"claims": [], "why": "", "commit": "", "environment": {}},
}


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("state", STATES)
def test_any_state_of_a_study_has_a_report(state: str, tmp_path: Path) -> None:
    plan = {"variants": ("a", "b"), "tasks": ("copy",), "seeds": 2, "attention": False, **STATES[state]}
    data = write_study(tmp_path / "s", **plan)
    write_report(data, tmp_path / "r")
    assert_self_contained((tmp_path / "r" / "report.html").read_text())
    assert study_tables_are_rectangular((tmp_path / "r" / "report.md").read_text())
    assert len(table(tmp_path / "r" / "runs.csv")) == len(data.runs)
    assert re.fullmatch(r".+?\. [A-Z].+\.", answer(data, comparison(data)))
    assert not re.search(r"\bnan\b|\| None|<NA>", (tmp_path / "r" / "report.md").read_text())


@pytest.mark.usefixtures("coarse")
def test_nan_in_every_number_is_survived(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", variants=("a", "b"), tasks=("copy",), seeds=2, attention=False)
    numbers = data.runs.select_dtypes("number").columns.drop("seed")
    runs = data.runs.assign(**dict.fromkeys(numbers, math.nan))
    write_report(StudyData(data.folder, data.document, runs, data.scores.assign(value=math.nan)), tmp_path / "r")
    assert (tmp_path / "r" / "report.html").exists()


@pytest.mark.usefixtures("coarse")
def test_a_torn_attention_file_is_named_not_fatal(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", variants=("a", "b"), tasks=("copy",), seeds=1)
    torn = data.attention[data.attention["variant"] == "b"]["path"].iloc[-1]
    torn.write_bytes(torn.read_bytes()[:100])
    write_report(data, tmp_path / "r")
    assert "Unreadable file: b." in (tmp_path / "r" / "report.md").read_text()


@pytest.mark.usefixtures("coarse")
def test_an_earlier_report_is_written_over(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", variants=("a", "b"), tasks=("copy",), seeds=2, attention=False)
    write_report(
        write_study(tmp_path / "s2", variants=("a",), tasks=("copy",), seeds=1, attention=False), tmp_path / "r"
    )
    write_report(data, tmp_path / "r")
    assert len(table(tmp_path / "r" / "runs.csv")) == 4


@pytest.mark.parametrize(
    ("layers", "heads", "rows", "columns"), [(2, 4, 2, 4), (3, 4, 3, 4), (6, 4, 1, 6), (1, 16, 1, 1), (12, 12, 1, 8)]
)
def test_attention_maps_stand_a_row_a_layer_until_there_are_too_many(
    layers: int, heads: int, rows: int, columns: int
) -> None:
    drawn = block(np.tril(np.full((layers, heads, 5, 5), 0.2)), across=8)
    assert drawn.columns == columns
    assert len(drawn.places) == rows * columns
    assert drawn.places[-1][2] == (f"L{layers} H{heads}" if rows > 1 else f"layer {layers}, mean of {heads} heads")
    top, left, _ = drawn.places[0]
    assert drawn.image[top, left] == pytest.approx(0.2)
    assert math.isnan(drawn.image[top, left + 1])  # ahead of the query
    assert [maps_across(tokens) for tokens in (22, 42, 500)] == [8, 4, 1]
    assert block(np.zeros((1, 2, 12, 12)), across=8).places[-1][2] == "layer 1, head 2"  # where there is room


# Names of users' own


@pytest.mark.usefixtures("coarse")
def test_names_of_users_are_shown_and_never_run(tmp_path: Path) -> None:
    variants = ("base<1>", "<script>alert(1)</script>", "a|b `c` *d*", "$x_1^$ & \\", "_hidden", "位置")
    data = write_study(
        tmp_path / "s", variants=variants, tasks=("copy", "../up & <i>down</i>"), seeds=2, study="<b>s</b>",
        question='Is "<img src=x onerror=alert(1)>" better?', command="harness ablate '<x>'",
    )  # fmt: skip
    write_report(data, tmp_path / "r")
    text = (tmp_path / "r" / "report.html").read_text()
    elements = assert_self_contained(text)
    assert "i" not in elements.tags
    assert elements.tags.count("img") == 8
    words = " ".join(elements.words)
    assert all(name in words for name in (*variants, 'Is "<img src=x onerror=alert(1)>" better?'))
    markdown = (tmp_path / "r" / "report.md").read_text()
    assert study_tables_are_rectangular(markdown)
    assert not re.search(r"(?<!\\)<(script|img|i|b)\b", markdown)
    names = {path.name for path in (tmp_path / "r").rglob("*")}
    assert "attention_up-i-down-i.png" in names
    assert not (tmp_path / "up & <i>down<").exists()


# matplotlib's globals


@pytest.mark.usefixtures("coarse")
def test_a_long_legend_makes_the_figure_grow_and_not_its_panels_shrink() -> None:
    heights = []
    for entries in (3, 24):
        with drawing():
            figure, (ax,) = panels(1)
            legend(figure, [Line2D([], [], label=f"a variant with a long name, {n}") for n in range(entries)])
            FigureCanvasAgg(figure).draw()
            heights.append(ax.get_position().height * figure.get_figheight())
    assert heights[1] > 0.9 * heights[0]


def test_figures_leave_matplotlib_as_it_was_and_need_no_pyplot(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib._pylab_helpers import Gcf

    before = dict(matplotlib.rcParams)
    state = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    data = write_study(tmp_path / "s", variants=("a", "b"), tasks=("copy",), seeds=2)
    write_report(data, tmp_path / "r")
    assert dict(matplotlib.rcParams) == before
    assert not Gcf.figs
    assert np.random.get_state()[1].tolist() == state  # type: ignore[union-attr]


# The sinusoidal table (CLAIMS D02)


def test_frequency_order_is_measured_on_the_table() -> None:
    codes = sinusoidal_table(42, 64)
    assert changes(codes) == 1
    assert changes(codes[:, ::-1]) == -1
    assert changes(np.ones((5, 8))) == 0
    similar = similarity(codes)
    assert np.allclose(similar.diagonal(), 1)
    assert np.ptp(similar.diagonal(3)) < 1e-9  # depends on the distance alone


# Numbers


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (decimal(-0.5, 2, signed=True), "−0.50"),
        (decimal(0.25, 2, signed=True), "+0.25"),
        (decimal(-0.001, 2, signed=True), "0.00"),
        (decimal(math.nan), "–"),
        (decimal(None), "–"),
        (decimal(math.inf), "∞"),
        (interval(-0.1, 0.2, 1), "[−0.1, +0.2]"),
        (interval(math.nan, 1.0), "–"),
        (quantity(6.1e11, "FLOP"), "610 GFLOP"),
        (quantity(12), "12"),
        (seconds(200), "3 min 20 s"),
        (ranges([3, 1, 2, 7]), "1–3, 7"),
        (ranges([]), ""),
    ],
)
def test_numbers_are_written_for_people(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.104, "+0.10"), (-0.0051, "−0.01"), (0.0049, "+0.005"), (-0.002, "−0.002"), (0.0, "0.000"), (math.nan, "–")],
)
def test_a_difference_that_two_decimals_would_hide_has_three(value: float, said: str) -> None:
    assert difference(value) == said


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((-0.0022, -0.0039, -0.0006), "−0.002 [−0.004, −0.001]"),  # not −0.002 [0.00, 0.00]
        ((-0.01351, -0.0244, -0.0026), "−0.014 [−0.024, −0.003]"),  # not an end of 0.00, as if it might be zero
        ((0.25, 0.15, 0.35), "+0.25 [+0.15, +0.35]"),
        ((0.0, 0.0, 0.0), "0.000 [0.000, 0.000]"),
        ((0.25, math.nan, math.nan), "+0.25 –"),
    ],
)
def test_a_difference_and_its_interval_have_the_same_decimals(numbers: tuple[float, ...], said: str) -> None:
    assert " ".join(with_interval(*numbers)) == said


@given(middle=st.floats(-1, 1), width=st.floats(0, 1))
def test_no_interval_excludes_its_own_mean(middle: float, width: float) -> None:
    size, ends = with_interval(middle, middle - width, middle + width)
    low, high, mean = (float(text.replace("−", "-")) for text in (*ends.strip("[]").split(", "), size))
    assert low <= mean <= high


def test_names_that_begin_with_a_number_are_no_numbers() -> None:
    rows = [[Cell(text) for text in row] for row in (("2 layers", "3 layers", "≥ +0.25"), ("6 layers", "2", "≈ −0.10"))]
    assert Table(["on copy", "variant", "difference"], rows).numeric == [False, False, True]


@pytest.mark.parametrize(
    ("means", "said"),
    [
        ({"none": 1.087, "b": 0.34}, "1.09 with none, 0.34 with b"),
        (
            {"none": 1.087, "b": 0.5, "c, d": 0.34, "e": 0.4},
            "1.09 with none, others from 0.34 with “c, d” to 0.50 with b",
        ),
        ({"b": 0.5, "c": 0.34, "e": 0.4}, "from 0.34 with c to 0.50 with b"),
        ({"none": math.nan}, ""),
    ],
)
def test_of_many_numbers_beside_the_baselines_the_ends_are_named(means: dict[str, float], said: str) -> None:
    assert beside_baseline(means, "none") == said


# Tables for papers


def test_every_table_of_the_page_stands_as_shown_in_csv_markdown_and_latex(study: StudyData, tmp_path: Path) -> None:
    write_report(study, tmp_path)
    folder, page = tmp_path / "tables" / "as_shown", (tmp_path / "report.md").read_text()
    names = {path.stem for path in folder.iterdir()}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in names for kind in CSV_AND_ALL}
    assert len(names) == page.count(" --- |\n") + page.count(" ---: |\n")  # each has one such line
    assert {"answer", "verdicts-1", "what-it-cost", "provenance"} <= names
    for name in names:
        markdown_, tex = ((folder / f"{name}.{kind}").read_text() for kind in ("md", "tex"))
        shown = pd.read_csv(folder / f"{name}.csv", dtype=str, keep_default_na=False)
        assert markdown_ in page
        assert (tex.isascii(), tex.count(r" \\" + "\n")) == (True, len(shown) + 1), tex
        assert all(rule in tex for rule in (r"\toprule", r"\midrule", r"\bottomrule"))


CSV_AND_ALL = ("csv", "md", "tex")


def test_tables_that_an_earlier_page_had_do_not_stay(tmp_path: Path) -> None:
    data = write_study(tmp_path / "s", variants=("a", "b"), tasks=("copy",), seeds=2, attention=False)
    stale = tmp_path / "tables" / "as_shown" / "verdicts-9.tex"
    stale.parent.mkdir(parents=True)
    stale.touch()
    write_report(data, tmp_path)
    assert not stale.exists()


UNTEX = re.compile(
    r"\\textbackslash\{\}|\\textasciitilde\{\}|\\textasciicircum\{\}|\\text(?:less|greater|bar)\{\}|\\(.)"
)
NAMED = {"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textless": "<", "textgreater": ">"}


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_latex_says_what_the_table_says(text: str) -> None:
    def plain(found: re.Match[str]) -> str:
        return found[1] or (NAMED | {"textbar": "|"})[found[0][1:-2]]

    written = escaped(text)
    assert UNTEX.sub(plain, written) == text
    assert not re.search(r"(?<!\\)[&%$#_^~]", written)
