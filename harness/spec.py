"""ModelSpec, TrainSpec and RunSpec: everything that decides what a run computes.

ModelSpec's fields are the component matrix. A run is a pure function of its RunSpec, and the fingerprint is its name.
"""

import math
from abc import abstractmethod
from functools import lru_cache
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, model_validator

from harness.components.architecture import Architecture, DecoderOnly
from harness.components.attention import Attention, MultiHead, Parts
from harness.components.embedding import EmbeddingScale, OutputHead, UnitEmbedding, Untied
from harness.components.feedforward import FeedForward, ReLU
from harness.components.init import Initialisation
from harness.components.kernel import Fastest, Kernel
from harness.components.norm import LayerNorm, Norm, NormPlacement, PostNorm
from harness.components.output_projection import OutputProjection, Projection
from harness.components.position import Position, Sinusoidal
from harness.components.qk_norm import NoQKNorm, QueryKeyNorm
from harness.components.residual import Residual, ResidualConnection
from harness.components.scale import InverseSqrt, Scale
from harness.components.shape import Shape
from harness.layout import Layout
from harness.schema import Changes, Level, Spec, fingerprint
from harness.seeding import stable_hash
from tasks.task import Batch, Task, padded

WIDEST = 256  # dimensions of a head that CUDA's flash kernels take


class ModelSpec(Spec):
    """The component matrix of a Transformer; the defaults are the original's levels at a small size, decoder only.

    Without `d_head` a head has d_model / num_heads dimensions.
    """

    d_model: Annotated[int, Changes("parameters"), Ge(1)] = 64
    num_layers: Annotated[int, Changes("parameters"), Ge(1)] = 2
    num_heads: Annotated[int, Changes("outputs"), Ge(1)] = 4
    d_head: Annotated[int | None, Changes("parameters"), Field(ge=1, description="None: d_model / num_heads")] = None
    architecture: Annotated[Architecture, Changes("data")] = DecoderOnly()
    position: Annotated[Position, Changes("outputs")] = Sinusoidal()
    attention: Annotated[Attention, Changes("outputs")] = MultiHead()
    scale: Annotated[Scale, Changes("outputs")] = InverseSqrt()
    qk_norm: Annotated[QueryKeyNorm, Changes("outputs")] = NoQKNorm()
    output_projection: Annotated[OutputProjection, Changes("outputs")] = Projection()
    norm: Annotated[Norm, Changes("outputs")] = LayerNorm()
    norm_placement: Annotated[NormPlacement, Changes("outputs")] = PostNorm()
    residual: Annotated[ResidualConnection, Changes("outputs")] = Residual()
    feedforward: Annotated[FeedForward, Changes("outputs")] = ReLU()
    embedding_scale: Annotated[EmbeddingScale, Changes("outputs")] = UnitEmbedding()
    output_head: Annotated[OutputHead, Changes("outputs")] = Untied()
    init: Initialisation = Initialisation()
    attention_dropout: Annotated[float, Changes("outputs"), Ge(0), Lt(1)] = 0.0
    residual_dropout: Annotated[float, Changes("outputs"), Ge(0), Lt(1)] = 0.0
    embedding_dropout: Annotated[float, Changes("outputs"), Ge(0), Lt(1)] = 0.0

    @model_validator(mode="after")
    def _possible(self) -> "ModelSpec":
        if self.d_head is None and self.d_model % self.num_heads:
            fitting = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0]
            near = sorted(sorted(fitting, key=lambda h: abs(h - self.num_heads))[:2])
            raise ValueError(
                f"num_heads = {self.num_heads} does not divide d_model = {self.d_model}; "
                f"choose {' or '.join(map(str, near))}, or name d_head"
            )
        self.position.check(self.rotated_shape)
        self.qk_norm.check()
        self.output_projection.check(self.shape)
        self.feedforward.check()
        self.attention.check(self.parts, self.position)
        return self

    @property
    def shape(self) -> Shape:
        """The sizes that components are built for."""
        return Shape(self.d_model, self.num_heads, self.num_layers, self.d_head or self.d_model // self.num_heads)

    @property
    def rotated_shape(self) -> Shape:
        """The same with the part of a head that positions act on."""
        return self.attention.rotated(self.shape)

    @property
    def parts(self) -> Parts:
        """What attention is built from."""
        return Parts(self.shape, self.scale, self.qk_norm, self.output_projection, self.attention_dropout)

    def flash_obstacle(self, device: str) -> str:
        """Why flash attention cannot run somewhere in a model of this spec; empty where it can."""
        causal = self.architecture.is_causal()
        found = [self.attention.flash_obstacle(device)]
        found.append(self.position.flash_obstacle(device, causal=causal))
        if self.architecture.has_encoder():
            found.append(self.position.flash_obstacle(device, causal=False))
        if self.attention_dropout and device == "cpu":
            found.append("the CPU has no flash kernel with dropout")
        width = self.attention.query_width(self.shape) + self.position.added_width(causal=causal)
        if device == "cuda" and width > WIDEST:
            found.append(f"queries of {width} dimensions are wider than the {WIDEST} that flash takes")
        return next(filter(None, found), "")


class Schedule(Level):
    """Base of the learning-rate schedules."""

    @abstractmethod
    def factor(self, step: int, steps: int, d_model: int) -> float:
        """What the learning rate is multiplied by at step 0 … steps−1, for a model of this width."""


class Constant(Schedule):
    """The same learning rate throughout."""

    def factor(self, step: int, steps: int, d_model: int) -> float:
        """One."""
        return 1.0


class WarmupCosine(Schedule):
    """Linear warm-up over a fraction of the steps, then half a cosine down to `floor` (Loshchilov & Hutter 2017,
    arXiv:1608.03983).
    """

    warmup: Annotated[float, Changes("schedule"), Ge(0), Lt(1)] = 0.05
    floor: Annotated[float, Changes("schedule"), Ge(0), Le(1)] = 0.05

    def factor(self, step: int, steps: int, d_model: int) -> float:
        """Rises to 1 at the end of the warm-up, ends at `floor`."""
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        progress = (step - rising) / max(1, steps - 1 - rising)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


class Noam(Schedule):
    """d_model^−½ · min(s^−½, s · warmup_steps^−1.5) at step s = 1, 2 …: the original's, for a learning rate of 1
    (Vaswani et al. 2017, arXiv:1706.03762).
    """

    warmup_steps: Annotated[int, Changes("schedule"), Ge(1)] = 4000

    def factor(self, step: int, steps: int, d_model: int) -> float:
        """Rises for `warmup_steps`, then falls with the root of the step."""
        return float(d_model**-0.5 * min((step + 1) ** -0.5, (step + 1) * self.warmup_steps**-1.5))


class InverseSquareRoot(Schedule):
    """Linear warm-up over a fraction of the steps to 1, then √(w / s) at step s after w steps of it: Noam's shape
    with the learning rate as its peak (Raffel et al. 2020, arXiv:1910.10683, without the rise).
    """

    warmup: Annotated[float, Changes("schedule"), Gt(0), Lt(1)] = 0.05

    def factor(self, step: int, steps: int, d_model: int) -> float:
        """1 at the end of the warm-up."""
        rising = max(1, round(self.warmup * steps))
        return min((step + 1) / rising, math.sqrt(rising / (step + 1)))


class Sampling(Level):
    """Base of the ways in which training data is drawn."""

    @abstractmethod
    def batch(
        self, task: Task, seed: int, step: int, batch_size: int, device: torch.device, layout: Layout = "continue"
    ) -> Batch:
        """The training batch of a step, a pure function of its arguments."""

    def distinct(self, steps: int, batch_size: int) -> int:
        """At most so many different training samples are seen in `steps` steps."""
        return steps * batch_size

    def pool(
        self, task: Task, seed: int, length: int, device: torch.device, layout: Layout = "continue"
    ) -> Batch | None:
        """All training samples of a length where each epoch draws from the same ones; None where there are none."""
        return None


class Fresh(Sampling):
    """New samples at every step, one length a batch."""

    def batch(
        self, task: Task, seed: int, step: int, batch_size: int, device: torch.device, layout: Layout = "continue"
    ) -> Batch:
        """A batch of one length."""
        length = task.training_length(seed, "train", step)
        return task.batch(seed, "train", step, batch_size, length, device, layout)


class Padded(Sampling):
    """New samples at every step, a length a row, padded to the longest: for comparison with one length a batch."""

    def batch(
        self, task: Task, seed: int, step: int, batch_size: int, device: torch.device, layout: Layout = "continue"
    ) -> Batch:
        """A batch of all lengths drawn for its rows."""
        lengths = [task.training_length(seed, f"train/{row}", step) for row in range(batch_size)]
        rows = [(length, lengths.count(length)) for length in sorted(set(lengths))]
        return padded([task.batch(seed, "train", step, count, length, device, layout) for length, count in rows])


class Finite(Sampling):
    """`num_samples` samples, seen again every epoch in a new order: for claims about generalisation.

    The samples are spread evenly over the training lengths; a batch has one length. Evaluation leaves them out.
    """

    result_version = 2
    num_samples: Annotated[int, Changes("data"), Ge(1)] = 1000

    def batch(
        self, task: Task, seed: int, step: int, batch_size: int, device: torch.device, layout: Layout = "continue"
    ) -> Batch:
        """The step's batch of the epoch that it falls into; the last batch of a length may be smaller."""
        batches = self._batches(task, batch_size)
        epoch, index = divmod(step, len(batches))
        length, first = batches[_order(len(batches), seed, "epoch", epoch)[index]]
        pool = _pool(task, seed, self._share(task, length), length, device, layout)
        rows = _order(len(pool.inputs), seed, "rows", epoch, length)[first : first + batch_size].to(device)
        return pool.rows(rows)

    def distinct(self, steps: int, batch_size: int) -> int:
        """All samples, if there are steps enough to see them."""
        return min(self.num_samples, steps * batch_size)

    def pool(
        self, task: Task, seed: int, length: int, device: torch.device, layout: Layout = "continue"
    ) -> Batch | None:
        """The samples of a length; training has seen each of them once its first epoch is over."""
        share = self._share(task, length)
        return _pool(task, seed, share, length, device, layout) if share else None

    def _share(self, task: Task, length: int) -> int:
        lengths = list(task.lengths.training)
        return self.num_samples // len(lengths) + (lengths.index(length) < self.num_samples % len(lengths))

    def _batches(self, task: Task, batch_size: int) -> list[tuple[int, int]]:
        """(length, first row) of each batch of an epoch."""
        return [
            (length, first)
            for length in task.lengths.training
            for first in range(0, self._share(task, length), batch_size)
        ]


@lru_cache(maxsize=64)
def _pool(task: Task, seed: int, count: int, length: int, device: torch.device, layout: Layout) -> Batch:
    """All finite samples of a length; a pure function, kept because every step needs it whole."""
    return task.batch(seed, "finite", 0, count, length, device, layout)


def _order(count: int, *name: int | str) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(stable_hash(*name)))


class TrainSpec(Spec):
    """How a model is trained and how often it is evaluated. The optimiser is AdamW (arXiv:1711.05101)."""

    steps: Annotated[int, Changes("schedule"), Ge(1)] = 1500
    batch_size: Annotated[int, Changes("data"), Ge(1)] = 64
    learning_rate: Annotated[float, Changes("updates"), Gt(0), Le(10)] = 1e-3
    schedule: Annotated[Schedule, Changes("schedule")] = WarmupCosine()
    beta1: Annotated[float, Changes("updates"), Ge(0), Lt(1)] = 0.9
    beta2: Annotated[float, Changes("updates"), Ge(0), Lt(1)] = 0.98
    eps: Annotated[float, Changes("updates"), Gt(0)] = 1e-9
    weight_decay: Annotated[float, Changes("updates"), Ge(0)] = 0.01
    gradient_clip: Annotated[float | None, Changes("updates"), Field(gt=0, description="None: not clipped")] = 1.0
    label_smoothing: Annotated[float, Changes("updates"), Ge(0), Lt(1)] = 0.0
    recompute: Annotated[bool, Changes("hardware")] = False
    sampling: Annotated[Sampling, Changes("data")] = Fresh()
    kernel: Annotated[Kernel, Changes("hardware")] = Fastest()
    eval_samples: Annotated[int, Changes("evaluation"), Ge(1)] = 256
    eval_every: Annotated[int, Changes("evaluation"), Ge(1)] = 250


def _is_final(samples: str) -> bool:
    return samples == "final"


class RunSpec(Spec):
    """One run, whole. `device` decides the precision too: fp32 on the CPU, bf16 autocast on CUDA.

    `samples` names the sequences that it is evaluated on: those of the final comparison, or others, on which settings
    are tuned.
    """

    model: ModelSpec = ModelSpec()
    task: Task
    train: TrainSpec = TrainSpec()
    seed: Annotated[int, Changes("data"), Ge(0)] = 0
    device: Annotated[Literal["cpu", "cuda"], Changes("hardware")] = "cpu"
    # Left out of the document where it says nothing new: runs from before there were sweeps keep their fingerprints.
    samples: Annotated[Literal["final", "tuning"], Changes("evaluation"), Field(exclude_if=_is_final)] = "final"

    @model_validator(mode="after")
    def _trainable(self) -> "RunSpec":
        self._check_layout()
        limit, length = self.model.position.limit(), self.task.tokens(self.task.lengths.train[1], self.layout)
        if limit is not None and limit < length:
            raise ValueError(
                f"model.position = {self.model.position.kind} takes {limit} tokens, the longest training sequence has "
                f"{length}; raise {self.model.position.limited_by} to {length} or more, or shorten task.lengths.train"
            )
        if self.is_padded and not self.is_causal and self.model.attention.draws_keys:
            raise ValueError(
                f"model.attention = {self.model.attention.kind} would draw keys among the padding of an encoder; use "
                f"train.sampling = Fresh() with a task of one length a batch, or Longformer()"
            )
        self.train.kernel.check_model(self.flash_obstacle())
        return self

    @property
    def is_padded(self) -> bool:
        """Whether batches hold padding."""
        return self.task.ragged or isinstance(self.train.sampling, Padded)

    @property
    def is_causal(self) -> bool:
        """Whether every stack sees only tokens that do not lie ahead."""
        return self.model.architecture.is_causal() and not self.model.architecture.has_encoder()

    def flash_obstacle(self) -> str:
        """Why flash attention cannot run somewhere in this run; empty where it can."""
        masked = self.device == "cuda" and self.is_padded and not self.is_causal
        padding = "padding is masked, which flash does not take" if masked else ""
        return self.model.flash_obstacle(self.device) or padding

    def _check_layout(self) -> None:
        """An encoder reads the answer off where the source stands."""
        if self.layout != "in place":
            return
        for length in (*self.task.lengths.train, *self.task.lengths.test):
            widths = self.task.widths(length)
            if widths is None or widths[0] != widths[1]:
                said = f"{widths[0]} tokens with {widths[1]}" if widths else "with as many tokens as it takes"
                raise ValueError(
                    f"model.architecture = {self.model.architecture.kind} predicts in place, {self.task.kind} answers "
                    f"{said}; use DecoderOnly() or EncoderDecoder()"
                )

    @property
    def layout(self) -> Layout:
        """How source and answer become tokens."""
        return self.model.architecture.layout

    def batch(self, stream: str, step: int, batch_size: int, length: int, device: torch.device) -> Batch:
        """A batch of one length for evaluation or a look inside, of a stream of its own."""
        return self.task.batch(self.seed, stream, step, batch_size, length, device, self.layout)

    def stream(self, name: str) -> str:
        """The stream of evaluation samples of that name, of which tuning has its own."""
        return name if self.samples == "final" else f"{self.samples}/{name}"

    def training_batch(self, step: int, device: torch.device) -> Batch:
        """The training batch of a step."""
        train = self.train
        return train.sampling.batch(self.task, self.seed, step, train.batch_size, device, self.layout)

    def training_pool(self, length: int, device: torch.device) -> Batch | None:
        """The training samples of a length where each epoch draws from the same ones; None where there are none."""
        return self.train.sampling.pool(self.task, self.seed, length, device, self.layout)

    @property
    def precision(self) -> str:
        """`fp32` or `bf16`."""
        return "bf16" if self.device == "cuda" else "fp32"

    def autocast(self) -> torch.autocast:
        """A context of the precision."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")

    def fingerprint(self) -> str:
        """16 hex digits; see `harness.schema.fingerprint`."""
        return fingerprint(self)
