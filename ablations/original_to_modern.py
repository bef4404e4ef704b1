"""Which step from the Transformer of 2017 to a modern one pays?

Bears on D22 (the standard improvements): a ladder of cumulative changes, each rung compared with the one below, from
the original as a decoder (its warm-up takes 400 of the 600 steps) to the model and the training of `leave-one-out`.
"""

from ablations.baseline import brief, same_size, short
from harness import Ablation
from harness.components import attention, embedding, feedforward, init, norm, position
from harness.components.architecture import DecoderOnly
from harness.presets import PRESETS
from tasks import Reverse

start = PRESETS["original-small"].replace("model.architecture", DecoderOnly())
pre = {"model.norm_placement": norm.PreNorm()}
rms = {**pre, "model.norm": norm.RMSNorm()}
rope = {**rms, "model.position": position.RoPE()}
glu = {**rope, "model.feedforward": feedforward.SwiGLU.matching(256)}
gqa = {**glu, "model.attention": attention.GroupedQuery()}
dry = {**gqa, "model.attention_dropout": 0.0, "model.residual_dropout": 0.0, "model.embedding_dropout": 0.0}
hard = {**dry, "train.label_smoothing": 0.0}
rate = {**hard, "train.learning_rate": 3e-3, "train.schedule": brief.schedule}
adamw = {**rate, "train.gradient_clip": 1.0, "train.weight_decay": 0.01}
untied = {**adamw, "model.output_head": embedding.Untied(), "model.init.embedding": init.Normal()}
small = {**untied, "model.embedding_scale": embedding.UnitEmbedding(), "model.init": PRESETS["modern-small"].model.init}

ablation = Ablation(
    question="Which step from the Transformer of 2017 to a modern one pays?", claims=("D22",),
    why="On two pilot seeds the first three rungs did not learn reverse of up to four symbols in 600 steps, the last "
    "three always did, those between on one seed or on both: a step can pay or cost.",
    model=start.model, train=start.train.replaced({"steps": 600, "eval_every": 20}),
    tasks={"reverse": Reverse(lengths=short)}, axes=tuple(small), baseline="original", budgets=same_size,
    variants={"original": {}, "Pre-LN": pre, "RMSNorm": rms, "RoPE": rope, "SwiGLU": glu, "GQA": gqa, "no dropout": dry,
              "hard targets": hard, "cosine": rate, "clipping, decay": adamw, "untied": untied, "small init": small},
    against={"RMSNorm": "Pre-LN", "RoPE": "RMSNorm", "SwiGLU": "RoPE", "GQA": "SwiGLU", "no dropout": "GQA",
             "hard targets": "no dropout", "cosine": "hard targets", "clipping, decay": "cosine",
             "untied": "clipping, decay", "small init": "untied"},
    score="learning_time", higher_is_better=False,
)  # fmt: skip
