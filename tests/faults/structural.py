"""Structural faults: patches of a built module, which no spec, and so no probe, knows of.

Each has the probe that should name it, and a model in which it can live. `strength` goes from mild to severe where a
fault has degrees.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import ModelSpec, RunSpec
from harness.components.architecture import EncoderOnly
from harness.components.attention import (
    GroupedQuery,
    Heads,
    Latent,
    Linear,
    MultiQuery,
    SlidingWindow,
)
from harness.components.cache import FullCache, WindowCache
from harness.components.embedding import SqrtWidth, Tied
from harness.components.feedforward import MoE
from harness.components.init import DepthGain, Initialisation, Normal
from harness.components.norm import PreNorm
from harness.components.position import ALiBi, NoPE, RoPE, angles, rotate
from harness.components.residual import NoResidual
from harness.module import TransformerModule
from harness.transformer import Block
from tasks import Copy

Patch = Callable[[TransformerModule, float], None]


@dataclass(frozen=True)
class Fault:
    """A mistake that can be made in a model.

    Attributes:
        patch: makes it in a module, as badly as a number says.
        named: the probe that should be the first to alarm.
        model: what it is made in.
        strengths: mild, severe.
    """

    patch: Patch
    named: str
    model: dict[str, Any] = field(default_factory=dict)
    strengths: tuple[float, ...] = (1.0,)

    @property
    def name(self) -> str:
        return self.patch.__name__

    def module(self, seed: int = 0) -> TransformerModule:
        return TransformerModule(RunSpec(model=ModelSpec(**self.model), task=Copy(), seed=seed))


def attentions(module: TransformerModule) -> list[nn.Module]:
    return [block.attention for block in module.model.modules() if isinstance(block, Block)]


def mixing(module: TransformerModule, mix: Callable[[Any, Heads], Tensor]) -> None:
    """Have every attention sublayer mix by another function, given its own one and the heads."""
    for attention in attentions(module):
        own = attention.pattern.mix
        attention.pattern.mix = lambda heads, own=own: mix(own, heads)


def _explicit(heads: Heads, mask: Callable[[Tensor, Tensor], Tensor], after: bool = False) -> Tensor:
    """Attention written out, with a mask of its own: a function of logits and of what is hidden."""
    each = heads.query.shape[1] // heads.key.shape[1]
    key, value = heads.key.repeat_interleave(each, 1), heads.value.repeat_interleave(each, 1)
    logits = heads.query @ key.mT
    if (bias := heads.bias()) is not None:
        logits = logits + bias
    ahead = heads.numbers[None, :] > heads.at[:, None]
    weights = mask(logits.softmax(-1), ahead) if after else mask(logits, ahead).softmax(-1)
    return weights @ value


def diverged(module: TransformerModule, strength: float) -> None:
    module.model.blocks[0].feedforward.get_parameter("0.weight").data[0, 0] = float("nan")


def no_mask(module: TransformerModule, strength: float) -> None:
    mixing(module, lambda own, heads: own(replace(heads, causal=False)))


def mask_of_zeros(module: TransformerModule, strength: float) -> None:
    mixing(module, lambda own, heads: _explicit(heads, lambda logits, ahead: logits.masked_fill(ahead, 0.0)))


def mask_after_softmax(module: TransformerModule, strength: float) -> None:
    hide = lambda weights, ahead: weights.masked_fill(ahead, 0.0)  # noqa: E731
    mixing(module, lambda own, heads: _explicit(heads, hide, after=True))


def mask_too_weak(module: TransformerModule, strength: float) -> None:
    mixing(module, lambda own, heads: _explicit(heads, lambda logits, ahead: logits - strength * ahead))


def mask_one_off(module: TransformerModule, strength: float) -> None:
    late = lambda logits, ahead: logits.masked_fill(ahead.triu(1 + round(strength)), float("-inf"))  # noqa: E731
    mixing(module, lambda own, heads: _explicit(heads, late))


def mask_upside_down(module: TransformerModule, strength: float) -> None:
    past = lambda logits, ahead: logits.masked_fill(ahead.mT, float("-inf"))  # noqa: E731
    mixing(module, lambda own, heads: _explicit(heads, past) if heads.whole else own(heads))


def mask_in_evaluation_only(module: TransformerModule, strength: float) -> None:
    mixing(module, lambda own, heads: own(replace(heads, causal=heads.causal and not module.model.training)))


class Scaled(torch.autograd.Function):
    """The same, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None


def gradient_scaled(module: TransformerModule, strength: float) -> None:
    """Of the first feed-forward sublayer, in the backward pass alone."""
    module.model.blocks[0].feedforward.register_forward_hook(lambda part, args, output: Scaled.apply(output, strength))


def gradient_hooked(module: TransformerModule, strength: float) -> None:
    """A hook on a block that changes what goes back through it."""
    module.model.blocks[0].register_full_backward_hook(
        lambda part, before, after: tuple(g if g is None else strength * g for g in before)
    )


def rows_without_gradient(module: TransformerModule, strength: float) -> None:
    """The embeddings of some symbols."""

    def cut(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, torch.arange(3, 3 + round(strength)), 0.0)

    module.model.embedding.weight.register_hook(cut)


def residual_detached(module: TransformerModule, strength: float) -> None:
    """x.detach() + f(x), in the first block: only the sublayer hands gradients back."""
    step = module.model.blocks[0].attention_step
    own = step.leave
    step.leave = lambda x, y, real: own(x.detach(), y, real)


def residual_weighed(module: TransformerModule, strength: float) -> None:
    """strength · x + f(x), in the first block."""
    step = module.model.blocks[0].feedforward_step
    own = step.leave
    step.leave = lambda x, y, real: own(strength * x, y, real)


def residual_uninvited(module: TransformerModule, strength: float) -> None:
    """x + f(x) where f(x) is declared."""
    for block in module.model.blocks:
        for step in (block.attention_step, block.feedforward_step):
            step.leave = lambda x, y, real, own=step.leave: own(x, y + x, real)


def padding_over_heads(module: TransformerModule, strength: float) -> None:
    """Marks of sequences (B, T) that are laid over heads: silent where there are as many sequences as heads."""

    def wrong(own: Any, heads: Heads) -> Tensor:
        if heads.real is None:
            return own(heads)
        hidden = lambda logits, ahead: logits.masked_fill(~heads.real[None, :, None], float("-inf"))  # noqa: E731
        return _explicit(heads, hidden)

    mixing(module, wrong)


def window_one_off(module: TransformerModule, strength: float) -> None:
    for attention in attentions(module):
        attention.pattern.window -= round(strength)


def heads_merged_wrongly(module: TransformerModule, strength: float) -> None:
    def wrong(own: Any, heads: Heads) -> Tensor:
        mixed = own(heads)
        batch, count, length, width = mixed.shape
        return mixed.reshape(batch, length, count, width).transpose(1, 2)

    mixing(module, wrong)


def groups_interleaved(module: TransformerModule, strength: float) -> None:
    def wrong(own: Any, heads: Heads) -> Tensor:
        each = heads.query.shape[1] // heads.key.shape[1]
        return own(replace(heads, key=heads.key.repeat(1, each, 1, 1), value=heads.value.repeat(1, each, 1, 1)))

    mixing(module, wrong)


def another_scale(module: TransformerModule, strength: float) -> None:
    for attention in attentions(module):
        attention.scale.factor *= strength


def scaled_again_in_the_kernel(module: TransformerModule, strength: float) -> None:
    mixing(module, lambda own, heads: own(replace(heads, query=heads.query * heads.query.shape[-1] ** -0.5)))


def keys_scaled(module: TransformerModule, strength: float) -> None:
    mixing(module, lambda own, heads: own(replace(heads, key=heads.key * strength)))


def positions_missing(module: TransformerModule, strength: float) -> None:
    encoding = module.model.position
    encoding.add = lambda embeddings, positions: embeddings
    own = encoding.relation
    encoding.relation = lambda queries, keys, **how: replace(
        own(queries, keys, **how), encode=lambda q, k: (q, k), bias=None
    )


def positions_doubled(module: TransformerModule, strength: float) -> None:
    encoding = module.model.position
    add, relation = encoding.add, encoding.relation
    encoding.add = lambda embeddings, positions: add(add(embeddings, positions), positions)

    def twice(queries: Tensor, keys: Tensor, **how: Any) -> Any:
        once = relation(queries, keys, **how)
        return replace(once, encode=lambda q, k: once.encode(*once.encode(q, k)))

    encoding.relation = twice


def positions_uninvited(module: TransformerModule, strength: float) -> None:
    table = torch.randn(512, module.spec.model.d_model, generator=torch.Generator().manual_seed(0))
    module.model.position.add = lambda embeddings, positions: embeddings + strength * table[positions]


def tables_in_half_precision(module: TransformerModule, strength: float) -> None:
    def rough(queries: Tensor, keys: Tensor, **how: Any) -> Any:
        once = relation(queries, keys, **how)
        angle = (queries.bfloat16()[:, None] * encoding.test_frequency.bfloat16()).float()
        turns = torch.polar(torch.ones_like(angle), angle)
        return replace(once, encode=lambda q, k: (rotate(q, turns), rotate(k, turns)))

    encoding = module.model.position
    relation = encoding.relation
    encoding.relation = rough


def another_base(module: TransformerModule, strength: float) -> None:
    encoding = module.model.position
    places = torch.arange(len(encoding.test_frequency)) / len(encoding.test_frequency)
    for frequency in (encoding.train_frequency, encoding.test_frequency):
        frequency.copy_((10_000.0 * strength) ** -places)


def absolute_beside_relative(module: TransformerModule, strength: float) -> None:
    module.model.position.add = lambda embeddings, positions: (
        embeddings + strength * torch.sin(angles(positions, torch.linspace(0.01, 1, embeddings.shape[-1])))
    )


def embeddings_unscaled(module: TransformerModule, strength: float) -> None:
    module.model.embedding_factor = 1.0


def softmax_in_half_precision(module: TransformerModule, strength: float) -> None:
    low = torch.float16 if strength == 1 else torch.bfloat16
    hide = lambda logits, ahead: logits.to(low).masked_fill(ahead, float("-inf"))  # noqa: E731

    def rough(own: Any, heads: Heads) -> Tensor:
        return _explicit(replace(heads, value=heads.value.to(low)), hide).float()

    mixing(module, rough)


def table_stored(module: TransformerModule, strength: float) -> None:
    def stored(own: Any, heads: Heads) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return own(heads)

    mixing(module, stored)


def cache_counts_anew(module: TransformerModule, strength: float) -> None:
    own = module.model.position.positions
    module.model.position.positions = lambda length, device: own(length, device).clamp(max=round(12 / strength))


def cache_forgets(module: TransformerModule, strength: float) -> None:
    for attention in attentions(module):
        attention.cache = lambda capacity, window=attention.pattern.window: WindowCache(window - round(strength), 0)


def cache_never_forgets(module: TransformerModule, strength: float) -> None:
    for attention in attentions(module):
        attention.cache = FullCache


def cache_of_all_heads(module: TransformerModule, strength: float) -> None:
    for attention in attentions(module):
        each, own = attention.num_heads // attention.groups, attention.keys_and_values
        attention.keys_and_values = lambda x, own=own, each=each: tuple(y.repeat_interleave(each, 1) for y in own(x))


def cache_not_used(module: TransformerModule, strength: float) -> None:
    """Every new token computes the whole sequence again."""
    own = module.model.outputs

    def anew(tokens: Tensor, *rest: Any, cache: Any = None, **how: Any) -> Any:
        if cache is None:
            return own(tokens, *rest, **how)
        cache.tokens = torch.cat([getattr(cache, "tokens", tokens[:, :0]), tokens], 1)
        found = own(cache.tokens, *rest, **how)
        found.logits = found.logits[:, -tokens.shape[1] :]
        return found

    module.model.outputs = anew


def dropout_alive(module: TransformerModule, strength: float) -> None:
    for block in module.model.modules():
        if isinstance(block, Block):
            block.attention_step.dropout.forward = lambda x: functional.dropout(x, 0.05 * strength, training=True)


def dropout_in_training(module: TransformerModule, strength: float) -> None:
    for block in module.model.blocks:
        block.feedforward.register_forward_hook(
            lambda part, inputs, output: functional.dropout(output, strength, training=part.training)
        )


def dropout_asleep(module: TransformerModule, strength: float) -> None:
    for part in module.model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def balance_left_out(module: TransformerModule, strength: float) -> None:
    outputs = module.model.outputs

    def weaker(*args: Any, **kwargs: Any) -> Any:
        found = outputs(*args, **kwargs)
        found.routing = [routing._replace(loss=strength * routing.loss) for routing in found.routing]
        return found

    module.model.outputs = weaker


def softmax_twice(module: TransformerModule, strength: float) -> None:
    for experts in module.model.experts():
        own = experts._routing

        def routing(logits: Tensor, probabilities: Tensor, *rest: Any, own: Any = own) -> Any:
            for _ in range(round(strength)):
                probabilities = probabilities.softmax(-1)
            return own(logits, probabilities, *rest)

        experts._routing = routing


def drawn_too_wide(module: TransformerModule, strength: float) -> None:
    for attention in attentions(module):
        attention.query.weight.data.mul_(strength)
        attention.key.weight.data.mul_(strength)


def gain_left_out(module: TransformerModule, strength: float) -> None:
    layers = module.spec.model.num_layers
    for attention in attentions(module):
        attention.output.weight.data.mul_((2 * layers) ** 0.5)


def biases_drawn(module: TransformerModule, strength: float) -> None:
    for name, parameter in module.model.named_parameters():
        if name.endswith("0.bias"):
            parameter.data.normal_(std=0.02 * strength)


def head_too_wide(module: TransformerModule, strength: float) -> None:
    module.model.head.weight.data.mul_(strength)


def logits_multiplied(module: TransformerModule, strength: float) -> None:
    own = module.model.head.forward
    module.model.head.forward = lambda x: strength * own(x)


def tied_embedding_too_wide(module: TransformerModule, strength: float) -> None:
    module.model.embedding.weight.data.mul_(strength)


def targets_shifted(module: TransformerModule, strength: float) -> None:
    own = module.batch
    places = round(strength)

    def shifted(step: int) -> Any:
        batch = own(step)
        return replace(batch, targets=functional.pad(batch.targets[:, places:], (0, places), value=-100))

    module.batch = shifted


def answer_leaked(module: TransformerModule, strength: float) -> None:
    own = module.batch

    def leaked(step: int) -> Any:
        batch = own(step)
        return replace(batch, inputs=torch.where(batch.targets >= 0, batch.targets, batch.inputs))

    module.batch = leaked


def frozen(module: TransformerModule, strength: float) -> None:
    module.model.blocks[0].attention.query.weight.requires_grad_(False)


def left_out_of_the_optimiser(module: TransformerModule, strength: float) -> None:
    own = module.configure_optimizers

    def fewer() -> Any:
        found = own()
        found["optimizer"].param_groups[0]["params"] = found["optimizer"].param_groups[0]["params"][round(strength) :]
        return found

    module.configure_optimizers = fewer


def cut_off(module: TransformerModule, strength: float) -> None:
    """A sublayer whose result is detached."""
    for block in module.model.blocks[: round(strength)]:
        own = block.feedforward.forward
        block.feedforward.forward = lambda x, own=own: own(x).detach()


def tie_broken(module: TransformerModule, strength: float) -> None:
    module.model.head = nn.Linear(module.spec.model.d_model, module.spec.task.vocab_size, bias=False)
    module.model.head.weight.data.copy_(module.model.embedding.weight.data)


def padding_seen(module: TransformerModule, strength: float) -> None:
    own = module.model.read
    module.model.read = lambda x, reading, *rest, **how: own(x, replace(reading, real=None), *rest, **how)


def padding_inverted(module: TransformerModule, strength: float) -> None:
    own = module.model.read

    def inverted(x: Tensor, reading: Any, *rest: Any, **how: Any) -> Any:
        real = reading.real if reading.real is None else ~reading.real
        return own(x, replace(reading, real=real), *rest, **how)

    module.model.read = inverted


def norm_over_the_batch(module: TransformerModule, strength: float) -> None:
    for block in module.model.blocks:
        own = block.feedforward.forward
        block.feedforward.forward = lambda x, own=own: own(x - 0.1 * strength * x.mean((0, 1), keepdim=True))


def norm_over_the_sequence(module: TransformerModule, strength: float) -> None:
    """Tokens ahead are seen, though attention hides them."""
    for block in module.model.blocks:
        own = block.feedforward.forward
        block.feedforward.forward = lambda x, own=own: own(x - 0.1 * strength * x.mean(1, keepdim=True))


def capacity_over_the_batch(module: TransformerModule, strength: float) -> None:
    def greedy(self: Any, chosen: Tensor, asked: Tensor) -> Tensor:
        one_hot = functional.one_hot(chosen, self.spec.num_experts) * asked[..., None]
        rank = one_hot.flatten(0, 2).cumsum(0).view_as(one_hot)
        places = self.spec.capacity * chosen.numel() / self.spec.num_experts / strength
        return (rank * one_hot).sum(-1) <= places

    for experts in module.model.experts():
        experts._within_capacity = types.MethodType(greedy, experts)


plain: dict[str, Any] = {"position": NoPE()}
rotary: dict[str, Any] = {"position": RoPE()}
tied: dict[str, Any] = {"output_head": Tied(), "init": Initialisation(embedding=Normal(deviation=0.125))}
encoder: dict[str, Any] = {"architecture": EncoderOnly()}

FAULTS = (
    Fault(diverged, "finite"),
    *(
        Fault(patch, "causal_leak", model)
        for patch in (no_mask, mask_of_zeros, mask_after_softmax)
        for model in ({}, {"position": ALiBi()})
    ),
    Fault(no_mask, "causal_leak", {"attention": GroupedQuery()}),
    Fault(no_mask, "causal_leak", {"attention": Latent()}),
    Fault(mask_too_weak, "causal_leak", strengths=(8.0, 2.0)),
    Fault(mask_too_weak, "mask_strength", strengths=(200.0, 60.0)),
    Fault(mask_one_off, "causal_leak", strengths=(1.0, 2.0)),
    Fault(mask_upside_down, "causal_leak"),
    Fault(mask_in_evaluation_only, "causal_leak"),
    Fault(padding_over_heads, "pad_invariance", encoder),
    Fault(window_one_off, "visibility", {"attention": SlidingWindow(window=6)}, strengths=(1.0, 3.0)),
    Fault(heads_merged_wrongly, "head_isolation"),
    Fault(heads_merged_wrongly, "head_isolation", encoder),
    Fault(heads_merged_wrongly, "head_isolation", {"attention": SlidingWindow(window=4)}),
    Fault(groups_interleaved, "head_isolation", {"attention": GroupedQuery()}),
    Fault(another_scale, "scale_fit", strengths=(1.1, 4.0)),
    Fault(another_scale, "scale_fit", {"attention": Linear()}, strengths=(1.1, 4.0)),
    Fault(another_scale, "scale_fit", {"attention": Latent(), "position": RoPE()}, strengths=(0.5, 0.2)),
    Fault(another_scale, "scale_fit", {"attention": SlidingWindow(window=4), "position": RoPE()}, strengths=(0.9, 4.0)),
    Fault(scaled_again_in_the_kernel, "scale_fit"),
    Fault(keys_scaled, "scale_fit", rotary, strengths=(1.1, 3.0)),
    Fault(positions_missing, "position_effect"),
    Fault(positions_missing, "position_effect", rotary),
    Fault(positions_missing, "position_effect", {"position": ALiBi()}),
    Fault(positions_doubled, "code_fit"),
    Fault(positions_doubled, "rotation_fit", rotary),
    Fault(positions_doubled, "rotation_fit", {"position": RoPE(), "attention": Latent()}),
    Fault(positions_uninvited, "position_uninvited", plain, strengths=(0.05, 1.0)),
    Fault(positions_uninvited, "position_uninvited", {"position": NoPE(), "architecture": EncoderOnly()}),
    Fault(tables_in_half_precision, "rotation_fit", rotary),
    Fault(another_base, "rotation_fit", rotary, strengths=(1.5, 50.0)),
    Fault(absolute_beside_relative, "position_shift", rotary, strengths=(0.1, 1.0)),
    Fault(embeddings_unscaled, "embedding_factor", {"embedding_scale": SqrtWidth()}),
    Fault(softmax_in_half_precision, "kernel_parity", strengths=(1.0, 2.0)),
    Fault(table_stored, "flash_off"),
    Fault(cache_forgets, "cache_parity", {"attention": SlidingWindow(window=6)}, strengths=(1.0, 4.0)),
    Fault(cache_not_used, "decode_work"),
    Fault(cache_not_used, "decode_work", {"attention": GroupedQuery(), "position": RoPE()}),
    Fault(cache_never_forgets, "cache_bytes", {"attention": SlidingWindow(window=4)}),
    Fault(cache_of_all_heads, "cache_bytes", {"attention": MultiQuery()}),
    Fault(dropout_alive, "eval_determinism", strengths=(1.0, 6.0)),
    Fault(dropout_in_training, "mode_fit", strengths=(0.01, 0.3)),
    Fault(dropout_in_training, "mode_fit", {"attention": Linear(), "position": RoPE()}, strengths=(0.1,)),
    Fault(dropout_asleep, "mode_fit", {"residual_dropout": 0.1}),
    Fault(balance_left_out, "moe_aux", {"feedforward": MoE()}, strengths=(0.5, 0.0)),
    Fault(softmax_twice, "moe_aux", {"feedforward": MoE()}, strengths=(1.0, 2.0)),
    Fault(drawn_too_wide, "init_std", strengths=(1.3, 5.0)),
    Fault(gain_left_out, "init_std", {"init": Initialisation(residual_gain=DepthGain())}),
    Fault(biases_drawn, "init_std", strengths=(1.0, 10.0)),
    Fault(head_too_wide, "init_std", strengths=(1.5, 5.0)),
    Fault(tied_embedding_too_wide, "init_std", tied, strengths=(2.0, 8.0)),
    Fault(logits_multiplied, "init_loss", strengths=(3.0, 10.0)),
    Fault(targets_shifted, "target_alignment", strengths=(1.0, 2.0)),
    Fault(answer_leaked, "target_alignment"),
    Fault(frozen, "wiring"),
    Fault(left_out_of_the_optimiser, "wiring", strengths=(1.0, 4.0)),
    Fault(cut_off, "wiring", strengths=(1.0, 2.0)),
    Fault(tie_broken, "wiring", tied),
    Fault(gradient_scaled, "backward_fit", strengths=(0.5, 10.0)),
    Fault(gradient_scaled, "backward_fit", {"norm_placement": PreNorm()}, strengths=(0.5, 10.0)),
    Fault(gradient_hooked, "backward_fit", strengths=(0.5, -1.0)),
    Fault(rows_without_gradient, "backward_fit", strengths=(2.0, 5.0)),
    Fault(residual_detached, "backward_fit"),
    Fault(residual_detached, "backward_fit", {"norm_placement": PreNorm(), "position": RoPE()}),
    Fault(residual_weighed, "residual_fit", strengths=(0.0,)),
    Fault(residual_weighed, "residual_fit", {"norm_placement": PreNorm()}, strengths=(0.9, 0.0)),
    Fault(residual_weighed, "residual_fit", {"norm_placement": PreNorm(), "feedforward": MoE()}, strengths=(0.9, 0.0)),
    Fault(residual_uninvited, "residual_fit", {"residual": NoResidual()}),
    Fault(padding_seen, "pad_invariance", encoder),
    Fault(padding_inverted, "pad_invariance", encoder),
    Fault(norm_over_the_batch, "batch_leak", strengths=(0.1, 1.0)),
    Fault(norm_over_the_sequence, "causal_leak", strengths=(0.1, 1.0)),
    Fault(capacity_over_the_batch, "batch_leak", {"feedforward": MoE(capacity=1.0)}, strengths=(1.0, 2.0)),
)  # fmt: skip
