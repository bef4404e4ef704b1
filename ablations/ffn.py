"""Is SwiGLU better than ReLU and GELU at the same number of parameters?

Bears on D03 (SwiGLU is the modern standard, so better), and asks what the feed-forward does at all.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.feedforward import GELU, ReLU, SwiGLU
from tasks import Addition, Lengths, Sort

ablation = Ablation(
    question="Is SwiGLU better than ReLU and GELU at the same number of parameters?",
    claims=("D03",),
    why="After 600 steps both tasks are below the ceiling on a pilot seed (.85 and .94), and a feed-forward an "
    "eighth as wide does worse on addition, so that differences can show.",
    model=core,
    train=brief,
    tasks={
        "sort": Sort(lengths=trained),
        "addition": Addition(lengths=Lengths(train=(1, 3), test=()), reversed_digits=True, num_symbols=4),
    },
    axes=("model.feedforward",),
    baseline="ReLU",
    variants={
        "ReLU": {"model.feedforward": ReLU(d_ff=128)},
        "GELU": {"model.feedforward": GELU(d_ff=128)},
        "SwiGLU": {"model.feedforward": SwiGLU.matching(128)},
        "ReLU, an eighth as wide": {"model.feedforward": ReLU(d_ff=16)},
    },
    budgets=same_size,
)
