"""Watching leaves training as it is, to the bit; an interrupted run has seen what an undisturbed one has seen."""

import json
import math
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from harness import ModelSpec, RunSpec, TrainSpec
from harness.components.architecture import EncoderDecoder, EncoderOnly
from harness.components.attention import Latent, Linear, SlidingWindow
from harness.components.feedforward import MoE, ReLU, SwiGLU
from harness.components.norm import BatchNorm
from harness.components.position import RoPE, T5Bias
from harness.diagnostics import DETECTORS, AttentionSite, History, Subject, detect
from harness.diagnostics.operators import attended
from harness.diagnostics.watch import EARLY, Contract, Watch, compared, observed
from harness.record import RunRecord, read_curves
from harness.runner import Interrupted, run
from harness.spec import Finite, Padded
from tasks import Copy, Lengths, Reverse
from tasks.task import Batch

TINY: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 2, "feedforward": ReLU(d_ff=16)}


def tiny(model: dict[str, Any] | None = None, steps: int = 60, **train: Any) -> RunSpec:
    return RunSpec(
        model=ModelSpec(**{**TINY, **(model or {})}),
        task=Copy(lengths=Lengths(train=(1, 3), test=(4,)), num_symbols=4),
        train=TrainSpec(**{"steps": steps, "batch_size": 8, "eval_samples": 8, "eval_every": 20, **train}),
    )


def values(directory: Path) -> list[dict[str, float]]:
    """The curves without the times of day."""
    lines = map(json.loads, (directory / "curves.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


def weights(directory: Path) -> dict[str, Tensor]:
    return dict(torch.load(directory / "model.pt", weights_only=True))


def known(final: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in final.items() if not math.isnan(value)}


EXPERTS = MoE(expert=ReLU(d_ff=8), capacity=1.0, jitter=0.1, bias_rate=0.01)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {}),
    "dropout": ({"residual_dropout": 0.2, "attention_dropout": 0.2, "embedding_dropout": 0.1}, {}),
    "experts": ({"feedforward": EXPERTS}, {}),
    "encoder-decoder": ({"architecture": EncoderDecoder(), "position": T5Bias()}, {}),
    "encoder": ({"architecture": EncoderOnly()}, {}),
    "linear": ({"attention": Linear(), "feedforward": SwiGLU(d_ff=8)}, {}),
    "BatchNorm": ({"norm": BatchNorm()}, {}),
    "padded": ({"position": RoPE(), "attention": SlidingWindow(window=4)}, {"sampling": Padded()}),
    "latent, recomputed": ({"attention": Latent(), "position": RoPE()}, {"recompute": True}),
    "finite": ({}, {"sampling": Finite(num_samples=8), "gradient_clip": None}),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_watched_training_is_unwatched_training_to_the_bit(
    kind: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    model, train = kind
    spec = tiny(model, 20, **train)
    watched, alone = (run(spec, directory=tmp_path / str(diagnose), diagnose=diagnose) for diagnose in (True, False))
    assert (watched.status, watched.cause) == ("finished", "")
    assert watched.scores == alone.scores
    assert known(watched.final) == known(alone.final)
    assert all(value.equal(weights(tmp_path / "False")[name]) for name, value in weights(tmp_path / "True").items())
    lines = {line["step"]: line for line in values(tmp_path / "True")}
    assert all(lines[line["step"]].items() >= line.items() for line in values(tmp_path / "False"))
    assert (watched.ledger["diagnostics"], alone.ledger["diagnostics"]) == ("training", "off")
    assert alone.findings == ()
    assert {0, 1, 2, 4, 8, 10, 20} == set(lines)
    assert all(math.isfinite(value) for line in lines.values() for value in line.values())


def test_every_kind_of_signal_is_in_the_curves_of_what_it_can_be_seen_in(tmp_path: Path) -> None:
    run(tiny({"feedforward": EXPERTS}), directory=tmp_path / "experts")
    run(tiny({"attention": Linear(), "architecture": EncoderOnly()}), directory=tmp_path / "linear")
    experts, linear = (set().union(*values(tmp_path / name)) for name in ("experts", "linear"))
    numbers = {
        f"optimizer/{name}_fit" for name in ("beta1", "beta2", "eps", "weight_decay", "learning_rate", "age", "clip")
    } | {"optimizer/step_error"}
    common = numbers | {"update/ratio", "update/unmoved", "update/stale", "update/gradient_over_eps"}
    common |= {
        "spike/loss",
        "spike/gradient",
        "gradient/block.0",
        "gradient/block.1",
        "residual/rms.1",
        "residual/distinct.1",
    }
    assert common <= experts & linear
    assert {"heads/entropy.1", "heads/logit_max.1", "heads/sharp.0", "heads/uniform.0", "router/logsumexp.1"} <= experts
    assert "feedforward/dead.1" in linear - experts
    assert not any(name.startswith(("heads/", "router/")) for name in linear)


def test_what_acts_is_what_is_declared(tmp_path: Path) -> None:
    run(tiny(weight_decay=0.1, gradient_clip=0.01), directory=tmp_path)
    fits = [(name, value) for line in values(tmp_path) for name, value in line.items() if name.endswith("_fit")]
    assert len(fits) == 8 * len(observed(60)) + len(compared(60))
    assert all(value == pytest.approx(1, abs=0.01) for _, value in fits), fits


def eventful() -> RunSpec:
    model = {"feedforward": EXPERTS, "residual_dropout": 0.1, "num_layers": 1}
    return tiny(model, 80, learning_rate=0.03, eval_every=1000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run with something to say."""
    directory = tmp_path_factory.mktemp("whole")
    run(eventful(), directory=directory)
    return directory


@pytest.mark.parametrize("checks", [1, 4, 7])
def test_an_interrupted_run_has_seen_what_an_undisturbed_one_has_seen(whole: Path, tmp_path: Path, checks: int) -> None:
    answers = iter([False] * (checks - 1) + [True] + [False] * 100)
    with pytest.raises(Interrupted):
        run(eventful(), directory=tmp_path, should_stop=lambda: next(answers))
    resumed, undisturbed = run(eventful(), directory=tmp_path), RunRecord.read(whole / "record.json")
    assert values(tmp_path) == values(whole)
    assert any(line["spike/gradient"] != 0 for line in values(whole) if "spike/gradient" in line)
    assert resumed.findings == undisturbed.findings != ()
    assert all(value.equal(weights(whole)[name]) for name, value in weights(tmp_path).items())


@pytest.mark.parametrize("steps", [1, 7, 50, 100, 1000, 3333, 100_000])
def test_a_run_is_looked_at_early_at_its_end_and_some_times_between(steps: int) -> None:
    found = {step for step in observed(steps) if step <= steps}
    assert {step for step in EARLY if step <= steps} | {steps} <= found
    between = sorted(found - set(EARLY) - {steps})
    assert len(between) <= 17
    assert all(step % 10 == 0 for step in between)
    assert all(later - earlier >= 50 for earlier, later in pairwise(between))


WORDS, WIDTH, HEADS = 12, 16, 2


class Attends(nn.Module):
    """Somebody's causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Foreign(pl.LightningModule):
    """Their language model of one layer, trained the usual way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attend, self.norm = Attends(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attend(self.norm(x))
        return self.head(x + self.mlp(x))

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        loss = functional.cross_entropy(self(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())
        return {"loss": loss} if index % 2 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def foreign(watched: bool, *, contract: Contract | None = None, accumulate: int = 1) -> tuple[Foreign, Watch]:
    """Trained for 60 steps on counting."""
    torch.manual_seed(0)
    module = Foreign()
    data = (torch.arange(9) + torch.arange(64)[:, None]) % WORDS
    tokens = Batch(data[:4, :-1], data[:4, 1:])
    paths = ("attend.qkv", "attend.qkv", "attend.qkv", "attend.out")
    site = AttentionSite("attend", HEADS, HEADS, *paths, scale=(WIDTH // HEADS) ** -0.5)
    subject = Subject(module, tokens, vocabulary=(0, WORDS), sites=(site,), blocks=("mlp",), units=("mlp.3",))
    watch = Watch(subject, contract, steps=60)
    trainer = pl.Trainer(
        max_steps=60, max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch] if watched else [],
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=8))
    return module, watch


@pytest.mark.filterwarnings("ignore:.*num_workers.*", "ignore:.*number of training batches.*", "ignore:.*litlogger.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore:.*TreeSpec.*")
class TestForeign:
    """A LightningModule that knows nothing of the harness, without a contract."""

    def test_it_trains_as_if_nobody_looked(self) -> None:
        (module, _), (alone, _) = foreign(True), foreign(False)
        assert all(p.equal(q) for p, q in zip(module.parameters(), alone.parameters(), strict=True))
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())

    def test_its_signals_are_there_and_the_optimiser_is_not_compared(self) -> None:
        _, watch = foreign(True)
        assert set(watch.points) == {0, *EARLY, 50, 51, 60, *range(10, 60, 10)}  # 51: where 50 left the weights
        names = set().union(*watch.points.values())
        assert not any(name.startswith("optimizer/") for name in names)
        assert {"update/ratio", "update/stale", "gradient/block.0", "residual/rms.0", "feedforward/dead.0"} <= names
        assert {"heads/entropy.0", "heads/logit_max.0", "spike/loss"} <= names
        lines = [{"step": step} | signals for step, signals in sorted(watch.points.items())]
        findings = detect(History(lines, 60))
        assert not any(finding.alarms for finding in findings)
        looked = {finding.probe.name for finding in findings if finding.measured}
        assert {"stale_adam", "attention_logits", "dead_units", "spike"} <= looked
        assert looked < {detector.name for detector in DETECTORS}
        assert watch.take(60)["update/ratio"] > 0
        assert watch.take(60) == {}

    def test_what_is_declared_is_compared(self) -> None:
        for declared, fit in ((3e-3, 1.0), (3e-4, 10.0)):  # a step is off by (fit − 1) times the declared one
            _, watch = foreign(True, contract=Contract(learning_rate=lambda taken, rate=declared: rate))
            fits = [(point["optimizer/step_error"], point["optimizer/learning_rate_fit"]) for step, point in
                    watch.points.items() if "optimizer/step_error" in point]  # fmt: skip
            assert len(fits) == 6
            assert all(pair == pytest.approx((fit - 1, fit), rel=0.01, abs=0.01) for pair in fits)

    def test_accumulated_gradients_make_one_step(self) -> None:
        (module, watch), (alone, _) = (foreign(watched, accumulate=2) for watched in (True, False))
        assert all(p.equal(q) for p, q in zip(module.parameters(), alone.parameters(), strict=True))
        assert all("update/ratio" in watch.points[step] for step in EARLY)


def test_the_state_of_a_watch_makes_the_round_trip_through_a_file(tmp_path: Path) -> None:
    subject = Subject(nn.Linear(2, 2), Batch(torch.zeros(2, 3), torch.zeros(2, 3)))
    one, other = (Watch(subject, steps=100) for _ in range(2))
    one.surprise.of([(step % 3, 1.0 + step % 5, 2.0) for step in range(200)])
    torch.save(one.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert other.surprise == one.surprise
    assert isinstance(other.surprise.past, deque)
    after = [(0, 9.0, 8.0), (1, 1.0, 1.0)] * 70
    assert [one.surprise.of([step]) for step in after] == [other.surprise.of([step]) for step in after]


def test_findings_are_in_the_record_and_read_back(whole: Path) -> None:
    record = RunRecord.read(whole / "record.json")
    assert [found.rank for found in record.findings] == sorted(found.rank for found in record.findings)
    assert record.diagnosis == next((found.probe for found in record.findings if found.alarm), "")
    assert RunRecord.model_validate_json(record.model_dump_json()).findings == record.findings
    assert read_curves(whole / "curves.jsonl")[0]["step"] == 0
    assert run(RunSpec.parse(record.spec), directory=whole).findings == record.findings  # read, not made anew


def test_other_tasks_are_watched_too(tmp_path: Path) -> None:
    spec = tiny(steps=10).replaced({"task": Reverse(lengths=Lengths(train=(2, 3), test=()), num_symbols=4)})
    assert run(spec, directory=tmp_path).ledger["diagnostics"] == "training"
    assert "heads/entropy.1" in values(tmp_path)[0]


def test_a_model_that_is_itself_the_sublayer_gives_what_it_gives() -> None:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Attends())
    tokens = torch.randint(0, WORDS, (3, 5))
    subject = Subject(model, Batch(tokens, tokens), sites=(AttentionSite("", HEADS, HEADS),))
    (call,) = attended(subject)
    assert call.output.shape == (3, HEADS, 5, WIDTH // HEADS)
    assert call.causal
