"""What an examination leaves as it was: modes, buffers, weights, what modules keep, and every generator's draws."""

import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.seeding import seed_global, stable_hash

TORCHS = frozenset(vars(nn.Module()))  # what every module has: parameters, hooks and the like are not its own
CONTAINERS = (dict, list, set, deque)


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """A model in one of its modes; every module's own is restored."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers are what they were, and whatever else modules keep of a pass (a table that has grown, its
    length, a counter), and the draws of torch, numpy and Python.
    """
    before = [(module, dict(module._buffers), _kept_by(module)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    draws, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(draws)
        np.random.set_state(numpys)
        for module, buffers, own in before:
            module._buffers.clear()
            module._buffers.update(buffers)
            _restore(module, own)
        for buffer, value in values:
            buffer.copy_(value)


def _kept_by(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's own attributes, and what is in those that can be filled."""
    own = {name: value for name, value in vars(module).items() if name not in TORCHS}
    return {name: (value, copy(value) if type(value) in CONTAINERS else None) for name, value in own.items()}


def _restore(module: nn.Module, before: dict[str, tuple[Any, Any]]) -> None:
    for name in set(vars(module)) - TORCHS - set(before):
        del vars(module)[name]
    for name, (value, content) in before.items():
        vars(module)[name] = value
        if content is not None:
            value.clear()
            value.extend(content) if isinstance(value, list | deque) else value.update(content)


@contextmanager
def weights_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards parameters are what they were: some modules change them in a pass (a norm that is held down)."""
    before = [(p, p.detach().clone()) for p in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in before:
                p.copy_(value)


@contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """A model whose weights and buffers are fp64 for a while, without gradients so far."""
    before = [(p, p.data, p.grad) for p in model.parameters()]
    with kept(model):
        for p, _, _ in before:
            p.grad = None
        model.double()
        try:
            yield
        finally:
            for p, data, gradient in before:
                p.grad, p.data, p.grad = None, data, gradient


def seed_draws(*parts: int | str) -> None:
    """Seed the global generators of torch, numpy and Python from a name: a module may draw from any of them."""
    seed_global(*parts)
    seed = stable_hash(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
