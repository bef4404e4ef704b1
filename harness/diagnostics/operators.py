"""Attention as it really ran: the operators that a forward pass comes to, a fused kernel or the two products and the
softmax of an explicit form, whoever wrote the model.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.components.kernel import FUSED
from harness.diagnostics.subject import Subject, hooked
from tasks.task import Batch

WRONG_DIMENSION = "the softmax runs over another dimension than that of keys"
UNRELATED = 0.5  # of the logits' squares: a product that leaves more of them unexplained is not theirs
CAST = 0.01  # of the largest weight: more is no rounding to half precision


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
        changed: whether these are not what its softmax gave.
        over_keys: whether the softmax ran over keys, as it must.
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
    changed: bool = False
    over_keys: bool = True

    def logits(self, dtype: torch.dtype = torch.float64, rows: Tensor | None = None) -> Tensor:
        """scale · QKᵀ + mask, `(N, H, T, K)`, or only of some queries (`rows`)."""
        rows = torch.arange(self.query.shape[-2], device=self.query.device) if rows is None else rows
        query = self.query[..., rows, :].to(dtype)
        key = self.key.to(dtype).repeat_interleave(self.query.shape[1] // self.key.shape[1], dim=1)
        found = self.scale * (query @ key.mT)
        if self.mask is not None:
            each = self.mask.dim() > 1 and self.mask.shape[-2] > 1
            found = found + (self.mask[..., rows, :] if each else self.mask).to(dtype)
        if self.causal:
            ahead = torch.arange(found.shape[-1], device=found.device) > rows[:, None]
            found = found.masked_fill(ahead, float("-inf"))
        return found

    def recomputed(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """softmax(logits) V in a type; zero for queries that see nothing."""
        value = self.value.to(dtype).repeat_interleave(self.query.shape[1] // self.value.shape[1], dim=1)
        return self.logits(dtype).softmax(-1).nan_to_num(nan=0.0) @ value


def attended(subject: Subject, batch: Batch | None = None) -> list[Attended]:
    """What ran in a forward pass over the probe tokens, or over a batch, in evaluation mode."""
    with _inside(subject) as where, without_fast_path(), _Watch(where) as watch:
        subject.logits(subject.tokens if batch is None else batch)
    return watch.found


@contextmanager
def _inside(subject: Subject) -> Iterator[list[str]]:
    """The paths of the attention sublayers that are running, the innermost last."""
    stack: list[str] = []

    def leave(*_: Any) -> None:  # a hook that gave the path would put it in the output's place, were it empty
        stack.pop()

    def enter(path: str, *_: Any) -> None:
        stack.append(path)

    paths = [site.path for site in subject.sites]
    with hooked(subject.model, dict.fromkeys(paths, leave), {path: partial(enter, path) for path in paths}):
        yield stack


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Torch's own encoder layers as they are written: their fast path is a single operator, which calls no hooks."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@dataclass(frozen=True)
class _Softmax:
    """One softmax: what it was of, what it gave, and whether it ran over the last dimension."""

    logits: Tensor
    weights: Tensor
    over_keys: bool


class _Watch(TorchDispatchMode):
    """Sees fused kernels, and pairs each softmax over keys with the product before it and the one after."""

    def __init__(self, where: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where = where
        self.found: list[Attended] = []
        self.products: list[tuple[Tensor, Tensor, Tensor]] = []  # left, right, what it came to
        self.softmax: _Softmax | None = None  # whose weights no product has taken yet

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if any(f"{mark}_attention" in name for mark in FUSED) and "backward" not in name:
            self._fused(name, func, args, kwargs or {}, result)
        elif name in ("bmm", "baddbmm"):  # the second adds its first argument, a mask
            self._product(args[-2], args[-1], result)
        elif name in ("_softmax", "_safe_softmax") and args[0].dim() > 2:
            self.softmax = _Softmax(args[0].clone(), result.clone(), args[1] % args[0].dim() == args[0].dim() - 1)
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
        if self.softmax is not None and _same_table(left, self.softmax.weights):
            before = next((p for p in reversed(self.products) if _same_table(p[2], self.softmax.logits)), None)
            if before is not None:
                self._explicit(*before[:2], self.softmax, weights=left, value=right, output=result)
            self.softmax, self.products = None, []
        else:
            self.products.append((left, right, result))

    def _explicit(
        self,
        query: Tensor,
        key: Tensor,
        softmax: "_Softmax",
        *,
        weights: Tensor,
        value: Tensor,
        output: Tensor,
    ) -> None:
        logits = softmax.logits
        count, heads = logits.shape[0], math.prod(logits.shape[1:-2])
        if len(key) % count:  # products of some other shape, which belong to something else
            return

        def table(x: Tensor) -> Tensor:
            return x.reshape(count, heads, *logits.shape[-2:])

        def of_queries(x: Tensor) -> Tensor:  # groups of heads may be one product with more rows
            return x.reshape(count, heads, logits.shape[-2], x.shape[-1]).clone()

        def of_keys(x: Tensor) -> Tensor:
            return x.reshape(count, -1, *x.shape[-2:]).clone()

        product, mine = table(query @ key), table(logits)
        scale, unexplained = slope(product, mine)
        weights, made = table(weights).clone(), table(softmax.weights)
        changed = bool((weights - made).abs().max() > CAST * made.max())
        if unexplained > UNRELATED or (changed and _reordered(weights, made)):
            return  # rows of the softmax stand in another order than those of one of the products
        self.found.append(
            Attended(
                path=self.where[-1] if self.where else "",
                kernel="explicit",
                query=of_queries(query),
                key=of_keys(key.mT),
                value=of_keys(value),
                mask=mine.double() - scale * product.double(),
                scale=scale,
                causal=False,
                output=of_queries(output),
                weights=weights,
                changed=changed,
                over_keys=softmax.over_keys,
            )
        )


def _reordered(weights: Tensor, made: Tensor) -> bool:
    """Whether weights are those that a softmax gave, row by row or column by column in other places."""
    one, other = (x.flatten().sort().values for x in (weights, made))
    return bool((one - other).abs().max() <= CAST * made.max())


def _same_table(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and one.shape[-1] == other.shape[-1]


def slope(product: Tensor, logits: Tensor) -> tuple[float, float]:
    """The factor c of logits = c · product + mask, `(N, H, T, K)`, where the mask is the same for all sequences: from
    how far logits of one place differ between sequences; and the share of their squares that it leaves unexplained. Of
    a single sequence: the least squares line, of which nothing is said.

    Where heads have no dimension of their own, N is B · H, and only every H-th row has the same mask: the distance of
    rows is taken that fits best.
    """
    x, y = product.double(), logits.double()
    usable = y.isfinite() & (y > -1e3) & ((y != 0) | (x == 0))  # not what −∞, a large number or a zero hides
    distances = range(1, len(x)) if x.shape[1] == 1 else range(1, min(2, len(x)))
    fits = [
        line((x - x.roll(d, 0))[both], (y - y.roll(d, 0))[both])
        for d in distances
        if (both := usable & usable.roll(d, 0)).any()
    ]
    if not fits:
        return line(x[usable], y[usable])[1], 0.0
    _, c, unexplained = min(fits)
    return c, unexplained


def line(x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """(mean squared residual, c, its share of the mean square) of y = c · x by least squares."""
    c = (x * y).sum() / (x * x).sum().clamp(min=1e-30)
    residual, whole = (y - c * x).square().mean(), y.square().mean()
    return float(residual), float(c), float(residual / whole.clamp(min=1e-30))
