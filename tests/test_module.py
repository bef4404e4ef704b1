"""The training step: loss, optimiser, schedule and clipping, as they really act under Lightning."""

import itertools
import math
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.components.feedforward import FeedForward, SwiGLU
from harness.components.norm import PreNorm, RMSNorm
from harness.components.position import Learned, Position, T5Bias
from harness.module import TransformerModule, answer_loss, decay_groups
from harness.schema import is_foreign
from harness.spec import Constant, Fresh, ModelSpec, RunSpec, TrainSpec, WarmupCosine
from harness.transformer import build_model
from tasks import Copy, Lengths
from tasks.task import IGNORED

TASK = Copy(lengths=Lengths(train=(1, 4), test=()), num_symbols=8)
MODEL = ModelSpec(d_model=16, num_heads=2, num_layers=1)


def run_spec(**train: Any) -> RunSpec:
    return RunSpec(task=TASK, model=MODEL, train=TrainSpec(**{"steps": 6, "batch_size": 4, **train}))


class Watch(pl.Callback):
    """What every step did, seen from outside of the module."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.gradients: list[float] = []
        self.told: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Lightning calls this before clipping."""
        self.gradients.append(norm(pl_module.parameters()))

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Lightning calls this between a step's loss and its backward pass."""
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        names = ("loss", "gradient_norm", "learning_rate", "exact_match")
        self.told.append({name: float(getattr(pl_module, name)) for name in names})


def norm(parameters: Any) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


def train(module: TransformerModule) -> Watch:
    """Train to the end, as the runner does, without a journal."""
    watch = Watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=module.spec.train.steps,
            max_epochs=-1,
            callbacks=[watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, itertools.repeat(0))
    return watch


# --- loss ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 5), st.integers(2, 6), st.integers(0, 2**31))
def test_the_loss_is_the_mean_surprise_of_the_answer_in_nats(batch: int, length: int, words: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, length, words, generator=draw) * 3
    targets = torch.randint(words, (batch, length), generator=draw)
    targets[torch.rand(batch, length, generator=draw) < 0.4] = IGNORED
    targets[0, -1] = 0
    surprises = []
    for row, wanted in zip(logits.tolist(), targets.tolist(), strict=True):
        for scores, target in zip(row, wanted, strict=True):
            if target != IGNORED:
                surprises.append(math.log(sum(math.exp(s) for s in scores)) - scores[target])
    assert float(answer_loss(logits, targets)) == pytest.approx(sum(surprises) / len(surprises), rel=1e-5, abs=1e-6)


def test_only_the_answers_logits_have_a_gradient() -> None:
    batch = TASK.batch(0, "train", 0, 3, 4, torch.device("cpu"))
    logits = torch.randn(*batch.inputs.shape, TASK.vocab_size, requires_grad=True)
    answer_loss(logits, batch.targets).backward()
    assert logits.grad is not None
    asked = batch.targets != IGNORED
    assert not logits.grad[~asked].any()
    assert (logits.grad[asked].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_label_smoothing_spreads_its_share_over_all_words(smoothing: float) -> None:
    # CLAIMS D04
    logits, targets = torch.randn(2, 3, 7, dtype=torch.float64), torch.randint(7, (2, 3))
    wanted = torch.full((2, 3, 7), smoothing / 7, dtype=torch.float64)
    wanted.scatter_add_(-1, targets[..., None], torch.full((2, 3, 1), 1 - smoothing, dtype=torch.float64))
    by_hand = -(wanted * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(answer_loss(logits, targets, smoothing).double(), by_hand, atol=1e-6, rtol=1e-6)


def test_label_smoothing_has_a_floor_that_no_certainty_reaches() -> None:
    # CLAIMS D04: certainty costs; the best logits put 1 − ε + ε/V on the answer.
    targets, smoothing, words = torch.zeros(1, 1, dtype=torch.int64), 0.1, 8
    best = torch.full((words,), smoothing / words)
    best[0] += 1 - smoothing
    sure = torch.tensor([[[30.0] + [0.0] * (words - 1)]])
    assert answer_loss(sure, targets, smoothing) > 2 * answer_loss(best.log()[None, None], targets, smoothing)
    assert answer_loss(sure, targets) < answer_loss(best.log()[None, None], targets)


def test_the_loss_is_computed_in_full_precision() -> None:
    logits, targets = torch.randn(4, 6, 8) * 5, torch.randint(8, (4, 6))
    low = logits.bfloat16()
    assert torch.equal(answer_loss(low, targets), answer_loss(low.float(), targets))
    assert answer_loss(low, targets).dtype == torch.float32


# --- optimiser -------------------------------------------------------------------------------------------------------

VARIED = [
    MODEL,
    MODEL.replace("position", Learned(max_length=16)),
    MODEL.replace("position", T5Bias()),
    MODEL.replace("norm", RMSNorm()).replace("norm_placement", PreNorm()).replace("feedforward", SwiGLU()),
]


@pytest.mark.parametrize("spec", VARIED, ids=lambda spec: f"{spec.position.kind} {spec.norm.kind}")
def test_linear_weights_decay_and_nothing_else(spec: ModelSpec) -> None:
    model = build_model(spec, 12, seed=0)
    decayed, others = decay_groups(model, 0.3)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    split = [{names[id(p)] for p in group["params"]} for group in (decayed, others)]
    assert not split[0] & split[1]
    assert split[0] | split[1] == set(names.values())
    maps = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert split[0] == maps
    assert "head.weight" in maps
    norm = "before" if spec.norm_placement == PreNorm() else "outer"
    assert {"embedding.weight", f"blocks.0.attention_step.{norm}.weight"} <= split[1]
    assert all(name in split[1] for name in names.values() if name.endswith("bias") or name.startswith("position"))


@pytest.mark.parametrize("base", [Position, FeedForward], ids=lambda base: base.__name__)
def test_every_parameter_of_every_level_is_in_one_group(base: type[Position] | type[FeedForward]) -> None:
    for level in base.levels().values():
        if is_foreign(level):
            continue
        model = build_model(MODEL.replace(base.__name__.lower(), level()), 12, seed=0)
        grouped = [id(p) for group in decay_groups(model, 0.1) for p in group["params"]]
        assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def moved(**train_fields: Any) -> dict[str, Tensor]:
    module = TransformerModule(run_spec(steps=1, schedule=Constant(), gradient_clip=None, **train_fields))
    train(module)
    return dict(module.model.state_dict())


def test_decay_shrinks_linear_weights_by_rate_times_decay() -> None:
    # AdamW is decoupled: one step with decay is the step without it minus lr · decay · w.
    start = build_model(MODEL, TASK.vocab_size, seed=0).state_dict()
    plain, decayed = moved(weight_decay=0.0, learning_rate=0.01), moved(weight_decay=0.5, learning_rate=0.01)
    linear = {name for name in start if name.endswith("weight") and "_step" not in name and "embedding" not in name}
    for name, before in start.items():
        expected = 0.01 * 0.5 * before if name in linear else torch.zeros_like(before)
        torch.testing.assert_close(plain[name] - decayed[name], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "schedule", [Constant(), WarmupCosine(warmup=0.5, floor=0.1)], ids=lambda schedule: schedule.kind
)
def test_the_schedule_moves_the_learning_rate_of_every_group_at_every_step(schedule: Constant | WarmupCosine) -> None:
    spec = run_spec(steps=8, learning_rate=0.02, schedule=schedule)
    watch = train(TransformerModule(spec))
    expected = [0.02 * schedule.factor(step, 8, MODEL.d_model) for step in range(8)]
    assert [step["learning_rate"] for step in watch.told] == pytest.approx(expected)
    assert [rate for rates in watch.rates for rate in rates] == pytest.approx([e for e in expected for _ in range(2)])
    assert (max(expected) > 5 * min(expected)) is (schedule.kind == "WarmupCosine")


def test_the_learning_rate_that_is_told_is_the_one_that_moved_the_weights() -> None:
    # Adam's first step moves each weight by the learning rate, up or down.
    module = TransformerModule(
        run_spec(steps=1, learning_rate=0.02, weight_decay=0.0, schedule=WarmupCosine(warmup=0.9, floor=0.0))
    )
    before = module.model.head.weight.detach().clone()
    watch = train(module)
    change = (module.model.head.weight.detach() - before).abs()
    assert watch.told[0]["learning_rate"] == pytest.approx(float(change.max()), rel=1e-3)


def test_the_optimisers_settings_are_the_specs() -> None:
    spec = run_spec(beta1=0.7, beta2=0.8, eps=1e-3, learning_rate=0.03, weight_decay=0.2, schedule=Constant())
    optimiser = TransformerModule(spec).configure_optimizers()["optimizer"]
    assert isinstance(optimiser, torch.optim.AdamW)
    for group in optimiser.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.03, (0.7, 0.8), 1e-3)


# --- clipping --------------------------------------------------------------------------------------------------------


def clipped(limit: float | None) -> tuple[float, float, float]:
    """The gradient's norm before and after the hook, and the norm that the module tells."""
    module = TransformerModule(run_spec(gradient_clip=limit))
    optimiser = module.configure_optimizers()["optimizer"]
    module.training_step(None, 0).backward()
    before = norm(module.parameters())
    module.configure_gradient_clipping(optimiser, 123.0, "value")
    return before, norm(module.parameters()), float(module.gradient_norm)


@pytest.mark.parametrize("limit", [0.01, 0.5, 1e6, None])
def test_clipping_bounds_the_norm_and_tells_what_it_was(limit: float | None) -> None:
    before, after, told = clipped(limit)
    assert told == pytest.approx(before, rel=1e-5)
    assert before > 0.6
    assert after == pytest.approx(min(before, limit or math.inf), rel=1e-4)


def test_clipping_keeps_the_direction() -> None:
    def gradient(limit: float | None) -> Tensor:
        module = TransformerModule(run_spec(gradient_clip=limit))
        optimiser = module.configure_optimizers()["optimizer"]
        module.training_step(None, 0).backward()
        module.configure_gradient_clipping(optimiser)
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    full, cut = gradient(None), gradient(0.1)
    torch.testing.assert_close(cut, full * (0.1 / full.norm()), rtol=1e-3, atol=1e-8)


def test_lightning_clips_every_step_and_the_told_norm_is_the_unclipped_one() -> None:
    watch = train(TransformerModule(run_spec(gradient_clip=0.05)))
    told = [step["gradient_norm"] for step in watch.told]
    assert told == pytest.approx(watch.gradients, rel=1e-4)
    assert min(told) > 0.05


# --- the step --------------------------------------------------------------------------------------------------------


def test_a_step_tells_loss_exact_match_and_shape_of_its_own_batch() -> None:
    module = TransformerModule(run_spec())
    loss = module.training_step(None, 0)
    batch = Fresh().batch(TASK, 0, 0, 4, torch.device("cpu"))
    assert torch.equal(loss, answer_loss(module.model(batch.inputs), batch.targets))
    assert module.shape == (*batch.inputs.shape, 0)
    assert torch.equal(module.loss, loss.detach())
    assert not module.loss.requires_grad
    assert 0 <= float(module.exact_match) <= 1


def test_a_step_draws_from_a_generator_seeded_by_seed_and_step() -> None:
    module = TransformerModule(run_spec())

    def state_after() -> Tensor:
        module.training_step(None, 0)
        return torch.rand(4)

    torch.manual_seed(1)
    first = state_after()
    torch.manual_seed(2)
    assert torch.equal(state_after(), first)
    module = TransformerModule(run_spec().replace("seed", 5))
    assert not torch.equal(state_after(), first)


def test_training_reads_the_batch_of_every_step_in_turn() -> None:
    spec = run_spec(steps=4)
    losses = [step["loss"] for step in train(TransformerModule(spec)).told]
    model = build_model(spec.model, TASK.vocab_size, seed=0)
    groups = decay_groups(model, spec.train.weight_decay)
    optimiser = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    by_hand = []
    for step in range(4):
        for group in optimiser.param_groups:
            group["lr"] = spec.train.learning_rate * spec.train.schedule.factor(step, 4, spec.model.d_model)
        batch = spec.train.sampling.batch(TASK, 0, step, 4, torch.device("cpu"))
        loss = answer_loss(model(batch.inputs), batch.targets)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        by_hand.append(float(loss.detach()))
    assert losses == pytest.approx(by_hand, rel=1e-5)


def test_the_same_spec_trains_to_the_same_bits() -> None:
    def trained() -> dict[str, Tensor]:
        module = TransformerModule(run_spec())
        train(module)
        return module.model.state_dict()

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)


class OneBatch(Fresh):
    """The first batch at every step."""

    def batch(self, task: Any, seed: int, step: int, batch_size: int, device: torch.device, layout: Any) -> Any:
        return task.batch(seed, "train", 0, batch_size, 4, device, layout)


@pytest.mark.parametrize("spec", VARIED[:1] + VARIED[3:], ids=["original", "modern"])
def test_one_batch_is_learned_by_heart(spec: ModelSpec) -> None:
    schedule = WarmupCosine(warmup=0.1)
    training = TrainSpec(steps=150, batch_size=8, learning_rate=0.01, schedule=schedule, sampling=OneBatch())
    module = TransformerModule(RunSpec(task=TASK, model=spec, train=training))
    told = train(module).told
    assert told[-1]["loss"] < told[0]["loss"] / 10
    assert told[-1]["exact_match"] > 0.85
