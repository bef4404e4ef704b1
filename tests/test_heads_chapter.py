"""The chapter on heads: role scores are what they are called on attention made by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import blocks, nothing, pictures, study
from hypothesis import given
from hypothesis import strategies as st

from harness.report.blocks import Table
from harness.report.chapters.heads import AXES, CHAPTER, ROLES, SPREAD, head_scores, role_keys
from harness.report.inside import Maps

LABELS = ["BOS", "a", "b", "c", "d", "SEP", "a", "b", "c", "d"]  # the probe of Copy
T = len(LABELS)
PLACES = {"itself": lambda i: i, "previous": lambda i: max(0, i - 1), "first": lambda i: 0}


def maps(weights: np.ndarray, labels: list[str] | None = None) -> Maps:
    """As a file holds them, of one variant and seed."""
    return Maps("x", 0, 1, weights, labels or LABELS)


def looking(where: dict[int, int] | Any) -> np.ndarray:
    """One layer, one head, whose query i gives all to key `where(i)`."""
    weights = np.zeros((1, 1, T, T))
    for i in range(T):
        weights[0, 0, i, where(i)] = 1
    return weights


def scores(weights: np.ndarray, labels: list[str] | None = None) -> dict[str, float]:
    """Of the only head."""
    return head_scores(maps(weights, labels))[[*ROLES, SPREAD]].iloc[0].to_dict()


@pytest.mark.parametrize("role", PLACES)
def test_a_head_of_one_role_scores_one_there_and_nothing_elsewhere(role: str) -> None:
    found = scores(looking(PLACES[role]))
    assert found.pop(role) == 1
    assert all(value == 0 or math.isnan(value) for value in found.values())


def test_an_induction_head_looks_after_the_earlier_equal_token() -> None:
    # At the second a, b, c the token after the first one; the second d would find SEP, which counts as a separator.
    earlier = {6: 2, 7: 3, 8: 4}
    found = scores(looking(lambda i: earlier.get(i, 0)))
    assert found["induction"] == 1
    assert found["same"] == 0
    assert found["first"] == pytest.approx(5 / 8)  # of the eight queries from the third on


def test_same_and_separator_are_asked_only_where_there_is_such_a_token() -> None:
    assert scores(looking(lambda i: i - 5 if i > 5 else i))["same"] == 1
    # The query after SEP has it as its previous token, so three tokens are left.
    assert scores(looking(lambda i: 5 if i > 5 else i))["separator"] == 1
    assert scores(looking(lambda i: 5 if i > 6 else i))["previous"] == 0


def test_uniform_attention_has_spread_one_and_gives_each_key_its_part() -> None:
    uniform = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]
    found = scores(uniform[None, None])
    assert found[SPREAD] == pytest.approx(1)
    parts = [1 / (i + 1) for i in range(2, T)]
    assert [found[role] for role in PLACES] == pytest.approx([np.mean(parts)] * 3)
    assert found["same"] == pytest.approx(np.mean([1 / (i + 1) for i in range(6, T)]))


def test_half_the_attention_on_each_of_two_keys_is_the_logarithm_of_two() -> None:
    weights = (looking(lambda i: i) + looking(lambda i: max(0, i - 1))) / 2
    found = scores(weights)
    assert found[SPREAD] == pytest.approx(np.mean([math.log(2) / math.log(i + 1) for i in range(1, T)]))
    assert (found["itself"], found["previous"]) == (0.5, 0.5)


def test_an_encoder_sees_ahead_and_has_no_separator() -> None:
    symbols = list("abcdab")
    uniform = np.full((1, 1, 6, 6), 1 / 6)
    found = scores(uniform, symbols)
    assert found[SPREAD] == pytest.approx(1)
    assert (found["next"], found["last"]) == pytest.approx((1 / 6, 1 / 6))
    assert math.isnan(found["separator"])
    assert math.isnan(scores(looking(lambda i: i))["next"])  # nothing ahead is seen


def test_padding_is_neither_asked_nor_looked_at() -> None:
    weights = np.zeros((1, 1, T + 2, T + 2))
    weights[..., :T, :T] = looking(PLACES["previous"])
    weights[..., T:, 0] = 1
    assert scores(weights, [*LABELS, "PAD", "PAD"]) == pytest.approx(scores(looking(PLACES["previous"])), nan_ok=True)


def test_a_probe_without_repeated_symbols_has_no_induction() -> None:
    found = scores(np.tril(np.ones((1, 1, 4, 4))), ["BOS", "a", "b", "c"])
    assert all(math.isnan(found[role]) for role in ("separator", "same", "induction", "next", "last"))


def test_a_row_without_any_weight_is_left_out() -> None:
    weights = looking(PLACES["previous"])
    weights[0, 0, 5] = 0
    assert scores(weights)["previous"] == 1


@given(st.lists(st.sampled_from(["a", "b", "c", "SEP", "PAD"]), min_size=2, max_size=12), st.booleans())
def test_a_key_counts_for_one_role_and_only_where_it_is_seen(labels: list[str], causal: bool) -> None:
    counts = sum(keys.astype(int) for keys in role_keys(labels, causal=causal).values())
    assert counts.max() <= 1
    if causal:
        assert not np.triu(counts, 1).any()
    assert (counts[2:].diagonal(2) == 1).all()  # itself


# The chapter


def attending(variant: str, task: str, seed: int) -> Any:
    """Two layers of two heads: previous, first; itself and uniform; `b` is uniform throughout."""
    uniform = (np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None])[None, None]
    made = [looking(PLACES["previous"]), looking(PLACES["first"]), looking(PLACES["itself"]), uniform]
    made = [uniform] * 4 if variant == "b" else made
    return np.concatenate(made, axis=1).reshape(2, 2, T, T), LABELS


def test_the_table_names_spread_and_the_strongest_head_of_each_role(tmp_path: Path) -> None:
    table, *_ = blocks(CHAPTER, study(tmp_path, ("a", "b"), axes=("model.num_heads",), maps=attending))
    assert isinstance(table, Table)
    first, second = [dict(zip(table.columns, (cell.text for cell in row), strict=True)) for row in table.rows]
    assert (first[SPREAD], first["95 % interval"]) == ("0.25", "[0.25, 0.25]")  # one head of four is uniform
    assert second[SPREAD] == "1.00"
    assert (first["previous"], first["first"], first["itself"]) == ("1.00", "1.00", "1.00")
    assert first["next"] == first["last"] == "–"
    uniform = np.mean([1 / (i + 1) for i in range(2, T)])
    assert second["previous"] == f"{uniform:.2f}"
    strongest = scores(attending("b", "copy", 0)[0][:1, :1])
    most = max(strongest[role] for role in ROLES if not math.isnan(strongest[role]))
    assert first["strongest role"] == f"{(3 + most) / 4:.2f}"


def test_pictures_are_one_of_spread_and_one_a_task(tmp_path: Path) -> None:
    found = study(tmp_path, ("a", "b"), axes=("model.scale.factor",), tasks=("copy", "sort it"), maps=attending)
    assert [picture.name for picture in pictures(CHAPTER, found)] == ["heads_spread", "heads_copy", "heads_sort-it"]


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_that_shapes_heads_calls_for_the_chapter(axis: str, tmp_path: Path) -> None:
    assert blocks(CHAPTER, study(tmp_path, ("a",), axes=(axis,), seeds=1, maps=attending))


def test_other_studies_and_those_without_maps_have_no_such_chapter(tmp_path: Path) -> None:
    for folder, axis, kept in (("a", "model.position", attending), ("b", "model.scale", nothing)):
        found = study(tmp_path / folder, ("a", "b"), axes=(axis,), maps=kept)
        assert not blocks(CHAPTER, found)
        assert not pictures(CHAPTER, found)


def test_a_torn_file_is_left_out(tmp_path: Path) -> None:
    found = study(tmp_path, ("a", "b"), axes=("model.scale",), seeds=1, maps=attending)
    path = found.data.attention["path"].iloc[1]
    path.write_bytes(path.read_bytes()[:50])
    table, *_ = blocks(CHAPTER, found)
    assert isinstance(table, Table)
    assert [row[0].text for row in table.rows] == ["a"]


def test_a_model_of_many_heads_is_drawn_a_column_a_layer(tmp_path: Path) -> None:
    many = np.broadcast_to(looking(PLACES["previous"]), (5, 10, T, T))
    found = study(tmp_path, ("a",), axes=("model.init",), seeds=1, maps=lambda *_: (many, LABELS))
    *_, roles = pictures(CHAPTER, found)
    assert roles.figure.axes[0].images[0].get_array().shape[1] == 5  # type: ignore[union-attr]
    assert "many heads" in roles.caption
