"""The parts of `make bench` that take a second, so that it does not break unseen."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"


@pytest.mark.parametrize("position", ["RoPE", "ALiBi"])
def test_the_memory_of_attention_can_be_measured(position: str) -> None:
    command = [sys.executable, str(BENCH / "memory.py"), position, "2048"]
    assert int(subprocess.run(command, check=True, capture_output=True).stdout) > 2048 * 32 * 4  # at least the result
