"""Attention as it really ran: the operators that a forward pass comes to, a fused kernel or the two products and the
softmax of an explicit form, whoever wrote the model.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.components.kernel import FUSED
from harness.diagnostics.subject import Subject, kept, mode
from harness.seeding import seed_global


@dataclass(frozen=True)
class Attended:
    """One softmax(scale · QKᵀ + mask) V.

    Attributes:
        path: the innermost sublayer of the subject's sites in which it ran; empty outside of them.
        kernel: the operator's name; `explicit` for products and a softmax.
        query: `(N, H, T, d)` as the product took it; explicit forms that have no H dimension have it as 1.
        key: `(N, G, K, d)`.
        value: `(N, G, K, d_v)`.
        mask: added to the scaled logits, broadcasts to `(N, H, T, K)`; None: nothing. Hidden keys have −∞.
        scale: the factor on q·k.
        causal: whether the kernel itself hides keys ahead.
        output: `(N, H, T, d_v)`.
        weights: what an explicit form's values were multiplied with; None in a fused kernel.
    """

    path: str
    kernel: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    causal: bool
    output: Tensor
    weights: Tensor | None = None

    def logits(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """scale · QKᵀ + mask, `(N, H, T, K)`."""
        query = self.query.to(dtype)
        key = self.key.to(dtype).repeat_interleave(self.query.shape[1] // self.key.shape[1], dim=1)
        found = self.scale * (query @ key.mT)
        if self.mask is not None:
            found = found + self.mask.to(dtype)
        if self.causal:
            ahead = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).triu(1)
            found = found.masked_fill(ahead, float("-inf"))
        return found

    def recomputed(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """softmax(logits) V in a type; zero for queries that see nothing."""
        value = self.value.to(dtype).repeat_interleave(self.query.shape[1] // self.value.shape[1], dim=1)
        return self.logits(dtype).softmax(-1).nan_to_num(nan=0.0) @ value


def attended(subject: Subject) -> list[Attended]:
    """What ran in a forward pass over the probe tokens, in evaluation mode."""
    with torch.no_grad(), mode(subject.model, training=False), kept(subject.model), _inside(subject) as where:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # torch's own encoder layer would be one operator
        try:
            seed_global(0, "diagnostics")
            with _Watch(where) as watch:
                subject.predict(subject.model, subject.tokens)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
    return watch.found


@contextmanager
def _inside(subject: Subject) -> Iterator[list[str]]:
    """The paths of the attention sublayers that are running, the innermost last."""
    stack: list[str] = []
    with ExitStack() as hooks:
        for site in subject.sites:
            module: nn.Module = subject.model.get_submodule(site.path)
            hooks.enter_context(removed(module.register_forward_pre_hook(lambda *_, p=site.path: stack.append(p))))
            hooks.enter_context(removed(module.register_forward_hook(lambda *_: stack.pop() and None)))
        yield stack


@contextmanager
def removed(hook: Any) -> Iterator[None]:
    """A module's hook, for a while."""
    try:
        yield
    finally:
        hook.remove()


class _Watch(TorchDispatchMode):
    """Sees fused kernels, and pairs each softmax over keys with the product before it and the one after."""

    def __init__(self, where: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where
        self.found: list[Attended] = []
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []  # left, right, result
        self.softmax: tuple[Tensor, Tensor] | None = None  # logits and weights that no product has taken yet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if any(f"{mark}_attention" in name for mark in FUSED) and "backward" not in name:
            self._fused(name, func, args, kwargs or {}, result)
        elif name == "bmm":
            self._product(args[0], args[1], result)
        elif name in ("_softmax", "_safe_softmax") and args[0].dim() > 2:
            self.softmax = (args[0], result)
        return result

    def _fused(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        query, mask, scale = named["query"], named.get("attn_mask", named.get("attn_bias")), named.get("scale")
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, float("-inf"))
        self.found.append(
            Attended(
                path=self.where[-1] if self.where else "",
                kernel=name.strip("_"),
                query=query.clone(),
                key=named["key"].clone(),
                value=named["value"].clone(),
                mask=mask,
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                causal=bool(named.get("is_causal", False)),
                output=result[0].clone(),
            )
        )

    def _product(self, left: Tensor, right: Tensor, result: Tensor) -> None:
        if self.softmax is not None and _same_table(left, self.softmax[1]):
            logits, _ = self.softmax
            before = next((p for p in reversed(self.products) if _same_table(p[2], logits)), None)
            if before is not None:
                self._explicit(*before, logits=logits, weights=left, value=right, output=result)
            self.softmax, self.products = None, []
        else:
            self.products.append((left, right, result))

    def _explicit(
        self,
        query: Tensor,
        key: Tensor,
        product: Tensor,
        *,
        logits: Tensor,
        weights: Tensor,
        value: Tensor,
        output: Tensor,
    ) -> None:
        lead = logits.shape[:-2] if logits.dim() == 4 else (logits.shape[0], 1)
        product, mine = product.view(*lead, *product.shape[-2:]), logits.view(*lead, *logits.shape[-2:])
        scale = slope(product, mine)
        self.found.append(
            Attended(
                path=self.where[-1] if self.where else "",
                kernel="explicit",
                query=query.reshape(*lead, *query.shape[-2:]).clone(),
                key=key.mT.reshape(*lead, *key.mT.shape[-2:]).clone(),
                value=value.reshape(*lead, *value.shape[-2:]).clone(),
                mask=mine.double() - scale * product.double(),
                scale=scale,
                causal=False,
                output=output.reshape(*lead, *output.shape[-2:]).clone(),
                weights=weights.reshape(*lead, *weights.shape[-2:]).clone(),
            )
        )


def _same_table(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and one.shape[-2:] == other.shape[-2:]


def slope(product: Tensor, logits: Tensor) -> float:
    """The factor c of logits = c · product + mask, `(N, H, T, K)`, where the mask is the same for all sequences: from
    how far logits of one place differ between sequences. Of a single sequence: the least squares line.
    """
    x, y = product.double(), logits.double()
    usable = y.isfinite() & (y > -1e3)
    if len(x) > 1:
        both = usable & usable.roll(1, 0)
        x, y, usable = x - x.roll(1, 0), y - y.roll(1, 0), both
    x, y = x[usable], y[usable]
    return float((x * y).sum() / (x * x).sum().clamp(min=1e-30))
