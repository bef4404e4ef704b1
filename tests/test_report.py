"""harness.report: contracts of the files, an answer that claims no more than the verdicts, any state of a study."""

import base64
import html.parser
import json
import math
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.record import RunRecord, Score
from harness.report import answer, write_report
from harness.report.inside import changes, similarity
from harness.report.tables import by_length, comparison, failures, flat, ledger, verdicts
from harness.report.wording import decimal, interval, percent, quantity, ranges, seconds
from harness.results import StudyData, load_study
from harness.stats import compare

# A realistic study, written to disk as runs leave it

VARIANTS = ("sinusoidal", "none", "learned", "RoPE", "ALiBi", "T5 bias")
FAR = {"sinusoidal": 0.1, "none": 0.35, "learned": 0.0, "RoPE": 0.08, "ALiBi": 0.5, "T5 bias": 0.55}
LEVELS = {
    "sinusoidal": {"kind": "Sinusoidal", "base": 10000.0},
    "none": {"kind": "NoPE"},
    "learned": {"kind": "Learned", "max_length": 32},
    "RoPE": {"kind": "RoPE", "base": 10000.0},
    "ALiBi": {"kind": "ALiBi"},
    "T5 bias": {"kind": "T5Bias", "num_buckets": 32, "max_distance": 128},
}
TRAIN, TEST = (1, 10), tuple(range(11, 21))
STEPS = 1200
METRICS = ("exact_match", "exact_match_no_end", "token_accuracy")

Fate = Callable[[str, str, int], str]


def finished(variant: str, task: str, seed: int) -> str:
    return "finished"


def some_fail(variant: str, task: str, seed: int) -> str:
    """Two runs diverge, one runs out of memory, one dies."""
    fates = {
        ("learned", "reverse", 2): "diverged",
        ("none", "copy", 5): "diverged",
        ("T5 bias", "reverse", 7): "out_of_memory",
        ("RoPE", "copy", 3): "failed",
    }
    return fates.get((variant, task, seed), "finished")


def write_study(
    folder: Path,
    *,
    variants: tuple[str, ...] = VARIANTS,
    tasks: tuple[str, ...] = ("copy", "reverse"),
    seeds: int = 8,
    fate: Fate = finished,
    attention: bool = True,
    codes: bool = True,
    **changes: Any,
) -> StudyData:
    """Write a study's folder and load it; `fate` gives each run's status, `changes` goes into study.json."""
    cells = [
        {"variant": v, "task": t, "seed": s, "fingerprint": sha256(f"{v}{t}{s}".encode()).hexdigest()[:16]}
        for t in tasks
        for s in range(seeds)
        for v in variants
    ]
    folder.mkdir(parents=True, exist_ok=True)
    document = {**study_document(variants, tasks, seeds), "runs": cells, **changes}
    (folder / "study.json").write_text(json.dumps(document))
    if codes:
        np.savez(folder / "codes.npz", **{variants[0]: sinusoidal_table(42, 64)})
    for cell in cells:
        write_run(folder / "runs" / cell["fingerprint"], cell, fate(cell["variant"], cell["task"], cell["seed"]), attention)
    return load_study(folder)


def study_document(variants: tuple[str, ...], tasks: tuple[str, ...], seeds: int) -> dict[str, Any]:
    return {
        "study": "position",
        "question": "Which position encoding lets a Transformer copy and reverse sequences longer than it was trained on?",
        "claims": ["E10", "E12"],
        "why": "two layers learn both tasks in a minute on one core",
        "axes": ["model.position"],
        "baseline": variants[0],
        "variants": list(variants),
        "tasks": list(tasks),
        "seeds": list(range(seeds)),
        "budget": "quick",
        "device": "cpu",
        "score": "exact_match",
        "higher_is_better": True,
        "margin": 0.1,
        "gate": 0.98,
        "train_lengths": dict.fromkeys(tasks, list(TRAIN)),
        "test_lengths": dict.fromkeys(tasks, list(TEST)),
        "spec": {
            "model": {"d_model": 64, "num_layers": 2, "num_heads": 4, "position": level(variants[0]), "norm": {"kind": "LayerNorm"}},
            "train": {"steps": STEPS, "learning_rate": 1e-3, "schedule": {"kind": "WarmupCosine", "warmup": 0.05}},
            "tasks": {t: {"kind": t.title(), "num_symbols": 16, "lengths": {"train": TRAIN, "test": TEST}} for t in tasks},
        },
        "differences": {
            v: {} if v == variants[0] else flat({"model": {"position": level(v)}}) for v in variants
        },
        "command": "harness ablate position --budget quick",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "environment": {"cpu": "Some CPU @ 2 GHz", "cores": "2", "python": "3.11.9", "torch": "2.13.0", "commit": "012345"},
    }  # fmt: skip


def level(variant: str) -> dict[str, Any]:
    return LEVELS.get(variant, {"kind": "Custom", "strength": 1.5})


def sinusoidal_table(length: int, width: int) -> np.ndarray:
    angle = np.arange(length)[:, None] * 10_000.0 ** -(np.arange(0, width, 2) / width)
    return np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(length, width)


def write_run(folder: Path, cell: dict[str, Any], status: str, attention: bool) -> None:
    """What a run with this status leaves: nothing if missing, curves alone if partial."""
    if status == "missing":
        return
    folder.mkdir(parents=True)
    draw = np.random.default_rng(int(cell["fingerprint"], 16))
    until = STEPS // 3 if status in ("diverged", "partial") else STEPS
    (folder / "curves.jsonl").write_text("".join(curve(draw, until, status)))
    (folder / "mirror.json").write_text(json.dumps({"run_id": sha256(cell["fingerprint"].encode()).hexdigest()[:32]}))
    if attention:
        write_attention(folder / "attention", cell["task"], draw, until)
    if status != "partial":
        record(cell, status, draw).write(folder / "record.json")


def curve(draw: np.random.Generator, until: int, status: str) -> list[str]:
    middle = draw.uniform(150, 400)
    lines = []
    for step in range(10, until + 1, 10):
        loss = 2.8 / (1 + math.exp((step - middle) / 60)) + 0.004 * draw.lognormal(0, 0.7)
        if status == "diverged" and step > until - 60:
            loss = 9.0 if step < until else math.nan
        line = {"step": step, "time": step, "train/loss": loss, "train/gradient_norm": 1.0, "train/exact_match": min(1.0, step / 800)}
        lines.append(json.dumps(line) + "\n")
    return lines


def write_attention(folder: Path, task: str, draw: np.random.Generator, last: int) -> None:
    folder.mkdir()
    source = [str(symbol) for symbol in np.random.default_rng(0).integers(0, 16, 10)]
    labels = ["BOS", *source, "SEP", *(source if task == "copy" else source[::-1])]
    for step in (0, last):
        logits = draw.normal(0, 0.2 + 3 * (step > 0), (2, 4, 22, 22)) + np.triu(np.full((22, 22), -np.inf), 1)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        np.savez_compressed(folder / f"{step:06d}.npz", weights=weights.astype(np.float16), labels=np.array(labels))


def record(cell: dict[str, Any], status: str, draw: np.random.Generator) -> RunRecord:
    scores = tuple(run_scores(cell, status, draw))
    final = {}
    if scores:
        inside, beyond = (
            [s.value for s in scores if s.metric == "exact_match" and (s.length in TEST) == test] for test in (False, True)
        )
        final = {"eval/in_distribution": float(np.mean(inside)), "eval/extrapolation": float(np.mean(beyond)),
                 "train/loss": 0.004, "eval/greedy_agreement": 1.0,
                 "train/steps_to_threshold": float(draw.integers(30, 90) * 10) if np.mean(inside) > 0.98 else math.nan}  # fmt: skip
    flash = cell["variant"] != "T5 bias"
    ledger: dict[str, int | float | str] = {"device": "cpu", "precision": "fp32",
        "attention_backend": "flash" if flash else "math",
        "attention_reason": "no bias matrix, causal" if flash else "T5Bias adds a trained T×T bias, which flash does not take",
        "parameters": 103_296 + 2048 * 3 * (cell["variant"] == "learned")}  # fmt: skip
    if status == "finished":
        ledger |= {"flops": 6.1e11 * (1 + 0.01 * (cell["variant"] == "ALiBi")), "tokens": 921_600, "steps": STEPS,
                   "wall_seconds": float(draw.uniform(9, 12)), "peak_memory_bytes": 412 * 2**20}  # fmt: skip
    causes = {
        "diverged": "the loss was not finite any more between steps 390 and 400",
        "out_of_memory": "killed by signal 9 (out of memory?)",
        "failed": "RuntimeError: something <b>broke</b> | badly",
    }
    return RunRecord(
        fingerprint=cell["fingerprint"], spec={}, status=status, cause=causes.get(status, ""), scores=scores, final=final, ledger=ledger
    )  # type: ignore[arg-type]


def run_scores(cell: dict[str, Any], status: str, draw: np.random.Generator) -> list[Score]:
    if status in ("failed", "out_of_memory"):
        return []
    level = FAR.get(cell["variant"], 0.3) * (1.0 if cell["task"] == "copy" else 0.15) * draw.uniform(0.7, 1.3)
    learned = draw.uniform() > 0.06
    scores = []
    for length in (*range(TRAIN[0], TRAIN[1] + 1), *TEST):
        inside = 1.0 if learned else max(0.0, 1.1 - length / 12)
        value = inside if length <= TRAIN[1] else min(1.0, max(0.0, 2 * level * (1 - (length - 11) / 9) + draw.normal(0, 0.02)))
        mark = "seen" if length <= 2 else ""
        if cell["variant"] == "learned" and length > 15:
            value, mark = 0.0, "unsupported"
        if status == "diverged":
            value, mark = 0.0, "diverged"
        scores += [Score(length=length, metric=m, value=value ** (1 / (1 + i)), mark=mark) for i, m in enumerate(METRICS)]
    return scores
