"""Where a run took place: hardware, versions, commit, memory. What a record needs to be believed."""

import os
import platform
import resource
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("ablation-harness", "torch", "pytorch-lightning", "mlflow", "pandas", "numpy", "scipy", "pydantic")
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


@cache
def environment() -> dict[str, str]:
    """Machine, versions and commit, as text."""
    return {
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{package.replace("-", "_"): installed(package) for package in PACKAGES},
        "commit": commit(),
    }


def installed(package: str) -> str:
    """The version of an installed package; `absent` where it is not (a GPU machine may train without MLflow)."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def cpu_name() -> str:
    """The processor's model, or its architecture where the system does not say."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.machine()


@cache
def commit() -> str:
    """The commit of the checkout that this code runs from, `-dirty` if tracked files differ; else empty."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    head = git("rev-parse", "HEAD")
    return head + "-dirty" * bool(head and git("status", "--porcelain", "--untracked-files=no"))


def available_memory() -> int | None:
    """Bytes that a process may still take without swapping; None where the system does not say."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def reset_peak_memory() -> None:
    """Start a new measurement of this process's peak memory, where the system can."""
    if CLEAR.exists():
        CLEAR.write_text("5")


def peak_memory() -> int:
    """Bytes of the largest resident size since `reset_peak_memory` (without /proc: since the process began)."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
