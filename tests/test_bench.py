"""The parts of `make bench` and `make bench-attention` that take a second, so that they do not break unseen."""

import json
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
def test_a_point_of_the_attention_bench_can_be_measured(what: str, least: float) -> None:
    command = [sys.executable, str(BENCH / "attention.py"), "--one", what, "multi-head", "1024"]
    first, *_ = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert first > least
