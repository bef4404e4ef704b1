"""Peak memory of one forward and backward pass of attention at a length, in bytes above what was there before."""

import sys

import torch

from harness.components.attention import fused_attention
from harness.components.position import ALiBi, Position, RoPE
from harness.components.shape import Shape
from harness.machine import peak_memory, reset_peak_memory


def peak(position: Position, length: int) -> int:
    """For one sequence, one head of 32 dimensions, fp32."""
    shape = Shape(d_model=32, num_heads=1, num_layers=1, d_head=32)
    query, key, value = (torch.randn(1, 1, length, 32, requires_grad=True) for _ in range(3))
    fused_attention(query[:, :, :8], key[:, :, :8], value[:, :, :8], None, causal=True)  # load the kernels
    reset_peak_memory()
    before = peak_memory()
    encoding = position.build(shape)
    keys = encoding.positions(length, query.device)
    q, k = encoding.relation(keys, keys, causal=True, cached=False).encode(query, key)
    fused_attention(q, k, value, causal=True).sum().backward()
    return peak_memory() - before


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(peak({"RoPE": RoPE(), "ALiBi": ALiBi()}[sys.argv[1]], int(sys.argv[2])))
