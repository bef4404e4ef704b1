"""No dead knobs: every field of every spec is flipped, and changes what it declares, and nothing that it should not.

A field declares what it changes by its marker, `Changes("parameters")` and so on. Each flip is run from end to end:

    parameters   names and shapes of the model's parameters
    outputs      logits of the untrained model, in training
    loss         which tokens are asked for, and so what the loss is of; or the routers' losses
    data         the tokens of the training batches
    schedule     the factors on the learning rate
    updates      the parameters after training
    evaluation   which lengths are scored, on how many samples, at which steps; or logits of the trained model
    hardware     attention backend, precision, what is refused; or what is kept for the backward pass
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from harness.components.attention import GroupedQuery
from harness.components.feedforward import MoE, ReLU
from harness.components.position import NoPE, Randomised, T5Bias, YaRN
from harness.components.scale import LearnedTemperature
from harness.module import answer_loss
from harness.record import read_curves
from harness.runner import run
from harness.schema import Changes, Level, Spec, UserError, is_foreign
from harness.seeding import seed_global
from harness.spec import ModelSpec, RunSpec, TrainSpec, WarmupCosine
from harness.transformer import Transformer, build_model
from tasks import BPE, Batch, Copy, Lengths, Task, Translate

CPU = torch.device("cpu")
WORDS = 500  # more than any vocabulary here
CALLS: list[tuple[str, int, int]] = []  # (stream, samples, length) of every batch that a watched task was asked for


def watched(kind: type[Task]) -> type[Task]:
    """A user's task that remembers what it was asked for."""

    class Watched(kind):  # type: ignore[misc, valid-type]
        def batch(self, seed: int, stream: str, step: int, batch_size: int, length: int, *how: Any) -> Batch:
            CALLS.append((stream, batch_size, length))
            return super().batch(seed, stream, step, batch_size, length, *how)

    Watched.__name__ = f"Watched{kind.__name__}"
    return Watched


LENGTHS = Lengths(train=(2, 4), test=(6,))
WATCHED = {kind: watched(kind) for kind in Task.levels().values() if not is_foreign(kind)}
RUN = RunSpec(
    model=ModelSpec(d_model=16, num_heads=2, num_layers=1),
    task=WATCHED[Copy](lengths=LENGTHS),
    # The learning rate is high enough to move weights, the gradient's norm above the limit; an evaluation at step 10.
    train=TrainSpec(
        steps=12, batch_size=4, schedule=WarmupCosine(warmup=0.2), gradient_clip=0.5, eval_samples=4, eval_every=10
    ),
)
SMALL: dict[type[Level], Level] = {
    T5Bias: T5Bias(num_buckets=8, max_distance=12),  # logarithmic from distance 4 on
    YaRN: YaRN(train_factor=2.0, trained_length=8, slow=0.5, fast=2.0),  # a pair of dimensions lies between both
    Randomised: Randomised(max_length=48, test_tokens=24),  # as many as are looked at
    LearnedTemperature: LearnedTemperature(initial=2.0),  # else it starts as the default does
    GroupedQuery: GroupedQuery(num_groups=1),
    MoE: MoE(expert=ReLU(d_ff=16), balance=0.3, jitter=0.1),
}

# What else a flip may change; all the rest must stay the same to the bit.
MAY_FOLLOW = {
    "parameters": {"outputs", "updates"},
    "outputs": {"parameters", "updates", "hardware"},
    "loss": {"updates"},
    "data": {"outputs", "parameters", "loss", "updates", "evaluation", "hardware"},
    "schedule": {"updates"},
    "updates": set(),
    "evaluation": set(),
    "hardware": {"outputs", "updates"},
}
# Looked at too, and free to follow anything: what a declaration may also show itself in.
ALSO = {"evaluation": "scored logits", "loss": "auxiliary loss", "hardware": "saved tensors"}
NESTED = {
    ("RunSpec", "model"),
    ("RunSpec", "task"),
    ("RunSpec", "train"),
    ("ModelSpec", "init"),
}  # fields of theirs declare
ELSEWHERE = {("RunSpec", "device")}  # needs a GPU: see below


# --- what can be flipped ---------------------------------------------------------------------------------------------


def fields(spec: Spec, prefix: str = "") -> Iterator[tuple[str, type[Spec], str, FieldInfo]]:
    """Path, owner, name and declaration of every field of a spec and of those inside it."""
    for name, field in type(spec).model_fields.items():
        yield prefix + name, type(spec), name, field
        value = getattr(spec, name)
        if isinstance(value, Spec):
            yield from fields(value, f"{prefix}{name}.")


def level_bases(field: FieldInfo) -> list[type[Level]]:
    annotations = (field.annotation, *get_args(field.annotation))
    return [a for a in annotations if isinstance(a, type) and issubclass(a, Level)]


def made(level: type[Level]) -> Level:
    if issubclass(level, Task):
        if level is Translate:  # few merges, so that one more is seen
            return WATCHED[level](lengths=Lengths(train=(1, 2), test=(4,)), tokenisation=BPE(vocab_size=260))
        return WATCHED[level](lengths=LENGTHS)
    return SMALL.get(level) or level()


def own_levels(base: type[Level]) -> list[Level]:
    return [made(level) for level in base.levels().values() if not is_foreign(level)]


def reachable() -> dict[tuple[str, str], tuple[RunSpec, str, FieldInfo]]:
    """Each field of each spec class once: a RunSpec that has it, its path there, its declaration."""
    found: dict[tuple[str, str], tuple[RunSpec, str, FieldInfo]] = {}
    waiting, seen = [RUN], set()
    while waiting:
        base = waiting.pop(0)
        for path, owner, name, field in fields(base):
            key = (owner.__name__.removeprefix("Watched"), name)
            found.setdefault(key, (base, path, field))
            for axis in level_bases(field):
                for level in own_levels(axis):
                    if (path, level.kind) not in seen:
                        seen.add((path, level.kind))
                        waiting += possible(base, path, [level])
    return found


def possible(spec: RunSpec, path: str, values: Iterable[Any]) -> Iterator[RunSpec]:
    """The spec with each of the values that it can be combined with."""
    for value in values:
        with suppress(UserError):
            yield spec.replace(path, value)


def others(spec: RunSpec, path: str, field: FieldInfo) -> list[Any]:
    """Other valid values of a field: every other level of an axis that can be combined, else one."""
    value = spec.at(path)
    if bases := level_bases(field):
        levels = [level for base in bases for level in own_levels(base) if level.kind != value.kind]
        return [made.at(path) for made in possible(spec, path, levels)]
    for made in possible(spec, path, candidates(value, field)):
        if made.at(path) != value:
            return [made.at(path)]
    raise AssertionError(f"{path} = {value!r}: no other value found; teach `candidates` one")


def candidates(value: Any, field: FieldInfo) -> Iterator[Any]:
    if get_origin(field.annotation) is Literal:
        yield from get_args(field.annotation)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value, value // 2)
    elif isinstance(value, float):
        high = next((b.le if isinstance(b, Le) else b.lt for b in field.metadata if isinstance(b, Le | Lt)), None)
        low = next((b.ge if isinstance(b, Ge) else b.gt for b in field.metadata if isinstance(b, Ge | Gt)), None)
        yield from (value * 4, value / 4, 0.25)
        yield from (end for end in (high, low) if end is not None)
    elif value is None:
        yield from (0.5, 4)
    elif isinstance(value, Spec):  # a plain spec in a field that declares: flip what is inside
        for name, inner in type(value).model_fields.items():
            yield from (value.model_copy(update={name: other}) for other in candidates(getattr(value, name), inner))
    elif isinstance(value, tuple):
        yield from ((*value[:-1], value[-1] + 1), (*value, value[-1] + 2))


FIELDS = reachable()
FLIPS = [
    pytest.param(spec, path, value, field, id=f"{owner}.{name}={getattr(value, 'kind', value)}")
    for (owner, name), (spec, path, field) in FIELDS.items()
    if (owner, name) not in NESTED | ELSEWHERE
    for value in others(spec, path, field)
]


def declared(field: FieldInfo) -> list[str]:
    return [marker.what for marker in field.metadata if isinstance(marker, Changes)]


# --- what a run shows ------------------------------------------------------------------------------------------------


@cache
def shown(spec: RunSpec) -> dict[str, Any]:
    """Everything that a field can change, observed from a whole run and from the untrained model."""
    CALLS.clear()
    with tempfile.TemporaryDirectory() as folder:
        record = run(spec, directory=Path(folder))
        assert record.status == "finished", record.cause
        curves = read_curves(Path(folder) / "curves.jsonl")
        state = torch.load(Path(folder) / "model.pt", weights_only=True)
    evaluated = sorted(call for call in CALLS if call[0] in ("eval", "monitor"))
    train = spec.train
    batches = [spec.training_batch(step, CPU) for step in range(4)]
    probe = torch.arange(24)[None] % 6, torch.arange(24)[None] % 5 if spec.model.architecture.has_encoder() else None
    model = build_model(spec.model, spec.task.vocab_size, seed=spec.seed)
    with torch.no_grad():
        seed_global(0)
        logits = model(*probe)
        auxiliary = float(model.outputs(*probe).auxiliary_loss)
    saved = saved_tensors(model, batches[0], recompute=train.recompute)
    model.load_state_dict(state)
    trained = {name: state[name] for name, _ in model.named_parameters()}
    with torch.no_grad():
        scored = model.eval()(*probe)
    return {
        "scored logits": bits(scored),
        "auxiliary loss": auxiliary,
        "saved tensors": saved,
        "parameters": {name: tuple(p.shape) for name, p in trained.items()},
        "outputs": bits(logits),
        "loss": [surprise(batch) for batch in batches],
        "data": [bits(batch.inputs) for batch in batches],
        "schedule": [train.schedule.factor(step, train.steps, spec.model.d_model) for step in range(train.steps)],
        "updates": {name: bits(p) for name, p in trained.items()},
        "evaluation": (
            evaluated,
            [line["step"] for line in curves if "eval/in_distribution" in line],
            sorted({score.length for score in record.scores}),
        ),
        "hardware": [record.ledger[k] for k in ("attention_backend", "device", "precision")] + [refuses(spec)],
    }


def saved_tensors(model: Transformer, batch: Batch, *, recompute: bool) -> int:
    """How many tensors one step keeps for its backward pass."""
    count = 0

    def keep(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.outputs(*batch.reading, recompute=recompute)
    return count


def surprise(batch: Batch) -> tuple[bool, float]:
    """Whether the end is asked for, and the loss of logits that know nothing but the place."""
    places = torch.linspace(0, 1, batch.inputs.shape[1])[:, None] * torch.linspace(-1, 1, WORDS)
    loss = answer_loss(places.expand(*batch.inputs.shape, WORDS), batch.targets)
    return bool((batch.targets == 3).any()), float(loss)


def bits(x: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    return tuple(x.shape), x.detach().contiguous().numpy().tobytes()


def refuses(spec: RunSpec) -> bool:
    """Whether the kernel insists on flash."""
    try:
        spec.train.kernel.check("math", "of this test")
    except UserError:
        return True
    return False


# --- the laws --------------------------------------------------------------------------------------------------------


def test_every_field_declares_what_it_changes() -> None:
    silent = {key for key, (_, _, field) in FIELDS.items() if len(declared(field)) != 1}
    assert silent == NESTED


def test_the_walk_reaches_every_spec_class() -> None:
    owners = {owner for owner, _ in FIELDS}
    assert {"RunSpec", "ModelSpec", "TrainSpec", "Lengths", "Copy", "Reverse", "Finite", "WarmupCosine"} <= owners
    assert {"Sinusoidal", "Learned", "RoPE", "T5Bias", "LayerNorm", "RMSNorm", "ReLU", "GELU", "SwiGLU"} <= owners


def changes(spec: RunSpec, path: str, value: Any) -> set[str]:
    """What differs between the runs of two specs that differ in one field."""
    before, after = shown(spec), shown(spec.replace(path, value))
    return {aspect for aspect in before if before[aspect] != after[aspect]}


@pytest.mark.parametrize(("spec", "path", "value", "field"), FLIPS)
def test_a_flip_changes_what_it_declares_and_nothing_else(
    spec: RunSpec, path: str, value: Any, field: FieldInfo
) -> None:
    (what,) = declared(field)
    differs = changes(spec, path, value)
    assert {what, ALSO.get(what)} & differs, f"{path} = {value} is dead: it declares {what}, and changes {differs}"
    followers = {what, *ALSO.values()} | MAY_FOLLOW[what]
    assert differs <= followers, f"{path} = {value} declares {what}, and changes {differs}"
    assert spec.replace(path, value).fingerprint() != spec.fingerprint()


def test_a_dead_knob_would_be_noticed() -> None:
    class Deaf(NoPE):
        """NoPE with a field that nothing reads."""

        base: Annotated[float, Changes("outputs")] = 10_000.0

    spec = RUN.replace("model.position", Deaf())
    assert "outputs" in changes(RUN, "model.position", Deaf())
    assert changes(spec, "model.position.base", 2.0) == set()


def test_evaluation_leaves_training_alone() -> None:
    flips = {"train.eval_samples": 3, "train.eval_every": 20, "task.lengths.test": (5, 7)}
    for path, value in flips.items():
        assert shown(RUN.replace(path, value))["updates"] == shown(RUN)["updates"], path


def test_another_kernel_gives_nearly_the_same_training() -> None:
    explicit = RUN.replace("train.kernel", {"kind": "Math"})
    for name, (_, data) in shown(RUN)["updates"].items():
        one, other = (
            torch.frombuffer(bytearray(d), dtype=torch.float32) for d in (data, shown(explicit)["updates"][name][1])
        )
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


def test_the_device_decides_the_precision_and_is_never_silently_another() -> None:
    flipped = RUN.replace("device", "cuda")
    assert flipped.fingerprint() != RUN.fingerprint()
    assert (RUN.precision, flipped.precision) == ("fp32", "bf16")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"device = 'cuda': torch sees no CUDA device here; use 'cpu'"):
            run(flipped)


def test_evaluations_come_as_often_as_asked_for() -> None:
    _, steps, _ = shown(RUN.replace("train.eval_every", 4))["evaluation"]
    assert steps == [4, 8]
