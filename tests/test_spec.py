"""RunSpec's own levels: schedules and samplings, and what may not be combined."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from harness.components.architecture import EncoderDecoder, EncoderOnly
from harness.components.attention import BigBird
from harness.components.position import ALiBi, Learned, RoPE
from harness.module import answer_loss
from harness.schema import UserError
from harness.spec import (
    Constant,
    Finite,
    Fresh,
    InverseSquareRoot,
    ModelSpec,
    Noam,
    Padded,
    RunSpec,
    TrainSpec,
    WarmupCosine,
)
from harness.transformer import build_model
from tasks import AssociativeRecall, Batch, Copy, Lengths, Retrieval, Reverse, Sort, Translate
from tasks.task import IGNORED

CPU = torch.device("cpu")
TASK = Copy(lengths=Lengths(train=(2, 5), test=(6,)), num_symbols=30)


# --- schedules -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(0, 199))
def test_constant_is_one(steps: int, step: int) -> None:
    assert Constant().factor(step, steps, 64) == 1


def by_hand(step: int, steps: int, warmup: float, floor: float) -> float:
    """Linear to 1 over `warmup` of the steps, then a half cosine that ends at `floor` on the last step."""
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    last = steps - 1
    share = (step - rising) / (last - rising) if last > rising else 0.0
    return floor + (1 - floor) * (1 + math.cos(math.pi * share)) / 2


@given(st.integers(1, 300), st.floats(0, 0.9), st.floats(0, 1), st.data())
def test_warmup_cosine_is_its_formula(steps: int, warmup: float, floor: float, data: st.DataObject) -> None:
    schedule, step = WarmupCosine(warmup=warmup, floor=floor), data.draw(st.integers(0, steps - 1))
    assert schedule.factor(step, steps, 64) == pytest.approx(by_hand(step, steps, warmup, floor))


def test_warmup_cosine_rises_to_one_then_falls_to_its_floor() -> None:
    factors = [WarmupCosine(warmup=0.1, floor=0.2).factor(step, 100, 64) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[10] == 1
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.2)
    assert factors[54] == pytest.approx(0.6, abs=0.02)  # half-way down


@given(st.sampled_from([64, 512, 1024]), st.integers(1, 10_000), st.integers(0, 100_000))
def test_noam_is_the_papers_formula(d_model: int, warmup: int, step: int) -> None:
    # CLAIMS D05: d^−½ · min(s^−½, s · w^−1.5), steps counted from 1.
    s = step + 1
    found = Noam(warmup_steps=warmup).factor(step, 10, d_model)
    assert found == pytest.approx(1 / math.sqrt(d_model) * (s / warmup / math.sqrt(warmup) if s < warmup else s**-0.5))


def test_noam_peaks_at_the_end_of_its_warm_up() -> None:
    # CLAIMS D05: warm-up 4 000 at d_model 512 peaks at 7e-4.
    factors = [Noam().factor(step, 10_000, 512) for step in range(10_000)]
    assert max(range(10_000), key=factors.__getitem__) == 3999
    assert factors[3999] == pytest.approx(6.99e-4, abs=1e-6)


def test_the_inverse_square_root_is_noams_shape_with_its_peak_at_one() -> None:
    schedule, noam = InverseSquareRoot(warmup=0.1), Noam(warmup_steps=20)
    factors = [schedule.factor(step, 200, 64) for step in range(200)]
    peak = noam.factor(19, 200, 64)
    assert factors == pytest.approx([noam.factor(step, 200, 64) / peak for step in range(200)])
    assert max(factors) == factors[19] == 1


def test_a_schedule_never_stands_still_at_zero_from_the_first_step() -> None:
    assert all(WarmupCosine(warmup=w, floor=0).factor(0, 50, 64) > 0 for w in (0.0, 0.02, 0.5, 0.99))


# --- samplings -------------------------------------------------------------------------------------------------------


def rows(batch: Batch) -> list[tuple[int, ...]]:
    """Each row's tokens, padding left out."""
    return [tuple(token for token in row if token) for row in batch.inputs.tolist()]


def length_of(batch: Batch) -> int:
    return (batch.inputs.shape[1] - 2) // 2  # BOS source SEP answer


@pytest.mark.parametrize("sampling", [Fresh(), Padded(), Finite(num_samples=50)], ids=lambda level: level.kind)
def test_a_training_batch_is_a_pure_function_of_seed_and_step(sampling: Fresh | Padded | Finite) -> None:
    forwards = [sampling.batch(TASK, 0, step, 6, CPU) for step in range(12)]
    torch.manual_seed(99)
    backwards = [sampling.batch(TASK, 0, step, 6, CPU) for step in reversed(range(12))][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
    reseeded = [sampling.batch(TASK, 1, step, 6, CPU) for step in range(12)]
    assert [rows(batch) for batch in reseeded] != [rows(batch) for batch in forwards]
    assert len({tuple(rows(batch)) for batch in forwards}) == 12


def test_fresh_draws_one_length_a_batch_and_never_the_same_samples() -> None:
    batches = [Fresh().batch(TASK, 0, step, 8, CPU) for step in range(200)]
    assert {batch.inputs.shape[0] for batch in batches} == {8}
    assert {length_of(batch) for batch in batches} == {2, 3, 4, 5}
    long = [row for batch in batches if length_of(batch) == 5 for row in rows(batch)]
    assert len(set(long)) > 0.99 * len(long)  # of 30⁵ possible


def test_fresh_and_finite_count_their_samples() -> None:
    assert Fresh().distinct(100, 8) == Padded().distinct(100, 8) == 800
    assert Finite(num_samples=50).distinct(100, 8) == 50
    assert Finite(num_samples=5000).distinct(100, 8) == 800


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 12))
def test_padded_rows_are_those_of_one_length_batches(seed: int, step: int, batch_size: int) -> None:
    batch = Padded().batch(TASK, seed, step, batch_size, CPU)
    lengths = Counter((sum(token != 0 for token in row) - 2) // 2 for row in batch.inputs.tolist())
    assert batch.inputs.shape == (batch_size, 2 * max(lengths) + 2)
    expected = []
    for length in sorted(lengths):
        one = TASK.batch(seed, "train", step, lengths[length], length, CPU)
        expected += list(zip(rows(one), one.targets.tolist(), strict=True))
    for (tokens, targets), row, padded_targets in zip(expected, rows(batch), batch.targets.tolist(), strict=True):
        assert row == tokens
        assert padded_targets == targets + [IGNORED] * (batch.inputs.shape[1] - len(targets))


def test_padded_lengths_differ_within_a_batch() -> None:
    lengths = Counter(
        len(row) for step in range(50) for row in rows(Padded().batch(TASK, 0, step, 8, CPU))
    )  # 400 rows over four lengths
    assert set(lengths) == {6, 8, 10, 12}
    assert all(60 < count < 140 for count in lengths.values())


@pytest.mark.parametrize("position", [RoPE(), ALiBi(), Learned(max_length=32)], ids=lambda level: level.kind)
def test_the_padded_loss_is_the_weighted_mean_of_one_length_losses(position: RoPE | ALiBi | Learned) -> None:
    model = build_model(ModelSpec(d_model=16, num_heads=2, position=position), TASK.vocab_size, seed=0)
    batch = Padded().batch(TASK, 0, 0, 12, CPU)
    lengths = Counter((len(row) - 2) // 2 for row in rows(batch))
    assert len(lengths) > 1
    summed, count = torch.zeros(()), 0
    for length, number in lengths.items():
        one = TASK.batch(0, "train", 0, number, length, CPU)
        weight = int((one.targets != IGNORED).sum())
        summed, count = summed + weight * answer_loss(model(one.inputs), one.targets), count + weight
    torch.testing.assert_close(answer_loss(model(batch.inputs), batch.targets), summed / count)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 3))
def test_an_epoch_of_finite_sees_every_sample_exactly_once(num_samples: int, batch_size: int, seed: int) -> None:
    sampling, epochs = Finite(num_samples=num_samples), []
    lengths = [num_samples // 4 + (i < num_samples % 4) for i in range(4)]  # spread evenly over 2 … 5
    steps = sum(-(-share // batch_size) for share in lengths)
    for epoch in range(2):
        seen: Counter[tuple[int, ...]] = Counter()
        for step in range(epoch * steps, (epoch + 1) * steps):
            batch = sampling.batch(TASK, seed, step, batch_size, CPU)
            assert 1 <= len(batch.inputs) <= batch_size
            seen.update(rows(batch))
        epochs.append(seen)
    assert epochs[0] == epochs[1]
    assert epochs[0].total() == num_samples
    by_length = Counter({(len(row) - 2) // 2: 0 for row in epochs[0]})
    for row, times in epochs[0].items():
        by_length[(len(row) - 2) // 2] += times
    assert [by_length[length] for length in (2, 3, 4, 5)] == lengths


def test_epochs_of_finite_have_other_orders_of_batches_and_of_rows() -> None:
    sampling = Finite(num_samples=80)
    epochs = [[sampling.batch(TASK, 0, step, 8, CPU) for step in range(12 * e, 12 * e + 12)] for e in range(3)]
    orders = {tuple(length_of(batch) for batch in epoch) for epoch in epochs}
    assert len(orders) == 3
    groups = [{frozenset(rows(batch)) for batch in epoch} for epoch in epochs]
    assert groups[0] != groups[1] != groups[2]  # not the same batches in another order


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 3))
def test_the_pool_of_finite_is_what_an_epoch_sees(num_samples: int, batch_size: int, seed: int) -> None:
    sampling = Finite(num_samples=num_samples)
    pools = {length: sampling.pool(TASK, seed, length, CPU) for length in TASK.lengths.training}
    assert sum(len(pool.inputs) for pool in pools.values() if pool is not None) == num_samples
    read: dict[int, Counter[tuple[int, ...]]] = {length: Counter() for length in pools}
    step = 0
    while sum(counts.total() for counts in read.values()) < num_samples:
        batch = sampling.batch(TASK, seed, step, batch_size, CPU)
        read[length_of(batch)].update(rows(batch))
        step += 1
    for length, pool in pools.items():
        assert read[length] == Counter(rows(pool) if pool is not None else [])


def test_samples_that_are_new_at_every_step_have_no_pool() -> None:
    assert Fresh().pool(TASK, 0, 3, CPU) is None
    assert Padded().pool(TASK, 0, 3, CPU) is None


def test_a_run_has_its_training_samples_in_its_own_layout() -> None:
    train = TrainSpec(sampling=Finite(num_samples=8), batch_size=2)
    run = RunSpec(task=TASK, train=train, model=ModelSpec(architecture=EncoderDecoder()), seed=3)
    for step in range(4):  # an epoch: two samples of each of the four lengths
        batch = run.training_batch(step, CPU)
        assert batch.source is not None
        pool = run.training_pool(batch.source.shape[1] - 1, CPU)  # the source and its end
        assert pool is not None
        assert pool.source is not None
        assert sorted(pool.source.tolist()) == sorted(batch.source.tolist())


@pytest.mark.parametrize("num_samples", [1, 3, 40])
def test_finite_never_shows_more_samples_than_it_has(num_samples: int) -> None:
    sampling = Finite(num_samples=num_samples)
    seen = {row for step in range(60) for row in rows(sampling.batch(TASK, 0, step, 8, CPU))}
    assert len(seen) <= num_samples == sampling.distinct(60, 8)
    assert len(seen) >= 0.9 * num_samples


def test_finite_targets_belong_to_their_inputs() -> None:
    task = Reverse(lengths=TASK.lengths, num_symbols=9)
    for step in range(10):
        batch = Finite(num_samples=30).batch(task, 0, step, 8, CPU)
        for read, wanted in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            source = read[1 : length_of(batch) + 1]
            assert [token for token in wanted if token != IGNORED] == [*task.oracle(source), 3]


# --- combinations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "choices"), [(3, "2 or 4"), (7, "4 or 8"), (48, "32 or 64"), (100, "32 or 64")])
def test_heads_that_do_not_divide_the_width_are_refused_with_the_nearest_that_do(heads: int, choices: str) -> None:
    with pytest.raises(UserError) as caught:
        ModelSpec(num_heads=heads)
    message = f"ModelSpec: num_heads = {heads} does not divide d_model = 64; choose {choices}, or name d_head"
    assert str(caught.value) == message


def test_the_shape_of_a_model() -> None:
    shape = ModelSpec(d_model=32, num_heads=4, num_layers=3).shape
    assert (shape.d_model, shape.num_heads, shape.num_layers, shape.d_head) == (32, 4, 3, 8)


@pytest.mark.parametrize(("longest", "limit"), [(3, 8), (10, 22)])
def test_learned_positions_must_hold_the_longest_training_sequence(longest: int, limit: int) -> None:
    task = Copy(lengths=Lengths(train=(1, longest), test=(longest + 1,)))
    assert RunSpec(task=task, model=ModelSpec(position=Learned(max_length=limit)))  # test lengths may be unsupported
    with pytest.raises(UserError, match=f"raise max_length to {limit} or more, or shorten task.lengths.train"):
        RunSpec(task=task, model=ModelSpec(position=Learned(max_length=limit - 1)))


def test_precision_follows_the_device() -> None:
    assert RunSpec(task=TASK).precision == "fp32"
    assert RunSpec(task=TASK, device="cuda").precision == "bf16"


def test_fields_that_fit_only_together_are_changed_together() -> None:
    # An ablation's variant {"model.d_model": 42, "model.num_heads": 3} is possible, neither half of it is.
    spec = ModelSpec(d_model=64, num_heads=4)
    assert spec.replaced({"d_model": 42, "num_heads": 3}) == ModelSpec(d_model=42, num_heads=3)
    moved = spec.replaced({"position": RoPE(), "position.base": 500.0})
    assert moved == ModelSpec(d_model=64, num_heads=4, position=RoPE(base=500.0))
    for path in ("position.bas", "positon.base", "d_model.x"):
        with pytest.raises(ValueError, match=path):
            spec.replaced({path: 3.0})


def test_the_defaults_are_the_originals() -> None:
    spec = ModelSpec()
    levels = (spec.position, spec.norm, spec.norm_placement, spec.scale, spec.feedforward)
    assert [level.kind for level in levels] == ["Sinusoidal", "LayerNorm", "PostNorm", "InverseSqrt", "ReLU"]
    assert TrainSpec().sampling == Fresh()


def test_padding_is_never_a_target() -> None:
    batch: Tensor = Padded().batch(TASK, 0, 0, 20, CPU).targets
    assert not (batch == 0).any()


def test_an_encoder_answers_in_place_and_only_what_has_as_many_tokens() -> None:
    encoder = ModelSpec(architecture=EncoderOnly())
    assert RunSpec(task=Sort(), model=encoder).layout == "in place"
    with pytest.raises(UserError, match="AssociativeRecall answers 3 tokens with 1;"):
        RunSpec(task=AssociativeRecall(), model=encoder)
    with pytest.raises(UserError) as caught:
        RunSpec(task=Retrieval(lengths=Lengths(train=(10, 10), test=())), model=encoder)
    assert str(caught.value) == (
        "RunSpec: model.architecture = EncoderOnly predicts in place, Retrieval answers 21 tokens with 1; use "
        "DecoderOnly() or EncoderDecoder()"
    )
    with pytest.raises(UserError, match="Translate answers with as many tokens as it takes"):
        RunSpec(task=Translate(), model=encoder)


def test_keys_drawn_among_padding_are_refused() -> None:
    model = ModelSpec(attention=BigBird(), architecture=EncoderOnly())
    RunSpec(task=Copy(), model=model)
    with pytest.raises(UserError, match="BigBird would draw keys among the padding of an encoder; use"):
        RunSpec(task=Copy(), model=model, train=TrainSpec(sampling=Padded()))
