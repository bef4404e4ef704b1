"""What `--plan` foretells: what is left, what a run costs, how long it takes; and it writes nothing."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import harness.forecast
from harness.components.position import RoPE, Sinusoidal
from harness.cost import training_flops
from harness.forecast import forecast, training_cost
from harness.record import RunRecord, Score, Status
from harness.schema import UserError
from harness.spec import ModelSpec, RunSpec
from harness.study import Ablation, Budget, Cell, Plan, make_plan, write_plan
from tasks import Copy, Lengths

SMALL = ModelSpec(d_model=16, num_layers=1, num_heads=2)


def planned(seeds: int = 2, steps: int = 200) -> Plan:
    ablation = Ablation(
        question="What will it cost?",
        model=SMALL,
        tasks={"copy": Copy(lengths=Lengths(train=(1, 6), test=(8,)))},
        axes=("model.position",),
        baseline="sinusoidal",
        variants={"sinusoidal": {"model.position": Sinusoidal()}, "RoPE": {"model.position": RoPE()}},
        budgets={"quick": Budget(seeds=seeds, changes={"train.steps": steps})},
    )
    return make_plan("foretold", ablation, budget="quick", seeds=None, device="cpu")


def record(folder: Path, cell: Cell, seconds: float, status: Status = "finished", beside: float = 0.0) -> None:
    """Leave the record of a cell's run: seconds of training, and those that it took beside."""
    flops = training_cost(cell.spec)[1]
    RunRecord(
        fingerprint=cell.fingerprint,
        spec=cell.spec.document(),
        status=status,
        scores=(Score(length=8, metric="exact_match", value=0.5),),
        ledger={"wall_seconds": seconds, "flops": flops},
        started=1000.0,
        ended=1000.0 + seconds + beside,
    ).write(folder / "runs" / cell.fingerprint / "record.json")


def test_a_run_s_cost_is_what_it_will_read() -> None:
    spec = planned(steps=640).cells[0].spec
    read: Counter[tuple[int, int]] = Counter()
    for step in range(spec.train.steps):
        batch = spec.training_batch(step, torch.device("cpu"))
        read[batch.inputs.shape[1], 0] += batch.inputs.shape[0]
    tokens, flops = training_cost(spec)
    assert tokens == pytest.approx(sum(length * count for (length, _), count in read.items()), rel=0.1)
    assert flops == pytest.approx(training_flops(spec, read.items()), rel=0.1)


def test_every_step_of_a_short_run_is_read() -> None:
    spec = RunSpec(model=SMALL, task=Copy()).replace("train.steps", 3)
    sizes = [spec.train.sampling.batch(spec.task, 0, step, 64, torch.device("cpu")).inputs for step in range(3)]
    assert training_cost(spec)[0] == sum(inputs.numel() for inputs in sizes)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A folder without neighbours: pytest's own lie beside the records of other tests."""
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_without_records_the_time_is_unknown(tmp_path: Path) -> None:
    expected = forecast(planned(), tmp_path / "none")
    assert expected.left == 4
    assert expected.seconds(2) is None
    assert {cell.basis for cell in expected.cells} == {"unknown"}
    assert list(tmp_path.iterdir()) == []


def test_time_comes_from_the_same_cell_else_from_flops(tmp_path: Path) -> None:
    plan = planned()
    record(tmp_path, plan.cells[0], 30.0)
    sinusoidal, rope = forecast(plan, tmp_path).cells
    assert (sinusoidal.variant, sinusoidal.basis, sinusoidal.seconds) == ("sinusoidal", "runs of this cell", 30.0)
    assert (sinusoidal.done, sinusoidal.left) == (1, 1)
    assert rope.basis == "FLOPs"
    assert rope.seconds == pytest.approx(30.0 * rope.flops / sinusoidal.flops)
    assert forecast(plan, tmp_path).seconds(2) == pytest.approx((30.0 + 2 * (rope.seconds or 0)) / 2)


def test_what_a_run_takes_beside_training_does_not_grow_with_its_steps(tmp_path: Path) -> None:
    short, long = planned(steps=200), planned(steps=2000)
    record(tmp_path, short.cells[0], seconds=2.0, beside=5.0)
    sinusoidal = forecast(long, tmp_path).cells[0]
    assert sinusoidal.seconds == pytest.approx(5.0 + 2.0 * 10, rel=0.1)


def test_a_study_without_records_is_judged_by_those_beside_it(tmp_path: Path) -> None:
    plan = planned()
    write_plan(plan, tmp_path / "other", {"command": "harness ablate other"})
    record(tmp_path / "other", plan.cells[0], 30.0)
    (tmp_path / "other" / "runs" / "corrupt").mkdir()
    (tmp_path / "other" / "runs" / "corrupt" / "record.json").write_text("{")
    expected = forecast(plan, tmp_path / "new")
    assert {cell.done for cell in expected.cells} == {0}
    assert expected.cells[0].seconds == 30.0
    assert expected.cells[1].basis == "FLOPs"


def test_failed_runs_are_done_and_say_nothing_of_time(tmp_path: Path) -> None:
    plan = planned(seeds=1)
    for cell in plan.cells:
        record(tmp_path, cell, 1.0, "diverged")
    expected = forecast(plan, tmp_path)
    assert [(cell.done, cell.failed, cell.left, cell.basis) for cell in expected.cells] == [(1, 1, 0, "unknown")] * 2
    assert expected.seconds(2) == 0


def test_an_interrupted_run_has_less_left(tmp_path: Path) -> None:
    plan = planned(seeds=1)
    directory = tmp_path / "runs" / plan.cells[0].fingerprint
    directory.mkdir(parents=True)
    (directory / "curves.jsonl").write_text(json.dumps({"step": 150, "time": 0, "train/loss": 1.0}) + "\n")
    assert forecast(plan, tmp_path).cells[0].steps_left == 200  # no checkpoint to go on from
    (directory / "checkpoint.ckpt").touch()
    cell = forecast(plan, tmp_path).cells[0]
    assert (cell.partial, cell.left, cell.steps_left) == (1, 1, 50)


def test_stale_and_corrupt_records_are_named_and_left_alone(tmp_path: Path) -> None:
    before = planned(steps=100)
    write_plan(before, tmp_path, {"command": "harness ablate foretold"})
    for cell in before.cells:
        record(tmp_path, cell, 1.0)
    plan = planned(steps=200)
    directory = tmp_path / "runs" / plan.cells[0].fingerprint
    directory.mkdir()
    (directory / "record.json").write_text("{")
    other = tmp_path / "runs" / plan.cells[1].fingerprint / "record.json"
    other.parent.mkdir()
    other.write_text((tmp_path / "runs" / before.cells[1].fingerprint / "record.json").read_text())
    files = sorted(tmp_path.rglob("*"))
    expected = forecast(plan, tmp_path)
    assert expected.left == 4
    assert sorted(notice.split(";")[0] for notice in expected.notices[:2]) == sorted(
        f"{path} is corrupt" for path in (directory / "record.json", other)
    )
    assert [notice.split(";")[0] for notice in expected.notices[2:]] == [
        "4 earlier runs no longer fit their spec or result version and would be done again",
    ]
    assert sorted(tmp_path.rglob("*")) == files


def test_a_level_that_cannot_be_counted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(spec: RunSpec) -> tuple[int, float]:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(harness.forecast, "training_cost", raising)
    cause = r"sinusoidal on copy: its cost cannot be counted \(ZeroDivisionError: division by zero\)"
    with pytest.raises(UserError, match=cause):
        forecast(planned(), tmp_path)
