"""What every test gets: one torch thread, reproducible draws, a results folder of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Tests run on both cores, a process each (`make test`); a second torch thread makes each several times slower.
# OMP_NUM_THREADS stays unset on purpose: worker processes would inherit it, and hide one that forgot its own setting.
torch.set_num_threads(1)

# CI's machines are shared and noisy: no deadlines. Drawn examples are the same in every run: a red run stays red.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")


@pytest.fixture(autouse=True)
def _own_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws wherever xdist runs the test, and no tracking server from the developer's shell."""
    torch.manual_seed(0)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """An empty results folder, as `--results` takes it."""
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit code, stdout, stderr."""
    from harness.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
