"""`make gpu-check` as far as a machine without a GPU can see it: it starts where little is installed, it says that
there is no GPU, and what it would check is all there.
"""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ablations import baseline
from harness.components.attention import Attention
from harness.components.position import Position

ROOT = Path(__file__).parents[1]
SAID = "gpu-check: torch sees no CUDA device here; nothing was checked, and this is no pass\n"
PLAIN = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}  # nothing of a make that runs these tests

# A finder that knows them better: as on a machine where they are not installed.
BLOCKED = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mlflow", "optuna", "tokenizers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
runpy.run_path("tests/bench/gpu_check.py", run_name="__main__")
"""


def test_it_needs_no_tracker_sweeper_or_tokeniser_and_says_that_there_is_no_gpu() -> None:
    command = [sys.executable, "-c", BLOCKED]
    done = subprocess.run(command, cwd=ROOT, env=PLAIN, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, SAID), done.stderr


def test_make_needs_no_installation_for_it(tmp_path: Path) -> None:
    for name in ("Makefile", "harness", "tasks", "ablations", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    make = [shutil.which("make") or "make", "--silent", "gpu-check", f"PYTHON={sys.executable}"]
    done = subprocess.run(make, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, SAID), done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_python_without_torch_is_told_in_a_sentence(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")  # finds no module
    (tmp_path / "python").chmod(0o755)
    make = [shutil.which("make") or "make", "--silent", "gpu-check", "PYTHON=./python"]
    done = subprocess.run(make, cwd=tmp_path, env=PLAIN, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("make: ./python lacks torch, pytorch-lightning or pydantic: ")


def test_it_would_check_every_level_and_the_position_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tests" / "bench")
    script = importlib.import_module("gpu_check")
    found = {check.__name__: [what for what, _ in check()] for check in script.CHECKS}
    levels = [*Attention.levels(), *Position.levels()]
    assert found["kernels"] == [f"kernel of {kind}" for kind in levels]
    assert found["parity"] == [f"bf16 against fp64, {kind}" for kind in levels]
    assert {f"memory, MultiHead {kind}" for kind in ("NoPE", "T5Bias", "TransformerXL")} < set(found["memory"])
    trained = [measure.args[0] for _, measure in script.training()]
    kinds = ("Sinusoidal", "NoPE", "Learned", "RoPE", "ALiBi", "T5Bias")
    assert [(run.model.position.kind, run.task.kind) for run in trained] == [
        (kind, task) for kind in kinds for task in ("Copy", "Reverse")
    ]
    for run in trained:
        assert run.model.replace("position", baseline.model.position) == baseline.model
        assert run.train.replace("steps", baseline.train.steps) == baseline.train
        assert (run.task.lengths, run.precision) == (baseline.lengths, "bf16")
