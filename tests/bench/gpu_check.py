"""`make gpu-check`: what only a CUDA GPU can show, in one script and under eight minutes.

Needs torch from 2.9 on, pytorch-lightning and pydantic; neither MLflow nor Optuna. Without a GPU it says so and exits
0, which is not a pass. Each check prints a line when it is done; the table comes last; exit 1 if one does not hold.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch

from harness.backend import attention_backend
from harness.components.attention import Attention, MultiHead
from harness.components.norm import PreNorm
from harness.components.position import ALiBi, NoPE, Position, RoPE
from harness.runner import run
from harness.spec import ModelSpec, RunSpec, TrainSpec
from harness.transformer import build_model
from tasks import Copy, Lengths

Row = tuple[str, str, str]  # what, measured, verdict
HOLDS, FAILS, NOTED = "holds", "FAILS", "noted"
MIB = 2**20


def spec(model: ModelSpec, **train: object) -> RunSpec:
    """A run on the GPU, which is in bf16."""
    task = Copy(lengths=Lengths(train=(1, 8), test=(9, 12, 16)))
    return RunSpec(model=model, task=task, train=TrainSpec(**train), device="cuda")  # type: ignore[arg-type]


def model_spec(attention: Attention | None = None, position: Position | None = None, **sizes: int) -> ModelSpec:
    """A small model whose heads have the width that kernels like."""
    given = {"d_model": 128, "num_heads": 4, "num_layers": 2, **sizes}
    return ModelSpec(attention=attention or MultiHead(), position=position or RoPE(), norm_placement=PreNorm(), **given)


def own(axis: type[Attention] | type[Position]) -> Iterator[Attention | Position]:
    """Our levels of an axis with their defaults."""
    for level in axis.levels().values():
        yield level()


def flash_where_claimed() -> Iterator[Row]:
    """Every level without an obstacle runs on flash; the others say what they run on."""
    for axis, field in ((Attention, "attention"), (Position, "position")):
        for level in own(axis):
            made = spec(model_spec(**{field: level}))  # type: ignore[arg-type]
            model = build_model(made.model, made.task.vocab_size, seed=0).cuda()
            backend, reason = attention_backend(made, model)
            claimed = not made.model.flash_obstacle("cuda")
            verdict = NOTED if not claimed else HOLDS if backend == "flash" else FAILS
            yield f"kernel of {level.kind}", f"{backend}: {reason}", verdict


def parity() -> Iterator[Row]:
    """Logits in bf16 on the GPU against fp64 on the CPU, as a share of their spread."""
    tokens = torch.randint(16, (2, 96), generator=torch.Generator().manual_seed(0))
    for axis, field in ((Attention, "attention"), (Position, "position")):
        for level in own(axis):
            made = model_spec(**{field: level})  # type: ignore[arg-type]
            model = build_model(made, 20, seed=0).eval()
            read = tokens[:, : made.position.limit()]
            with torch.no_grad():
                fast = model.cuda()
                with torch.autocast("cuda", torch.bfloat16):
                    found = fast(read.cuda()).double().cpu()
                exact = model.cpu().double()(read)
            distance = ((found - exact).abs().max() / exact.std()).item()
            yield f"bf16 against fp64, {level.kind}", f"{distance:.3f} of a std", HOLDS if distance < 0.15 else FAILS


def memory() -> Iterator[Row]:
    """Peak memory of forward and backward at 16,384 tokens against 8,192."""
    for attention, position in [
        *((level, NoPE()) for level in own(Attention)),
        (MultiHead(), RoPE()),
        (MultiHead(), ALiBi()),
    ]:
        made = model_spec(attention, position, d_model=64, num_heads=2, num_layers=1)  # type: ignore[arg-type]
        peaks = [peak_at(made, tokens) for tokens in (8192, 16_384)]
        growth = peaks[1] / peaks[0]
        name = f"memory, {made.attention.kind} {made.position.kind}"
        yield name, f"{peaks[1] / MIB:.0f} MiB, × {growth:.2f} at twice the length", HOLDS if growth <= 2.2 else FAILS


def peak_at(made: ModelSpec, tokens: int) -> int:
    """Bytes at the peak of one pass, above the model's own."""
    model = build_model(made, 16, seed=0).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        model(torch.zeros(1, tokens, dtype=torch.int64, device="cuda")).float().sum().backward()
    return torch.cuda.max_memory_allocated() - before


def training() -> Iterator[Row]:
    """The position study's smallest form, in bf16: it learns its training lengths, and how long a step takes."""
    for position in (RoPE(), ALiBi(), NoPE()):
        made = spec(model_spec(position=position, num_layers=3), steps=1000, learning_rate=2e-3)
        begun = time.perf_counter()
        record = run(made)
        near, far = record.final["eval/in_distribution"], record.final["eval/extrapolation"]
        speed = 1000 * record.ledger.get("wall_seconds", float("nan")) / 1000  # type: ignore[operator]
        said = (
            f"{near:.3f} in distribution, {far:.3f} beyond, {speed:.2f} ms a step, {time.perf_counter() - begun:.0f} s"
        )
        learned = record.status == "finished" and near >= 0.98
        yield (
            f"training in bf16, {position.kind}",
            said + f" ({record.ledger['attention_backend']})",
            (HOLDS if learned else FAILS),
        )


CHECKS: tuple[Callable[[], Iterator[Row]], ...] = (flash_where_claimed, parity, memory, training)


def main() -> int:
    """Run every check; 1 if something does not hold."""
    if not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device here; nothing was checked, and this is no pass")
        return 0
    rows: list[Row] = []
    for check in CHECKS:
        try:
            for row in check():
                print(*row, sep=" | ", flush=True)
                rows.append(row)
        except Exception as error:  # the other checks are worth the GPU's time all the same
            rows.append((check.__name__, f"{type(error).__name__}: {error}", FAILS))
    width = max(len(what) for what, _, _ in rows)
    print(f"\ngpu-check on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for what, found, verdict in rows:
        print(f"{verdict:5}  {what:{width}}  {found}")
    return int(any(verdict == FAILS for _, _, verdict in rows))


if __name__ == "__main__":
    sys.exit(main())
