"""Does training the end token cost extrapolation?

No claim of the articles; the question of Newman et al. 2020 (arXiv:2010.07174), scored without the end token.
"""

from ablations.baseline import budgets, lengths, model, train
from harness import Ablation
from harness.components.position import NoPE
from tasks import Copy, Reverse

ablation = Ablation(
    question="Does training the end token cost extrapolation?",
    why="On two pilot seeds NoPE got .22 of the unseen lengths right in copy, .26 and .29 in reverse, with little "
    "spread, so that a change in either direction would show.",
    model=model.replace("position", NoPE()),
    train=train,
    tasks={"copy": Copy(lengths=lengths), "reverse": Reverse(lengths=lengths)},
    axes=("task.train_end_token",),
    baseline="trained",
    variants={"trained": {"task.train_end_token": True}, "not trained": {"task.train_end_token": False}},
    score="exact_match_no_end",
    budgets=budgets,
)
