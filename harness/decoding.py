"""Decoding: the most probable token, again and again."""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from harness.schema import UserError, shown
from harness.transformer import Transformer

Model = Callable[..., Tensor]  # token ids (B, T), and with an encoder its source (B, S), to logits (B, T, V)


@torch.no_grad()
def greedy(model: Model, prompt: Tensor, count: int, *, source: Tensor | None = None, cached: bool = True) -> Tensor:
    """The `count` tokens `(B, count)` that a decoder adds to a prompt `(B, T)`, each the arg-max of its logits.

    Args:
        model: a decoder, in evaluation mode; with a cache, one of ours.
        prompt: token ids, one length, one or more.
        count: how many tokens to add.
        source: `(B, S)`, what the encoder of an encoder-decoder reads.
        cached: read each token once and keep what attention needs of it; otherwise read everything anew at every step.

    Raises:
        UnsupportedLength: the positions cannot take so many tokens.
        UserError: the model is an encoder, has one and no source or none and a source, or is in training mode; there is
            no token to begin with, one that it does not know, or less than none is asked for.
    """
    if isinstance(model, Transformer) and not model.causal:
        raise UserError("an encoder predicts all tokens at once; decode with DecoderOnly() or EncoderDecoder()")
    if not isinstance(prompt, Tensor) or prompt.is_floating_point():
        raise UserError(f"prompt = {shown(prompt)}: give token ids (B, T) as a tensor of whole numbers")
    if prompt.dim() != 2 or not prompt.shape[1]:
        raise UserError(
            f"prompt has the shape {tuple(prompt.shape)}: give token ids (B, T) with something to read, e.g. BOS"
        )
    if not isinstance(count, int) or count < 0:
        raise UserError(f"count = {shown(count)}: ask for 0 tokens or more, a whole number")
    if isinstance(model, nn.Module) and model.training:
        raise UserError("the model is in training mode, in which dropout decodes at random; call model.eval() first")
    if isinstance(model, Transformer):
        for name, tokens in {"prompt": prompt, "source": source}.items():
            _check_words(name, tokens, model.embedding.num_embeddings)
    cache = cast(Transformer, model).cache(prompt.shape[1] + count - 1) if cached else None
    sequence = new = prompt
    for _ in range(count):
        read = (new,) if source is None else (new, source)
        logits = model(*read) if cache is None else model(*read, cache=cache)
        token = logits[:, -1].argmax(-1, keepdim=True)
        sequence = torch.cat([sequence, token], dim=1)
        new = token if cached else sequence
    return sequence[:, prompt.shape[1] :]


def _check_words(name: str, tokens: Tensor | None, vocab_size: int) -> None:
    """Raise `UserError` for a token id that no row of the embedding stands for, which torch says in its own words."""
    if tokens is None or not tokens.numel():
        return
    for word in (int(tokens.max()), int(tokens.min())):
        if not 0 <= word < vocab_size:
            raise UserError(
                f"{name} has the token id {word}: the model knows 0 to {vocab_size - 1}; give it ids of its vocabulary"
            )
