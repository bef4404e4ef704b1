"""Does stretching RoPE, in training or afterwards, carry it past the length it was trained on?

Bears on E13 (a larger base, NTK-aware scaling; tens of times the length are far out of reach here) and E12 (RoPE
extrapolates): another base in training; linear, NTK, YaRN by a factor of 1.25 at test time. YaRN's `fast` is 2.5 turns,
not 32, so that its fastest pair stays as it is at 18 tokens (32 turns take 201).
"""

from ablations.baseline import model, same_size, train
from harness import Ablation
from harness.components.position import LinearRoPE, NTKRoPE, RoPE, YaRN
from tasks import Copy, Lengths, Reverse

lengths = Lengths(train=(1, 8), test=(9, 10))

ablation = Ablation(
    question="Does stretching RoPE, in training or afterwards, carry it past the length it was trained on?",
    claims=("E13", "E12"),
    why="On two pilot seeds RoPE learned both tasks in 800 steps and got .24 to .60 of lengths 9 and 10 right, off the "
    "floor with 22 tokens where 18 were trained; next to nothing is right from 11 on (results/reference/position).",
    model=model.replace("position", RoPE()),
    train=train.replace("steps", 800),
    tasks={"copy": Copy(lengths=lengths), "reverse": Reverse(lengths=lengths)},
    axes=("model.position",),
    baseline="RoPE",
    variants={
        "RoPE": {},
        "base 500 000": {"model.position": RoPE(base=500_000)},
        "linear": {"model.position": LinearRoPE(test_factor=1.25)},
        "NTK-aware": {"model.position": NTKRoPE(test_factor=1.25)},
        "YaRN": {"model.position": YaRN(test_factor=1.25, trained_length=18, fast=2.5)},
    },
    budgets=same_size,
)
