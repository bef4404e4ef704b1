"""Named whole models: the original, a modern one, both at a small size, the usual widths, and three large public models
to be counted.

Of the article's mixtures of experts (claim D18) two are here. DeepSeek-V3 is not: its first layers are dense and its
queries compressed, which a ModelSpec cannot say; nor is Qwen4-MoE, whose weights are not public. Both stay unverified.
"""

from harness.components.architecture import EncoderDecoder
from harness.components.attention import GroupedQuery
from harness.components.embedding import SqrtWidth, Tied
from harness.components.feedforward import GELU, MoE, ReLU, SwiGLU
from harness.components.init import DepthGain, Initialisation, Normal
from harness.components.norm import LayerNorm, PostNorm, PreNorm, RMSNorm
from harness.components.position import Learned, RoPE, Sinusoidal
from harness.schema import Spec, UserError, nearest
from harness.spec import ModelSpec, Noam, TrainSpec, WarmupCosine


class Preset(Spec):
    """A model, how it is trained, and the size of its vocabulary where it is counted without a task."""

    what: str
    model: ModelSpec
    train: TrainSpec = TrainSpec()
    vocab_size: int = 32_000


def original(
    d_model: int, num_heads: int, d_ff: int, num_layers: int, warmup_steps: int
) -> tuple[ModelSpec, TrainSpec]:
    """The Transformer of Vaswani et al. 2017, arXiv:1706.03762: encoder and decoder, Post-LN, sinusoidal positions, one
    matrix for embeddings and output, times √d_model, Adam with Noam's schedule, dropout and label smoothing of .1.
    """
    model = ModelSpec(
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        architecture=EncoderDecoder(),
        position=Sinusoidal(),
        norm=LayerNorm(),
        norm_placement=PostNorm(),
        feedforward=ReLU(d_ff=d_ff),
        embedding_scale=SqrtWidth(),
        output_head=Tied(),
        init=Initialisation(embedding=Normal(deviation=d_model**-0.5)),
        attention_dropout=0.1,
        residual_dropout=0.1,
        embedding_dropout=0.1,
    )
    train = TrainSpec(
        learning_rate=1.0,
        schedule=Noam(warmup_steps=warmup_steps),
        beta2=0.98,
        eps=1e-9,
        weight_decay=0.0,
        gradient_clip=None,
        label_smoothing=0.1,
    )
    return model, train


def modern(d_model: int, num_heads: int, num_groups: int, d_ff: int, num_layers: int) -> tuple[ModelSpec, TrainSpec]:
    """The decoder that most open models share (Touvron et al. 2023, arXiv:2307.09288): Pre-RMSNorm, RoPE, SwiGLU,
    grouped-query attention, no dropout, AdamW with decay and a cosine.
    """
    model = ModelSpec(
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        position=RoPE(),
        attention=GroupedQuery(num_groups=num_groups),
        norm=RMSNorm(),
        norm_placement=PreNorm(),
        feedforward=SwiGLU(d_ff=d_ff),
        init=Initialisation(
            linear=Normal(), qkv=Normal(), residual=Normal(), residual_gain=DepthGain(), embedding=Normal()
        ),
    )
    train = TrainSpec(learning_rate=3e-4, schedule=WarmupCosine(), beta2=0.95, eps=1e-8, weight_decay=0.1)
    return model, train


def bert(d_model: int, num_heads: int, num_layers: int) -> ModelSpec:
    """A stack of a usual width (Devlin et al. 2018, arXiv:1810.04805): heads of 64, d_ff = 4 · d_model, GELU, learned
    positions.
    """
    return ModelSpec(
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        position=Learned(max_length=512),
        feedforward=GELU(d_ff=4 * d_model),
        output_head=Tied(),
        init=Initialisation(linear=Normal(), qkv=Normal(), residual=Normal(), embedding=Normal()),
        attention_dropout=0.1,
        residual_dropout=0.1,
        embedding_dropout=0.1,
    )


def _preset(what: str, parts: tuple[ModelSpec, TrainSpec], vocab_size: int = 32_000) -> Preset:
    return Preset(what=what, model=parts[0], train=parts[1], vocab_size=vocab_size)


def _mixture(spec: ModelSpec, experts: MoE) -> ModelSpec:
    return spec.replace("feedforward", experts)


MODERN = "decoder, RMSNorm first, RoPE, grouped-query attention, SwiGLU: "

PRESETS = {
    "original": _preset(
        "the encoder-decoder of 2017, its base: d_model 512, 8 heads, d_ff 2048, 6 layers",
        original(512, 8, 2048, 6, 4000),
        37_000,
    ),
    "original-small": _preset(
        "the same parts for a laptop: d_model 64, 4 heads, d_ff 256, 2 layers", original(64, 4, 256, 2, 400), 1_000
    ),
    "modern": _preset(MODERN + "d_model 512, 8 heads, 2 groups, d_ff 1365, 6 layers", modern(512, 8, 2, 1365, 6)),
    "modern-small": _preset(
        "the same parts for a laptop: d_model 64, 4 heads, 2 groups, d_ff 171, 2 layers",
        modern(64, 4, 2, 171, 2),
        1_000,
    ),
    "width-512": Preset(what="the usual pair: d_model 512, 8 heads", model=bert(512, 8, 6), vocab_size=30_522),
    "width-768": Preset(
        what="the usual pair: d_model 768, 12 heads (BERT base)", model=bert(768, 12, 12), vocab_size=30_522
    ),
    "width-1024": Preset(
        what="the usual pair: d_model 1024, 16 heads (BERT large)", model=bert(1024, 16, 24), vocab_size=30_522
    ),
    "llama-2-7b": _preset(
        "to be counted: d_model 4096, 32 heads with keys of their own, d_ff 11008, 32 layers (arXiv:2307.09288)",
        modern(4096, 32, 32, 11_008, 32),
    ),
    "mixtral-8x7b": Preset(
        what="to be counted: 8 experts, top-2 (Jiang et al. 2024, arXiv:2401.04088)",
        model=_mixture(modern(4096, 32, 8, 1, 32)[0], MoE(expert=SwiGLU(d_ff=14_336), num_experts=8, top_k=2)),
    ),
    "llama-4-scout": Preset(
        what="to be counted, text only: 16 experts, top-1, and a shared one (published with its weights, 2025)",
        model=_mixture(
            modern(5120, 40, 8, 1, 48)[0], MoE(expert=SwiGLU(d_ff=8192), num_experts=16, top_k=1, num_shared=1)
        ),
        vocab_size=202_048,
    ),
}


def preset(name: str) -> Preset:
    """A preset by name.

    Raises:
        UserError: there is none, with the nearest name.
    """
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]
