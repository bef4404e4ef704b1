"""The chapter about the reach of windows: its formula against the real masks, the real task and real models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand_made import blocks, pictures, seen
from small_study import plan, small

import harness.report
from harness.components.architecture import DecoderOnly, EncoderDecoder
from harness.components.attention import Longformer, MultiHead, SlidingWindow
from harness.components.feedforward import ReLU
from harness.record import RunRecord, Score
from harness.report import write_report
from harness.report.chapters.reach import CHAPTER, place, reach_of, retrieved, value_tokens_back
from harness.report.tables import findings
from harness.results import StudyData, load_study
from harness.spec import ModelSpec
from harness.transformer import build_model
from tasks import Copy, Lengths
from tasks.retrieval import Retrieval
from tasks.task import FIRST_SYMBOL, IGNORED, SEP

PAIRS = 10


def document(**changes: Any) -> dict[str, Any]:
    """The plan of a study of windows at two distances."""
    lengths = Lengths(train=(PAIRS, PAIRS), test=())
    fields: dict[str, Any] = {
        "tasks": {f"back {d}": Retrieval(lengths=lengths, distance=d) for d in (2, 4, 8)},
        "axes": ("model.attention", "model.num_layers"),
        "baseline": "full",
        "model": ModelSpec(d_model=16, num_heads=2, num_layers=2, feedforward=ReLU(d_ff=16)),
        "variants": {
            "full": {"model.attention": MultiHead()},
            "window 5": {"model.attention": SlidingWindow(window=5)},
            "window 5, deep": {"model.attention": SlidingWindow(window=5), "model.num_layers": 4},
            "global": {"model.attention": Longformer(window=5)},
        },
    }
    return plan(small(**{**fields, **changes})).document({})


def write_study(folder: Path, plan: dict[str, Any], score: float = 0.5, **scores: float) -> StudyData:
    """A study's folder in which every run has a score; `scores` names those of some lengths."""
    for run in plan["runs"]:
        low, high = plan["train_lengths"][run["task"]]
        lengths = (*range(low, high + 1), *plan["test_lengths"][run["task"]])
        RunRecord(
            fingerprint=run["fingerprint"], spec={}, status="finished",
            scores=tuple(Score(length=n, metric="exact_match", value=scores.get(f"at{n}", score)) for n in lengths),
            final={"eval/in_distribution": score},
        ).write(folder / "runs" / run["fingerprint"] / "record.json")  # fmt: skip
    (folder / "study.json").write_text(json.dumps(plan))
    return load_study(folder)


def reachable(window: int, layers: int, tokens: int) -> torch.Tensor:
    """`(T, T)`: whether what is at a token (column) can get to another (row) through the layers' real mask."""
    numbers = torch.arange(tokens)
    mask = SlidingWindow(window=window).pattern().allowed(numbers, numbers, causal=True)
    paths = torch.eye(tokens, dtype=torch.bool)
    for _ in range(layers):
        paths = (mask.float() @ paths.float()) > 0
    return paths


def asked(distance: int, length: int = PAIRS) -> tuple[int, int, int]:
    """Where SEP, the asked key and its value stand in a real sequence, SEP being where the answer is predicted."""
    task = Retrieval(lengths=Lengths(train=(length, length), test=()), distance=distance)
    batch = task.sequences(1, length, torch.Generator().manual_seed(distance))
    tokens, targets = batch.inputs[0].tolist(), batch.targets[0].tolist()
    sep = next(i for i, target in enumerate(targets) if target != IGNORED)
    assert tokens[sep] == SEP
    key = tokens.index(tokens[sep - 1])
    assert targets[sep] == tokens[key + 1]
    return sep, key, key + 1


@pytest.mark.parametrize("distance", range(1, PAIRS + 1))
def test_the_value_stands_where_the_chapter_says(distance: int) -> None:
    sep, key, value = asked(distance)
    assert sep - value == value_tokens_back(distance)
    assert sep - key == value_tokens_back(distance) + 1


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 8])
def test_the_reach_is_that_of_the_real_mask(window: int, layers: int) -> None:
    variants = {"window": {"model.attention": SlidingWindow(window=window)}, "full": {"model.attention": MultiHead()}}
    model = ModelSpec(d_model=16, num_heads=2, num_layers=layers, feedforward=ReLU(d_ff=16))
    reach = reach_of(document(variants=variants, model=model, baseline="full"), "window")
    assert reach is not None
    paths = reachable(window, layers, 2 * PAIRS + 4)
    for distance in range(1, PAIRS + 1):
        sep, key, value = asked(distance)
        seen = {(True, True): "inside", (True, False): "value only", (False, False): "outside"}
        assert place(value_tokens_back(distance), reach) == seen[bool(paths[sep, value]), bool(paths[sep, key])]


@pytest.mark.parametrize(("window", "layers"), [(3, 2), (5, 2), (4, 3)])
def test_a_real_model_hears_of_a_value_within_reach_and_of_none_beyond(window: int, layers: int) -> None:
    spec = ModelSpec(
        d_model=16, num_heads=2, num_layers=layers, feedforward=ReLU(d_ff=16), attention=SlidingWindow(window=window),
        architecture=DecoderOnly(),
    )  # fmt: skip
    task = Retrieval(lengths=Lengths(train=(PAIRS, PAIRS), test=()))
    model = build_model(spec, task.vocab_size, seed=0).eval()
    tokens = task.sequences(1, PAIRS, torch.Generator().manual_seed(0)).inputs
    for distance in range(1, PAIRS + 1):
        sep, _, value = asked(distance)
        other = tokens.clone()
        other[0, value] = FIRST_SYMBOL + 32 + (other[0, value] - FIRST_SYMBOL - 31) % 32
        with torch.no_grad():
            moved = (model(other)[0, sep] - model(tokens)[0, sep]).abs().max().item()
        assert (moved == 0) == (place(value_tokens_back(distance), layers * (window - 1)) == "outside")


def test_only_windows_alone_have_a_reach() -> None:
    plan = document()
    assert {name: reach_of(plan, name) for name in plan["variants"]} == {
        "full": None, "window 5": 8, "window 5, deep": 16, "global": None
    }  # fmt: skip
    # The baseline's window stands in its spec, and must not become that of a variant without one.
    flipped = document(baseline="window 5")
    assert {name: reach_of(flipped, name) for name in flipped["variants"]} == {
        "window 5": 8, "full": None, "window 5, deep": 16, "global": None
    }  # fmt: skip


def test_an_encoder_is_a_way_around_the_windows() -> None:
    model = ModelSpec(d_model=16, num_heads=2, feedforward=ReLU(d_ff=16), architecture=EncoderDecoder())
    assert reach_of(document(model=model), "window 5") is None


def test_the_table_says_what_is_within_reach(tmp_path: Path) -> None:
    (table,) = blocks(CHAPTER, findings(write_study(tmp_path, document())))
    assert table.kind == "table"
    assert table.columns == ["variant", "reach", "4 tokens back", "8 tokens back", "16 tokens back"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["full", "–", "0.500", "0.500", "0.500"],
        ["window 5", "8", "0.500, inside", "0.500, value only", "0.500, outside"],
        ["window 5, deep", "16", "0.500, inside", "0.500, inside", "0.500, value only"],
        ["global", "–", "0.500", "0.500", "0.500"],
    ]


def test_its_clause_tells_what_is_within_reach_from_what_is_beyond(tmp_path: Path) -> None:
    found = findings(write_study(tmp_path / "s", document()))
    table = retrieved(found)
    table["score"] = [
        0.9 if reach > tokens else 0.02 for tokens, reach in zip(table["tokens"], table["reach"], strict=True)
    ]
    assert CHAPTER.seen(found, table) == (
        "of windows alone, mean exact match 0.90 within reach, 0.02 with the value alone in reach, 0.02 beyond reach"
    )
    open_ = document(
        variants={"full": {"model.attention": MultiHead()}, "global": {"model.attention": Longformer(window=5)}}
    )
    assert seen(CHAPTER, findings(write_study(tmp_path / "open", open_))) == ""


def test_the_figure_shows_every_variant_by_distance_and_windows_by_reach(tmp_path: Path) -> None:
    found = findings(write_study(tmp_path, document(), score=0.25))
    (picture,) = pictures(CHAPTER, found)
    left, right = picture.figure.axes
    assert len(left.lines) == 4
    curves = [line for line in right.lines if len(np.atleast_1d(line.get_xdata())) == 3]
    assert [line.get_xdata().tolist() for line in curves] == [[0.5, 1, 2], [0.25, 0.5, 1]]  # type: ignore[union-attr]
    assert [line.get_ydata().tolist() for line in curves] == [[0.25] * 3] * 2  # type: ignore[union-attr]
    assert [1, 1] in [list(line.get_xdata()) for line in right.lines]  # type: ignore[arg-type]


def test_lengths_with_fewer_pairs_than_the_distance_are_left_out(tmp_path: Path) -> None:
    lengths = Lengths(train=(1, 2), test=(3, 4, 5))
    tasks = {"far": Retrieval(lengths=lengths, distance=4), "further": Retrieval(lengths=lengths, distance=6)}
    data = write_study(tmp_path, document(tasks=tasks), score=1.0, at4=0.2, at5=0.4)
    table = retrieved(findings(data))
    assert set(table["task"]) == {"far"}
    assert table["score"].tolist() == pytest.approx([0.3] * len(table))


def test_it_is_silent_without_a_window_or_a_distance(tmp_path: Path) -> None:
    lengths = Lengths(train=(2, 3), test=(4,))
    plans = {
        "no distance": document(tasks={"any": Retrieval(lengths=lengths), "copy": Copy(lengths=lengths)}),
        "no window": document(
            variants={"full": {"model.attention": MultiHead()}, "deep": {"model.num_layers": 4}},
        ),
    }
    for name, each in plans.items():
        found = findings(write_study(tmp_path / name, each))
        assert not pictures(CHAPTER, found)
        assert not blocks(CHAPTER, found)


def test_it_has_a_section_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.report, "DPI", 40)
    write_report(write_study(tmp_path / "s", document()), tmp_path / "r")
    text = (tmp_path / "r" / "report.md").read_text()
    assert text.index("## Reach of the windows") < text.index("figures/reach.png")
    assert "no test was made" in text
