"""Is one head a bottleneck?

Bears on E05, by the steps it takes to learn; bears on E08 (heads specialise), which the report's map of roles shows.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from tasks import Copy, Reverse

ablation = Ablation(
    question="Is one head a bottleneck?",
    claims=("E05", "E08"),
    why="On a pilot seed four heads learned both tasks within 600 steps (after .55 and .75 of them); fewer took "
    "longer or did not.",
    model=core,
    train=brief,
    tasks={"copy": Copy(lengths=trained), "reverse": Reverse(lengths=trained)},
    axes=("model.num_heads",),
    baseline="4 heads",
    variants={
        "4 heads": {"model.num_heads": 4},
        "1 head": {"model.num_heads": 1},
        "2 heads": {"model.num_heads": 2},
        "8 heads": {"model.num_heads": 8},
    },
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
