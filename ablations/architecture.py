"""Which architecture learns a task soonest: a decoder, an encoder with a decoder, or an encoder alone?

Bears on D11 (each can be trained on a task). An encoder alone predicts all positions at once.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.architecture import DecoderOnly, EncoderDecoder, EncoderOnly
from tasks import Reverse, Sort

ablation = Ablation(
    question="Which architecture learns a task soonest: a decoder, an encoder with a decoder, or an encoder alone?",
    claims=("D11",),
    why="Within 600 steps of a pilot seed the decoder learned reverse only at the end and the encoder neither "
    "task; hence 1000 steps.",
    model=core,
    train=brief.replace("steps", 1000),
    tasks={"reverse": Reverse(lengths=trained), "sort": Sort(lengths=trained)},
    axes=("model.architecture",),
    baseline="decoder",
    variants={
        "decoder": {"model.architecture": DecoderOnly()},
        "encoder-decoder": {"model.architecture": EncoderDecoder()},
        "encoder": {"model.architecture": EncoderOnly()},
    },
    score="learning_time",
    higher_is_better=False,
    budgets=same_size,
)
