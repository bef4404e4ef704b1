"""Golden outputs guard result versions: what a component computes may change only with its `result_version`.

Fingerprints hash the `result_version` of every spec class (DESIGN, rule 5), so that results made by an older
computation are stale and said to be so. That holds only if the number is raised when outputs change. Each entry of
`golden.json` keeps some outputs of a level, task or trainer and the versions of all spec classes they came from.

    python tests/test_golden.py

writes what is new, and what has changed together with a version; it refuses to overwrite what changed without one.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from inspect import isabstract
from pathlib import Path
from typing import NamedTuple, TypedDict

import pytest
import torch
from torch import Tensor

from harness.components.feedforward import MoE
from harness.evaluate import METRICS, all_lengths, score_lengths
from harness.module import TransformerModule
from harness.runner import run
from harness.schema import Level, Spec, is_foreign
from harness.seeding import seed_global
from harness.spec import Constant, ModelSpec, RunSpec, TrainSpec
from harness.transformer import build_model
from tasks import BPE, Batch, Characters, Copy, Lengths, SymbolTask, Translate, Words

FILE = Path(__file__).with_name("golden.json")
COMMAND = "python tests/test_golden.py"
CPU = torch.device("cpu")
VOCABULARY = 20
MODEL = ModelSpec(d_model=16, num_heads=2, num_layers=2)
RUN = RunSpec(
    model=MODEL,
    task=Copy(lengths=Lengths(train=(1, 4), test=(5, 6)), num_symbols=VOCABULARY - 4),
    train=TrainSpec(steps=12, batch_size=6, learning_rate=3e-3, eval_samples=16),
)
TOLERANCE = 1e-4  # relative, of the largest value of an entry: another CPU rounds otherwise


class Entry(TypedDict):
    """Some outputs, and the versions of the spec classes that they came from."""

    versions: dict[str, int]
    values: list[float]


# --- what is kept ----------------------------------------------------------------------------------------------------


def logits(spec: RunSpec) -> list[float]:
    """Some logits of the untrained model on 40 tokens, past T5's single-distance buckets: in training and in
    evaluation.
    """
    module = TransformerModule(spec)
    tokens = torch.arange(40)[None] * 7 % VOCABULARY
    source = tokens[:, :30] if spec.model.architecture.has_encoder() else None
    with torch.no_grad():
        seed_global(0)
        trained = module(tokens, source)
        scored = module.eval()(tokens, source)
    return flat(torch.cat([out[0, [0, 1, 9, 20, 39], :4] for out in (trained, scored)]))


def parameters(spec: RunSpec) -> list[float]:
    """The first two numbers of every parameter."""
    named = build_model(spec.model, VOCABULARY, seed=spec.seed).named_parameters()
    return flat(torch.cat([p.detach().flatten()[:2] for _, p in named]))


def factors(spec: RunSpec) -> list[float]:
    """The schedule's factors on the learning rate."""
    return [spec.train.schedule.factor(step, 40, spec.model.d_model) for step in range(40)]


def batches(spec: RunSpec) -> list[float]:
    """Training batches of some steps, two of them of another epoch for finite data."""
    few = spec.replace("train.batch_size", 3)
    drawn = [few.training_batch(step, CPU) for step in (0, 1, 7, 400)]
    return numbers(*drawn)


def samples(spec: RunSpec) -> list[float]:
    """Batches of a task in two streams, and its training lengths."""
    task = spec.task
    longest = max(task.lengths.test)
    drawn = [
        task.batch(0, stream, step, 2, n, CPU) for stream, step, n in (("train", 3, longest - 2), ("eval", 0, longest))
    ]
    return numbers(*drawn) + [float(task.training_length(0, "train", step)) for step in range(12)]


def training(spec: RunSpec) -> list[float]:
    """The loss after training, and the norm of every parameter."""
    with tempfile.TemporaryDirectory() as folder:
        record = run(spec, directory=Path(folder))
        assert record.status == "finished", record.cause
        trained = torch.load(Path(folder) / "model.pt", weights_only=True)
    return flat(torch.tensor([record.final["train/loss"], *(float(p.norm()) for p in trained.values())]))


def scores(spec: RunSpec) -> list[float]:
    """All scores of a model that is right about four times in five, whatever it is asked."""
    draw = torch.Generator().manual_seed(0)

    def guess(inputs: Tensor) -> Tensor:
        length = (inputs.shape[1] - 2) // 2
        asked = torch.randint(VOCABULARY, inputs.shape, generator=draw)
        copied = torch.cat([inputs[:, : length + 1], inputs[:, 1 : length + 1], torch.full((len(inputs), 1), 3)], dim=1)
        kept = torch.rand(inputs.shape, generator=draw) < 0.8
        return torch.nn.functional.one_hot(torch.where(kept, copied, asked), VOCABULARY).float()

    found = score_lengths(guess, spec, all_lengths(spec.task), stream="eval", samples=spec.train.eval_samples)
    assert len(found) == 6 * len(METRICS)
    return [score.value for score in found]


def flat(x: Tensor) -> list[float]:
    return [float(f"{value:.7g}") for value in x.flatten().tolist()]


def numbers(*drawn: Batch) -> list[float]:
    return [float(n) for batch in drawn for x in (batch.inputs, batch.targets) for n in x.flatten().tolist()]


AXES: dict[str, Callable[[RunSpec], list[float]]] = {
    "model.position": logits,
    "model.attention": logits,
    "model.scale": logits,
    "model.qk_norm": logits,
    "model.output_projection": logits,
    "model.norm": logits,
    "model.norm_placement": logits,
    "model.residual": logits,
    "model.feedforward": logits,
    "model.embedding_scale": logits,
    "model.output_head": logits,
    "model.architecture": logits,
    "model.init.linear": parameters,
    "model.init.residual_gain": parameters,
    "train.kernel": logits,
    "train.schedule": factors,
    "train.sampling": batches,
    "task": samples,
}
WHOLES: dict[str, tuple[RunSpec, Callable[[RunSpec], list[float]]]] = {
    "initialisation": (RUN, parameters),
    "training": (RUN, training),
    "training with all that draws or smooths": (
        RUN.replaced({f"model.{kind}_dropout": 0.1 for kind in ("attention", "residual", "embedding")}).replaced(
            {
                "train.label_smoothing": 0.1,
                "train.recompute": True,
                "model.feedforward": MoE(jitter=0.1, bias_rate=0.01),
            }
        ),
        training,
    ),
    "training, unclipped and undecayed": (
        RUN.replace("train.gradient_clip", None)
        .replace("train.weight_decay", 0.0)
        .replace("train.schedule", Constant()),
        training,
    ),
    **{
        f"translation in {level.kind}": (RUN.replace("task", Translate(tokenisation=level)), samples)
        for level in (BPE(), Words(), Characters())
    },
    "evaluation": (RUN, scores),
    "evaluation without the end token": (RUN.replace("task.train_end_token", False), scores),
}


def subjects() -> Iterator[tuple[str, RunSpec, Callable[[RunSpec], list[float]]]]:
    """Name, spec and outputs of every entry."""
    for path, outputs in AXES.items():
        base = next(kind for kind in type(RUN.at(path)).__mro__ if Level in kind.__bases__)
        for level in base.levels().values():
            if not is_foreign(level):
                made = level(lengths=RUN.task.lengths) if issubclass(level, SymbolTask) else level()
                yield f"{path} = {level.__name__}", RUN.replace(path, made), outputs
    for name, (spec, outputs) in WHOLES.items():
        yield name, spec, outputs


SUBJECTS = {name: (spec, outputs) for name, spec, outputs in subjects()}


def versions(spec: Spec) -> dict[str, int]:
    return {
        kind.__name__: kind.result_version for kind in sorted({type(s) for s in spec.specs()}, key=lambda k: k.__name__)
    }


def computed(name: str) -> Entry:
    spec, outputs = SUBJECTS[name]
    torch.set_num_threads(1)
    return {"versions": versions(spec), "values": outputs(spec)}


# --- the judgement ---------------------------------------------------------------------------------------------------


def close(one: list[float], other: list[float]) -> bool:
    scale = max((abs(value) for value in other), default=0.0)
    return len(one) == len(other) and all(
        abs(a - b) <= TOLERANCE * max(abs(b), 0.01 * scale) for a, b in zip(one, other, strict=True)
    )


class Verdict(NamedTuple):
    """Whether an entry is as it should be, else whether it may be written anew, and what there is to do."""

    fine: bool
    writable: bool
    sentence: str


def verdict(stored: Entry | None, now: Entry) -> Verdict:
    """How an entry's outputs and versions compare to those that are kept."""
    again = f"run `{COMMAND}` and commit {FILE.name}"
    if stored is None:
        return Verdict(False, True, f"no golden outputs yet: {again}")
    old, new = stored["versions"], now["versions"]
    if lowered := [kind for kind in new if new[kind] < old.get(kind, 0)]:
        return Verdict(False, False, f"the result_version of {', '.join(lowered)} was lowered: it only rises")
    if raised := [kind for kind in new if new[kind] > old.get(kind, 0)]:
        return Verdict(False, True, f"the result_version of {', '.join(raised)} was raised: {again}")
    if old.keys() != new.keys():
        return Verdict(False, True, f"it is made of other specs: {again}")
    if close(now["values"], stored["values"]):
        return Verdict(True, False, "")
    advice = f"raise that of what you changed (one of {', '.join(new)}) and run `{COMMAND}`, or undo the change"
    return Verdict(False, False, f"outputs changed and no result_version was raised: {advice}")


@cache
def golden() -> dict[str, Entry]:
    return json.loads(FILE.read_text())["entries"] if FILE.exists() else {}


@pytest.mark.parametrize("name", SUBJECTS)
def test_outputs_change_only_with_a_result_version(name: str) -> None:
    found = verdict(golden().get(name), computed(name))
    assert found.fine, f"{name}: {found.sentence}"


def test_no_golden_outputs_are_left_of_what_is_gone() -> None:
    assert golden().keys() == SUBJECTS.keys(), f"run `{COMMAND}`"


def test_every_spec_class_has_golden_outputs() -> None:
    def subclasses(kind: type) -> Iterator[type]:
        for sub in kind.__subclasses__():
            yield sub
            yield from subclasses(sub)

    kept = {kind for entry in golden().values() for kind in entry["versions"]}
    no_part_of_a_run = ("harness.study", "harness.presets", "harness.space", "harness.match")
    specs = {s for s in subclasses(Spec) if not is_foreign(s) and s.__module__ not in no_part_of_a_run}
    ours = {s.__name__ for s in specs if not isabstract(s)}
    bases = {s.__name__ for s in subclasses(Level) if Level in s.__bases__} | {"Level"}
    assert ours - bases <= kept


STORED: Entry = {"versions": {"RoPE": 1, "ModelSpec": 2}, "values": [1.0, 0.5, 0.0]}


@pytest.mark.parametrize(
    ("stored", "versions", "values", "words"),
    [
        (STORED, {"RoPE": 1, "ModelSpec": 2}, [1.0, 0.5, 0.0], ""),
        (STORED, {"RoPE": 1, "ModelSpec": 2}, [1.00005, 0.5, 5e-7], ""),  # another CPU
        (STORED, {"RoPE": 1, "ModelSpec": 2}, [1.001, 0.5, 0.0], "outputs changed and no result_version was raised"),
        (STORED, {"RoPE": 1, "ModelSpec": 2}, [1.0, 0.5], "outputs changed and no result_version was raised"),
        (STORED, {"RoPE": 1, "ModelSpec": 2}, [1.0, 0.5, float("nan")], "outputs changed and no result_version"),
        (STORED, {"RoPE": 2, "ModelSpec": 2}, [1.001, 0.5, 0.0], "the result_version of RoPE was raised: run"),
        (STORED, {"RoPE": 2, "ModelSpec": 2}, [1.0, 0.5, 0.0], "the result_version of RoPE was raised: run"),
        (STORED, {"RoPE": 1, "ModelSpec": 1}, [1.0, 0.5, 0.0], "the result_version of ModelSpec was lowered"),
        (STORED, {"RoPE": 1, "ModelSpec": 2, "New": 1}, [1.0, 0.5, 0.0], "the result_version of New was raised: run"),
        (STORED, {"RoPE": 1}, [1.0, 0.5, 0.0], "it is made of other specs: run"),
        (None, {"RoPE": 1}, [1.0], "no golden outputs yet: run"),
    ],
)
def test_the_judgement(stored: Entry | None, versions: dict[str, int], values: list[float], words: str) -> None:
    found = verdict(stored, {"versions": versions, "values": values})
    assert found.fine is (words == "")
    assert found.sentence.startswith(words)
    assert found.writable is (f"run `{COMMAND}` and commit" in found.sentence)


def test_a_changed_computation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.components import position

    name = "model.position = RoPE"
    before = computed(name)
    true_angles = position.angles
    monkeypatch.setattr(position, "angles", lambda *args: true_angles(*args) * 1.01)
    assert verdict(before, before).fine
    assert "outputs changed and no result_version was raised" in verdict(before, computed(name)).sentence


# --- the command -----------------------------------------------------------------------------------------------------


def write() -> list[str]:
    """Bring the file up to date unless something changed without a version; what did."""
    entries, refused = dict(golden()), []
    for name in SUBJECTS:
        now = computed(name)
        found = verdict(entries.get(name), now)
        if found.writable:
            entries[name] = now
        elif not found.fine:
            refused.append(f"{name}: {found.sentence}")
    if not refused:
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entries[name])}" for name in SUBJECTS)
        FILE.write_text(f'{{"generated_by": {json.dumps(COMMAND)}, "entries": {{\n{lines}\n}}}}\n')
    return refused


if __name__ == "__main__":
    refusals = write()
    sys.stderr.writelines(f"{line}\n" for line in refusals)
    sys.exit(bool(refusals))
