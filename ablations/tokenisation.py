"""Do subwords translate better than words or characters?

Bears on D20 (words: out of vocabulary; characters: long), on number words.
"""

from ablations.baseline import brief, core, same_size
from harness import Ablation
from harness.components.architecture import EncoderDecoder
from harness.spec import Finite
from tasks import BPE, Characters, Lengths, Translate, Words

digits = Lengths(train=(5, 5), test=())

ablation = Ablation(
    question="Do subwords translate better than words or characters?",
    claims=("D20",),
    why="1000 of the 90 000 numbers of five digits are trained on. On a pilot seed subwords and characters "
    "gave .94 to .99 on new ones, words .99 in French and nothing in German, where a number is one word, "
    "and a new one has never been seen.",
    model=core.replace("architecture", EncoderDecoder()),
    train=brief.replace("sampling", Finite(num_samples=1000)),
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
    margin=0.05,
    budgets=same_size,
)
