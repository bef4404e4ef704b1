"""Is Post-LN unstable when deep, and does warm-up mend it?

Bears on E22 (deep Post-LN is unstable and needs warm-up; Pre-LN less, or none) and E24: depth (2, 8) × placement ×
warm-up × learning rate (two: no bound is searched), no clipping. Warm-up is compared with none, Post-LN with Pre-LN.
"""

from ablations.baseline import brief, core, same_size, short
from harness import Ablation, Budget
from harness.components.norm import PostNorm
from tasks import Copy

post, deep = {"model.norm_placement": PostNorm()}, {"model.num_layers": 8}
warm, fast = {"train.schedule.warmup": 0.1}, {"train.learning_rate": 0.01}

ablation = Ablation(
    question="Is Post-LN unstable when deep, and does warm-up mend it?", claims=("E22", "E24"),
    why="On a pilot seed two layers learned at both rates or came to .94; with eight, Post-LN learned nothing at .003 "
    "without warm-up, came to .96 with it, and learned nothing at .01 either way, while Pre-LN came to .85 or more.",
    model=core, tasks={"copy": Copy(lengths=short)}, baseline="Pre, .003",
    train=brief.replaced({"gradient_clip": None, "steps": 300, "eval_every": 30, "schedule.warmup": 0.0}),
    axes=("model.num_layers", "model.norm_placement", "train.schedule.warmup", "train.learning_rate"),
    variants={
        "Pre, .003": {}, "Pre, warm-up, .003": {**warm}, "Pre, .01": {**fast}, "Pre, warm-up, .01": {**warm, **fast},
        "Post, .003": {**post}, "Post, warm-up, .003": {**post, **warm},
        "Post, .01": {**post, **fast}, "Post, warm-up, .01": {**post, **warm, **fast},
        "deep Pre, .003": {**deep}, "deep Pre, warm-up, .003": {**deep, **warm},
        "deep Pre, .01": {**deep, **fast}, "deep Pre, warm-up, .01": {**deep, **warm, **fast},
        "deep Post, .003": {**deep, **post}, "deep Post, warm-up, .003": {**deep, **post, **warm},
        "deep Post, .01": {**deep, **post, **fast}, "deep Post, warm-up, .01": {**deep, **post, **warm, **fast},
    },
    against={
        "Pre, warm-up, .01": "Pre, .01", "Post, warm-up, .003": "Post, .003", "Post, .01": "Pre, .01",
        "Post, warm-up, .01": "Post, .01", "deep Pre, warm-up, .003": "deep Pre, .003",
        "deep Pre, warm-up, .01": "deep Pre, .01", "deep Post, .003": "deep Pre, .003",
        "deep Post, warm-up, .003": "deep Post, .003", "deep Post, .01": "deep Pre, .01",
        "deep Post, warm-up, .01": "deep Post, .01",
    },
    score="learning_time", higher_is_better=False, budgets={**same_size, "quick": Budget(seeds=10)},
)  # fmt: skip
