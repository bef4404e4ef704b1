"""The LightningModule: step, loss, optimiser, schedule."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.components.feedforward import Routing
from harness.evaluate import whole
from harness.seeding import seed_global
from harness.spec import RunSpec
from harness.transformer import build_model
from tasks.task import IGNORED, Batch


def answer_loss(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross entropy (nats) over the answer's tokens; logits `(B, T, V)`, targets `(B, T)`.

    `smoothing` is the share of the target that is spread over all words (Szegedy et al. 2015, arXiv:1512.00567).
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat, asked = wide.flatten(0, 1), targets.flatten()
    return functional.cross_entropy(flat, asked, ignore_index=IGNORED, label_smoothing=smoothing)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups by module type: weights of linear maps decay; biases, norms, embeddings and others do not."""
    decaying = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decayed = [p for p in model.parameters() if id(p) in decaying]
    others = [p for p in model.parameters() if id(p) not in decaying]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


class TransformerModule(pl.LightningModule):
    """Trains the model of a RunSpec. A step's batch comes from (seed, step), so a loader has no state to save.

    After each step `read` (the batch), `loss`, `exact_match`, `gradient_norm` (detached scalars), `learning_rate`,
    `routing` (a mixture of experts each) and `shape` (B, T, S) tell of it.
    """

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = build_model(spec.model, spec.task.vocab_size, seed=spec.seed)
        self.loss = self.exact_match = self.gradient_norm = torch.zeros(())
        self.learning_rate = 0.0
        self.clipped: list[nn.Parameter] = []
        self.shape = (0, 0, 0)
        self.read: Batch | None = None
        self.experts = self.model.experts()
        self.routing: list[Routing] = []

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning notes each hook it calls, fifty times a step; nn.Module's own way would cost 1 % of the step."""
        if name == "_current_fx_name":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def autocast(self) -> torch.autocast:
        """A context of the spec's precision; Lightning enters its own around training steps."""
        return self.spec.autocast()

    def forward(
        self,
        tokens: Tensor,
        source: Tensor | None = None,
        real: Tensor | None = None,
        source_real: Tensor | None = None,
    ) -> Tensor:
        """Logits `(B, T, V)` on the spec's attention kernel; called with a batch's `reading`."""
        with self.spec.train.kernel.context():
            return self.model(tokens, source, real, source_real)

    def training_step(self, _batch: object, _index: int) -> Tensor:
        """The loss of this step's batch; what draws from the global generator sees it seeded from (seed, step)."""
        seed_global(self.spec.seed, "step", self.global_step)
        batch = self.read = self.batch(self.global_step)
        train = self.spec.train
        with train.kernel.context():
            output = self.model.outputs(*batch.reading, recompute=train.recompute)
        loss = answer_loss(output.logits, batch.targets, train.label_smoothing)
        self.loss, self.shape = loss.detach(), batch.shape
        right = output.logits.detach().argmax(-1) == batch.targets
        self.exact_match = whole(right, batch.targets != IGNORED).float().mean()
        self.routing = [Routing(*(part.detach() for part in routing)) for routing in output.routing]
        return loss + output.auxiliary_loss

    def on_after_backward(self) -> None:
        """Balance the experts: not earlier, as a recomputed forward pass must choose as the first one did."""
        for experts, routing in zip(self.experts, self.routing, strict=True):
            experts.rebalance(routing.load)

    def batch(self, step: int) -> Batch:
        """The training batch of a step."""
        return self.spec.training_batch(step, self.device)

    def configure_optimizers(self) -> Any:
        """Fused AdamW with decay groups and the schedule, moved every step."""
        train = self.spec.train
        self.clipped = list(self.model.parameters())  # walking the modules anew at every step costs another .5 %
        optimizer = torch.optim.AdamW(
            decay_groups(self.model, train.weight_decay),
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.eps,
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: train.schedule.factor(min(step, train.steps - 1), train.steps, self.spec.model.d_model),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip to the spec's norm, or only measure it: one pass over the gradients either way."""
        limit = self.spec.train.gradient_clip
        norm = nn.utils.clip_grad_norm_(self.clipped, limit or float("inf"), foreach=True)
        self.gradient_norm = norm.detach()
        self.learning_rate = float(optimizer.param_groups[0]["lr"])
