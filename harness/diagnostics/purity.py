"""Whether two runs differ in just what their specs say: shown on the first steps of both, before either is trained."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from harness.diagnostics.subject import declared_deviations, one_thread
from harness.module import TransformerModule
from harness.schema import Changes, Spec
from harness.seeding import seed_global
from harness.spec import ModelSpec, RunSpec

ASPECTS = ("parameters", "outputs", "loss", "data", "schedule", "updates", "evaluation")
STEPS = 3  # of training: what adaptive moments do shows at the second

# What else may differ where a field declares what it changes; all the rest must be the same to the bit.
FOLLOWERS: dict[str, set[str]] = {
    "parameters": {"outputs", "evaluation", "loss", "updates"},
    "outputs": {"parameters", "evaluation", "loss", "updates"},
    "loss": {"updates"},
    "data": {"outputs", "parameters", "evaluation", "loss", "updates"},
    "schedule": {"updates"},
    "updates": {"loss"},
    "evaluation": {"outputs"},
    "hardware": {"outputs", "evaluation", "loss", "updates"},
}
UNDECLARED = "anything"  # as a field of a user's level may leave it
FOLLOWERS[UNDECLARED] = set(ASPECTS)
# These act only once something has happened: a gradient was long, an expert full.
CONDITIONAL = ("train.gradient_clip", "train.eval_every", "train.eval_samples", "model.feedforward.capacity")


def impurities(one: RunSpec, other: RunSpec) -> list[str]:
    """What is wrong with a comparison of two runs of one task and seed; empty if nothing is.

    Nothing that their specs differ in has an effect; or something differs that no field declares to change.
    """
    declared = dict(differing(one, other))
    before, after = shown(one), shown(other)
    differ = {aspect for aspect in ASPECTS if not _same(before[aspect], after[aspect])}
    kinds = set(declared.values())
    allowed = kinds.union(*(FOLLOWERS[kind] for kind in kinds))
    found = [f"{aspect} differ, which {_listed(declared)} must not change" for aspect in sorted(differ - allowed)]
    if not _paired(before["draws"], after["draws"]):
        found.append("parameters that both have are drawn differently")
    acts = "hardware" in kinds or any(path in CONDITIONAL for path in declared)
    if not differ and not acts:
        found.append(f"{_listed(declared)} has no effect on {', '.join(ASPECTS)}")
    return found


def _listed(declared: dict[str, str]) -> str:
    return " and ".join(declared)


def differing(one: Spec, other: Spec, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The paths at which two specs of one class differ, each with what its field declares to change, if it does."""
    for name, field in type(one).model_fields.items():
        values = getattr(one, name), getattr(other, name)
        if values[0] == values[1]:
            continue
        if isinstance(values[0], Spec) and type(values[0]) is type(values[1]):
            yield from differing(*values, f"{prefix}{name}.")
        else:
            markers = (marker.what for marker in field.metadata if isinstance(marker, Changes))
            yield prefix + name, next(markers, UNDECLARED)


@lru_cache(maxsize=4)
def shown(spec: RunSpec) -> dict[str, Any]:
    """What a run computes before it has come far: its parameters, how they are drawn, the first outputs, losses, data,
    factors of the learning rate, the parameters after some steps, and what evaluation makes of a sequence.
    """
    with torch.random.fork_rng(), one_thread():
        module = TransformerModule(spec).to(spec.device)
        batches = [module.batch(step) for step in range(STEPS)]
        seed_global(spec.seed, "purity")
        outputs = module.model(*batches[0].reading).detach()
        parameters = dict(module.model.named_parameters())
        found = {
            "parameters": {name: tuple(value.shape) for name, value in parameters.items()},
            "draws": _draws(module, spec.model),
            "outputs": outputs,
            "data": [part for batch in batches for part in batch.reading],
            "schedule": [spec.train.schedule.factor(n, spec.train.steps, spec.model.d_model) for n in _places(spec)],
            "evaluation": _evaluated(module),
        }
        losses = list(_trained(module))
    found["loss"] = losses[:1]
    found["updates"] = {name: value.detach() for name, value in parameters.items()}
    return found


def _places(spec: RunSpec) -> range:
    return range(0, spec.train.steps, max(1, spec.train.steps // 50))


def _draws(module: TransformerModule, spec: ModelSpec) -> dict[str, Tensor]:
    """Linear maps and embeddings in units of their declared deviation: models share what is drawn from (seed, name)."""
    deviations = declared_deviations(module.model, spec)
    parameters = module.model.named_parameters()
    return {name: value.detach() / deviations[name] for name, value in parameters if deviations.get(name)}


@torch.no_grad()
def _evaluated(module: TransformerModule) -> Tensor:
    spec, device = module.spec, module.device
    length = max(spec.task.lengths.train[1], *spec.task.lengths.test, 0)
    batch = spec.batch("purity", 0, 2, length, device)
    module.model.eval()
    try:
        return module.model(*batch.reading)
    except ValueError:  # a length that it cannot take scores zero
        return torch.zeros(0)
    finally:
        module.model.train()


def _trained(module: TransformerModule) -> Iterator[float]:
    """The losses of the first steps, while they are taken, all on the first batch."""
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module.training_step(None, 0)
        loss.backward()
        module.on_after_backward()
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
        schedule.step()
        yield loss.item()


def _same(one: Any, other: Any) -> bool:
    """Whether two observations are the same to the bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _paired(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether parameters that two models share, by name and shape, have the same draws, up to the rounding of a
    deviation.
    """
    shared = (name for name in one.keys() & other.keys() if one[name].shape == other[name].shape)
    return all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in shared)
