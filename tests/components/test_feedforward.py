"""Feed-forward levels against their formulas in fp64, mixtures against all experts at once, and what they cost."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harness.components.feedforward import GELU, FeedForward, MixtureOfExperts, MoE, ReLU, Routed, Routing, SwiGLU
from harness.cost import forward_flops, parameters
from harness.schema import UserError
from harness.spec import ModelSpec

sizes = st.tuples(st.integers(1, 12), st.integers(1, 24), st.integers(0, 2**31))
LEVELS = [ReLU(d_ff=24), GELU(d_ff=24), SwiGLU(d_ff=24)]
DEFAULTS = [ReLU(), GELU(), SwiGLU()]


def built(level: FeedForward, d_model: int, draw: torch.Generator) -> tuple[nn.Module, list[Tensor]]:
    """A module in fp64 with drawn parameters, and these in the order of their use."""
    module = level.build(d_model).double()
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return module, [parameter.detach() for parameter in module.parameters()]


def phi(x: Tensor) -> Tensor:
    """The normal distribution function, a number at a time."""
    values = [0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view(x.shape)


@given(sizes)
def test_relu_is_its_formula(case: tuple[int, int, int]) -> None:
    d_model, d_ff, seed = case
    draw = torch.Generator().manual_seed(seed)
    module, (w1, b1, w2, b2) = built(ReLU(d_ff=d_ff), d_model, draw)
    x = torch.randn(2, 3, d_model, generator=draw, dtype=torch.float64)
    hidden = x @ w1.T + b1
    torch.testing.assert_close(module(x), torch.where(hidden > 0, hidden, 0) @ w2.T + b2)


@given(sizes)
def test_gelu_is_its_exact_formula(case: tuple[int, int, int]) -> None:
    d_model, d_ff, seed = case
    draw = torch.Generator().manual_seed(seed)
    module, (w1, b1, w2, b2) = built(GELU(d_ff=d_ff), d_model, draw)
    x = torch.randn(2, 3, d_model, generator=draw, dtype=torch.float64)
    hidden = x @ w1.T + b1
    torch.testing.assert_close(module(x), (hidden * phi(hidden)) @ w2.T + b2)


@given(sizes)
def test_swiglu_is_its_formula(case: tuple[int, int, int]) -> None:
    d_model, d_ff, seed = case
    draw = torch.Generator().manual_seed(seed)
    module, _ = built(SwiGLU(d_ff=d_ff), d_model, draw)
    w = {name.split(".")[0]: p.detach() for name, p in module.named_parameters()}
    assert set(w) == {"gate", "up", "down"}
    x = torch.randn(2, 3, d_model, generator=draw, dtype=torch.float64)
    gate = x @ w["gate"].T
    silu = gate / (1 + torch.exp(-gate))
    torch.testing.assert_close(module(x), (silu * (x @ w["up"].T)) @ w["down"].T)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.kind)
def test_each_position_is_mapped_by_itself(level: FeedForward) -> None:
    module, x = level.build(8), torch.randn(2, 5, 8)
    changed = x.clone()
    changed[1, 3] += 1
    assert (module(changed) != module(x)).any(-1).nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize(
    ("level", "weights", "biases"), [(ReLU, 2, True), (GELU, 2, True), (SwiGLU, 3, False)], ids=lambda x: str(x)
)
def test_parameters_by_hand(level: type[FeedForward], weights: int, biases: bool) -> None:
    d_model, d_ff = 16, 40
    expected = weights * d_model * d_ff + biases * (d_ff + d_model)
    assert parameters(level.parse({"kind": level.__name__, "d_ff": d_ff}).build(d_model)) == expected


@pytest.mark.parametrize(
    ("level", "share"),
    [
        (ReLU(d_ff=4 * 96), 8 / 12),
        (GELU(d_ff=4 * 96), 8 / 12),
        (SwiGLU(d_ff=4 * 96), 12 / 16),  # unmatched: as wide as the two-matrix form
        (SwiGLU(d_ff=8 * 96 // 3), 8 / 12),  # ⅔ of it: as many weights
    ],
    ids=["ReLU", "GELU", "SwiGLU", "SwiGLU matched"],
)
def test_the_feedforward_sublayer_holds_two_thirds_of_a_blocks_weights(level: FeedForward, share: float) -> None:
    # CLAIMS E35: 8d² of 12d².
    d_model = 96

    def weights(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p.ndim == 2)

    spec = ModelSpec(d_model=d_model, num_heads=4)
    attention = weights(spec.attention.build(spec.parts))
    feedforward = weights(level.build(d_model))
    assert attention == 4 * d_model**2
    assert feedforward / (attention + feedforward) == pytest.approx(share)


def test_the_defaults_have_as_many_weights_as_each_other() -> None:
    counts = {level.kind: sum(p.numel() for p in level.build(64).parameters() if p.ndim == 2) for level in DEFAULTS}
    assert counts["ReLU"] == counts["GELU"]
    assert counts["SwiGLU"] == pytest.approx(counts["ReLU"], rel=0.005)


@given(st.integers(1, 500), st.integers(1, 64))
def test_a_matching_swiglu_has_as_many_weights(d_ff: int, d_model: int) -> None:
    two, three = 2 * d_model * d_ff, 3 * d_model * SwiGLU.matching(d_ff).d_ff
    assert abs(three - two) <= 3 * d_model / 2  # half a unit of three matrices: no closer width exists


# --- mixtures of experts ---------------------------------------------------------------------------------------------

D_MODEL = 8
EXPERT = ReLU(d_ff=6)


def mixture(**fields: Any) -> MixtureOfExperts:
    """In evaluation mode, with a router that has opinions."""
    module = MoE(**{"expert": EXPERT, "num_experts": 4, **fields}).build(D_MODEL).double().eval()
    assert isinstance(module, MixtureOfExperts)
    nn.init.normal_(module.router.weight)
    return module


def steered(preferred: list[int], **fields: Any) -> tuple[MixtureOfExperts, Tensor]:
    """A top-1 mixture and one sequence `(1, T, d_model)` whose tokens choose the experts named, with p ≈ 1."""
    module = mixture(top_k=1, **fields)
    with torch.no_grad():
        module.router.weight.copy_(torch.eye(4, D_MODEL) * 50)
    return module, nn.functional.one_hot(torch.tensor([preferred]), D_MODEL).double()


def by_every_expert(module: MixtureOfExperts, x: Tensor) -> Tensor:
    """All experts on all tokens, weighed token by token."""
    spec, output = module.spec, torch.zeros_like(x)
    p = (x @ module.router.weight.T).softmax(-1)
    for b, t in ((b, t) for b in range(x.shape[0]) for t in range(x.shape[1])):
        liking = (p[b, t] + module.choice_bias).tolist()
        chosen = sorted(range(spec.num_experts), key=lambda e: -liking[e])[: spec.top_k]
        whole = sum(p[b, t, e] for e in chosen) if spec.top_k > 1 else 1.0
        for e in chosen:
            output[b, t] += p[b, t, e] / whole * module.experts[e](x[b, t])
        for shared in module.shared:
            output[b, t] += shared(x[b, t])
    return output


@pytest.mark.parametrize("expert", LEVELS, ids=lambda level: level.kind)
@pytest.mark.parametrize(("num_experts", "top_k", "num_shared"), [(4, 1, 0), (4, 2, 0), (3, 3, 0), (5, 2, 2)])
def test_a_mixture_is_the_weighted_sum_of_its_chosen_experts(
    expert: FeedForward, num_experts: int, top_k: int, num_shared: int
) -> None:
    # One expert's gate is p itself (Switch), those of several sum to 1.
    module = mixture(expert=expert, num_experts=num_experts, top_k=top_k, num_shared=num_shared)
    x = torch.randn(2, 7, D_MODEL, dtype=torch.float64)
    output, expected = module(x).output, by_every_expert(module, x)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    direction = torch.randn_like(output)
    found, wanted = (
        torch.autograd.grad((y * direction).sum(), list(module.parameters()), allow_unused=True, materialize_grads=True)
        for y in (output, expected)
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_experts_that_are_all_the_same_are_one() -> None:
    # Gates of several experts sum to 1, so it matters neither who is chosen nor whether the router's input trembles.
    module = mixture(top_k=2, jitter=0.3).train()
    for expert in module.experts[1:]:
        expert.load_state_dict(module.experts[0].state_dict())
    x = torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    torch.testing.assert_close(module(x).output, module.experts[0](x), atol=1e-6, rtol=1e-6)


def test_experts_that_nobody_chose_get_no_gradient_the_router_does() -> None:
    module, x = steered([0, 2, 0, 2])
    with torch.no_grad():
        module.router.weight /= 25  # not so sure, that p has a slope
    routed = module(x)
    assert routed.routing.load.tolist() == [0.5, 0, 0.5, 0]
    routed.output.square().sum().backward()
    reached = [any(p.grad is not None and p.grad.any() for p in expert.parameters()) for expert in module.experts]
    assert reached == [True, False, True, False]
    assert module.router.weight.grad is not None
    assert (module.router.weight.grad.abs().sum(-1) > 0).all()  # p of one expert moves with every logit


# --- what its router did ---


def routing(module: MixtureOfExperts, x: Tensor, real: Tensor | None = None) -> Routing:
    routed = module(x, real)
    assert isinstance(routed, Routed)
    return routed.routing


def test_balance_is_one_when_uniform_and_the_number_of_experts_when_collapsed() -> None:
    module, x = steered([0, 1, 2, 3] * 2)
    found = routing(module, x)
    assert found.load.tolist() == [0.25] * 4
    torch.testing.assert_close([found.balance.item(), found.max_violation.item()], [1.0, 0.0])
    module, x = steered([2] * 8)
    found = routing(module, x)
    assert found.load.tolist() == [0, 0, 1, 0]
    torch.testing.assert_close([found.balance.item(), found.max_violation.item()], [4.0, 3.0])
    assert found.entropy.item() == pytest.approx(0, abs=1e-6)


def test_a_router_without_opinions_is_balanced_in_its_loss_and_uncertain() -> None:
    module = mixture(top_k=1)
    nn.init.zeros_(module.router.weight)
    found = routing(module, torch.randn(2, 5, D_MODEL, dtype=torch.float64))
    torch.testing.assert_close([found.balance.item(), found.entropy.item()], [1.0, math.log(4)])


@pytest.mark.parametrize("top_k", [1, 2])
def test_auxiliary_losses_are_their_formulas(top_k: int) -> None:
    module = mixture(top_k=top_k, balance=0.3, z_loss=0.7)
    x = torch.randn(3, 6, D_MODEL, dtype=torch.float64)
    logits = (x @ module.router.weight.T).flatten(0, 1)
    p = logits.softmax(-1)
    chosen = p.topk(top_k, dim=-1).indices.flatten().tolist()
    f = torch.tensor([chosen.count(e) / len(chosen) for e in range(4)]).double()
    balance = 4 * (f * p.mean(0)).sum()
    z = logits.exp().sum(-1).log().square().mean()
    found = routing(module, x)
    torch.testing.assert_close(found.loss.double(), 0.3 * balance + 0.7 * z, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.load.double(), f, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.entropy.double(), -(p * p.log()).sum(-1).mean(), atol=1e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(found.loss, module.router.weight)
    (wanted,) = torch.autograd.grad(0.3 * balance + 0.7 * z, module.router.weight)
    torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)


def test_padding_is_sent_to_no_expert_and_counts_nowhere() -> None:
    module, x = mixture(z_loss=0.5).train(), torch.randn(2, 6, D_MODEL, dtype=torch.float64)
    padded = nn.functional.pad(x, (0, 0, 0, 3), value=100.0)
    routed, alone = module(padded, torch.arange(9).expand(2, -1) < 6), module(x)
    assert not routed.output[:, 6:].any()
    torch.testing.assert_close(routed.output[:, :6], alone.output)
    torch.testing.assert_close(tuple(routed.routing), tuple(alone.routing))


# --- capacity ---


def test_an_expert_that_is_full_drops_later_tokens() -> None:
    module, x = steered([0] * 6 + [1, 1], capacity=1.0)
    everything = module(x)
    assert everything.routing.dropped == 0  # evaluation drops nothing
    torch.testing.assert_close(everything.output, by_every_expert(module, x), atol=1e-6, rtol=1e-5)
    routed = module.train()(x)  # ⌈1 · 1 · 8 / 4⌉ = 2 places
    assert routed.routing.dropped.item() == 4 / 8
    assert routed.routing.load.tolist() == [0.75, 0.25, 0, 0]  # of the choices, not of what was kept
    kept = [0, 1, 6, 7]
    assert routed.output.any(-1)[0].nonzero().flatten().tolist() == kept
    torch.testing.assert_close(routed.output[:, kept], everything.output[:, kept])


def test_capacity_rounds_up_and_counts_every_choice() -> None:
    module = mixture(top_k=2, num_experts=4, capacity=0.5).train()
    x = torch.randn(1, 1, D_MODEL, dtype=torch.float64).expand(1, 7, -1)  # ⌈.5 · 2 · 7 / 4⌉ = 2 places for the same two
    assert module(x).routing.dropped.item() == pytest.approx(1 - 2 * 2 / 14)


def test_capacity_enough_for_all_drops_none() -> None:
    module, x = mixture(capacity=4.0), torch.randn(2, 9, D_MODEL, dtype=torch.float64)
    assert torch.equal(module.train()(x).output, module.eval()(x).output)


@pytest.mark.parametrize("top_k", [1, 2])
def test_capacity_leaks_neither_from_other_sequences_nor_from_later_tokens(top_k: int) -> None:
    module, x = mixture(top_k=top_k, capacity=0.5).train(), torch.randn(4, 10, D_MODEL, dtype=torch.float64)
    routed = module(x)
    assert routed.routing.dropped > 0
    torch.testing.assert_close(routed.output, torch.cat([module(row[None]).output for row in x]))
    changed = x.clone()
    changed[:, 6:] = torch.randn(4, 4, D_MODEL)
    torch.testing.assert_close(module(changed).output[:, :6], routed.output[:, :6])
    assert not torch.allclose(module(changed).output[:, 6:], routed.output[:, 6:])


def test_capacity_is_not_taken_by_padding() -> None:
    module, x = steered([0, 0, 0, 0, 1, 1, 1, 1], capacity=1.0)
    real = torch.tensor([[False, False, True, True, True, True, True, True]])
    routed = module.train()(x, real)
    assert routed.output.any(-1)[0].tolist() == [False, False, True, True, True, True, False, False]
    assert routed.routing.dropped.item() == pytest.approx(2 / 6)


# --- training ---


def test_jitter_trembles_in_training_only() -> None:
    steady, shaky = mixture(), mixture(jitter=0.2)
    shaky.load_state_dict(steady.state_dict())
    x = torch.randn(2, 7, D_MODEL, dtype=torch.float64)
    assert torch.equal(shaky(x).output, steady(x).output)
    assert torch.equal(steady.train()(x).output, steady.eval()(x).output)
    shaky.train()
    assert not torch.equal(shaky(x).output, shaky(x).output)


def test_jitter_is_a_factor_between_its_bounds() -> None:
    module = mixture(jitter=0.2).train()
    logits = module._logits(torch.eye(D_MODEL).double().expand(500, -1, -1))  # rows of the router times the factor
    factor = logits / module.router.weight.T.float()
    assert 0.8 <= factor.min() < 0.81
    assert 1.19 < factor.max() <= 1.2


def test_the_bias_of_the_choice_changes_who_is_chosen_and_no_gate() -> None:
    module, x = mixture(bias_rate=0.1), torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    module.choice_bias[3] = 10.0
    routed = module(x)
    assert routed.routing.load[3] == 0.5  # one of two choices of every token
    torch.testing.assert_close(routed.output, by_every_expert(module, x), atol=1e-6, rtol=1e-5)
    assert not module.choice_bias.requires_grad
    assert "choice_bias" in module.state_dict()


def test_the_bias_moves_against_the_load() -> None:
    module = mixture(bias_rate=0.1)
    module.rebalance(torch.tensor([0.7, 0.25, 0.05, 0.0]))
    torch.testing.assert_close(module.choice_bias, torch.tensor([-0.1, 0.0, 0.1, 0.1]).double())
    still = mixture()
    still.rebalance(torch.tensor([0.7, 0.25, 0.05, 0.0]))
    assert not still.choice_bias.any()


def test_moving_the_bias_evens_the_load() -> None:
    module, x = mixture(bias_rate=0.002), torch.randn(4, 64, D_MODEL, dtype=torch.float64) + 0.5
    with torch.no_grad():
        module.router.weight[0] += 1  # these tokens like the first expert
        before = routing(module, x).max_violation
        for _ in range(300):
            module.rebalance(routing(module, x).load)
        assert before > 0.5
        assert routing(module, x).max_violation < 0.2


# --- cost ---


def test_eight_experts_of_which_two_compute_are_eight_times_the_parameters_and_twice_the_work() -> None:
    # CLAIMS E20: "compute unchanged" is wrong. The router is d_model × E on top.
    dense, sparse = ReLU(d_ff=32), MoE(expert=ReLU(d_ff=32), num_experts=8, top_k=2)
    assert parameters(sparse.build(16)) == 8 * parameters(dense.build(16)) + 8 * 16
    spent = {}
    for level in (dense, sparse):
        with FlopCounterMode(display=False) as counter:
            level.build(16)(torch.randn(3, 10, 16))
        spent[level] = counter.get_total_flops()
    assert spent[dense] == 30 * 2 * 2 * 16 * 32
    assert spent[sparse] == 2 * spent[dense] + 30 * 2 * 16 * 8


@pytest.mark.parametrize("tokens", [1, 10, 33])
def test_the_operations_of_a_model_count_the_chosen_experts_alone(tokens: int) -> None:
    # CLAIMS E20: a dense feed-forward twice as wide costs as much.
    sparse = MoE(expert=ReLU(d_ff=32), num_experts=8, top_k=2, num_shared=1)
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=2, feedforward=sparse)
    as_wide = spec.replace("feedforward", ReLU(d_ff=3 * 32))
    routers = 2 * tokens * 2 * 16 * 8
    assert forward_flops(spec, 9, tokens) == forward_flops(as_wide, 9, tokens) + routers


def test_what_does_not_fit_is_refused() -> None:
    for top_k in (4, 5):
        with pytest.raises(UserError, match=f"top_k = {top_k} leaves no choice among num_experts = 4; lower top_k"):
            MoE(num_experts=4, top_k=top_k).check()
    with pytest.raises(UserError, match="experts are dense"):
        MoE(expert=MoE()).check()


def test_the_capacity_of_a_sequence_is_its_own_whatever_it_is_padded_to() -> None:
    level = MoE(expert=ReLU(d_ff=8), num_experts=4, top_k=1, capacity=0.5)
    module = level.build(8).double().train()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    real = torch.arange(9)[None] < torch.tensor([[9], [4]])
    together = module(x, real).output
    torch.testing.assert_close(module(x[1:, :4]).output, together[1:, :4])


@pytest.mark.parametrize(("capacity", "tokens", "places"), [(1.1, 50, 55), (1.0, 3, 3), (0.5, 3, 2), (1.3, 10, 13)])
def test_places_are_rounded_up_and_not_for_the_sake_of_a_fractions_last_digit(
    capacity: float, tokens: int, places: int
) -> None:
    level = MoE(expert=ReLU(d_ff=4), num_experts=2, top_k=1, capacity=capacity * 2)
    module = level.build(4).train()
    with torch.no_grad():
        module.router.weight.zero_()
        module.choice_bias.copy_(torch.tensor([1.0, 0.0]))  # all choose the first
    dropped = module(torch.randn(1, tokens, 4)).routing.dropped
    assert float(dropped) == pytest.approx(max(0, 1 - places / tokens), abs=1e-6)
