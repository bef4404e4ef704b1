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
    why="Not chosen by pilot runs yet: the setting is that of neighbouring studies, so a tie at an end of the "
    "scale says nothing yet.",
    model=core,
    train=brief,
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
