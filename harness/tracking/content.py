"""What is said about a run: its files on disk as parameters, tags, metrics and texts. Plain data in, plain data out."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from harness.record import Diagnosed, RunRecord
from harness.schema import canonical_json, flatten, quoted
from harness.tracking.received import Label
from harness.wording import at, decimal

NOTE = "mlflow.note.content"  # MLflow shows this tag as the run's description, as Markdown
PARENT = "mlflow.parentRunId"
STATUSES = {"finished": "FINISHED", "diverged": "FAILED", "out_of_memory": "FAILED", "failed": "FAILED"}
HEAD = 4000  # characters of the report that a description takes at most: a tag holds 8000
FIRST = ("train", "eval", "router")  # groups of curves that a run's page begins with
WATCHED = "watched/"
PICTURES = {"scores": "Scores", "accuracy_by_length": "Accuracy by length", "loss": "Training loss"}  # figures shown


class Value(NamedTuple):
    """A metric at a step."""

    key: str
    value: float
    step: int


def parameters(document: Mapping[str, Any]) -> dict[str, str]:
    """Every field of a spec by its dotted path, as text."""
    return {path: str(value) for path, value in flatten(document).items()}


def run_tags(study: Mapping[str, Any], label: Label, fingerprint: str, spec: Mapping[str, Any]) -> dict[str, str]:
    """Tags that are known when a run begins."""
    return {
        **_common_tags(study, label.budget),
        "kind": "run",
        "variant": label.variant,
        "task": label.task,
        "seed": str(label.seed),
        "fingerprint": fingerprint,
        "dataset": dataset(spec).source,
    }


def study_tags(study: Mapping[str, Any]) -> dict[str, str]:
    """Tags of the parent run."""
    return {
        **_common_tags(study, study["budget"]),
        "kind": "study",
        "axes": ", ".join(study["axes"]),
        "variants": ", ".join(map(quoted, study["variants"])),
        "tasks": ", ".join(study["tasks"]),
        "seeds": ", ".join(map(str, study["seeds"])),
        "claims": ", ".join(study["claims"]),
        "score": study["score"],
        "margin": str(study["margin"]),
    }


def _common_tags(study: Mapping[str, Any], budget: str) -> dict[str, str]:
    return {
        "study": study["study"],
        "budget": budget,
        "baseline": study["baseline"],
        "commit": study["commit"],
        "hardware": hardware(study["environment"]),
        "command": study["command"],
        "mlflow.source.name": f"harness ablate {study['study']}",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": study["commit"],
    }


def outcome_tags(record: RunRecord) -> dict[str, str]:
    """Tags that are known when a run has ended."""
    tags = {
        "status": record.status,
        "cause": record.cause,
        "attention_backend": str(record.ledger.get("attention_backend", "")),
        "attention_reason": str(record.ledger.get("attention_reason", "")),
        "hardware": hardware(record.environment),
        "commit": record.environment.get("commit", ""),
    }
    if record.was_examined:
        tags["diagnosis"] = ", ".join(found.probe for found in record.findings if found.alarm) or "none"
    tags |= {f"diagnosis.{found.probe}": _finding(found) for found in record.findings}
    return {key: value for key, value in tags.items() if value}


def _finding(found: Diagnosed) -> str:
    """`alarm: 3.2 at layer 1 (healthy: at most 1)`."""
    return f"{'alarm' if found.alarm else 'remark'}: {found.value:.3g}{at(found.where)} (healthy: {found.healthy})"


def hardware(environment: Mapping[str, str]) -> str:
    """What the run ran on, in words."""
    processor = f"{environment.get('cpu', 'unknown processor')}, {environment.get('cores', '?')} cores"
    return f"{environment['gpu']} ({processor})" if environment.get("gpu") else processor


class Data(NamedTuple):
    """What a run was trained and tested on: a pure function of task, sampling and seed, which the digest stands for."""

    name: str
    digest: str
    source: str


def dataset(spec: Mapping[str, Any]) -> Data:
    """The data of a run, its source in words: `Copy (lengths.train = [1, 10], …), Fresh samples, seed 3`."""
    fields = parameters({"task": spec["task"]})
    kind = fields.pop("task", "")
    details = ", ".join(f"{path.removeprefix('task.')} = {value}" for path, value in fields.items())
    sampling = parameters({"sampling": spec["train"]["sampling"]})["sampling"]
    identity = canonical_json([spec["task"], spec["train"]["sampling"], spec["train"]["batch_size"], spec["seed"]])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return Data(kind, digest, f"{kind} ({details}), {sampling} samples, seed {spec['seed']}")


def metric(curve: str) -> str:
    """What a curve is called in the store. MLflow's charts stand in the order of the alphabet, so what diagnostics
    watched has a prefix there that puts it behind scores and loss: `watched/heads/entropy.0`.
    """
    return curve if curve.partition("/")[0] in FIRST else f"{WATCHED}{curve}"


def outcome_values(record: RunRecord, curves: list[dict[str, float]]) -> Iterator[Value]:
    """Final metrics and ledger at the last step, named as in runs.csv; each score as a metric whose step is the length.

    A final metric that the curve already has at its last step is not said twice.
    """
    last = int(record.ledger.get("steps", max((line["step"] for line in curves), default=0)))
    told = {key for line in curves if line["step"] == last for key in line}
    for key, value in record.final.items():
        if key not in told:
            yield Value(key, value, last)
    for key, amount in record.ledger.items():
        if isinstance(amount, int | float):
            yield Value(key, float(amount), last)
    for score in record.scores:
        yield Value(f"eval/{score.metric}_by_length", score.value, score.length)


def run_text(study: Mapping[str, Any], label: Label, record: RunRecord | None) -> str:
    """The description on a run's page: what it is, how it ended, where to look."""
    changes = study["differences"].get(label.variant, {})
    changed = ", ".join(f"`{path} = {value}`" for path, value in changes.items())
    what = f"differs from the baseline *{study['baseline']}* in {changed}" if changed else "is the baseline"
    lines = [f"**{label.variant}** {what}. Task *{label.task}*, seed {label.seed}, budget *{label.budget}*."]
    if record is not None and record.status != "finished":
        lines.append(f"Ended **{record.status.replace('_', ' ')}**: {record.cause}")
    if record is not None and record.status == "finished":
        lines[
            0
        ] += (  # no paragraph of its own: MLflow folds a description after a few lines, and a diagnosis may follow
            f" Exact match {decimal(record.final.get('eval/in_distribution'))} at the training lengths, "
            f"{decimal(record.final.get('eval/extrapolation'))} beyond them."
        )
    for found in record.findings if record is not None else ():
        if found.alarm:
            lines.append(f"**{found.probe}**: {found.symptom}. Likely cause: {found.cause}. Try: {found.remedy}.")
    lines.append(
        "Under *Model metrics*: `attention/maps` by training step (enlarge the card, then move the slider), curves, "
        "and `eval/…_by_length`, where the step axis is the sequence length."
    )
    return "\n\n".join(lines)


def artifact_address(run_id: str, path: str) -> str:
    """Where MLflow's server has a run's artifact, seen from its pages."""
    return f"get-artifact?path={quote(path, safe='')}&run_uuid={run_id}"


def study_text(study: Mapping[str, Any], report: str, pictures: Mapping[str, str]) -> str:
    """The description of parent run and experiment: the answer once there is a report, the question, the plan, and
    pictures (their addresses by caption).
    """
    variants = ", ".join(quoted(name) for name in study["variants"] if name != study["baseline"])
    plan = (
        f"Baseline *{study['baseline']}* against {variants or 'nothing'}; tasks {', '.join(study['tasks'])}; "
        f"{len(study['seeds'])} seeds; budget *{study['budget']}*. What differs is "
        f"{', '.join(f'`{axis}`' for axis in study['axes'])} and nothing else."
    )
    places = (
        "The study's runs are the children of the run named *study · budget*, each called *variant · task · seed*. "
        "That run's artifacts hold the whole report: `report.html`. The menu *Views* above the table of runs shows the "
        "runs with their scores, loss curves, parameters that differ and attention maps."
    )
    figures = [f"![{caption}]({address})" for caption, address in pictures.items()] if report else []
    return "\n\n".join([*(report_head(report) or [f"**{study['question']}**"]), plan, *figures, places])


def report_head(report: str) -> list[str]:
    """The paragraphs of a Markdown report above its first section, without title and pictures.

    The answer, which the report quotes (`> …`), comes first: MLflow's folded description shows one line.
    """
    above = f"\n{report}".partition("\n## ")[0].strip().split("\n\n")
    kept = [text.strip() for text in above if text.strip() and not text.lstrip().startswith(("# ", "![", "<"))]
    ordered = sorted(kept, key=lambda text: not text.startswith("> "))
    head = [text.removeprefix("> ").replace("\n> ", "\n") for text in ordered]
    while sum(map(len, head)) > HEAD:
        head.pop()
    return head
