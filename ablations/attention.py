"""What do cheaper attentions cost in quality?

Bears on E19 (grouped-query loses almost nothing, multi-query a little), E42 (window + global + random approaches full
attention) and E17 (linear attention is less expressive), on sorting, which is below the ceiling, and on retrieval.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation, Budget
from harness.components import attention
from tasks import Lengths, Retrieval, Sort

ablation = Ablation(
    question="What do cheaper attentions cost in quality?",
    claims=("E19", "E42", "E17"),
    why="Not chosen by pilot runs yet: the setting is that of neighbouring studies, so a tie at an end of the "
    "scale says nothing yet. At these sizes no pilot learned recall within 1500 steps, so retrieval at a "
    "distance stands in for it.",
    model=core,
    train=brief,
    tasks={
        "sort": Sort(lengths=trained),
        "7 pairs back": Retrieval(distance=7, lengths=Lengths(train=(8, 8), test=())),
    },
    axes=("model.attention",),
    baseline="multi-head",
    variants={
        "multi-head": {"model.attention": attention.MultiHead()},
        "grouped-query": {"model.attention": attention.GroupedQuery(num_groups=2)},
        "multi-query": {"model.attention": attention.MultiQuery()},
        "latent": {"model.attention": attention.Latent()},
        "window": {"model.attention": attention.SlidingWindow(window=4)},
        "window + global": {"model.attention": attention.Longformer(window=4)},
        "window + global + random": {"model.attention": attention.BigBird(window=4)},
        "linear": {"model.attention": attention.Linear()},
    },
    budgets={**same_size, "quick": Budget(seeds=10)},
)
