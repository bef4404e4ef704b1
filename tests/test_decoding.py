"""Greedy decoding: the same tokens whether each is read once or everything anew at every step."""

from typing import Any

import pytest
import torch
from torch import Tensor

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
)
from harness.components.feedforward import MoE, ReLU
from harness.components.init import Normal
from harness.components.position import (
    ALiBi,
    Learned,
    NoPE,
    Position,
    Randomised,
    RoPE,
    Sinusoidal,
    T5Bias,
    TransformerXL,
    UnsupportedLength,
    YaRN,
)
from harness.components.qk_norm import QKNorm
from harness.decoding import greedy
from harness.schema import Level, UserError
from harness.spec import ModelSpec
from harness.trace import Trace
from harness.transformer import Transformer, build_model

VOCABULARY = 12
BASE = ModelSpec(d_model=16, num_heads=4, num_layers=2, feedforward=ReLU(d_ff=16))
ATTENTIONS = [
    MultiHead(),
    GroupedQuery(num_groups=2),
    MultiQuery(),
    Latent(d_latent=6, d_rope=4),
    SlidingWindow(window=3),
    Longformer(window=3, num_global=2),
    BigBird(window=3, num_global=1, num_random=2),
    Linear(),
]
POSITIONS = [
    NoPE(),
    Sinusoidal(),
    Learned(max_length=16),
    RoPE(),
    YaRN(),
    ALiBi(),
    T5Bias(num_buckets=8, max_distance=16),
    TransformerXL(),
    Randomised(inner=ALiBi(), max_length=40, test_tokens=16),
]
CASES = [(a, p) for a in ATTENTIONS for p in POSITIONS if a.has_logits or not (p.biases_logits or p.scales_logits)]
ARCHITECTURES = [DecoderOnly(), EncoderDecoder()]


def kind(level: Attention | Position | Architecture) -> str:
    return level.kind


def decoder(spec: ModelSpec) -> Transformer:
    """Drawn wide, so that it does not say the same word for ever."""
    return build_model(spec.replace("init.embedding", Normal(deviation=2.0)), VOCABULARY, seed=1).eval()


def words(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def source_of(spec: ModelSpec) -> Tensor | None:
    return words(2, 5, seed=9) if spec.architecture.has_encoder() else None


@torch.no_grad()
def in_pieces(model: Transformer, read: Tensor, pieces: list[int], source: Tensor | None) -> Tensor:
    cache = model.cache(read.shape[1])
    return torch.cat([model(piece, source, cache=cache) for piece in read.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=kind)
@pytest.mark.parametrize(("attention", "position"), CASES, ids=kind)
def test_reading_with_a_cache_gives_the_same_logits(
    attention: Attention, position: Position, architecture: Architecture
) -> None:
    # CLAIMS D19: the article's code ignores its cache.
    spec = BASE.replace("position", position).replace("attention", attention).replace("architecture", architecture)
    model, read, source = decoder(spec), words(2, 13), source_of(spec)
    expected = model(read, source)
    for pieces in ([1] * 13, [5, 1, 4, 3]):
        torch.testing.assert_close(in_pieces(model, read, pieces, source), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=kind)
@pytest.mark.parametrize(("attention", "position"), CASES[:: len(POSITIONS) // 2], ids=kind)
def test_decoding_with_a_cache_chooses_the_same_tokens(
    attention: Attention, position: Position, architecture: Architecture
) -> None:
    spec = BASE.replace("position", position).replace("attention", attention).replace("architecture", architecture)
    model, source = decoder(spec), source_of(spec)
    cached, anew = (greedy(model, words(2, 4), 9, source=source, cached=cached) for cached in (True, False))
    assert torch.equal(cached, anew)


def test_decoding_takes_the_most_probable_token_each_time() -> None:
    model, prompt = decoder(BASE), words(3, 4)
    decoded = greedy(model, prompt, 5)
    assert decoded.shape == (3, 5)
    whole = torch.cat([prompt, decoded], dim=1)
    assert torch.equal(model(whole)[:, 3:-1].argmax(-1), decoded)
    assert len(set(decoded.flatten().tolist())) > 1


@pytest.mark.parametrize("cached", [True, False])
def test_no_tokens_asked_none_decoded(cached: bool) -> None:
    assert greedy(decoder(BASE), words(2, 4), 0, cached=cached).shape == (2, 0)


@pytest.mark.parametrize(
    ("axis", "level"), [("feedforward", MoE(expert=ReLU(d_ff=8))), ("qk_norm", QKNorm())], ids=["MoE", "QKNorm"]
)
def test_other_parts_decode_with_a_cache_too(axis: str, level: Level) -> None:
    model, read = decoder(BASE.replace(axis, level)), words(2, 13)
    torch.testing.assert_close(in_pieces(model, read, [5, 1, 4, 3], None), model(read), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", [MultiHead(), Latent()], ids=kind)
def test_a_cache_that_is_full_says_so(attention: Attention) -> None:
    model = decoder(BASE.replace("attention", attention))
    cache = model.cache(5)
    model(words(1, 4), cache=cache)
    with pytest.raises(UserError, match="capacity = 5: a cache has no room for 6 tokens"):
        model(words(1, 2), cache=cache)


def test_positions_end_decoding_where_they_end() -> None:
    model = decoder(BASE.replace("position", Learned(max_length=8)))
    assert greedy(model, words(1, 4), 5).shape == (1, 5)
    with pytest.raises(UnsupportedLength, match="cannot take a sequence of 9 tokens"):
        greedy(model, words(1, 4), 6)


@pytest.mark.parametrize("cached", [True, False])
def test_a_source_that_is_too_long_is_called_the_source(cached: bool) -> None:
    model = decoder(BASE.replace("position", Learned(max_length=8)).replace("architecture", EncoderDecoder()))
    with pytest.raises(UnsupportedLength, match=r"^source: position\.max_length = 8: .* a sequence of 9 tokens"):
        greedy(model, words(1, 4), 2, source=words(1, 9), cached=cached)
    with pytest.raises(UnsupportedLength, match=r"^position\.max_length = 8: "):
        greedy(model, words(1, 9), 2, source=words(1, 4), cached=cached)


def test_an_encoder_decoder_reads_its_source_once() -> None:
    model = decoder(BASE.replace("architecture", EncoderDecoder()))
    calls: list[int] = []
    assert model.encoder is not None
    model.encoder.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    for projection in (block.memory_attention.key for block in model.blocks):  # type: ignore[union-attr]
        projection.register_forward_hook(lambda *_: calls.append(2))  # type: ignore[union-attr]
    greedy(model, words(2, 4), 6, source=words(2, 5))
    assert calls == [1, 2, 2]


@pytest.mark.parametrize("attention", [MultiHead(), Latent()], ids=kind)
def test_a_trace_tells_memory_from_own_tokens_at_every_step(attention: Attention) -> None:
    model = decoder(BASE.replace("attention", attention).replace("architecture", EncoderDecoder()))
    read, source, cache, whole = words(1, 6), words(1, 5), model.cache(6), Trace()
    model(read, source, trace=whole)
    for step, token in enumerate(read.split(1, dim=1)):
        trace = Trace()
        model(token, source, cache=cache, trace=trace)
        for name, seen in (("attention", step + 1), ("cross_attention", 5)):
            expected = whole.stacked(name)[:, :, :, step : step + 1, :seen]
            torch.testing.assert_close(trace.stacked(name), expected, atol=1e-5, rtol=1e-5)


def test_padding_of_the_source_is_left_out_at_every_step() -> None:
    model = decoder(BASE.replace("architecture", EncoderDecoder()).replace("position", RoPE()))
    read, source, real = words(1, 6), words(1, 5), torch.arange(5)[None] < 3
    cache = model.cache(6)
    stepwise = torch.cat([model(token, source, None, real, cache=cache) for token in read.split(1, dim=1)], dim=1)
    torch.testing.assert_close(stepwise, model(read, source[:, :3]), atol=1e-5, rtol=1e-5)


def test_an_encoder_does_not_decode() -> None:
    model = decoder(BASE.replace("architecture", EncoderOnly()))
    with pytest.raises(UserError, match="an encoder predicts all tokens at once; decode with DecoderOnly"):
        greedy(model, words(1, 3), 2)


def test_sequences_sources_and_caches_must_be_as_many() -> None:
    model, both = decoder(BASE), decoder(BASE.replace("architecture", EncoderDecoder()))
    cache = model.cache(8)
    model(words(2, 3), cache=cache)
    with pytest.raises(UserError, match=r"^cache is of 2 sequences, tokens are of 1; give one for each"):
        model(words(1, 2), cache=cache)
    for sources, sequences in ((2, 1), (1, 2), (2, 3)):
        with pytest.raises(UserError, match=rf"^source is of {sources} sequences, tokens are of {sequences}; "):
            both(words(sequences, 3), words(sources, 4))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("word", [VOCABULARY, -1])
def test_a_word_that_the_model_does_not_know_is_refused(word: int, cached: bool) -> None:
    model, strange = decoder(BASE.replace("architecture", EncoderDecoder())), torch.tensor([[1, word, 2]])
    said = rf"has the token id {word}: the model knows 0 to {VOCABULARY - 1}; give it ids of its vocabulary"
    with pytest.raises(UserError, match=f"^prompt {said}"):
        greedy(model, strange, 2, source=words(1, 3), cached=cached)
    with pytest.raises(UserError, match=f"^source {said}"):
        greedy(model, words(1, 3), 2, source=strange, cached=cached)


def test_a_model_in_training_does_not_decode() -> None:
    with pytest.raises(UserError, match=r"^the model is in training mode.*; call model\.eval\(\) first"):
        greedy(decoder(BASE).train(), words(1, 3), 2)


@pytest.mark.parametrize("prompt", [[[1, 2]], torch.zeros(1, 2)], ids=["list", "floats"])
def test_a_prompt_is_a_tensor_of_token_ids(prompt: Any) -> None:
    with pytest.raises(UserError, match=r"^prompt = .*: give token ids \(B, T\) as a tensor of whole numbers"):
        greedy(decoder(BASE), prompt, 2)


@pytest.mark.parametrize(
    ("architecture", "prompt", "count", "source", "words_said"),
    [
        (EncoderDecoder(), 3, 2, None, "source is None: an encoder-decoder reads one; pass "),
        (DecoderOnly(), 3, 2, 3, "source is given, and the model has no encoder to read it: leave it out "),
        (DecoderOnly(), 0, 2, None, r"prompt has the shape \(1, 0\): give token ids "),
        (DecoderOnly(), 3, -1, None, "count = -1: ask for 0 tokens or more"),
    ],
)
@pytest.mark.parametrize("cached", [True, False])
def test_what_cannot_be_decoded_is_refused(
    architecture: Architecture, prompt: int, count: int, source: int | None, words_said: str, cached: bool
) -> None:
    model, read = decoder(BASE.replace("architecture", architecture)), None if source is None else words(1, source)
    with pytest.raises(UserError, match=f"^{words_said}"):
        greedy(model, words(1, prompt), count, source=read, cached=cached)
