"""What does the factor 1/√d_k do, and when?

Bears on E01 (without it, at d_k = 64, the loss oscillates) and E25 (1/d_k learns, only slower): scale × variance of
queries and keys, heads of 64 dimensions, no clipping.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.init import Normal
from harness.components.scale import Inverse, Unscaled
from tasks import Copy

unit, small = Normal(deviation=0.125), Normal(deviation=0.02)  # unit-variance queries and keys; GPT-2's

ablation = Ablation(
    question="What does the factor 1/√d_k do, and when?",
    claims=("E01", "E25"),
    why="Heads of 64 dimensions, as in the claim; queries and keys of unit variance, and GPT-2's .02. On a pilot "
    "seed the baseline learned after .75 of the steps, which leaves room on both sides.",
    model=core.replace("d_head", 64).replace("init.qkv", unit),
    train=brief.replace("gradient_clip", None),
    tasks={"copy": Copy(lengths=trained)},
    axes=("model.scale", "model.init.qkv"),
    baseline="1/√d_k, unit",
    variants={
        "1/√d_k, unit": {},
        "none, unit": {"model.scale": Unscaled()},
        "1/d_k, unit": {"model.scale": Inverse()},
        "1/√d_k, .02": {"model.init.qkv": small},
        "none, .02": {"model.init.qkv": small, "model.scale": Unscaled()},
        "1/d_k, .02": {"model.init.qkv": small, "model.scale": Inverse()},
    },
    against={"none, .02": "1/√d_k, .02", "1/d_k, .02": "1/√d_k, .02"},
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
