"""Named models: the published sizes, counted without memory for them; the claims about cost that numbers settle."""

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from harness.cli import main
from harness.components.architecture import EncoderDecoder, EncoderOnly
from harness.components.attention import GroupedQuery, Latent, Linear, MultiHead, SlidingWindow
from harness.components.feedforward import MoE, ReLU, SwiGLU
from harness.components.norm import PostNorm, PreNorm, RMSNorm
from harness.components.position import RoPE, Sinusoidal
from harness.components.shape import Shape
from harness.cost import (
    active_parameters,
    all_score_elements,
    cache_elements,
    decoding_flops,
    empty_model,
    forward_flops,
    parameters,
    parameters_by_part,
    score_elements,
    training_flops,
)
from harness.module import TransformerModule
from harness.presets import PRESETS, preset
from harness.schema import UserError
from harness.spec import ModelSpec, Noam, RunSpec, TrainSpec
from tasks import Copy, Lengths

MIB, GIB = 2**20, 2**30
FP16 = 2


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_counted_in_parts_that_add_up(name: str) -> None:
    found = PRESETS[name]
    model = empty_model(found.model, found.vocab_size)
    assert sum(parameters_by_part(model).values()) == parameters(model) >= active_parameters(model)
    assert forward_flops(found.model, found.vocab_size, 64, 64 * found.model.architecture.has_encoder()) > 0


@pytest.mark.parametrize(("name", "total", "active"), [("mixtral-8x7b", 46.7, 12.9), ("llama-4-scout", 107.8, 17.2)])
def test_mixtures_of_experts_have_their_published_sizes(name: str, total: float, active: float) -> None:
    # CLAIMS D18: billions. Scout is top-1 and a shared expert, not top-2; 109 B with its vision tower, left out here.
    model = empty_model(PRESETS[name].model, PRESETS[name].vocab_size)
    assert parameters(model) / 1e9 == pytest.approx(total, abs=0.05)
    assert active_parameters(model) / 1e9 == pytest.approx(active, abs=0.05)


def test_the_original_is_the_papers_base_model() -> None:
    # CLAIMS D21: 512/8/2048/6 with dropout .1; the paper says 65 million, with biases in attention that we leave out.
    model, train = PRESETS["original"].model, PRESETS["original"].train
    assert (model.d_model, model.num_heads, model.num_layers, model.feedforward) == (512, 8, 6, ReLU(d_ff=2048))
    assert model.attention_dropout == model.residual_dropout == model.embedding_dropout == 0.1
    assert (model.position, model.norm_placement) == (Sinusoidal(), PostNorm())
    assert (train.schedule, train.learning_rate, train.beta2) == (Noam(warmup_steps=4000), 1.0, 0.98)
    assert parameters(empty_model(model, 37_000)) / 1e6 == pytest.approx(63, abs=0.5)


def test_the_modern_one_has_its_parts() -> None:
    model = PRESETS["modern"].model
    assert (model.norm, model.norm_placement, model.position) == (RMSNorm(), PreNorm(), RoPE())
    assert isinstance(model.feedforward, SwiGLU)
    assert isinstance(model.attention, GroupedQuery)


@pytest.mark.parametrize(("name", "d_model", "heads"), [("512", 512, 8), ("768", 768, 12), ("1024", 1024, 16)])
def test_the_usual_widths_have_heads_of_64(name: str, d_model: int, heads: int) -> None:
    # CLAIMS D21
    model = PRESETS[f"width-{name}"].model
    assert (model.d_model, model.num_heads, model.shape.d_head) == (d_model, heads, 64)


@pytest.mark.parametrize("name", ["original-small", "modern-small"])
def test_the_small_ones_train_as_they_say(name: str) -> None:
    # Their own optimiser, schedule, smoothing and clipping, under Lightning; only the first steps of them.
    found = PRESETS[name]
    task = Copy(lengths=Lengths(train=(2, 5), test=(6,)), num_symbols=8)
    module = TransformerModule(RunSpec(model=found.model, task=task, train=found.train))
    losses: list[float] = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            losses.append(module.loss.item())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on loaders
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=120, max_epochs=-1, callbacks=[Losses()], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, itertools.repeat(0))
    rates = [found.train.schedule.factor(step, found.train.steps, 64) * found.train.learning_rate for step in (0, 119)]
    assert module.learning_rate == pytest.approx(rates[1])
    assert rates[0] < rates[1]  # both are still warming up, or just past it
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no preset 'orignal'; did you mean 'original'\?"):
        preset("orignal")


# --- claims ----------------------------------------------------------------------------------------------------------


def layer(**fields: Any) -> ModelSpec:
    return ModelSpec(**{"num_layers": 1, "position": RoPE(), **fields})


def test_the_key_value_cache_of_the_article() -> None:
    # CLAIMS E18: h = 32, d_k = 128, n = 4096 in fp16 is 64 MiB a layer; 8 key-value heads a quarter.
    full = layer(d_model=4096, num_heads=32)
    assert cache_elements(full, 4096) * FP16 == 64 * MIB
    assert cache_elements(full.replace("attention", GroupedQuery(num_groups=8)), 4096) * FP16 == 16 * MIB


def test_latent_attention_compresses_sixteenfold_before_its_rotated_key() -> None:
    # CLAIMS D06: 2 · 32 · 128 = 8192 numbers against 512; with the decoupled key of 64 it is 14.2.
    shape = Shape(d_model=4096, num_heads=32, num_layers=1, d_head=128)
    full, latent = MultiHead().cache_elements(shape, 1), Latent(d_latent=512, d_rope=64).cache_elements(shape, 1)
    assert (full, latent) == (8192, 576)
    assert full / 512 == 16
    assert full / latent == pytest.approx(14.2, abs=0.03)


@pytest.mark.parametrize(
    ("tokens", "elements", "mebibytes"), [(2048, 4_194_304, 8), (8192, 67_108_864, 128), (32_768, 2**30, 2048)]
)
def test_score_matrices_of_one_head(tokens: int, elements: int, mebibytes: int) -> None:
    # CLAIMS E39
    assert score_elements(layer(), tokens) == elements
    assert elements * FP16 == mebibytes * MIB
    assert score_elements(layer(attention=SlidingWindow(window=128)), tokens) == 128 * tokens
    both_sides = layer(attention=SlidingWindow(window=128), architecture=EncoderOnly())
    assert score_elements(both_sides, tokens) == 255 * tokens


def test_an_encoder_decoder_keeps_its_source_too_and_an_encoder_nothing() -> None:
    decoder = layer(d_model=16, num_heads=2)
    assert cache_elements(decoder, 10) == 2 * 16 * 10
    assert cache_elements(decoder.replace("architecture", EncoderDecoder()), 10) == 2 * 2 * 16 * 10
    assert cache_elements(decoder.replace("architecture", EncoderOnly()), 10) == 0


def test_an_encoder_decoder_scores_three_times() -> None:
    full = layer(architecture=EncoderDecoder(), num_heads=2, num_layers=3)
    assert all_score_elements(full, 64) == 3 * 64 * 64 * 2 * 3
    windows = full.replace("attention", SlidingWindow(window=8))  # attention to the encoder's output stays full
    assert all_score_elements(windows, 64) == 64 * (8 + 15 + 64) * 2 * 3
    assert all_score_elements(full.replace("attention", Linear()), 64) == 64 * 64 * 2 * 3


@pytest.mark.parametrize(("feedforward", "share"), [(ReLU(d_ff=4096), 2 / 3), (SwiGLU(d_ff=4096), 3 / 4)])
def test_the_feed_forward_holds_two_thirds_of_a_block(feedforward: ReLU | SwiGLU, share: float) -> None:
    # CLAIMS E35: 8d² of 12d² at d_ff = 4d; three quarters with an unmatched SwiGLU. Norms and biases are the rest.
    parts = parameters_by_part(empty_model(layer(d_model=1024, num_heads=8, feedforward=feedforward), 10))
    found = parts["feedforward"] / (parts["feedforward"] + parts["attention"] + parts["norms"])
    assert found == pytest.approx(share, abs=1e-3)


def test_eight_experts_top_two_cost_eight_times_the_parameters_and_twice_the_operations() -> None:
    # CLAIMS E20: "compute unchanged", as the article also says, is wrong.
    dense = layer(d_model=256, num_heads=4, feedforward=SwiGLU(d_ff=512))
    sparse = dense.replace("feedforward", MoE(expert=SwiGLU(d_ff=512), num_experts=8, top_k=2))
    router = 256 * 8
    one, eight = (parameters_by_part(empty_model(spec, 10))["feedforward"] for spec in (dense, sparse))
    assert eight - router == 8 * one
    tokens = 64
    expert_flops = 2 * tokens * one
    router_flops = 2 * tokens * router
    assert forward_flops(sparse, 10, tokens) - forward_flops(dense, 10, tokens) == expert_flops + router_flops


def test_active_parameters_count_the_shared_expert() -> None:
    # CLAIMS D17: 4096/11008, 8 experts, top-2, one shared: 406 M of 1 217 M, not 2/8 of it (304 M).
    experts = MoE(expert=SwiGLU(d_ff=11_008), num_experts=8, top_k=2, num_shared=1)
    spec = layer(d_model=4096, num_heads=32, feedforward=experts)
    model = empty_model(spec, 10)
    whole = parameters_by_part(model)["feedforward"]
    active = whole - (parameters(model) - active_parameters(model))
    assert whole / 1e6 == pytest.approx(1217, abs=1)
    assert active / 1e6 == pytest.approx(406, abs=1)
    assert whole * 2 / 8 / 1e6 == pytest.approx(304, abs=1)


def test_a_decoded_token_costs_its_projections_and_one_row_of_scores() -> None:
    d, f, n, vocabulary = 64, 128, 100, 10
    spec = layer(d_model=d, num_heads=4, feedforward=ReLU(d_ff=f))
    by_hand = 2 * (4 * d * d + 2 * d * f + 2 * n * d + d * vocabulary)
    assert decoding_flops(spec, vocabulary, n) == by_hand
    both = spec.replace("architecture", EncoderDecoder())  # a query and an output more, and a row over the source
    assert decoding_flops(both, vocabulary, n) == by_hand + 2 * (2 * d * d + 2 * n * d)


def test_what_reads_a_whole_source_or_decodes_nothing_has_no_next_token() -> None:
    spec = layer(d_model=64, num_heads=4)
    assert decoding_flops(spec, 10, 1) == forward_flops(spec, 10, 1)
    for architecture, tokens in ((EncoderDecoder(), 1), (EncoderOnly(), 1), (EncoderOnly(), 9)):
        assert decoding_flops(spec.replace("architecture", architecture), 10, tokens) is None


# --- the command -----------------------------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["cost", *arguments])
    return code, *capsys.readouterr()


def test_cost_of_a_preset_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "llama-2-7b", "--length", "4096", "2048", "4096", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["parameters"] == 6_738_415_616
    assert [row["length"] for row in document["lengths"]] == [2048, 4096]
    assert document["lengths"][1]["cache_bytes_a_layer"] == 64 * MIB
    assert document["lengths"][1]["cache_bytes"] == 2 * GIB
    assert document["lengths"][0]["score_bytes_a_head"] == 8 * MIB
    assert document["lengths"][0]["training_flops"] == 3 * document["lengths"][0]["forward_flops"]


@pytest.mark.parametrize("name", ["width-512", "width-1024"])
def test_without_lengths_those_are_shown_that_the_model_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, name, "--json")
    assert code == 0
    assert [row["length"] for row in json.loads(out)["lengths"]] == [512]


def counted(
    capsys: pytest.CaptureFixture[str], folder: Path, spec: ModelSpec | RunSpec, *arguments: str
) -> dict[str, Any]:
    """What `harness cost` says of a spec's document."""
    (folder / "spec.json").write_text(json.dumps(spec.document()))
    code, out, _ = call(capsys, str(folder / "spec.json"), "--json", *arguments)
    assert code == 0
    document: dict[str, Any] = json.loads(out)
    return document


def test_the_command_shows_where_attention_overtakes_the_rest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # CLAIMS D15: products cost 4n²d, the rest of a layer with d_ff = 4d costs 24nd²: even at n = 6d.
    d = 64
    spec = layer(d_model=d, num_heads=4, feedforward=ReLU(d_ff=4 * d))
    lengths = [str(n) for n in (3 * d, 6 * d, 12 * d)]
    for row in counted(capsys, tmp_path, spec, "--vocab", "1", "--length", *lengths)["lengths"]:
        n, products = row["length"], row["attention_product_flops"]
        rest = row["forward_flops"] - products - 2 * n * d  # the output head of one word
        assert products == 4 * n * n * d
        assert products / rest == n / (6 * d)


def test_the_command_shows_what_experts_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # CLAIMS E20: eight times the parameters, twice the operations.
    dense = layer(d_model=256, num_heads=4, feedforward=SwiGLU(d_ff=512))
    sparse = dense.replace("feedforward", MoE(expert=SwiGLU(d_ff=512), num_experts=8, top_k=2))
    one, eight = (counted(capsys, tmp_path, spec, "--length", "64") for spec in (dense, sparse))
    of_one, of_eight = (found["parameters_by_part"]["feedforward"] for found in (one, eight))
    router = 256 * 8
    assert of_eight == 8 * of_one + router
    more = eight["lengths"][0]["forward_flops"] - one["lengths"][0]["forward_flops"]
    assert more == 2 * 64 * (of_one + router)


def test_the_command_shows_the_feed_forwards_share(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # CLAIMS E35
    for feedforward, share in ((ReLU(d_ff=4096), 2 / 3), (SwiGLU(d_ff=4096), 3 / 4)):
        parts = counted(capsys, tmp_path, layer(d_model=1024, num_heads=8, feedforward=feedforward))[
            "parameters_by_part"
        ]
        block = parts["feedforward"] + parts["attention"] + parts["norms"]
        assert parts["feedforward"] / block == pytest.approx(share, abs=1e-3)


def test_the_command_shows_a_compressed_cache(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # CLAIMS D06: 8192 numbers a token against 512, with the rotated key 576.
    held = {}
    for level in (MultiHead(), Latent(d_latent=512, d_rope=64)):
        spec = layer(d_model=4096, num_heads=32, attention=level)
        held[level.kind] = counted(capsys, tmp_path, spec, "--length", "4096")["lengths"][0]["cache_bytes_a_layer"]
    assert held == {"MultiHead": 4096 * 8192 * FP16, "Latent": 4096 * (512 + 64) * FP16}


def test_the_command_shows_that_two_experts_of_50_billion_are_100(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # CLAIMS D17: "400 B, 50 B active" with eight experts of 50 B and top-2.
    d, f = 16_384, 1_017_253
    experts = MoE(expert=SwiGLU(d_ff=f), num_experts=8, top_k=2)
    found = counted(capsys, tmp_path, layer(d_model=d, num_heads=128, feedforward=experts), "--length", "8")
    assert 3 * d * f == pytest.approx(50e9, rel=1e-6)
    rest = found["parameters"] - found["parameters_by_part"]["feedforward"] + 8 * d
    assert found["parameters"] - rest == pytest.approx(400e9, rel=1e-6)
    assert found["active_parameters"] - rest == pytest.approx(100e9, rel=1e-6)


def test_a_runs_second_forward_pass_is_counted_as_in_its_ledger(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for recompute, passes in ((False, 3), (True, 4)):
        model = layer(d_model=16, num_heads=2)
        run = RunSpec(task=Copy(num_symbols=8), model=model, train=TrainSpec(recompute=recompute))
        row = counted(capsys, tmp_path, run, "--length", "8")["lengths"][0]
        assert row["training_flops"] == passes * row["forward_flops"] == training_flops(run, [((8, 0), 1)])


def test_cost_is_shown_in_words_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "mixtral-8x7b", "--length", "4096")
    assert code == 0
    assert "46,702,792,704 parameters, 12,879,925,248 of them active for a token" in out
    assert "16 MiB" in out
    assert "products" in out


def test_cost_says_how_many_tokens_positions_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert "its positions take 512 tokens at most" in call(capsys, "width-512")[1]
    assert "its positions take" not in call(capsys, "modern-small")[1]
    assert json.loads(call(capsys, "width-512", "--json")[1])["longest"] == 512


def test_cost_of_a_runs_spec_and_of_a_models(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    run = RunSpec(task=Copy(num_symbols=8), model=layer(d_model=16, num_heads=2), train=TrainSpec())
    for name, document in (("run", run.document()), ("model", run.model.document())):
        (tmp_path / name).write_text(json.dumps(document))
        code, out, _ = call(capsys, str(tmp_path / name), "--length", "8", "--json", "--number", "fp32")
        found = json.loads(out)
        assert code == 0
        assert found["vocab_size"] == (12 if name == "run" else 32_000)
        assert found["lengths"][0]["cache_bytes"] == 4 * 2 * 16 * 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["orignal"], "'orignal' is neither a preset nor a file; did you mean 'original'?"),
        (["nosuch.json"], "nosuch.json: there is no such file; name a preset, or a spec's JSON"),
        (["."], ".: this is a folder; name a preset, or a spec's JSON"),
        (["{mine.py}"], "mine.py: this is Python, not JSON; name a preset, or a spec's JSON"),
        (["{broken}"], "broken: this is not JSON (Expecting property name"),
        (["{list}"], "list: a spec is a JSON object; name a preset, or a spec's JSON"),
        (["{learned.json}", "--length", "256"], "learned.json: position.max_length = 128: learned positions cannot"),
        (["{wrong}"], "num_heads = 3 does not divide d_model = 64; choose 2 or 4"),
        (["{mine}"], "unknown Position level 'Mine'; "),
        (["width-768", "--length", "513"], "max_length = 512: learned positions cannot take a sequence of 513 tokens"),
        (["modern", "--length", "0"], "'0' is not a whole number from 1 on"),
        (
            ["modern", "--length", "1000000000000"],
            "--length 1000000000000: this cannot be counted; choose lengths up to",
        ),
        (["modern", "--number", "fp8"], "there is no 'fp8'; did you mean 'fp32'?"),
    ],
)
def test_bad_requests_get_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, arguments: list[str], words: str
) -> None:
    contents = {"broken": "{", "list": "[1]", "wrong": json.dumps({"num_heads": 3})}
    contents["mine"] = json.dumps({"position": {"kind": "Mine"}})
    contents["learned.json"] = json.dumps({"position": {"kind": "Learned"}})
    contents["mine.py"] = "model = {}"
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    given = [str(tmp_path / text.strip("{}")) if text.startswith("{") else text for text in arguments]
    code, out, err = call(capsys, *given)
    assert (code, out) == (2, "")
    assert words in err
    assert ("--load FILE" in err) == ("unknown" in err)
    assert err.count("\n") == 1
