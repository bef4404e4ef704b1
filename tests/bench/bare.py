"""The yardstick: the same models, batches and optimiser steps in a bare loop: no logging, evaluation or Lightning."""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from harness.module import TransformerModule, answer_loss
from harness.spec import RunSpec


def train(spec: RunSpec, steps: int) -> float:
    """Seconds that `steps` steps of a spec take in a bare loop."""
    module = TransformerModule(spec)
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    begun = time.perf_counter()
    for step in range(steps):
        batch = module.batch(step)
        loss = answer_loss(module.model(batch.inputs), batch.targets)
        loss.backward()
        nn.utils.clip_grad_norm_(module.model.parameters(), spec.train.gradient_clip or float("inf"), foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return time.perf_counter() - begun


if __name__ == "__main__":
    torch.set_num_threads(1)
    specs = [RunSpec.parse(document) for document in json.loads(Path(sys.argv[1]).read_text())]
    print(json.dumps([train(spec, spec.train.steps) for spec in specs]))
