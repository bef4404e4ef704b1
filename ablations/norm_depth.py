"""Is Post-LN unstable when deep, and does warm-up mend it?

Bears on E22 (Post-LN is unstable when deep and needs warm-up; Pre-LN needs less, or none): depth × warm-up × placement,
without clipping.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.norm import PostNorm
from tasks import Copy

post, deep, warm = {"model.norm_placement": PostNorm()}, {"model.num_layers": 8}, {"train.schedule.warmup": 0.1}

ablation = Ablation(
    question="Is Post-LN unstable when deep, and does warm-up mend it?",
    claims=("E22",),
    why="Not chosen by pilot runs yet: the setting is that of neighbouring studies, so a tie at an end of the "
    "scale says nothing yet.",
    model=core,
    train=brief.replace("gradient_clip", None).replace("schedule.warmup", 0.0),
    tasks={"copy": Copy(lengths=trained)},
    axes=("model.num_layers", "model.norm_placement", "train.schedule.warmup"),
    baseline="Pre-LN",
    variants={
        "Pre-LN": {},
        "Pre-LN, warm-up": {**warm},
        "Post-LN": {**post},
        "Post-LN, warm-up": {**post, **warm},
        "deep Pre-LN": {**deep},
        "deep Pre-LN, warm-up": {**deep, **warm},
        "deep Post-LN": {**deep, **post},
        "deep Post-LN, warm-up": {**deep, **post, **warm},
    },
    against={"Post-LN, warm-up": "Post-LN", "deep Pre-LN, warm-up": "deep Pre-LN", "deep Post-LN": "deep Pre-LN"}
    | {"deep Post-LN, warm-up": "deep Post-LN"},
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
