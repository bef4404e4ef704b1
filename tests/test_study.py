import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_study import plan, small

from ablations.position import ablation as position
from harness.components.position import NoPE, RoPE, Sinusoidal
from harness.record import RunRecord, Score
from harness.schema import UserError, fingerprint
from harness.spec import RunSpec
from harness.study import Ablation, Budget, counts, make_plan, survey, write_plan
from tasks import Copy


def record(path: Path, cell_fingerprint: str, spec: dict[str, Any]) -> None:
    scores = (Score(length=4, metric="exact_match", value=0.5),)
    made = RunRecord(fingerprint=cell_fingerprint, spec=spec, status="finished", scores=scores)
    made.write(path / cell_fingerprint / "record.json")


def test_cells_are_task_by_task_seed_by_seed_baseline_first() -> None:
    cells = [(cell.task, cell.seed, cell.variant) for cell in plan().cells]
    assert len(cells) == len(set(cells)) == 2 * 3 * 3
    assert cells[:4] == [("copy", 0, "sinusoidal"), ("copy", 0, "none"), ("copy", 0, "rope"), ("copy", 1, "sinusoidal")]
    assert [task for task, _, _ in cells] == ["copy"] * 9 + ["reverse"] * 9


def test_a_cell_is_the_baseline_with_its_variants_changes_and_its_seed() -> None:
    baseline = {cell.seed: cell.spec for cell in plan().cells if (cell.task, cell.variant) == ("copy", "sinusoidal")}
    for cell in plan().cells:
        if (cell.task, cell.variant) == ("copy", "rope"):
            assert cell.spec == baseline[cell.seed].replace("model.position", RoPE())
            assert cell.spec.seed == cell.seed


def test_fingerprints_are_those_of_the_specs_and_differ() -> None:
    cells = plan().cells
    assert len({cell.fingerprint for cell in cells}) == len(cells)
    assert all(cell.fingerprint == RunSpec.parse(cell.spec.document()).fingerprint() for cell in cells)


def test_an_ablation_survives_the_round_trip() -> None:
    for ablation in (small(), position):
        again = Ablation.parse(json.dumps(ablation.document()))
        assert again.document() == ablation.document()
        assert fingerprint(again) == fingerprint(ablation)
        assert [c.fingerprint for c in plan(again).cells] == [c.fingerprint for c in plan(ablation).cells]


def test_adding_a_variant_or_seeds_stales_nothing() -> None:
    more = small(variants={**small().variants, "fast rope": {"model.position": RoPE(base=50.0)}})
    assert {c.fingerprint for c in plan().cells} < {c.fingerprint for c in plan(more, seeds=5).cells}


def test_a_budget_changes_every_variant_alike() -> None:
    for cell in plan(budget="smoke").cells:
        assert cell.spec.train.steps == 10
    assert plan(budget="smoke").seeds == (0, 1)


def against(**changes: Any) -> dict[str, Any]:
    """Variants: the baseline and one that makes the changes (`__` stands for a dot)."""
    return {"sinusoidal": {}, "x": {path.replace("__", "."): value for path, value in changes.items()}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"baseline": "rop"}, "baseline = 'rop' is no variant; did you mean 'rope'?"),
        ({"variants": against(model__num_heads=4)}, "variants.x: model.num_heads is not among axes"),
        ({"axes": ("model",), "variants": against(model__num_heads=3)}, "d_model = 16; choose 2 or 4"),
        ({"axes": ("model",), "variants": against(model__num_head=4)}, "did you mean 'num_heads'"),
        ({"variants": against(model__position={"kind": "Rope"})}, "level 'Rope'; did you mean 'RoPE'"),
        ({"axes": ("train",), "variants": against(train__learning_rate=-1.0)}, "should be greater than 0"),
        ({"variants": against(model__position=Sinusoidal())}, "variants.x is the same as variants.sinusoidal"),
        ({"budgets": {"quick": Budget(changes={"train.step": 3})}}, "TrainSpec has no field 'step'"),
        ({"tasks": {"copy": Copy(train_end_token=False)}}, "asks for the end token"),
        ({"axes": ("model.position", "model.nonsense")}, "axes: model.nonsense: ModelSpec has no field 'nonsense'"),
        ({"axes": ("model.position", "seed"), "variants": against(seed=5)}, "axes: seed cannot vary"),
        ({"budgets": {"quick": Budget(changes={"model.position.base": 5.0})}}, "lies along the axis model.position"),
        ({"tasks": {"copy": Copy(), "again": Copy()}}, "tasks.again is the same as tasks.copy"),
        ({"budgets": {"huge": {"seeds": 1001}}}, "less than or equal to 1000"),
        ({"against": {"rop": "none"}}, "against.rop: 'rop' is no variant; did you mean 'rope'?"),
        ({"against": {"rope": "non"}}, "against.rope: 'non' is no variant; did you mean 'none'?"),
        ({"against": {"rope": "none", "none": "rope"}}, "against.rope: comparisons must lead to the baseline"),
        ({"against": {"sinusoidal": "none"}}, "against.sinusoidal: comparisons must lead to the baseline"),
        ({"against": {"none": "none"}}, "against.none: comparisons must lead to the baseline"),
        ({"score": "learning_time"}, "higher_is_better = True does not fit score = 'learning_time'; use False"),
        ({"variants": {"sinusoidal": {}, "a\nb": {}}}, r"variants: 'a\nb' has a line break or a control character"),
        ({"tasks": {"co\tpy": Copy()}}, r"tasks: 'co\tpy' has a line break or a control character; name it without"),
        ({"higher_is_better": False}, "higher_is_better = False does not fit score = 'exact_match'; use True"),
    ],
)
def test_what_cannot_be_is_refused_with_path_value_and_remedy(changes: dict[str, Any], words: str) -> None:
    document = {**small().document(), **changes}
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        Ablation.parse(json.loads(json.dumps(document, default=lambda spec: spec.document())))
    assert "\n" not in str(caught.value)


def test_an_unknown_budget_or_number_of_seeds_is_refused() -> None:
    with pytest.raises(UserError, match="add it to its budgets or choose one: did you mean 'quick'"):
        plan(budget="quik")
    with pytest.raises(UserError, match="seeds = 0: choose 1 to 1000"):
        plan(seeds=0)


def test_a_pilot_has_seeds_and_a_folder_of_its_own() -> None:
    pilot = make_plan("small", small(), budget="quick", seeds=None, device="cpu", pilot=True)
    assert (pilot.name, pilot.seeds) == ("small-pilot", (1000, 1001, 1002))
    assert not {cell.fingerprint for cell in pilot.cells} & {cell.fingerprint for cell in plan().cells}
    assert pilot.document({})["pilot"]
    assert not plan().document({})["pilot"]


def test_study_json_tells_the_whole_plan() -> None:
    document = plan().document({"command": "harness ablate small"})
    assert document["variants"] == ["sinusoidal", "none", "rope"]
    assert document["differences"] == {
        "sinusoidal": {},
        "none": {"model.position": "NoPE"},
        "rope": {"model.position": "RoPE"},
    }
    assert document["test_lengths"] == {"copy": [4, 5], "reverse": [4, 5]}
    assert len(document["runs"]) == 18
    assert document["environment"]["torch"]
    assert json.loads(json.dumps(document)) == document


def test_position_codes_are_kept_for_the_variants_that_have_them(tmp_path: Path) -> None:
    write_plan(plan(), tmp_path, {})
    codes = dict(np.load(tmp_path / "codes.npz"))
    assert set(codes) == {"sinusoidal"}
    assert codes["sinusoidal"].shape == (2 * 5 + 2, 16)


def test_a_survey_tells_finished_partial_missing_and_corrupt_apart(tmp_path: Path) -> None:
    cells, runs = plan().cells, tmp_path / "runs"
    record(runs, cells[0].fingerprint, cells[0].spec.document())
    for cell, name in ((cells[1], "record.json"), (cells[2], "checkpoint.ckpt")):
        (runs / cell.fingerprint).mkdir()
        (runs / cell.fingerprint / name).write_text("no record")
    states, notices = survey(plan(), tmp_path)
    assert counts(states) == {"finished": 1, "partial": 1, "missing": 16}
    assert states[cells[1].fingerprint] == "missing"
    assert len(notices) == 1
    assert "is corrupt; kept as record.json.corrupt" in notices[0]
    assert (runs / cells[1].fingerprint / "record.json.corrupt").read_text() == "no record"


def test_a_record_of_another_run_or_spec_is_set_aside_like_a_corrupt_one(tmp_path: Path) -> None:
    one, two, three = plan().cells[:3]
    record(tmp_path / "runs", one.fingerprint, one.spec.document())
    record(tmp_path / "runs", two.fingerprint, two.spec.replace("model.d_model", 32).document())
    copy = tmp_path / "runs" / three.fingerprint / "record.json"
    copy.parent.mkdir()
    copy.write_text((tmp_path / "runs" / one.fingerprint / "record.json").read_text())
    states, notices = survey(plan(), tmp_path)
    assert counts(states) == {"finished": 1, "missing": 17}
    assert [notice.split(";")[0] for notice in notices] == [
        f"{tmp_path / 'runs' / cell.fingerprint / 'record.json'} is corrupt" for cell in (two, three)
    ]
    assert copy.with_name("record.json.corrupt").exists()


def test_runs_that_no_longer_fit_are_named_stale_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plan()
    write_plan(before, tmp_path, {})
    for cell in before.cells:
        record(tmp_path / "runs", cell.fingerprint, cell.spec.document())
    monkeypatch.setattr(RoPE, "result_version", 2)
    states, notices = survey(plan(), tmp_path)
    assert counts(states) == {"finished": 12, "missing": 6}
    assert notices == ["6 earlier runs no longer fit their spec or result version; they are kept and done again"]
    assert len(list((tmp_path / "runs").iterdir())) == 18


def test_seeds_and_budgets_are_no_reason_to_call_runs_stale(tmp_path: Path) -> None:
    write_plan(plan(budget="smoke"), tmp_path, {})
    for cell in plan(budget="smoke").cells:
        record(tmp_path / "runs", cell.fingerprint, cell.spec.document())
    assert survey(plan(), tmp_path)[1] == []
    assert survey(plan(budget="smoke", seeds=5), tmp_path)[1] == []


def test_a_level_of_an_interactive_session_cannot_reach_workers() -> None:
    here = type("Here", (NoPE,), {"__module__": "__main__", "__doc__": "x"})
    foreign = plan(small(variants={"sinusoidal": {}, "here": {"model.position": here()}}))
    import __main__

    if getattr(__main__, "__file__", None) is None:
        with pytest.raises(UserError, match="interactive session"):
            foreign.sources()
    else:
        assert foreign.sources() == (Path(__main__.__file__).resolve(),)
