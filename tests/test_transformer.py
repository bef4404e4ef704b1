"""The whole model: causality, independence of sequences, tracing, for every level of every axis."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from harness.components.attention import attention_weights
from harness.components.feedforward import GELU, FeedForward, ReLU, SwiGLU
from harness.components.norm import LayerNorm, Norm, NormPlacement, PostNorm, PreNorm, RMSNorm
from harness.components.position import (
    ALiBi,
    Learned,
    NoPE,
    Position,
    PositionEncoding,
    Relation,
    RoPE,
    Sinusoidal,
    T5Bias,
)
from harness.components.scale import Inverse, InverseSqrt, Scale, Unscaled
from harness.components.shape import Shape
from harness.schema import is_foreign
from harness.spec import ModelSpec
from harness.trace import Trace
from harness.transformer import Transformer, build_model

VOCABULARY = 12
BASE = ModelSpec(d_model=16, num_heads=2, num_layers=2)
AXES: dict[str, type[Position | Norm | NormPlacement | Scale | FeedForward]] = {
    "position": Position,
    "norm": Norm,
    "norm_placement": NormPlacement,
    "scale": Scale,
    "feedforward": FeedForward,
}
EVERY_LEVEL = [
    pytest.param(BASE.replace(axis, level()), id=f"{axis}={name}")
    for axis, base in AXES.items()
    for name, level in base.levels().items()
    if not is_foreign(level)
]

specs = st.builds(
    ModelSpec,
    d_model=st.sampled_from([4, 8, 12]),
    num_layers=st.integers(1, 3),
    num_heads=st.sampled_from([1, 2]),
    position=st.sampled_from(
        [NoPE(), Sinusoidal(), Learned(max_length=16), RoPE(), ALiBi(), T5Bias(num_buckets=4, max_distance=8)]
    ),
    norm=st.sampled_from([LayerNorm(), RMSNorm()]),
    norm_placement=st.sampled_from([PreNorm(), PostNorm()]),
    scale=st.sampled_from([InverseSqrt(), Unscaled(), Inverse()]),
    feedforward=st.sampled_from([ReLU(d_ff=8), GELU(d_ff=8), SwiGLU(d_ff=8)]),
)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_all_axes_of_a_model_are_tried_here() -> None:
    levels = {name for name, field in ModelSpec.model_fields.items() if field.annotation not in (int, float, bool)}
    assert set(AXES) == levels


@pytest.mark.parametrize("spec", EVERY_LEVEL)
def test_no_output_depends_on_a_later_token(spec: ModelSpec) -> None:
    model, read = build_model(spec, VOCABULARY, seed=0).double(), tokens(1, 9)
    before = model(read)
    for i in range(9):
        changed = read.clone()
        changed[0, i] = (read[0, i] + 1) % VOCABULARY
        difference = (model(changed) - before).abs().amax(dim=-1)[0]
        assert not difference[:i].any()
        assert (difference[i:] > 0).all()  # and every later one depends on it


@pytest.mark.parametrize("spec", EVERY_LEVEL)
def test_every_output_of_an_encoder_depends_on_every_token(spec: ModelSpec) -> None:
    encoder, read = Transformer(spec, VOCABULARY, causal=False).double(), tokens(1, 6)
    before = encoder(read)
    for i in range(6):
        changed = read.clone()
        changed[0, i] = (read[0, i] + 1) % VOCABULARY
        assert ((encoder(changed) - before).abs().amax(dim=-1)[0] > 0).all()


@given(specs, st.integers(1, 3), st.integers(1, 16))
def test_any_model_maps_tokens_to_finite_causal_logits(spec: ModelSpec, batch: int, length: int) -> None:
    model, read = build_model(spec, VOCABULARY, seed=0), tokens(batch, length)
    logits = model(read)
    assert logits.shape == (batch, length, VOCABULARY)
    assert logits.isfinite().all()
    cut = max(1, length // 2)
    torch.testing.assert_close(model(read[:, :cut]), logits[:, :cut], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", EVERY_LEVEL)
def test_sequences_of_a_batch_do_not_see_each_other(spec: ModelSpec) -> None:
    model, read = build_model(spec, VOCABULARY, seed=0), tokens(3, 7)
    alone = torch.cat([model(row[None]) for row in read])
    torch.testing.assert_close(model(read), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", EVERY_LEVEL)
@pytest.mark.parametrize("causal", [True, False])
def test_traced_and_untraced_calls_agree(spec: ModelSpec, causal: bool) -> None:
    model, read, trace = Transformer(spec, VOCABULARY, causal=causal), tokens(2, 9), Trace()
    assert torch.equal(model(read, trace=trace), model(read))
    weights = trace.stacked("attention")
    assert weights.shape == (2, 2, 2, 9, 9)  # layers, B, H, T, T
    assert not weights.requires_grad
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 2, 9))
    assert bool(weights.triu(1).any()) is not causal


@pytest.mark.parametrize("spec", EVERY_LEVEL)
def test_the_traced_weights_are_those_that_mixed_the_values(spec: ModelSpec) -> None:
    # The fused kernel never shows its weights; what it returns must be the traced weights times the values.
    model, trace = build_model(spec, VOCABULARY, seed=0), Trace()
    mixed: list[Tensor] = []
    values: list[Tensor] = []
    for block in model.blocks:
        block.attention.output.register_forward_pre_hook(lambda module, args: mixed.append(args[0]))
        block.attention.value.register_forward_hook(lambda module, args, output: values.append(output))
    model(tokens(2, 9), trace=trace)
    for weights, value, result in zip(trace.kept["attention"], values, mixed, strict=True):
        expected = weights @ value.unflatten(-1, (2, 8)).transpose(1, 2)
        torch.testing.assert_close(result, expected.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)


def test_the_model_is_the_composition_of_its_parts() -> None:
    spec = BASE.replace("norm_placement", PreNorm())
    model, read = build_model(spec, VOCABULARY, seed=0), tokens(2, 5)
    relation = model.position.relation(5, causal=True, device=read.device)
    x = model.embedding.weight[read] + Sinusoidal().codes(5, 16)
    for block in model.blocks:
        x = block(x, relation, causal=True)
    torch.testing.assert_close(model(read), model.final_norm(x) @ model.head.weight.T)


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_have_parameters_of_their_own(layers: int) -> None:
    model = build_model(BASE.replace("num_layers", layers), VOCABULARY, seed=0)
    assert len(model.blocks) == layers
    assert len({id(p) for p in model.parameters()}) == len(list(model.state_dict()))
    model(tokens(1, 4)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_building_a_model_twice_gives_the_same_bits() -> None:
    first, second = (build_model(BASE, VOCABULARY, seed=3) for _ in range(2))
    assert torch.equal(first(tokens(2, 5)), second(tokens(2, 5)))


@pytest.mark.parametrize("spec", EVERY_LEVEL)
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
def test_models_of_several_seeds_train_as_one(spec: ModelSpec) -> None:
    # No data-dependent shapes or branches: vmap over stacked seeds gives what each gives alone.
    models = [build_model(spec, VOCABULARY, seed=seed) for seed in (0, 1)]
    stacked, buffers = stack_module_state(models)  # type: ignore[arg-type]
    read = tokens(2, 7)

    def forward(state: dict[str, Tensor], fixed: dict[str, Tensor]) -> Tensor:
        return functional_call(models[0], (state, fixed), (read,))

    together = vmap(forward)(stacked, buffers)
    torch.testing.assert_close(together, torch.stack([m(read) for m in models]), atol=1e-5, rtol=1e-5)


def test_a_trace_keeps_layers_in_order() -> None:
    trace = Trace()
    for layer in range(3):
        trace.keep("x", torch.full((2,), float(layer), requires_grad=True))
    assert trace.stacked("x")[:, 0].tolist() == [0, 1, 2]
    assert not trace.stacked("x").requires_grad


class NearestEncoding(PositionEncoding):
    """A user's encoding: a token sees itself and the one before it."""

    def relation(self, length: int, *, causal: bool, device: torch.device) -> Relation:
        far = torch.ones(length, length, device=device).tril(-2) > 0
        return Relation(bias=torch.zeros(2, length, length, device=device).masked_fill(far, float("-inf")))


def test_a_users_encoding_works_like_ours() -> None:
    class Nearest(Position):
        """A user's own."""

        def build(self, shape: Shape) -> PositionEncoding:
            return NearestEncoding()

    model, trace = build_model(ModelSpec(d_model=16, num_heads=2, position=Nearest()), VOCABULARY, seed=0), Trace()
    model(tokens(1, 6), trace=trace)
    weights = trace.stacked("attention")
    assert not weights.tril(-2).any()
    assert (weights.diagonal(dim1=-2, dim2=-1) > 0).all()
    assert (weights.diagonal(-1, dim1=-2, dim2=-1) > 0).all()


def test_attention_weights_without_bias_or_mask_are_the_softmax() -> None:
    query, key = torch.randn(2, 1, 1, 5, 4)
    expected = (query @ key.transpose(-2, -1)).softmax(-1)
    torch.testing.assert_close(attention_weights(query, key, None, causal=False), expected)
