"""The models, training and budgets that ablations start from; an ablation replaces what its question needs."""

from harness import Budget, ModelSpec, TrainSpec
from harness.components.feedforward import ReLU
from harness.components.norm import PreNorm
from harness.components.position import RoPE
from tasks import Lengths

# Longer than trained: what position encodings are judged by.
model = ModelSpec(num_layers=3, norm_placement=PreNorm(), feedforward=ReLU(d_ff=128))
train = TrainSpec(steps=1000, learning_rate=4e-3)
lengths = Lengths(train=(1, 8), test=(9, 10, 11, 12, 13, 14, 15, 16))

# At the trained lengths: what everything else is judged by, mostly by how soon it is learned.
core = ModelSpec(num_layers=2, norm_placement=PreNorm(), feedforward=ReLU(d_ff=128), position=RoPE())
brief = TrainSpec(steps=600, learning_rate=3e-3, eval_every=20)
trained = Lengths(train=(1, 6), test=())
short = Lengths(train=(1, 4), test=())  # where some variants learn too slowly for the longer ones

smoke = Budget(seeds=2, changes={"train.steps": 20, "train.eval_samples": 8, "train.eval_every": 10})
budgets = {
    "smoke": smoke,
    "quick": Budget(seeds=9),
    "full": Budget(
        seeds=10,
        changes={
            "model.d_model": 256,
            "model.num_heads": 8,
            "model.num_layers": 6,
            "model.feedforward.d_ff": 1024,
            "train.steps": 20_000,
            "train.learning_rate": 3e-4,
            "task.lengths": Lengths(train=(1, 20), test=tuple(range(21, 41))),
        },
    ),
}
same_size = {"smoke": smoke, "quick": Budget(seeds=9), "full": Budget(seeds=20, changes={"train.eval_samples": 1024})}
