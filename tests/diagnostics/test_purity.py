"""A comparison is of what its specs say: something differs, and nothing that no field declares."""

from pathlib import Path
from typing import Annotated

import pytest

from harness import Ablation, Budget, ModelSpec, RunSpec, TrainSpec, run_study
from harness.components.attention import GroupedQuery, SlidingWindow
from harness.components.feedforward import MoE, SwiGLU
from harness.components.init import DepthGain, Kaiming
from harness.components.position import NoPE, PositionEncoding, RoPE, Sinusoidal, YaRN
from harness.diagnostics.purity import differing, impurities
from harness.schema import Changes, Level, UserError
from harness.spec import Finite, WarmupCosine
from tasks import Copy, Lengths, Reverse

RUN = RunSpec(
    model=ModelSpec(d_model=16, num_heads=2, num_layers=1),
    task=Copy(lengths=Lengths(train=(2, 4), test=(6,))),
    train=TrainSpec(steps=20, batch_size=4),
)
SOUND = {
    "model.position": RoPE(),
    "model.attention": GroupedQuery(num_groups=1),
    "model.feedforward": SwiGLU(d_ff=8),
    "model.init.qkv": Kaiming(),
    "model.init.residual_gain": DepthGain(),
    "model.num_layers": 2,
    "model.residual_dropout": 0.1,
    "train.learning_rate": 1e-4,
    "train.beta2": 0.9,
    "train.label_smoothing": 0.1,
    "train.schedule": WarmupCosine(warmup=0.5),
    "train.sampling": Finite(num_samples=8),
    "train.recompute": True,  # changes no number
    "train.gradient_clip": 100.0,  # not yet
}


@pytest.mark.parametrize("path", SOUND)
def test_a_component_that_acts_is_pure(path: str) -> None:
    assert impurities(RUN, RUN.replace(path, SOUND[path])) == []


def test_what_acts_in_evaluation_alone_is_pure() -> None:
    rope = RUN.replace("model.position", RoPE())
    assert impurities(rope, rope.replace("model.position", YaRN(trained_length=8, slow=0.1, fast=0.5))) == []


def test_what_cannot_act_is_told() -> None:
    wide = RUN.replace("model.attention", SlidingWindow(window=50))
    (said,) = impurities(wide, wide.replace("model.attention.window", 60))
    assert said.startswith("model.attention.window has no effect on parameters, outputs, loss, data")


def test_a_change_that_is_not_declared_is_told() -> None:
    class Sly(NoPE):
        """Scales what it should only name."""

        factor: Annotated[float, Changes("schedule")] = 1.0

        def build(self, shape: object) -> PositionEncoding:
            encoding = PositionEncoding()
            encoding.add = lambda embeddings, positions: self.factor * embeddings  # type: ignore[method-assign]
            return encoding

    sly = RUN.replace("model.position", Sly())
    found = impurities(sly, sly.replace("model.position.factor", 2.0))
    assert "outputs differ, which model.position.factor must not change" in found


def test_a_user_s_field_may_declare_nothing() -> None:
    class Quiet(NoPE):
        """Scales, and does not say so."""

        factor: float = 1.0

        def build(self, shape: object) -> PositionEncoding:
            encoding = PositionEncoding()
            encoding.add = lambda embeddings, positions: self.factor * embeddings  # type: ignore[method-assign]
            return encoding

    quiet = RUN.replace("model.position", Quiet())
    assert impurities(quiet, quiet.replace("model.position.factor", 2.0)) == []


def test_paths_that_differ_have_their_declarations() -> None:
    other = RUN.replaced({"model.feedforward": MoE(), "train.schedule.warmup": 0.5, "train.batch_size": 8})
    assert dict(differing(RUN, other)) == {
        "model.feedforward": "outputs",
        "train.schedule.warmup": "schedule",
        "train.batch_size": "data",
    }


def study(variant: Level) -> Ablation:
    return Ablation(
        question="Does it act?",
        model=RUN.model,
        train=RUN.train,
        tasks={"copy": RUN.task, "reverse": Reverse(lengths=RUN.task.lengths)},
        axes=("model.position",),
        baseline="plain",
        variants={"plain": {"model.position": NoPE()}, "other": {"model.position": variant}},
        budgets={"smoke": Budget(seeds=1)},
    )


def test_a_study_of_a_component_without_effect_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sinusoidal, "build", lambda self, shape: PositionEncoding())
    with pytest.raises(UserError, match=r"variants\.other: compared with plain on copy, model\.position has no effect"):
        run_study(study(Sinusoidal()), results=tmp_path)
    assert not list((tmp_path / "study").glob("*.json"))
