"""Does one matrix for embeddings and output help in translation?

Bears on E28 (tying saves parameters, helps in translation): embeddings from N(0, 1/d) times √d in both arms.
"""

from ablations.baseline import brief, core, same_size
from harness import Ablation
from harness.components.architecture import EncoderDecoder
from harness.components.embedding import SqrtWidth, Tied, Untied
from harness.components.init import Normal
from harness.spec import Finite
from tasks import BPE, Lengths, Translate

digits = Lengths(train=(5, 5), test=())
original = core.replace("architecture", EncoderDecoder()).replace("embedding_scale", SqrtWidth())

ablation = Ablation(
    question="Does one matrix for embeddings and output help in translation?",
    claims=("E28",),
    why="Not chosen by pilot runs yet: the setting is that of neighbouring studies, so a tie at an end of the "
    "scale says nothing yet.",
    model=original.replace("init.embedding", Normal(deviation=0.125)),
    train=brief.replace("sampling", Finite(num_samples=1000)),
    tasks={
        "German": Translate(lengths=digits, tokenisation=BPE(vocab_size=600)),
        "French": Translate(lengths=digits, tokenisation=BPE(vocab_size=600), to_language="fr"),
    },
    axes=("model.output_head",),
    baseline="untied",
    variants={"untied": {"model.output_head": Untied()}, "tied": {"model.output_head": Tied()}},
    budgets=same_size,
)
