"""The attention kernel that really ran: asserted for every position encoding, never hoped for."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.backend import attention_backend
from harness.components.architecture import Architecture, DecoderOnly, EncoderDecoder, EncoderOnly
from harness.components.attention import Attention, Latent, Linear, MultiHead, SlidingWindow
from harness.components.kernel import Fastest, Flash, Kernel, Math, backend_of
from harness.components.position import (
    ALiBi,
    Learned,
    LinearRoPE,
    NoPE,
    NTKRoPE,
    Position,
    Randomised,
    RoPE,
    Sinusoidal,
    T5Bias,
    TransformerXL,
    YaRN,
)
from harness.module import TransformerModule
from harness.schema import UserError, is_foreign
from harness.spec import ModelSpec, Padded, RunSpec, TrainSpec
from tasks import Copy, Lengths

ON_FLASH = [
    NoPE(),
    Sinusoidal(),
    Learned(max_length=32),
    RoPE(),
    LinearRoPE(),
    NTKRoPE(),
    YaRN(),
    ALiBi(),
    Randomised(inner=RoPE()),
]
OFF_FLASH = [T5Bias(), TransformerXL(), Randomised(inner=T5Bias())]

OBSTACLE = "adds a T×T bias, which flash takes only on the CPU, untrained"


def module(
    position: Position,
    kernel: Kernel,
    num_heads: int = 2,
    architecture: Architecture | None = None,
    attention: Attention | None = None,
) -> TransformerModule:
    model = ModelSpec(
        d_model=16,
        num_layers=1,
        num_heads=num_heads,
        position=position,
        architecture=architecture or DecoderOnly(),
        attention=attention or MultiHead(),
    )
    task = Copy(lengths=Lengths(train=(2, 6), test=()))
    return TransformerModule(RunSpec(model=model, task=task, train=TrainSpec(kernel=kernel, batch_size=2)))


def ran_on(trained: TransformerModule) -> tuple[str, str]:
    """The backend of the first training batch, and why."""
    return attention_backend(trained.spec, trained.model)


@pytest.mark.parametrize("position", ON_FLASH, ids=lambda level: level.kind)
@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_flash_really_runs_forward_and_backward(position: Position, num_heads: int) -> None:
    trained = module(position, Flash(), num_heads)
    batch = trained.batch(0)
    assert backend_of(lambda: trained(batch.inputs)) == "flash"
    logits = trained(batch.inputs)
    assert "flash" in backend_of_backward(logits)
    assert ran_on(trained)[0] == "flash"


LEVELS = [level() for level in Attention.levels().values() if not is_foreign(level)]


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderOnly(), EncoderDecoder()], ids=lambda level: level.kind)
@pytest.mark.parametrize("position", [NoPE(), RoPE(), ALiBi()], ids=lambda level: level.kind)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.kind)
def test_every_attention_that_claims_flash_runs_on_it(
    level: Attention, position: Position, architecture: Architecture
) -> None:
    if level == Linear():
        if position != ALiBi():
            trained = module(position, Fastest(), attention=level, architecture=architecture)
            assert trained.spec.flash_obstacle() == "Linear has no softmax"
        return
    trained = module(position, Flash(), attention=level, architecture=architecture)
    assert trained.spec.flash_obstacle() == ""  # none of the others says that it cannot on the CPU
    assert ran_on(trained) == ("flash", "every call of attention runs on it")
    logits = trained(*trained.batch(0).reading)
    assert "flash" in backend_of_backward(logits)


def backend_of_backward(logits: torch.Tensor) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        logits.sum().backward()
    return " ".join(event.name for event in profile.events() if "attention" in event.name)


@pytest.mark.parametrize("position", OFF_FLASH, ids=lambda level: level.kind)
def test_a_trained_bias_matrix_keeps_attention_off_flash_and_the_reason_says_so(position: Position) -> None:
    backend, reason = ran_on(module(position, Fastest()))
    kind = position.inner.kind if isinstance(position, Randomised) else position.kind
    assert backend == "math"
    assert reason == f"{kind} {OBSTACLE}"


@pytest.mark.parametrize("architecture", [EncoderOnly(), EncoderDecoder()], ids=lambda level: level.kind)
@pytest.mark.parametrize("position", [NoPE(), Sinusoidal(), RoPE(), YaRN()], ids=lambda level: level.kind)
def test_flash_runs_without_a_causal_mask_too(position: Position, architecture: Architecture) -> None:
    assert ran_on(module(position, Flash(), architecture=architecture))[0] == "flash"


@pytest.mark.parametrize("architecture", [EncoderOnly(), EncoderDecoder()], ids=lambda level: level.kind)
def test_alibi_where_attention_is_not_causal_is_refused_for_cudas_flash(architecture: Architecture) -> None:
    # The CPU's flash takes a bias that needs no gradient.
    made = module(ALiBi(), Flash(), architecture=architecture)
    assert ran_on(made) == ("flash", "every call of attention runs on it")
    with pytest.raises(UserError, match="cannot run: ALiBi adds a T×T bias where attention is not causal; use Fastest"):
        made.spec.replace("device", "cuda")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.d_head": 512}, "queries of 512 dimensions are wider than the 256 that flash takes"),
        ({"model.attention": Latent(d_rope=250)}, "queries of 258 dimensions are wider than the 256"),
        ({"model.d_head": 255, "model.position": ALiBi()}, "queries of 257 dimensions are wider than the 256"),
        ({"model.d_head": 256, "model.position": ALiBi()}, "queries of 258 dimensions are wider than the 256"),
        (
            {"model.d_head": 255, "model.position": Randomised(inner=ALiBi())},
            "queries of 257 dimensions are wider than the 256",
        ),
        (
            {"model.d_head": 248, "model.attention": Latent(d_rope=8), "model.position": ALiBi()},
            "queries of 258 dimensions are wider than the 256",
        ),
        ({"model.architecture": EncoderOnly(), "train.sampling": Padded()}, "padding is masked, which flash does not"),
        ({"model.architecture": EncoderDecoder(), "train.sampling": Padded()}, "padding is masked, which flash does"),
        ({"model.attention": SlidingWindow()}, "SlidingWindow masks keys within blocks of the sequence"),
    ],
)
def test_what_only_cudas_flash_does_not_take_is_refused_there(changes: dict[str, Any], words: str) -> None:
    spec = module(RoPE(), Flash()).spec.replaced(changes)
    assert spec.flash_obstacle() == ""
    with pytest.raises(UserError, match=words):
        spec.replace("device", "cuda")


@pytest.mark.parametrize(
    ("d_head", "position"), [(254, ALiBi()), (256, NoPE()), (256, RoPE())], ids=["ALiBi", "NoPE", "RoPE"]
)
def test_the_widest_heads_are_those_whose_queries_flash_takes_with_what_positions_add(
    d_head: int, position: Position
) -> None:
    spec = module(position, Flash()).spec.replace("model.d_head", d_head)
    assert spec.replace("device", "cuda").flash_obstacle() == ""
    model = TransformerModule(spec.replace("train.batch_size", 1)).model
    encode = model.position.relation(torch.arange(3), torch.arange(3), causal=True, cached=False).encode
    query, _ = encode(torch.zeros(1, 2, 3, d_head), torch.zeros(1, 2, 3, d_head))
    assert query.shape[-1] == 256  # what added_width says is what is added


def test_the_slowest_kernel_of_several_is_the_one_that_is_told() -> None:
    # T5's bias keeps self-attention off flash, attention to the encoder's output runs on it.
    backend, reason = ran_on(module(T5Bias(), Fastest(), architecture=EncoderDecoder()))
    assert (backend, reason) == (
        "math",
        f"T5Bias {OBSTACLE}",
    )
    linear = module(RoPE(), Fastest()).spec.replace("model.attention", Linear())
    assert ran_on(TransformerModule(linear)) == ("none", "Linear has no softmax")


def test_asking_for_flash_where_it_cannot_run_is_an_error_with_the_reason() -> None:
    with pytest.raises(UserError) as caught:
        Flash().check("math", f"T5Bias {OBSTACLE}")
    message = str(caught.value)
    assert message == (f"train.kernel = Flash: math attention ran because T5Bias {OBSTACLE}; use Fastest()")
    Flash().check("flash", "no bias matrix, causal")


def test_flash_with_a_trained_bias_is_refused_when_the_spec_is_made() -> None:
    with pytest.raises(UserError) as caught:
        module(T5Bias(), Flash())
    assert str(caught.value).endswith(f"train.kernel = Flash cannot run: T5Bias {OBSTACLE}; use Fastest()")


@pytest.mark.parametrize("kernel", [Fastest(), Math()], ids=lambda level: level.kind)
@pytest.mark.parametrize("backend", ["flash", "math"])
def test_the_other_kernels_accept_whatever_ran(kernel: Kernel, backend: str) -> None:
    kernel.check(backend, "any")


@pytest.mark.parametrize("position", [*ON_FLASH, *OFF_FLASH], ids=lambda level: level.kind)
def test_the_math_kernel_is_explicit_and_gives_the_same(position: Position) -> None:
    # CLAIMS E15: flash is exact.
    explicit, fastest = module(position, Math()), module(position, Fastest())
    batch = explicit.batch(0)
    backend, reason = ran_on(explicit)
    assert backend_of(lambda: explicit(batch.inputs)) == backend == "math"
    assert reason == "train.kernel = Math" or position.biases_logits
    for trained in (explicit, fastest):
        trained.eval()  # the same positions where training draws them
    torch.testing.assert_close(explicit(batch.inputs), fastest(batch.inputs), atol=1e-5, rtol=1e-5)


def test_a_kernel_holds_inside_its_context_only() -> None:
    x = torch.randn(1, 1, 4, 8)

    def attend() -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    assert backend_of(attend) == "flash"
    with Math().context():
        assert backend_of(attend) == "math"
    assert backend_of(attend) == "flash"


def test_backends_are_told_apart_without_a_model() -> None:
    x = torch.randn(1, 1, 4, 8)
    for backend, name in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.MATH, "math")):
        with sdpa_kernel(backend):
            assert backend_of(lambda: functional.scaled_dot_product_attention(x, x, x)) == name
    assert backend_of(lambda: (x @ x.transpose(-2, -1)).softmax(-1) @ x) == "none"
