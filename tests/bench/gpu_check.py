"""`make gpu-check`: what only a CUDA GPU can show, in one script and under eight minutes. It has not run on one yet.

Needs torch from 2.9 on, pytorch-lightning and pydantic; no MLflow, Optuna or tokenizers. Where `make` is missing:
`PYTHONPATH=. python3 tests/bench/gpu_check.py`. Without a GPU it says so and exits 0, which is not a pass. Each check
prints a line when it is done; the table comes last; exit 1 if one does not hold.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ablations.position import ablation as study
from harness.backend import attention_backend
from harness.components.attention import Attention, MultiHead
from harness.components.kernel import Flash
from harness.components.norm import PreNorm
from harness.components.position import ALiBi, NoPE, Position, RoPE, T5Bias, TransformerXL
from harness.runner import run
from harness.spec import ModelSpec, RunSpec
from harness.transformer import build_model
from tasks import Copy, Lengths

Finding = tuple[str, str]  # what was measured, verdict
Check = tuple[str, Callable[[], Finding]]  # of what, and how: nothing is measured before it is called
HOLDS, FAILS, NOTED = "holds", "FAILS", "noted"
MIB = 2**20
STEPS = 300  # of each training run


def model_spec(attention: Attention | None = None, position: Position | None = None, **sizes: int) -> ModelSpec:
    """A small model whose heads have the width that kernels like."""
    given = {"d_model": 128, "num_heads": 4, "num_layers": 2, **sizes}
    return ModelSpec(attention=attention or MultiHead(), position=position or RoPE(), norm_placement=PreNorm(), **given)


def every_level() -> Iterator[tuple[str, ModelSpec]]:
    """Our levels of attention and position with their defaults, each in a model."""
    for axis, field in ((Attention, "attention"), (Position, "position")):
        for kind, level in axis.levels().items():
            yield kind, model_spec(**{field: level()})


def kernels() -> Iterator[Check]:
    """Which kernel every level runs on."""
    for kind, model in every_level():
        spec = RunSpec(model=model, task=Copy(lengths=Lengths(train=(1, 8), test=())), device="cuda")
        yield f"kernel of {kind}", partial(flash_where_claimed, spec)


def flash_where_claimed(spec: RunSpec) -> Finding:
    """Asked for flash, a level without an obstacle runs on it; what torch prefers (cuDNN on some devices) is noted."""
    model = build_model(spec.model, spec.task.vocab_size, seed=0).cuda()
    fastest = "Fastest() takes {}: {}".format(*attention_backend(spec, model))
    if spec.flash_obstacle():
        return fastest, NOTED
    ran, reason = attention_backend(spec.replace("train.kernel", Flash()), model)
    return f"Flash() takes {ran}: {reason}; {fastest}", HOLDS if ran == "flash" else FAILS


def parity() -> Iterator[Check]:
    """Every level in bf16 against itself in fp64."""
    for kind, model in every_level():
        yield f"bf16 against fp64, {kind}", partial(rounding, model)


def rounding(spec: ModelSpec) -> Finding:
    """Logits in bf16 on the GPU against fp64 on the CPU, as a share of their spread."""
    model = build_model(spec, 20, seed=0).eval()
    tokens = torch.randint(16, (2, 96), generator=torch.Generator().manual_seed(0))[:, : spec.position.limit()]
    with torch.no_grad():
        fast = model.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            found = fast(tokens.cuda()).double().cpu()
        exact = model.cpu().double()(tokens)
    distance = ((found - exact).abs().max() / exact.std()).item()
    return f"{distance:.3f} of a std", HOLDS if distance < 0.15 else FAILS


def memory() -> Iterator[Check]:
    """Every attention, and every position that acts in it in another way."""
    pairs = [(level(), NoPE()) for level in Attention.levels().values()]
    pairs += [(MultiHead(), position) for position in (RoPE(), ALiBi(), T5Bias(), TransformerXL())]
    for attention, position in pairs:
        spec = model_spec(attention, position, d_model=64, num_heads=2, num_layers=1)
        yield f"memory, {attention.kind} {position.kind}", partial(growth, spec)


def growth(spec: ModelSpec) -> Finding:
    """Peak memory of forward and backward at 16,384 tokens against 8,192."""
    half, whole = (peak_at(spec, tokens) for tokens in (8192, 16_384))
    said = f"{whole / MIB:.0f} MiB, × {whole / half:.2f} at twice the length"
    return said, HOLDS if whole / half <= 2.2 else FAILS


def peak_at(spec: ModelSpec, tokens: int) -> int:
    """Bytes at the peak of one pass, above the model's own."""
    model = build_model(spec, 16, seed=0).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        model(torch.zeros(1, tokens, dtype=torch.int64, device="cuda")).float().sum().backward()
    return torch.cuda.max_memory_allocated() - before


def training() -> Iterator[Check]:
    """The position study's encodings and tasks in its own model, in bf16 and fewer steps."""
    for variant, changes in study.variants.items():
        for name, task in study.tasks.items():
            spec = RunSpec(model=study.model, task=task, train=study.train, device="cuda")
            short = spec.replaced({**changes, "train.steps": STEPS})
            yield f"training in bf16, {variant}, {name}", partial(learning, short)


def learning(spec: RunSpec) -> Finding:
    """The loss falls to a quarter, which on a CPU it falls below by far; how far it gets and a step's time are told."""
    record = run(spec)
    if record.status != "finished":
        return f"{record.status}: {record.cause}", FAILS
    final, ledger = record.final, record.ledger
    first, last = final["train/initial_loss"], final["train/loss"]
    said = (
        f"loss {first:.2f} to {last:.2f}, {final['eval/in_distribution']:.3f} in distribution, "
        f"{1000 * float(ledger['wall_seconds']) / spec.train.steps:.2f} ms a step ({ledger['attention_backend']})"
    )
    return said, HOLDS if last < first / 4 else FAILS


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (kernels, parity, memory, training)


def main() -> int:
    """Run every check; 1 if something does not hold."""
    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device here; nothing was checked, and this is no pass")
        return 0
    rows: list[tuple[str, str, str]] = []
    for what, measure in (check for checks in CHECKS for check in checks()):
        try:
            found, verdict = measure()
        except Exception as error:  # the other checks are worth the GPU's time all the same
            found, verdict = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", FAILS
        print(what, found, verdict, sep=" | ", flush=True)
        rows.append((what, found, verdict))
    width = max(len(what) for what, _, _ in rows)
    print(f"\ngpu-check on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for what, found, verdict in rows:
        print(f"{verdict:5}  {what:{width}}  {found}")
    return int(any(verdict == FAILS for _, _, verdict in rows))


if __name__ == "__main__":
    sys.exit(main())
