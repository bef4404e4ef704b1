"""What `harness diagnose` is asked of: specs and presets, runs by every name they have."""

import json
from pathlib import Path

import pytest
import torch

from harness import ModelSpec, RunSpec, TrainSpec, run
from harness.cli import main
from harness.components.position import RoPE
from harness.diagnosis import of_run, of_spec
from harness.diagnostics import examine
from harness.schema import UserError
from tasks import Copy, Lengths

SPEC = RunSpec(
    model=ModelSpec(d_model=16, num_layers=1, num_heads=2, position=RoPE()),
    task=Copy(lengths=Lengths(train=(1, 3), test=(4,))),
    train=TrainSpec(steps=5, batch_size=8, eval_samples=8),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a study of a results folder."""
    folder = tmp_path_factory.mktemp("results") / "mine" / "runs" / SPEC.fingerprint()
    run(SPEC, directory=folder)
    (folder / "mirror.json").write_text(json.dumps({"run_id": "an-id-of-mlflow"}))
    return folder


def test_a_run_is_found_by_every_name(folder: Path) -> None:
    results = folder.parents[2]
    for name in (SPEC.fingerprint(), "an-id-of-mlflow", str(folder), str(folder / "model.pt")):
        found = of_run(name, results)
        assert (found.name, found.outcome) == (f"{SPEC.fingerprint()}, model.pt", "finished")
        weights = torch.load(folder / "model.pt", weights_only=True)
        assert all(value.equal(weights[path]) for path, value in found.subject.model.state_dict().items())


def test_a_trained_model_is_not_judged_by_how_it_was_drawn(folder: Path) -> None:
    findings = {finding.probe.name: finding for finding in examine(of_run(str(folder), folder).subject)}
    assert not findings["init_std"].measured
    assert not findings["init_loss"].measured
    assert findings["rotation_fit"].measured
    assert not any(finding.alarms for finding in findings.values())


def test_an_unfinished_run_has_the_weights_of_its_checkpoint_or_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text((folder / "spec.json").read_text())
    assert "untrained" in of_run(str(tmp_path), tmp_path).name
    state = {f"model.{name}": value for name, value in torch.load(folder / "model.pt", weights_only=True).items()}
    torch.save({"state_dict": state}, tmp_path / "checkpoint.ckpt")
    found = of_run(str(tmp_path), tmp_path)
    assert found.name.endswith("checkpoint.ckpt")
    assert found.subject.trained


@pytest.mark.parametrize("name", ["no-such-run", "."])
def test_what_is_no_run_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run"):
        of_run(name, tmp_path)


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text((folder / "spec.json").read_text())
    for broken in (b"torn", b""):
        (tmp_path / "model.pt").write_bytes(broken)
        with pytest.raises(UserError, match="not the weights of its spec"):
            of_run(str(tmp_path), tmp_path)
    torch.save({"head.weight": torch.zeros(3, 3)}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="not the weights of its spec"):
        of_run(str(tmp_path), tmp_path)


def test_specs_with_and_without_a_task_and_presets(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(SPEC.model.document()))
    for name in (str(folder / "spec.json"), str(tmp_path / "model.json"), "modern-small"):
        subject = of_spec(name).subject
        assert not subject.trained
        assert subject.spec is not None
        assert subject.spec.task.kind == "Copy"


def test_the_command_says_what_alarms(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", SPEC.fingerprint(), "--results", str(folder.parents[2])]) == 0
    assert "none of them alarms" in capsys.readouterr().out
    (tmp_path / "model.json").write_text(json.dumps(SPEC.document() | {"train": {"learning_rate": 1e-7}}))
    assert main(["diagnose", "--spec", str(tmp_path / "model.json"), "--overfit", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["diagnosis"] == "overfit_one_batch"
    (alarm,) = (finding for finding in document["findings"] if finding["alarm"])
    assert alarm["value"] > alarm["high"]
    assert {"symptom", "cause", "remedy", "source"} <= alarm.keys()


def test_the_command_asks_for_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose"]) == main(["diagnose", "a", "--spec", "modern-small"]) == 2
    assert capsys.readouterr().err.count("name a run, or a preset or file with --spec") == 2


def test_the_catalogue_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "probes", "--json"]) == 0
    probes = json.loads(capsys.readouterr().out)["probes"]
    assert {"causal_leak", "scale_fit", "wiring"} <= {probe["name"] for probe in probes}
    assert all(probe["cause"] and probe["remedy"] and probe["source"] for probe in probes)
    assert main(["list", "probes"]) == 0
    assert "healthy: at least 0.99, at most 1.01" in capsys.readouterr().out
