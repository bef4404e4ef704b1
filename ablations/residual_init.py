"""Does initialising residual outputs by 1/√(2L) stabilise deep networks?

Bears on E29: depth × gain × learning rate, without clipping; the gain is compared with none, all else being equal.
"""

from itertools import product

from ablations.baseline import brief, core, same_size, short
from harness import Ablation
from harness.components.init import DepthGain, UnitGain
from tasks import Copy

gains = {"": UnitGain(), ", 1/√(2L)": DepthGain()}
cells = list(product((2, 8), gains, (0.001, 0.003, 0.01)))

ablation = Ablation(
    question="Does initialising residual outputs by 1/√(2L) stabilise deep networks?",
    claims=("E29",),
    why="On a pilot seed eight layers learned copy of up to four symbols within 300 steps at .003 with and "
    "without the gain, at .001 and .01 with it only.",
    model=core,
    train=brief.replace("gradient_clip", None).replace("steps", 300),
    tasks={"copy": Copy(lengths=short)},
    axes=("model.num_layers", "model.init.residual_gain", "train.learning_rate"),
    baseline="2 layers, 0.001",
    variants={
        f"{layers} layers{gain}, {rate:g}": {
            "model.num_layers": layers, "model.init.residual_gain": gains[gain], "train.learning_rate": rate,
        }
        for layers, gain, rate in cells
    },
    against={
        f"{layers} layers{gain}, {rate:g}": f"{layers} layers, {rate:g}" for layers, gain, rate in cells if gain
    },
    score="learning_time", higher_is_better=False, budgets=same_size,
)  # fmt: skip
