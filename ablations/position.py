"""Which position encoding lets a Transformer copy and reverse sequences longer than it was trained on?

Bears on the articles' claims E10 (sinusoidal extrapolates poorly), E11 (learned positions do not; their untrained rows
are measured), E12 and E37 (RoPE does, and better than sinusoidal), E14 (ALiBi does; of the tasks where exact positions
matter these are two, retrieval is not asked). The report says how each fares.
"""

from ablations.baseline import budgets, lengths, model, train
from harness import Ablation
from harness.components.position import ALiBi, Learned, NoPE, RoPE, Sinusoidal, T5Bias
from tasks import Copy, Reverse

ablation = Ablation(
    question="Which position encoding lets a Transformer copy and reverse sequences longer than it was trained on?",
    claims=("E10", "E11", "E12", "E14", "E37"),
    why="The smallest setting found on pilot seeds at which all six encodings learn both tasks within 1000 steps: with "
    "two layers NoPE did not, with Post-LN or a learning rate of 1e-3 hardly any did. Nine seeds, for ten comparisons.",
    model=model,
    train=train,
    tasks={"copy": Copy(lengths=lengths), "reverse": Reverse(lengths=lengths)},
    axes=("model.position",),
    baseline="sinusoidal",
    variants={
        "sinusoidal": {"model.position": Sinusoidal()},
        "NoPE": {"model.position": NoPE()},
        "learned": {"model.position": Learned(max_length=128)},
        "RoPE": {"model.position": RoPE()},
        "ALiBi": {"model.position": ALiBi()},
        "T5 bias": {"model.position": T5Bias()},
    },
    score="exact_match",
    margin=0.1,
    budgets=budgets,
)
