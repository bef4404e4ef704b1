"""Does label smoothing curb over-confidence and help generalisation?

Settles D04, on finite data: a translation and an addition.
"""

from ablations.baseline import brief, core, same_size
from harness import Ablation
from harness.spec import Finite
from tasks import BPE, Addition, Lengths, Translate

ablation = Ablation(
    question="Does label smoothing curb over-confidence and help generalisation?",
    claims=("D04",),
    why="WHY",
    model=core,
    train=brief.replace("sampling", Finite(num_samples=1000)),
    tasks={
        "translation": Translate(lengths=Lengths(train=(4, 4), test=()), tokenisation=BPE(vocab_size=600)),
        "addition": Addition(reversed_digits=True, num_symbols=4, lengths=Lengths(train=(3, 4), test=())),
    },
    axes=("train.label_smoothing",),
    baseline="none",
    variants={
        "none": {"train.label_smoothing": 0.0},
        ".1": {"train.label_smoothing": 0.1},
        ".3": {"train.label_smoothing": 0.3},
    },
    budgets=same_size,
)
