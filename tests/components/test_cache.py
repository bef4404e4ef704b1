"""Caches hold what the levels say they hold, and a layer that reads in pieces gives what it gives at once."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness import cost
from harness.components.architecture import Architecture, DecoderOnly, EncoderDecoder
from harness.components.attention import (
    Attention,
    BigBird,
    Blocks,
    GroupedQuery,
    Latent,
    Linear,
    Longformer,
    MultiHead,
    MultiQuery,
    Parts,
    SlidingWindow,
)
from harness.components.cache import FullCache, MemoryCache, StateCache, WindowCache
from harness.components.output_projection import Projection
from harness.components.position import NoPE, Relation, places
from harness.components.qk_norm import NoQKNorm
from harness.components.scale import InverseSqrt
from harness.components.shape import Shape
from harness.schema import UserError
from harness.spec import ModelSpec
from harness.transformer import build_model

MIB = 2**20
LEVELS = [
    MultiHead(),
    GroupedQuery(num_groups=2),
    MultiQuery(),
    Latent(d_latent=6, d_rope=4),
    SlidingWindow(window=4),
    Longformer(window=4, num_global=2),
    BigBird(window=4, num_global=1, num_random=2),
    Linear(),
]


def layer(level: Attention, shape: Shape) -> Any:
    """A module in evaluation mode with its random keys drawn; Any: tests look inside."""
    module: Any = level.build(Parts(shape, InverseSqrt(), NoQKNorm(), Projection(), dropout=0.0)).eval()
    for part in module.modules():
        if isinstance(part, Blocks):
            part.draw_buffers()
    return module


def read(module: nn.Module, x: Tensor, cache: Any, already: int = 0) -> Tensor:
    """One piece `(B, T, d_model)` after `already` tokens."""
    at = torch.arange(already + x.shape[1])
    return module(x, Relation(at[already:], at), causal=True, cache=cache)


# --- the caches themselves -------------------------------------------------------------------------------------------

pieces = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(pieces)
def test_a_full_cache_gives_back_all_tokens(lengths: list[int]) -> None:
    total = sum(lengths)
    cache, key, value = FullCache(total), torch.randn(2, 3, total, 4), torch.randn(2, 3, total, 5)
    for piece, upto in zip(torch.arange(total).split(lengths), torch.tensor(lengths).cumsum(0).tolist(), strict=True):
        seen, numbers = cache.extend(key[:, :, piece], value[:, :, piece])
        assert torch.equal(seen[0], key[:, :, :upto])
        assert torch.equal(seen[1], value[:, :, :upto])
        assert numbers.tolist() == list(range(upto))


@given(pieces, st.integers(1, 4), st.integers(0, 3))
def test_a_window_cache_forgets_what_no_later_query_sees(lengths: list[int], window: int, first: int) -> None:
    total = sum(lengths)
    cache, key = WindowCache(window, first), torch.arange(total).view(1, 1, -1, 1)
    held: list[int] = []
    for piece in torch.arange(total).split(lengths):
        (seen,), numbers = cache.extend(key[:, :, piece])
        visible = [n for n in held if n < first or n > int(piece[0]) - window]  # to the first of the piece
        assert numbers.tolist() == seen.flatten().tolist() == visible + piece.tolist()
        held = [n for n in numbers.tolist() if n < first or n > int(piece[-1]) - window]
        assert cache.tensors[0].flatten().tolist() == held
        assert cache.tensors[0].untyped_storage().nbytes() == cache.nbytes  # and does not keep the rest alive


def test_a_full_cache_refuses_more_than_its_capacity() -> None:
    cache = FullCache(5)
    cache.extend(torch.zeros(1, 1, 3, 2))
    with pytest.raises(UserError, match=r"capacity = 5: a cache has no room for 6 tokens; make a larger one"):
        cache.extend(torch.zeros(1, 1, 3, 2))
    cache.extend(torch.zeros(1, 1, 2, 2))


def test_a_memory_is_read_once() -> None:
    cache, calls = MemoryCache(), []

    def make() -> tuple[Tensor, Tensor]:
        calls.append(1)
        return torch.zeros(2, 3), torch.ones(2, 3)

    assert cache.once(make) is cache.once(make)
    assert calls == [1]
    assert cache.nbytes == 2 * 2 * 3 * 4


@pytest.mark.parametrize("cache", [FullCache(7), WindowCache(4, 1), StateCache(), MemoryCache()])
def test_an_empty_cache_holds_nothing(cache: Any) -> None:
    assert cache.nbytes == 0
    assert cache.tensors == ()


# --- what a layer's cache holds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.kind)
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 6, 7, 20])
def test_bytes_held_are_what_the_level_says(level: Attention, tokens: int) -> None:
    shape = Shape(d_model=16, num_heads=4, num_layers=1, d_head=8)
    module, x = layer(level, shape), torch.randn(3, tokens, 16)
    at_once, in_steps = module.cache(tokens), module.cache(tokens)
    with torch.no_grad():
        read(module, x, at_once)
        for already in range(tokens):
            read(module, x[:, already : already + 1], in_steps, already)
    assert at_once.nbytes == in_steps.nbytes == 3 * 4 * level.cache_elements(shape, tokens)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (MultiHead(), 2 * 4 * 8),
        (GroupedQuery(num_groups=2), 2 * 2 * 8),
        (MultiQuery(), 2 * 8),
        (Latent(d_latent=6, d_rope=4), 6 + 4),
    ],
    ids=lambda case: str(case),
)
def test_numbers_a_token(level: Attention, expected: int) -> None:
    assert level.cache_elements(Shape(16, 4, 1, d_head=8), 100) == 100 * expected


LARGE = Shape(d_model=8, num_heads=32, num_layers=1, d_head=128)  # a narrow stream: only the cache is large


def allocated(level: Attention, tokens: int, shape: Shape = LARGE) -> int:
    """Bytes of a layer's cache with room for so many tokens in fp16, held for real after the first."""
    module = layer(level, shape).half()
    cache = module.cache(tokens)
    with torch.no_grad():
        read(module, torch.randn(1, 1, shape.d_model).half(), cache)
    assert cache.nbytes == 2 * level.cache_elements(shape, tokens)
    return cache.nbytes


def test_the_articles_cache_is_64_mib_a_layer_and_a_quarter_with_eight_key_heads() -> None:
    # CLAIMS E18: h = 32, d_k = 128, n = 4096, fp16.
    assert allocated(MultiHead(), 4096) == 64 * MIB
    assert allocated(GroupedQuery(num_groups=8), 4096) == 16 * MIB
    assert allocated(MultiQuery(), 4096) == 2 * MIB


def test_the_latent_cache_of_the_derivation() -> None:
    # CLAIMS D06: 8192 numbers a token against 512 are 16×; the shared rotated key makes it 14.2×.
    plain, latent = allocated(MultiHead(), 256), allocated(Latent(d_latent=512, d_rope=64), 256)
    assert plain == 256 * 8192 * 2
    assert latent == 256 * (512 + 64) * 2
    assert plain / (256 * 512 * 2) == 16
    assert plain / latent == pytest.approx(14.2, abs=0.03)


@pytest.mark.parametrize(
    ("level", "tokens"),
    [(SlidingWindow(window=4), 4), (Longformer(window=4, num_global=2), 6), (Linear(), 0)],
    ids=lambda case: str(case),
)
def test_windows_and_sums_stop_growing(level: Attention, tokens: int) -> None:
    shape = Shape(d_model=16, num_heads=4, num_layers=1, d_head=8)
    bound = level.cache_elements(shape, tokens)
    assert [level.cache_elements(shape, n) for n in (tokens + 1, 100, 10**6)] == [bound] * 3
    module, cache, held = layer(level, shape), None, []
    cache = module.cache(40)
    with torch.no_grad():
        for already in range(40):
            read(module, torch.randn(1, 1, 16), cache, already)
            held.append(cache.nbytes)
    assert held == [4 * level.cache_elements(shape, n + 1) for n in range(40)]
    assert max(held) == held[-1] == 4 * bound


def test_a_models_cache_is_that_of_its_layers() -> None:
    spec = ModelSpec(d_model=16, num_heads=4, num_layers=3, attention=GroupedQuery(num_groups=2))
    model = build_model(spec, 9, seed=0)
    cache = model.cache(12)
    assert cache.nbytes == 0
    model(torch.arange(5)[None].expand(2, -1), cache=cache)
    assert cache.length == 5
    assert cache.nbytes == 3 * 2 * 4 * spec.attention.cache_elements(spec.shape, 12)


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderDecoder()], ids=lambda level: level.kind)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.kind)
def test_bytes_of_a_models_cache_are_those_that_are_counted(level: Attention, architecture: Architecture) -> None:
    # `cost.cache_elements` counts a layer, with an encoder also a source of as many tokens.
    spec = ModelSpec(d_model=16, num_heads=4, num_layers=3, attention=level, architecture=architecture, position=NoPE())
    model, tokens = build_model(spec, 9, seed=0).eval(), torch.arange(8)[None].expand(2, -1)
    cache, source = model.cache(8), tokens if architecture.has_encoder() else None
    with torch.no_grad():
        for token in tokens.split(1, dim=1):
            model(token, source, cache=cache)
    assert cache.nbytes == 3 * 2 * 4 * cost.cache_elements(spec, 8)


# --- a layer in pieces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[1] * 19, [7, 5, 1, 6], [3, 4, 12], [19]], ids=str)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.kind)
def test_a_layer_that_reads_in_pieces_gives_what_it_gives_at_once(level: Attention, pieces: list[int]) -> None:
    module, x = layer(level, Shape(d_model=16, num_heads=4, num_layers=1, d_head=4)), torch.randn(2, 19, 16)
    cache, already, given = module.cache(19), 0, []
    for piece in x.split(pieces, dim=1):
        given.append(read(module, piece, cache, already))
        already += piece.shape[1]
    torch.testing.assert_close(torch.cat(given, dim=1), module(x, places(19), causal=True), atol=1e-5, rtol=1e-5)
