"""`make faults`: injects every fault, trains what is healthy, and writes which alarm named what to
results/reference/diagnostics. It resumes: a case that is done is not done again.

Thresholds were chosen while looking at the calibration half (mild severities, seeds of its own) only; what is published
is the evaluation half: every severity, on other seeds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults import healthy
from faults.structural import FAULTS
from faults.training import BROKEN, UNWISE, TrainingFault

from harness.diagnostics import DETECTORS, PROBES, detect, examine, history_of, subject_of
from harness.evaluate import GATE
from harness.record import read_curves, write_atomically
from harness.runner import run
from harness.spec import RunSpec
from harness.stats import clopper_pearson

ROOT = Path(__file__).parents[2]
CALIBRATION, EVALUATION = "calibration", "evaluation"
# An evaluation seed that was looked at while a probe was mended evaluates nothing any more:
# 1, 2, 11, 12, 17, 27, 100 to 127, 200 to 203.
HEALTHY_SEEDS = {CALIBRATION: range(50, 51), EVALUATION: range(300, 304)}
FAULT_SEEDS = {CALIBRATION: (7,), EVALUATION: (217, 227)}
STRUCTURAL_SEEDS = {CALIBRATION: (0,), EVALUATION: (21, 22)}


@dataclass(frozen=True)
class Case:
    """One model that is examined, or one run.

    Attributes:
        kind: *structural* (nothing is trained), *broken* (a declared number or rule does not act), *unwise* (what is
            declared comes to harm), *pair* (two faults at once), *healthy*.
        fault: its name.
        strength: how bad it is.
        seed: of the model and its data.
        half: *calibration* or *evaluation*.
    """

    kind: str
    fault: str
    strength: float
    seed: int
    half: str

    @property
    def key(self) -> str:
        return "_".join(map(str, (self.kind, self.fault, self.strength, self.seed))).replace("/", "÷").replace(" ", "-")


def cases() -> Iterator[Case]:
    """Every case, the calibration half first."""
    for half in (CALIBRATION, EVALUATION):
        for index, fault in enumerate(FAULTS):
            yield from _each("structural", f"{index} {fault.name}", fault.strengths, STRUCTURAL_SEEDS, half)
        for kind, faults in (("broken", BROKEN), ("unwise", UNWISE)):
            for each in faults:
                yield from _each(kind, each.name, each.strengths, FAULT_SEEDS, half)
        for name, spec in healthy.runs(HEALTHY_SEEDS[half]):
            yield Case("healthy", name, 0.0, spec.seed, half)
    for one, other in PAIRS:
        for seed in FAULT_SEEDS[EVALUATION]:
            yield Case("pair", f"{one} + {other}", 0.0, seed, EVALUATION)


def _each(
    kind: str, name: str, strengths: tuple[float, ...], seeds: dict[str, tuple[int, ...]], half: str
) -> Iterator[Case]:
    for strength in _strengths(strengths, half):
        for seed in seeds[half]:
            yield Case(kind, name, strength, seed, half)


def _strengths(strengths: tuple[float, ...], half: str) -> tuple[float, ...]:
    """The mild ones for calibration; all of them, on other seeds, for evaluation."""
    return strengths[:-1] or strengths if half == CALIBRATION else strengths


PAIRS = (
    ("rate too high", "ε changed"),
    ("rate too low", "dropout in training"),
    ("β₂ changed", "labels of others"),
    ("decay changed", "noise in training"),
    ("same batches", "rate too low"),
    ("same batches", "dropout in training"),
    ("unclipped", "schedule moved rarely"),
    ("warm-up left out", "noise in training"),
    ("stepped again", "schedule by epoch"),
    ("labels of others", "dropout in training"),
    ("frozen late", "β₁ changed"),
    ("plain descent", "labels of others"),
    ("gradients multiplied", "β₂ changed"),
    ("targets shifted late", "rate too low"),
)
TRAINED = {fault.name: fault for fault in (*BROKEN, *UNWISE)}


def outcome(case: Case) -> dict[str, Any]:
    """What was found in a case."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    found = _examined(case) if case.kind == "structural" else _trained(case)
    return asdict(case) | found | {"seconds": time.perf_counter() - begun}


def _examined(case: Case) -> dict[str, Any]:
    fault = FAULTS[int(case.fault.split()[0])]
    module = fault.module(case.seed)
    fault.patch(module, case.strength)
    alarms = [finding.probe.name for finding in examine(subject_of(module.spec, module)) if finding.alarms]
    return {
        "named": [[fault.named]],
        "alarms": alarms,
        "remarks": [],
        "status": "",
        "accuracy": float("nan"),
        "detected": 0,
    }


def _trained(case: Case) -> dict[str, Any]:
    faults, spec = _faults_of(case)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault.injected(case.strength or fault.strengths[-1]))
        record = run(spec, directory=Path(folder) / "run", probes=Path(folder) / "probes")
        lines = read_curves(Path(folder) / "run" / "curves.jsonl")
    named = [list(fault.named) for fault in faults]
    findings = detect(history_of(spec, lines, record))
    return {
        "named": named,
        "alarms": [found.probe for found in record.findings if found.alarm],
        "remarks": [found.probe for found in record.findings if not found.alarm],
        "values": {finding.probe.name: finding.found.value for finding in findings if finding.measured},
        "status": record.status,
        "accuracy": record.final["eval/in_distribution"],
        "detected": _detected(spec, lines, {name for names in named for name in names}, record),
    }


def _faults_of(case: Case) -> tuple[list[TrainingFault], RunSpec]:
    if case.kind == "healthy":
        return [], next(spec for name, spec in healthy.runs(range(case.seed, case.seed + 1)) if name == case.fault)
    faults = [TRAINED[name] for name in case.fault.split(" + ")]
    first = next((fault for fault in faults if fault.train or fault.declared), faults[0])
    return faults, first.spec(case.strength or first.strengths[-1], case.seed)


def _detected(spec: RunSpec, lines: list[dict[str, float]], names: set[str], record: Any) -> int:
    """The first step at which one of these alarms: 0 before training, −1 at the end or never."""
    if any(found.alarm and found.probe in names and found.rank < len(PROBES) for found in record.findings):
        return 0
    for count in range(1, len(lines) + 1):
        found = detect(history_of(spec, lines[:count]))
        if any(finding.alarms and finding.probe.name in names for finding in found):
            return int(lines[count - 1]["step"])
    return -1


def run_all(todo: list[Case], folder: Path, jobs: int) -> None:
    """Work cases off, each into a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    left = [case for case in todo if not (folder / f"{case.key}.json").exists()]
    print(f"{len(todo) - len(left)} of {len(todo)} cases are done", file=sys.stderr)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        cases_of = {pool.submit(outcome, case): case for case in left}
        for number, done in enumerate(as_completed(cases_of), 1):
            case, found = cases_of[done], done.result()
            write_atomically(folder / f"{case.key}.json", json.dumps(found))
            if number % 20 == 0:
                print(
                    f"{number} of {len(left)}: {case.key}: {', '.join(found['alarms']) or 'nothing'}", file=sys.stderr
                )


def read(todo: list[Case], folder: Path) -> pd.DataFrame:
    """A row a case that is done: its fields, and `first`, the diagnosis: *nothing*, or *unknown* where harm has no
    cause.
    """
    files = [folder / f"{case.key}.json" for case in todo]
    table = pd.DataFrame([json.loads(file.read_text()) for file in files if file.exists()])
    if table.empty:
        return table
    table["first"] = [diagnosis(alarms) for alarms in table["alarms"]]
    table["right"] = [
        first in named[0] if named else first == "nothing"
        for first, named in zip(table["first"], table["named"], strict=True)
    ]
    table["all_named"] = [
        all(set(names) & set(alarms) for names in named)
        for named, alarms in zip(table["named"], table["alarms"], strict=True)
    ]
    return table


def diagnosis(alarms: list[str]) -> str:
    """The first alarm in the order of triage."""
    return "nothing" if not alarms else "unknown" if alarms[0] == "not_learned" else alarms[0]


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """A row a kind of case: how many, and how many are as they should be, with a 95 % Clopper–Pearson interval."""
    rows = []
    learned = table["accuracy"] >= GATE
    groups = {
        "structural faults, named first": table[table["kind"] == "structural"]["right"],
        "broken training, named first": table[table["kind"] == "broken"]["right"],
        "unwise declarations that came to harm, named first": table[(table["kind"] == "unwise") & ~learned]["right"],
        "pairs of faults, both named": table[table["kind"] == "pair"]["all_named"],
        "healthy runs that pass their gate, no alarm": table[(table["kind"] == "healthy") & learned]["right"],
    }
    for name, right in groups.items():
        low, high = clopper_pearson(int(right.sum()), len(right)) if len(right) else (0.0, 1.0)
        rows.append({"what": name, "cases": len(right), "right": int(right.sum()), "low": low, "high": high})
    return pd.DataFrame(rows)


def by_fault(table: pd.DataFrame) -> pd.DataFrame:
    """A row a fault: recall, what else was said first, steps until it was told, whether it hurt; without the runs in
    which an unwise declaration did no harm: there is nothing to tell.
    """
    harmless = (table["kind"] == "unwise") & (table["accuracy"] >= GATE)
    faulty = table[table["kind"].isin(["structural", "broken", "unwise"]) & ~harmless]
    rows = []
    for (kind, fault), own in faulty.groupby(["kind", "fault"], sort=False):
        wrong = sorted(set(own.loc[~own["right"], "first"]))
        told = own.loc[own["right"] & (own["detected"] >= 0), "detected"]
        rows.append(
            {
                "kind": kind,
                "fault": fault,
                "named": " or ".join(own["named"].iloc[0][0]),
                "strengths": ", ".join(f"{x:g}" for x in sorted(set(own["strength"]))),
                "cases": len(own),
                "recall": own["right"].mean(),
                "instead": ", ".join(wrong),
                "steps_to_detect": told.median() if len(told) else float("nan"),
                "hurts": "" if kind == "structural" else "yes" if (own["accuracy"] < GATE).all() else "no",
            }
        )
    return pd.DataFrame(rows)


def outside(table: pd.DataFrame) -> dict[str, int]:
    """In how many healthy runs that pass their gate each detector's measure lies outside of its bounds, alarm or not:
    what speaks only of harm cannot alarm there.
    """
    healthy = table[(table["kind"] == "healthy") & (table["accuracy"] >= GATE)]
    both = zip(healthy["alarms"], healthy["remarks"], strict=True)
    said = [name for alarms, remarks in both for name in {*alarms, *remarks}]
    return dict(Counter(said).most_common())


def confusion(table: pd.DataFrame) -> pd.DataFrame:
    """Cases by the alarm that should be first (rows; *nothing* for healthy runs) and the one that was."""
    single = table[(table["kind"] != "pair") & ~((table["kind"] == "healthy") & (table["accuracy"] < GATE))]
    due = ["nothing" if not named else named[0][0] for named in single["named"]]
    counted = pd.crosstab(pd.Series(due, name="due"), pd.Series(single["first"].to_numpy(), name="said"))
    order = ["nothing", *(probe.name for probe in (*PROBES, *DETECTORS)), "unknown"]
    rows = [name for name in order if name in counted.index]
    columns = [name for name in order if name in counted.columns or name == "unknown"]
    return counted.reindex(index=rows, columns=columns, fill_value=0)


def draw(counted: pd.DataFrame, path: Path) -> None:
    """The confusion matrix as a picture: shares of rows, numbers of cases."""
    figure = Figure(figsize=(0.32 * len(counted.columns) + 2.6, 0.28 * len(counted) + 2.4), layout="constrained")
    ax = figure.subplots()
    shares = counted.div(counted.sum(axis=1), axis=0)
    labels = counted.astype(str).where(counted > 0, "")
    sns.heatmap(
        shares, annot=labels, fmt="", cmap="Blues", vmin=0, vmax=1, cbar=False, linewidths=0.4, ax=ax,
        annot_kws={"size": 6.5}, xticklabels=True, yticklabels=True,
    )  # fmt: skip
    ax.set(xlabel="what was named first", ylabel="what should be")
    ax.tick_params(labelsize=7, length=0)
    ax.tick_params(axis="x", rotation=90)
    figure.savefig(path, dpi=200)


def report(table: pd.DataFrame, command: str) -> str:
    """The published page."""
    half = table[table["half"] == EVALUATION]
    training = by_fault(half)
    dynamics = training[training["kind"] != "structural"]
    alarms = half[(half["kind"] == "healthy") & (half["accuracy"] >= GATE) & ~half["right"]]
    failed = half[(half["kind"] == "healthy") & (half["accuracy"] < GATE)]
    lines = [
        "# Fault injection",
        "",
        "Every fault is a patch made after the spec is declared; no probe is told of it. Thresholds were chosen on the "
        "calibration half (mild severities, seeds of its own); these are all severities, on other seeds. Reproduced "
        f"by `{command}` at commit {commit()}.",
        "",
        _markdown(summary(half), "evaluation half"),
        "",
        "The same on the calibration half:",
        "",
        _markdown(summary(table[table["half"] == CALIBRATION]), "calibration half"),
        "",
        f"Macro recall over the {len(dynamics)} faults of training: {dynamics['recall'].mean():.3f}.",
        "",
        "![Confusion matrix](confusion.png)",
        "",
        "## Faults of training",
        "",
        "*Steps to detect*: the first step at which the right alarm sounds; 0 before training, −1 only once the run is "
        "over. *Hurts*: whether every run with it missed its gate; a fault that does not is latent.",
        "",
        "| fault | strength | named | recall | instead | steps to detect | hurts |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r['fault']} ({r['kind']}) | {r['strengths']} | {r['named']} | {r['recall']:.2f} | "
            f"{r['instead'] or '–'} | {r['steps_to_detect']:.0f} | {r['hurts']} |"
            for r in dynamics.to_dict("records")
        ),
        "",
        "## Structural faults that were not named first",
        "",
        *(
            [
                f"- {r['fault']} ({r['strengths']}): {r['named']} was due, {r['instead']} came first"
                for r in training[(training["kind"] == "structural") & (training["recall"] < 1)].to_dict("records")
            ]
            or ["None."]
        ),
        "",
        "## Alarms in healthy runs",
        "",
        *([f"- {r['fault']}: {', '.join(r['alarms'])}" for r in alarms.to_dict("records")] or ["None."]),
        "",
        "Outside of their bounds in healthy runs, as a rule without an alarm, as detectors of what is unusual alarm "
        f"only where training came to harm: {_counted(outside(half)) or 'none'}.",
        "",
        f"{len(failed)} more runs without a fault missed their gate and are no healthy ones; named first in them: "
        f"{_counted(failed['first'].value_counts().to_dict()) or 'nothing'}.",
        "",
    ]
    return "\n".join(lines)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def _markdown(table: pd.DataFrame, name: str) -> str:
    head = [f"| {name} | cases | as it should be | share | 95 % interval |", "|---|---|---|---|---|"]
    rows = [
        f"| {r['what']} | {r['cases']} | {r['right']} | {r['right'] / max(r['cases'], 1):.3f} | "
        f"{r['low']:.3f} to {r['high']:.3f} |"
        for r in table.to_dict("records")
    ]
    return "\n".join([*head, *rows])


def commit() -> str:
    """The commit of this checkout."""
    told = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def publish(table: pd.DataFrame, folder: Path, command: str) -> None:
    """Tables, figure and page."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = ["kind", "fault", "strength", "seed", "half", "first", "right", "all_named", "accuracy", "detected"]
    table[kept].to_csv(folder / "cases.csv", index=False, float_format="%.4g")
    half = table[table["half"] == EVALUATION]
    by_fault(half).to_csv(folder / "faults.csv", index=False, float_format="%.4g")
    counted = confusion(half)
    counted.to_csv(folder / "confusion.csv")
    draw(counted, folder / "confusion.png")
    (folder / "report.md").write_text(report(table, command))


def main() -> None:
    """Run what is left, then write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "faults", help="where cases are kept")
    parser.add_argument("--publish", type=Path, default=ROOT / "results" / "reference" / "diagnostics")
    parser.add_argument("--only", default="", help="only cases whose name holds this; nothing is published")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    todo = [case for case in cases() if options.only in case.key]
    run_all(todo, options.results, options.jobs)
    table = read(todo, options.results)
    print(summary(table).to_string(index=False))
    if not options.only:
        publish(table, options.publish, "make faults")


if __name__ == "__main__":
    main()
