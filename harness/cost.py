"""What a model costs, counted without training it: parameters and floating-point operations."""

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from harness.spec import ModelSpec, RunSpec
from harness.transformer import Transformer

BACKWARD = 2  # the backward pass multiplies twice for each multiplication of the forward pass


def parameters(model: nn.Module) -> int:
    """Trained numbers of a model, shared ones counted once."""
    return sum(p.numel() for p in model.parameters())


@lru_cache(maxsize=256)
def forward_flops(spec: ModelSpec, vocab_size: int, tokens: int) -> int:
    """Operations of one forward pass over one sequence of `tokens` tokens; a multiply-add counts two.

    Counted on the meta device along the explicit (math) path, as torch's counter knows no fused CPU kernel. Attention
    is counted in full: causal kernels may skip up to half of the two products with T×T results.
    """
    with torch.device("meta"):
        model = Transformer(spec, vocab_size)
        sequence = torch.zeros(1, tokens, dtype=torch.int64)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(sequence)
    return int(counter.get_total_flops())


def training_flops(spec: RunSpec, sequences: Iterable[tuple[int, int]]) -> float:
    """Operations of a training run that read `(tokens a sequence, number of such sequences)`, forward and backward."""
    passes = 1 + BACKWARD
    vocabulary = spec.task.vocab_size
    return float(sum(passes * count * forward_flops(spec.model, vocabulary, tokens) for tokens, count in sequences))
