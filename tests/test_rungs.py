import json
from pathlib import Path

import pytest

from harness.engine import Ended, Job, LocalEngine, Pruned, Reached
from harness.evaluate import fresh_batch
from harness.record import read_curves
from harness.runner import Pruned as GivenUp
from harness.runner import run
from harness.spec import ModelSpec, RunSpec, TrainSpec
from tasks import Copy, Lengths

SPEC = RunSpec(
    model=ModelSpec(d_model=16, num_heads=2, num_layers=1, residual_dropout=0.1),
    task=Copy(lengths=Lengths(train=(1, 3), test=(4,))),
    train=TrainSpec(steps=30, batch_size=4, eval_samples=8, eval_every=10),
    seed=1000,
    samples="tuning",
)


def test_a_run_that_goes_on_is_the_same_to_the_bit(tmp_path: Path) -> None:
    asked: list[tuple[int, float]] = []

    def go_on(step: int, loss: float) -> bool:
        asked.append((step, loss))
        return True

    plain = run(SPEC, directory=tmp_path / "plain", diagnose=False)
    judged = run(SPEC, directory=tmp_path / "judged", diagnose=False, rungs=(3, 10), go_on=go_on)
    assert [step for step, _ in asked] == [3, 10]
    assert all(0 < loss < 10 for _, loss in asked)
    assert judged.scores == plain.scores
    assert repr(judged.final) == repr(plain.final)  # NaN is not equal to itself


def test_a_run_that_is_given_up_keeps_its_curve_and_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(GivenUp, match="pruned at step 20"):
        run(SPEC, directory=tmp_path, diagnose=False, rungs=(10, 20), go_on=lambda step, loss: step < 20)
    assert [line["step"] for line in read_curves(tmp_path / "curves.jsonl")] == [10, 20]
    assert not (tmp_path / "record.json").exists()
    assert not (tmp_path / "checkpoint.ckpt").exists()


def test_tuning_and_final_samples_differ() -> None:
    final = SPEC.replace("samples", "final")
    for stream in ("eval", "monitor"):
        one, other = (fresh_batch(spec, stream, 8, 4).inputs for spec in (SPEC, final))
        assert not one.equal(other)


@pytest.mark.slow
def test_workers_ask_the_engine_wait_and_take_jobs_that_come_meanwhile(tmp_path: Path) -> None:
    specs = [SPEC.replace("seed", seed) for seed in (1000, 1001, 1002)]
    names = [spec.fingerprint() for spec in specs]
    jobs = [
        Job(name, spec.model_dump_json(), tmp_path / "runs" / name, diagnose=False, rungs=(10,))
        for spec, name in zip(specs, names, strict=True)
    ]
    ends: dict[str, object] = {}
    with LocalEngine(1) as engine:
        for event in engine.run(jobs[:1]):
            if isinstance(event, Reached):
                engine.answer(event.fingerprint, go_on=event.fingerprint != names[1])
            elif isinstance(event, Ended | Pruned):
                ends[event.fingerprint] = event
                if len(ends) < len(jobs):
                    engine.add(jobs[len(ends)])
    assert [type(ends[name]) for name in names] == [Ended, Pruned, Ended]
    assert ends[names[1]] == Pruned(names[1], 10)
    assert json.loads((tmp_path / "runs" / names[2] / "record.json").read_text())["status"] == "finished"
