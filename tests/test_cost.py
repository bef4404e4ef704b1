"""Parameters and operations against counts by hand."""

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.components.architecture import Architecture, DecoderOnly, EncoderDecoder, EncoderOnly
from harness.components.attention import Attention, GroupedQuery, MultiQuery, SlidingWindow
from harness.components.feedforward import GELU, FeedForward, MoE, ReLU, SwiGLU
from harness.components.norm import LayerNorm, Norm, NormPlacement, PostNorm, PreNorm, RMSNorm
from harness.components.position import ALiBi, Learned, NoPE, Position, RoPE, Sinusoidal, T5Bias
from harness.components.scale import Inverse
from harness.cost import (
    BACKWARD,
    all_score_elements,
    forward_flops,
    inference_costs,
    operations,
    parameters,
    training_flops,
)
from harness.spec import ModelSpec, RunSpec, TrainSpec
from harness.transformer import Transformer
from tasks import Copy, Lengths

VOCABULARY = 20


def model_parameters(spec: ModelSpec) -> int:
    """The formula, by hand."""
    d, f = spec.d_model, spec.feedforward.d_ff  # type: ignore[attr-defined]
    norm = 2 * d if spec.norm == LayerNorm() else d
    feedforward = 3 * d * f if isinstance(spec.feedforward, SwiGLU) else 2 * d * f + f + d
    positions = {"Learned": 64 * d, "T5Bias": 32 * spec.num_heads}.get(spec.position.kind, 0)
    final = norm if spec.norm_placement == PreNorm() else 0
    return 2 * VOCABULARY * d + positions + spec.num_layers * (4 * d * d + feedforward + 2 * norm) + final


@given(
    st.builds(
        ModelSpec,
        d_model=st.sampled_from([8, 16]),
        num_heads=st.sampled_from([1, 2, 4]),
        num_layers=st.integers(1, 3),
        position=st.sampled_from([NoPE(), Sinusoidal(), Learned(max_length=64), RoPE(), ALiBi(), T5Bias()]),
        norm=st.sampled_from([LayerNorm(), RMSNorm()]),
        norm_placement=st.sampled_from([PreNorm(), PostNorm()]),
        feedforward=st.sampled_from([ReLU(d_ff=24), GELU(d_ff=24), SwiGLU(d_ff=24)]),
    )
)
def test_parameters_are_the_formulas(spec: ModelSpec) -> None:
    assert parameters(Transformer(spec, VOCABULARY)) == model_parameters(spec)


def test_shared_parameters_count_once_and_buffers_not_at_all() -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    tied.register_buffer("constants", torch.zeros(100))
    assert parameters(tied) == 16


def products(spec: ModelSpec, tokens: int) -> int:
    """Operations of every matrix product of a forward pass, by hand; a multiply-add counts two."""
    d, f, t = spec.d_model, spec.feedforward.d_ff, tokens  # type: ignore[attr-defined]
    matrices = 3 if isinstance(spec.feedforward, SwiGLU) else 2
    linear = spec.num_layers * (4 * t * d * d + matrices * t * d * f) + t * d * VOCABULARY
    return 2 * linear + scores_and_mix(spec, tokens)


def scores_and_mix(spec: ModelSpec, tokens: int) -> int:
    """Those of QKᵀ and of weights times values alone."""
    d_head = spec.shape.d_head + 2 * isinstance(spec.position, ALiBi)  # ALiBi's slopes ride in two more dimensions
    return 2 * spec.num_layers * 2 * spec.num_heads * tokens * tokens * d_head


@pytest.mark.parametrize("position", [NoPE(), Sinusoidal(), Learned(), RoPE(), ALiBi(), T5Bias()], ids=lambda p: p.kind)
@pytest.mark.parametrize("feedforward", [ReLU(d_ff=40), SwiGLU(d_ff=24)], ids=lambda f: f.kind)
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_operations_are_those_of_the_matrix_products(position: Position, feedforward: FeedForward, tokens: int) -> None:
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=3, position=position, feedforward=feedforward)
    assert forward_flops(spec, VOCABULARY, tokens) == products(spec, tokens)
    assert operations(spec, VOCABULARY, tokens) == (products(spec, tokens), scores_and_mix(spec, tokens))


@pytest.mark.parametrize("change", [RMSNorm(), PreNorm(), Inverse(), GELU()], ids=lambda level: level.kind)
def test_what_multiplies_no_matrices_costs_nothing(change: Norm | NormPlacement | Inverse | GELU) -> None:
    path = {"RMSNorm": "norm", "PreNorm": "norm_placement", "Inverse": "scale", "GELU": "feedforward"}[change.kind]
    spec = ModelSpec(d_model=16, num_heads=2)
    assert forward_flops(spec.replace(path, change), VOCABULARY, 9) == forward_flops(spec, VOCABULARY, 9)


def test_operations_are_quadratic_in_length() -> None:
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=1)
    count = [forward_flops(spec, VOCABULARY, tokens) for tokens in (0, 8, 16, 24, 32)]
    second = [a - 2 * b + c for a, b, c in zip(count, count[1:], count[2:], strict=False)]
    assert count[0] == 0
    assert len(set(second)) == 1
    assert second[0] == 2 * 2 * 2 * 8 * 8 * 16  # two T×T products a layer, 2·T²·d each; second difference 2·8²


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_heads_cost_what_one_head_costs(heads: int) -> None:
    # CLAIMS E06: true of projections and products; the score matrices are as many as the heads.
    one, many = (ModelSpec(d_model=16, num_heads=h, position=RoPE()) for h in (1, heads))
    assert forward_flops(many, VOCABULARY, 30) == forward_flops(one, VOCABULARY, 30)
    assert model_parameters(many) == model_parameters(one)
    assert all_score_elements(many, 30) == heads * all_score_elements(one, 30) == heads * 2 * 30 * 30


def test_attention_overtakes_the_rest_at_six_times_the_width() -> None:
    # CLAIMS D15: a layer's projections and feed-forward (d_ff = 4d) cost 24nd², its two products 4n²d.
    d = 16
    spec = ModelSpec(d_model=d, num_heads=2, num_layers=1, position=RoPE(), feedforward=ReLU(d_ff=4 * d))

    def layer(tokens: int) -> int:
        return forward_flops(spec, VOCABULARY, tokens) - 2 * tokens * d * VOCABULARY

    def quadratic(tokens: int) -> int:
        return (layer(2 * tokens) - 2 * layer(tokens)) // 2  # (4a + 2b) − 2(a + b) = 2a

    for tokens in (3 * d, 6 * d, 12 * d):
        linear = layer(tokens) - quadratic(tokens)
        assert quadratic(tokens) / linear == pytest.approx(tokens / (6 * d))


@pytest.mark.parametrize("level", [GroupedQuery(), MultiQuery()], ids=lambda level: level.kind)
def test_shared_keys_save_projections_and_no_products(level: Attention) -> None:
    full = ModelSpec(d_model=16, num_heads=4)
    shared = operations(full.replace("attention", level), VOCABULARY, 30)
    assert shared.products == scores_and_mix(full, 30)
    assert shared.total < products(full, 30)


def test_products_are_those_of_a_window_and_know_nothing_of_experts() -> None:
    windows = ModelSpec(d_model=16, num_heads=2, num_layers=1, attention=SlidingWindow(window=8))
    found = [operations(windows, VOCABULARY, tokens).products for tokens in (32, 64)]
    assert found == [2 * 2 * tokens * 2 * 8 * 16 for tokens in (32, 64)]  # blocks of 8 queries by 16 keys
    experts = windows.replace("feedforward", MoE(expert=ReLU(d_ff=24)))
    assert operations(experts, VOCABULARY, 32).products == found[0]


@pytest.mark.parametrize(
    ("architecture", "times"), [(DecoderOnly(), 1), (EncoderOnly(), 1), (EncoderDecoder(), 3)], ids=lambda a: str(a)
)
def test_an_encoder_decoder_multiplies_three_times(architecture: Architecture, times: int) -> None:
    spec = ModelSpec(d_model=16, num_heads=2, architecture=architecture)
    source = 9 if architecture.has_encoder() else 0
    assert operations(spec, VOCABULARY, 9, source).products == times * scores_and_mix(spec, 9)


def test_training_costs_three_forward_passes_a_sequence() -> None:
    run = RunSpec(task=Copy(num_symbols=VOCABULARY - 4), model=ModelSpec(d_model=16, num_heads=2), train=TrainSpec())
    assert BACKWARD == 2
    expected = 3 * (5 * products(run.model, 8) + 2 * products(run.model, 12))
    assert training_flops(run, [((8, 0), 5), ((12, 0), 2)]) == expected
    assert training_flops(run, []) == 0


@pytest.mark.parametrize(("test", "longest"), [((6, 9), 9), ((), 5)], ids=["test lengths", "training lengths alone"])
@pytest.mark.parametrize(("device", "size"), [("cpu", 4), ("cuda", 2)])
def test_inference_is_one_pass_over_the_longest_sequence_and_the_cache_after_it(
    test: tuple[int, ...], longest: int, device: Literal["cpu", "cuda"], size: int
) -> None:
    lengths, model = Lengths(train=(2, 5), test=test), ModelSpec(d_model=16, num_heads=2, num_layers=3)
    task, tokens = Copy(lengths=lengths, num_symbols=VOCABULARY - 4), 2 * longest + 2  # BOS source SEP answer
    spec = RunSpec(task=task, model=model, device=device)
    found = {"inference_flops": products(model, tokens), "cache_bytes": 2 * 16 * tokens * 3 * size}
    assert inference_costs(spec) == inference_costs(spec.replace("seed", 7)) == found
    shared = inference_costs(spec.replace("model.attention", MultiQuery()))
    assert shared["cache_bytes"] == found["cache_bytes"] / 2


def test_an_encoder_has_no_cache_and_what_it_read_for_a_decoder_is_in_the_decoders() -> None:
    task, model = Copy(lengths=Lengths(train=(1, 3), test=(5,))), ModelSpec(d_model=16, num_heads=2, num_layers=1)
    found = {
        kind: inference_costs(RunSpec(task=task, model=model.replace("architecture", kind)))["cache_bytes"]
        for kind in (EncoderOnly(), EncoderDecoder())
    }
    assert found == {EncoderOnly(): 0, EncoderDecoder(): 2 * 16 * 4 * (6 + 6)}  # BOS answer; source EOS


def test_what_cannot_be_counted_of_inference_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    task, short = Copy(lengths=Lengths(train=(1, 3), test=(5,))), ModelSpec(position=Learned(max_length=8))
    assert inference_costs(RunSpec(task=task, model=short)) == {}  # a length that the model cannot take

    monkeypatch.setattr(MultiQuery, "cache_elements", lambda *_: 1 / 0)
    assert set(inference_costs(RunSpec(task=task, model=ModelSpec(attention=MultiQuery())))) == {"inference_flops"}


def test_a_large_model_is_counted_without_memory_for_it() -> None:
    spec = ModelSpec(d_model=8192, num_heads=64, num_layers=2, feedforward=ReLU(d_ff=32_768))
    assert forward_flops(spec, VOCABULARY, 2048) == products(spec, 2048)
