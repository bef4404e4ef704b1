"""What works on this machine and what does not: device, attention kernels, versions, tracking store, disk, commit.

Each check tries the thing itself, and says how to mend what is not well. Nothing is left on disk.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Literal
from urllib.error import URLError
from urllib.request import urlopen

import torch
from packaging.requirements import Requirement
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from harness.backend import attention_backend
from harness.components.attention import Attention
from harness.components.kernel import backend_of
from harness.components.position import Position
from harness.machine import commit, cpu_name, installed
from harness.schema import UserError
from harness.spec import ModelSpec, RunSpec
from harness.tracking import default_uri
from harness.tracking.uri import check, database_file
from harness.transformer import build_model
from tasks import Copy

PROJECT = "ablation-harness"
ESSENTIAL = ("torch", "pytorch-lightning", "pydantic", "numpy", "pandas", "scipy", "rich")  # no study runs without
LOW, EMPTY = 2**30, 100 * 2**20  # bytes of free disk; a quick study with its images takes about 200 MB
SERVER_SECONDS = 5.0

State = Literal["ok", "warn", "fail"]
OK: State = "ok"
WARN: State = "warn"
FAIL: State = "fail"


@dataclass(frozen=True)
class Check:
    """One thing looked at; `remedy` is empty where there is nothing to mend."""

    name: str
    state: State
    found: str
    remedy: str = ""


def examine(results: Path, tracking_uri: str | None = None) -> list[Check]:
    """Every check, those that all others rest on first.

    Args:
        results: the results folder, there or not.
        tracking_uri: the store to look for; the results folder's own if none is named.
    """
    return [
        python(),
        *packages(),
        device(),
        cores(),
        *kernels(),
        *levels(Attention),
        *levels(Position),
        disk(results),
        writable(results),
        store(results, tracking_uri),
        checkout(),
    ]


def python() -> Check:
    """The interpreter."""
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return Check("python", OK, found)
    return Check("python", FAIL, found, "use Python 3.11 or 3.12: make setup PYTHON=python3.11")


def packages() -> Iterator[Check]:
    """Every dependency against the bounds of pyproject.toml."""
    try:
        wanted = [Requirement(line) for line in requires(PROJECT) or []]
    except PackageNotFoundError:
        yield Check("packages", WARN, f"{PROJECT} is not installed, so its bounds are unknown", "make setup")
        return
    for requirement in wanted:
        if requirement.marker is None:  # those of extras have one
            yield package(requirement)


def package(requirement: Requirement) -> Check:
    """One dependency."""
    version = installed(requirement.name)
    bounds = ",".join(sorted(str(requirement.specifier).split(","), reverse=True))
    if version != "absent" and requirement.specifier.contains(version, prereleases=True):
        return Check(requirement.name, OK, version)
    state = FAIL if version == "absent" and requirement.name in ESSENTIAL else WARN
    return Check(requirement.name, state, version, f"make setup (pyproject.toml asks for {bounds})")


def device() -> Check:
    """Where `--device auto` trains."""
    if not torch.cuda.is_available():
        return Check("device", OK, f"cpu: {cpu_name()}; torch sees no CUDA device")
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    found = f"cuda: {torch.cuda.get_device_name()}, {memory:.0f} GiB, torch for CUDA {torch.version.cuda}"
    if torch.cuda.is_bf16_supported():
        return Check("device", OK, found)
    return Check("device", WARN, f"{found}, without bf16", "use --device cpu: runs on a GPU train in bf16")


def cores() -> Check:
    """How many workers `--jobs auto` starts, and whether the cores are free."""
    free, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    threads = f"{torch.get_num_threads()} torch threads here, 1 in a worker"
    found = f"{free} of {os.cpu_count()} cores are ours, load {load:.1f}, {threads}"
    if load > free:
        return Check("cores", WARN, found, "other processes want the cores: runs take longer, scores stay the same")
    return Check("cores", OK, found)


def kernels() -> Iterator[Check]:
    """Whether flash attention runs forward and backward, for each precision that runs use."""
    pairs = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
    if torch.cuda.is_available():
        pairs.append(("cuda", torch.bfloat16))
    for place, precision in pairs:
        yield kernel(place, precision)


def kernel(place: str, precision: torch.dtype) -> Check:
    """Flash attention on one device in one precision, checked against the explicit form."""
    name = f"flash on {place}, {str(precision).removeprefix('torch.')}"
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 2, 64, 32, generator=generator) for _ in range(3)]
    query, key, value = (tensor.to(place, precision).requires_grad_() for tensor in drawn)

    def attend() -> torch.Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            result = attend()
            result.float().sum().backward()
    except RuntimeError as error:
        remedy = "leave train.kernel at Fastest(): runs take another kernel, which each records"
        return Check(name, WARN, f"does not run: {str(error).splitlines()[0]}", remedy)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        distance = (attend().float() - result.float()).abs().max().item()
    with torch.no_grad():
        taken = backend_of(attend)
    if distance > (1e-4 if precision is torch.float32 else 0.05):
        remedy = "use train.kernel = Math(), and tell the makers of torch"
        return Check(name, FAIL, f"is {distance:.1e} off the explicit form", remedy)
    return Check(name, OK, "forward and backward" + (f"; torch prefers {taken}" if taken != "flash" else ""))


def levels(axis: type[Attention] | type[Position]) -> Iterator[Check]:
    """The kernel that each level of an axis runs on, and why not a faster one."""
    place: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    field = axis.__name__.lower()
    small = ModelSpec(d_model=32, num_heads=4, num_layers=1)
    for name, level in axis.levels().items():
        spec = RunSpec(model=small.replace(field, level()), task=Copy(), device=place)
        model = build_model(spec.model, spec.task.vocab_size, seed=0).to(place)
        backend, reason = attention_backend(spec, model)
        yield Check(f"{field} = {name}", OK, f"{backend}: {reason}")


def disk(results: Path) -> Check:
    """Room for results."""
    free = shutil.disk_usage(_existing(results)).free
    found = f"{free / 2**30:.1f} GiB free for {results}"
    if free < LOW:
        return Check("disk", FAIL if free < EMPTY else WARN, found, "make room or name another --results")
    return Check("disk", OK, found)


def writable(results: Path) -> Check:
    """Whether results can be written, by doing it."""
    folder = _existing(results)
    found = str(results) if folder == results else f"{results} can be made in {folder.absolute()}"
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return Check("results", OK, found)
    except OSError as error:
        return Check("results", FAIL, f"{results}: {error.strerror}", "name another --results or change its rights")


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in [path, *path.absolute().parents] if place.exists())


def store(results: Path, uri: str | None) -> Check:
    """Whether the tracking store can be reached; it is not opened, as that would create it."""
    uri = uri or default_uri(results)
    try:
        check(uri)
    except UserError as error:
        return Check("tracking store", FAIL, str(error), "name another --tracking-uri")
    file = database_file(uri)
    if file is not None:
        return Check("tracking store", OK, uri if file.exists() else f"{uri} will be made by the first study")
    if not uri.startswith("http"):
        return Check("tracking store", OK, f"{uri} is well formed; only a study connects to it")
    try:
        with urlopen(f"{uri.rstrip('/')}/health", timeout=SERVER_SECONDS):
            return Check("tracking store", OK, f"{uri} answers")
    except (URLError, OSError) as error:
        remedy = "start the server; studies run without it, and `harness sync` delivers later"
        return Check("tracking store", WARN, f"{uri} does not answer ({getattr(error, 'reason', error)})", remedy)


def checkout() -> Check:
    """The commit that records name."""
    found = commit()
    if not found:
        return Check(
            "commit",
            WARN,
            "not a git checkout, or it has no commit",
            "clone the project, so that records name their code",
        )
    if found.endswith("-dirty"):
        return Check("commit", WARN, found, "commit your changes, so that records name their code")
    return Check("commit", OK, found)
