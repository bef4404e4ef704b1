"""How time and memory of attention grow with length, and what a decoded token costs: `make bench-attention`.

Each point is a process of its own, so that its peak memory is its own: one layer, forward and backward, fp32, one
thread. Time is taken in a second process whose allocator keeps what it has freed: glibc's gives blocks beyond a size
back to the kernel at once, and faulting them in again, pass after pass, would bend the exponents. They are fitted to
the three longest lengths. Decoding is timed with caches that are already full.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from harness.components.attention import (
    Attention,
    BigBird,
    GroupedQuery,
    Latent,
    Linear,
    Longformer,
    MultiHead,
    MultiQuery,
    SlidingWindow,
)
from harness.components.cache import FullCache
from harness.components.kernel import Fastest, Kernel, Math
from harness.components.position import ALiBi, NoPE, Position, RoPE, T5Bias, TransformerXL
from harness.decoding import greedy
from harness.machine import commit, cpu_name, peak_memory, reset_peak_memory
from harness.spec import ModelSpec
from harness.transformer import build_model

LENGTHS = (1024, 2048, 4096, 8192, 16_384)
CACHED = (256, 1024, 4096, 16_384)
MIB = 2**20
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}  # of glibc, in bytes
REPEATS = 3
DECODED = 1024  # tokens
EVERY = 32  # decoding without a cache, pass after pass over all tokens so far, is timed at each so manieth of them
LEAST = 10.0  # times as fast a cache should make it
OUT = Path("results/reference/bench-attention")


@dataclass(frozen=True)
class Variant:
    """Something to be measured, up to a length beyond which it takes gigabytes or minutes."""

    attention: Attention
    position: Position = field(default_factory=RoPE)
    kernel: Kernel = field(default_factory=Fastest)
    longest: int = LENGTHS[-1]
    num_heads: int = 2
    time: float = 2.0  # expected exponents
    memory: float = 1.0


VARIANTS = {
    "explicit (no flash)": Variant(MultiHead(), kernel=Math(), longest=4096, memory=2.0),
    "multi-head": Variant(MultiHead()),
    "multi-head, ALiBi": Variant(MultiHead(), ALiBi()),
    "multi-head, T5 bias": Variant(MultiHead(), T5Bias(), longest=8192),
    "grouped-query": Variant(GroupedQuery(num_groups=2), num_heads=4),
    "multi-query": Variant(MultiQuery()),
    "latent": Variant(Latent(d_latent=16, d_rope=8)),
    "sliding window": Variant(SlidingWindow(window=128), time=1.0),
    "Longformer": Variant(Longformer(window=128, num_global=4), time=1.0),
    "BigBird": Variant(BigBird(window=128, num_global=4, num_random=4), time=1.0),
    "linear": Variant(Linear(), time=1.0),
}
DECODERS: dict[str, Attention] = {
    "multi-head": MultiHead(),
    "grouped-query": GroupedQuery(num_groups=4),
    "multi-query": MultiQuery(),
    "latent": Latent(d_latent=128, d_rope=32),
}
CACHING: dict[str, tuple[Attention, Position]] = {
    **{kind: (level(), RoPE()) for kind, level in Attention.levels().items()},
    "MultiHead, TransformerXL": (MultiHead(), TransformerXL()),
}


def passes(name: str) -> Callable[[int], None]:
    """A forward and backward pass of a variant over so many tokens, its kernels loaded."""
    variant = VARIANTS[name]
    heads, levels = variant.num_heads, {"attention": variant.attention, "position": variant.position}
    spec = ModelSpec(d_model=64, num_layers=1, num_heads=heads, **levels)
    model = build_model(spec, 16, seed=0)
    layer = model.blocks[0].attention

    def once(tokens: int) -> None:
        x = torch.randn(1, tokens, 64, requires_grad=True)
        places = model.position.positions(tokens, x.device)
        relation = model.position.relation(places, places, causal=True, cached=False)
        with variant.kernel.context():
            layer(x, relation, causal=True).sum().backward()

    once(256)
    return once


def memory(name: str, length: int) -> tuple[int]:
    """Bytes at the peak of a pass above what was there before."""
    once = passes(name)
    reset_peak_memory()
    before = peak_memory()
    once(length)
    return (peak_memory() - before,)


def timed(name: str, length: int) -> tuple[float]:
    """Seconds of a pass, the best of some after a first one."""
    once, times = passes(name), []
    once(length)
    for _ in range(REPEATS):
        begun = time.perf_counter()
        once(length)
        times.append(time.perf_counter() - begun)
    return (min(times),)


def decoded(name: str, length: int) -> tuple[float, int]:
    """Milliseconds a decoded token with a cache of so many, batch 8, 16 heads of 64, and the bytes of that cache."""
    spec = ModelSpec(d_model=1024, num_layers=1, num_heads=16, attention=DECODERS[name], position=NoPE())
    model = build_model(spec, 16, seed=0).eval()
    layer, steps = model.blocks[0].attention, 30
    cache = layer.cache(length + steps + 1)
    assert isinstance(cache, FullCache)
    with torch.no_grad():
        x = torch.randn(8, 1, 1024)
        one = model.position.positions(1, x.device)
        layer(x, model.position.relation(one, one, causal=True, cached=True), causal=True, cache=cache)  # makes room
        for room in cache.room:
            room.normal_()
        cache.length, times = length, []
        for step in range(steps):
            keys = model.position.positions(length + step + 1, x.device)
            relation = model.position.relation(keys[-1:], keys, causal=True, cached=True)
            begun = time.perf_counter()
            layer(x, relation, causal=True, cache=cache)
            times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times), 8 * 4 * DECODERS[name].cache_elements(spec.shape, length)


def speedup(name: str, tokens: int) -> tuple[float]:
    """How many times as fast greedy decoding is with a cache as without, from a prompt of one token."""
    attention, position = CACHING[name]
    spec = ModelSpec(d_model=256, num_layers=4, num_heads=4, attention=attention, position=position)
    model = build_model(spec, 16, seed=0).eval()
    prompt = torch.zeros(1, 1, dtype=torch.int64)
    greedy(model, prompt, 8)
    cached = taken(partial(greedy, model, prompt, tokens))
    without = 0.0
    for length in range(EVERY // 2, tokens, EVERY):  # amid the lengths that each stands for
        without += EVERY * taken(partial(greedy, model, prompt.expand(1, length), 1, cached=False))
    return (without / cached,)


def taken(work: Callable[[], object]) -> float:
    """Seconds that something takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def in_a_process(*arguments: object) -> list[float]:
    """What a measurement in a process of its own gives."""
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    keeping = KEEPING if arguments[0] == "timed" else {}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | keeping)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def short(name: str) -> str:
    """A commit as people write it, dirty or not."""
    return name[:7] + "-dirty" * name.endswith("-dirty")


def exponent(lengths: list[int], values: list[float]) -> float:
    """The slope of log value over log length, least squares over the three longest."""
    x, y = [math.log(n) for n in lengths[-3:]], [math.log(max(v, 1e-9)) for v in values[-3:]]
    return statistics.linear_regression(x, y).slope


def main() -> None:
    """Measure everything, write the page and its figure."""
    commit()  # remembered now: the figure that is about to be written is a change too
    points = [(name, n) for name, variant in VARIANTS.items() for n in LENGTHS if n <= variant.longest]
    with ThreadPoolExecutor(2) as pool:  # memory does not mind what runs beside it; time does
        peaks = list(pool.map(lambda point: in_a_process("memory", *point)[0], points))
    seconds = [in_a_process("timed", *point)[0] for point in points]
    growth: Growth = {name: ([], [], []) for name in VARIANTS}
    for (name, length), took, peak in zip(points, seconds, peaks, strict=True):
        for column, value in zip(growth[name], (length, took, peak), strict=True):
            column.append(value)
    print(growth, file=sys.stderr)
    decoding = {name: [in_a_process("decode", name, n) for n in CACHED] for name in DECODERS}
    speedups = {name: in_a_process("speedup", name, DECODED)[0] for name in CACHING}
    OUT.mkdir(parents=True, exist_ok=True)
    draw(growth, decoding)
    (OUT / "report.md").write_text(page(growth, decoding, speedups))
    print((OUT / "report.md").read_text())


Growth = dict[str, tuple[list[int], list[float], list[float]]]
Decoding = dict[str, list[list[float]]]


def page(growth: Growth, decoding: Decoding, speedups: dict[str, float]) -> str:
    """The tables, as Markdown."""
    lines = [
        "# Attention: time, memory, decoding",
        "",
        f"`make bench-attention` at {short(commit())} on {cpu_name()}, torch {torch.__version__}, one thread, fp32.",
        "One layer, d_model 64, 2 heads (grouped-query: 4 in 2 groups), one sequence, forward and backward; windows of",
        f"128; latent of 16 + 8. Seconds: the best of {REPEATS}, in a process whose allocator keeps freed memory",
        "(MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_). MiB: the process's peak during one pass above what it held",
        "before, in a process of its own. Exponents are fitted to the three longest lengths; single points vary some",
        "percent from run to run, as machines do. It takes about seven minutes, on a machine that does nothing else.",
        "",
        "| variant | longest | seconds | MiB at the peak | exponent of time | of memory | expected |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, (lengths, seconds, peaks) in growth.items():
        expected = f"{VARIANTS[name].time:.0f}, {VARIANTS[name].memory:.0f}"
        fitted = f"{exponent(lengths, seconds):.2f} | {exponent(lengths, peaks):.2f}"
        lines.append(
            f"| {name} | {lengths[-1]:,} | {seconds[-1]:.3g} | {peaks[-1] / MIB:.3g} | {fitted} | {expected} |"
        )
    head = " | ".join(f"{n:,}" for n in CACHED)
    lines += [
        "",
        "The longest length is where a variant takes no gigabytes and no minutes. A T5 bias is trained, which no fused "
        "kernel takes: it is computed in strips of queries that are made again in the backward pass, so that memory "
        "grows with the length, from a large start.",
        "",
        "Milliseconds a decoded token by cached tokens (the median of 30; d_model 1024, 16 heads, grouped-query in 4 "
        "groups, latent of 128 + 32 numbers a token, batch 8), MiB of the longest cache:",
        "",
        f"| variant | {head} | MiB |",
        "|---|" + "--:|" * (len(CACHED) + 1),
    ]
    for name, found in decoding.items():
        times = " | ".join(f"{ms:.3g}" for ms, _ in found)
        lines.append(f"| {name} | {times} | {found[-1][1] / MIB:.4g} |")
    lines += [
        "",
        "Latent attention decodes from a small cache with more arithmetic: its keys are never made, so that each head "
        "multiplies with the whole latent. On a CPU arithmetic is what counts: nor does grouped-query gain at the "
        "longest cache, where its heads multiply as often with keys that they share.",
        "",
        f"How many times as fast greedy decoding of {DECODED:,} tokens is with a cache as without (4 layers, d_model "
        f"256, 4 heads, levels with their defaults; RoPE where no position is named). Without a cache one token in "
        f"{EVERY} is timed. A smaller model or fewer tokens gain less.",
        "",
        f"| decoder | × | at least {LEAST:.0f} |",
        "|---|--:|---|",
        *(f"| {name} | {found:.1f} | {'holds' if found >= LEAST else 'FAILS'} |" for name, found in speedups.items()),
    ]
    return "\n".join([*lines, "", "![Time and memory against length](growth.png)", ""])


def draw(growth: Growth, decoding: Decoding) -> None:
    """Time and peak memory against length, and time a token against the cache, on logarithmic axes."""
    import seaborn
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    axes = figure.subplots(1, 3)
    names = list(dict.fromkeys([*growth, *decoding]))
    colours = [*seaborn.color_palette("colorblind", 10), (0.3, 0.3, 0.3)]
    lines = {
        name: {"marker": mark, "ms": 5, "lw": 1.2, "color": colour}
        for name, mark, colour in zip(names, "osv^D<>PX*h", colours, strict=True)
    }
    for name, (lengths, seconds, peaks) in growth.items():
        axes[0].plot(lengths, seconds, label=name, **lines[name])
        axes[1].plot(lengths, [p / MIB for p in peaks], **lines[name])
    for name, found in decoding.items():
        axes[2].plot(CACHED, [ms for ms, _ in found], label=name, **lines[name])
    titles = ("forward and backward, seconds", "peak memory, MiB", "milliseconds a decoded token")
    for axis, title, label in zip(axes, titles, ("tokens", "tokens", "cached tokens"), strict=True):
        axis.set(yscale="log", title=title, xlabel=label)
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[2].legend(fontsize=8, frameon=False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=5, fontsize=8, frameon=False)
    for kind in ("png", "svg"):
        figure.savefig(OUT / f"growth.{kind}", dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs="+")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    asked = parser.parse_args().one
    if asked is None:
        main()
    else:
        measures = {"memory": memory, "timed": timed, "decode": decoded, "speedup": speedup}
        print(json.dumps(measures[asked[0]](asked[1], int(asked[2]))))
