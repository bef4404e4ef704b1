"""Faults of training: patches of a module after its spec is declared, which only how it trains can tell; and specs that
are declared and unwise, which come to harm for a reason that should be named.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from faults.structural import balance_left_out, dropout_in_training, softmax_twice
from torch import nn
from torch.nn import functional

from harness import ModelSpec, RunSpec, TrainSpec, runner
from harness.components.feedforward import MoE, ReLU
from harness.components.init import Initialisation, Normal
from harness.components.norm import PreNorm
from harness.components.residual import NoResidual
from harness.components.scale import Unscaled
from harness.module import TransformerModule
from harness.spec import Constant, Finite
from tasks import Copy, Lengths

Patch = Callable[[TransformerModule, float], None]

TASK = Copy(lengths=Lengths(train=(1, 6), test=()), num_symbols=8)
STEPS = 600


def nothing(module: TransformerModule, strength: float) -> None:
    """No fault: what is wrong is declared, or nothing is."""


@dataclass(frozen=True)
class TrainingFault:
    """A mistake in how a model is trained.

    Attributes:
        name: what it is called.
        named: the probes and detectors of which one should be the first to alarm.
        patch: makes it in a module, as badly as a number says.
        strengths: mild, severe.
        model: what it is made in.
        train: how that is trained.
        declared: the fields of the spec that make it instead, given a strength: such a run is no broken contract.
    """

    name: str
    named: tuple[str, ...]
    patch: Patch = nothing
    strengths: tuple[float, ...] = (1.0, 2.0)
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    declared: Callable[[float], dict[str, Any]] | None = None

    def spec(self, strength: float, seed: int) -> RunSpec:
        """The run that it is made in."""
        base = {"steps": STEPS, "batch_size": 32, "learning_rate": 3e-3, "eval_samples": 64, "eval_every": 100}
        spec = RunSpec(model=ModelSpec(**self.model), train=TrainSpec(**{**base, **self.train}), task=TASK, seed=seed)
        return spec if self.declared is None else spec.replaced(self.declared(strength))

    @contextmanager
    def injected(self, strength: float) -> Iterator[None]:
        """Every module that is built in this context has the fault, besides those of contexts around it."""
        inner: Callable[[RunSpec], TransformerModule] = runner.TransformerModule

        def build(spec: RunSpec) -> TransformerModule:
            module = inner(spec)
            self.patch(module, strength)
            return module

        with (
            patch("harness.runner.TransformerModule", build),
            patch("harness.diagnostics.subject.TransformerModule", build),
        ):
            yield


def optimised(module: TransformerModule, change: Callable[[Any], Any]) -> None:
    """Have what `configure_optimizers` gives changed."""
    own = module.configure_optimizers
    module.configure_optimizers = lambda: change(own())


def grouped(module: TransformerModule, change: Callable[[dict[str, Any]], None]) -> None:
    """Have the optimiser's groups changed."""

    def changed(found: Any) -> Any:
        for group in found["optimizer"].param_groups:
            change(group)
        return found

    optimised(module, changed)


def rescheduled(module: TransformerModule, factor: Callable[[Callable[[int], float], int], float]) -> None:
    """Have another schedule than the declared one, given that one and the step."""

    def changed(found: Any) -> Any:
        own = found["lr_scheduler"]["scheduler"].lr_lambdas[0]
        schedule = torch.optim.lr_scheduler.LambdaLR(found["optimizer"], lambda step: factor(own, step))
        return found | {"lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    optimised(module, changed)


def rate_multiplied(module: TransformerModule, strength: float) -> None:
    rescheduled(module, lambda own, step: strength * own(step))


def warmup_left_out(module: TransformerModule, strength: float) -> None:
    train = module.spec.train
    begin = round(strength * train.schedule.warmup * train.steps)
    rescheduled(module, lambda own, step: own(max(step, begin)))


def schedule_by_epoch(module: TransformerModule, strength: float) -> None:
    def changed(found: Any) -> Any:
        found["lr_scheduler"]["interval"] = "epoch"
        return found

    optimised(module, changed)


def schedule_moved_rarely(module: TransformerModule, strength: float) -> None:
    rescheduled(module, lambda own, step: own(round(step // strength)))


def beta2_changed(module: TransformerModule, strength: float) -> None:
    grouped(module, lambda group: group.update(betas=(group["betas"][0], strength)))


def beta1_changed(module: TransformerModule, strength: float) -> None:
    grouped(module, lambda group: group.update(betas=(strength, group["betas"][1])))


def eps_changed(module: TransformerModule, strength: float) -> None:
    grouped(module, lambda group: group.update(eps=strength))


def decay_changed(module: TransformerModule, strength: float) -> None:
    grouped(module, lambda group: group.update(weight_decay=strength))


def plain_descent(module: TransformerModule, strength: float) -> None:
    def changed(found: Any) -> Any:
        train = module.spec.train
        optimizer = torch.optim.SGD(module.model.parameters(), lr=train.learning_rate * strength, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, found["lr_scheduler"]["scheduler"].lr_lambdas[0])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    optimised(module, changed)


def stepped_again(module: TransformerModule, strength: float) -> None:
    def changed(found: Any) -> Any:
        def again(optimizer: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        if (state := optimizer.state.get(p)) and p.grad is not None:
                            p -= strength * group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)

        found["optimizer"].register_step_post_hook(again)
        return found

    optimised(module, changed)


def unclipped(module: TransformerModule, strength: float) -> None:
    def measure(optimizer: Any, *_: Any, **__: Any) -> None:
        module.gradient_norm = nn.utils.get_total_norm(
            [p.grad for p in module.model.parameters() if p.grad is not None]
        )
        module.learning_rate = float(optimizer.param_groups[0]["lr"])

    module.configure_gradient_clipping = measure


def same_batches(module: TransformerModule, strength: float) -> None:
    own = module.batch
    module.batch = lambda step: own(step % round(strength))


def labels_of_others(module: TransformerModule, strength: float) -> None:
    own = module.batch

    def mixed(step: int) -> Any:
        batch = own(step)
        count = round(strength * len(batch.targets))
        batch.targets[:count] = batch.targets[:count].roll(1, 0)
        return batch

    module.batch = mixed


def embedding_noise(module: TransformerModule, strength: float) -> None:
    module.model.embedding.register_forward_hook(
        lambda part, inputs, output: output + strength * torch.randn_like(output) * part.training
    )


def expert_preferred(module: TransformerModule, strength: float) -> None:
    for experts in module.model.experts():
        experts.router.register_forward_hook(
            lambda part, inputs, logits: logits + strength * functional.one_hot(torch.tensor(0), logits.shape[-1])
        )


def batches_late(module: TransformerModule, strength: float, change: Callable[[Any, int], Any]) -> None:
    """Batches are changed from some step on."""
    own = module.batch
    module.batch = lambda step: change(own(step), step) if step >= strength else own(step)


def targets_shifted_late(module: TransformerModule, strength: float) -> None:
    def shifted(batch: Any, step: int) -> Any:
        return replace(batch, targets=batch.targets.roll(1, 1))

    batches_late(module, strength, shifted)


def another_seed_late(module: TransformerModule, strength: float) -> None:
    other = module.spec.replaced({"seed": module.spec.seed + 1})
    batches_late(module, strength, lambda batch, step: other.training_batch(step, module.device))


def smoothing_undeclared(module: TransformerModule, strength: float) -> None:
    module.spec = module.spec.replaced({"train.label_smoothing": strength})


def loss_multiplied(module: TransformerModule, strength: float) -> None:
    own = module.training_step
    module.training_step = lambda *arguments: strength * own(*arguments)


def dropout_asleep_late(module: TransformerModule, strength: float) -> None:
    """Training goes on in evaluation mode after an evaluation."""
    own = module.training_step

    def step(*arguments: Any) -> Any:
        module.model.train(module.global_step < strength)
        return own(*arguments)

    module.training_step = step


def gradients_late(module: TransformerModule, strength: float, change: Callable[[], None]) -> None:
    """Gradients are changed before the optimiser reads them, from some step on."""
    own = module.on_after_backward

    def after() -> None:
        own()
        if module.global_step >= strength:
            change()

    module.on_after_backward = after


def gradients_multiplied(module: TransformerModule, strength: float) -> None:
    """A scale that is not undone, from step 40 on."""

    def change() -> None:
        for p in module.model.parameters():
            p.grad.mul_(strength)

    gradients_late(module, 40, change)


def rows_frozen(module: TransformerModule, strength: float) -> None:
    """The embeddings of some symbols get no gradient from step 40 on."""
    gradients_late(module, 40, lambda: module.model.embedding.weight.grad[-round(strength) :].zero_())


def update_frozen_late(module: TransformerModule, strength: float) -> None:
    """Blocks leave the optimiser's reach after some steps: what a probe of the first steps cannot see."""

    def change() -> None:
        for p in module.model.blocks.parameters():
            p.grad = None

    gradients_late(module, strength, change)


def gradients_lost(module: TransformerModule, strength: float) -> None:
    """Gradients become NaN at a step: an overflow."""
    own = module.on_after_backward

    def after() -> None:
        own()
        if module.global_step == round(strength):
            next(module.model.parameters()).grad.fill_(float("nan"))

    module.on_after_backward = after


def updates_reversed(module: TransformerModule, strength: float) -> None:
    """The sign of the loss is wrong from some step on."""

    def change() -> None:
        for p in module.model.parameters():
            p.grad.neg_()

    gradients_late(module, strength, change)


pre = {"norm_placement": PreNorm()}
dropped = {"residual_dropout": 0.1}
experts = {"feedforward": MoE(expert=ReLU(d_ff=64)), **pre}


def gradients_kept(module: TransformerModule, strength: float) -> None:
    """They are set to zero before every so many steps only."""
    own, calls = module.optimizer_zero_grad, count()

    def rarely(epoch: int, batch: int, optimizer: torch.optim.Optimizer) -> None:
        if next(calls) % strength == 0:
            own(epoch, batch, optimizer)

    module.optimizer_zero_grad = rarely


def averaged(module: TransformerModule, strength: float) -> None:
    """The mean of earlier weights is written over them after each step."""
    mean = {name: p.detach().clone() for name, p in module.model.named_parameters()}

    def write_back(*_: Any) -> None:
        for name, p in module.model.named_parameters():
            mean[name].lerp_(p.detach(), 1 - strength)
            p.data.copy_(mean[name])

    module.on_train_batch_end = write_back


BROKEN = (
    TrainingFault("rate too high", ("learning_rate_fit",), rate_multiplied, (5.0, 100.0), pre),
    TrainingFault("rate too low", ("learning_rate_fit",), rate_multiplied, (0.2, 0.003), pre),
    TrainingFault("warm-up left out", ("learning_rate_fit",), warmup_left_out, (0.5, 1.0)),
    TrainingFault("schedule by epoch", ("learning_rate_fit",), schedule_by_epoch, (1.0,)),
    TrainingFault("schedule moved rarely", ("learning_rate_fit",), schedule_moved_rarely, (2.0, 10.0), pre),
    TrainingFault("β₂ changed", ("optimizer_fit",), beta2_changed, (0.95, 0.9999), pre),
    TrainingFault("β₁ changed", ("optimizer_fit",), beta1_changed, (0.8, 0.0), pre),
    TrainingFault("ε changed", ("optimizer_fit",), eps_changed, (1e-6, 1e-1), pre),
    TrainingFault("decay changed", ("optimizer_fit",), decay_changed, (0.1, 10.0), pre),
    TrainingFault("plain descent", ("optimizer_fit", "learning_rate_fit"), plain_descent, (1.0, 30.0), pre),
    TrainingFault("stepped again", ("optimizer_fit",), stepped_again, (0.5, 2.0), pre),
    TrainingFault("averaged", ("optimizer_fit",), averaged, (0.5, 0.98), pre),
    TrainingFault("gradients kept", ("gradient_fit",), gradients_kept, (2.0, 1000.0), pre),
    TrainingFault("unclipped", ("optimizer_fit",), unclipped, (1.0,), pre, {"gradient_clip": 0.1}),
    TrainingFault("same batches", ("batch_fit", "fresh_gap"), same_batches, (8.0, 1.0), pre),
    TrainingFault("labels of others", ("target_alignment",), labels_of_others, (0.3, 1.0), pre),
    TrainingFault("dropout in training", ("mode_fit",), dropout_in_training, (0.1, 0.5), pre),
    TrainingFault("noise in training", ("mode_fit",), embedding_noise, (0.1, 1.0), pre),
    TrainingFault("balance left out", ("moe_aux",), balance_left_out, (0.5, 0.0), experts),
    TrainingFault("softmax twice", ("moe_aux",), softmax_twice, (1.0, 2.0), experts),
    TrainingFault(
        "an expert preferred", ("moe_balance", "moe_idle", "moe_aux"), expert_preferred, (5.0, 50.0), experts
    ),
    TrainingFault("targets shifted late", ("batch_fit",), targets_shifted_late, (20.0, 100.0), pre),
    TrainingFault("another seed late", ("batch_fit",), another_seed_late, (20.0, 100.0), pre),
    TrainingFault("smoothing undeclared", ("loss_fit",), smoothing_undeclared, (0.05, 0.3), pre),
    TrainingFault("loss multiplied", ("loss_fit",), loss_multiplied, (2.0, 100.0), pre),
    TrainingFault("dropout asleep late", ("loss_fit",), dropout_asleep_late, (20.0, 100.0), pre | dropped),
    TrainingFault("gradients multiplied", ("gradient_fit",), gradients_multiplied, (0.5, 1000.0), pre),
    TrainingFault("embedding rows frozen", ("gradient_fit",), rows_frozen, (1.0, 4.0), pre),
    TrainingFault("frozen late", ("gradient_fit", "stopped"), update_frozen_late, (20.0, 100.0), pre),
    TrainingFault("gradients lost", ("gradient_fit", "divergence", "spike"), gradients_lost, (100.0, 250.0), pre),
    TrainingFault("updates reversed", ("gradient_fit", "ascent"), updates_reversed, (50.0, 200.0), pre),
)


def rates(strength: float) -> dict[str, Any]:
    return {"train.learning_rate": strength}


def eps(strength: float) -> dict[str, Any]:
    return {"train.eps": strength}


def steps(strength: float) -> dict[str, Any]:
    return {"train.steps": round(strength)}


def samples(strength: float) -> dict[str, Any]:
    return {"train.sampling": Finite(num_samples=round(strength))}


def deep_without_residual(strength: float) -> dict[str, Any]:
    return {"model.residual": NoResidual(), "model.num_layers": round(strength)}


def drawn_wide(strength: float) -> dict[str, Any]:
    wide = Normal(deviation=strength)
    return {"model.init": Initialisation(linear=wide, qkv=wide)}


steep = {"schedule": Constant(), "beta2": 0.999}
unscaled = {**pre, "scale": Unscaled()}

UNWISE = (
    TrainingFault("declared rate too high", ("update_peak", "update_ratio"), nothing, (0.1, 3.0), pre, {}, rates),
    TrainingFault("declared rate too low", ("update_ratio",), nothing, (3e-5, 3e-6), pre, {}, rates),
    TrainingFault("no warm-up declared", ("no_warmup",), nothing, (0.02, 0.1), {}, steep, rates),
    TrainingFault("ε declared too large", ("adam_eps",), nothing, (0.1, 10.0), pre, {}, eps),
    TrainingFault("too few steps", ("slow_convergence",), nothing, (100.0, 60.0), pre, {}, steps),
    TrainingFault("too few samples", ("finite_gap",), nothing, (60.0, 12.0), pre, {}, samples),
    TrainingFault(
        "deep, no residual", ("rank_collapse", "depth_gradients"), nothing, (6.0, 10.0), {}, {}, deep_without_residual
    ),
    TrainingFault(
        "drawn wide, unscaled", ("initial_logits", "residual_jump"), nothing, (0.5, 1.5), unscaled, {}, drawn_wide
    ),
)
