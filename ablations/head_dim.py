"""Are many narrow heads weaker than few wide ones, and does it depend on the length of the sequence?

Bears on E07 (heads under 32 dimensions are weak): 64 dimensions cut into heads of 32 to 2, short and long sequences,
sinusoidal positions, as RoPE would lose frequencies with the dimensions.
"""

from ablations.baseline import brief, core, same_size
from harness import Ablation
from harness.components.position import Sinusoidal
from harness.spec import Finite
from tasks import Lengths, Reverse

ablation = Ablation(
    question="Are many narrow heads weaker than few wide ones, and does it depend on the length of the sequence?",
    claims=("E07",),
    why="On a pilot seed every width came to .96 or more at both lengths with 4000 samples and 600 steps: what "
    "matters is whether narrow heads fall behind by more than .05. Sinusoidal positions keep them from "
    "losing frequencies.",
    model=core.replace("position", Sinusoidal()),
    train=brief.replace("sampling", Finite(num_samples=4000)),
    tasks={
        "short": Reverse(lengths=Lengths(train=(2, 6), test=())),
        "long": Reverse(lengths=Lengths(train=(10, 12), test=())),
    },
    axes=("model.num_heads",),
    baseline="2 of 32",
    variants={
        "2 of 32": {"model.num_heads": 2},
        "4 of 16": {"model.num_heads": 4},
        "8 of 8": {"model.num_heads": 8},
        "16 of 4": {"model.num_heads": 16},
        "32 of 2": {"model.num_heads": 32},
    },
    margin=0.05,
    budgets=same_size,
)
