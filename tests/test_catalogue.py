"""What `list` shows comes from the classes themselves; names find files."""

import json
import re
from pathlib import Path
from typing import Annotated

import pytest
from annotated_types import Ge, Lt

from harness import catalogue, locate
from harness.cli import main
from harness.locate import find_ablation, study_name
from harness.schema import Level, UserError
from harness.spec import RunSpec
from tasks import Copy


def test_every_level_of_every_axis_says_what_it_is() -> None:
    found = catalogue.components()
    assert {"model.position", "model.norm", "model.scale", "model.feedforward", "train.schedule"} <= found.keys()
    run = RunSpec(task=Copy())
    for path, levels in found.items():
        current = run.at(path)
        axis = next(kind for kind in type(current).__mro__ if Level in kind.__bases__)
        assert [level.name for level in levels] == list(axis.levels())
        assert [level.name for level in levels if level.default] == [current.kind]
        for level in levels:
            assert level.what.endswith(".")
            assert "arXiv" not in level.what
    assert {"model.init.linear", "model.init.residual_gain"} <= found.keys()
    normal = next(level for level in found["model.init.embedding"] if level.default)
    assert str(normal.fields[0]) == "deviation = 1.0 (> 0)"


def test_papers_fields_defaults_and_bounds_are_read_from_the_class() -> None:
    rope = next(level for level in catalogue.components()["model.position"] if level.name == "RoPE")
    assert rope.papers == ("Su et al. 2021, arXiv:2104.09864",)
    assert [str(field) for field in rope.fields] == ["base = 10000.0 (> 1)"]
    sizes = {size.name: size for size in catalogue.sizes()}
    assert (sizes["train.steps"].type, sizes["train.steps"].bounds) == ("int", "≥ 1")
    assert str(sizes["model.d_head"]) == "model.d_head = None (≥ 1, None: d_model / num_heads)"
    unsaid = [name for name, size in sizes.items() if "None" in size.type and "None: " not in size.bounds]
    assert unsaid == []


def test_levels_that_decide_about_the_kernel_say_where_flash_runs() -> None:
    found = catalogue.components()
    said = {level.name: level.kernel for path in ("model.attention", "model.position") for level in found[path]}
    assert (said["MultiHead"], said["RoPE"], said["ALiBi"]) == ("flash on cpu and cuda",) * 3
    assert said["SlidingWindow"] == "flash on cpu; not on cuda: SlidingWindow masks keys within blocks of the sequence"
    assert said["Linear"] == "no flash: Linear has no softmax"
    assert said["T5Bias"].startswith("no flash: T5Bias adds a T×T bias")
    assert not any(level.kernel for level in found["model.norm"])


def test_a_docstring_may_be_long_or_missing() -> None:
    class Axis(Level):
        pass

    class Plain(Axis):
        width: Annotated[int, Ge(1), Lt(9)]

    class Documented(Axis):
        """Does a thing in
        two lines (Doe & Roe 2020, arXiv:2001.00001).

        More about it, which is not shown (arXiv:2001.00002).
        """

    Plain.__doc__ = None
    plain, documented = catalogue.levels(Axis)
    assert (plain.what, plain.papers) == ("", ())
    assert str(plain.fields[0]) == "width = required (≥ 1, < 9)"
    assert documented.what == "Does a thing in two lines."
    assert documented.papers == ("Doe & Roe 2020, arXiv:2001.00001", "arXiv:2001.00002")


def test_an_ablation_that_cannot_be_loaded_hides_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('boom')")
    (tmp_path / "shared.py").write_text("width = 64")
    files = locate.ablation_files() | {name: tmp_path / f"{name}.py" for name in ("broken", "shared")}
    monkeypatch.setattr(catalogue, "ablation_files", lambda: files)
    entries = {entry.name: entry for entry in catalogue.ablations()}
    assert "RuntimeError: boom" in entries["broken"].error
    assert "shared" not in entries
    assert entries["position"].axes == ("model.position",)
    assert "smoke" in entries["position"].budgets


def test_the_command_shows_all_or_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for words in ("model.position", "arXiv:2104.09864", "Copy", "harness ablate position"):
        assert words in shown
    assert main(["list", "tasks", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["tasks"]
    assert {"Copy", "Reverse"} <= {task["name"] for task in document["tasks"]}


def test_presets_name_their_numbers() -> None:
    shown = {each["name"]: each["what"] for each in catalogue.document("presets")["presets"]}
    assert "d_model 512, 8 heads, 2 groups, d_ff 1365, 6 layers" in shown["modern"]
    assert not [what for what in shown.values() if re.search(r"\d/\d", what)]


@pytest.mark.parametrize("given", ["position", "ablations/position.py", "./ablations/position.py"])
def test_an_ablation_is_found_by_name_and_by_file(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(locate.ROOT)
    found = find_ablation(given)
    assert (found.name, found.ablation.baseline) == ("position", "sinusoidal")


def test_a_study_is_called_after_its_file_with_dashes() -> None:
    given = ("output_projection", "output-projection", "ablations/output_projection.py", "/tmp/output_projection.json")
    assert {study_name(name) for name in given} == {"output-projection"}


def test_a_user_s_file_named_without_its_ending_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    with pytest.raises(UserError, match=r"there is no ablation 'mine'; for your own file write mine\.py"):
        find_ablation("mine")


def test_several_ablations_in_a_file_are_refused(tmp_path: Path) -> None:
    text = "from ablations.position import ablation\nother = ablation.replace('margin', 0.2)\nsame = other\n"
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=r"mine\.py defines 2 ablations \(ablation, same\); keep one a file"):
        find_ablation(str(tmp_path / "mine.py"))


def test_a_study_cannot_take_the_place_of_published_reports(tmp_path: Path) -> None:
    (tmp_path / "reference.py").write_text("from ablations.position import ablation\n")
    with pytest.raises(UserError, match="give the file another name"):
        find_ablation(str(tmp_path / "reference.py"))
