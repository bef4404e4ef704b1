"""An ablation harness for Transformers: which component matters, how much, and how sure can one be?

Importing it is cheap: what needs torch is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.conduct import run_study
    from harness.match import Match
    from harness.runner import run
    from harness.schema import UserError
    from harness.space import Space
    from harness.spec import ModelSpec, RunSpec, TrainSpec
    from harness.study import Ablation, Budget

__all__ = ["Ablation", "Budget", "Match", "ModelSpec", "RunSpec", "Space", "TrainSpec", "UserError", "run", "run_study"]

_HOMES = {
    "Ablation": "harness.study",
    "Budget": "harness.study",
    "Match": "harness.match",
    "ModelSpec": "harness.spec",
    "RunSpec": "harness.spec",
    "Space": "harness.space",
    "TrainSpec": "harness.spec",
    "UserError": "harness.schema",
    "run": "harness.runner",
    "run_study": "harness.conduct",
}


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
