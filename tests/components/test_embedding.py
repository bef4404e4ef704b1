"""What embeddings are multiplied by, next to the positions that are added, and the matrix that may be both ends."""

import math

import pytest
import torch
from torch import Tensor

from harness.components.embedding import EmbeddingScale, SqrtWidth, Tied, UnitEmbedding, Untied
from harness.components.init import Draw, Normal, Xavier
from harness.components.position import Sinusoidal
from harness.cost import parameters
from harness.spec import ModelSpec
from harness.transformer import Transformer, build_model

VOCABULARY = 30
BASE = ModelSpec(d_model=16, num_heads=2, num_layers=1)
READ = torch.tensor([[3, 1, 4, 1, 5]])


def model(path: str, level: object) -> Transformer:
    return build_model(BASE.replace(path, level), VOCABULARY, seed=0)


# --- factor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_model", [1, 16, 100])
def test_factors(d_model: int) -> None:
    assert UnitEmbedding().factor(d_model) == 1
    assert SqrtWidth().factor(d_model) == pytest.approx(d_model**0.5)


def test_the_factor_multiplies_embeddings_before_positions_are_added() -> None:
    plain, scaled = model("embedding_scale", UnitEmbedding()), model("embedding_scale", SqrtWidth())
    torch.testing.assert_close(scaled.embed(READ), 4 * plain.embed(READ))
    assert not torch.allclose(plain(READ), scaled(READ), atol=1e-2)
    with torch.no_grad():
        plain.embedding.weight.mul_(4)
    torch.testing.assert_close(plain(READ), scaled(READ))


def test_the_factor_does_not_touch_a_tied_output() -> None:
    tied = BASE.replace("output_head", Tied())
    plain, scaled = (
        build_model(tied.replace("embedding_scale", s), VOCABULARY, seed=0) for s in (UnitEmbedding(), SqrtWidth())
    )
    seen: list[Tensor] = []
    scaled.blocks[-1].register_forward_hook(lambda module, args, output: seen.append(output[0]))
    torch.testing.assert_close(scaled(READ), seen[0] @ plain.embedding.weight.T)


def ratio(draw: Draw, scale: EmbeddingScale, vocabulary: int, d_model: int = 64) -> float:
    """Size of embeddings over that of the sinusoidal codes that are added to them."""
    spec = ModelSpec(d_model=d_model, embedding_scale=scale, num_layers=1).replace("init.embedding", draw)
    embedded = build_model(spec, vocabulary, seed=0).embed(torch.arange(vocabulary)).detach()
    codes = Sinusoidal().codes(100, d_model)
    return float(embedded.square().mean().sqrt() / codes.square().mean().sqrt())


def test_unit_embeddings_times_the_root_of_the_width_drown_positions() -> None:
    # CLAIMS D01: codes have mean square ½. The article calls the first balanced.
    assert ratio(Normal(deviation=1.0), SqrtWidth(), 2000) == pytest.approx(math.sqrt(2 * 64), rel=0.02)
    assert ratio(Normal(deviation=1.0), UnitEmbedding(), 2000) == pytest.approx(math.sqrt(2), rel=0.02)
    # What is balanced: the original's N(0, 1/d_model), times the root.
    assert ratio(Normal(deviation=1 / 8), SqrtWidth(), 2000) == pytest.approx(math.sqrt(2), rel=0.02)


def test_xavier_embeddings_are_drowned_by_positions() -> None:
    # CLAIMS D01, as section 8 draws them: std √(2 / (V + d_model)), the smaller the more words there are.
    expected = math.sqrt(2 * 64) * math.sqrt(2 / (2000 + 64))
    assert ratio(Xavier(), SqrtWidth(), 2000) == pytest.approx(expected, rel=0.02)
    assert ratio(Xavier(), SqrtWidth(), 2000) < 0.5
    assert ratio(Xavier(), UnitEmbedding(), 2000) < 0.05
    assert ratio(Xavier(), SqrtWidth(), 20) > 1.5  # few words: not so


# --- output ---------------------------------------------------------------------------------------------------------


def test_tying_saves_a_matrix() -> None:
    # CLAIMS E28
    untied, tied = model("output_head", Untied()), model("output_head", Tied())
    assert parameters(untied) - parameters(tied) == VOCABULARY * 16
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.weight"}
    for name, parameter in tied.named_parameters():
        assert torch.equal(parameter, untied.get_parameter(name)), name


def test_a_tied_model_is_an_untied_one_with_two_equal_matrices() -> None:
    # CLAIMS E28: outputs are the same, and the one matrix has the sum of the two gradients.
    untied, tied = model("output_head", Untied()).double(), model("output_head", Tied()).double()
    with torch.no_grad():
        untied.get_parameter("head.weight").copy_(tied.embedding.weight)
    torch.testing.assert_close(tied(READ), untied(READ))
    for made in (untied, tied):
        made(READ).log_softmax(-1)[..., 7].sum().backward()
    table, above, below = (
        tied.embedding.weight.grad,
        untied.embedding.weight.grad,
        untied.get_parameter("head.weight").grad,
    )
    assert table is not None
    assert above is not None
    assert below is not None
    torch.testing.assert_close(table, above + below)
    read = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, READ[0], True)
    assert torch.equal(above.any(1), read)  # from below: the words that were read
    assert below.any(1).all()  # from above: all words


def test_the_output_of_an_untied_model_is_a_matrix_of_its_own() -> None:
    untied = model("output_head", Untied())
    assert untied.get_parameter("head.weight").shape == untied.embedding.weight.shape
    assert not torch.equal(untied.get_parameter("head.weight"), untied.embedding.weight)
