"""Does initialising residual outputs by 1/√(2L) stabilise deep networks?

Bears on E29: depth × gain × learning rate, without clipping; the gain is compared with none, all else being equal.
"""

from ablations.baseline import brief, core, same_size, short
from harness import Ablation
from harness.components.init import DepthGain
from tasks import Copy

gain, deep = {"model.init.residual_gain": DepthGain()}, {"model.num_layers": 8}
slow, fast = {"train.learning_rate": 0.001}, {"train.learning_rate": 0.01}

ablation = Ablation(
    question="Does initialising residual outputs by 1/√(2L) stabilise deep networks?",
    claims=("E29",),
    why="On a pilot seed eight layers learned copy of up to four symbols within 300 steps at .003 with and without "
    "the gain, at .001 and .01 with it only.",
    model=core,
    train=brief.replace("gradient_clip", None).replace("steps", 300),
    tasks={"copy": Copy(lengths=short)},
    axes=("model.num_layers", "model.init.residual_gain", "train.learning_rate"),
    baseline="2 layers, .003",
    variants={
        "2 layers, .001": {**slow}, "2 layers, .003": {}, "2 layers, .01": {**fast},
        "2 layers, gain, .001": {**gain, **slow}, "2 layers, gain, .003": {**gain},
        "2 layers, gain, .01": {**gain, **fast},
        "8 layers, .001": {**deep, **slow}, "8 layers, .003": {**deep}, "8 layers, .01": {**deep, **fast},
        "8 layers, gain, .001": {**deep, **gain, **slow}, "8 layers, gain, .003": {**deep, **gain},
        "8 layers, gain, .01": {**deep, **gain, **fast},
    },
    against={
        "2 layers, gain, .001": "2 layers, .001", "2 layers, gain, .01": "2 layers, .01",
        "8 layers, gain, .001": "8 layers, .001", "8 layers, gain, .003": "8 layers, .003",
        "8 layers, gain, .01": "8 layers, .01",
    },
    score="learning_time", higher_is_better=False, budgets=same_size,
)  # fmt: skip
