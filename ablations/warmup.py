"""Does a large learning rate blow up without warm-up, and do 1–5 % of it mend that?

Bears on E24: warm-up × learning rate, Pre-LN, without clipping. `norm-depth` has the same for Post-LN and deep models.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from tasks import Copy

ablation = Ablation(
    question="Does a large learning rate blow up without warm-up, and do 1–5 % of it mend that?",
    claims=("E24",),
    why="Pre-LN learned at .004 with and without warm-up on a pilot seed, and at .016 in no case; the rate "
    "between is the one to watch.",
    model=core,
    train=brief.replace("gradient_clip", None),
    tasks={"copy": Copy(lengths=trained)},
    axes=("train.schedule.warmup", "train.learning_rate"),
    baseline="5 %, .004",
    variants={
        "5 %, .004": {"train.schedule.warmup": 0.05, "train.learning_rate": 0.004},
        "1 %, .004": {"train.schedule.warmup": 0.01, "train.learning_rate": 0.004},
        "none, .004": {"train.schedule.warmup": 0.0, "train.learning_rate": 0.004},
        "5 %, .008": {"train.schedule.warmup": 0.05, "train.learning_rate": 0.008},
        "1 %, .008": {"train.schedule.warmup": 0.01, "train.learning_rate": 0.008},
        "none, .008": {"train.schedule.warmup": 0.0, "train.learning_rate": 0.008},
    },
    against={"1 %, .008": "5 %, .008", "none, .008": "5 %, .008"},
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
