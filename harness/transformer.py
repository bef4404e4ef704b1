"""The Transformer, to be read like the paper's equations.

Legend of shapes, used everywhere: B sequences in a batch, T tokens in a sequence, H heads, V words in the vocabulary,
d_model the width of the residual stream, d_head = d_model / H, d_ff the width inside the feed-forward sublayer.
"""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from harness.components.attention import MultiHeadAttention
from harness.components.init import initialise
from harness.components.position import Relation
from harness.trace import Trace

if TYPE_CHECKING:
    from harness.spec import ModelSpec


class Block(nn.Module):
    """Attention, then feed-forward, each with its residual connection and norm."""

    def __init__(self, spec: "ModelSpec") -> None:
        super().__init__()
        self.placement = spec.norm_placement
        self.attention = MultiHeadAttention(spec.shape, spec.scale)
        self.attention_norm = spec.norm.build(spec.d_model)
        self.feedforward = spec.feedforward.build(spec.d_model)
        self.feedforward_norm = spec.norm.build(spec.d_model)

    def forward(self, x: Tensor, relation: Relation, *, causal: bool, trace: Trace | None = None) -> Tensor:
        """`(B, T, d_model)` to the same shape."""

        def attend(h: Tensor) -> Tensor:
            return self.attention(h, relation, causal=causal, trace=trace)

        x = self.placement.apply(x, self.attention_norm, attend)
        return self.placement.apply(x, self.feedforward_norm, self.feedforward)


class Transformer(nn.Module):
    """Tokens to logits: a causal decoder, or with `causal=False` an encoder that predicts all positions in parallel."""

    def __init__(self, spec: "ModelSpec", vocab_size: int, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(vocab_size, spec.d_model)
        self.position = spec.position.build(spec.shape)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.num_layers))
        self.final_norm = spec.norm_placement.final(spec.norm, spec.d_model)
        self.head = nn.Linear(spec.d_model, vocab_size, bias=False)

    def forward(self, tokens: Tensor, *, trace: Trace | None = None) -> Tensor:
        """Token ids `(B, T)` to logits `(B, T, V)`. Raises `UnsupportedLength` where the positions cannot take T."""
        x = self.position.add(self.embedding(tokens))
        relation = self.position.relation(tokens.shape[1], causal=self.causal, device=tokens.device)
        for block in self.blocks:
            x = block(x, relation, causal=self.causal, trace=trace)
        return self.head(self.final_norm(x))


def build_model(spec: "ModelSpec", vocab_size: int, *, seed: int) -> Transformer:
    """The decoder-only Transformer of a spec, each parameter drawn from (seed, its name)."""
    model = Transformer(spec, vocab_size)
    initialise(model, seed)
    return model
