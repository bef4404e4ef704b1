"""Each parameter is drawn from (seed, its name): variants share the bits of all that they have in common."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from harness.components.feedforward import GELU, SwiGLU
from harness.components.init import initialise
from harness.components.norm import PreNorm, RMSNorm
from harness.components.position import ALiBi, Learned, NoPE, RoPE, T5Bias
from harness.spec import ModelSpec
from harness.transformer import build_model

BASE = ModelSpec(d_model=16, num_heads=2, num_layers=2)
VARIANTS = {
    "original": BASE,
    "none": BASE.replace("position", NoPE()),
    "learned": BASE.replace("position", Learned(max_length=8)),
    "RoPE": BASE.replace("position", RoPE()),
    "ALiBi": BASE.replace("position", ALiBi()),
    "T5": BASE.replace("position", T5Bias()),
    "pre": BASE.replace("norm_placement", PreNorm()),
    "rms": BASE.replace("norm", RMSNorm()),
    "gelu": BASE.replace("feedforward", GELU()),
    "swiglu": BASE.replace("feedforward", SwiGLU()),
    "deeper": BASE.replace("num_layers", 3),
    "more heads": BASE.replace("num_heads", 4),
}


def drawn(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in build_model(spec, 20, seed=seed).named_parameters()}


def test_variants_share_the_parameters_that_they_have_in_common() -> None:
    first: dict[tuple[str, torch.Size], Tensor] = {}
    shared = 0
    for variant, spec in VARIANTS.items():
        for name, parameter in drawn(spec).items():
            known = first.setdefault((name, parameter.shape), parameter)
            assert torch.equal(parameter, known), (variant, name)
            shared += known is not parameter
    assert shared > 100


def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before() -> None:
    first = drawn(BASE)
    torch.manual_seed(1234)
    torch.randn(7)
    second = drawn(BASE)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_draws_every_random_parameter_anew() -> None:
    first, second = drawn(VARIANTS["learned"]), drawn(VARIANTS["learned"], seed=1)
    for name in first:
        fixed = name.endswith("bias") or "norm" in name
        assert torch.equal(first[name], second[name]) is fixed, name


@pytest.mark.parametrize("variant", ["learned", "T5", "swiglu"])
def test_no_two_parameters_are_the_same_draw(variant: str) -> None:
    random = {n: p for n, p in drawn(VARIANTS[variant]).items() if not n.endswith("bias") and "norm" not in n}
    for (one, first), (other, second) in itertools.combinations(random.items(), 2):
        shared = min(first.numel(), second.numel())
        correlation = torch.corrcoef(torch.stack([x.flatten()[:shared] for x in (first, second)]))[0, 1]
        assert abs(float(correlation)) < 0.5, (one, other)


def test_linear_maps_are_xavier_normal_and_their_biases_zero() -> None:
    model = build_model(ModelSpec(d_model=64, num_heads=2, num_layers=1), 200, seed=0)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight, expected = module.weight.detach(), (2 / sum(module.weight.shape)) ** 0.5
            assert float(weight.std()) == pytest.approx(expected, rel=0.05), name
            assert abs(float(weight.mean())) < expected / 20
            assert module.bias is None or not module.bias.any()


def test_embeddings_are_unit_normal_and_position_biases_small() -> None:
    learned = build_model(BASE.replace("position", Learned(max_length=512)), 512, seed=0)
    for table in (learned.embedding, learned.position.table):
        assert float(table.weight.detach().std()) == pytest.approx(1, rel=0.05)
        assert abs(float(table.weight.detach().mean())) < 0.05
    # T5: N(0, 1/d_model)
    wide = build_model(
        ModelSpec(d_model=64, num_heads=16, position=T5Bias(num_buckets=128, max_distance=256)), 9, seed=0
    )
    assert float(wide.position.table.weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize("variant", ["pre", "rms"])
def test_norms_start_as_the_identity_map(variant: str) -> None:
    norms = {name: p for name, p in drawn(VARIANTS[variant]).items() if "norm" in name}
    assert norms
    for name, p in norms.items():
        assert torch.equal(p, torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p)), name


class Pair(nn.Module):
    """A user's module with two parameters, drawn together by its `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first)
        nn.init.normal_(self.second, std=3.0)


def test_a_users_module_is_drawn_by_its_own_reset_from_its_own_names() -> None:
    def draws(name: str, seed: int) -> list[Tensor]:
        holder = nn.ModuleDict({name: Pair()})
        initialise(holder, seed)
        return [p.detach().clone() for p in holder.parameters()]

    once, again = draws("a", 0), draws("a", 0)
    assert all(map(torch.equal, once, again))
    for other in (draws("b", 0), draws("a", 1)):
        assert not any(map(torch.equal, once, other))
    assert not torch.equal(once[0] * 3, once[1])


def test_a_parameter_without_a_way_to_draw_it_is_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2))

    with pytest.raises(TypeError, match=r"Bare owns the parameter 'gain' and has no reset_parameters\(\)"):
        initialise(nn.ModuleDict({"bare": Bare()}), 0)
