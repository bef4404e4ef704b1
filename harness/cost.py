"""What a model costs, counted without training it: parameters, floating-point operations, bytes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness.components.feedforward import MixtureOfExperts
from harness.schema import UserError, is_foreign
from harness.spec import ModelSpec, RunSpec, TrainSpec
from harness.transformer import Block, Transformer

BACKWARD = 2  # the backward pass multiplies twice for each multiplication of the forward pass
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LENGTHS = (256, 1024, 4096, 16_384)  # tokens; each takes some .05 s a model to count


def empty_model(spec: ModelSpec, vocab_size: int) -> Transformer:
    """The model on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Transformer(spec, vocab_size)


@contextmanager
def counting(what: str) -> Iterator[None]:
    """Names what could not be counted: on the meta device, where there are no numbers, a user's own level may raise
    anything.

    Raises:
        UserError: what, and what was raised or refused within.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise UserError(f"{what}: its cost cannot be counted ({cause}); mend its build or its forward") from error


def parameters(model: nn.Module) -> int:
    """Trained numbers of a model, shared ones counted once."""
    return sum(p.numel() for p in model.parameters())


def active_parameters(model: Transformer) -> int:
    """Those of them that one token meets: of each mixture of experts the router, the shared experts and `top_k`
    others.
    """
    return parameters(model) - sum(_idle(experts) for experts in model.experts())


def _idle(experts: MixtureOfExperts) -> int:
    return (experts.spec.num_experts - experts.spec.top_k) * parameters(experts.experts[0])


def parameters_by_part(model: Transformer) -> dict[str, int]:
    """Parameters of the embedding and the output head, of attention, feed-forward and norms over all blocks, and of
    the rest (positions, output head, the last norm); they sum to `parameters`.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    attention = [b.attention for b in blocks] + [b.memory_attention for b in blocks if b.memory_attention is not None]
    steps = [s for b in blocks for s in (b.attention_step, b.memory_step, b.feedforward_step) if s is not None]
    parts = {
        "embedding": parameters(model.embedding),
        "output head": 0 if model.head is None else parameters(model.head),
        "attention": sum(map(parameters, attention)),
        "feedforward": sum(parameters(block.feedforward) for block in blocks),
        "norms": sum(map(parameters, steps)),
    }
    return parts | {"other": parameters(model) - sum(parts.values())}


class Operations(NamedTuple):
    """Operations of one forward pass, and those of them that attention's products take: QKᵀ, weights times values, and
    whatever else is multiplied of two activations.
    """

    total: int
    products: int


@lru_cache(maxsize=256)
def operations(spec: ModelSpec, vocab_size: int, tokens: int, source_tokens: int = 0) -> Operations:
    """Operations of one forward pass over one sequence of `tokens` tokens; a multiply-add counts two.

    Counted on the meta device along the explicit (math) path, as torch's counter knows no fused CPU kernel. Attention
    is counted in full: causal kernels may skip up to half of the two products with T×T results. Of a mixture of experts
    only those that a token chooses compute.
    """
    model, sequence = empty_model(spec, vocab_size), _tokens(tokens)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(sequence, _tokens(source_tokens) if source_tokens else None)
    counted = counter.get_flop_counts().get("Global", {})  # linear maps are mm or addmm
    return Operations(int(counter.get_total_flops()), int(counted.get(torch.ops.aten.bmm, 0)))


def forward_flops(spec: ModelSpec, vocab_size: int, tokens: int, source_tokens: int = 0) -> int:
    """All `operations` of one forward pass."""
    return operations(spec, vocab_size, tokens, source_tokens).total


def decoding_flops(spec: ModelSpec, vocab_size: int, tokens: int) -> int | None:
    """Operations that a decoder needs for the last of `tokens` tokens with a cache of the others, counted alike.

    None for an encoder, and for the first token of an encoder-decoder, which the whole source is read for.
    """
    encoded = spec.architecture.has_encoder()
    if not spec.architecture.is_causal() or (encoded and tokens == 1):
        return None
    model = empty_model(spec, vocab_size).eval()
    source = _tokens(tokens) if encoded else None
    cache = model.cache(tokens)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        if tokens > 1:
            model(_tokens(tokens - 1), source, cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(_tokens(1), source, cache=cache)
    return int(counter.get_total_flops())


def _tokens(count: int) -> Tensor:
    return torch.zeros(1, count, dtype=torch.int64, device="meta")


def score_elements(spec: ModelSpec, tokens: int) -> int:
    """Numbers in the score matrices of one head and layer over one sequence: T² for full attention. Flash computes
    them in tiles and stores none.
    """
    return tokens * spec.attention.seen_keys(tokens, causal=spec.architecture.is_causal())


def all_score_elements(spec: ModelSpec, tokens: int) -> int:
    """The same over all heads and layers, with an encoder those of its own and of the attention to its output."""
    keys = spec.attention.seen_keys(tokens, causal=spec.architecture.is_causal())
    if spec.architecture.has_encoder():
        keys += spec.attention.seen_keys(tokens, causal=False)
        keys += spec.attention.across().seen_keys(tokens, causal=False)
    return tokens * keys * spec.num_heads * spec.num_layers


def cache_elements(spec: ModelSpec, tokens: int, source_tokens: int | None = None) -> int:
    """Numbers in one layer's cache of one sequence after so many tokens, with an encoder also of its source, which is
    as long where nothing else is said; an encoder alone needs none.
    """
    if not spec.architecture.is_causal():
        return 0
    own = spec.attention.cache_elements(spec.shape, tokens)
    if not spec.architecture.has_encoder():
        return own
    return own + spec.attention.across().cache_elements(spec.shape, tokens if source_tokens is None else source_tokens)


def cache_bytes(spec: RunSpec, tokens: int, source_tokens: int | None = None) -> int:
    """Bytes of the cache of one sequence over all layers, in the precision of the run's device."""
    return cache_elements(spec.model, tokens, source_tokens) * spec.model.num_layers * BYTES[spec.precision]


def sequence_at(spec: RunSpec, length: int) -> tuple[int, int]:
    """Tokens that a model reads of a sequence of the run's task at a length, and of its source: 0 without an encoder.
    Where lengths in tokens differ between sequences, those of one that is the same for every run.
    """
    _, tokens, source = spec.task.sequences(1, length, torch.Generator().manual_seed(0), spec.layout).shape
    return tokens, source


def inference_costs(spec: RunSpec) -> dict[str, int]:
    """What one sequence costs a trained model, at the longest test length or, where there is none, training length.

    `inference_flops` are the operations of one forward pass over it, `cache_bytes` what its keys and values take. What
    cannot be counted is left out: of a length that the model cannot take, or of a user's level that raises.
    """
    lengths, limit = spec.task.lengths, spec.model.position.limit()
    found: dict[str, int] = {}
    tokens, source = sequence_at(spec, max(lengths.test, default=lengths.train[1]))
    if limit is not None and max(tokens, source) > limit:
        return found
    with suppress(Exception):  # of a user's level, anything
        found["inference_flops"] = forward_flops(spec.model, spec.task.vocab_size, tokens, source)
    with suppress(Exception):
        found["cache_bytes"] = cache_bytes(spec, tokens, source)
    return found


def training_passes(train: TrainSpec) -> int:
    """What training on a sequence costs, in forward passes: backward too, where activations are recomputed one more."""
    return 1 + BACKWARD + train.recompute


def training_flops(spec: RunSpec, sequences: Iterable[tuple[tuple[int, int], int]]) -> float:
    """Operations of a training run that read `((tokens a sequence, of its source), number of such sequences)`."""
    passes, vocabulary = training_passes(spec.train), spec.task.vocab_size
    return float(sum(passes * count * forward_flops(spec.model, vocabulary, *tokens) for tokens, count in sequences))


def check_countable(spec: RunSpec) -> None:
    """Raise `UserError` where a run's own cost could not be counted once it has trained: a user's own level may not run
    without numbers.
    """
    if any(is_foreign(type(part)) for part in spec.model.specs()):
        batch = spec.training_batch(0, torch.device(spec.device))
        source = 0 if batch.source is None else batch.source.shape[1]
        with counting(f"a {spec.task.kind} model"):
            training_flops(spec, [((batch.inputs.shape[1], source), 1)])


def costs_by_length(spec: RunSpec) -> list[dict[str, float]]:
    """What a run's model costs at each of `LENGTHS` that it can take, as `harness cost` counts it.

    A row a length: tokens, parameters, active_parameters, flops_per_token_forward (an encoder's source is as long, and
    its operations count for the tokens of the answer), score_elements (all heads and layers, one sequence), cache_bytes
    (all layers, one sequence, in the precision of the run's device: fp32 on the CPU, bf16 on CUDA).
    """
    model, vocabulary = spec.model, spec.task.vocab_size
    empty, limit = empty_model(model, vocabulary), model.position.limit()
    sizes = {"parameters": parameters(empty), "active_parameters": active_parameters(empty)}
    source = int(model.architecture.has_encoder())
    return [
        {
            "tokens": tokens,
            **sizes,
            "flops_per_token_forward": forward_flops(model, vocabulary, tokens, source * tokens) / tokens,
            "score_elements": all_score_elements(model, tokens),
            "cache_bytes": cache_bytes(spec, tokens),
        }
        for tokens in LENGTHS
        if limit is None or tokens <= limit
    ]
