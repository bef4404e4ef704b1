"""What mixes the heads' results: a matrix, or nothing."""

import pytest
import torch

from harness.components.architecture import Architecture, DecoderOnly, EncoderDecoder
from harness.components.attention import Attention, Latent, MultiHead
from harness.components.norm import NoNorm
from harness.components.output_projection import NoProjection, OutputProjection, Projection
from harness.components.position import places
from harness.cost import parameters
from harness.spec import ModelSpec
from harness.transformer import Transformer, build_model


def model(level: OutputProjection, num_layers: int = 2) -> Transformer:
    spec = ModelSpec(d_model=16, num_heads=2, num_layers=num_layers, output_projection=level)
    return build_model(spec, 10, seed=0).double()


def test_no_projection_is_the_unit_matrix() -> None:
    # CLAIMS E09
    read, without, unit, drawn = torch.arange(10)[None], model(NoProjection()), model(Projection()), model(Projection())
    with torch.no_grad():
        for layer in range(2):
            unit.get_parameter(f"blocks.{layer}.attention.output.weight").copy_(torch.eye(16))
    torch.testing.assert_close(without(read), unit(read))
    assert not torch.allclose(without(read), drawn(read), atol=1e-2)


@pytest.mark.parametrize("level", [Projection(), NoProjection()], ids=lambda level: level.kind)
def test_heads_write_to_dimensions_of_their_own_unless_they_are_projected(level: OutputProjection) -> None:
    # CLAIMS E09: within a layer; the feed-forward sublayer mixes all dimensions all the same.
    attention = model(level).get_submodule("blocks.0.attention")
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    before = attention(x, places(5), causal=True)
    with torch.no_grad():
        attention.get_parameter("value.weight")[8:].mul_(2)  # the second head's values
    changed = (attention(x, places(5), causal=True) - before).abs() > 1e-12
    assert changed[..., 8:].all()
    assert bool(changed[..., :8].any()) is isinstance(level, Projection)


@pytest.mark.parametrize("attention", [MultiHead(), Latent()], ids=lambda level: level.kind)
@pytest.mark.parametrize(("architecture", "maps"), [(DecoderOnly(), 2), (EncoderDecoder(), 6)], ids=["one", "two"])
def test_a_projection_has_a_weight_for_each_pair_of_dimensions(
    architecture: Architecture, maps: int, attention: Attention
) -> None:
    spec = ModelSpec(d_model=16, num_heads=2, architecture=architecture, attention=attention)
    without, with_it = (
        parameters(build_model(spec.replace("output_projection", level), 10, seed=0))
        for level in (NoProjection(), Projection())
    )
    assert with_it - without == maps * 16 * 16


@pytest.mark.parametrize("d_head", [4, 8, 12])
def test_a_projection_is_a_matrix_of_the_joined_heads(d_head: int) -> None:
    spec = ModelSpec(d_model=16, num_heads=2, d_head=d_head, norm_placement=NoNorm())
    attention = build_model(spec, 10, seed=0).get_submodule("blocks.0.attention")
    weight, joined = attention.get_parameter("output.weight"), torch.randn(2, 3, 2 * d_head)
    assert weight.shape == (16, 2 * d_head)
    torch.testing.assert_close(attention.get_submodule("output")(joined), joined @ weight.T)


def test_heads_that_do_not_fit_the_stream_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_heads × d_head = 24 must equal d_model = 16; change d_head or use Proj"):
        ModelSpec(d_model=16, num_heads=2, d_head=12, output_projection=NoProjection())
    assert ModelSpec(d_model=16, num_heads=2, d_head=8, output_projection=NoProjection())
