"""Does a balance coefficient balance the experts, and what does it cost?

Bears on E21 (.01 balances, .1 hurts the task; the loss is E·Σ f·p, mean over layers) and D07 (z-loss, jitter, shared
experts; loss-free balancing beside them).
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.feedforward import MoE, ReLU
from tasks import Sort

expert = ReLU(d_ff=64)

ablation = Ablation(
    question="Does a balance coefficient balance the experts, and what does it cost?",
    claims=("E21", "D07"),
    why="Sorting up to six symbols is right in .85 of cases after 600 steps on a pilot seed, dense or not, so "
    "that a cost would show.",
    model=core,
    train=brief,
    tasks={"sort": Sort(lengths=trained)},
    axes=("model.feedforward",),
    baseline="no balance loss",
    variants={
        "no balance loss": {"model.feedforward": MoE(expert=expert, num_experts=8, balance=0.0)},
        "balance .01": {"model.feedforward": MoE(expert=expert, num_experts=8, balance=0.01)},
        "balance .1": {"model.feedforward": MoE(expert=expert, num_experts=8, balance=0.1)},
        "balance 1": {"model.feedforward": MoE(expert=expert, num_experts=8, balance=1.0)},
        "z-loss, jitter": {
            "model.feedforward": MoE(expert=expert, num_experts=8, balance=0.01, z_loss=1e-3, jitter=0.1)
        },
        "shared": {"model.feedforward": MoE(expert=expert, num_experts=7, top_k=1, num_shared=1, balance=0.01)},
        "loss-free": {"model.feedforward": MoE(expert=expert, num_experts=8, balance=0.0, bias_rate=0.01)},
        "dense": {"model.feedforward": ReLU(d_ff=128)},
    },
    against={"z-loss, jitter": "balance .01", "shared": "balance .01"},
    budgets=same_size,
)
