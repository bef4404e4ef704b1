"""The whole model: causality, independence of sequences, tracing, for every level of every axis."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.components.architecture import Architecture, DecoderOnly, EncoderDecoder, EncoderOnly
from harness.components.attention import (
    Attention,
    BigBird,
    GroupedQuery,
    Latent,
    Linear,
    Longformer,
    MultiHead,
    MultiQuery,
    SlidingWindow,
    attention_weights,
)
from harness.components.embedding import SqrtWidth, Tied
from harness.components.feedforward import GELU, MoE, ReLU, SwiGLU
from harness.components.norm import BatchNorm, LayerNorm, PostNorm, PreNorm, RMSNorm
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
    TransformerXL,
    places,
)
from harness.components.qk_norm import NoQKNorm, QKNorm
from harness.components.scale import Inverse, InverseSqrt, Unscaled
from harness.components.shape import Shape
from harness.cost import parameters
from harness.schema import Level, UserError, is_foreign
from harness.spec import ModelSpec, RunSpec
from harness.trace import Trace
from harness.transformer import Reading, build_model
from tasks import Copy

VOCABULARY = 12
BASE = ModelSpec(d_model=16, num_heads=2, num_layers=2)
AXES = {
    name: field.annotation
    for name, field in ModelSpec.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Level)
}
EVERY_LEVEL = [
    pytest.param(BASE.replace(axis, level()), id=f"{axis}={name}")
    for axis, base in AXES.items()
    for name, level in base.levels().items()
    if not is_foreign(level)
]
CAUSAL = [case for case in EVERY_LEVEL if case.values[0].architecture != EncoderOnly()]  # type: ignore[union-attr]
ENCODERS = [
    pytest.param(case.values[0].replace("architecture", EncoderOnly()), id=case.id)  # type: ignore[union-attr]
    for case in EVERY_LEVEL
    if not str(case.id).startswith("architecture")
]

specs = st.builds(
    ModelSpec,
    d_model=st.sampled_from([4, 8, 12]),
    num_layers=st.integers(1, 3),
    num_heads=st.sampled_from([1, 2]),
    position=st.sampled_from(
        [NoPE(), Sinusoidal(), Learned(max_length=16), RoPE(), ALiBi(), T5Bias(num_buckets=4, max_distance=8)]
    ),
    attention=st.sampled_from(
        [
            MultiHead(),
            GroupedQuery(num_groups=1),
            MultiQuery(),
            Latent(d_latent=4, d_rope=2),
            SlidingWindow(window=3),
            Longformer(window=3),
            BigBird(window=3),
        ]
    ),
    norm=st.sampled_from([LayerNorm(), RMSNorm()]),
    norm_placement=st.sampled_from([PreNorm(), PostNorm()]),
    scale=st.sampled_from([InverseSqrt(), Unscaled(), Inverse()]),
    feedforward=st.sampled_from([ReLU(d_ff=8), GELU(d_ff=8), SwiGLU(d_ff=8), MoE(expert=ReLU(d_ff=8))]),
)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def model_of(spec: ModelSpec, seed: int = 0) -> Any:
    """In evaluation mode, where nothing is drawn; Any: tests look inside."""
    return build_model(spec, VOCABULARY, seed=seed).eval()


def source_for(spec: ModelSpec, batch: int) -> Tensor | None:
    return tokens(batch, 5, seed=1) if spec.architecture.has_encoder() else None


def changed_at(read: Tensor, i: int) -> Tensor:
    changed = read.clone()
    changed[:, i] = (read[:, i] + 1) % VOCABULARY
    return changed


@pytest.mark.parametrize("spec", CAUSAL)
def test_no_output_depends_on_a_later_token(spec: ModelSpec) -> None:
    model, read, source = model_of(spec).double(), tokens(1, 9), source_for(spec, 1)
    before = model(read, source)
    # Experts multiply those tokens together that chose them, and another grouping rounds otherwise.
    rounding = 1e-12 if isinstance(spec.feedforward, MoE) else 0
    for i in range(9):
        difference = (model(changed_at(read, i), source) - before).abs().amax(dim=-1)[0]
        assert (difference[:i] <= rounding).all()
        assert (difference[i:] > 1e-12).all()  # and every later one depends on it


@pytest.mark.parametrize("spec", ENCODERS)
def test_every_output_of_an_encoder_depends_on_every_token(spec: ModelSpec) -> None:
    encoder, read = model_of(spec).double(), tokens(1, 6)
    before = encoder(read)
    for i in range(6):
        assert ((encoder(changed_at(read, i)) - before).abs().amax(dim=-1)[0] > 0).all()


@given(specs, st.integers(1, 3), st.integers(1, 16))
def test_any_model_maps_tokens_to_finite_causal_logits(spec: ModelSpec, batch: int, length: int) -> None:
    model, read = model_of(spec), tokens(batch, length)
    logits = model(read)
    assert logits.shape == (batch, length, VOCABULARY)
    assert logits.isfinite().all()
    cut = max(1, length // 2)
    torch.testing.assert_close(model(read[:, :cut]), logits[:, :cut], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", EVERY_LEVEL)
def test_sequences_of_a_batch_do_not_see_each_other(spec: ModelSpec) -> None:
    model, read, source = model_of(spec), tokens(3, 7), source_for(spec, 3)
    alone = [model(row[None], None if source is None else source[i : i + 1]) for i, row in enumerate(read)]
    torch.testing.assert_close(model(read, source), torch.cat(alone), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", [*CAUSAL, *ENCODERS])
def test_traced_and_untraced_calls_agree(spec: ModelSpec) -> None:
    model, read, source, trace = model_of(spec), tokens(2, 9), source_for(spec, 2), Trace()
    assert torch.equal(model(read, source, trace=trace), model(read, source))
    weights = trace.stacked("attention")
    assert weights.shape == (2, 2, 2, 9, 9)  # layers, B, H, T, T
    assert not weights.requires_grad
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 2, 9))
    assert bool(weights.triu(1).any()) is not spec.architecture.is_causal()
    if source is not None:
        across = trace.stacked("cross_attention")
        assert across.shape == (2, 2, 2, 9, 5)  # layers, B, H, T, S
        torch.testing.assert_close(across.sum(-1), torch.ones(2, 2, 2, 9))


@pytest.mark.parametrize("spec", [*EVERY_LEVEL, *ENCODERS])
def test_the_traced_weights_are_those_that_mixed_the_values(spec: ModelSpec) -> None:
    # The fused kernel never shows its weights; what it returns must be the traced weights times the values.
    model, trace = model_of(spec), Trace()
    mixed: list[Tensor] = []
    values: list[Tensor] = []
    for block in model.blocks:
        value = block.attention.value_up if isinstance(spec.attention, Latent) else block.attention.value
        block.attention.output.register_forward_pre_hook(lambda module, args: mixed.append(args[0]))
        value.register_forward_hook(lambda module, args, output: values.append(output))
    model(tokens(2, 9), source_for(spec, 2), trace=trace)
    for weights, value, result in zip(trace.kept["attention"], values, mixed, strict=True):
        heads = value.unflatten(-1, (-1, 8)).transpose(1, 2)
        expected = weights @ heads.repeat_interleave(2 // heads.shape[1], dim=1)
        torch.testing.assert_close(result, expected.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-5)


def test_the_model_is_the_composition_of_its_parts() -> None:
    model, read = model_of(BASE.replace("norm_placement", PreNorm())), tokens(2, 5)
    x = model.embedding.weight[read] + Sinusoidal().codes(5, 16)
    for block in model.blocks:
        x, routing = block(x, places(5), Reading(causal=True))
        assert routing is None
    torch.testing.assert_close(model(read), model.final_norm(x) @ model.head.weight.T)


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_have_parameters_of_their_own(layers: int) -> None:
    model = build_model(BASE.replace("num_layers", layers), VOCABULARY, seed=0)
    assert len(model.blocks) == layers
    assert len({id(p) for p in model.parameters()}) == len(list(model.state_dict()))
    model(tokens(1, 4)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("spec", EVERY_LEVEL)
def test_building_a_model_twice_gives_the_same_bits(spec: ModelSpec) -> None:
    first, second = (model_of(spec, seed=3)(tokens(2, 5), source_for(spec, 2)) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("spec", [case for case in EVERY_LEVEL if case.id != "feedforward=MoE"])
@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")
def test_models_of_several_seeds_train_as_one(spec: ModelSpec) -> None:
    # No data-dependent shapes or branches: vmap over stacked seeds gives what each gives alone.
    models = [model_of(spec, seed=seed) for seed in (0, 1)]
    stacked, buffers = stack_module_state(models)
    read = (tokens(2, 7), source_for(spec, 2))

    def forward(state: dict[str, Tensor], fixed: dict[str, Tensor]) -> Tensor:
        return functional_call(models[0], (state, fixed), read)

    with sdpa_kernel(SDPBackend.MATH):  # torch's CPU flash does not see through vmap that a bias is trained
        together = vmap(forward)(stacked, buffers)
    torch.testing.assert_close(together, torch.stack([m(*read) for m in models]), atol=1e-5, rtol=1e-5)


def test_a_trace_keeps_layers_in_order() -> None:
    trace = Trace()
    for layer in range(3):
        trace.keep("x", torch.full((2,), float(layer), requires_grad=True))
    assert trace.stacked("x")[:, 0].tolist() == [0, 1, 2]
    assert not trace.stacked("x").requires_grad


class NearestEncoding(PositionEncoding):
    """A user's encoding: a token sees itself and the one before it."""

    def relation(self, queries: Tensor, keys: Tensor, *, causal: bool, cached: bool) -> Relation:
        def bias(query: Tensor, at: Tensor, of: Tensor) -> Tensor:
            far = at[..., :, None] - of[..., None, :] > 1
            return torch.zeros(2, *far.shape).masked_fill(far, float("-inf"))

        return replace(super().relation(queries, keys, causal=causal, cached=cached), bias=bias)


@pytest.mark.parametrize("attention", [MultiHead(), SlidingWindow(window=4)], ids=lambda level: level.kind)
def test_a_users_encoding_works_like_ours(attention: Attention) -> None:
    class Nearest(Position):
        """A user's own."""

        biases_logits = True

        def build(self, shape: Shape) -> PositionEncoding:
            return NearestEncoding()

    spec = ModelSpec(d_model=16, num_heads=2, position=Nearest(), attention=attention)
    model, read, trace = model_of(spec), tokens(1, 6), Trace()
    logits = model(read, trace=trace)
    weights = trace.stacked("attention")
    assert not weights.tril(-2).any()
    assert (weights.diagonal(dim1=-2, dim2=-1) > 0).all()
    assert (weights.diagonal(-1, dim1=-2, dim2=-1) > 0).all()
    assert torch.equal(model(changed_at(read, 0))[:, 3:], logits[:, 3:])  # two layers hand on two tokens
    assert not torch.equal(model(changed_at(read, 0))[:, 2], logits[:, 2])


def test_attention_weights_without_bias_or_mask_are_the_softmax() -> None:
    query, key = torch.randn(2, 1, 1, 5, 4)
    expected = (query @ key.transpose(-2, -1)).softmax(-1)
    torch.testing.assert_close(attention_weights(query, key, None, causal=False), expected)


# --- torch's own models ----------------------------------------------------------------------------------------------

ORIGINAL = BASE.replace("feedforward", ReLU(d_ff=24)).replace("position", NoPE())


def torchs(kind: type[nn.Module]) -> Any:
    return kind(16, 2, 24, dropout=0.0, batch_first=True)


def copy_attention(ours: Any, theirs: Any) -> None:
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
    theirs.in_proj_bias.zero_()
    theirs.out_proj.weight.copy_(ours.output.weight)
    theirs.out_proj.bias.zero_()


@torch.no_grad()
def copied(ours: Any, kind: type[nn.Module]) -> Any:
    """Torch's layer of the original Transformer with the weights of a block of ours; all norms at random."""
    theirs = torchs(kind)
    copy_attention(ours.attention, theirs.self_attn)
    steps = [ours.attention_step, ours.feedforward_step]
    if ours.memory_attention is not None:
        copy_attention(ours.memory_attention, theirs.multihead_attn)
        steps.insert(1, ours.memory_step)
    for number, step in enumerate(steps, start=1):
        nn.init.normal_(step.outer.weight)
        nn.init.normal_(step.outer.bias)
        getattr(theirs, f"norm{number}").load_state_dict(step.outer.state_dict())
    theirs.linear1.load_state_dict(ours.feedforward[0].state_dict())
    theirs.linear2.load_state_dict(ours.feedforward[2].state_dict())
    return theirs


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderOnly()], ids=lambda level: level.kind)
def test_one_stack_is_torchs(architecture: DecoderOnly | EncoderOnly) -> None:
    model, read = model_of(ORIGINAL.replace("architecture", architecture)), tokens(3, 7)
    real = torch.arange(7) < torch.tensor([[7], [4], [5]])
    layers = [copied(block, nn.TransformerEncoderLayer) for block in model.blocks]
    x, mask = model.embedding(read), nn.Transformer.generate_square_subsequent_mask(7)
    for layer in layers:
        ahead = mask if architecture.is_causal() else None
        x = layer(x, ahead, None if architecture.is_causal() else ~real)
    logits = model(read, real=real)
    torch.testing.assert_close(logits[real], model.head(x)[real], atol=1e-5, rtol=1e-5)


def test_the_encoder_decoder_is_torchs() -> None:
    model, read, source = model_of(ORIGINAL.replace("architecture", EncoderDecoder())), tokens(3, 7), tokens(3, 5, 1)
    real = torch.arange(5) < torch.tensor([[5], [2], [4]])
    memory, x = model.embedding(source), model.embedding(read)
    for layer in [copied(block, nn.TransformerEncoderLayer) for block in model.encoder.blocks]:
        memory = layer(memory, src_key_padding_mask=~real)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    for layer in [copied(block, nn.TransformerDecoderLayer) for block in model.blocks]:
        x = layer(x, memory, mask, memory_key_padding_mask=~real)
    logits = model(read, source, None, real)
    torch.testing.assert_close(logits, model.head(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", [*EVERY_LEVEL, *(case for case in ENCODERS if case.id != "attention=BigBird")])
def test_padding_behind_changes_nothing(spec: ModelSpec) -> None:
    # BigBird's encoder draws keys among all tokens, padding included.
    model, source = model_of(spec), source_for(spec, 2)
    read, real = tokens(2, 9), torch.arange(9).expand(2, -1) < 6
    source_real = None if source is None else torch.arange(5).expand(2, -1) < 3
    padded = model(read, source, real, source_real)[:, :6]
    alone = model(read[:, :6], None if source is None else source[:, :3])
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderDecoder()], ids=lambda level: level.kind)
def test_padding_before_a_token_is_refused_where_a_stack_is_causal(architecture: Architecture) -> None:
    spec = BASE.replace("architecture", architecture)
    real = torch.tensor([[True, True, True], [False, True, True]])
    with pytest.raises(UserError, match=r"^real is False before a token: .* put padding behind them$"):
        model_of(spec)(tokens(2, 3), source_for(spec, 2), real)


def test_an_encoder_takes_padding_anywhere() -> None:
    model, read = model_of(BASE.replace("architecture", EncoderOnly()).replace("position", NoPE())), tokens(1, 5)
    real = torch.tensor([[False, True, True, False, True]])
    torch.testing.assert_close(model(read, None, real)[real], model(read[real][None])[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderOnly()], ids=lambda level: level.kind)
@pytest.mark.parametrize("name", ["source", "source_real"])
def test_a_source_that_nothing_reads_is_refused(architecture: Architecture, name: str) -> None:
    given = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(
        UserError, match=rf"^{name} is given, and the model has no encoder to read it: .*EncoderDecoder"
    ):
        model_of(BASE.replace("architecture", architecture))(tokens(2, 3), **{name: given})


def test_a_seed_is_no_negative_number() -> None:
    with pytest.raises(UserError, match=r"^seed = -1: a seed is 0 or more; choose another$"):
        build_model(ModelSpec(), 8, seed=-1)


@pytest.mark.parametrize("wrong", ["x", RunSpec(task=Copy()), ModelSpec], ids=["str", "RunSpec", "class"])
def test_a_model_is_built_of_a_model_spec(wrong: Any) -> None:
    with pytest.raises(
        UserError, match=r"^build_model takes a ModelSpec, not [^\n]{3,60}; give ModelSpec\(…\), or the `model`"
    ):
        build_model(wrong, VOCABULARY, seed=0)


def test_every_decoder_output_reads_every_source_token() -> None:
    model = model_of(BASE.replace("architecture", EncoderDecoder()))
    read, source = tokens(1, 4), tokens(1, 5, seed=1)
    for i in range(5):
        assert ((model(read, changed_at(source, i)) - model(read, source)).abs().amax(-1) > 0).all()


# --- routing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderDecoder()], ids=lambda level: level.kind)
def test_outputs_tell_of_every_router_in_the_order_of_experts(architecture: DecoderOnly | EncoderDecoder) -> None:
    spec = BASE.replace("feedforward", MoE(expert=ReLU(d_ff=8), z_loss=0.1)).replace("architecture", architecture)
    model, read, source = model_of(spec), tokens(2, 7), source_for(spec, 2)
    found, expected = model.outputs(read, source), []
    for mixture in model.experts():
        mixture.register_forward_hook(lambda module, args, output: expected.append((module, output.routing)))
    model(read, source)
    assert len(found.routing) == (4 if source is not None else 2)
    assert [module for module, _ in expected] == model.experts()
    torch.testing.assert_close([tuple(r) for r in found.routing], [tuple(r) for _, r in expected])
    torch.testing.assert_close(found.auxiliary_loss, torch.stack([r.loss for r in found.routing]).mean())


def test_routers_do_not_count_padding() -> None:
    model, read = model_of(BASE.replace("feedforward", MoE(expert=ReLU(d_ff=8)))), tokens(2, 9)
    padded, alone = model.outputs(read, real=torch.arange(9).expand(2, -1) < 6), model.outputs(read[:, :6])
    torch.testing.assert_close([tuple(r) for r in padded.routing], [tuple(r) for r in alone.routing])


def test_a_dense_model_has_no_auxiliary_loss() -> None:
    output = model_of(BASE).outputs(tokens(1, 3))
    assert output.auxiliary_loss == 0
    assert output.routing == []


# --- recomputation ---------------------------------------------------------------------------------------------------

RECOMPUTED = [
    BASE,
    BASE.replace("attention_dropout", 0.2).replace("residual_dropout", 0.3).replace("embedding_dropout", 0.1),
    BASE.replace("feedforward", MoE(expert=ReLU(d_ff=8), jitter=0.1, capacity=1.0)).replace("residual_dropout", 0.3),
    BASE.replace("architecture", EncoderDecoder()).replace("residual_dropout", 0.3),
    BASE.replace("norm", BatchNorm()),
]


def trained(spec: ModelSpec, *, recompute: bool) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and buffers after one training step's two passes."""
    model = build_model(spec, VOCABULARY, seed=0).train()
    torch.manual_seed(1)
    output = model.outputs(tokens(3, 8), source_for(spec, 3), recompute=recompute)
    loss = output.logits.square().mean() + output.auxiliary_loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, dict(model.named_buffers())


@pytest.mark.parametrize("spec", RECOMPUTED, ids=["plain", "dropout", "MoE", "encoder", "BatchNorm"])
def test_recomputation_changes_no_number(spec: ModelSpec) -> None:
    kept, recomputed = (trained(spec, recompute=recompute) for recompute in (False, True))
    torch.testing.assert_close(recomputed, kept, atol=0, rtol=0)


@contextmanager
def counting_saved() -> Iterator[set[tuple[int, int]]]:
    """The storages, by address and size, that autograd keeps for the backward pass."""
    saved: set[tuple[int, int]] = set()

    def pack(x: Tensor) -> Tensor:
        saved.add((x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()))
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield saved


def test_recomputation_saves_memory() -> None:
    model, read = build_model(BASE.replace("num_layers", 4), VOCABULARY, seed=0).train(), tokens(4, 32)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}
    for recompute in (False, True):
        with counting_saved() as saved:
            logits = model.outputs(read, recompute=recompute).logits
        held[recompute] = sum(size for address, size in saved if address not in own)
        del logits
    inputs = 4 * 4 * 32 * 16 * 4  # what each block read, which its checkpoint holds by itself: layers · B · T · d · 4
    assert held[True] + inputs < held[False] / 4


def test_recomputation_is_for_training() -> None:
    model, read = model_of(BASE), tokens(2, 5)
    assert torch.equal(model.outputs(read, recompute=True).logits, model(read))


# --- embeddings ------------------------------------------------------------------------------------------------------


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = (model_of(BASE.replace("output_head", {"kind": kind})) for kind in ("Tied", "Untied"))
    assert parameters(tied) == parameters(untied) - VOCABULARY * 16
    with torch.no_grad():
        untied.head.weight.copy_(untied.embedding.weight)
    read = tokens(2, 5)
    torch.testing.assert_close(tied(read), untied(read))
    for model in (tied, untied):
        model(read).square().sum().backward()
    torch.testing.assert_close(tied.embedding.weight.grad, untied.embedding.weight.grad + untied.head.weight.grad)


def test_embeddings_are_multiplied_before_positions_are_added() -> None:
    plain, wide = (model_of(spec) for spec in (BASE, BASE.replace("embedding_scale", SqrtWidth())))
    with torch.no_grad():
        plain.embedding.weight *= 4  # √16
    torch.testing.assert_close(wide(tokens(2, 5)), plain(tokens(2, 5)))


def test_a_tied_head_reads_embeddings_without_their_factor() -> None:
    model, read = model_of(BASE.replace("output_head", Tied()).replace("embedding_scale", SqrtWidth())), tokens(2, 5)
    x, _ = model.read(model.embedding(read) * 4, Reading(causal=True))
    torch.testing.assert_close(model(read), x @ model.embedding.weight.T)


# --- pairs of axes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qk_norm", [NoQKNorm(), QKNorm()], ids=lambda level: level.kind)
@pytest.mark.parametrize("position", [RoPE(), ALiBi(), T5Bias(), TransformerXL()], ids=lambda level: level.kind)
def test_gradients_are_finite_and_reach_every_parameter(position: Position, qk_norm: NoQKNorm | QKNorm) -> None:
    for level in AXES["attention"].levels().values():
        impossible = (level is Linear and position.biases_logits) or (level is Latent and qk_norm == QKNorm())
        if impossible or is_foreign(level):
            continue
        spec = BASE.replace("position", position).replace("attention", level()).replace("qk_norm", qk_norm)
        model = build_model(spec, VOCABULARY, seed=0)
        model(tokens(2, 11)).square().sum().backward()
        for name, p in model.named_parameters():
            assert p.grad is not None, name
            assert p.grad.isfinite().all(), name
            assert p.grad.any(), name
