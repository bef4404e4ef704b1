"""Models that were built elsewhere: healthy ones raise no alarm, faults in them are named with their true cause."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.diagnostics import (
    AttentionSite,
    Measured,
    NotApplicable,
    Positions,
    Subject,
    examine,
)
from harness.diagnostics.heads import head_isolation, scale_fit
from harness.diagnostics.masking import visibility
from harness.diagnostics.position import position_shift
from harness.diagnostics.visibility import unshared
from harness.diagnostics.wiring import wiring
from harness.schema import UserError
from tasks.task import Batch

WORDS, WIDTH, HEADS, LENGTH = 50, 32, 4, 12
SCALE = (WIDTH // HEADS) ** -0.5
FREQUENCIES = 10_000.0 ** -(torch.arange(0, WIDTH // HEADS, 2).double() / (WIDTH // HEADS))
HIDDEN = -math.inf


def rotated(x: Tensor) -> Tensor:
    """RoPE that pairs one half of the dimensions with the other."""
    angle = torch.arange(x.shape[2])[:, None] * FREQUENCIES
    cos, sin = (torch.cat([part, part], -1).float() for part in (angle.cos(), angle.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (scale * (q @ k.mT) + mask).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def added_within(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Scaled queries, and a product that adds the mask, as nn.MultiheadAttention does."""
    flat = mask.expand(len(q), q.shape[1], -1, -1).flatten(0, 1)
    weights = torch.baddbmm(flat, scale * q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).unflatten(0, q.shape[:2])


def flat(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Heads and sequences are one dimension."""
    logits = scale * torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT)
    weights = (logits + mask.expand(len(q), q.shape[1], -1, -1).flatten(0, 1)).softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).unflatten(0, q.shape[:2])


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Queries of two heads and one key: five dimensions."""
    pairs, k, v = q.unflatten(1, (-1, 2)), k[:, ::2], v[:, ::2]
    logits = scale * torch.einsum("bgrtd,bgsd->bgrts", pairs, k) + mask.unflatten(-3, (-1, min(2, mask.shape[-3])))
    return torch.einsum("bgrts,bgsd->bgrtd", logits.softmax(-1), v).flatten(1, 2)


def after_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (scale * (q @ k.mT)).softmax(-1).masked_fill(mask < 0, 0.0) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (scale * (q @ k.mT) + mask).softmax(-2) @ v


def over_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (scale * (q @ k.mT) + mask).softmax(1) @ v


def in_half_precision(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return explicit(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask.bfloat16(), scale).float()


class Attention(nn.Module):
    """Causal attention; `groups` of keys and values are repeated for the heads before the kernel."""

    def __init__(self, kernel: Callable[..., Tensor] = explicit, groups: int = HEADS, **how: Any) -> None:
        super().__init__()
        self.kernel, self.groups, self.how = kernel, groups, how
        self.sizes = [WIDTH, WIDTH // HEADS * groups, WIDTH // HEADS * groups]
        if how.get("packed"):
            self.all = nn.Linear(WIDTH, sum(self.sizes))
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, size) for size in self.sizes)
        self.o = nn.Linear(WIDTH, WIDTH)
        if how.get("normed"):
            self.q_norm, self.k_norm = nn.LayerNorm(WIDTH // HEADS), nn.LayerNorm(WIDTH // HEADS)
        if how.get("narrow"):
            for parameter in self.q.parameters():
                parameter.data.mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        how, length = self.how, x.shape[1]
        made = self.all(x).split(self.sizes, -1) if how.get("packed") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)) for part in made)
        if how.get("normed"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if how.get("exchanged"):
            k, v = v, k
        if how.get("rotary"):
            q, k = rotated(q), k if how.get("queries_only") else rotated(k)
        k, v = (y.repeat_interleave(HEADS // self.groups, 1) for y in (k, v))
        ahead = torch.ones(length, length).triu(1 + how.get("late", 0))
        mask = torch.zeros(1, 1, length, length).masked_fill(ahead.bool(), how.get("hides", HIDDEN))
        if how.get("alibi"):
            far = torch.arange(length)[:, None] - torch.arange(length)
            mask = mask - far * 0.5 ** torch.arange(1, HEADS + 1)[:, None, None]
        mixed = self.kernel(q, k, v, mask[0, 0] if how.get("table") else mask, how.get("scale", SCALE))
        return self.o(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Attention sublayers on embeddings."""

    def __init__(self, *sublayers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(sublayers)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def model_of(*hows: dict[str, Any]) -> Model:
    torch.manual_seed(0)
    return Model(*(Attention(**how) for how in hows or ({},)))


def subject_of(model: nn.Module, sites: Sequence[AttentionSite] | None = None, **declared: Any) -> Subject:
    """What a stranger would say of a model."""
    tokens = torch.randint(0, WORDS, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    given: dict[str, Any] = {
        "batch": batch,
        "vocabulary": (0, WORDS),
        "sites": tuple(described(model) if sites is None else sites),
        "optimizer": lambda: torch.optim.AdamW(model.parameters()),
    }
    return Subject(model, batch, **given | declared)


def described(model: nn.Module) -> list[AttentionSite]:
    return [
        site(path, layer.groups, packed=bool(layer.how.get("packed")), normed=bool(layer.how.get("normed")))
        for path, layer in model.named_modules()
        if isinstance(layer, Attention)
    ]


def site(
    path: str, groups: int, *, packed: bool = False, normed: bool = False, feature_map: bool = False
) -> AttentionSite:
    names = ("all", "all", "all") if packed else ("q_norm", "k_norm", "v") if normed else ("q", "k", "v")
    query, key, value = (f"{path}.{name}" for name in names)
    return AttentionSite(
        path, HEADS, groups, query, key, value, output=f"{path}.o", scale=SCALE, feature_map=feature_map
    )


def positions_of(how: dict[str, Any]) -> Positions:
    rotary, alibi = how.get("rotary", False), how.get("alibi", False)
    return Positions(act=rotary or alibi, relative=rotary or alibi, frequencies=FREQUENCIES if rotary else None)


HEALTHY: dict[str, dict[str, Any]] = {
    "explicit": {},
    "fused": {"kernel": fused},
    "fused, a mask of two dimensions": {"kernel": fused, "table": True},
    "baddbmm": {"kernel": added_within, "alibi": True},
    "heads in the batch": {"kernel": flat, "alibi": True},
    "heads in the batch, halves rotated": {"kernel": flat, "rotary": True},
    "five dimensions": {"kernel": grouped, "groups": 2, "rotary": True},
    "keys repeated": {"groups": 2, "rotary": True},
    "keys repeated, fused": {"kernel": fused, "groups": 1},
    "halves rotated": {"rotary": True},
    "one projection": {"packed": True, "groups": 2},
    "−1e9": {"hides": -1e9},
    "normed before heads and tokens are exchanged": {"normed": True, "groups": 2, "rotary": True},
}


@pytest.mark.parametrize("how", HEALTHY.values(), ids=HEALTHY)
def test_nothing_alarms_in_a_healthy_model(how: dict[str, Any]) -> None:
    findings = examine(subject_of(model_of(how, how), positions=positions_of(how)))
    assert not [finding.document() for finding in findings if finding.alarms]
    looked = {finding.probe.name for finding in findings if finding.measured}
    assert {"scale_fit", "head_isolation", "visibility", "kernel_parity", "mask_strength"} <= looked
    assert ("rotation_fit" in looked) == how.get("rotary", False)


FAULTS: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "unscaled, baddbmm": ([{"kernel": added_within, "scale": 1.0}], "scale_fit", "not scaled at all"),
    "unscaled, five dimensions": ([{"kernel": grouped, "groups": 2, "scale": 1.0}], "scale_fit", "not scaled at all"),
    "unscaled, one projection": ([{"packed": True, "scale": 1.0}], "scale_fit", "not scaled at all"),
    "unscaled, keys repeated": ([{"groups": 2, "scale": 1.0}], "scale_fit", "not scaled at all"),
    "unscaled, normed": ([{"normed": True, "scale": 1.0}], "scale_fit", "not scaled at all"),
    "scale of the other sign": ([{"scale": -SCALE}], "scale_fit", "another factor"),
    "late in the second layer": ([{}, {"late": 1}], "causal_leak", "diagonal is off by one"),
    "weak, a mask of two dimensions": ([{"kernel": fused, "table": True, "hides": -9.0}], "causal_leak", "finite"),
    "−100, logits still small": ([{"hides": -100.0, "narrow": True}], "mask_strength", "finite number"),
    "mask after the softmax": ([{"kernel": after_softmax}], "causal_leak", "after the softmax"),
    "softmax over queries": ([{"kernel": over_queries}], "causal_leak", "another dimension"),
    "softmax over heads": ([{"kernel": over_heads}], "finite", "another dimension"),
    "keys and values exchanged": ([{"exchanged": True}], "head_isolation", "exchanged"),
    "half precision": ([{"kernel": in_half_precision}], "kernel_parity", "half precision"),
    "only queries rotated": ([{"rotary": True, "queries_only": True}], "position_effect", "queries alone"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_first_with_its_cause(fault: tuple[list[dict[str, Any]], str, str]) -> None:
    hows, named, cause = fault
    first = next(each for each in examine(subject_of(model_of(*hows), positions=positions_of(hows[0]))) if each.alarms)
    assert (first.probe.name, cause in first.cause) == (named, True), first.document()


def test_keys_that_are_not_rotated_are_told_from_queries() -> None:
    how = {"rotary": True, "queries_only": True}
    findings = examine(subject_of(model_of(how), positions=positions_of(how)))
    assert "keys are not rotated" in [finding.cause for finding in findings if finding.alarms]


class LinearAttention(Attention):
    """φ(q)·φ(k) without a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        table = ((functional.elu(self.how["scale"] * q) + 1) @ (functional.elu(k) + 1).mT).tril()
        return self.o((table @ v / table.sum(-1, keepdim=True)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("scale", "ratio"), [(SCALE, 1.0), (1.0, 1 / SCALE)])
def test_the_scale_of_linear_attention_is_found(scale: float, ratio: float) -> None:
    model = Model(LinearAttention(scale=scale))
    found = scale_fit(subject_of(model, [site("layers.0", HEADS, feature_map=True)]))
    assert isinstance(found, Measured)
    assert found.value == pytest.approx(ratio, rel=0.01)


class Held:
    """Keys and values so far, which each call adds its own to."""

    def __init__(self) -> None:
        self.keys, self.values = (torch.zeros(1, HEADS, 0, WIDTH // HEADS) for _ in range(2))

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (
            torch.cat([old.expand(len(new), -1, -1, -1), new], 2) for old, new in ((self.keys, k), (self.values, v))
        )
        return self.keys, self.values


class Caching(Attention):
    """Reads on top of what a cache holds, as Hugging Face's do whenever they are called."""

    def forward(self, x: Tensor, cache: Held | None = None) -> Tensor:  # type: ignore[override]
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v)
        ahead = torch.ones(q.shape[2], k.shape[2]).triu(1 + k.shape[2] - q.shape[2])
        mask = torch.zeros_like(ahead).masked_fill(ahead.bool(), self.how.get("hides", HIDDEN))
        return self.o(explicit(q, k, v, mask, SCALE).transpose(1, 2).flatten(2))


class CachingModel(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, cache=Held())
        return self.head(x)


def test_a_cache_that_a_sublayer_fills_is_as_it_was_when_the_sublayer_is_called_again() -> None:
    torch.manual_seed(0)
    findings = examine(subject_of(CachingModel(Caching(), Caching())))
    assert not [finding.document() for finding in findings if finding.alarms]
    torch.manual_seed(0)
    first = next(each for each in examine(subject_of(CachingModel(Caching(), Caching(hides=0.0)))) if each.alarms)
    assert (first.probe.name, "sees every key" in first.cause) == ("causal_leak", True), first.document()


def test_arguments_that_cannot_be_copied_are_handed_on() -> None:
    made = torch.zeros(2, requires_grad=True) * 2
    assert all(unshared(thing) is thing for thing in (made, [made], (n for n in range(3)), nn.Linear(2, 2)))


def test_what_is_not_there_is_said() -> None:
    class Skips(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    subject = subject_of(Skips(Attention()), positions=Positions(act=True))
    assert isinstance(visibility(subject), NotApplicable)
    assert isinstance(head_isolation(subject), NotApplicable)
    rotary = model_of({"rotary": True})
    assert isinstance(position_shift(subject_of(rotary, positions=positions_of({"rotary": True}))), NotApplicable)
    assert isinstance(wiring(subject_of(rotary, batch=None)), NotApplicable)
    assert [finding.probe.name for finding in examine(subject, dear=True) if finding.alarms][:1] == ["wiring"]


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="two sequences of three tokens"):
        Subject(Model(), Batch(torch.zeros(1, 5), torch.zeros(1, 5)))


def test_gradients_that_were_there_stay() -> None:
    model = model_of()
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    subject = subject_of(model, optimizer=lambda: torch.optim.SGD(model.head.parameters(), lr=0.1))
    wiring(subject)
    assert all(p.grad is not None and p.grad.equal(old) for p, old in zip(model.parameters(), before, strict=True))


class Particular(Model):
    """It does not train."""

    def forward(self, tokens: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise LookupError("only to be read")
        return super().forward(tokens)


def test_a_probe_that_cannot_look_says_so_and_the_others_do() -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="could not look at the model: LookupError: only to be read"):
        findings = examine(subject_of(Particular(Attention())))
    failed = [each for each in findings if "only to be read" in str(each.found)]
    assert 0 < len(failed) < len([each for each in findings if each.measured])
    assert not [each.document() for each in findings if each.alarms]


def test_a_model_that_does_not_run_at_all_raises_what_it_raises() -> None:
    model = Model(Attention())
    model.head = nn.Linear(WIDTH + 1, WORDS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        examine(subject_of(model))


def by_token(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Tokens before heads, (b, t, h, s)."""
    logits = scale * torch.einsum("bhtd,bhsd->bths", q, k) + mask.transpose(1, 2)
    return torch.einsum("bths,bhsd->bhtd", logits.softmax(-1), v)


def heads_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(h, b, t, s)."""
    logits = scale * torch.einsum("bhtd,bhsd->hbts", q, k) + mask.transpose(0, 1)
    return torch.einsum("hbts,bhsd->bhtd", logits.softmax(-1), v)


def keys_by_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return ((scale * (k @ q.mT) + mask.mT).softmax(-2)).mT @ v


@pytest.mark.parametrize("kernel", [by_token, heads_first, keys_by_queries])
def test_attention_whose_products_stand_in_another_order_raises_no_alarm(kernel: Callable[..., Tensor]) -> None:
    findings = examine(subject_of(model_of({"kernel": kernel}, {"kernel": kernel})))
    assert not [finding.document() for finding in findings if finding.alarms]


@pytest.mark.parametrize("part", ["o", "q"])
def test_a_projection_that_is_drawn_as_zero_is_no_fault(part: str) -> None:
    model = model_of({}, {})
    for layer in model.layers:
        for p in layer.get_submodule(part).parameters():
            nn.init.zeros_(p)
    findings = examine(subject_of(model, positions=Positions(act=False)))
    wrong = [finding for finding in findings if finding.alarms and finding.probe.name != "wiring"]  # no gradient yet
    assert not [finding.document() for finding in wrong]


class OthersRead(Attention):
    """All heads read the first one's queries or keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.how["read"] == "queries":
            q = q[:, :1].expand_as(q)
        else:
            k = k[:, :1].expand_as(k)
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), HIDDEN).triu(1)
        return self.o(explicit(q, k, v, mask, SCALE).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("read", ["queries", "keys"])
def test_heads_that_read_another_one_s_queries_or_keys_are_named(read: str) -> None:
    torch.manual_seed(0)
    first = next(each for each in examine(subject_of(Model(OthersRead(read=read)))) if each.alarms)
    assert (first.probe.name, first.cause) == ("head_isolation", f"a head reads another one's {read}")


def test_a_loss_that_moves_targets_on_wants_them_where_they_are_read() -> None:
    def shifting(logits: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.targets[:, 1:].flatten())

    model = model_of({})
    sound = subject_of(model)
    assert sound.batch is not None
    labels = Batch(sound.batch.inputs, sound.batch.inputs)
    assert not [each for each in examine(subject_of(model, batch=labels, loss=shifting)) if each.alarms]
    said = {each.probe.name: each.cause for each in examine(subject_of(model, loss=shifting)) if each.alarms}
    assert "shifted twice" in said["target_alignment"]
    said = {each.probe.name: each.cause for each in examine(subject_of(model, batch=labels)) if each.alarms}
    assert "leaked" in said["target_alignment"]


def test_weights_may_be_declared_frozen() -> None:
    model = model_of({})
    model.embedding.weight.requires_grad_(False)
    assert [each.probe.name for each in examine(subject_of(model)) if each.alarms] == ["wiring"]
    assert not [each for each in examine(subject_of(model, frozen=("embedding.weight",))) if each.alarms]


def test_logits_are_found_by_their_name() -> None:
    class Named(Model):
        def forward(self, tokens: Tensor) -> Any:
            return {"loss": None, "logits": super().forward(tokens)}

    torch.manual_seed(0)
    assert not [each for each in examine(subject_of(Named(Attention()))) if each.alarms]
