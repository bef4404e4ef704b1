"""Does label smoothing curb over-confidence and help generalisation?

Bears on D04, on finite data: 1000 numbers of five digits, translated.
"""

from ablations.baseline import brief, core, same_size
from harness import Ablation
from harness.spec import Finite
from tasks import BPE, Lengths, Translate

five = Lengths(train=(5, 5), test=())  # digits

ablation = Ablation(
    question="Does label smoothing curb over-confidence and help generalisation?",
    claims=("D04",),
    why="1000 of the 90 000 numbers of five digits are trained on; with four digits, where .86 of new ones were "
    "right on a pilot seed, a tenth of them would have been seen.",
    model=core,
    train=brief.replace("sampling", Finite(num_samples=1000)),
    tasks={
        "German": Translate(lengths=five, tokenisation=BPE(vocab_size=600)),
        "French": Translate(lengths=five, tokenisation=BPE(vocab_size=600), to_language="fr"),
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
