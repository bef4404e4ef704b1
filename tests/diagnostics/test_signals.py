"""Each signal of training against a computation of its own, from weights, gradients and explicit attention."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import ModelSpec, RunSpec, TrainSpec
from harness.components import architecture, attention, position
from harness.components.feedforward import MoE, ReLU
from harness.components.norm import NoNorm
from harness.diagnostics import AttentionSite, Subject, subject_of
from harness.diagnostics.contract import Contract, contract_of
from harness.diagnostics.signals import (
    FEWEST,
    WINDOW,
    Surprise,
    adam,
    block_gradients,
    clip_fit,
    hyperparameters,
    inside,
    lengths,
    matrices,
    update,
)
from harness.module import TransformerModule
from harness.spec import WarmupCosine
from harness.trace import Trace
from tasks import Copy
from tasks.task import Batch

SMALL: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 2, "feedforward": ReLU(d_ff=16)}


def module_of(model: dict[str, Any] | None = None, **train: Any) -> TransformerModule:
    return TransformerModule(RunSpec(model=ModelSpec(**SMALL | (model or {})), task=Copy(), train=TrainSpec(**train)))


def test_the_update_is_the_median_of_relative_steps() -> None:
    before = [torch.randn(3, 5), torch.randn(4, 4), torch.randn(2, 6)]
    after = [before[0] * 1.01, before[1] + torch.full((4, 4), 0.1), before[2].clone()]
    ratios = sorted((float((new - old).norm() / old.norm()) for old, new in zip(before, after, strict=True)))
    found = update(before, lengths(before, after))
    assert found["update/ratio"] == pytest.approx(ratios[1], rel=1e-5)
    assert found["update/unmoved"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("by", "unmoved"), [(1e-3, 0.5), (1e-8, 0.0), (0.0, 0.0)], ids=["one", "rounding", "none"])
def test_weights_count_as_left_only_where_others_move_by_more_than_rounding(by: float, unmoved: float) -> None:
    before = [torch.ones(2, 2, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64)]
    after = [before[0], before[1] * (1 + by)]
    assert update(before, lengths(before, after))["update/unmoved"] == unmoved


def test_only_trained_matrices_are_looked_at() -> None:
    module = module_of({"feedforward": MoE(expert=ReLU(d_ff=8))})
    module.model.blocks[0].attention.query.weight.requires_grad_(False)
    names = matrices(subject_of(module.spec, module))
    assert "blocks.1.attention.query.weight" in names
    assert "blocks.0.attention.query.weight" not in names
    assert not any("experts" in name or "bias" in name or "norm" in name for name in names)


def test_block_gradients_are_the_norms_of_all_gradients_in_a_block() -> None:
    module = module_of()
    module.training_step(None, 0).backward()
    found = block_gradients(subject_of(module.spec, module))
    for place, block in enumerate(module.model.blocks):
        gradients = torch.cat([p.grad.flatten() for p in block.parameters() if p.grad is not None])
        assert found.pop(f"gradient/block.{place}") == pytest.approx(float(gradients.norm()), rel=1e-5)
    assert found == {}


def test_a_block_without_gradients_has_none() -> None:
    module = module_of()
    assert block_gradients(subject_of(module.spec, module)) == {"gradient/block.0": 0.0, "gradient/block.1": 0.0}


TOLD = Contract(lambda taken: 0.1 * (taken + 1), beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, clip=1.0)


def groups(**changes: Any) -> torch.optim.Optimizer:
    """AdamW as declared at step 3, but for what is changed in its second group."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.4, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.0, **changes})
    return optimizer


def test_hyperparameters_that_act_as_declared_are_one() -> None:
    found = hyperparameters(groups(), 3, TOLD)
    assert found == pytest.approx(dict.fromkeys(found, 1.0))
    assert {name.removeprefix("optimizer/") for name in found} == {
        "beta1_fit", "beta2_fit", "eps_fit", "weight_decay_fit", "learning_rate_fit",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name", "fit"),
    [
        ({"lr": 0.8}, "learning_rate", 2.0),
        ({"lr": 0.1}, "learning_rate", 0.25),
        ({"betas": (0.8, 0.99)}, "beta1", 2.0),
        ({"betas": (0.9, 0.999)}, "beta2", 0.1),
        ({"eps": 1e-6}, "eps", 100.0),
        ({"weight_decay": 0.3}, "weight_decay", 3.0),
    ],
)
def test_a_number_that_is_another_in_one_group_is_told(changes: dict[str, Any], name: str, fit: float) -> None:
    found = hyperparameters(groups(**changes), 3, TOLD)
    assert found.pop(f"optimizer/{name}_fit") == pytest.approx(fit)
    assert found == pytest.approx(dict.fromkeys(found, 1.0))


def test_what_is_not_declared_is_not_compared_and_what_should_be_nothing_stands_out() -> None:
    assert hyperparameters(groups(), 3, Contract()) == {}
    found = hyperparameters(groups(), 3, Contract(weight_decay=0.0))
    assert list(found) == ["optimizer/weight_decay_fit"]
    assert found["optimizer/weight_decay_fit"] > 1e3
    plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.4)
    assert hyperparameters(plain, 3, TOLD) == pytest.approx(
        {"optimizer/beta1_fit": 0.0, "optimizer/beta2_fit": 0.0, "optimizer/eps_fit": 0.0,
         "optimizer/weight_decay_fit": 0.0, "optimizer/learning_rate_fit": 1.0}
    )  # fmt: skip


def stepped(times: int, again: float = 0.0, **changes: Any) -> tuple[Any, list[Tensor], list[nn.Parameter], Contract]:
    """After some steps of a module's own optimiser: it, weights before the last one and now, what is declared."""
    module = module_of(learning_rate=1e-2, weight_decay=0.1, schedule=WarmupCosine(warmup=0.1), steps=100)
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for group in optimizer.param_groups:
        group.update(changes)
    weights = [module.model.get_parameter(name) for name in matrices(subject_of(module.spec, module))]
    for _ in range(times):
        before = [w.detach().clone() for w in weights]
        optimizer.zero_grad()
        (module.training_step(None, 0) * 100).backward()
        optimizer.step()
        schedule.step()
    for old, new in zip(before, weights, strict=True):
        new.data += again * (new.data - old)
    return optimizer, before, weights, contract_of(module.spec, module.model)


@pytest.mark.parametrize("times", [1, 2, 7])
def test_a_step_of_adam_as_declared_is_one(times: int) -> None:
    optimizer, before, after, told = stepped(times)
    assert adam(optimizer, before, after, times - 1, told)["optimizer/step_error"] < 1e-3


@pytest.mark.parametrize("again", [1.0, -0.5, -2.0], ids=["twice", "half", "reversed"])
def test_a_step_that_is_made_twice_by_half_or_backwards_is_told(again: float) -> None:
    optimizer, before, after, told = stepped(4, again)
    assert adam(optimizer, before, after, 3, told)["optimizer/step_error"] == pytest.approx(abs(again), rel=0.01)


def test_an_optimiser_that_has_begun_anew_is_told() -> None:
    optimizer, before, after, told = stepped(4)
    assert adam(optimizer, before, after, 3, told)["optimizer/age_fit"] == 1
    assert adam(optimizer, before, after, 39, told)["optimizer/age_fit"] == pytest.approx(0.1)


def test_decay_where_none_is_declared_stands_out() -> None:
    module = module_of(weight_decay=0.1)
    optimizer, told = module.configure_optimizers()["optimizer"], contract_of(module.spec, module.model)
    names = {id(p): name for name, p in module.model.named_parameters()}
    assert hyperparameters(optimizer, 3, told, names)["optimizer/weight_decay_fit"] == 1
    optimizer.param_groups[1]["weight_decay"] = 0.1
    assert hyperparameters(optimizer, 3, told, names)["optimizer/weight_decay_fit"] > 1e3


@pytest.mark.parametrize(("after", "limit", "fit"), [(1.0, 1.0, 1.0), (4.0, 1.0, 4.0), (0.5, math.inf, 0.125)])
def test_gradients_that_are_clipped_otherwise_are_told(after: float, limit: float, fit: float) -> None:
    assert clip_fit(4.0, after, limit) == {"optimizer/clip_fit": pytest.approx(fit)}


def test_how_stale_adam_is_follows_from_gradients_and_their_squares() -> None:
    times, beta2, eps = 5, 0.9, 1e-3
    optimizer, before, after, told = stepped(times, betas=(0.9, beta2), eps=eps)
    stale, small = [], []
    for p in after:
        assert p.grad is not None
        gradient, mean = p.grad.double(), optimizer.state[p]["exp_avg_sq"].double() / (1 - beta2**times)
        stale.append(float((gradient**2 / mean.clamp(min=eps**2)).mean() ** 0.5))
        small.append(float((gradient**2).mean() ** 0.5) / eps)
    found = adam(optimizer, before, after, times - 1, told)
    lower = (len(after) - 1) // 2  # torch's median of an even number
    assert found["update/stale"] == pytest.approx(sorted(stale)[lower], rel=1e-3)
    assert found["update/gradient_over_eps"] == pytest.approx(sorted(small)[lower], rel=1e-3)


def test_constant_gradients_are_not_stale_and_tenfold_ones_are() -> None:
    w = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.Adam([w], lr=1e-3, betas=(0.9, 0.999))
    for gradient, stale in ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (10.0, 10 / math.sqrt(25.77))):
        before, w.grad = [w.detach().clone()], torch.full((4, 4), gradient)
        optimizer.step()
        found = adam(optimizer, before, [w], 0, Contract())
        assert found["update/stale"] == pytest.approx(stale, rel=0.01)
        assert "optimizer/step_error" not in found
    plain = torch.optim.SGD([w], lr=1e-3)
    assert adam(plain, before, [w], 0, TOLD) == {}


def probed(module: TransformerModule) -> tuple[dict[str, float], Batch, Subject]:
    batch, subject = module.batch(0).rows(slice(5)), subject_of(module.spec, module)
    return inside(subject, batch), batch, subject


LOOKS: dict[str, tuple[dict[str, Any], Callable[[int], Tensor]]] = {  # a model, and what its queries see
    "as it comes": ({}, lambda length: torch.ones(length, length).tril()),
    "RoPE, groups": (
        {"position": position.RoPE(), "attention": attention.MultiQuery()},
        lambda length: torch.ones(length, length).tril(),
    ),
    "window, ALiBi": (
        {"position": position.ALiBi(), "attention": attention.SlidingWindow(window=3)},
        lambda length: torch.ones(length, length).tril().triu(-2),
    ),
    "encoder": ({"architecture": architecture.EncoderOnly()}, lambda length: torch.ones(length, length)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_entropies_of_attention_are_those_of_its_weights(look: tuple[dict[str, Any], Callable[[int], Tensor]]) -> None:
    model, visible = look
    module = module_of(model)
    for block in module.model.blocks:
        block.attention.query.weight.data *= 30  # some heads sharp
    found, batch, _ = probed(module)
    trace = Trace()
    with torch.no_grad():
        module.model.eval()(*batch.reading, trace=trace)
    for place, weights in enumerate(trace.stacked("attention").double()):
        keys = visible(weights.shape[-1]).sum(-1)
        entropy = torch.special.entr(weights).sum(-1) / keys.clamp(min=2).log()
        heads = [float(entropy[:, head, keys > 1].mean()) for head in range(2)]
        assert found[f"heads/entropy.{place}"] == pytest.approx(sum(heads) / 2, rel=1e-3)
        assert found[f"heads/sharp.{place}"] == sum(head < 0.05 for head in heads) / 2
        assert found[f"heads/uniform.{place}"] == sum(head > 0.98 for head in heads) / 2
    assert "heads/entropy.2" not in found


def test_the_largest_logit_is_that_of_queries_and_visible_keys() -> None:
    module = module_of({"position": position.NoPE(), "norm_placement": NoNorm()})
    attention_of, kept = module.model.blocks[0].attention, {}
    hook = attention_of.register_forward_hook(lambda part, inputs, output: kept.update(x=inputs[0]))
    found, _, _ = probed(module)
    hook.remove()
    q, k = (part(kept["x"]).unflatten(-1, (2, 8)).transpose(1, 2) for part in (attention_of.query, attention_of.key))
    logits = (q @ k.mT).detach() / math.sqrt(8)
    seen = torch.ones_like(logits).tril() > 0
    assert found["heads/logit_max.0"] == pytest.approx(float(logits[seen].max()), rel=1e-4)


def test_equal_weights_are_uniform_and_single_ones_sharp() -> None:
    module = module_of({"position": position.NoPE()})
    first, second = (block.attention.query.weight.data for block in module.model.blocks)
    first.zero_()
    second.mul_(1e4)
    found, _, _ = probed(module)
    assert (found["heads/uniform.0"], found["heads/sharp.0"]) == (1.0, 0.0)
    assert found["heads/entropy.0"] == pytest.approx(1.0, abs=1e-5)
    assert found["heads/uniform.1"] == 0.0
    assert found["heads/entropy.1"] < 0.2


def test_hidden_states_are_those_of_the_blocks() -> None:
    module = module_of()
    kept: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda part, inputs, output: kept.append(output)) for block in module.model.blocks
    ]
    found, batch, subject = probed(module)
    for hook in hooks:
        hook.remove()
    for place, output in enumerate(kept):
        x = output[0] if isinstance(output, tuple) else output
        centred = x - x.mean(1, keepdim=True)
        assert found[f"residual/rms.{place}"] == pytest.approx(float((x**2).mean() ** 0.5), rel=1e-4)
        assert found[f"residual/distinct.{place}"] == pytest.approx(float(centred.norm() / x.norm()), rel=1e-4)
    module.model.embedding.weight.data[:] = module.model.embedding.weight.data[0]
    assert inside(replace(subject), batch)["residual/distinct.0"] < found["residual/distinct.0"]


@pytest.mark.parametrize("dead", [0, 4, 16])
def test_units_that_never_wake_are_counted(dead: int) -> None:
    module = module_of()
    into = module.model.blocks[1].feedforward.get_submodule("0")
    into.bias.data[:] = 100.0
    into.bias.data[:dead] = -100.0
    found, _, _ = probed(module)
    assert found["feedforward/dead.1"] == dead / 16


def test_routers_logits_are_summed_as_exponentials() -> None:
    module = module_of({"feedforward": MoE(expert=ReLU(d_ff=8), num_experts=4)})
    for place, experts in enumerate(module.model.experts()):
        experts.router.weight.data *= 0 if place else 50
    inputs: list[Tensor] = []
    hook = module.model.experts()[0].router.register_forward_hook(lambda part, given, output: inputs.append(given[0]))
    found, _, _ = probed(module)
    hook.remove()
    logits = (inputs[0] @ module.model.experts()[0].router.weight.T).detach().double()
    assert found["router/logsumexp.0"] == pytest.approx(float(logits.exp().sum(-1).log().mean()), rel=1e-4)
    assert found["router/logsumexp.1"] == pytest.approx(math.log(4), abs=1e-5)


def test_looking_inside_leaves_no_trace() -> None:
    module = module_of({"residual_dropout": 0.5, "feedforward": MoE(expert=ReLU(d_ff=8), bias_rate=0.1)})
    module.model.blocks[0].eval()
    modes, draws = [part.training for part in module.modules()], torch.get_rng_state()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    one, batch, subject = probed(module)
    assert inside(subject, batch) == one
    assert torch.get_rng_state().equal(draws)
    assert [part.training for part in module.modules()] == modes
    assert all(value.equal(state[name]) for name, value in module.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_attention_is_counted_by_the_sublayers_that_are_named() -> None:
    module = module_of({"architecture": architecture.EncoderDecoder()})
    found, _, subject = probed(module)
    assert sum(name.startswith("heads/entropy.") for name in found) == len(subject.sites) == 6
    names = {name: found[name] for name in found if name.startswith("heads/")}
    none = inside(replace(subject, sites=()), module.batch(0).rows(slice(5)))
    assert {name: none[name] for name in names} == pytest.approx(names)
    one = inside(replace(subject, sites=(AttentionSite("encoder.blocks.1.attention", 2, 2),)), module.batch(0))
    assert {name for name in one if name.startswith("heads/entropy")} == {"heads/entropy.0"}


def steps(count: int, loss: Callable[[int], float], norm: Callable[[int], float] = lambda step: 1.0, lengths: int = 1):
    """(length, loss, gradient norm) of healthy training: losses have a deviation of .05."""
    draws = random.Random(1)
    for _ in range(count):
        length = draws.randrange(lengths)
        yield length, loss(length) + draws.gauss(0, 0.05), norm(length) * math.exp(draws.gauss(0, 0.3))


def test_a_planted_spike_stands_out_and_noise_does_not() -> None:
    watched = Surprise()
    calm = [watched.of([step]) for step in steps(400, lambda length: 1.0)]
    assert max(found["spike/loss"] for found in calm) < 5
    assert max(found["spike/gradient"] for found in calm) < 5
    assert watched.of([(0, 2.0, 1.0)])["spike/loss"] == pytest.approx(20, rel=0.3)  # (2 − 1) / .05
    assert watched.of([(0, 1.0, 100.0)])["spike/gradient"] == pytest.approx(math.log(100) / 0.3, rel=0.3)


def test_the_most_that_one_of_several_steps_stands_out_of_those_before_them_all_is_kept() -> None:
    healthy = list(steps(200, lambda length: 1.0))
    alone, among = Surprise(), Surprise()
    for watched in (alone, among):
        watched.of(healthy)
    one = alone.of([(0, 3.0, 1.0)])["spike/loss"]
    assert among.of([*healthy[:5], (0, 3.0, 1.0), (0, 2.9, 1.0)])["spike/loss"] == pytest.approx(one)
    assert one > 10


def test_mixed_lengths_do_not_stand_out_and_are_told_apart() -> None:
    watched = Surprise()
    mixed = list(steps(600, lambda length: 0.2 + 2.0 * (length == 5), lengths=6))  # one in six is ten times as hard
    assert max(watched.of(mixed[i : i + 10])["spike/loss"] for i in range(0, 600, 10)) < 6
    assert watched.of([(5, 2.2, 1.0)])["spike/loss"] < 3
    assert watched.of([(0, 2.2, 1.0)])["spike/loss"] > 10


def test_nothing_stands_out_before_there_is_something_to_stand_out_from() -> None:
    watched = Surprise()
    before = [(0, 1.0, 1.0)] * (FEWEST - 1)
    assert watched.of([*before, (0, 100.0, 100.0)]) == {"spike/loss": 0.0, "spike/gradient": 0.0}
    assert watched.of([(0, 300.0, 1.0)])["spike/loss"] > 6


def test_a_sigma_is_no_smaller_than_what_matters() -> None:
    watched = Surprise()
    watched.of([(0, 1.0, 1.0)] * WINDOW)  # no noise at all
    assert watched.of([(0, 1.02, 1.0)])["spike/loss"] == pytest.approx(1.0)
    assert watched.of([(0, 1.0, math.exp(0.5))])["spike/gradient"] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_passed_over(bad: float) -> None:
    watched, sound = Surprise(), Surprise()
    watched.of([(0, bad, 1.0)])
    for step in steps(100, lambda length: 0.01):  # a small first loss, or its share would not be the smallest σ
        assert watched.of([step])["spike/loss"] == pytest.approx(sound.of([step])["spike/loss"], abs=1e-9)
        for odd in ((0, bad, 1.0), (0, 1.0, bad)):
            assert all(map(math.isfinite, watched.of([odd]).values()))
