"""Which part of the modern recipe would be missed?

Bears on E44 (remove each module in turn and see): the modern preset at small scale, each part put back in turn.
"""

from ablations.baseline import brief, same_size, short
from harness import Ablation
from harness.components.attention import MultiHead
from harness.components.feedforward import ReLU
from harness.components.init import Normal
from harness.components.norm import LayerNorm, PostNorm
from harness.components.position import Sinusoidal
from harness.components.residual import NoResidual
from harness.presets import PRESETS
from tasks import Reverse

ablation = Ablation(
    question="Which part of the modern recipe would be missed?", claims=("E44",),
    why="On a pilot seed the modern model learned reverse of up to four symbols after .67 of 600 steps, its "
    "variants after .60 or not in time; of up to six none did.",
    model=PRESETS["modern-small"].model, train=brief,
    tasks={"reverse": Reverse(lengths=short)},
    axes=(
        "model.norm_placement", "model.norm", "model.position", "model.init.embedding", "model.feedforward",
        "model.attention", "model.residual",
    ),
    baseline="modern",
    variants={
        "modern": {},
        "Post-LN": {"model.norm_placement": PostNorm()},
        "LayerNorm": {"model.norm": LayerNorm()},
        "sinusoidal": {"model.position": Sinusoidal(), "model.init.embedding": Normal(deviation=1.0)},
        "ReLU": {"model.feedforward": ReLU(d_ff=256)},
        "multi-head": {"model.attention": MultiHead()},
        "no residual": {"model.residual": NoResidual()},
    },
    score="learning_time", higher_is_better=False, budgets=same_size,
)  # fmt: skip
