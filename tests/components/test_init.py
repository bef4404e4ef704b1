"""Each parameter is drawn from (seed, its name): variants share the bits of all that they have in common."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from harness.components.architecture import EncoderDecoder, EncoderOnly
from harness.components.attention import GroupedQuery, Latent
from harness.components.embedding import SqrtWidth, Tied
from harness.components.feedforward import GELU, MoE, SwiGLU
from harness.components.init import DepthGain, Draw, Gain, Initialisation, Kaiming, Normal, UnitGain, Xavier, initialise
from harness.components.norm import BatchNorm, NoNorm, PreNorm, RMSNorm, SandwichNorm
from harness.components.output_projection import NoProjection
from harness.components.position import ALiBi, Learned, NoPE, Randomised, RoPE, T5Bias, TransformerXL, YaRN
from harness.components.qk_norm import QKNorm
from harness.components.residual import NoResidual
from harness.components.scale import InverseSqrt, LearnedTemperature, Scale, Unscaled
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
    "XL": BASE.replace("position", TransformerXL()),
    "YaRN": BASE.replace("position", YaRN()),
    "randomised": BASE.replace("position", Randomised()),
    "sandwich": BASE.replace("norm_placement", SandwichNorm()),
    "no norm": BASE.replace("norm_placement", NoNorm()),
    "batch norm": BASE.replace("norm", BatchNorm()),
    "no residual": BASE.replace("residual", NoResidual()),
    "tied": BASE.replace("output_head", Tied()),
    "scaled embedding": BASE.replace("embedding_scale", SqrtWidth()),
    "temperature": BASE.replace("scale", LearnedTemperature()),
    "qk norm": BASE.replace("qk_norm", QKNorm()),
    "no projection": BASE.replace("output_projection", NoProjection()),
    "encoder": BASE.replace("architecture", EncoderOnly()),
    "both": BASE.replace("architecture", EncoderDecoder()),
    "grouped": BASE.replace("attention", GroupedQuery(num_groups=1)),
    "latent": BASE.replace("attention", Latent()),
    "experts": BASE.replace("feedforward", MoE()),
}


def drawn(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in build_model(spec, 20, seed=seed).named_parameters()}


def is_norm(name: str) -> bool:
    """Residual steps own nothing but norms."""
    return "norm" in name or "_step." in name


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
        fixed = name.endswith("bias") or is_norm(name)
        assert torch.equal(first[name], second[name]) is fixed, name


@pytest.mark.parametrize("variant", ["learned", "T5", "swiglu"])
def test_no_two_parameters_are_the_same_draw(variant: str) -> None:
    random = {n: p for n, p in drawn(VARIANTS[variant]).items() if not n.endswith("bias") and not is_norm(n)}
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
    for name in ("embedding.weight", "position.table.weight"):
        table = learned.get_parameter(name).detach()
        assert float(table.std()) == pytest.approx(1, rel=0.05)
        assert abs(float(table.mean())) < 0.05
    # T5: N(0, 1/d_model)
    wide = build_model(
        ModelSpec(d_model=64, num_heads=16, position=T5Bias(num_buckets=128, max_distance=256)), 9, seed=0
    )
    assert float(wide.get_parameter("position.table.weight").detach().std()) == pytest.approx(1 / 8, rel=0.05)


# --- groups ---------------------------------------------------------------------------------------------------------

SOME = Normal(deviation=0.3)  # unlike any default
FIELDS = {"linear": SOME, "qkv": SOME, "residual": SOME, "residual_gain": DepthGain(), "embedding": SOME}
INPUT_MAPS = ("query", "key", "value", "latent", "shared_key", "key_up", "value_up")
LAST_MAPS = ("attention.output", "feedforward.2", "feedforward.down")  # memory_attention's too
TABLES = ("embedding", "position.table")


def group(name: str) -> str:
    """The field of `Initialisation` that a parameter is drawn by, from its name alone; empty: by none."""
    owner = name.removesuffix(".weight")
    if not name.endswith(".weight") or is_norm(name):
        return ""
    if owner in TABLES:
        return "embedding"
    if owner.endswith(LAST_MAPS) or (".experts." in owner and owner.endswith((".2", ".down"))):
        return "residual"
    return "qkv" if "attention" in owner and owner.endswith(INPUT_MAPS) else "linear"


GROUPED = ["original", "learned", "swiglu", "both", "grouped", "latent", "experts"]


@pytest.mark.parametrize("variant", GROUPED)
@pytest.mark.parametrize("field", FIELDS)
def test_a_group_is_drawn_by_its_field_and_by_no_other(variant: str, field: str) -> None:
    spec = VARIANTS[variant]
    before, after = drawn(spec), drawn(spec.replace(f"init.{field}", FIELDS[field]))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if group(name) == field.removesuffix("_gain")}
    assert changed


def expected_std(draw: Draw, fan_in: int, fan_out: int) -> float:
    if isinstance(draw, Xavier):
        return (2 / (fan_in + fan_out)) ** 0.5
    return (2 / fan_in) ** 0.5 if isinstance(draw, Kaiming) else 0.07


@pytest.mark.parametrize("field", ["linear", "qkv", "residual", "embedding"])
@pytest.mark.parametrize("draw", [Xavier(), Kaiming(), Normal(deviation=0.07)], ids=lambda level: level.kind)
def test_groups_have_the_spread_that_is_asked_for(field: str, draw: Draw) -> None:
    spec = ModelSpec(d_model=64, num_heads=2, d_head=16, num_layers=1).replace(f"init.{field}", draw)
    parameters = dict(build_model(spec, 200, seed=0).named_parameters())
    asked = {name: p.detach() for name, p in parameters.items() if group(name) == field}
    assert asked
    for name, weight in asked.items():
        fan_out, fan_in = weight.shape
        # Of n draws, the standard deviation's relative standard error is 1/√(2n).
        bound = 5 / math.sqrt(2 * weight.numel())
        std = expected_std(draw, fan_in, fan_out)
        assert float(weight.std()) == pytest.approx(std, rel=bound), name
        assert abs(float(weight.mean())) < 5 * std / math.sqrt(weight.numel()), name


@pytest.mark.parametrize("layers", [1, 2, 8])
def test_depth_gain_is_one_over_the_root_of_the_number_of_sublayers(layers: int) -> None:
    # CLAIMS E29
    spec = BASE.replace("num_layers", layers)
    unit, deep = (drawn(spec.replace("init.residual_gain", gain)) for gain in (UnitGain(), DepthGain()))
    for name in unit:
        factor = 1 / math.sqrt(2 * layers) if group(name) == "residual" else 1
        torch.testing.assert_close(deep[name], unit[name] * factor, rtol=1e-6, atol=0)


def test_depth_gain_keeps_the_residual_stream_from_growing_with_depth() -> None:
    # CLAIMS E29: 2L sublayers add L times as much of a variance of 1/L.
    def stream(layers: int, gain: Gain) -> float:
        spec = ModelSpec(d_model=32, num_heads=2, num_layers=layers, position=NoPE(), norm_placement=PreNorm())
        made = build_model(spec.replace("init.residual_gain", gain), 50, seed=0)
        sizes: list[float] = []
        made.get_submodule("final_norm").register_forward_pre_hook(
            lambda module, args: sizes.append(float(args[0].detach().square().mean()))
        )
        made(torch.arange(50)[None])
        return sizes[0]

    assert stream(32, UnitGain()) > 5 * stream(2, UnitGain())
    assert stream(32, DepthGain()) < 1.5 * stream(2, DepthGain())


@pytest.mark.parametrize(
    ("draw", "scale", "spread"),
    [
        (Xavier(), InverseSqrt(), 1.0),
        (Kaiming(), InverseSqrt(), 2.0),
        (Xavier(), Unscaled(), 8.0),  # √d_head
        (Normal(deviation=0.02), InverseSqrt(), 0.0256),  # d_model · .02²: attention is uniform, whatever is read
        (Normal(deviation=0.02), Unscaled(), 0.2048),
    ],
)
def test_the_draw_of_queries_and_keys_decides_how_far_logits_spread(draw: Draw, scale: Scale, spread: float) -> None:
    # CLAIMS E34: the standard deviation is factor · √d_head · d_model · σ² for inputs of unit variance.
    width, tokens = 64, torch.randn(1, 400, 64)
    spec = ModelSpec(d_model=width, num_heads=1, num_layers=1, scale=scale).replace("init.qkv", draw)
    attention = build_model(spec, 9, seed=0).get_submodule("blocks.0.attention")
    query, key = (attention.get_submodule(name)(tokens)[0] for name in ("query", "key"))
    logits = query @ key.T * scale.factor(width)
    assert float(logits.detach().std()) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("variant", ["original", "pre", "rms", "sandwich", "batch norm", "qk norm"])
def test_norms_start_as_the_identity_map(variant: str) -> None:
    norms = {name: p for name, p in drawn(VARIANTS[variant]).items() if is_norm(name)}
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
        initialise(holder, Initialisation(), 1, seed)
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
        initialise(nn.ModuleDict({"bare": Bare()}), Initialisation(), 1, 0)
