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
    why="Not chosen by pilot runs yet: the setting is that of neighbouring studies, so a tie at an end of the "
    "scale says nothing yet.",
    model=core,
    train=brief,
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
