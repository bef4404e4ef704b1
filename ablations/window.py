"""How far back does a window see?

Settles E16 (windows fail at exact long-range retrieval; the reach is layers × window): distance × window.
"""

from ablations.baseline import brief, core, same_size
from harness import Ablation
from harness.components.attention import MultiHead, SlidingWindow
from tasks import Lengths, Retrieval

pairs = Lengths(train=(16, 16), test=())

ablation = Ablation(
    question="How far back does a window see?",
    claims=("E16",),
    why="On a pilot seed full attention learned every distance within 90 steps, so 150 are enough. Two layers of "
    "the three windows reach 6, 14 and 30 tokens; the distances, 4, 12 and 28 tokens, lie on both sides of "
    "each.",
    model=core,
    train=brief.replace("steps", 150),
    tasks={
        "2 pairs back": Retrieval(distance=2, lengths=pairs),
        "6 pairs back": Retrieval(distance=6, lengths=pairs),
        "14 pairs back": Retrieval(distance=14, lengths=pairs),
    },
    axes=("model.attention",),
    baseline="full",
    variants={
        "full": {"model.attention": MultiHead()},
        "window 4": {"model.attention": SlidingWindow(window=4)},
        "window 8": {"model.attention": SlidingWindow(window=8)},
        "window 16": {"model.attention": SlidingWindow(window=16)},
    },
    budgets=same_size,
)
