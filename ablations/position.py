"""Which position encoding lets a Transformer copy and reverse sequences longer than it was trained on?

Settles at this scale: E10 (sinusoidal extrapolates poorly), E11 (learned positions cannot; here the untrained rows),
E12 and E37 (RoPE extrapolates, better than sinusoidal), E14 (ALiBi extrapolates).
"""

from harness import Ablation, Budget, ModelSpec, TrainSpec
from harness.components.position import ALiBi, Learned, NoPE, RoPE, Sinusoidal, T5Bias
from tasks import Copy, Lengths, Reverse

lengths = Lengths(train=(1, 10), test=(11, 12, 13, 14, 15, 16, 18, 20))

ablation = Ablation(
    question="Which position encoding lets a Transformer copy and reverse sequences longer than it was trained on?",
    claims=("E10", "E11", "E12", "E14", "E37"),
    why="TODO pilot",
    model=ModelSpec(),
    train=TrainSpec(steps=1200),
    tasks={"copy": Copy(lengths=lengths), "reverse": Reverse(lengths=lengths)},
    axes=("model.position",),
    baseline="sinusoidal",
    variants={
        "sinusoidal": {"model.position": Sinusoidal()},
        "none": {"model.position": NoPE()},
        "learned": {"model.position": Learned(max_length=64)},
        "RoPE": {"model.position": RoPE()},
        "ALiBi": {"model.position": ALiBi()},
        "T5 bias": {"model.position": T5Bias()},
    },
    score="exact_match",
    margin=0.1,
    budgets={
        "smoke": Budget(seeds=2, changes={"train.steps": 20, "train.eval_samples": 8}),
        "quick": Budget(seeds=8),
        "full": Budget(seeds=10, changes={"train.steps": 10_000, "model.d_model": 256, "model.num_layers": 6}),
    },
)
