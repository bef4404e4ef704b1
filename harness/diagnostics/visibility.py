"""Which tokens reach which results of an attention sublayer, seen from outside: whatever its kernel, its mask or its
code, the sublayer is called again with one token's hidden state replaced, and what moves has seen that token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.diagnostics.keeping import kept, mode
from harness.diagnostics.subject import AttentionSite, Subject, first, hooked
from harness.seeding import generator

SMALL = 0.01
NEVER_CALLED = "no named attention sublayer is ever called"
MOVED = 1e-6  # of the results' deviation: what is hidden by −∞ moves nothing at all


@dataclass(frozen=True)
class Call:
    """One call of a sublayer during a forward pass, to be made again, with arguments as they were before it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Tensor

    @property
    def hidden(self) -> Tensor:
        """`(B, T, d_model)`: what keys come from."""
        memory = self.kwargs.get("memory")
        found = memory if memory is not None else next(x for x in self._given() if isinstance(x, Tensor))
        assert isinstance(found, Tensor)
        return found

    def _given(self) -> Iterator[Any]:
        yield from self.args
        yield from self.kwargs.values()

    def again(self, hidden: Tensor) -> Tensor:
        """The result for other hidden states, in whatever places the first ones stood."""
        old = self.hidden

        def swapped(x: Any) -> Any:
            return hidden if x is old else unshared(x)

        return first(self.module(*map(swapped, self.args), **{k: swapped(v) for k, v in self.kwargs.items()}))


def unshared(x: Any) -> Any:
    """A copy of an argument that a call may change, as a cache that keys are put into; what is no tensor, no module and
    not frozen may be one. Itself where it cannot be copied.
    """
    frozen = getattr(getattr(x, "__dataclass_params__", None), "frozen", False)
    if frozen or isinstance(x, Tensor | nn.Module | tuple):
        return x
    try:
        return deepcopy(x)
    except (TypeError, RuntimeError):
        return x


@contextmanager
def calls(subject: Subject) -> Iterator[dict[str, Call]]:
    """The calls of all attention sublayers in a forward pass over the probe tokens, in evaluation mode."""
    found: dict[str, Call] = {}
    before: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def enter(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if path not in before:
            before[path] = tuple(map(unshared, args)), {k: unshared(v) for k, v in kwargs.items()}

    def keep(path: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        found.setdefault(path, Call(module, *before[path], first(result)))

    paths = [site.path for site in subject.sites]
    with hooked(subject.model, {p: partial(keep, p) for p in paths}, {p: partial(enter, p) for p in paths}):
        subject.logits(subject.tokens)
    with torch.no_grad(), mode(subject.model, training=False), kept(subject.model):
        yield found


def influence(call: Call) -> Tensor:
    """`(B, T, K)`: how far the result of each token moves when one key's hidden state is another, in deviations of the
    results. Of small hidden states, so that no weight is lost to a saturated softmax.
    """
    hidden = SMALL * call.hidden
    result = call.again(hidden)
    other = torch.randn(hidden.shape, generator=generator(hidden.device, 0, "influence", 0, 0)).to(hidden)
    other = other * hidden.std()
    columns = []
    for key in range(hidden.shape[1]):
        changed = hidden.clone()
        changed[:, key] = other[:, key]
        columns.append((call.again(changed) - result).abs().amax(-1))
    moved = torch.stack(columns, dim=-1) / result.std().clamp(min=1e-12)
    return moved.nan_to_num(nan=float("inf"))


def explain(site: AttentionSite, seen: Tensor) -> str:
    """The mistake that would make a sublayer see what it sees, `(B, T, T)`; empty where none that is known here would,
    or where it sees what is declared.
    """
    length = seen.shape[-1]
    declared = site.sees(length)
    everything, ahead = torch.ones_like(declared), torch.ones(length - 1, dtype=torch.bool).diag(1)
    known = {
        "the mask is missing: every query sees every key": everything,
        "the mask is upside down: it hides the past": declared.T,
        "the mask's diagonal is off by one: a query sees the token that it shall predict": declared | ahead,
        "heads are merged without exchanging heads and tokens": merged(declared, site.num_heads),
    }
    if bool((seen == declared).all()):
        return ""
    for cause, pattern in known.items():
        if not bool((pattern == declared).all()) and bool((seen == pattern).all()):
            return cause
    if bool((seen != seen[:1]).any()):
        return "the mask differs from sequence to sequence: it is laid over the wrong dimension"
    return ""


def merged(declared: Tensor, num_heads: int) -> Tensor:
    """What is seen where results `(H, T, d)` are read as `(T, H · d)`: row t holds those of (t · H + j) mod T."""
    length = declared.shape[0]
    rows = (torch.arange(length)[:, None] * num_heads + torch.arange(num_heads)) % length
    return declared[rows].any(1)
