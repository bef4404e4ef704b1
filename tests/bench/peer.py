"""The opponent: a plain x-transformers loop, padded to the longest, one process, torch's default threads.

Data is drawn before the clock starts, which favours it. Run by the interpreter of the bench environment.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional
from x_transformers import Decoder, TransformerWrapper

from harness.spec import Padded, RunSpec
from tasks.task import IGNORED

WARM_UP = 10


def model(spec: RunSpec) -> TransformerWrapper:
    """The nearest model that x-transformers has to a spec of the position study."""
    kind = spec.model.position.kind
    layers = Decoder(
        dim=spec.model.d_model,
        depth=spec.model.num_layers,
        heads=spec.model.num_heads,
        attn_dim_head=spec.model.shape.d_head,
        ff_mult=spec.model.feedforward.d_ff / spec.model.d_model,
        attn_flash=kind != "T5Bias",
        rotary_pos_emb=kind == "RoPE",
        alibi_pos_bias=kind == "ALiBi",
        rel_pos_bias=kind == "T5Bias",
    )
    return TransformerWrapper(
        num_tokens=spec.task.vocab_size,
        max_seq_len=128,
        attn_layers=layers,
        use_abs_pos_emb=kind == "Learned",
        scaled_sinu_pos_emb=kind == "Sinusoidal",
    )


def seconds_a_step(spec: RunSpec, steps: int) -> float:
    """Mean wall time of a training step."""
    net = model(spec)
    optimizer = torch.optim.AdamW(net.parameters(), lr=spec.train.learning_rate)
    device = torch.device("cpu")
    batches = [Padded().batch(spec.task, 0, i, spec.train.batch_size, device) for i in range(WARM_UP + steps)]
    begun = 0.0
    for i, batch in enumerate(batches):
        if i == WARM_UP:
            begun = time.perf_counter()
        logits = net(batch.inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - begun) / steps


if __name__ == "__main__":
    specs = [RunSpec.parse(document) for document in json.loads(Path(sys.argv[1]).read_text())]
    print(json.dumps([seconds_a_step(spec, int(sys.argv[2])) for spec in specs]))
