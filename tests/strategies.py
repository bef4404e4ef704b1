"""Random specs: any combination of levels, small enough to be built and trained."""

from functools import partial
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import reject
from hypothesis import strategies as st

from harness.schema import Level, Spec, UserError, is_foreign
from harness.spec import ModelSpec, TrainSpec
from tasks import Lengths

Strategy = st.SearchStrategy[Any]

SENSIBLE: dict[str, Strategy] = {  # sizes, and fields that must fit together
    "d_model": st.sampled_from([8, 16, 24]),
    "num_layers": st.integers(1, 2),
    "num_heads": st.sampled_from([1, 2, 4]),
    "d_head": st.sampled_from([None, None, 3, 4, 5, 6]),
    "d_ff": st.integers(1, 16),
    "max_length": st.integers(64, 512),
    "max_distance": st.integers(64, 512),
    "num_buckets": st.integers(4, 64),
    "test_tokens": st.integers(40, 64),
    "train_factor": st.floats(1, 8),
    "test_factor": st.floats(1, 8),
    "trained_length": st.integers(2, 64),
    "slow": st.floats(0.1, 2),
    "fast": st.floats(1, 32),
    "num_groups": st.sampled_from([1, 2, 4]),
    "d_latent": st.integers(1, 8),
    "d_rope": st.sampled_from([2, 3, 4]),
    "window": st.integers(1, 6),
    "num_global": st.integers(1, 3),
    "num_random": st.integers(1, 3),
    "num_experts": st.integers(2, 4),
    "top_k": st.integers(1, 4),
    "num_shared": st.integers(0, 2),
    "capacity": st.sampled_from([None, 0.5, 1.0]),
    "lengths": st.builds(
        Lengths,
        train=st.tuples(st.integers(1, 4), st.integers(4, 9)),
        test=st.sets(st.integers(10, 16), max_size=3).map(lambda lengths: tuple(sorted(lengths))),
    ),
    "num_symbols": st.integers(2, 100),
    "base": st.floats(2, 1e6),  # from here on: numbers whose extremes overflow
    "deviation": st.floats(0.005, 1),
    "eps": st.floats(1e-8, 1e-2),
    "initial": st.floats(0.1, 4),
    "balance": st.floats(0, 1),
    "z_loss": st.floats(0, 0.1),
    "bias_rate": st.floats(0, 0.1),
    **dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), st.floats(0, 0.5)),
    "steps": st.integers(1, 1000),
    "batch_size": st.integers(1, 4),
    "learning_rate": st.floats(1e-5, 1),
    "warmup_steps": st.integers(1, 400),
    **dict.fromkeys(("beta1", "beta2"), st.floats(0, 0.999)),
    "weight_decay": st.floats(0, 1),
    "gradient_clip": st.none() | st.floats(0.01, 10),
    "num_samples": st.integers(1, 50),
}


def values(annotation: Any, bounds: list[Any], owner: type[Spec]) -> Strategy:
    """Any valid value of a field; of an axis that the owner itself belongs to, another level."""
    if isinstance(annotation, type) and issubclass(annotation, Level):
        levels = [level for level in annotation.levels().values() if not is_foreign(level) and level is not owner]
        return st.one_of(*map(specs, levels))
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return specs(annotation)
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if type(None) in get_args(annotation):
        return st.none() | values(next(a for a in get_args(annotation) if a is not type(None)), bounds, owner)
    if annotation is bool:
        return st.booleans()
    low = next((b.ge if isinstance(b, Ge) else b.gt for b in bounds if isinstance(b, Ge | Gt)), None)
    high = next((b.le if isinstance(b, Le) else b.lt for b in bounds if isinstance(b, Le | Lt)), None)
    if annotation is int:
        return st.integers(low, high)
    assert annotation is float, f"no strategy for {annotation}: add one to `values` or `SENSIBLE`"
    open_low, open_high = any(isinstance(b, Gt) for b in bounds), any(isinstance(b, Lt) for b in bounds)
    return st.floats(low, high, exclude_min=open_low, exclude_max=open_high, allow_nan=False, allow_infinity=False)


def fields(kind: type[Spec]) -> dict[str, Strategy]:
    """A strategy for each field of a class."""
    return {
        name: SENSIBLE[name] if name in SENSIBLE else values(field.annotation, field.metadata, kind)
        for name, field in kind.model_fields.items()
    }


def specs(kind: type[Spec]) -> Strategy:
    """Any valid spec of a class."""
    if kind is ModelSpec:
        return models()
    return st.builds(partial(_made, kind), **fields(kind))


def _made(kind: type[Spec], **given: Any) -> Spec:
    """The spec, unless its parts cannot be combined."""
    try:
        return kind(**given)
    except UserError:
        reject()


def models() -> Strategy:
    """Any valid ModelSpec."""
    return components().map(_model).filter(lambda made: isinstance(made, ModelSpec))


def _model(given: dict[str, Any]) -> ModelSpec | None:
    try:
        return ModelSpec(**given)
    except UserError:
        return None


def components() -> Strategy:
    """Fields of a ModelSpec, which may not fit together: at most five of them are not the default."""
    return _some(ModelSpec, ("d_model", "num_layers", "num_heads"))


def training() -> Strategy:
    """Fields of a TrainSpec, likewise."""
    return _some(TrainSpec, ("batch_size", "learning_rate"))


def _some(kind: type[Spec], always: tuple[str, ...]) -> Strategy:
    every = fields(kind)
    given = {name: every[name] for name in always}
    chosen = st.lists(st.sampled_from([name for name in every if name not in given]), max_size=5, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({**given, **{name: every[name] for name in names}}))
