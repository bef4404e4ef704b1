"""Does normalising queries and keys allow larger learning rates?

Bears on E03 (large logits saturate the softmax): QK-norm × learning rate, without clipping.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.qk_norm import QKNorm
from tasks import Copy

ablation = Ablation(
    question="Does normalising queries and keys allow larger learning rates?",
    claims=("E03",),
    why="Rates four times apart. On a pilot seed .004 was learned with and without, .016 with QK-norm alone, .064 "
    "by neither.",
    model=core,
    train=brief.replace("gradient_clip", None),
    tasks={"copy": Copy(lengths=trained)},
    axes=("model.qk_norm", "train.learning_rate"),
    baseline="none, .004",
    variants={
        "none, .004": {"train.learning_rate": 0.004},
        "QK-norm, .004": {"train.learning_rate": 0.004, "model.qk_norm": QKNorm()},
        "none, .016": {"train.learning_rate": 0.016},
        "QK-norm, .016": {"train.learning_rate": 0.016, "model.qk_norm": QKNorm()},
        "none, .064": {"train.learning_rate": 0.064},
        "QK-norm, .064": {"train.learning_rate": 0.064, "model.qk_norm": QKNorm()},
    },
    against={"QK-norm, .016": "none, .016", "QK-norm, .064": "none, .064"},
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
