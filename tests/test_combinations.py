"""Any combination of components: either a model that trains, decodes with its cache and comes back from its document,
or one clear sentence.
"""

import re
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from strategies import components

from harness.decoding import greedy
from harness.module import answer_loss
from harness.schema import UserError
from harness.spec import ModelSpec, RunSpec, TrainSpec
from harness.transformer import build_model
from tasks import Copy, Lengths

TASK = Copy(lengths=Lengths(train=(1, 9), test=(10,)), num_symbols=6)
CPU = torch.device("cpu")
SENTENCE = re.compile(r"^[A-Z]\w+(\.\w+)*: [^\n]{15,240}$")


def made(fields: dict[str, Any]) -> RunSpec | str:
    """The run of a model with these components, or why there is none."""
    try:
        return RunSpec(task=TASK, model=ModelSpec(**fields), train=TrainSpec(batch_size=3))
    except UserError as error:
        return str(error)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(components())
def test_any_combination_works_or_says_in_a_sentence_why_not(fields: dict[str, Any]) -> None:
    spec = made(fields)
    if isinstance(spec, str):
        assert SENTENCE.match(spec), spec
        assert re.search(r"[;:] .*\b(choose|use|lower|raise|change|widen)\b", spec), f"no remedy: {spec}"
        return
    assert RunSpec.parse(spec.document()) == spec
    model = build_model(spec.model, TASK.vocab_size, seed=0)
    trains_a_step(model, spec)
    if spec.model.architecture.is_causal():
        decodes_with_its_cache(model.double().eval(), spec)


def trains_a_step(model: torch.nn.Module, spec: RunSpec) -> None:
    """Every parameter that the loss depends on moves, and stays finite."""
    batch = spec.training_batch(0, CPU)
    before = [p.detach().clone() for p in model.parameters()]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    output = model.outputs(*batch.reading)  # type: ignore[operator]
    (answer_loss(output.logits, batch.targets) + output.auxiliary_loss).backward()
    optimiser.step()
    after = list(model.parameters())
    assert all(torch.isfinite(p).all() for p in after)
    assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))


def decodes_with_its_cache(model: Any, spec: RunSpec) -> None:
    """The same tokens with a cache and without, on logits that agree."""
    batch = spec.batch("eval", 0, 2, 9, CPU)
    prompt = batch.inputs[:, :4]
    with torch.no_grad():
        whole = model(*batch.reading)
        cache = model.cache(batch.inputs.shape[1])
        steps = [model(batch.inputs[:, t : t + 1], batch.source, cache=cache) for t in range(batch.inputs.shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-5, rtol=1e-5)
    with_cache = greedy(model, prompt, 12, source=batch.source)
    assert torch.equal(with_cache, greedy(model, prompt, 12, source=batch.source, cached=False))
