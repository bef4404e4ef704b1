"""What is looked at while a model trains: numbers by name, from its gradients, its optimiser and a probe batch. Names
end in the place of the layer, from 0, where there is a number for each.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.diagnostics.contract import Contract, norm
from harness.diagnostics.operators import Attended, attended
from harness.diagnostics.subject import Subject, first, hooked
from tasks.task import Batch

Signals = dict[str, float]

WINDOW = 128  # steps that a spike stands out from
FEWEST = 32  # steps before which nothing stands out
LEAST_LOSS, LEAST_GRADIENT = 0.02, 0.25  # the smallest σ: of the loss, as a share of the first; of ln gradient norm
SHARP, UNIFORM = 0.05, 0.98  # normalised entropies of heads that see one key, and all alike
LOST = 1e-5  # of a weight: of a smaller step, rounding leaves a hundredth and more
ROUNDING = 1e-5  # of a weight: where the largest step is smaller, those of some matrices are lost in fp32
ROWS = 64  # queries of a sequence that are looked at: a table of all would not fit for long ones
SILENT = 0.01  # of the activations' root mean square: a unit that never gets there says nothing


@dataclass
class Surprise:
    """How far, in σ, losses and gradient norms stand out from those of the last `WINDOW` steps.

    Losses are compared as they lie above the mean of their length, which training mixes; gradient norms by their
    logarithm. A σ is no smaller than what would matter. NaN and ∞ are the business of others.
    """

    past: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first: float = math.nan  # loss

    def of(self, steps: Sequence[tuple[int, float, float]]) -> Signals:
        """The most that one of these steps (length, loss, gradient norm) stands out of those before them all."""
        found = {"spike/loss": 0.0, "spike/gradient": 0.0}
        if len(self.past) >= FEWEST:
            found = {"spike/loss": self._losses(steps), "spike/gradient": self._norms(steps)}
        elif math.isnan(self.first):
            self.first = next((loss for _, loss, _ in steps if math.isfinite(loss)), math.nan)
        self.past.extend(step for step in steps if all(map(math.isfinite, step)))
        return found

    def _losses(self, steps: Sequence[tuple[int, float, float]]) -> float:
        means = _means(self.past)
        rest = [loss - means[length] for length, loss, _ in self.past]
        level = sum(loss for _, loss, _ in self.past) / len(self.past)
        return _sigmas([loss - means.get(length, level) for length, loss, _ in steps], rest, LEAST_LOSS * self.first)

    def _norms(self, steps: Sequence[tuple[int, float, float]]) -> float:
        logs = [math.log(max(norm, 1e-30)) for _, _, norm in self.past]
        level = sum(logs) / len(logs)
        new = [math.log(norm) - level for _, _, norm in steps if norm > 0 and math.isfinite(norm)]
        return _sigmas(new, [log - level for log in logs], LEAST_GRADIENT)


def _means(past: deque[tuple[int, float, float]]) -> dict[int, float]:
    by_length: dict[int, list[float]] = {}
    for length, loss, _ in past:
        by_length.setdefault(length, []).append(loss)
    return {length: sum(losses) / len(losses) for length, losses in by_length.items()}


def _sigmas(distances: list[float], rest: list[float], least: float) -> float:
    """The largest distance in σ of the rest, of those that are numbers; 0 without any."""
    sigma = max(math.sqrt(sum(x * x for x in rest) / len(rest)), least)
    return max((distance / sigma for distance in distances if math.isfinite(distance)), default=0.0)


def matrices(subject: Subject) -> list[str]:
    """Names of the weights that are trained at every step, without vectors."""
    named = subject.model.named_parameters()
    return [name for name, p in named if p.dim() > 1 and p.requires_grad and name not in subject.idle]


def block_gradients(subject: Subject) -> Signals:
    """Norm of the gradient of each block."""
    blocks = {place: list(subject.model.get_submodule(path).parameters()) for place, path in enumerate(subject.blocks)}
    return numbers({f"gradient/block.{place}": gradient_norm(block) for place, block in blocks.items()})


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Of all their gradients together; 0 without any."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return norm(gradients) if gradients else parameters[0].new_zeros(())


def clip_fit(before: float, after: float, limit: float) -> Signals:
    """The norm of the clipped gradients over what it should be, given that before."""
    due = min(before, limit)
    return {"optimizer/clip_fit": after / due} if due > 0 and math.isfinite(after) else {}


def furthest(fits: Iterable[float]) -> float:
    """The factor that is furthest from 1."""
    return max(fits, key=lambda fit: abs(math.log(max(fit, 1e-12))))


def lengths(before: list[Tensor], after: list[Tensor]) -> Tensor:
    """How far each weight matrix has moved, ‖Δw‖."""
    return torch.stack(list(torch._foreach_norm(torch._foreach_sub(after, before))))


def update(before: list[Tensor], moved: Tensor) -> Signals:
    """Of one step that moved weight matrices so far, the median of ‖Δw‖ / ‖w‖, and the share of those that it left as
    they were: 0 where it moves nothing by more than rounding.
    """
    ratios = moved / torch.stack(list(torch._foreach_norm(before))).clamp(min=1e-12)
    unmoved = torch.where(ratios.max() > ROUNDING, (ratios == 0).float().mean(), 0.0)
    return numbers({"update/ratio": ratios.median(), "update/unmoved": unmoved})


def elsewhere(moved: Sequence[float], after: list[Tensor], now: list[Tensor]) -> Signals:
    """How far, at worst, a matrix has moved between a step and the next one, over the length of that step; where it was
    not lost in the weight's rounding.
    """
    since = lengths(after, now)
    size = torch.stack(list(torch._foreach_norm(after)))
    share = torch.where(since > LOST * size, since / since.new_tensor(moved).clamp(min=1e-30), 0.0)
    return numbers({"update/elsewhere": share.max()})


def hyperparameters(
    optimizer: torch.optim.Optimizer, taken: int, told: Contract, names: Mapping[int, str] | None = None
) -> Signals:
    """How the optimiser's numbers, when it has taken so many steps, compare with what is declared: what acts over what
    is declared, in the group where they are furthest apart; of β it is 1 − β. An optimiser without β and ε has 0.
    `names` are those of parameters by their id.
    """
    groups, found = optimizer.param_groups, {}
    acting = {
        "beta1": [1 - group["betas"][0] if "betas" in group else 0.0 for group in groups],
        "beta2": [1 - group["betas"][1] if "betas" in group else 0.0 for group in groups],
        "eps": [group.get("eps", 0.0) for group in groups],
        "learning_rate": [float(group["lr"]) for group in groups],
    }
    for name, values in acting.items():
        declared = getattr(told, name)
        if declared is not None:
            right = 1 - declared if "beta" in name else declared(taken) if callable(declared) else declared
            found[f"optimizer/{name}_fit"] = furthest(_ratio(value, right) for value in values)
    if told.weight_decay is not None:
        found["optimizer/weight_decay_fit"] = _decay_fit(groups, told.weight_decay, names or {})
    return found


def _decay_fit(
    groups: Sequence[Mapping[str, Any]], declared: float | Mapping[str, float], names: Mapping[int, str]
) -> float:
    acting = [(group.get("weight_decay", 0.0), id(p)) for group in groups for p in group["params"]]
    if not isinstance(declared, Mapping):
        return _ratio(max(decay for decay, _ in acting), declared)
    return furthest(_ratio(decay, declared[names[p]]) for decay, p in acting if names.get(p) in declared)


def adam(
    optimizer: torch.optim.Optimizer,
    before: Sequence[Tensor],
    after: Sequence[nn.Parameter],
    taken: int,
    told: Contract,
) -> Signals:
    """How Adam's last step, before which it had taken so many, compares with the declared one, and how well its mean
    squares fit the gradient.

    `optimizer/step_error` is how far, at worst, a matrix moved from where it should have, over the length of that step;
    matrices that should hardly move are left out. `optimizer/age_fit` is the number of steps that Adam has counted over
    that of all. `update/stale` is the median of √mean(g²/v), `update/gradient_over_eps` that of the root mean square of
    g over ε.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known = [
        (w, p, groups[id(p)], optimizer.state[p])
        for w, p in zip(before, after, strict=True)
        if id(p) in groups and p.grad is not None and "exp_avg_sq" in optimizer.state.get(p, ())
    ]
    if not known:
        return {}
    found: dict[str, Tensor] = {}
    if told.learning_rate is not None:
        found["optimizer/step_error"] = torch.stack(
            [_error(p.detach() - w, w, _declared(w, group, state, taken, told)) for w, p, group, state in known]
        ).max()
        ages = torch.stack([torch.as_tensor(state["step"], dtype=torch.float32).cpu() for *_, state in known])
        found["optimizer/age_fit"] = ages.min() / (taken + 1)
    stale, small = zip(*(_fit(p, group, state) for _, p, group, state in known), strict=True)
    found |= {"update/stale": torch.stack(stale).median(), "update/gradient_over_eps": torch.stack(small).median()}
    return numbers(found)


def _error(moved: Tensor, w: Tensor, declared: Tensor) -> Tensor:
    """‖moved + declared‖ / ‖declared‖; 0 where that is lost in a weight's rounding."""
    length = declared.norm()
    error = (moved + declared).norm() / length.clamp(min=1e-30)
    return torch.where(length > LOST * w.norm(), error, torch.zeros_like(error))


def _ratio(acting: float, declared: float) -> float:
    """1 where both are nothing, and a large number where something acts that should not."""
    if declared == 0:
        return 1.0 if acting == 0 else 1e6
    return acting / declared


def _declared(w: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], taken: int, told: Contract) -> Tensor:
    """The step that AdamW makes from these moments at the declared learning rate (arXiv:1711.05101)."""
    assert told.learning_rate is not None
    rate, count = told.learning_rate(taken), float(state["step"])
    beta1, beta2 = group["betas"] if told.beta1 is None or told.beta2 is None else (told.beta1, told.beta2)
    eps = group["eps"] if told.eps is None else told.eps
    mean = state["exp_avg"] / (1 - beta1**count)
    root = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt()
    return rate * (mean / (root + eps) + group["weight_decay"] * w)


def _fit(p: nn.Parameter, group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """√mean(g²/v) and rms(g)/ε."""
    assert p.grad is not None
    square = p.grad.square()
    v = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
    tiny = max(group["eps"], 1e-30)
    return (square / v.clamp(min=tiny**2)).mean().sqrt(), square.mean().sqrt() / tiny


@torch.no_grad()
def inside(subject: Subject, batch: Batch) -> Signals:
    """What happens in a pass over a probe batch, in evaluation mode: attention by sublayer, hidden states by block,
    feed-forward units by layer, routers.
    """
    found: dict[str, Tensor] = {}
    with _seen(subject, found):
        calls = attended(subject, batch)
    for place, call in enumerate(call for call in calls if call.path or not subject.sites):
        found |= {f"heads/{name}.{place}": value for name, value in _attention(call).items()}
    return numbers(found)


def numbers(found: Mapping[str, Tensor]) -> Signals:
    """As plain ones, fetched at once: a device is waited for once."""
    if not found:
        return {}
    device = next(iter(found.values())).device
    return dict(zip(found, torch.stack([x.float().to(device) for x in found.values()]).tolist(), strict=True))


def _attention(call: Attended) -> dict[str, Tensor]:
    """Of some queries, the largest logit, the mean entropy of heads over that of equal weights, the shares of sharp and
    of uniform heads, and the weight that later queries give to the first key (Xiao et al. 2023, arXiv:2309.17453).
    """
    length = call.query.shape[-2]
    logits = call.logits(
        torch.float32, torch.linspace(0, length - 1, min(length, ROWS), device=call.query.device).long()
    )
    hidden = logits < -1e3  # by −∞, or by some large number
    weights = logits.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(nan=0.0)
    keys = (~hidden).sum(-1)
    asked = (keys > 1).float().expand(weights.shape[:-1])
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1) / keys.clamp(min=2).float().log()
    heads = (entropy * asked).sum((0, 2)) / asked.sum((0, 2)).clamp(min=1)
    return {
        "logit_max": logits.masked_fill(hidden, -math.inf).max(),
        "entropy": heads.mean(),
        "sharp": (heads < SHARP).float().mean(),
        "uniform": (heads > UNIFORM).float().mean(),
        "sink": weights[..., 1:, 0].mean(),
    }


@contextmanager
def _seen(subject: Subject, found: dict[str, Tensor]) -> Iterator[None]:
    """Fills in what the subject's modules give, while they run."""

    def block(place: int, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        x = first(output).float()
        found[f"residual/rms.{place}"] = x.square().mean().sqrt()
        found[f"residual/distinct.{place}"] = (x - x.mean(1, keepdim=True)).norm() / x.norm().clamp(min=1e-30)

    def units(place: int, _module: nn.Module, args: Any, _kwargs: Any) -> None:
        active = args[0].float().abs().flatten(0, -2)
        level = SILENT * active.square().mean().sqrt()
        found[f"feedforward/dead.{place}"] = (active.amax(0) <= level).float().mean()

    def router(place: int, _module: nn.Module, _args: Any, _kwargs: Any, output: Tensor) -> None:
        found[f"router/logsumexp.{place}"] = output.float().logsumexp(-1).mean()

    def each(paths: Sequence[str], look: Callable[..., None]) -> dict[str, Callable[..., None]]:
        return {path: partial(look, place) for place, path in enumerate(paths)}

    after = each(subject.blocks, block) | each(subject.routers, router)
    with hooked(subject.model, after, each(subject.units, units)):
        yield
