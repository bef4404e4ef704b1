"""Which attention kernel computes softmax(QKᵀ)V, and which one really did. All are exact; they differ in time and
memory.
"""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.schema import Level, UserError

FUSED = ("flash", "cudnn", "efficient", "flex")  # marks in the names of torch's fused attention operators
SLOWEST_FIRST = ("math", *reversed(FUSED))


class Kernel(Level):
    """Base of the attention-kernel axis."""

    @abstractmethod
    def context(self) -> AbstractContextManager[Any]:
        """A context in which attention runs on this kernel; entered around every forward pass."""

    def check_model(self, obstacle: str) -> None:
        """Raise `UserError` if this kernel cannot run a model; `obstacle` says why flash cannot (empty: it may)."""

    def check(self, backend: str, reason: str) -> None:
        """Raise `UserError` if the backend that ran is not the one asked for."""


class Fastest(Kernel):
    """Whatever torch finds fastest for the inputs: flash where it can run."""

    def context(self) -> AbstractContextManager[Any]:
        """Nothing to change."""
        return nullcontext()


class Flash(Kernel):
    """FlashAttention or an error: tiles and an online softmax, no T×T matrix in memory (Dao et al. 2022,
    arXiv:2205.14135).
    """

    def context(self) -> AbstractContextManager[Any]:
        """Flash before all others (torch prefers cuDNN's kernel on some devices), which stay allowed: a kernel forced
        on inputs that it cannot take gives torch's error, not ours.
        """
        return sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True
        )

    def check_model(self, obstacle: str) -> None:
        """Nothing may stand in the way."""
        if obstacle:
            raise UserError(f"train.kernel = Flash cannot run: {obstacle}; use Fastest()")

    def check(self, backend: str, reason: str) -> None:
        """Flash must have run."""
        if backend != "flash":
            raise UserError(f"train.kernel = Flash: {backend} attention ran because {reason}; use Fastest()")


class Math(Kernel):
    """The explicit form, which stores the T×T weights: a reference for the others."""

    def context(self) -> AbstractContextManager[Any]:
        """Torch's math backend."""
        return sdpa_kernel(SDPBackend.MATH)


def same_kernels() -> AbstractContextManager[Any]:
    """A context, to be entered later, in which attention may run on the kernels that are enabled now."""
    enabled = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    return sdpa_kernel([backend for backend, is_on in enabled.items() if is_on])


def backend_of(forward: Callable[[], Tensor]) -> str:
    """The slowest attention backend that a forward pass really runs: flash, cudnn, efficient, flex or math; `none`
    where nothing asks for softmax(QKᵀ)V.
    """
    with _Attention() as seen:
        forward()
    return next((backend for backend in SLOWEST_FIRST if backend in seen.backends), "none")


class _Attention(TorchFunctionMode):
    """Sees every call of scaled_dot_product_attention, and which operators it comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.backends: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with _Operators() as seen:
            result = func(*args, **(kwargs or {}))
        found = (mark for mark in FUSED if any(f"{mark}_attention" in name for name in seen.names))
        self.backends.add(next(found, "math"))
        return result


class _Operators(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))
