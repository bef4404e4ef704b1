"""Are residual connections what lets deep networks train?

Bears on D12: connections on and off, at 2, 3 and 6 layers; gradients are clipped, which favours models without.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.residual import NoResidual
from tasks import Copy

ablation = Ablation(
    question="Are residual connections what lets deep networks train?",
    claims=("D12",),
    why="The smallest setting at which, on a pilot seed, all three depths learned within 600 steps with residual "
    "connections.",
    model=core,
    train=brief,
    tasks={"copy": Copy(lengths=trained)},
    axes=("model.num_layers", "model.residual"),
    baseline="2 layers",
    variants={
        "2 layers": {},
        "2 layers, none": {"model.residual": NoResidual()},
        "3 layers": {"model.num_layers": 3},
        "3 layers, none": {"model.num_layers": 3, "model.residual": NoResidual()},
        "6 layers": {"model.num_layers": 6},
        "6 layers, none": {"model.num_layers": 6, "model.residual": NoResidual()},
    },
    against={"3 layers, none": "3 layers", "6 layers, none": "6 layers"},
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
