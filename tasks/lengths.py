"""Training and test lengths; test lengths beyond the training range make a task the length-extrapolation task."""

from typing import Annotated

from pydantic import model_validator

from harness.schema import Changes, Spec


class Lengths(Spec):
    """Training lengths `lo … hi`, each equally likely, and the lengths beyond that the primary score averages over."""

    train: Annotated[tuple[int, int], Changes("data")] = (1, 10)
    test: Annotated[tuple[int, ...], Changes("evaluation")] = (11, 12, 14, 16, 18, 20)

    @model_validator(mode="after")
    def _ordered(self) -> "Lengths":
        low, high = self.train
        if not 1 <= low <= high:
            raise ValueError(f"train = {self.train}: lengths must satisfy 1 ≤ lo ≤ hi, e.g. (1, 10)")
        if list(self.test) != sorted(set(self.test)) or min(self.test, default=high + 1) <= high:
            raise ValueError(
                f"test = {self.test}: name lengths above {high}, the longest of training, each once, rising"
            )
        return self

    @property
    def training(self) -> range:
        """Every training length."""
        return range(self.train[0], self.train[1] + 1)
