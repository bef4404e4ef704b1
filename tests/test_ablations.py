"""Every ablation file is data, plans, and trains two steps."""

import ast

import pytest

from harness.locate import ablation_files, find_ablation
from harness.runner import run
from harness.study import make_plan

NAMES = sorted(ablation_files())


def test_there_are_ablations() -> None:
    assert "position" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_ablation_file_is_short_data_with_a_question(name: str) -> None:
    text = ablation_files()[name].read_text()
    assert len(text.splitlines()) <= 40
    loops = (ast.For, ast.While, ast.If, ast.FunctionDef, ast.ClassDef, ast.With, ast.ListComp, ast.DictComp)
    assert not [node for node in ast.walk(ast.parse(text)) if isinstance(node, loops)]
    ablation = find_ablation(name).ablation
    assert ablation.question.endswith("?")
    assert ablation.why
    assert {"smoke", "quick", "full"} <= set(ablation.budgets)


@pytest.mark.parametrize("name", NAMES)
def test_an_ablation_plans_in_every_budget(name: str) -> None:
    ablation = find_ablation(name).ablation
    for budget in ablation.budgets:
        plan = make_plan(name, ablation, budget=budget, seeds=None, device="cpu")
        assert len(plan.cells) == len(ablation.variants) * len(ablation.tasks) * ablation.budgets[budget].seeds


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_trains_two_steps_on_every_task(name: str) -> None:
    ablation = find_ablation(name).ablation
    for cell in make_plan(name, ablation, budget="smoke", seeds=1, device="cpu").cells:
        record = run(cell.spec.replace("train.steps", 2))
        assert (record.status, record.cause) == ("finished", "")
