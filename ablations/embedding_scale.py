"""Must embeddings be multiplied by √d_model to stand beside positions?

Bears on D01 (embeddings N(0, 1) × √d balance positions): factor × initialisation, sinusoidal positions of norm √(d/2).
"""

from ablations.baseline import brief, core, same_size, short
from harness import Ablation
from harness.components.embedding import SqrtWidth
from harness.components.init import Normal, Xavier
from harness.components.position import Sinusoidal
from tasks import Reverse

ablation = Ablation(
    question="Must embeddings be multiplied by √d_model to stand beside positions?",
    claims=("D01",),
    why="On a pilot seed N(0, 1) learned reverse of up to four symbols after .80 of 600 steps and the others "
    "after .60 to 1, so that a difference either way can show; with up to six symbols none learned.",
    model=core.replace("position", Sinusoidal()),
    train=brief,
    tasks={"reverse": Reverse(lengths=short)},
    axes=("model.embedding_scale", "model.init.embedding"),
    baseline="N(0, 1)",
    variants={
        "N(0, 1)": {},
        "N(0, 1) × √d": {"model.embedding_scale": SqrtWidth()},
        "N(0, 1/d)": {"model.init.embedding": Normal(deviation=0.125)},
        "N(0, 1/d) × √d": {"model.init.embedding": Normal(deviation=0.125), "model.embedding_scale": SqrtWidth()},
        "Xavier": {"model.init.embedding": Xavier()},
        "Xavier × √d": {"model.init.embedding": Xavier(), "model.embedding_scale": SqrtWidth()},
    },
    against={"N(0, 1/d) × √d": "N(0, 1/d)", "Xavier × √d": "Xavier"},
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
