"""Any combination of components and of ways to train: either a run that trains, decodes with its cache and comes back
from its document, or one clear sentence. And every task in every architecture.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from annotated_types import Ge, Gt, Le, Lt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import components, training
from torch import nn

from harness.components.architecture import Architecture, DecoderOnly, EncoderDecoder, EncoderOnly
from harness.components.attention import SlidingWindow
from harness.components.residual import NoResidual
from harness.decoding import greedy
from harness.module import TransformerModule
from harness.runner import run
from harness.schema import Spec, UserError, is_foreign
from harness.spec import ModelSpec, RunSpec, TrainSpec
from tasks import Copy, Lengths, Task

TASK = Copy(lengths=Lengths(train=(1, 9), test=(10,)), num_symbols=6)
CPU = torch.device("cpu")
SENTENCE = re.compile(r"^[A-Z]\w+(\.\w+)*: [^\n]{15,240}$")


def made(model: dict[str, Any], train: dict[str, Any]) -> RunSpec | str:
    """The run of a model with these components, trained so, or why there is none."""
    try:
        return RunSpec(task=TASK, model=ModelSpec(**model), train=TrainSpec(**train))
    except UserError as error:
        return str(error)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(components(), training())
def test_any_combination_works_or_says_in_a_sentence_why_not(model: dict[str, Any], train: dict[str, Any]) -> None:
    spec = made(model, train)
    if isinstance(spec, str):
        assert SENTENCE.match(spec), spec
        assert re.search(r"[;:] .*\b(choose|use|lower|raise|change|widen)\b", spec), f"no remedy: {spec}"
        return
    assert RunSpec.parse(spec.document()) == spec
    module = TransformerModule(spec)
    takes_a_step(module)
    if spec.model.architecture.is_causal():
        decodes_with_its_cache(module.model.double().eval(), spec)


def takes_a_step(module: TransformerModule) -> None:
    """The gradient reaches every parameter but those that `may_rest`, the optimiser takes up all that it reaches, and
    everything stays finite.
    """
    configured = module.configure_optimizers()
    optimiser, parameters = configured["optimizer"], dict(module.model.named_parameters())
    passes: list[bool] = []  # of each ReLU, whether any gradient goes through it

    def watch(_relu: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: passes.append(bool((gradient * (output > 0)).any())))

    for part in module.modules():
        if isinstance(part, nn.ReLU):
            part.register_forward_hook(watch)
    module.training_step(None, 0).backward()
    module.on_after_backward()
    reached = {name for name, p in parameters.items() if p.grad is not None and p.grad.any()}
    for name in parameters.keys() - reached:
        assert may_rest(name, module, off=not all(passes)), f"no gradient reaches {name}"
    module.configure_gradient_clipping(optimiser)
    optimiser.step()
    configured["lr_scheduler"]["scheduler"].step()
    assert all(torch.isfinite(p).all() for p in parameters.values())
    for name in reached:
        assert optimiser.state[parameters[name]]["exp_avg"].any(), f"the optimiser leaves out {name}"


def may_rest(name: str, module: TransformerModule, off: bool) -> bool:
    """Whether a parameter may be without a gradient by design: of an expert that nobody chose; of a sublayer whose
    ReLUs were all `off` where the loss looks, and without a residual connection whatever passes through them; before a
    softmax over one key.
    """
    model = module.spec.model
    sublayer = r"\.feedforward\.(0\.|2\.weight|router\.)|\.feedforward_step\.(before\.|after\.weight)"
    passed = model.residual == NoResidual() or re.search(sublayer, name)
    one_key = model.attention == SlidingWindow(window=1) or module.shape[1] == 1
    weighed = re.search(r"\.attention\.(query|key|scale)|^position\.", name)
    return bool(".experts." in name or (off and passed) or (one_key and weighed))


def out_of_range(spec: Spec, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Paths of all bounded numbers of a spec, with a value just outside of each bound."""
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        if isinstance(value, Spec):
            yield from out_of_range(value, f"{prefix}{name}.")
            continue
        for bound in field.metadata:
            if isinstance(bound, Ge):
                yield prefix + name, bound.ge - 1
            elif isinstance(bound, Gt):
                yield prefix + name, bound.gt
            elif isinstance(bound, Le):
                yield prefix + name, bound.le + 1
            elif isinstance(bound, Lt):
                yield prefix + name, bound.lt


@given(components(), training(), st.data())
def test_a_number_out_of_range_is_named_in_a_sentence(
    model: dict[str, Any], train: dict[str, Any], data: st.DataObject
) -> None:
    spec = made(model, train)
    if isinstance(spec, str):
        return
    path, wrong = data.draw(st.sampled_from(list(out_of_range(spec))))
    with pytest.raises(UserError) as caught:
        spec.replaced({path: wrong})
    assert re.match(rf"^{re.escape(path)} = {re.escape(str(wrong))}: [^\n]{{15,240}}$", str(caught.value))


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


SHORT = Lengths(train=(1, 2), test=(3,))
TASKS = [kind(lengths=SHORT) for kind in Task.levels().values() if not is_foreign(kind)]


@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderOnly(), EncoderDecoder()], ids=lambda level: level.kind)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_every_task_trains_in_every_architecture_that_can_take_it(task: Task, architecture: Architecture) -> None:
    widths = [task.widths(length) for length in (1, 2, 3)]
    in_place = all(found is not None and found[0] == found[1] for found in widths)
    model = ModelSpec(d_model=16, num_heads=2, num_layers=1, architecture=architecture)
    train = TrainSpec(steps=2, batch_size=2, eval_samples=2)
    if architecture == EncoderOnly() and not in_place:
        with pytest.raises(UserError, match=f"predicts in place, {task.kind} answers"):
            RunSpec(model=model, task=task, train=train)
        return
    record = run(RunSpec(model=model, task=task, train=train))
    assert (record.status, record.ledger["steps"]) == ("finished", 2), record.cause
