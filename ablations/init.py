"""Does the variance at which queries, keys and values are initialised matter?

Bears on E34 (it matters; Xavier or Kaiming serve); without clipping.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.init import Kaiming, Normal, Xavier
from tasks import Copy, Reverse

ablation = Ablation(
    question="Does the variance at which queries, keys and values are initialised matter?",
    claims=("E34",),
    why="On a pilot seed Xavier learned both tasks within 600 steps (after .55 and .72 of them), deviations from "
    ".5 on did not. On others it learns reverse hardly in time, so that only copy can show what is worse.",
    model=core,
    train=brief.replace("gradient_clip", None),
    tasks={"copy": Copy(lengths=trained), "reverse": Reverse(lengths=trained)},
    axes=("model.init.qkv",),
    baseline="Xavier",
    variants={
        "Xavier": {"model.init.qkv": Xavier()},
        "Kaiming": {"model.init.qkv": Kaiming()},
        "N(0, .02²)": {"model.init.qkv": Normal(deviation=0.02)},
        "N(0, .5²)": {"model.init.qkv": Normal(deviation=0.5)},
        "N(0, 1)": {"model.init.qkv": Normal(deviation=1.0)},
    },
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
