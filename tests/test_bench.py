"""Parts of `make bench`, `make bench-attention`, `make calibrate` that take a second, lest they break unseen."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"


@pytest.mark.parametrize("position", ["RoPE", "ALiBi"])
def test_the_memory_of_attention_can_be_measured(position: str) -> None:
    command = [sys.executable, str(BENCH / "memory.py"), position, "2048"]
    assert int(subprocess.run(command, check=True, capture_output=True).stdout) > 2048 * 32 * 4  # at least the result


@pytest.mark.parametrize(
    ("what", "least"),
    [("timed", 1e-5), ("memory", 1024 * 64 * 4), ("decode", 1e-3)],
    ids=["time", "memory", "decoding"],
)
def test_a_point_of_the_attention_bench_can_be_measured(
    what: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    first, *_ = importlib.import_module("attention").in_a_process(what, "multi-head", 1024)
    assert first > least


def test_the_gain_of_a_cache_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    (times,) = importlib.import_module("attention").in_a_process("speedup", "MultiHead", 64)
    assert times > 0


def test_the_page_of_the_attention_bench_says_what_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCH)
    bench = importlib.import_module("attention")
    growth = {name: ([1024, 2048, 4096], [1.0, 4.0, 16.0], [1e6, 2e6, 4e6]) for name in bench.VARIANTS}
    decoding = {name: [[1.0, 2**20]] * len(bench.CACHED) for name in bench.DECODERS}
    page = bench.page(growth, decoding, dict.fromkeys(bench.CACHING, 12.0) | {"Linear": 9.0})
    assert "| grouped-query | 4,096 | 16 | 3.81 | 2.00 | 1.00 | 2, 1 |" in page
    assert "| Linear | 9.0 | FAILS |" in page
    assert "| MultiHead, TransformerXL | 12.0 | holds |" in page
    monkeypatch.setattr(bench, "OUT", tmp_path)
    bench.draw(growth, decoding)  # a colour and a mark for each
    assert {path.name for path in tmp_path.iterdir()} == {"growth.png", "growth.svg"}


def test_a_row_of_the_calibration_counts_what_compare_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    calibrate = importlib.import_module("calibrate")
    case = calibrate.Case("power", "normal", (8,), effect=0.3, spread=0.1)
    row = calibrate.measured(case, 20)
    assert row["better"] >= 15
    assert row == calibrate.measured(case, 20)  # a function of its case
    same = calibrate.measured(calibrate.Case("identical", "normal", (5,), 5), 20)
    assert same["better or worse"] == 0  # five seeds cannot star
    assert calibrate.passes(same)
    assert not calibrate.passes({**same, "better or worse": 10})
    in_turn = calibrate.measured(calibrate.Case("identical", "normal", (8, 16), 1), 20)  # a quarter of them
    assert 5 * 8 <= in_turn["runs"] <= 5 * 16


def test_a_case_of_the_calibration_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    calibrate = importlib.import_module("calibrate")
    cases = list(calibrate.cases())
    assert len(set(cases)) == len(cases)
    assert {case.shape for case in cases if case.kind == "identical"} == set(calibrate.SHAPES)


def test_the_page_of_the_bench_says_of_each_part_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    bench = importlib.import_module("bench")
    row = {"what": "a step", "measured": "1.07", "bound": "≤ 1.08", "holds": True}
    part = {"where": "a machine", "commit": "abc", "command": "make bench", "rows": [row]}
    page = bench.page({"step": part, "study": {**part, "commit": "def", "rows": [row | {"holds": False}]}})
    assert "| a step | 1.07 | ≤ 1.08 | holds | step |" in page
    assert "| a step | 1.07 | ≤ 1.08 | **missed** | study |" in page
    assert "- study: a machine; commit def; `make bench`" in page
    assert set(bench.PARTS) == {"start", "step", "study"}
