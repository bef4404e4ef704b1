"""Does a model without W_o lose capacity?

Bears on E09 (without it heads stay independent), with the parameters given to the feed-forward instead.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.output_projection import NoProjection
from tasks import Copy, Reverse

ablation = Ablation(
    question="Does a model without W_o lose capacity?",
    claims=("E09",),
    why="With W_o a pilot seed learned copy after .73 and reverse after .97 of 600 steps; 800 leave room for "
    "what takes longer.",
    model=core,
    train=brief.replace("steps", 800),
    tasks={"copy": Copy(lengths=trained), "reverse": Reverse(lengths=trained)},
    axes=("model.output_projection", "model.feedforward.d_ff"),
    baseline="W_o",
    variants={
        "W_o": {},
        "none": {"model.output_projection": NoProjection()},
        "none, wider feed-forward": {"model.output_projection": NoProjection(), "model.feedforward.d_ff": 160},
    },
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
