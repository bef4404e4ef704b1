"""`make bench`: speed as ratios within one run, medians of repeated pairs; writes results/reference/bench.md.

The machines are shared and noisy, so nothing is compared with a number from another day. It takes half an hour on a
machine that does nothing else; `--only PART` measures one part anew, and the page says at which commit each was.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pytorch_lightning import Callback

from harness.conduct import resolve_jobs
from harness.diagnostics.watch import Watch
from harness.locate import find_ablation
from harness.machine import commit, environment
from harness.runner import run
from harness.spec import RunSpec
from harness.study import make_plan

sys.path.insert(0, str(Path(__file__).parent))
import bare

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
HARNESS = [sys.executable, "-m", "harness"]
STEP_PAIRS, STEPS = 5, 1000  # as many steps as a run of the quick budget has
BARE_STEPS = 200  # of each cell, before and again after the peer


@dataclass(frozen=True)
class Row:
    """One measurement of the table."""

    what: str
    measured: str
    bound: str
    holds: bool


def study_against_bare(specs: list[RunSpec], seeds: int, workers: int, folder: Path) -> tuple[Row, float]:
    """A whole study's wall time against its bare loops' total divided by the workers."""
    mixed = random.Random(0).sample(specs, len(specs))  # so that halves and workers have alike shares
    half = len(specs) // 2  # one before the study and one after it: a machine that slows down meanwhile favours nobody
    before = all_bare_seconds(mixed[:half], workers)
    begun = time.perf_counter()
    subprocess.run(
        [*HARNESS, "ablate", "position", "--seeds", str(seeds), "--results", str(folder)],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    wall = time.perf_counter() - begun
    ratio = wall / ((before + all_bare_seconds(mixed[half:], workers)) / workers)
    what = (
        f"whole study ({len(specs)} runs, start-up, diagnostics, evaluation, MLflow and report included) ÷ "
        f"(bare loops ÷ {workers})"
    )
    return Row(what, f"{ratio:.2f} ({wall:.0f} s)", "≤ 1.25", ratio <= 1.25), ratio


def all_bare_seconds(specs: list[RunSpec], workers: int) -> float:
    """Seconds of all bare loops, with as many at a time as the study has workers."""
    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(lambda i: sum(bare_seconds(specs[i::workers])), range(workers)))


def bare_seconds(specs: list[RunSpec]) -> list[float]:
    """Seconds of each spec's bare loop, in one process with one thread."""
    return call([sys.executable, str(HERE / "bare.py")], specs)


def call(command: list[str], specs: list[RunSpec], *arguments: str) -> list[float]:
    """What a measuring script prints for specs given in a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([spec.document() for spec in specs], file)
        file.flush()
        printed = subprocess.run([*command, file.name, *arguments], check=True, capture_output=True, text=True).stdout
    return [float(value) for value in json.loads(printed.splitlines()[-1])]


def lightning_against_bare(spec: RunSpec) -> list[Row]:
    """Training time under Lightning with all that a run logs, against the bare loop; and the detectors' share of it,
    measured where they are called, as pairs of whole runs differ by more than that; in turn.
    """
    torch.set_num_threads(1)
    spec = spec.replace("train.steps", STEPS).replace("train.eval_every", STEPS)
    bare.train(spec, 50)
    ratios, shares, watched, steps = [], [], [], []
    for _ in range(STEP_PAIRS):
        seconds = bare.train(spec, STEPS)
        plain = float(run(spec, diagnose=False).ledger["wall_seconds"])
        with clocked(Watch) as spent:
            diagnosed = float(run(spec).ledger["wall_seconds"])
        ratios.append(plain / seconds)
        shares.append(spent[0] / (diagnosed - spent[0]))
        watched.append(diagnosed / plain)
        steps.append(seconds / STEPS)
    what = f"a step with Lightning, curves and attention maps ÷ a bare step of {median(steps) * 1e3:.0f} ms"
    pairs = f"{min(watched):.2f} to {max(watched):.2f}"
    said = f"time in detectors ÷ the rest of training (pairs of whole runs with ÷ without: {pairs})"
    return [
        Row(what, f"{median(ratios):.3f}", "≤ 1.08", median(ratios) <= 1.08),
        Row(said, f"{median(shares):.4f}", "≤ 0.02", median(shares) <= 0.02),
    ]


@contextmanager
def clocked(callback: type[Callback]) -> Iterator[list[float]]:
    """Adds up the seconds that all the hooks of a callback take."""
    spent = [0.0]

    def timed(hook: Callable[..., None]) -> Callable[..., None]:
        def called(*arguments: object, **named: object) -> None:
            begun = time.perf_counter()
            hook(*arguments, **named)
            spent[0] += time.perf_counter() - begun

        return called

    own = {name: hook for name, hook in vars(callback).items() if name.startswith("on_")}
    for name, hook in own.items():
        setattr(callback, name, timed(hook))
    try:
        yield spent
    finally:
        for name, hook in own.items():
            setattr(callback, name, hook)


def peer_against_study(peer: str, specs: list[RunSpec], study: float, workers: int, steps: int) -> Row:
    """The same grid in a plain x-transformers loop against our study, `study` times as long as its bare loops.

    Both are measured in bare steps of their own minutes, those of the peer just before and just after it.
    """
    cells = list({(spec.model.position.kind, spec.task.kind): spec for spec in specs}.values())
    short = [spec.replace("train.steps", BARE_STEPS).replace("train.eval_every", BARE_STEPS) for spec in cells]
    before = all_bare_seconds(short, workers)
    padded = sum(call([peer, str(HERE / "peer.py")], cells, str(steps))) / len(cells)
    ours = (before + all_bare_seconds(short, workers)) / 2 / BARE_STEPS / len(cells) / workers
    ratio = padded / ours / study
    what = (
        f"x-transformers, padded, one process, default threads ({padded * 1e3:.0f} ms a step beside "
        f"{ours * 1e3:.1f} ms of bare loops in {workers} processes) ÷ our study"
    )
    return Row(what, f"{ratio:.2f}", "≥ 1.8", ratio >= 1.8)


def finished_again(folder: Path) -> Row:
    """A finished study of as many runs as the quick one has is recognised; how long they trained does not matter."""
    command = [*HARNESS, "ablate", "position", "--budget", "smoke", "--seeds", "9", "--results", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begun)
    return Row("a finished study of 108 runs is recognised", f"{median(times):.1f} s", "≤ 3 s", median(times) <= 3)


def help_cpu() -> Row:
    """CPU time of `harness --help`."""
    times = []
    for _ in range(5):
        before = _children_cpu()
        subprocess.run([*HARNESS, "--help"], check=True, capture_output=True)
        times.append(_children_cpu() - before)
    return Row("`harness --help`, CPU", f"{median(times):.2f} s", "≤ 0.5 s", median(times) <= 0.5)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def memory_growth(position: str) -> Row:
    """Peak memory of attention at 8192 tokens against 4096."""
    peaks = [
        int(
            subprocess.run(
                [sys.executable, str(HERE / "memory.py"), position, str(n)], check=True, capture_output=True
            ).stdout
        )
        for n in (4096, 8192)
    ]
    ratio = peaks[1] / peaks[0]
    measured = f"{ratio:.2f} ({peaks[0] / 2**20:.0f} → {peaks[1] / 2**20:.0f} MiB)"
    return Row(
        f"attention's peak memory, forward and backward, {position}: n = 8192 ÷ 4096", measured, "≤ 2.2", ratio <= 2.2
    )


def start(options: argparse.Namespace) -> list[Row]:
    """What needs no training."""
    with tempfile.TemporaryDirectory() as temporary:
        return [help_cpu(), finished_again(Path(temporary)), memory_growth("RoPE"), memory_growth("ALiBi")]


def step(options: argparse.Namespace) -> list[Row]:
    """A step beside a bare one, and the detectors' share."""
    return lightning_against_bare(position(options.seeds)[0])


def study(options: argparse.Namespace) -> list[Row]:
    """A whole study beside its bare loops and beside the peer."""
    specs, workers = position(options.seeds), resolve_jobs("auto", "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        row, seconds = study_against_bare(specs, options.seeds, workers, Path(temporary))
    rows = [row]
    if options.peer:
        rows.append(peer_against_study(options.peer, specs, seconds, workers, options.peer_steps))
    return rows


def position(seeds: int) -> list[RunSpec]:
    """The runs of the quick position study."""
    plan = make_plan("position", find_ablation("position").ablation, budget="quick", seeds=seeds, device="cpu")
    return [cell.spec for cell in plan.cells]


PARTS = {"start": start, "step": step, "study": study}


def page(parts: dict[str, dict[str, Any]]) -> str:
    """The table as Markdown, with where and at which commit each part was measured."""
    lines = [
        "# Speed",
        "",
        "Ratios within one run; written by `make bench`.",
        "",
        "| what | measured | bound | | part |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what']} | {row['measured']} | {row['bound']} | {'holds' if row['holds'] else '**missed**'} | {name} |"
        for name, part in parts.items()
        for row in part["rows"]
    ]
    lines += [
        "",
        *(f"- {name}: {part['where']}; commit {part['commit']}; `{part['command']}`" for name, part in parts.items()),
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure what was asked for, write the page, exit 1 if a bound was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peer", help="interpreter of the environment with x-transformers; without it that row is left out"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone; the page keeps the others")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the study that is timed")
    parser.add_argument("--peer-steps", type=int, default=60, help="timed steps of the peer a cell")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "reference" / "bench.md")
    options = parser.parse_args()
    kept = options.output.with_suffix(".json")
    parts = json.loads(kept.read_text()) if kept.exists() else {}
    machine = environment()
    versions = f"torch {machine['torch']}, Lightning {machine['pytorch_lightning']}"
    for name in options.only or PARTS:
        rows = PARTS[name](options)
        for row in rows:
            print(f"{row.what}: {row.measured} ({row.bound})", flush=True)
        parts[name] = {
            "where": f"{machine['cpu']}, {machine['cores']} cores, {versions}",
            "commit": commit(),
            "command": f"make bench ARGS='--only {name} --seeds {options.seeds} --peer-steps {options.peer_steps}'",
            "rows": [asdict(row) for row in rows],
        }
    parts = {name: parts[name] for name in PARTS if name in parts}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(page(parts))
    kept.write_text(json.dumps(parts, indent=1) + "\n")
    print(page(parts))
    return int(not all(row["holds"] for part in parts.values() for row in part["rows"]))


if __name__ == "__main__":
    sys.exit(main())
