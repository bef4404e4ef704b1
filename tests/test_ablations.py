"""Every ablation file is data, plans, trains two steps, and gets a report."""

import ast
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from harness.conduct import check_comparisons
from harness.locate import ablation_files, find_ablation
from harness.report import write_report
from harness.results import load_study
from harness.runner import run
from harness.stats import fewest_seeds
from harness.study import make_plan, write_plan
from harness.wording import markdown

NAMES = sorted(ablation_files())


def test_there_are_ablations() -> None:
    assert "position" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_ablation_file_is_short_data_with_a_question(name: str) -> None:
    text = ablation_files()[name].read_text()
    assert len(text.splitlines()) < 40
    code = (ast.For, ast.While, ast.If, ast.FunctionDef, ast.ClassDef, ast.With, ast.Lambda)
    code += (ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
    tree = ast.parse(text)
    assert not [node for node in ast.walk(tree) if isinstance(node, code)]
    ablation = find_ablation(name).ablation
    assert set(ablation.claims) == set(re.findall(r"\b[DE]\d\d\b", ast.get_docstring(tree) or ""))
    assert ablation.question.endswith("?")
    assert len(ablation.why) > 40
    assert {"smoke", "quick", "full"} <= set(ablation.budgets)


@pytest.mark.parametrize("name", NAMES)
def test_an_ablation_plans_in_every_budget(name: str) -> None:
    ablation = find_ablation(name).ablation
    for budget in ablation.budgets:
        plan = make_plan(name, ablation, budget=budget, seeds=None, device="cpu")
        assert len(plan.cells) == len(ablation.variants) * len(ablation.tasks) * ablation.budgets[budget].seeds


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_variant_trains_two_steps_and_has_its_place_in_a_report(name: str, tmp_path: Path) -> None:
    plan = make_plan(name, find_ablation(name).ablation, budget="smoke", seeds=1, device="cpu")
    document = plan.document({"command": "a test"})
    for cell, row in zip(plan.cells, document["runs"], strict=True):
        spec = cell.spec.replaced({"train.steps": 2, "train.eval_samples": 4})
        row["fingerprint"] = spec.fingerprint()
        record = run(spec, directory=tmp_path / "runs" / row["fingerprint"])
        assert (record.status, record.cause) == ("finished", "")
    write_plan(plan, tmp_path, {})  # what stands beside study.json
    (tmp_path / "study.json").write_text(json.dumps(document))
    data = load_study(tmp_path)
    write_report(data, tmp_path, publish=True)  # half the time
    assert data.primary()["score"].notna().all()
    text = (tmp_path / "report.md").read_text()
    for variant in plan.variants:
        assert markdown(variant) in text
    assert len(pd.read_csv(tmp_path / "comparison.csv")) == (len(plan.variants) - 1) * len(plan.ablation.tasks)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["smoke", "quick"])
@pytest.mark.parametrize("name", NAMES)
def test_every_variant_differs_from_what_it_is_compared_with_as_declared(name: str, budget: str) -> None:
    check_comparisons(make_plan(name, find_ablation(name).ablation, budget=budget, seeds=1, device="cpu"))


def test_quick_has_seeds_enough_to_decide_something() -> None:
    for name in NAMES:
        ablation = find_ablation(name).ablation
        comparisons = (len(ablation.variants) - 1) * len(ablation.tasks)
        assert ablation.budgets["quick"].seeds >= fewest_seeds(comparisons), name


def test_every_claim_named_is_one_of_the_lists() -> None:
    named = {claim for name in NAMES for claim in find_ablation(name).ablation.claims}
    assert all(len(claim) == 3 and claim[0] in "ED" and claim[1:].isdigit() for claim in named)


def test_the_ladder_ends_where_leave_one_out_begins() -> None:
    ends = [
        make_plan(name, find_ablation(name).ablation, budget="quick", seeds=1, device="cpu").cells[index].spec
        for name, index in (("original-to-modern", -1), ("leave-one-out", 0))
    ]
    assert ends[0] == ends[1]
