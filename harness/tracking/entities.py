"""What the mirror and a store say to each other, in plain data: this side of the seam knows no MLflow."""

from collections.abc import Mapping
from dataclasses import dataclass


class StoreError(RuntimeError):
    """The store did not take something, in one sentence; `refused` if trying again will not help."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True)
class StoredRun:
    """A run as the store has it."""

    run_id: str
    status: str
    started: int  # unix ms
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Point:
    """One value of a metric; sent twice it is kept once, because its time (unix ms) stays the same."""

    key: str
    value: float
    time: int
    step: int
