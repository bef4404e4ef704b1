"""Does initialising residual outputs by 1/√(2L) stabilise deep networks?

Bears on E29, at 2 and 8 layers, without clipping.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.init import DepthGain
from tasks import Copy

ablation = Ablation(
    question="Does initialising residual outputs by 1/√(2L) stabilise deep networks?",
    claims=("E29",),
    why="Not chosen by pilot runs yet: the setting is that of neighbouring studies, so a tie at an end of the "
    "scale says nothing yet.",
    model=core,
    train=brief.replace("gradient_clip", None),
    tasks={"copy": Copy(lengths=trained)},
    axes=("model.num_layers", "model.init.residual_gain"),
    baseline="2 layers",
    variants={
        "2 layers": {},
        "2 layers, 1/√(2L)": {"model.init.residual_gain": DepthGain()},
        "8 layers": {"model.num_layers": 8},
        "8 layers, 1/√(2L)": {"model.num_layers": 8, "model.init.residual_gain": DepthGain()},
    },
    against={"8 layers, 1/√(2L)": "8 layers"},
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
