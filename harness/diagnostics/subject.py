"""What is examined: a model, how it is called, and what is declared of it. Ours comes from a RunSpec; a model built
elsewhere needs the few callables and names below, and probes say what they could not look at without the others.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness.components.attention import BigBird, LatentAttention, Linear, Longformer, SlidingWindow
from harness.components.feedforward import MixtureOfExperts, MoE
from harness.components.init import declared_deviation
from harness.components.linear import ResidualOutput
from harness.components.norm import BatchNorm
from harness.components.position import (
    ALiBi,
    Learned,
    NoPE,
    Randomised,
    RoPE,
    ScaledRoPE,
    Sinusoidal,
    T5Bias,
    TransformerXL,
    YaRN,
)
from harness.components.residual import NoResidual
from harness.components.scale import LearnedTemperature
from harness.cost import empty_model
from harness.diagnostics.keeping import kept, mode, seed_draws
from harness.module import TransformerModule, answer_loss
from harness.schema import Level, UserError, is_foreign
from harness.seeding import generator
from harness.spec import ModelSpec, RunSpec
from harness.transformer import Block, Stack, Transformer, build_model
from tasks.task import FIRST_SYMBOL, Batch

TOKENS = 24  # of a probe sequence, more where a window is wider: two blocks and a part
REDRAWN = 8  # models that the first loss is compared with
CHUNKED = 72  # of one for linear attention, which computes 64 at a time


@dataclass(frozen=True)
class AttentionSite:
    """One attention sublayer, by the paths of its modules; what is not named is not looked at.

    Attributes:
        path: the sublayer, called with hidden states `(B, T, d_model)` first, by whatever name.
        num_heads: heads of queries.
        num_groups: heads of keys and values.
        query: the module that gives queries of all heads, before positions and scale: `(B, T, heads · d)`,
            `(B, heads, T, d)` or, of sequences of more tokens than heads, `(B, T, heads, d)`; a norm of queries rather
            than the map before it. One that gives queries, keys and values side by side is named for all three.
        key: the same of keys.
        value: the same of values.
        output: the module that the heads' results go into, side by side `(B, T, heads · d)`.
        scale: the declared factor on q·k; None: it is trained.
        window: the last so many keys that a query sees; None: all.
        num_global: the first so many keys, which every query sees besides.
        num_random: so many others, drawn, that a query may see besides.
        causal: whether a query sees no key ahead.
        across: whether keys come from an encoder.
        shifted: whether one vector is added to all queries (Transformer-XL's u).
        feature_map: whether attention is linear, φ(q)·φ(k) with φ = elu + 1.
    """

    path: str
    num_heads: int
    num_groups: int
    query: str = ""
    key: str = ""
    value: str = ""
    output: str = ""
    scale: float | None = None
    window: int | None = None
    num_global: int = 0
    num_random: int = 0
    causal: bool = True
    across: bool = False
    shifted: bool = False
    feature_map: bool = False

    def part(self, name: str, made: Tensor) -> Tensor:
        """`(B, heads, T, d)`, a view: the queries, keys or values in what the module named for them gave."""
        heads = {"query": self.num_heads, "key": self.num_groups, "value": self.num_groups}
        if made.dim() == 4:
            return made.transpose(1, 2) if made.shape[1] != heads[name] == made.shape[2] else made
        if self.query == self.key == self.value:
            width = made.shape[-1] // sum(heads.values())
            made = made.split([count * width for count in heads.values()], -1)[list(heads).index(name)]
        return made.unflatten(-1, (heads[name], -1)).transpose(1, 2)

    def sees(self, length: int) -> Tensor:
        """`(T, T)`: the keys (columns) that a query surely sees, as declared."""
        at, of = torch.arange(length)[:, None], torch.arange(length)
        seen = torch.ones(length, length, dtype=torch.bool)
        if self.window is not None:
            seen = ((at - of).abs() < self.window) | (of < self.num_global)
            if not self.causal:
                seen = seen | (at < self.num_global)
        return seen & (of <= at) if self.causal else seen


@dataclass(frozen=True)
class Positions:
    """What is declared of a model's positions.

    Attributes:
        act: whether there are any.
        relative: whether only distances matter.
        frequencies: `(d / 2,)` radians a position by which pairs of queries and keys turn; None: they do not.
        codes: `(T, d_model)` added to the embeddings of the probe tokens; None: nothing is.
        factor: what embeddings are multiplied by before.
        embedding: the module that gives them.
        first_block: the module that reads their sum.
    """

    act: bool
    relative: bool = False
    frequencies: Tensor | None = None
    codes: Tensor | None = None
    factor: float = 1.0
    embedding: str = ""
    first_block: str = ""


@dataclass(frozen=True)
class Subject:
    """A model under examination.

    Attributes:
        model: left as it was by every probe.
        tokens: some sequences of arbitrary tokens, two at least, of three tokens at least, without padding: what
            structure is judged on.
        batch: sequences with targets, as training reads them; None: what needs targets is not looked at.
        predict: logits `(B, T, V)` of a batch, through the kernels that training uses.
        causal: whether a token may depend only on those before it.
        vocabulary: (first, last + 1) of the token ids that may stand for one another.
        sites: the attention sublayers.
        positions: what is declared of positions; None: nothing.
        loss: of logits and a batch.
        exact_gradients: whether gradients are to be the slope of the loss; not those of straight-through estimators.
        training_loss: the loss of a step of training, as training computes it, always of the same batch, what is drawn
            coming of torch's global generator, which probes seed; None: that of `batch` in training mode.
        optimizer: makes the optimiser of training, at its highest learning rate; None: what needs one is not looked at.
        accumulate: adds up the gradients of several batches as training does; None: it reads one batch a step.
        read: logits of a batch read in pieces of so many tokens, with a cache; None: there is no cache.
        held: bytes that a cache holds for the probe tokens, and those that are declared; None: not declared.
        takes_padding: whether `predict` heeds `real` and `source_real` of a batch.
        mixes_batch: whether training mode mixes sequences or later tokens by declaration (batch normalisation).
        deviations: the declared standard deviation of parameters, by name, at the start of training.
        first_loss: losses on `batch` of some models that are drawn anew as declared; None: ln V, that of guessing.
        trained: whether training has moved the weights from where they were drawn.
        idle: parameters that may be without gradient for a while, as those of experts that nobody chose.
        frozen: parameters that are not to be trained.
        parameters: names of all that there should be; empty: not declared.
        draws: whether training mode is declared to draw (dropout, jitter) or else to compute another thing than
            evaluation mode; None: not declared.
        auxiliary: the auxiliary loss of routers in a step of training, and the coefficient of balance that is declared.
        top_k: experts that a token chooses.
        blocks: the modules that each add to the residual stream `(B, T, d_model)` and hand it on, in their order.
        sublayers: in them, the modules whose result, alone or before others, is added to the stream: all of them, in
            the order in which a block calls them.
        units: the modules that read hidden feed-forward units `(B, T, d_ff)`, those of experts left out.
        routers: the modules that give logits `(…, E)` of experts.
        residual: what a block hands on besides what its sublayers give: its input (*sum*), which a norm may follow
            (*normed*), or nothing (*none*); empty: not declared.
        spec: what ours was made from.

    Raises:
        UserError: there are too few tokens.
    """

    model: nn.Module
    tokens: Batch
    batch: Batch | None = None
    predict: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: logits_of(model(*batch.reading))
    causal: bool = True
    vocabulary: tuple[int, int] = (0, 2)
    sites: tuple[AttentionSite, ...] = ()
    positions: Positions | None = None
    loss: Callable[[Tensor, Batch], Tensor] = lambda logits, batch: answer_loss(logits, batch.targets)
    exact_gradients: bool = True
    training_loss: Callable[[], Tensor] | None = None
    optimizer: Callable[[], torch.optim.Optimizer] | None = None
    accumulate: Callable[[Sequence[Batch]], None] | None = None
    read: Callable[[nn.Module, Batch, Sequence[int]], Tensor] | None = None
    held: Callable[[], tuple[int, int]] | None = None
    takes_padding: bool = False
    mixes_batch: bool = False
    deviations: Mapping[str, float] = field(default_factory=dict)
    first_loss: Callable[[], Sequence[float]] | None = None
    trained: bool = False
    idle: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    draws: bool | None = None
    auxiliary: tuple[Callable[[], Tensor], float] | None = None
    top_k: int = 1
    blocks: tuple[str, ...] = ()
    sublayers: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    residual: Literal["", "sum", "normed", "none"] = ""
    spec: RunSpec | None = None

    def __post_init__(self) -> None:
        """Raise `UserError` for tokens that say too little: of one sequence, a scale and a mask are one."""
        if len(self.tokens.inputs) < 2 or self.tokens.inputs.shape[1] < 3:
            raise UserError("tokens: probes need two sequences of three tokens at least")

    @torch.no_grad()
    def logits(self, batch: Batch, *, training: bool = False, draw: int = 0) -> Tensor:
        """Logits in one of the modes, with the same draws for the same `draw`; buffers stay as they are."""
        with mode(self.model, training=training), kept(self.model):
            seed_draws(draw, "diagnostics")
            return self.predict(self.model, batch).float()

    def others(self, tokens: Tensor) -> Tensor:
        """Other token ids in place of each of these."""
        first, end = self.vocabulary
        drawn = torch.randint(1, end - first, tokens.shape, generator=generator(tokens.device, 0, "others", 0, 0))
        return first + (tokens - first + drawn) % (end - first)


@contextmanager
def hooked(
    model: nn.Module, after: Mapping[str, Callable[..., Any]], before: Mapping[str, Callable[..., Any]] | None = None
) -> Iterator[None]:
    """A model whose modules, by path, call a hook after they run, with (module, args, kwargs, result), or before."""
    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
        for path, hook in (before or {}).items()
    ]
    handles += [model.get_submodule(path).register_forward_hook(hook, with_kwargs=True) for path, hook in after.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def block_of(name: str, blocks: Sequence[str]) -> str:
    """The block that a parameter or a module is in; empty outside of them."""
    return next((path for path in blocks if name.startswith(f"{path}.")), "")


def first(result: Any) -> Tensor:
    """The tensor that a module gives, alone or before others."""
    found: Tensor = result if isinstance(result, Tensor) else result[0]
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """For many small passes: where other processes want the cores too, a second thread costs tenfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def logits_of(output: Any) -> Tensor:
    """The logits in what a model gives: the tensor itself, its `logits`, by name or by key, or the first of several."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return logits_of(output["logits"])
    found: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return found


def subject_of(spec: RunSpec, module: TransformerModule | None = None, *, trained: bool = False) -> Subject:
    """The subject of a run: its untrained model, or `module` as it is; say whether that is `trained`."""
    module = (TransformerModule(spec) if module is None else module).to(spec.device)
    causal = spec.model.architecture.is_causal()
    tokens = _probe_tokens(spec)

    def predict(model: nn.Module, batch: Batch) -> Tensor:
        with spec.train.kernel.context():
            return model(*batch.reading)

    def optimizer() -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = module.configure_optimizers()["optimizer"]
        train = spec.train
        highest = max(train.schedule.factor(step, train.steps, spec.model.d_model) for step in range(train.steps))
        for group in found.param_groups:
            group["lr"] = train.learning_rate * highest
        return found

    return Subject(
        model=module.model,
        tokens=tokens,
        batch=module.batch(0),
        predict=predict,
        causal=causal,
        vocabulary=(FIRST_SYMBOL, spec.task.vocab_size),
        sites=tuple(_sites(module.model, spec.model)),
        positions=_positions(module.model, spec.model, tokens.inputs.shape[1]),
        training_loss=lambda: module.training_step(None, 0),
        optimizer=optimizer,
        read=_read if causal else None,
        held=partial(_held, module.model, spec, tokens) if causal else None,
        takes_padding=not spec.model.attention.draws_keys or spec.is_causal,
        mixes_batch=isinstance(spec.model.norm, BatchNorm),
        deviations=declared_deviations(module.model, spec.model),
        trained=trained,
        first_loss=partial(_first_loss, spec),
        idle=tuple(name for name, _ in module.model.named_parameters() if ".experts." in name),
        parameters=tuple(name for name, _ in empty_model(spec.model, spec.task.vocab_size).named_parameters()),
        draws=_draws(spec.model),
        auxiliary=_auxiliary(spec, module),
        top_k=spec.model.feedforward.top_k if isinstance(spec.model.feedforward, MoE) else 1,
        blocks=_paths(module.model, Block),
        sublayers=tuple(_sublayers(module.model)),
        units=tuple(path for path in _paths(module.model, ResidualOutput) if re.search(r"\.feedforward\.\w+$", path)),
        routers=tuple(f"{path}.router" for path in _paths(module.model, MixtureOfExperts)),
        residual=_residual(spec.model),
        spec=spec,
    )


def _draws(spec: ModelSpec) -> bool | None:
    """None for randomised positions and levels of users, which may do anything, and a capacity, which may be wide."""
    parts = [getattr(spec, name) for name in type(spec).model_fields]
    foreign = any(isinstance(part, Level) and is_foreign(type(part)) for part in parts)
    if isinstance(spec.position, Randomised | ScaledRoPE) or foreign:
        return None
    experts = spec.feedforward if isinstance(spec.feedforward, MoE) else None
    jitter = experts is not None and experts.jitter > 0
    if spec.attention_dropout or spec.residual_dropout or spec.embedding_dropout or jitter:
        return True
    return None if experts is not None and experts.capacity is not None else isinstance(spec.norm, BatchNorm)


def _residual(spec: ModelSpec) -> Literal["", "sum", "normed", "none"]:
    if is_foreign(type(spec.residual)) or is_foreign(type(spec.norm_placement)):
        return ""
    if isinstance(spec.residual, NoResidual):
        return "none"
    return "normed" if spec.norm_placement.outer else "sum"


def _auxiliary(spec: RunSpec, module: TransformerModule) -> tuple[Callable[[], Tensor], float] | None:
    """What is added to the loss of a step, where balance alone is declared to be."""
    experts = spec.model.feedforward
    if not isinstance(experts, MoE) or experts.z_loss or experts.jitter or spec.is_padded:
        return None

    def added() -> Tensor:
        whole = module.training_step(None, 0)
        return whole.detach() - module.loss

    return added, experts.balance


def _sublayers(model: Transformer) -> Iterator[str]:
    for path, block in model.named_modules():
        if isinstance(block, Block):
            steps = {"attention": block.attention_step, "memory_attention": block.memory_step}
            steps |= {"feedforward": block.feedforward_step}
            for name, step in steps.items():
                if step is not None and step.after is None:
                    yield f"{path}.{name}"
                elif step is not None:  # a norm behind the sublayer is the last that acts on its result
                    yield f"{path}.{'memory' if step is block.memory_step else name}_step.after"


def _paths(model: nn.Module, kind: type[nn.Module]) -> tuple[str, ...]:
    """Of the modules of a kind, an encoder's first."""
    found = (path for path, module in model.named_modules() if isinstance(module, kind))
    return tuple(sorted(found, key=lambda path: not path.startswith("encoder.")))


def _probe_tokens(spec: RunSpec) -> Batch:
    """As many sequences as heads, where a mask laid over the wrong dimension would pass unseen."""
    attention = spec.model.attention
    wanted = CHUNKED if not attention.has_logits else max(TOKENS, 2 * getattr(attention, "window", 0) + 5)
    length = min(wanted, spec.model.position.limit() or wanted)
    shape, device = (max(2, spec.model.num_heads), length), torch.device(spec.device)
    draws = generator(device, 0, "diagnostics", 0, 0)

    def drawn() -> Tensor:
        return torch.randint(FIRST_SYMBOL, spec.task.vocab_size, shape, generator=draws, device=device)

    tokens = drawn()
    return Batch(tokens, tokens, drawn() if spec.model.architecture.has_encoder() else None)


def _sites(model: Transformer, spec: ModelSpec) -> Iterator[AttentionSite]:
    for path, stack in model.named_modules():
        if not isinstance(stack, Stack):
            continue
        for layer, block in enumerate(stack.blocks):
            assert isinstance(block, Block)
            name = f"{path}.blocks.{layer}".lstrip(".")
            yield _site(f"{name}.attention", block.attention, spec, causal=stack.causal, across=False)
            if block.memory_attention is not None:
                yield _site(f"{name}.memory_attention", block.memory_attention, spec, causal=False, across=True)


def _site(path: str, module: nn.Module, spec: ModelSpec, *, causal: bool, across: bool) -> AttentionSite:
    level = spec.attention.across() if across else spec.attention
    latent = isinstance(module, LatentAttention)
    width = spec.shape.d_head + (module.d_rope if isinstance(module, LatentAttention) else 0)
    parts = {name for name, _ in module.named_modules()}

    def part(name: str) -> str:
        return f"{path}.{name}" if name in parts else ""  # a user's own attention may have others

    return AttentionSite(
        path=path,
        num_heads=spec.num_heads,
        num_groups=getattr(module, "groups", spec.num_heads),
        query=part("query" if latent else "query_norm"),
        key="" if latent else part("key_norm"),
        value=part("value_up" if latent else "value"),
        output=part("output"),
        scale=_scale(spec, width, across=across),
        window=level.window if isinstance(level, SlidingWindow | Longformer | BigBird) else None,
        num_global=level.num_global if isinstance(level, Longformer | BigBird) else 0,
        num_random=level.num_random if isinstance(level, BigBird) else 0,
        causal=causal,
        across=across,
        shifted=isinstance(spec.position, TransformerXL) and not across,
        feature_map=isinstance(level, Linear),
    )


def _scale(spec: ModelSpec, width: int, *, across: bool) -> float | None:
    """The declared factor on q·k in evaluation; None where it is trained, or not the same for all dimensions."""
    if isinstance(spec.scale, LearnedTemperature):
        return None
    position = spec.position.inner if isinstance(spec.position, Randomised) else spec.position
    if across or not isinstance(position, YaRN):
        return spec.scale.factor(width)
    if spec.rotated_shape.d_head != width:
        return None
    return spec.scale.factor(width) * position.rotation(width, position.test_factor).amplitude ** 2


def _positions(model: Transformer, spec: ModelSpec, length: int) -> Positions:
    level, codes, frequencies = spec.position, None, None
    if isinstance(level, Sinusoidal):
        codes = level.codes(length, spec.d_model)
    elif isinstance(level, Learned):
        codes = model.get_parameter("position.table.weight").detach()[:length]
    elif isinstance(level, RoPE):
        frequencies = _geometric(spec.rotated_shape.d_head, level.base)
    elif isinstance(level, ScaledRoPE):
        frequencies = level.rotation(spec.rotated_shape.d_head, level.test_factor).frequency
    known = not isinstance(level, Randomised) and not is_foreign(type(level))
    first = "blocks.0" if model.encoder is None else "encoder.blocks.0"  # the encoder embeds its source first
    return Positions(
        act=not isinstance(level, NoPE),
        relative=isinstance(level, RoPE | ScaledRoPE | ALiBi | T5Bias | TransformerXL),
        frequencies=frequencies,
        codes=codes,
        factor=spec.embedding_scale.factor(spec.d_model),
        embedding="embedding",
        first_block=first if known else "",
    )


def _geometric(width: int, base: float) -> Tensor:
    """base^{−2i/width} in fp64."""
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)


@torch.no_grad()
def _first_loss(spec: RunSpec) -> list[float]:
    """The first losses of models that are drawn anew, as declared."""
    batch, losses = spec.training_batch(0, torch.device(spec.device)), []
    with torch.random.fork_rng():
        for draw in range(REDRAWN):
            model = build_model(spec.model, spec.task.vocab_size, seed=spec.seed + 1 + draw).to(spec.device)
            losses.append(answer_loss(model(*batch.reading), batch.targets).item())
    return losses


def _held(model: Transformer, spec: RunSpec, tokens: Batch) -> tuple[int, int]:
    """Bytes of a layer's own caches after the probe tokens, and those that their kind needs."""
    count, length = tokens.inputs.shape
    cache = model.cache(length)
    source = () if tokens.source is None else (tokens.source,)
    with torch.no_grad(), mode(model, training=False):
        model(tokens.inputs, *source, cache=cache)
    elements = spec.model.attention.cache_elements(spec.model.shape, length)
    return sum(block.own.nbytes for block in cache.blocks), 4 * count * spec.model.num_layers * elements


def _read(model: nn.Module, batch: Batch, pieces: Sequence[int]) -> Tensor:
    """Logits of a batch that is read in pieces, with a cache."""
    assert isinstance(model, Transformer)
    cache, begin, found = model.cache(sum(pieces)), 0, []
    for count in pieces:
        source = () if batch.source is None else (batch.source,)
        found.append(model(batch.inputs[:, begin : begin + count], *source, cache=cache))
        begin += count
    return torch.cat(found, dim=1)


def declared_deviations(model: nn.Module, spec: ModelSpec) -> dict[str, float]:
    """The deviation that each parameter of a linear map or an embedding of ours is declared to be drawn with."""
    found = {
        f"{path}.{name}": declared_deviation(module, name, parameter, spec.init, spec.num_layers)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    return {name: deviation for name, deviation in found.items() if deviation is not None}
