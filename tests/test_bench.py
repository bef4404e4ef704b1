"""The parts of `make bench` and `make bench-attention` that take a second, so that they do not break unseen."""

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
