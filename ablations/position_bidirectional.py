"""Does an order task need positions: in an encoder that sees both sides, and in a causal decoder?

Bears on E04 (without positions no order task can be learned): meant for encoders; a causal decoder may do without.
"""

from ablations.baseline import brief, core, same_size, trained
from harness import Ablation
from harness.components.architecture import DecoderOnly, EncoderOnly
from harness.components.position import ALiBi, NoPE, RoPE, Sinusoidal
from tasks import Reverse

ablation = Ablation(
    question="Does an order task need positions: in an encoder that sees both sides, and in a causal decoder?",
    claims=("E04",),
    why="On a pilot seed the encoder with sinusoidal positions and both decoders came to .997 or more within "
    "800 steps of three layers, so that what fails here does not fail for want of training alone.",
    model=core.replace("architecture", EncoderOnly()).replace("position", Sinusoidal()).replace("num_layers", 3),
    train=brief.replace("steps", 800),
    tasks={"reverse": Reverse(lengths=trained)},
    axes=("model.architecture", "model.position"),
    baseline="encoder, sinusoidal",
    variants={
        "encoder, sinusoidal": {},
        "encoder, RoPE": {"model.position": RoPE()},
        "encoder, ALiBi": {"model.position": ALiBi()},
        "encoder, NoPE": {"model.position": NoPE()},
        "decoder, sinusoidal": {"model.architecture": DecoderOnly()},
        "decoder, NoPE": {"model.architecture": DecoderOnly(), "model.position": NoPE()},
    },
    against={"decoder, NoPE": "encoder, NoPE"},
    budgets=same_size,
)
