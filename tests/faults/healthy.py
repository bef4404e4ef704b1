"""Runs in which nothing is wrong, over every axis; those that learn their task should raise no alarm."""

from collections.abc import Iterator
from typing import Any

from harness import ModelSpec, RunSpec, TrainSpec
from harness.components import architecture as arch
from harness.components import attention as attn
from harness.components import embedding, feedforward, init, norm, position, residual, scale
from harness.components.output_projection import NoProjection
from harness.components.qk_norm import QKNorm
from harness.spec import Constant, Finite, InverseSquareRoot, Padded
from tasks import Copy, Lengths, Reverse, Task

PRE = {"norm_placement": norm.PreNorm()}
ROPE = {"position": position.RoPE()}

MODELS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": PRE,
    "sandwich": {"norm_placement": norm.SandwichNorm()},
    "no norm": {"norm_placement": norm.NoNorm()},
    "RMSNorm": {**PRE, "norm": norm.RMSNorm()},
    "BatchNorm": {**PRE, "norm": norm.BatchNorm()},
    "no position": {**PRE, "position": position.NoPE()},
    "learned": {**PRE, "position": position.Learned()},
    "RoPE": {**PRE, **ROPE},
    "RoPE, post": ROPE,
    "ALiBi": {**PRE, "position": position.ALiBi()},
    "T5": {**PRE, "position": position.T5Bias()},
    "Transformer-XL": {**PRE, "position": position.TransformerXL()},
    "linear RoPE": {**PRE, "position": position.LinearRoPE()},
    "NTK": {**PRE, "position": position.NTKRoPE()},
    "YaRN": {**PRE, "position": position.YaRN()},
    "randomised": {**PRE, "position": position.Randomised(inner=position.RoPE())},
    "groups": {**PRE, "attention": attn.GroupedQuery()},
    "multi-query": {**PRE, "attention": attn.MultiQuery()},
    "latent": {**PRE, **ROPE, "attention": attn.Latent()},
    "window": {**PRE, "attention": attn.SlidingWindow(window=10)},
    "Longformer": {**PRE, "attention": attn.Longformer(window=10)},
    "BigBird": {**PRE, "attention": attn.BigBird(window=10)},
    "linear": {**PRE, "attention": attn.Linear()},
    "one head": {**PRE, "num_heads": 1},
    "eight heads": {**PRE, "num_heads": 8},
    "unscaled": {**PRE, "scale": scale.Unscaled()},
    "1/d_k": {**PRE, "scale": scale.Inverse()},
    "temperature": {**PRE, "scale": scale.LearnedTemperature()},
    "QK-norm": {**PRE, "qk_norm": QKNorm()},
    "QK-norm, unscaled": {**PRE, "qk_norm": QKNorm(), "scale": scale.Unscaled()},
    "no projection": {**PRE, "output_projection": NoProjection()},
    "GELU": {**PRE, "feedforward": feedforward.GELU()},
    "SwiGLU": {**PRE, "feedforward": feedforward.SwiGLU()},
    "experts": {**PRE, "feedforward": feedforward.MoE(expert=feedforward.ReLU(d_ff=64))},
    "experts, top 1": {**PRE, "feedforward": feedforward.MoE(expert=feedforward.ReLU(d_ff=64), top_k=1)},
    "experts, full": {
        **PRE,
        "feedforward": feedforward.MoE(expert=feedforward.ReLU(d_ff=64), capacity=1.5, jitter=0.05, z_loss=0.001),
    },
    "experts, shared, bias": {
        **PRE,
        "feedforward": feedforward.MoE(expert=feedforward.GELU(d_ff=64), num_shared=1, bias_rate=0.01, balance=0.0),
    },
    "experts, unbalanced": {**PRE, "feedforward": feedforward.MoE(expert=feedforward.ReLU(d_ff=64), balance=0.0)},
    "Xavier": {**PRE, "init": init.Initialisation(linear=init.Xavier(), qkv=init.Xavier(), residual=init.Xavier())},
    "depth gain": {**PRE, "init": init.Initialisation(residual_gain=init.DepthGain())},
    "normal .02": {**PRE, "init": init.Initialisation(embedding=init.Normal(deviation=0.02))},
    "tied": {
        **PRE,
        "output_head": embedding.Tied(),
        "embedding_scale": embedding.SqrtWidth(),
        "init": init.Initialisation(embedding=init.Normal(deviation=0.125)),
    },
    "dropout": {**PRE, "residual_dropout": 0.05},
    "encoder-decoder": {**PRE, "architecture": arch.EncoderDecoder()},
    "encoder-decoder, RoPE": {**PRE, **ROPE, "architecture": arch.EncoderDecoder()},
    "encoder": {**PRE, "architecture": arch.EncoderOnly()},
    "encoder, ALiBi": {**PRE, "architecture": arch.EncoderOnly(), "position": position.T5Bias()},
    "no residual": {**PRE, "residual": residual.NoResidual(), "num_layers": 1},
    "four layers": {**PRE, "num_layers": 4},
}
TRAINED: dict[str, dict[str, Any]] = {
    "constant": {"schedule": Constant()},
    "inverse root": {"schedule": InverseSquareRoot()},
    "unclipped": {"gradient_clip": None},
    "padded": {"sampling": Padded()},
    "finite": {"sampling": Finite(num_samples=4000)},
    "β₂ .999": {"beta2": 0.999, "eps": 1e-8},
    "decay": {"weight_decay": 0.1},
    "smoothing": {"label_smoothing": 0.1},
    "slower": {"learning_rate": 1e-3},
    "faster": {"learning_rate": 6e-3},
}
LENGTHS = Lengths(train=(1, 4), test=(5, 6))
TASKS: tuple[Task, ...] = (Copy(lengths=LENGTHS, num_symbols=8), Reverse(lengths=LENGTHS, num_symbols=8))


def runs(seeds: range) -> Iterator[tuple[str, RunSpec]]:
    """Name and spec of each."""
    base = {"steps": 600, "batch_size": 32, "learning_rate": 3e-3, "eval_samples": 64, "eval_every": 250}
    cases = [(name, model, {}) for name, model in MODELS.items()]
    cases += [(name, PRE, train) for name, train in TRAINED.items()]
    for name, model, train in cases:
        for task in TASKS:
            for seed in seeds:
                spec = RunSpec(model=ModelSpec(**model), task=task, train=TrainSpec(**{**base, **train}), seed=seed)
                yield f"{name}, {task.kind}, seed {seed}", spec
