"""The doctor: each check tries the thing itself, names a remedy, and leaves nothing behind."""

import json
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from harness import doctor
from harness.cli import main
from harness.components.attention import Attention
from harness.components.position import Position
from harness.doctor import FAIL, OK, WARN, Check, examine
from harness.schema import is_foreign


def named(checks: list[Check], name: str) -> Check:
    """The check of that name."""
    return next(check for check in checks if check.name == name)


def test_this_machine_can_run_a_study_and_nothing_is_written(tmp_path: Path) -> None:
    results = tmp_path / "results"
    checks = examine(results)
    assert {check.state for check in checks} <= {OK, WARN}
    assert all(bool(check.remedy) == (check.state != OK) for check in checks)
    names = {check.name for check in checks}
    assert {"python", "torch", "mlflow", "device", "cores", "disk", "results", "tracking store", "commit"} <= names
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_flash_runs_forward_and_backward_on_the_cpu(precision: torch.dtype) -> None:
    assert doctor.kernel("cpu", precision) == Check(
        f"flash on cpu, {str(precision).removeprefix('torch.')}", OK, "forward and backward"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has other kernels: make gpu-check")
def test_the_table_of_kernels_has_a_row_for_every_level_with_kernel_and_reason(tmp_path: Path) -> None:
    found = {check.name: check.found for check in examine(tmp_path / "results")}
    flash = "flash: every call of attention runs on it"
    bias = "adds a T×T bias, which flash takes only on the CPU, untrained"
    off_flash = {
        "attention = Linear": "none: Linear has no softmax",
        "position = T5Bias": f"math: T5Bias {bias}",
        "position = TransformerXL": f"math: TransformerXL {bias}",
    }
    axes = {"attention": Attention, "position": Position}
    own = [
        f"{name} = {k}" for name, axis in axes.items() for k, level in axis.levels().items() if not is_foreign(level)
    ]
    assert {name: found.get(name) for name in own} == dict.fromkeys(own, flash) | off_flash
    assert found["flash on cpu, float32"] == found["flash on cpu, bfloat16"] == "forward and backward"


def test_a_kernel_that_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("No available kernel. Aborting execution.\nand more")

    monkeypatch.setattr(doctor, "scaled_dot_product_attention", no_kernel)
    check = doctor.kernel("cpu", torch.float32)
    assert (check.state, check.found) == (WARN, "does not run: No available kernel. Aborting execution.")


def test_a_kernel_that_is_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter((1.0, 2.0, 3.0))

    def noise(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return query * next(draws)

    monkeypatch.setattr(doctor, "scaled_dot_product_attention", noise)
    assert doctor.kernel("cpu", torch.float32).state == FAIL


def test_versions_outside_the_bounds_are_named() -> None:
    assert doctor.package(Requirement("torch>=2.9,<2.14")).state == OK
    old = doctor.package(Requirement("torch>=99"))
    assert (old.state, old.remedy) == (WARN, "make setup (pyproject.toml asks for >=99)")
    assert doctor.package(Requirement("no-such-package>=1")).state == WARN
    assert doctor.package(Requirement("no-such-package>=1")).found == "absent"


def test_results_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check = doctor.writable(tmp_path / "file" / "results")
    assert check.state == FAIL
    assert str(tmp_path / "file" / "results") in check.found


def test_results_that_are_not_there_yet_can_be_made(tmp_path: Path) -> None:
    assert doctor.writable(tmp_path / "a" / "b").state == OK
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "state", "words"),
    [
        (None, OK, "will be made by the first study"),
        ("nowhere", FAIL, "has no scheme"),
        ("http://127.0.0.1:9", WARN, "does not answer"),
    ],
)
def test_the_tracking_store_is_looked_at_and_not_made(uri: str | None, state: str, words: str, tmp_path: Path) -> None:
    check = doctor.store(tmp_path / "results", uri)
    assert check.state == state
    assert words in check.found
    assert list(tmp_path.iterdir()) == []


def test_the_commit_says_whether_records_name_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, state in (("", WARN), ("abc-dirty", WARN), ("abc", OK)):
        monkeypatch.setattr(doctor, "commit", lambda found=found: found)
        assert doctor.checkout().state == state


def test_the_command_exits_1_when_something_does_not_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "kernels", lambda: iter(()))
    assert main(["doctor", "--results", str(tmp_path / "results"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    (tmp_path / "file").touch()
    assert main(["doctor", "--results", str(tmp_path / "file" / "results")]) == 1
    assert "fail" in capsys.readouterr().out
