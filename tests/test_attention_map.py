"""The picture of attention: that weights end up where they belong, in colours that can be told apart."""

import numpy as np
import pytest
from PIL import Image

from harness.attention_map import FUTURE, GREYS, SHADES, _cells, _palette, _shown, draw, render


def attention(layers=2, heads=4, length=6):
    """Weights as a causal model leaves them: rows sum to 1, nothing above the diagonal."""
    scores = np.random.default_rng(0).random((layers, heads, length, length)) * np.tri(length)
    return (scores / scores.sum(-1, keepdims=True)).astype(np.float16)


def luminance(picture):
    return picture.astype(float) @ [0.299, 0.587, 0.114]


@pytest.mark.parametrize(("layers", "heads", "length"), [(1, 1, 1), (2, 4, 22), (3, 8, 42), (1, 16, 90)])
def test_any_shape_becomes_a_colour_picture_of_bounded_size(layers, heads, length):
    picture = render(attention(layers, heads, length), ["BOS", *"0" * (length - 1)][:length], "rope · copy · seed 3")
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert picture.shape[2] == 3
    assert 100 < picture.shape[1] < 1700


def test_a_cell_is_as_dark_as_its_weight_and_stands_where_it_belongs():
    weights = np.zeros((1, 1, 3, 3))
    weights[0, 0] = [[1, 0, 0], [0.25, 0.75, 0], [0, 0, 1]]
    cells = _cells(weights[0, 0])
    level = cells.astype(int) - GREYS
    assert level[0, 0] == level[2, 2] == SHADES - 1
    assert level[1, 0] == round(0.5 * (SHADES - 1))  # the square root of a quarter
    assert level[2, 0] == 0
    assert cells[0, 1] == cells[0, 2] == cells[1, 2] == FUTURE


def test_weights_differ_in_lightness_alone_so_that_print_and_every_eye_keep_their_order():
    shades = np.frombuffer(_palette(), np.uint8).reshape(-1, 3)[GREYS:]
    assert len(shades) == SHADES
    assert (np.diff(luminance(shades)) <= 0).all()
    assert luminance(shades[:1])[0] - luminance(shades[-1:])[0] > 200


def test_where_a_later_token_is_seen_nothing_is_greyed():
    weights = np.full((3, 3), 1 / 3)
    assert (_cells(weights) >= GREYS).all()


def test_nan_and_rounding_above_one_are_drawn():
    cells = _cells(np.array([[1.001, 0.0], [np.nan, 1.0]]))
    assert cells[0, 0] == GREYS + SHADES - 1
    assert cells[1, 0] == GREYS


def test_labels_that_would_overlap_are_thinned_but_special_tokens_stay():
    names = ["BOS", *map(str, range(10)), "SEP", *map(str, range(10))]
    shown = _shown(names, 2)
    assert {0, 11} <= set(shown)
    assert min(np.diff(sorted(shown))) >= 2
    assert _shown(names, 1) == sorted(_shown(names, 1), key=lambda i: (names[i].isdigit(), i))


def test_labels_and_title_change_the_picture():
    weights = attention(1, 1, 2)
    first = render(weights, ["BOS", "1"])
    assert (first != render(weights, ["BOS", "2"])).any()
    assert render(weights, ["BOS", "1"], "step 3").shape[0] > first.shape[0]


def test_text_is_dark_on_white_and_a_picture_encodes_small(tmp_path):
    picture = draw(attention(2, 4, 22), ["BOS", *map(str, range(10)), "SEP", *map(str, range(10))], "a title")
    picture.save(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size < 60_000
    with Image.open(tmp_path / "map.png") as read:
        pixels = np.asarray(read.convert("RGB"))
    title = luminance(pixels[:40])
    assert title.max() == pytest.approx(255)
    assert title.min() < 60


@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (2, 4, 5, 5)])
def test_shapes_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match="do not fit"):
        render(np.zeros(shape), ["a"] * 6)
