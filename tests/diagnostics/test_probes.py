"""Probes name planted faults, find nothing in models as they are declared, and leave no trace."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from faults.structural import FAULTS, Fault
from torch import Tensor, nn

from harness import ModelSpec, RunSpec, TrainSpec
from harness.components import architecture, attention, embedding, feedforward, init, norm, position, residual, scale
from harness.components.output_projection import NoProjection
from harness.components.qk_norm import QKNorm
from harness.diagnostics import PROBES, Finding, Measured, NotApplicable, Subject, examine, subject_of
from harness.diagnostics.backward import backward_fit
from harness.diagnostics.masking import masked_row
from harness.diagnostics.wiring import accumulation_parity
from harness.module import TransformerModule, answer_loss
from harness.schema import Level, is_foreign
from harness.spec import Padded
from tasks import Copy
from tasks.task import IGNORED, Batch

HEALTHY: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "modern": {
        "position": position.RoPE(),
        "attention": attention.GroupedQuery(),
        "norm": norm.RMSNorm(),
        "norm_placement": norm.PreNorm(),
        "feedforward": feedforward.SwiGLU(),
        "init": init.Initialisation(residual_gain=init.DepthGain()),
    },
    "latent, YaRN": {"attention": attention.Latent(), "position": position.YaRN()},
    "multi-query, ALiBi": {"attention": attention.MultiQuery(), "position": position.ALiBi()},
    "window, RoPE": {"attention": attention.SlidingWindow(window=5), "position": position.RoPE()},
    "Longformer encoder": {
        "attention": attention.Longformer(),
        "position": position.T5Bias(),
        "architecture": architecture.EncoderOnly(),
    },
    "BigBird, learned": {"attention": attention.BigBird(), "position": position.Learned()},
    "linear, RoPE": {"attention": attention.Linear(), "position": position.RoPE()},
    "linear encoder": {
        "attention": attention.Linear(),
        "position": position.RoPE(),
        "architecture": architecture.EncoderOnly(),
    },
    "linear, NoPE": {"attention": attention.Linear(), "position": position.NoPE()},
    "Transformer-XL": {"position": position.TransformerXL(), "norm_placement": norm.SandwichNorm()},
    "randomised": {"position": position.Randomised(inner=position.RoPE())},
    "encoder-decoder": {
        "architecture": architecture.EncoderDecoder(),
        "embedding_scale": embedding.SqrtWidth(),
        "output_head": embedding.Tied(),
        "init": init.Initialisation(embedding=init.Normal(deviation=0.125)),
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    "encoder-decoder, ALiBi": {"architecture": architecture.EncoderDecoder(), "position": position.ALiBi()},
    "unscaled": {"scale": scale.Unscaled(), "qk_norm": QKNorm()},
    "1/d_k, NTK": {"scale": scale.Inverse(), "position": position.NTKRoPE()},
    "learned temperature": {"scale": scale.LearnedTemperature(), "position": position.LinearRoPE()},
    "BatchNorm": {"norm": norm.BatchNorm(), "norm_placement": norm.PreNorm()},
    "nothing normalised": {"norm_placement": norm.NoNorm()},
    "drawn wider, no W_o": {
        "output_projection": NoProjection(),
        "feedforward": feedforward.GELU(),
        "init": init.Initialisation(
            linear=init.Kaiming(), qkv=init.Kaiming(), residual=init.Kaiming(), embedding=init.Kaiming()
        ),
    },
    "no residual": {"residual": residual.NoResidual(), "norm_placement": norm.PreNorm()},
    "mixture, full": {"feedforward": feedforward.MoE(capacity=1.0, jitter=0.1, num_shared=1, z_loss=0.001)},
    "mixture of gates": {"feedforward": feedforward.MoE(expert=feedforward.SwiGLU(d_ff=16), top_k=1, bias_rate=0.01)},
}


def found_in(module: TransformerModule) -> list[Finding]:
    return examine(subject_of(module.spec, module))


def alarms(findings: list[Finding]) -> list[str]:
    return [finding.probe.name for finding in findings if finding.alarms]


@pytest.mark.parametrize("model", HEALTHY.values(), ids=HEALTHY)
def test_nothing_alarms_in_a_model_as_declared(model: dict[str, Any]) -> None:
    module = TransformerModule(RunSpec(model=ModelSpec(**model), task=Copy()))
    assert not [finding.document() for finding in found_in(module) if finding.alarms]


def test_healthy_models_have_every_level() -> None:
    tried = {type(part) for model in HEALTHY.values() for part in ModelSpec(**model).specs()}
    axes = {base for part in tried for base in part.__mro__ if Level in base.__bases__}
    levels = {level for axis in axes for level in axis.levels().values() if not is_foreign(level)}
    assert {"Attention", "Position", "Norm", "Draw"} <= {axis.__name__ for axis in axes}
    assert levels - tried == set()


CASES = [(fault, strength) for fault in FAULTS for strength in fault.strengths]


def _name(case: tuple[Fault, float]) -> str:
    fault, strength = case
    return f"{fault.name}-{'-'.join(getattr(v, 'kind', str(v)) for v in fault.model.values())}-{strength:g}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_fault_is_named_first(case: tuple[Fault, float]) -> None:
    fault, strength = case
    assert_healthy(fault)
    module = fault.module()
    fault.patch(module, strength)
    assert alarms(found_in(module))[:1] == [fault.named]


@lru_cache
def _healthy(spec: RunSpec) -> list[str]:
    return alarms(found_in(TransformerModule(spec)))


def assert_healthy(fault: Fault) -> None:
    assert _healthy(fault.module().spec) == []


def test_a_leak_outside_of_attention_is_not_put_down_to_the_mask() -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "norm_over_the_sequence")
    module = fault.module()
    fault.patch(module, 0.1)
    (first, *_) = (finding for finding in found_in(module) if finding.alarms)
    assert first.probe.name == "causal_leak"
    assert first.cause.startswith("the attention that is named hides tokens ahead")
    assert first.lines()[1].endswith("(healthy: at most 1e-05), behind a cache")


def test_every_probe_is_needed() -> None:
    untried = {"masked_row", "accumulation_parity", "overfit_one_batch"}  # below
    assert {fault.named for fault in FAULTS} | untried == {probe.name for probe in PROBES}


def test_a_subject_stays_as_it_was() -> None:
    spec = RunSpec(model=ModelSpec(norm=norm.BatchNorm(), feedforward=feedforward.MoE(bias_rate=0.1)), task=Copy())
    module = TransformerModule(spec)
    module.model.blocks[0].eval()
    subject, modes = subject_of(spec, module), [part.training for part in module.modules()]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    draws, threads = torch.get_rng_state(), torch.get_num_threads()
    examine(subject, dear=True)
    assert draws.equal(torch.get_rng_state())
    assert torch.get_num_threads() == threads
    assert modes == [part.training for part in module.modules()]
    assert all(value.equal(state[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(vars(part).keys() & {"positions", "forward"} for part in module.modules())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_training_on_one_batch_is_tried_when_asked_for() -> None:
    sound = TransformerModule(RunSpec(task=Copy()))
    blind = TransformerModule(RunSpec(task=Copy(), train=TrainSpec(learning_rate=1e-7)))
    assert alarms(examine(subject_of(sound.spec, sound), dear=True)) == []
    assert alarms(examine(subject_of(blind.spec, blind), dear=True)) == ["overfit_one_batch"]


def test_gradients_of_micro_batches_must_add_up() -> None:
    subject = subject_of(RunSpec(task=Copy(), train=TrainSpec(sampling=Padded())))

    def by(weight: Callable[[Batch, int], float]) -> Measured | NotApplicable:
        def accumulate(batches: Sequence[Batch]) -> None:
            tokens = sum(asked(batch) for batch in batches)
            for batch in batches:
                loss = answer_loss(subject.model(*batch.reading), batch.targets)
                (loss * weight(batch, tokens)).backward()

        return accumulation_parity(replace(subject, accumulate=accumulate))

    def asked(batch: Batch) -> int:
        return int((batch.targets != IGNORED).sum())

    right, wrong = by(lambda batch, tokens: asked(batch) / tokens), by(lambda batch, tokens: 1 / 2)
    assert isinstance(right, Measured)
    assert isinstance(wrong, Measured)
    assert right.value < 1e-5 < 1e-2 < wrong.value


class Fragile(nn.Module):
    """An encoder of one layer whose softmax over keys is written out, and NaN for a sequence of padding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)

    def forward(self, tokens: Tensor, source: None = None, real: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        logits = x @ x.mT
        if real is not None:
            logits = logits + torch.where(real[:, None], 0.0, float("-inf"))  # masked_fill would stop the NaN
        weights = logits.softmax(-1)
        if real is not None:
            weights = torch.where(real[:, :1, None], weights, 0.0)
        return weights @ x @ self.embedding.weight.T


def test_nan_of_a_row_without_keys_is_found_in_the_gradients() -> None:
    tokens = torch.randint(0, 12, (3, 6))
    subject = Subject(Fragile(), Batch(tokens, tokens), causal=False, vocabulary=(0, 12), takes_padding=True)
    found = masked_row(subject)
    assert isinstance(found, Measured)
    assert found.value > 0


@pytest.mark.parametrize("deviation", [0.5, 1.5])
def test_a_saturated_softmax_is_no_wrong_gradient(deviation: float) -> None:
    """A loss that bends within a ten-thousandth of the weights' norm."""
    wide = init.Normal(deviation=deviation)
    drawn = init.Initialisation(linear=wide, qkv=wide)
    model = {"scale": scale.Unscaled(), "init": drawn, "norm_placement": norm.PreNorm()}
    found = backward_fit(subject_of(RunSpec(model=ModelSpec(**model), task=Copy(), seed=3)))
    assert isinstance(found, Measured)
    assert found.value < 0.02
