"""Does a large learning rate blow up without warm-up, and do 1–5 % of it mend that?

Settles E24: warm-up × learning rate, Pre-LN, without clipping.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from tasks import Copy

ablation = Ablation(
    question="Does a large learning rate blow up without warm-up, and do 1–5 % of it mend that?",
    claims=("E24",),
    why="WHY",
    model=core,
    train=brief.replace("gradient_clip", None),
    tasks={"copy": Copy(lengths=trained)},
    axes=("train.schedule.warmup", "train.learning_rate"),
    baseline="5 %, .004",
    variants={
        "5 %, .004": {"train.schedule.warmup": 0.05, "train.learning_rate": 0.004},
        "none, .004": {"train.schedule.warmup": 0.0, "train.learning_rate": 0.004},
        "5 %, .016": {"train.schedule.warmup": 0.05, "train.learning_rate": 0.016},
        "1 %, .016": {"train.schedule.warmup": 0.01, "train.learning_rate": 0.016},
        "none, .016": {"train.schedule.warmup": 0.0, "train.learning_rate": 0.016},
        "5 %, .064": {"train.schedule.warmup": 0.05, "train.learning_rate": 0.064},
        "none, .064": {"train.schedule.warmup": 0.0, "train.learning_rate": 0.064},
    },
    against={"1 %, .016": "5 %, .016", "none, .016": "5 %, .016", "none, .064": "5 %, .064"},
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
