"""The position-wise feed-forward sublayer: one network for all tokens, or a choice of experts for each."""

from abc import abstractmethod
from typing import Annotated, NamedTuple

import torch
from annotated_types import Ge, Lt
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from harness.components.linear import ResidualOutput, without_autocast
from harness.schema import Changes, Level, UserError

ROUNDING = 1e-4  # what a product of fractions may exceed a whole number by


class FeedForward(Level):
    """Base of the feed-forward axis."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module:
        """A module that maps `(B, T, d_model)` to the same shape, each position by itself."""

    def check(self) -> None:
        """Raise `UserError` where the level's fields do not fit together."""


class ReLU(FeedForward):
    """W₂ · max(0, W₁x + b₁) + b₂ (Vaswani et al. 2017, arXiv:1706.03762); 2 · d_model · d_ff weights."""

    d_ff: Annotated[int, Changes("parameters"), Ge(1)] = 256

    def build(self, d_model: int) -> nn.Module:
        """Two linear maps around a ReLU."""
        return nn.Sequential(nn.Linear(d_model, self.d_ff), nn.ReLU(), ResidualOutput(self.d_ff, d_model))


class GELU(FeedForward):
    """W₂ · GELU(W₁x + b₁) + b₂, the exact GELU x·Φ(x) (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

    d_ff: Annotated[int, Changes("parameters"), Ge(1)] = 256

    def build(self, d_model: int) -> nn.Module:
        """Two linear maps around a GELU."""
        return nn.Sequential(nn.Linear(d_model, self.d_ff), nn.GELU(), ResidualOutput(self.d_ff, d_model))


class SwiGLU(FeedForward):
    """W₂ · (SiLU(W₁x) ⊙ W₃x), no biases (Shazeer 2020, arXiv:2002.05202); 3 · d_model · d_ff weights."""

    d_ff: Annotated[int, Changes("parameters"), Ge(1)] = 171

    @classmethod
    def matching(cls, d_ff: int) -> "SwiGLU":
        """The one with as many weights as a feed-forward of two matrices and `d_ff`: ⅔ of it, rounded."""
        return cls(d_ff=max(1, round(2 * d_ff / 3)))

    def build(self, d_model: int) -> nn.Module:
        """A gated pair of maps and one back."""
        return GatedFeedForward(d_model, self.d_ff)


class GatedFeedForward(nn.Module):
    """SwiGLU's module."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = ResidualOutput(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, T, d_model)` to the same shape."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class MoE(FeedForward):
    """Σ g_i · expert_i(x) over the `top_k` experts of the highest router probability p = softmax(W_r x), plus
    `num_shared` experts that see every token (Shazeer et al. 2017, arXiv:1701.06538; Dai et al. 2024,
    arXiv:2401.06066).

    g = p for top-1 (Switch), p renormalised over the chosen for top-k. Training adds balance · E Σ f_i p_i (f_i the
    share of choices, p_i the mean probability; 1 when balanced; Fedus et al. 2021, arXiv:2101.03961) and z_loss ·
    mean (logsumexp of the router's logits)² (Zoph et al. 2022, arXiv:2202.08906), each the mean over layers. `jitter`
    ε multiplies the router's input by U(1 − ε, 1 + ε) in training. `bias_rate` u adds a bias to the choice, not to g,
    which moves by u · sign(mean load − load) every step (Wang et al. 2024, arXiv:2408.15664).

    `capacity` c lets an expert take ⌈c · top_k · T / E⌉ choices of a sequence in training, earlier tokens first, so
    that what a later token or another sequence holds does not matter, only T does; evaluation drops nothing.
    """

    expert: Annotated[FeedForward, Changes("outputs")] = ReLU()
    num_experts: Annotated[int, Changes("parameters"), Ge(2)] = 4
    top_k: Annotated[int, Changes("outputs"), Ge(1)] = 2
    num_shared: Annotated[int, Changes("parameters"), Ge(0)] = 0
    capacity: Annotated[float | None, Changes("outputs"), Field(gt=0)] = None
    balance: Annotated[float, Changes("loss"), Ge(0)] = 0.01
    z_loss: Annotated[float, Changes("loss"), Ge(0)] = 0.0
    jitter: Annotated[float, Changes("outputs"), Ge(0), Lt(1)] = 0.0
    bias_rate: Annotated[float, Changes("updates"), Ge(0)] = 0.0

    def check(self) -> None:
        """There are as many experts as are asked for, and an expert is dense."""
        if self.top_k >= self.num_experts:
            raise UserError(
                f"feedforward.top_k = {self.top_k} leaves no choice among num_experts = {self.num_experts}; lower top_k"
            )
        if isinstance(self.expert, MoE):
            raise UserError("feedforward.expert = MoE: experts are dense; choose ReLU(), GELU() or SwiGLU()")
        self.expert.check()

    def build(self, d_model: int) -> nn.Module:
        """A router and its experts."""
        return MixtureOfExperts(self, d_model)


class Routing(NamedTuple):
    """What a router did in one forward pass over the real tokens.

    Attributes:
        loss: the auxiliary losses times their coefficients, a scalar.
        balance: E Σ f_i p_i, 1 when balanced.
        load: `(E,)` share of the choices that fell on each expert; sums to 1.
        entropy: of the router's probabilities, in nats, mean over tokens.
        dropped: share of choices that found their expert full.
    """

    loss: Tensor
    balance: Tensor
    load: Tensor
    entropy: Tensor
    dropped: Tensor

    @property
    def max_violation(self) -> Tensor:
        """MaxVio, how far the fullest expert lies above the mean: max load / mean load − 1."""
        return self.load.max() * len(self.load) - 1


class Routed(NamedTuple):
    """What a mixture of experts gives: `(B, T, d_model)`, and what its router did."""

    output: Tensor
    routing: Routing


class MixtureOfExperts(nn.Module):
    """MoE's module. Only the experts that were chosen compute."""

    def __init__(self, spec: MoE, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.router = nn.Linear(d_model, spec.num_experts, bias=False)
        self.experts = nn.ModuleList(spec.expert.build(d_model) for _ in range(spec.num_experts))
        self.shared = nn.ModuleList(spec.expert.build(d_model) for _ in range(spec.num_shared))
        self.register_buffer("choice_bias", torch.zeros(spec.num_experts))
        self.choice_bias: Tensor

    def forward(self, x: Tensor, real: Tensor | None = None) -> Routed:
        """`(B, T, d_model)` to the same shape; padding (`real` `(B, T)` False) is sent to no expert."""
        logits = self._logits(x)
        probabilities = logits.softmax(-1)
        chosen = (probabilities + self.choice_bias).topk(self.spec.top_k, dim=-1).indices
        gates = probabilities.gather(-1, chosen)
        if self.spec.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        asked = torch.ones_like(chosen, dtype=torch.bool) if real is None else real[..., None].expand_as(chosen)
        kept = asked & self._within_capacity(chosen, asked)
        output = self._experts(x, chosen, gates, kept)
        for expert in self.shared:
            output = output + expert(x)
        return Routed(output, self._routing(logits, probabilities, chosen, asked, kept))

    def _logits(self, x: Tensor) -> Tensor:
        """The router's logits `(B, T, E)`, in the type of its weights, whatever autocast says."""
        if self.training and self.spec.jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.spec.jitter, 1 + self.spec.jitter)
        with without_autocast(x):
            logits: Tensor = self.router(x.to(self.router.weight.dtype))
            return logits

    def _within_capacity(self, chosen: Tensor, asked: Tensor) -> Tensor:
        """Which choices `(B, T, k)` find a place, earlier tokens first."""
        if self.spec.capacity is None or not self.training:
            return torch.ones_like(asked)
        lengths = asked[..., 0].sum(1)  # of the real tokens, so that other sequences' lengths do not matter
        share = self.spec.capacity * self.spec.top_k / self.spec.num_experts
        places = (lengths * share - ROUNDING).ceil()[:, None, None]
        one_hot = functional.one_hot(chosen, self.spec.num_experts) * asked[..., None]
        rank = one_hot.flatten(1, 2).cumsum(1).view_as(one_hot)  # how many of the sequence chose it up to here
        return (rank * one_hot).sum(-1) <= places

    def _experts(self, x: Tensor, chosen: Tensor, gates: Tensor, kept: Tensor) -> Tensor:
        """Each expert on the tokens that chose it, weighed and summed."""
        tokens, flat = x.flatten(0, 1), chosen.flatten()
        if x.is_meta:  # counting operations: any split into top_k · tokens gives the same sum
            order, counts = torch.arange(flat.numel(), device=x.device), _even(flat.numel(), self.spec.num_experts)
        else:
            flat = torch.where(kept.flatten(), flat, self.spec.num_experts)  # what is dropped comes last
            order = flat.argsort(stable=True)
            counts = flat.bincount(minlength=self.spec.num_experts + 1)[:-1].tolist()
        weights = gates.flatten()
        slots = order[: sum(counts)]
        rows = slots // self.spec.top_k
        chunks = zip(self.experts, tokens[rows].split(counts), strict=True)
        found = torch.cat([expert(chunk) for expert, chunk in chunks if len(chunk)] or [tokens[:0]])
        weighed = (weights[slots, None] * found).to(tokens.dtype)
        return torch.zeros_like(tokens).index_add(0, rows, weighed).view_as(x)

    def _routing(self, logits: Tensor, probabilities: Tensor, chosen: Tensor, asked: Tensor, kept: Tensor) -> Routing:
        real = asked[..., :1].float()
        tokens = real.sum()
        one_hot = functional.one_hot(chosen, self.spec.num_experts) * asked[..., None]
        load = one_hot.sum((0, 1, 2)) / (tokens * self.spec.top_k)
        mean = (probabilities * real).sum((0, 1)) / tokens
        balance = self.spec.num_experts * (load * mean).sum()
        z = ((logits.logsumexp(-1, keepdim=True).square() * real).sum()) / tokens
        entropy = -((probabilities * probabilities.clamp(min=1e-9).log()).sum(-1, keepdim=True) * real).sum() / tokens
        dropped = 1 - (kept & asked).sum() / (tokens * self.spec.top_k)
        loss = self.spec.balance * balance + self.spec.z_loss * z
        return Routing(loss, balance.detach(), load, entropy.detach(), dropped)

    @torch.no_grad()
    def rebalance(self, load: Tensor) -> None:
        """Move the bias of the choice towards experts with less than the mean load `(E,)`."""
        if self.spec.bias_rate:
            self.choice_bias += self.spec.bias_rate * (1 / self.spec.num_experts - load).sign()


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (index < total % parts) for index in range(parts)]
