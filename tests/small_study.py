"""A study small enough to be run in seconds, for the tests that need a real one."""

from typing import Any

from harness.components.feedforward import ReLU
from harness.components.position import NoPE, RoPE, Sinusoidal
from harness.spec import ModelSpec, TrainSpec
from harness.study import Ablation, Budget, Plan, make_plan
from tasks import Copy, Lengths, Reverse

LENGTHS = Lengths(train=(1, 3), test=(4, 5))


def small(**changes: Any) -> Ablation:
    """Three position encodings on two tasks; `changes` replaces fields of the ablation."""
    fields: dict[str, Any] = {
        "question": "Does it matter?",
        "model": ModelSpec(d_model=16, num_heads=2, num_layers=1, feedforward=ReLU(d_ff=16)),
        "train": TrainSpec(steps=20, batch_size=4, eval_samples=4),
        "tasks": {"copy": Copy(lengths=LENGTHS), "reverse": Reverse(lengths=LENGTHS)},
        "axes": ("model.position",),
        "baseline": "sinusoidal",
        "variants": {
            "none": {"model.position": NoPE()},
            "sinusoidal": {"model.position": Sinusoidal()},
            "rope": {"model.position": RoPE()},
        },
        "budgets": {"smoke": Budget(seeds=2, changes={"train.steps": 10}), "quick": Budget(seeds=3)},
    }
    return Ablation(**{**fields, **changes})


def plan(ablation: Ablation | None = None, budget: str = "quick", seeds: int | None = None) -> Plan:
    """Its plan for the CPU."""
    return make_plan("small", ablation or small(), budget=budget, seeds=seeds, device="cpu")


# The file of a user who sweeps, each run of some seconds
SWEPT = """
from harness import Ablation, ModelSpec, Space, TrainSpec
from harness.components.position import NoPE
from harness.space import FloatRange
from tasks import Copy, Lengths

ablation = Ablation(
    question="Does it matter?",
    model=ModelSpec(d_model=16, num_heads=2, num_layers=1),
    train=TrainSpec(steps=300, batch_size=8, eval_samples=8),
    tasks={"copy": Copy(lengths=Lengths(train=(1, 3), test=(4,)))},
    axes=("model.position",),
    baseline="sinusoidal",
    variants={"sinusoidal": {}, "none": {"model.position": NoPE()}},
    space=Space(fields={"train.learning_rate": FloatRange(low=1e-4, high=1e-1, log=True)}, seeds=1),
)
"""
