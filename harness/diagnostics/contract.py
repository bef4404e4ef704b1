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
from harness.diagnostics.keeping import kept, mode
from harness.diagnostics.subject import block_of
from harness.module import answer_loss, decay_groups
from harness.schema import is_foreign
from harness.seeding import seed_global
from harness.spec import RunSpec
from harness.transformer import Output, Transformer
from tasks.task import Batch

Weights = Mapping[str, Tensor]  # by the name of the parameter that they stand for

LITTLE = 1e-3  # of the root mean square of all gradients: smaller ones are measured by this
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
        batch: what is read, by the number of steps already taken; of a module that keeps it as `read`.
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
    batch: Callable[[int], Batch] | None = None
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
        # Not of what is computed twice to save memory; nor of a user's own level, which may count how often it ran.
        losses=None
        if train.recompute or any(is_foreign(type(part)) for part in spec.model.specs())
        else lambda weights, batch, taken: _losses(spec, model, weights, batch, taken),
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


def declared_step(
    model: nn.Module,
    contract: Contract,
    batch: Any,
    taken: int,
    buffers: Sequence[Tensor] | None = None,
    *,
    noise: bool = True,
) -> DeclaredStep:
    """The step that a contract makes of a batch after so many, from `buffers` as they were before it: on the model's
    own weights, in training mode, but around whatever stands between its loss and its gradients. The model, its
    gradients and torch's draws stay as they are. Its noise scale takes the gradients of half the batch as well.
    """
    assert contract.losses is not None
    with mode(model, training=True), kept(model), torch.enable_grad(), _no_backward_hooks(model):
        for own, before in zip(model.buffers(), buffers or (), strict=bool(buffers)):
            own.copy_(before)
        weights = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
        task, auxiliary = contract.losses(weights, batch, taken)
        gradients, others = _gradients(task + auxiliary, weights, again=auxiliary.requires_grad), {}
        of_task = gradients
        if auxiliary.requires_grad:
            of_routers = _gradients(auxiliary, weights)
            of_task = {name: gradients[name] - of_routers[name] for name in weights}
            both = [name for name in weights if of_routers[name].any()]
            others["auxiliary"] = norm(of_routers.values()) / norm(of_task[name] for name in both) if both else 0 * task
        if noise and contract.halves and len(batch.inputs) % 2 == 0:
            half, _ = contract.losses(weights, batch.rows(slice(len(batch.inputs) // 2)), taken)
            others["noise_scale"] = noise_scale(_gradients(half, weights), of_task, len(batch.inputs))
    return DeclaredStep((task + auxiliary).detach(), gradients, {name: x.detach() for name, x in others.items()})


def noise_scale(half: Weights, whole: Weights, size: int) -> Tensor:
    """The gradient noise scale tr(Σ) / |G|², in sequences, from the gradients of a batch of so many and of its half: a
    batch that is much smaller learns little from a step, one that is much larger no more (McCandlish et al. 2018,
    arXiv:1812.06162, appendix A). NaN where the estimate of |G|² is not positive.
    """
    small, large = (norm(gradients.values()).square() for gradients in (half, whole))
    variance, square = size * (small - large), 2 * large - small
    return torch.where(square > 0, variance / square, math.nan)


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """Of all of them together, one at least."""
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


def same_batch(one: Batch, other: Batch) -> float:
    """The share of a batch's numbers, tokens and targets, that another batch has in their place."""
    parts = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
    if any((a is None) != (b is None) or (a is not None and a.shape != b.shape) for a, b in parts):
        return 0.0
    both = [(a, b) for a, b in parts if a is not None]
    return sum(int((a == b).sum()) for a, b in both) / sum(a.numel() for a, _ in both)


def gradient_error(
    parameters: Mapping[str, nn.Parameter], step: DeclaredStep, blocks: Sequence[str]
) -> dict[str, Tensor]:
    """How far the gradients that reached a model's parameters are from those of the declared step: the largest relative
    distance of a row of a matrix, or of a vector, `error.i` in block i, `error` outside of the blocks; and `fit`, the
    factor between the two.
    """
    zero = torch.zeros((), device=step.loss.device)
    found: dict[str, Tensor] = {}
    product = square = zero
    count = sum(p.numel() for p in parameters.values())
    usual = (norm(step.gradients[name] for name in parameters) / count**0.5).float()
    for name, p in parameters.items():
        due = step.gradients[name].float()
        there = torch.zeros_like(due) if p.grad is None else p.grad.float()
        block = block_of(name, blocks)
        key = f"error.{blocks.index(block)}" if block else "error"
        found[key] = torch.maximum(found.get(key, zero), _error(there, due, usual))
        product, square = product + (there * due).sum(), square + due.square().sum()
    return found | {"fit": product / square.clamp(min=1e-30)}


def _error(there: Tensor, due: Tensor, usual: Tensor) -> Tensor:
    """The largest relative distance of a row; rows that hardly matter are measured by those that do, and gradients that
    are nothing but rounding, as where they are zero by the model's own symmetry, by the `usual` size of all.
    """
    there, due = (x.flatten(1) if x.dim() > 1 else x[None] for x in (there, due))
    size = due.norm(dim=1)
    least = torch.maximum(ROW * size.max(), LITTLE * usual * due.shape[1] ** 0.5).clamp(min=1e-30)
    error = ((there - due).norm(dim=1) / torch.maximum(size, least)).max()
    return error.nan_to_num(nan=math.inf)
