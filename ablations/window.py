"""How far back does a window see?

Bears on E16 (windows fail at exact long-range retrieval; the reach is layers × window): distance × window.
"""

from ablations.baseline import brief, core, same_size
from harness import Ablation
from harness.components.attention import MultiHead, SlidingWindow
from tasks import Lengths, Retrieval

pairs = Lengths(train=(8, 8), test=())

ablation = Ablation(
    question="How far back does a window see?",
    claims=("E16",),
    why="Eight pairs, two layers: windows of 4, 6 and 8 reach 6, 10 and 14 tokens, and the values lie 4, 8 and 16 "
    "tokens back, some within and some beyond the reach of each. In a trial of 600 steps every distance within reach "
    "was learned after 280 at most, so 400 do. Chance is one symbol in 32: .03.",
    model=core,
    train=brief.replace("steps", 400),
    tasks={
        "2 pairs back": Retrieval(distance=2, lengths=pairs),
        "4 pairs back": Retrieval(distance=4, lengths=pairs),
        "8 pairs back": Retrieval(distance=8, lengths=pairs),
    },
    axes=("model.attention",),
    baseline="full",
    variants={
        "full": {"model.attention": MultiHead()},
        "window 4": {"model.attention": SlidingWindow(window=4)},
        "window 6": {"model.attention": SlidingWindow(window=6)},
        "window 8": {"model.attention": SlidingWindow(window=8)},
    },
    budgets=same_size,
)
