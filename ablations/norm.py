"""Do RMSNorm and BatchNorm do as well as LayerNorm?

Bears on E23 (RMSNorm equals LayerNorm in quality) and D13 (LayerNorm rather than BatchNorm), below the ceiling. Batches
are large here and not padded: what D13 says of other ones is settled by laws (tests/components/test_norm.py).
"""

from ablations.baseline import budgets, lengths, model, train
from harness import Ablation
from harness.components.norm import BatchNorm, LayerNorm, RMSNorm
from harness.components.position import NoPE
from tasks import Copy, Reverse

ablation = Ablation(
    question="Do RMSNorm and BatchNorm do as well as LayerNorm?",
    claims=("E23", "D13"),
    why="On two pilot seeds NoPE with LayerNorm got .22 of the unseen lengths right in copy, .26 and .29 in reverse: "
    "off floor and ceiling, with little spread, so that equality within .05 can be shown.",
    model=model.replace("position", NoPE()),
    train=train,
    tasks={"copy": Copy(lengths=lengths), "reverse": Reverse(lengths=lengths)},
    axes=("model.norm",),
    baseline="LayerNorm",
    variants={
        "LayerNorm": {"model.norm": LayerNorm()},
        "RMSNorm": {"model.norm": RMSNorm()},
        "BatchNorm": {"model.norm": BatchNorm()},
    },
    margin=0.05,
    budgets=budgets,
)
