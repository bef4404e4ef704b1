"""Multi-head attention on torch's fused kernels."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.components.position import Relation
from harness.components.scale import Scale
from harness.components.shape import Shape
from harness.trace import Trace


class MultiHeadAttention(nn.Module):
    """softmax(scale · QKᵀ + bias) V in `num_heads` subspaces of d_head dimensions, mixed by an output projection
    (Vaswani et al. 2017, arXiv:1706.03762).
    """

    def __init__(self, shape: Shape, scale: Scale) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.scale = scale.factor(shape.d_head)
        self.query = nn.Linear(shape.d_model, shape.d_model, bias=False)
        self.key = nn.Linear(shape.d_model, shape.d_model, bias=False)
        self.value = nn.Linear(shape.d_model, shape.d_model, bias=False)
        self.output = nn.Linear(shape.d_model, shape.d_model, bias=False)

    def forward(self, x: Tensor, relation: Relation, *, causal: bool, trace: Trace | None = None) -> Tensor:
        """`(B, T, d_model)` to the same shape. Traced calls keep `attention`, `(B, H, T, T)`, rows are queries."""
        query, key = relation.encode(self._split(self.query(x) * self.scale), self._split(self.key(x)))
        value = self._split(self.value(x))
        if trace is not None:
            trace.keep("attention", attention_weights(query, key, relation.bias, causal=causal))
        mixed = fused_attention(query, key, value, relation.bias, causal=causal)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, T, d_model) -> (B, H, T, d_head)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *, causal: bool) -> Tensor:
    """softmax(QKᵀ + bias) V for queries already scaled, by the fastest kernel that torch has for these inputs.

    Queries and keys `(B, H, T, d)` may be wider than values `(B, H, T, d_head)`: flash wants one width, so the values
    are padded with zeros and the result is cut. `bias` is `(H, T, T)`.
    """
    d_head, extra = value.shape[-1], query.shape[-1] - value.shape[-1]
    if extra:
        value = functional.pad(value, (0, extra))
    mask = None if bias is None else _masked(bias, causal=causal).to(query.dtype)
    mixed = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal and mask is None, scale=1.0
    )
    return mixed[..., :d_head]


def attention_weights(query: Tensor, key: Tensor, bias: Tensor | None, *, causal: bool) -> Tensor:
    """softmax(QKᵀ + bias), `(B, H, T, T)` in fp32, for queries already scaled: what the fused kernel never stores."""
    with torch.autocast(query.device.type, enabled=False):
        logits = query.float() @ key.float().transpose(-2, -1)
    mask = torch.zeros(logits.shape[-2:], device=logits.device) if bias is None else bias.float()
    return (logits + _masked(mask, causal=causal)).softmax(dim=-1)


def _masked(bias: Tensor, *, causal: bool) -> Tensor:
    if not causal:
        return bias
    ahead = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
    return bias.masked_fill(ahead, float("-inf"))
