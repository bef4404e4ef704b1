"""Runs as pure functions of their specs: interrupted, killed or left alone, the bits are the same."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness import runner
from harness.components.feedforward import FeedForward, MoE, ReLU
from harness.components.kernel import Flash, Math
from harness.components.norm import BatchNorm
from harness.components.position import Learned, NoPE, RoPE, T5Bias
from harness.cost import inference_costs
from harness.evaluate import ANSWERED
from harness.journal import Journal
from harness.module import TransformerModule
from harness.record import RunRecord, read_curves
from harness.runner import Interrupted, Progress, run
from harness.schema import UserError
from harness.spec import Constant, Finite, ModelSpec, RunSpec, TrainSpec
from tasks import Copy, Lengths

TINY: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 1, "feedforward": ReLU(d_ff=16)}
LOOKED_AT = (0, 1, 2, 4, 8)  # steps at which diagnostics look, beside those of the curves


def tiny(*, steps: int = 60, seed: int = 0, model: dict[str, Any] | None = None, **train: Any) -> RunSpec:
    return RunSpec(
        model=ModelSpec(**{**TINY, **(model or {})}),
        task=Copy(lengths=Lengths(train=(1, 3), test=(4, 5)), num_symbols=4),
        train=TrainSpec(steps=steps, batch_size=8, eval_samples=8, eval_every=20, **train),
        seed=seed,
    )


def values(directory: Path) -> list[dict[str, float]]:
    """The curves without the times of day."""
    lines = map(json.loads, (directory / "curves.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def weights(directory: Path) -> dict[str, Tensor]:
    return dict(torch.load(directory / "model.pt", weights_only=True))


def assert_same_run(one: Path, other: Path) -> None:
    first, second = RunRecord.read(one / "record.json"), RunRecord.read(other / "record.json")
    assert first.scores == second.scores
    assert {k: v for k, v in first.final.items() if v == v} == {k: v for k, v in second.final.items() if v == v}
    assert first.ledger["tokens"] == second.ledger["tokens"]
    assert first.ledger["flops"] == second.ledger["flops"]
    assert values(one) == values(other)
    assert weights(one).keys() == weights(other).keys()
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    directory = tmp_path_factory.mktemp("whole")
    run(tiny(), directory=directory)
    return directory


def test_a_run_leaves_all_that_its_record_speaks_of(whole: Path) -> None:
    record = RunRecord.read(whole / "record.json")
    assert (record.status, record.cause) == ("finished", "")
    assert record.fingerprint == tiny().fingerprint()
    assert RunSpec.parse(record.spec) == tiny()
    assert {score.length for score in record.scores} == {1, 2, 3, 4, 5}
    assert {score.metric for score in record.scores} == {"exact_match", "exact_match_no_end", "token_accuracy"}
    assert record.final["eval/greedy_agreement"] == 1.0
    assert record.ledger["steps"] == 60
    assert record.ledger["attention_backend"] == "flash"
    assert record.ledger["active_parameters"] == record.ledger["parameters"]
    assert inference_costs(tiny()).items() <= record.ledger.items()
    assert record.environment["torch"] == torch.__version__
    assert not (whole / "checkpoint.ckpt").exists()
    assert [line["step"] for line in values(whole)] == sorted([*LOOKED_AT, *range(10, 61, 10), 51])
    monitored = [line["step"] for line in values(whole) if "eval/extrapolation" in line]
    assert monitored == [20, 40]
    assert [line["step"] for line in values(whole) if "train/loss" in line] == list(range(10, 61, 10))
    assert sorted(int(path.stem) for path in (whole / "attention").iterdir()) == [0, 15, 30, 45, 60]


def test_the_untrained_loss_is_that_of_the_first_step() -> None:
    final = run(tiny(steps=1)).final
    assert final["train/initial_loss"] == pytest.approx(final["train/loss"], rel=1e-6)


def test_what_was_learned_by_heart_is_a_gap(tmp_path: Path) -> None:
    # Six samples of 16³ and 16⁴ each: the model learns them and not to copy.
    run_spec = RunSpec(
        model=ModelSpec(**TINY),
        task=Copy(lengths=Lengths(train=(3, 4), test=(5,))),
        train=TrainSpec(steps=250, batch_size=6, learning_rate=0.01, eval_samples=32, sampling=Finite(num_samples=12)),
    )
    final = run(run_spec, directory=tmp_path).final
    assert final["seen/exact_match"] == 1
    assert final["eval/in_distribution"] < 0.2
    assert final["seen/loss"] < 0.1 < 1 < final["eval/loss"]
    assert final["eval/confidence"] > final["eval/accuracy"] + 0.2
    assert final["eval/calibration_error"] > 0.2


def test_a_run_on_fresh_data_says_how_sure_it_is_and_knows_no_seen_samples(whole: Path) -> None:
    final = RunRecord.read(whole / "record.json").final
    assert all(math.isfinite(final[name]) for name in ANSWERED)
    assert not any(name.startswith("seen/") for name in final)


def test_tokens_are_those_of_the_batches(whole: Path) -> None:
    spec, read = tiny(), 0
    for step in range(60):
        read += spec.train.sampling.batch(spec.task, spec.seed, step, 8, torch.device("cpu")).inputs.numel()
    assert RunRecord.read(whole / "record.json").ledger["tokens"] == read


def test_attention_maps_are_causal_distributions_with_token_labels(whole: Path) -> None:
    kept = np.load(whole / "attention" / "000060.npz")
    maps = kept["weights"].astype(np.float32)
    layers, heads, rows, columns = maps.shape
    assert (layers, heads, rows) == (1, 2, columns)
    assert np.allclose(maps.sum(-1), 1, atol=2e-3)
    assert not maps[:, :, np.triu_indices(rows, 1)[0], np.triu_indices(rows, 1)[1]].any()
    assert kept["labels"].tolist()[0] == "BOS"
    assert "SEP" in kept["labels"]


def test_the_same_spec_gives_the_same_bits(whole: Path, tmp_path: Path) -> None:
    run(tiny(), directory=tmp_path)
    assert_same_run(whole, tmp_path)


def test_another_seed_gives_other_bits(whole: Path, tmp_path: Path) -> None:
    run(tiny(seed=1), directory=tmp_path)
    assert values(tmp_path) != values(whole)


@pytest.mark.parametrize("checks", [1, 3, 5])
def test_an_interrupted_run_resumes_to_the_same_bits(whole: Path, tmp_path: Path, checks: int) -> None:
    answers = iter([False] * (checks - 1) + [True] + [False] * 100)
    with pytest.raises(Interrupted) as caught:
        run(tiny(), directory=tmp_path, should_stop=lambda: next(answers))
    assert caught.value.step == 10 * checks
    assert not (tmp_path / "record.json").exists()
    run(tiny(), directory=tmp_path)
    assert_same_run(whole, tmp_path)


def test_a_stop_after_the_last_step_comes_too_late(whole: Path, tmp_path: Path) -> None:
    answers = iter([False] * 5 + [True] + [False] * 100)
    assert run(tiny(), directory=tmp_path, should_stop=lambda: next(answers)).status == "finished"
    assert_same_run(whole, tmp_path)


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from harness import journal
from harness.runner import run
from test_runner import tiny
journal.CHECKPOINT_SECONDS = 0.0
run(tiny(steps=400), directory=Path({directory!r}), on_progress=lambda p: print(p.step, flush=True))
"""


def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(tmp_path: Path) -> None:
    spec = tiny(steps=400)
    run(spec, directory=tmp_path / "whole")
    killed = tmp_path / "killed"
    script = KILLED.format(tests=str(Path(__file__).parent), directory=str(killed))
    for after in (30, 130, 250):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout
        for line in process.stdout:
            if int(line) >= after:
                break
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        assert (killed / "checkpoint.ckpt").exists()
    run(spec, directory=killed)
    assert_same_run(tmp_path / "whole", killed)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04torn"])
def test_a_corrupt_checkpoint_is_set_aside_and_the_run_done_anew(
    whole: Path, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoint.ckpt").write_bytes(content)
    run(tiny(), directory=tmp_path)
    assert (tmp_path / "checkpoint.ckpt.corrupt").read_bytes() == content
    assert "is corrupt" in caplog.text
    assert_same_run(whole, tmp_path)


def test_a_corrupt_spec_is_set_aside_and_the_record_says_whose_run_it_is(whole: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(whole, tmp_path / "run")
    (directory / "spec.json").write_text("{")
    told: list[str] = []
    with pytest.raises(UserError, match="holds the run of another spec"):
        run(tiny(seed=7), directory=directory, on_notice=told.append)
    assert told == [f"{directory}/spec.json is corrupt; kept as spec.json.corrupt, the run goes on without it"]
    assert (directory / "spec.json.corrupt").read_text() == "{"
    assert run(tiny(), directory=directory).scores == RunRecord.read(whole / "record.json").scores
    (directory / "record.json").unlink()
    (directory / "spec.json").write_bytes(b"\xff")
    assert run(tiny(), directory=directory).status == "finished"
    assert json.loads((directory / "spec.json").read_text()) == tiny().document()


def test_a_torn_last_line_of_the_curves_is_written_anew(whole: Path, tmp_path: Path) -> None:
    answers = iter([False, True] + [False] * 100)
    with pytest.raises(Interrupted):
        run(tiny(), directory=tmp_path, should_stop=lambda: next(answers))
    with (tmp_path / "curves.jsonl").open("a") as file:
        file.write('{"step": 30, "tim')
    run(tiny(), directory=tmp_path)
    lines = (tmp_path / "curves.jsonl").read_text().splitlines()
    sound = [json.loads(line) for line in lines if line.endswith("}")]
    assert [line["step"] for line in sound] == sorted([*LOOKED_AT, *range(10, 61, 10), 51])


def test_a_finished_run_is_read_not_redone(whole: Path) -> None:
    before = (whole / "record.json").stat().st_mtime_ns
    record = run(tiny(), directory=whole, on_progress=lambda progress: pytest.fail("trained again"))
    assert record.scores == RunRecord.read(whole / "record.json").scores
    assert (whole / "record.json").stat().st_mtime_ns == before


def test_a_directory_that_holds_another_run_is_refused(whole: Path) -> None:
    with pytest.raises(UserError, match="holds the run of another spec"):
        run(tiny(seed=7), directory=whole)


def test_a_run_without_a_directory_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(tiny(steps=10)).status == "finished"
    assert list(tmp_path.iterdir()) == []


def test_a_run_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    run(tiny(steps=10))
    assert capfd.readouterr() == ("", "")


def test_progress_is_told_every_few_steps() -> None:
    told: list[Progress] = []
    run(tiny(steps=25), on_progress=told.append)
    assert [progress.step for progress in told] == [10, 20, 25]
    assert all(progress.steps == 25 and progress.loss > 0 and progress.steps_per_second > 0 for progress in told)


def test_divergence_is_a_result_with_a_cause_and_zero_scores() -> None:
    record = run(tiny(learning_rate=10.0, schedule=Constant(), gradient_clip=None, model={"feedforward": Exploding()}))
    assert record.status == "diverged"
    assert "not finite" in record.cause
    assert {score.value for score in record.scores} == {0.0}
    assert {score.mark for score in record.scores} == {"diverged"}
    assert all(math.isnan(record.final[name]) for name in ANSWERED)


def test_a_loss_that_ends_above_its_start_is_divergence() -> None:
    record = run(tiny(steps=100, learning_rate=10.0, schedule=Constant(), gradient_clip=None))
    assert record.status == "diverged"
    assert record.cause


def test_an_exception_in_a_component_is_a_failed_run(caplog: pytest.LogCaptureFixture) -> None:
    record = run(tiny(model={"feedforward": Raising()}))
    assert record.status == "failed"
    assert record.cause == "RuntimeError: this component is broken"
    assert "Traceback" in caplog.text


def test_a_run_that_fails_after_training_has_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> float:
        raise RuntimeError("cannot be counted")

    monkeypatch.setattr("harness.runner.training_flops", broken)
    record = run(tiny())
    assert (record.status, record.scores) == ("failed", ())
    assert all(math.isnan(record.final[name]) for name in (*ANSWERED, "eval/greedy_agreement"))


def test_a_full_disk_is_no_outcome_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "curves.jsonl")

    monkeypatch.setattr(Journal, "write", full)
    with pytest.raises(OSError, match="No space left"):
        run(tiny(), directory=tmp_path)
    assert not (tmp_path / "record.json").exists()


def test_running_out_of_memory_is_told_apart() -> None:
    record = run(tiny(model={"feedforward": Greedy()}))
    assert record.status == "out_of_memory"
    assert record.cause


def test_an_unsupported_length_scores_zero_and_is_marked() -> None:
    longest_trained = 2 * 3 + 2
    record = run(tiny(steps=10, model={"position": Learned(max_length=longest_trained)}))
    assert record.status == "finished"
    marks = {score.length: (score.value, score.mark) for score in record.scores if score.metric == "exact_match"}
    assert marks[4] == marks[5] == (0.0, "unsupported")
    assert marks[3][1] != "unsupported"


@pytest.mark.parametrize(
    ("position", "backend", "words"),
    [(RoPE(), "flash", "every call"), (T5Bias(), "math", "T5Bias adds a T×T bias"), (NoPE(), "flash", "every call")],
)
def test_the_backend_that_ran_is_recorded_with_its_reason(position: Any, backend: str, words: str) -> None:
    ledger = run(tiny(steps=2, model={"position": position})).ledger
    assert ledger["attention_backend"] == backend
    assert words in str(ledger["attention_reason"])


def test_asking_for_flash_where_it_cannot_run_is_an_error_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"train.kernel = Flash cannot run: T5Bias adds a T×T bias"):
        tiny(model={"position": T5Bias()}, kernel=Flash())
    assert run(tiny(steps=2, kernel=Flash())).ledger["attention_backend"] == "flash"


@pytest.mark.parametrize("kernel", [Math(), Flash()], ids=lambda kernel: kernel.kind)
def test_recomputed_blocks_run_on_the_kernel_of_their_first_pass(kernel: Any) -> None:
    plain, twice = (run(tiny(steps=10, kernel=kernel, recompute=again)) for again in (False, True))
    assert (twice.status, twice.cause) == ("finished", "")
    assert twice.scores == plain.scores
    assert twice.final == pytest.approx(plain.final, nan_ok=True)
    assert twice.ledger["flops"] == plain.ledger["flops"] * 4 / 3  # type: ignore[operator]


def test_looking_at_the_untrained_model_leaves_it_untrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def look(module: TransformerModule, *_: Any) -> None:
        seen.update({name: buffer.clone() for name, buffer in module.model.named_buffers()})
        raise RuntimeError("enough")

    monkeypatch.setattr(runner, "fit", look)
    run(tiny(model={"norm": BatchNorm()}), directory=tmp_path)
    moments = [value for name, value in seen.items() if name.endswith("running_mean")]
    assert moments
    assert not any(value.any() for value in moments)


def test_a_run_that_is_asked_to_stop_at_its_end_is_finished_instead(tmp_path: Path) -> None:
    record = run(tiny(steps=10), directory=tmp_path, should_stop=lambda: True)
    assert record.status == "finished"
    with pytest.raises(Interrupted):
        run(tiny(steps=11), directory=tmp_path / "longer", should_stop=lambda: True)


def test_a_mixture_of_experts_tells_of_its_router_in_the_curves(tmp_path: Path) -> None:
    experts = MoE(expert=ReLU(d_ff=8), num_experts=4, top_k=1, capacity=0.5, balance=0.1)
    run(tiny(steps=20, model={"feedforward": experts}), directory=tmp_path / "sparse")
    run(tiny(steps=20), directory=tmp_path / "dense")
    names = {"router/loss", "router/entropy", "router/max_violation", "router/dropped"}
    names |= {"router/load_min", "router/load_max"}
    points = [line for line in read_curves(tmp_path / "sparse" / "curves.jsonl") if "train/loss" in line]
    assert [point["step"] for point in points] == [10, 20]
    for line in points:
        assert names <= set(line)
        assert 0 < line["router/entropy"] <= math.log(4) + 1e-6
        assert 0 <= line["router/max_violation"] <= 3
        assert 0 < line["router/dropped"] < 1
        assert line["router/loss"] >= 0.1
        assert 0 <= line["router/load_min"] <= 1 <= line["router/load_max"] <= 4
        assert line["router/load_max"] == pytest.approx(line["router/max_violation"] + 1)
    assert not names & set().union(*read_curves(tmp_path / "dense" / "curves.jsonl"))


def test_the_math_kernel_trains_the_same_model() -> None:
    fused, explicit = run(tiny(steps=30)), run(tiny(steps=30, kernel=Math()))
    assert explicit.ledger["attention_backend"] == "math"
    assert explicit.final["train/loss"] == pytest.approx(fused.final["train/loss"], rel=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sees no CUDA device"):
        run(RunSpec.parse({**tiny().document(), "device": "cuda"}), directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrong", ["x", tiny().model, RunSpec], ids=["str", "ModelSpec", "class"])
def test_what_is_no_run_spec_is_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"^run takes a RunSpec, not [^\n]{3,60}; make one, e.g. RunSpec"):
        run(wrong)


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match=rf"^directory = '{directory}': cannot be made \(.*\); name another$"):
            run(tiny(), directory=directory)
    with pytest.raises(UserError, match=r"^directory = '': name a folder, "):
        run(tiny(), directory="")


def test_ctrl_c_stays_a_keyboard_interrupt(tmp_path: Path) -> None:
    def press(progress: Progress) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist's workers ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tiny(), directory=tmp_path, on_progress=press)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


class Exploding(FeedForward):
    """x · 10^76, which fp32 does not hold."""

    def build(self, d_model: int) -> nn.Module:
        return _Lambda(lambda x: x * 1e38 * 1e38)


class Raising(FeedForward):
    """Raises."""

    def build(self, d_model: int) -> nn.Module:
        def broken(x: Tensor) -> Tensor:
            raise RuntimeError("this component is broken")

        return _Lambda(broken)


class Greedy(FeedForward):
    """Asks for more memory than there is."""

    def build(self, d_model: int) -> nn.Module:
        return _Lambda(lambda x: x + torch.empty(2**50).sum())


class _Lambda(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
