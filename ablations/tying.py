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
    why="1000 of the 90 000 numbers of five digits are trained on; on a pilot seed .95 of new ones were right "
    "in German and .99 in French, so that harm of .05 would show, and help in German.",
    model=original.replace("init.embedding", Normal(deviation=0.125)),
    train=brief.replace("sampling", Finite(num_samples=1000)),
    tasks={
        "German": Translate(lengths=digits, tokenisation=BPE(vocab_size=600)),
        "French": Translate(lengths=digits, tokenisation=BPE(vocab_size=600), to_language="fr"),
    },
    axes=("model.output_head",),
    baseline="untied",
    variants={"untied": {"model.output_head": Untied()}, "tied": {"model.output_head": Tied()}},
    margin=0.05,
    budgets=same_size,
)
