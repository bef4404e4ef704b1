"""Decoder, encoder, and both: who sees what, and each against torch's own modules."""

import pytest
import torch
from torch import Tensor, nn

from harness.components.architecture import Architecture, DecoderOnly, EncoderDecoder, EncoderOnly
from harness.components.norm import NormPlacement, PostNorm, PreNorm
from harness.components.position import NoPE
from harness.spec import ModelSpec
from harness.trace import Trace
from harness.transformer import Block, Stack, Transformer, build_model

WORDS = 12
BASE = ModelSpec(d_model=16, num_heads=2, num_layers=2, position=NoPE())


def model(architecture: Architecture, spec: ModelSpec = BASE) -> Transformer:
    return build_model(spec.replace("architecture", architecture), WORDS, seed=0).double().eval()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(WORDS, (batch, length), generator=torch.Generator().manual_seed(seed))


def touched(made: Transformer, read: list[Tensor], which: int) -> Tensor:
    """`(T', T)`: whether changing token T' of input `which` changes output T."""
    before, rows = made(*read), []
    for i in range(read[which].shape[1]):
        changed = [x.clone() for x in read]
        changed[which][0, i] = (changed[which][0, i] + 1) % WORDS
        rows.append((made(*changed) - before).abs().amax(-1)[0] > 0)
    return torch.stack(rows)


def test_what_the_architectures_say_of_themselves() -> None:
    said = {
        a.kind: (a.is_causal(), a.has_encoder(), a.layout) for a in (DecoderOnly(), EncoderOnly(), EncoderDecoder())
    }
    assert said == {
        "DecoderOnly": (True, False, "continue"),
        "EncoderOnly": (False, False, "in place"),
        "EncoderDecoder": (True, True, "translate"),
    }


# --- who sees what --------------------------------------------------------------------------------------------------


def test_a_decoder_sees_what_does_not_lie_ahead() -> None:
    assert torch.equal(touched(model(DecoderOnly()), [tokens(1, 6)], 0), torch.ones(6, 6).triu().bool())


def test_an_encoder_sees_everything() -> None:
    assert touched(model(EncoderOnly()), [tokens(1, 6)], 0).all()


def test_a_decoder_with_an_encoder_sees_all_of_the_source_and_nothing_ahead() -> None:
    made, read = model(EncoderDecoder()), [tokens(1, 6), tokens(1, 5, seed=1)]
    assert torch.equal(touched(made, read, 0), torch.ones(6, 6).triu().bool())
    assert touched(made, read, 1).all()


def test_attention_to_the_source_is_traced_beside_the_decoders_own() -> None:
    trace = Trace()
    model(EncoderDecoder())(tokens(3, 6), tokens(3, 5), trace=trace)
    own, across = trace.stacked("attention"), trace.stacked("cross_attention")
    assert own.shape == (2, 3, 2, 6, 6)  # layers, B, H, T, T
    assert across.shape == (2, 3, 2, 6, 5)  # … T, S
    assert not own.triu(1).any()
    assert (across > 0).all()
    torch.testing.assert_close(across.sum(-1), torch.ones(2, 3, 2, 6))


def test_padding_of_the_source_does_not_matter() -> None:
    made, read = model(EncoderDecoder()), tokens(3, 6)
    lengths = [5, 2, 4]
    real = torch.arange(5) < torch.tensor(lengths)[:, None]
    source = tokens(3, 5, seed=1)
    padded = made(read, source, None, real)
    torch.testing.assert_close(padded, made(read, source.where(real, 0), None, real))
    for row, length in enumerate(lengths):
        alone = made(read[row : row + 1], source[row : row + 1, :length])
        torch.testing.assert_close(padded[row : row + 1], alone)


def test_padding_of_an_encoder_does_not_matter() -> None:
    made, read = model(EncoderOnly()), tokens(3, 6)
    lengths = [6, 1, 4]
    padded = made(read, None, torch.arange(6) < torch.tensor(lengths)[:, None])
    for row, length in enumerate(lengths):
        torch.testing.assert_close(padded[row, :length], made(read[row : row + 1, :length])[0])


# --- against torch --------------------------------------------------------------------------------------------------


def copy(ours: nn.Module, theirs: nn.Module) -> None:
    """Our attention's weights into torch's, whose biases become zero."""
    joined = torch.cat([ours.get_parameter(f"{name}.weight") for name in ("query", "key", "value")])
    theirs.get_parameter("in_proj_weight").copy_(joined)
    theirs.get_parameter("out_proj.weight").copy_(ours.get_parameter("output.weight"))
    for name in ("in_proj_bias", "out_proj.bias"):
        theirs.get_parameter(name).zero_()


def copy_block(block: Block, layer: nn.Module) -> None:
    copy(block.attention, layer.get_submodule("self_attn"))
    norms = [block.attention_step, block.feedforward_step]
    if block.memory_attention is not None and block.memory_step is not None:
        copy(block.memory_attention, layer.get_submodule("multihead_attn"))
        norms.insert(1, block.memory_step)
    for number, step in enumerate(norms, start=1):
        norm = step.before or step.outer
        assert norm is not None
        layer.get_submodule(f"norm{number}").load_state_dict(norm.state_dict())
    for number, name in enumerate(("0", "2"), start=1):
        layer.get_submodule(f"linear{number}").load_state_dict(block.feedforward.get_submodule(name).state_dict())


@torch.no_grad()
def torchs(stack: Stack, *, decoder: bool, pre_norm: bool) -> nn.Module:
    """Torch's encoder or decoder, with the weights of ours."""
    built: nn.TransformerDecoder | nn.TransformerEncoder
    if decoder:
        reader = nn.TransformerDecoderLayer(16, 2, 256, dropout=0.0, batch_first=True, norm_first=pre_norm)
        built = nn.TransformerDecoder(reader, 2, nn.LayerNorm(16) if pre_norm else None)
    else:
        layer = nn.TransformerEncoderLayer(16, 2, 256, dropout=0.0, batch_first=True, norm_first=pre_norm)
        built = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16) if pre_norm else None, enable_nested_tensor=False)
    built.double().eval()
    for block, theirs in zip(stack.blocks, built.layers, strict=True):
        assert isinstance(block, Block)
        copy_block(block, theirs)
    if stack.final_norm is not None and built.norm is not None:
        built.norm.load_state_dict(stack.final_norm.state_dict())
    return built


def with_drawn_norms(architecture: Architecture, placement: NormPlacement) -> Transformer:
    """Affine parameters and biases of their own, so that none can stand in for another."""
    made = model(architecture, BASE.replace("norm_placement", placement))
    for parameter in made.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return made


PLACEMENTS = pytest.mark.parametrize("placement", [PreNorm(), PostNorm()], ids=lambda level: level.kind)
AHEAD = torch.ones(7, 7).triu(1).bool()


@PLACEMENTS
@pytest.mark.parametrize("architecture", [DecoderOnly(), EncoderOnly()], ids=lambda level: level.kind)
def test_one_stack_is_torchs_encoder_with_a_causal_mask_or_none(
    architecture: Architecture, placement: NormPlacement
) -> None:
    made, read = with_drawn_norms(architecture, placement), tokens(3, 7)
    theirs = torchs(made, decoder=False, pre_norm=isinstance(placement, PreNorm))
    expected = theirs(made.embed(read), mask=AHEAD if isinstance(architecture, DecoderOnly) else None)
    torch.testing.assert_close(made(read), made.get_submodule("head")(expected))


@PLACEMENTS
def test_two_stacks_are_torchs_encoder_and_decoder(placement: NormPlacement) -> None:
    # CLAIMS D11
    made, pre_norm = with_drawn_norms(EncoderDecoder(), placement), isinstance(placement, PreNorm)
    assert made.encoder is not None
    encoder = torchs(made.encoder, decoder=False, pre_norm=pre_norm)
    decoder = torchs(made, decoder=True, pre_norm=pre_norm)
    read, source = tokens(3, 7), tokens(3, 5, seed=1)
    expected = decoder(made.embed(read), encoder(made.embed(source)), tgt_mask=AHEAD)
    torch.testing.assert_close(made(read, source), made.get_submodule("head")(expected))


# --- parameters -----------------------------------------------------------------------------------------------------


def test_one_stack_has_the_same_parameters_with_and_without_a_mask() -> None:
    decoder, encoder = (dict(model(a).named_parameters()) for a in (DecoderOnly(), EncoderOnly()))
    assert decoder.keys() == encoder.keys()
    assert all(torch.equal(decoder[name], encoder[name]) for name in decoder)


def test_both_stacks_have_all_layers_and_share_the_embedding_alone() -> None:
    # CLAIMS D11: 4d² + 2·d·d_ff weights a layer, in a decoder that reads an encoder 4d² more.
    one, two = model(DecoderOnly()), model(EncoderDecoder())
    assert two.encoder is not None
    assert len(two.blocks) == len(two.encoder.blocks) == 2

    def matrices(made: nn.Module) -> int:
        return sum(p.numel() for p in made.parameters() if p.dim() == 2)

    assert matrices(two) - matrices(one) == 2 * (4 * 16**2 + 2 * 16 * 256) + 2 * 4 * 16**2
    assert [name for name, _ in two.named_parameters() if "embedding" in name] == ["embedding.weight"]
    first, second = (stack.get_parameter("blocks.0.attention.query.weight") for stack in (two, two.encoder))
    assert not torch.equal(first, second)
