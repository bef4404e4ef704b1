"""Do subwords translate better than words or characters?

Settles D20 (words: out of vocabulary; characters: long), on number words.
"""

from ablations.baseline import core, same_size
from harness import Ablation, TrainSpec
from harness.components.architecture import EncoderDecoder
from tasks import BPE, Characters, Lengths, Translate, Words

digits = Lengths(train=(1, 3), test=(4,))

ablation = Ablation(
    question="Do subwords translate better than words or characters?",
    claims=("D20",),
    why="WHY",
    model=core.replace("architecture", EncoderDecoder()),
    train=TrainSpec(steps=600, learning_rate=3e-3),
    tasks={
        "German": Translate(lengths=digits, tokenisation=BPE(vocab_size=320)),
        "French": Translate(lengths=digits, tokenisation=BPE(vocab_size=320), to_language="fr"),
    },
    axes=("task.tokenisation",),
    baseline="320 subwords",
    variants={
        "320 subwords": {"task.tokenisation": BPE(vocab_size=320)},
        "600 subwords": {"task.tokenisation": BPE(vocab_size=600)},
        "words": {"task.tokenisation": Words()},
        "characters": {"task.tokenisation": Characters()},
    },
    budgets=same_size,
)
