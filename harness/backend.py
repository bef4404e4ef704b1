"""Which attention kernel a run's model really runs on, and why not a faster one."""

import torch

from harness.components.kernel import Fastest, backend_of
from harness.spec import RunSpec
from harness.transformer import Transformer


def attention_backend(spec: RunSpec, model: Transformer) -> tuple[str, str]:
    """The slowest backend (flash … math, none) that the first training batch runs on, and why no faster one."""
    batch = spec.training_batch(0, torch.device(spec.device))
    with spec.autocast(), spec.train.kernel.context():
        backend = backend_of(lambda: model(*batch.reading))
    if backend == "flash":
        return backend, "every call of attention runs on it"
    if obstacle := spec.flash_obstacle():
        return backend, obstacle
    if spec.train.kernel != Fastest():
        return backend, f"train.kernel = {spec.train.kernel.kind}"
    if backend == "cudnn":
        return backend, "torch prefers cuDNN's fused kernel here"
    return backend, "torch found no flash kernel for these shapes, type and device"
