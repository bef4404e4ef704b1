"""What `harness diagnose` is asked of: specs and presets, runs by every name they have."""

import json
from pathlib import Path

import pytest
import torch
from faults.training import BROKEN

import harness.diagnosis
from harness import ModelSpec, RunSpec, TrainSpec, run
from harness.cli import main
from harness.components.position import RoPE
from harness.diagnosis import check_room, of_run, of_spec
from harness.diagnostics import DETECTORS, examine
from harness.machine import available_memory
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


def test_a_model_that_finds_no_room_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness.diagnosis, "available_memory", lambda: 64 * 2**30)
    assert main(["diagnose", "--spec", "llama-2-7b"]) == 2
    assert "llama-2-7b: to examine 6.48 G parameters takes some 145 GiB" in capsys.readouterr().err
    free = available_memory()
    assert free is None or 2**20 < free < 2**45
    check_room("any", 10**6)


def test_the_command_says_what_alarms(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "--spec", str(folder / "spec.json")]) == 0
    assert "none of them alarms" in capsys.readouterr().out
    assert main(["diagnose", SPEC.fingerprint(), "--results", str(folder.parents[2])]) == 1
    said = capsys.readouterr().out
    assert "one of them alarms" in said
    assert "not_learned: the task is not learned" in said  # after five steps
    (tmp_path / "model.json").write_text(json.dumps(SPEC.document() | {"train": {"learning_rate": 1e-7}}))
    assert main(["diagnose", "--spec", str(tmp_path / "model.json"), "--overfit", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["diagnosis"] == "overfit_one_batch"
    (alarm,) = (finding for finding in document["findings"] if finding["alarm"])
    assert alarm["value"] > alarm["high"]
    assert {"symptom", "cause", "remedy", "source"} <= alarm.keys()


def test_the_command_names_how_a_run_was_trained_wrongly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = next(fault for fault in BROKEN if fault.name == "β₂ changed")
    with fault.injected(0.5):
        run(SPEC, directory=tmp_path / "run")
    assert main(["diagnose", str(tmp_path / "run"), "--results", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    found = {finding["probe"]: finding for finding in document["findings"]}
    assert document["diagnosis"] == "optimizer_fit"
    assert found["optimizer_fit"]["cause"] == "1 − β₂ is 25 times the declared one"
    assert found["optimizer_fit"]["evidence"]["beta2"] == pytest.approx(25)
    assert found["learning_rate_fit"]["value"] == pytest.approx(1)
    assert list(found)[-len(DETECTORS) :] == [detector.name for detector in DETECTORS]
    assert main(["diagnose", str(tmp_path / "run"), "--results", str(tmp_path)]) == 1
    assert "optimizer_fit: the optimiser does not step as declared" in capsys.readouterr().out


def test_remarks_are_said_and_are_no_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "run"
    run(SPEC, directory=directory)
    lines = [json.loads(line) for line in (directory / "curves.jsonl").read_text().splitlines()]
    for line in lines:
        if "update/ratio" in line:
            line["update/ratio"] = 0.5
    (directory / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = json.loads((directory / "record.json").read_text())
    record["final"]["eval/in_distribution"] = 1.0
    (directory / "record.json").write_text(json.dumps(record))
    assert main(["diagnose", str(directory), "--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "(unusual, and often healthy) update_ratio: a step moves weights by too much or too little" in said
    assert "none of them alarms" in said


def test_the_command_asks_for_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose"]) == 2
    assert "name a run, or a preset or file with --spec" in capsys.readouterr().err
    assert main(["diagnose", "a", "--spec", "modern-small"]) == 2
    assert "a and --spec modern-small exclude each other: diagnose a run, or a spec" in capsys.readouterr().err


def test_the_catalogue_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "probes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    probes, detectors = document["probes"], document["detectors"]
    assert {"causal_leak", "scale_fit", "wiring"} <= {probe["name"] for probe in probes}
    assert [detector["name"] for detector in detectors] == [detector.name for detector in DETECTORS]
    assert all(row["cause"] and row["remedy"] and row["source"] and row["speaks"] for row in probes + detectors)
    assert main(["list", "probes"]) == 0
    said = capsys.readouterr().out
    assert "healthy: at least 0.99, at most 1.01" in said
    assert said.index("scale_fit:") < said.index("Detectors, of how a run trained:") < said.index("update_ratio:")
    assert "healthy: at least 0.0001, at most 0.01; an alarm where training came to harm" in said
    assert "healthy: at least 0.5; never an alarm" in said
