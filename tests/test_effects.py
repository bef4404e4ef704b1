"""The chapter of main effects and interactions: which contrasts a study has, and what the page says of them."""

from pathlib import Path
from typing import Any

import pytest
from hand_made import blocks, study
from small_study import LENGTHS, plan, small

from harness.components.position import NoPE
from harness.components.scale import Inverse, Unscaled
from harness.report.chapters.effects import CHAPTER, INTERACTION, MAIN, contrasted, effects_of
from harness.report.tables import Findings
from tasks import Copy

AXES = ("model.position", "model.scale")
GRID: dict[str, dict[str, Any]] = {
    "neither": {},
    "none": {"model.position": NoPE()},
    "unscaled": {"model.scale": Unscaled()},
    "both": {"model.position": NoPE(), "model.scale": Unscaled()},
}


def document(variants: dict[str, dict[str, Any]], axes: tuple[str, ...] = AXES, seeds: int = 8) -> dict[str, Any]:
    ablation = small(axes=axes, baseline="neither", variants=variants, tasks={"copy": Copy(lengths=LENGTHS)})
    return plan(ablation, seeds=seeds).document({})


def scored(folder: Path, means: dict[str, float]) -> Findings:
    """The grid's study, whose runs score the mean of their variant, and a little more or less with each seed."""
    changed = {name: {path: type(level).__name__ for path, level in changes.items()} for name, changes in GRID.items()}
    return study(
        folder, tuple(GRID), axes=AXES, seeds=8, differences=changed,
        score=lambda variant, task, seed: means[variant] + 0.001 * ((7 * seed + len(variant)) % 5),
    )  # fmt: skip


def test_a_full_grid_has_both_main_effects_and_their_interaction() -> None:
    effects = {effect.name: effect for effect in effects_of(document(GRID))}
    assert [effect.kind for effect in effects.values()] == [MAIN, MAIN, INTERACTION]
    assert list(effects) == ["position = NoPE", "scale = Unscaled", "position = NoPE × scale = Unscaled"]
    assert effects["position = NoPE"].weights == {"both": 0.5, "none": 0.5, "unscaled": -0.5, "neither": -0.5}
    together = effects["position = NoPE × scale = Unscaled"]
    assert together.weights == {"both": 1, "none": -1, "unscaled": -1, "neither": 1}
    assert (effects["position = NoPE"].settings, together.settings) == (2, 1)


def test_only_cells_that_exist_count() -> None:
    crossed = GRID | {"inverse": {"model.scale": Inverse()}}
    effects = {effect.name: effect for effect in effects_of(document(crossed))}
    assert "scale = Inverse" not in effects  # it stands at one setting: the verdicts have it
    assert [name for name in effects if "Inverse" in name] == []
    without = {name: changes for name, changes in GRID.items() if name != "both"}
    assert effects_of(document(without)) == []


def test_a_third_axis_is_averaged_over() -> None:
    deep = {f"{name}, deep": {**changes, "model.num_layers": 2} for name, changes in GRID.items()}
    effects = effects_of(document(GRID | deep, (*AXES, "model.num_layers")))
    assert [effect.settings for effect in effects] == [4, 4, 4, 2, 2, 2]
    for effect in effects:
        assert sum(effect.weights.values()) == pytest.approx(0)
        assert len(effect.weights) == 8
        assert sum(weight for weight in effect.weights.values() if weight > 0) == {MAIN: 1, INTERACTION: 2}[effect.kind]


def test_levels_are_named_by_what_differs() -> None:
    variants = {
        "neither": {}, "wide": {"model.feedforward.d_ff": 32}, "none": {"model.position": NoPE()},
        "both": {"model.feedforward.d_ff": 32, "model.position": NoPE()},
    }  # fmt: skip
    names = [effect.name for effect in effects_of(document(variants, ("model.position", "model.feedforward")))]
    assert names[:2] == ["position = NoPE", "feedforward.d_ff = 32"]


def test_a_planted_interaction_is_found_and_an_additive_one_is_not(tmp_path: Path) -> None:
    means = {"neither": 0.2, "none": 0.4, "unscaled": 0.3, "both": 0.9}
    rows = contrasted(scored(tmp_path, means)).set_index("effect")
    assert rows.loc["position = NoPE × scale = Unscaled", "difference"] == pytest.approx(0.4, abs=0.01)
    assert rows["verdict"].tolist() == ["better", "better", "better"]
    means["both"] = 0.5
    rows = contrasted(scored(tmp_path / "additive", means)).set_index("effect")
    assert rows["verdict"].tolist() == ["better", "better", "equivalent"]
    assert rows.loc["position = NoPE", "difference"] == pytest.approx(0.2, abs=0.01)


def test_the_page_has_a_row_an_effect_with_words_of_its_own(tmp_path: Path) -> None:
    found = scored(tmp_path, {"neither": 0.2, "none": 0.4, "unscaled": 0.3, "both": 0.9})
    table, text = blocks(CHAPTER, found)
    assert [row[0].text for row in table.rows] == [
        "position = NoPE", "scale = Unscaled", "position = NoPE × scale = Unscaled"
    ]  # fmt: skip
    assert [row[1].text for row in table.rows] == ["▲ better", "▲ better", "▲ better than the sum"]
    assert "corrected for the 3 effects" in text.text


def test_a_study_of_one_axis_has_no_such_chapter(tmp_path: Path) -> None:
    found = study(tmp_path, ("a", "b"), axes=("model.position",), differences={"b": {"model.position": "NoPE"}})
    assert CHAPTER.read(found).empty
