"""What probes find in an untrained model is kept once a variant, heals, and never costs a run its result."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from faults.structural import another_scale
from torch import Tensor, nn

from harness import ModelSpec, RunSpec, TrainSpec
from harness.components.feedforward import FeedForward, ReLU
from harness.components.position import RoPE
from harness.diagnostics import PROBES
from harness.diagnostics import structure as kept
from harness.diagnostics.structure import probes_version, structural
from harness.diagnostics.watch import PROBED
from harness.module import TransformerModule
from harness.record import RunRecord
from harness.runner import run
from tasks import Copy, Lengths

TINY: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 1, "feedforward": ReLU(d_ff=16)}


def tiny(seed: int = 0, **model: Any) -> RunSpec:
    return RunSpec(
        model=ModelSpec(**TINY | model),
        task=Copy(lengths=Lengths(train=(1, 3), test=(4,))),
        train=TrainSpec(steps=2, batch_size=4, eval_samples=4),
        seed=seed,
    )


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """Every model that is examined is scaled wrongly; the list has the specs of those that were built for it."""
    built: list[RunSpec] = []

    def build(spec: RunSpec) -> TransformerModule:
        module = TransformerModule(spec)
        another_scale(module, 2.0)
        built.append(spec)
        return module

    monkeypatch.setattr("harness.diagnostics.subject.TransformerModule", build)
    return built


def test_seeds_of_a_variant_share_one_file_and_other_variants_do_not(tmp_path: Path, faulty: list[RunSpec]) -> None:
    first, *others = (structural(tiny(seed), tmp_path) for seed in (3, 1, 2))
    assert [found.probe for found in first if found.alarm] == ["scale_fit"]
    assert first[0].value == pytest.approx(2.0, rel=0.01)
    assert others == [first, first]
    assert [path.name for path in tmp_path.iterdir()] == [f"{tiny(0).fingerprint()}-{probes_version()}.json"]
    assert faulty == [tiny(0)]
    structural(tiny(position=RoPE()), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("torn", ["", "[", "{}", '[{"probe": "x"}]', "null"])
def test_a_torn_file_is_made_anew(torn: str, tmp_path: Path, faulty: list[RunSpec]) -> None:
    path = tmp_path / f"{tiny().fingerprint()}-{probes_version()}.json"
    path.write_text(torn)
    found = structural(tiny(), tmp_path)
    assert [said["probe"] for said in json.loads(path.read_text())] == ["scale_fit"]
    assert structural(tiny(), tmp_path) == found
    assert len(faulty) == 1


def test_runs_of_a_variant_have_its_findings_first(tmp_path: Path, faulty: list[RunSpec]) -> None:
    records = [run(tiny(seed), directory=tmp_path / "runs" / str(seed), probes=tmp_path / "probes") for seed in (0, 1)]
    assert [record.findings[0].probe for record in records] == ["scale_fit", "scale_fit"]
    assert [record.diagnosis for record in records] == ["scale_fit", "scale_fit"]
    assert len(list((tmp_path / "probes").iterdir())) == 1
    assert {record.ledger["diagnostics"] for record in records} == {"structure, training"}


def test_without_diagnostics_nothing_is_examined_and_the_ledger_says_so(tmp_path: Path) -> None:
    record = run(tiny(), directory=tmp_path / "run", probes=tmp_path / "probes", diagnose=False)
    assert (record.ledger["diagnostics"], record.findings) == ("off", ())
    assert not (tmp_path / "probes").exists()
    lines = map(json.loads, (tmp_path / "run" / "curves.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines] == [2]


class Shy(nn.Module):
    """Cannot be looked at in other lengths than that of the task, as probes do."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 12:
            raise ValueError("twelve tokens\nat most")
        return x


class ShortSighted(FeedForward):
    """x, of twelve tokens at most."""

    def build(self, d_model: int) -> nn.Module:
        return Shy()


class Unbuildable(FeedForward):
    """Cannot be built."""

    def build(self, d_model: int) -> nn.Module:
        raise RuntimeError("no such part")


def test_a_level_that_cannot_be_examined_gives_remarks_and_the_run_survives(tmp_path: Path) -> None:
    spec = tiny(feedforward=ShortSighted())
    record = run(spec, directory=tmp_path / "run", probes=tmp_path / "probes")
    assert (record.status, record.cause) == ("finished", "")
    remarks = {found.probe: found for found in record.findings if found.symptom == "it could not look at the model"}
    assert {"finite", "causal_leak"} <= remarks.keys() < {probe.name for probe in PROBES}
    assert not any(found.alarm for found in remarks.values())
    assert {found.cause for found in remarks.values()} == {"ValueError: twelve tokens at most"}
    again = structural(spec, tmp_path / "probes")  # NaN is read back as it was written
    assert [found.probe for found in again] == list(remarks)
    assert all(math.isnan(found.value) for found in again)
    assert RunRecord.read(tmp_path / "run" / "record.json").findings[0].cause == "ValueError: twelve tokens at most"


def test_a_level_that_cannot_be_built_fails_its_run_and_nothing_else(tmp_path: Path) -> None:
    record = run(tiny(feedforward=Unbuildable()), directory=tmp_path / "run", probes=tmp_path / "probes")
    assert (record.status, record.cause) == ("failed", "RuntimeError: no such part")
    assert record.findings == ()


def test_ranks_are_the_order_of_triage_over_probes_and_detectors() -> None:
    assert list(kept.RANKS.values()) == list(range(len(kept.NAMES)))
    assert kept.NAMES.index("init_loss") < kept.NAMES.index("learning_rate_fit")


class Camera(nn.Module):
    """Cannot be looked at by the watch, which has four sequences in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) == PROBED:
            raise ValueError("no pictures")
        return x


class Private(FeedForward):
    """x, but not for the watch."""

    def build(self, d_model: int) -> nn.Module:
        return Camera()


def test_a_level_that_the_watch_cannot_look_into_gives_a_remark_and_the_run_survives(tmp_path: Path) -> None:
    spec = tiny(feedforward=Private()).replaced({"train.eval_samples": 5})
    record = run(spec, directory=tmp_path)
    assert record.status == "finished"
    assert [(found.cause, found.alarm) for found in record.findings if found.probe == "watch"] == [
        ("ValueError: no pictures", False)
    ]


def test_nothing_alarms_in_a_model_with_a_sublayer_of_a_users_own(tmp_path: Path) -> None:
    assert not [found for found in structural(tiny(feedforward=Private()), tmp_path) if found.alarm]
