"""Are narrow heads weak, and does it depend on the length of the sequence?

Settles E07 (heads under 32 dimensions are weak): four heads of 2 to 32 dimensions, short and long sequences.
"""

from ablations.baseline import brief, core, same_size
from harness import Ablation
from harness.spec import Finite
from tasks import Lengths, Reverse

ablation = Ablation(
    question="Are narrow heads weak, and does it depend on the length of the sequence?",
    claims=("E07",),
    why="On a pilot seed heads of 32 dimensions learned both tasks, those of 2 neither; 4000 samples are finite "
    "data that 600 steps see about ten times.",
    model=core.replace("d_head", 32),
    train=brief.replace("sampling", Finite(num_samples=4000)),
    tasks={
        "short": Reverse(lengths=Lengths(train=(2, 6), test=())),
        "long": Reverse(lengths=Lengths(train=(10, 12), test=())),
    },
    axes=("model.d_head",),
    baseline="32 dimensions",
    variants={
        "32 dimensions": {"model.d_head": 32},
        "2 dimensions": {"model.d_head": 2},
        "4 dimensions": {"model.d_head": 4},
        "8 dimensions": {"model.d_head": 8},
        "16 dimensions": {"model.d_head": 16},
    },
    budgets=same_size,
)
