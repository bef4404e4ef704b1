"""Is Post-LN unstable when deep, and does warm-up mend it?

Bears on E22 (Post-LN is unstable when deep and needs warm-up; Pre-LN needs less, or none): depth × placement × warm-up
× learning rate, without clipping. Warm-up is compared with none, Post-LN with Pre-LN, all else being equal.
"""

from itertools import product

from ablations.baseline import brief, core, short, smoke
from harness import Ablation, Budget
from harness.components.norm import PostNorm, PreNorm
from tasks import Copy

norms, warmups = {"Pre-LN": PreNorm(), "Post-LN": PostNorm()}, {"": 0.0, ", warm-up": 0.1}
cells = list(product((2, 8), norms, warmups, (0.003, 0.01)))

ablation = Ablation(
    question="Is Post-LN unstable when deep, and does warm-up mend it?",
    claims=("E22",),
    why="On a pilot seed two layers learned at both rates or came to .94; with eight, Post-LN learned nothing at .003 "
    "without warm-up, came to .96 with it, and learned nothing at .01 either way, while Pre-LN came to .85 or more.",
    model=core, train=brief.replace("gradient_clip", None).replace("steps", 300).replace("eval_every", 30),
    tasks={"copy": Copy(lengths=short)},
    axes=("model.num_layers", "model.norm_placement", "train.schedule.warmup", "train.learning_rate"),
    baseline="2 layers, Pre-LN, 0.003",
    variants={
        f"{layers} layers, {norm}{warmup}, {rate:g}": {
            "model.num_layers": layers, "model.norm_placement": norms[norm],
            "train.schedule.warmup": warmups[warmup], "train.learning_rate": rate,
        }
        for layers, norm, warmup, rate in cells
    },
    against={
        f"{layers} layers, {norm}{warmup}, {rate:g}": f"{layers} layers, {norm if warmup else 'Pre-LN'}, {rate:g}"
        for layers, norm, warmup, rate in cells
        if warmup or norm == "Post-LN"
    },
    score="learning_time", higher_is_better=False,
    budgets={"smoke": smoke, "quick": Budget(seeds=10), "full": Budget(seeds=20)},
)  # fmt: skip
