"""What is declared of training, and the step that it declares, computed beside the one that is made."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from harness.components.norm import BatchNorm
from harness.diagnostics.subject import kept, mode
from harness.module import answer_loss, decay_groups
from harness.seeding import seed_global
from harness.spec import RunSpec
from harness.transformer import Output, Transformer
from tasks.task import Batch

Weights = Mapping[str, Tensor]  # by the name of the parameter that they stand for

ROW = 0.01  # of the largest row of a gradient: smaller ones are measured by this


@dataclass(frozen=True)
class Contract:
    """What is declared of training; None: it is not, and is not compared.

    Attributes:
        learning_rate: by the number of steps already taken.
        beta1: decay of Adam's mean gradient.
        beta2: decay of its mean square.
        eps: what is added to the root of the mean square.
        weight_decay: the largest of the groups, or that of each parameter by name.
        clip: the norm that gradients are clipped to; ∞: they are not.
        batch: what is read, by the number of steps already taken.
        losses: with these weights, of this batch, after so many steps: the task's loss and that of routers, 0 without
            any. The step follows their sum.
        halves: whether the loss of a batch is the mean of those of its halves.
    """

    learning_rate: Callable[[int], float] | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | Mapping[str, float] | None = None
    clip: float | None = None
    batch: Callable[[int], Any] | None = None
    losses: Callable[[Weights, Any, int], tuple[Tensor, Tensor]] | None = None
    halves: bool = False


def contract_of(spec: RunSpec, model: Transformer) -> Contract:
    """What a spec declares of how its model is trained."""
    train = spec.train

    def learning_rate(taken: int) -> float:
        return train.learning_rate * train.schedule.factor(taken, train.steps, spec.model.d_model)

    decays = {
        id(p): group["weight_decay"] for group in decay_groups(model, train.weight_decay) for p in group["params"]
    }
    return Contract(
        learning_rate,
        train.beta1,
        train.beta2,
        train.eps,
        weight_decay={name: decays[id(p)] for name, p in model.named_parameters() if id(p) in decays},
        clip=train.gradient_clip or math.inf,
        batch=lambda taken: spec.training_batch(taken, next(model.parameters()).device),
        # What is computed twice to save memory is not computed a third time beside it.
        losses=None if train.recompute else lambda weights, batch, taken: _losses(spec, model, weights, batch, taken),
        halves=not spec.is_padded and not isinstance(spec.model.norm, BatchNorm),
    )


def _losses(spec: RunSpec, model: Transformer, weights: Weights, batch: Batch, taken: int) -> tuple[Tensor, Tensor]:
    seed_global(spec.seed, "step", taken)
    named = {f"model.{name}": weight for name, weight in weights.items()}
    with spec.train.kernel.context(), spec.autocast():
        output: Output = torch.func.functional_call(_Whole(model), named, (batch,))
    loss = answer_loss(output.logits, batch.targets, spec.train.label_smoothing)
    return loss, loss.new_zeros(()) + output.auxiliary_loss


class _Whole(nn.Module):
    """A model that also gives what its routers did."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Output:
        return self.model.outputs(*batch.reading)


@dataclass(frozen=True)
class DeclaredStep:
    """One step of training as it should be.

    Attributes:
        loss: of the batch.
        gradients: of the loss by parameter; zero where it does not depend on it.
        others: `auxiliary`, the norm of the gradient of routers' losses over that of the task, where both act;
            `noise_scale`, of the gradient, in sequences.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    others: dict[str, Tensor]


def declared_step(model: nn.Module, contract: Contract, batch: Any, taken: int) -> DeclaredStep:
    """The step that a contract makes of a batch after so many: on the model's own weights, in training mode, but around
    whatever stands between its loss and its gradients. The model, its gradients and torch's draws stay as they are.
    """
    assert contract.losses is not None
    with mode(model, training=True), kept(model), torch.enable_grad(), _no_backward_hooks(model):
        weights = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
        task, auxiliary = contract.losses(weights, batch, taken)
        others = {}
        of_task = None
        if auxiliary.requires_grad:
            of_task = _gradients(task, weights, again=True)
            of_routers = _gradients(auxiliary, weights)
            both = [name for name in weights if of_routers[name].any()]
            others["auxiliary"] = norm(of_routers.values()) / norm(of_task[name] for name in both)
            gradients = {name: of_task[name] + of_routers[name] for name in weights}
        else:
            gradients = of_task = _gradients(task, weights)
        if contract.halves and len(batch.inputs) % 2 == 0:
            half, _ = contract.losses(weights, batch.rows(slice(len(batch.inputs) // 2)), taken)
            others["noise_scale"] = noise_scale(_gradients(half, weights), of_task, len(batch.inputs))
    return DeclaredStep((task + auxiliary).detach(), gradients, others)


def noise_scale(half: Weights, whole: Weights, size: int) -> Tensor:
    """The gradient noise scale tr(Σ) / |G|², in sequences, from the gradients of a batch of so many and of its half: a
    batch that is much smaller learns little from a step, one that is much larger no more (McCandlish et al. 2018,
    arXiv:1812.06162, appendix A). NaN where the estimate of |G|² is not positive.
    """
    small, large = (norm(gradients.values()).square() for gradients in (half, whole))
    variance, square = size * (small - large), 2 * large - small
    return torch.where(square > 0, variance / square, math.nan)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Of all of them together."""
    return torch.stack(list(torch._foreach_norm(list(tensors)))).norm()


def _gradients(loss: Tensor, weights: Weights, *, again: bool = False) -> dict[str, Tensor]:
    found = torch.autograd.grad(
        loss, list(weights.values()), retain_graph=again, allow_unused=True, materialize_grads=True
    )
    return dict(zip(weights, found, strict=True))


@contextmanager
def _no_backward_hooks(model: nn.Module) -> Iterator[None]:
    """A model whose modules do nothing to gradients that pass."""
    hooks = ("_backward_hooks", "_backward_pre_hooks")
    before = [(module, name, getattr(module, name)) for module in model.modules() for name in hooks]
    for module, name, _ in before:
        setattr(module, name, OrderedDict())
    try:
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


def same_batch(one: Any, other: Any) -> float:
    """The share of a batch's numbers, tokens and targets, that another batch has in their place."""
    parts = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
    if any((a is None) != (b is None) or (a is not None and a.shape != b.shape) for a, b in parts):
        return 0.0
    both = [(a, b) for a, b in parts if a is not None]
    return sum(int((a == b).sum()) for a, b in both) / sum(a.numel() for a, _ in both)


def gradient_error(model: nn.Module, step: DeclaredStep, blocks: Sequence[str]) -> dict[str, Tensor]:
    """How far the gradients that reached a model are from those of the declared step: the largest relative distance of
    a row of a matrix, or of a vector, `error.i` in block i, `error` outside of the blocks; and `fit`, the factor
    between the two.
    """
    found: dict[str, Tensor] = {}
    product = square = torch.zeros((), device=step.loss.device)
    for name, p in model.named_parameters():
        due = step.gradients[name].float()
        there = torch.zeros_like(due) if p.grad is None else p.grad.float()
        key = next((f"error.{place}" for place, path in enumerate(blocks) if name.startswith(f"{path}.")), "error")
        found[key] = torch.maximum(found.get(key, torch.zeros_like(product)), _error(there, due))
        product, square = product + (there * due).sum(), square + due.square().sum()
    return found | {"fit": product / square.clamp(min=1e-30)}


def _error(there: Tensor, due: Tensor) -> Tensor:
    """The largest relative distance of a row; rows that hardly matter are measured by those that do."""
    rows = due.dim() > 1
    size = due.flatten(1).norm(dim=1) if rows else due.norm()[None]
    apart = (there - due).flatten(1).norm(dim=1) if rows else (there - due).norm()[None]
    error = (apart / size.clamp(min=max(1e-30, ROW * float(size.max())))).max()
    return torch.where(error.isfinite(), error, torch.full_like(error, math.inf))
