"""Which attention kernel a run's model really runs on, and why not a faster one."""

import torch

from harness.components.kernel import Fastest, backend_of
from harness.spec import RunSpec
from harness.transformer import Transformer


def attention_backend(spec: RunSpec, model: Transformer) -> tuple[str, str]:
    """The backend (flash, efficient, cudnn, flex, math) that the first training batch runs on, and the reason."""
    batch = spec.training_batch(0, torch.device(spec.device))
    with spec.autocast(), spec.train.kernel.context():
        backend = backend_of(lambda: model(*batch.reading))
    if obstacle := spec.model.flash_obstacle(spec.device):
        return backend, obstacle
    if backend == "flash":
        return backend, "no mask but the causal one, no bias matrix"
    if batch.real is not None and not spec.model.architecture.is_causal():
        return backend, "padding is masked, which flash does not take"
    if spec.train.kernel != Fastest():
        return backend, f"train.kernel = {spec.train.kernel.kind}"
    return backend, "torch found no flash kernel for these shapes, type and device"
