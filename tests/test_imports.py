"""The import rules of DESIGN.md: one way, lazy where a person waits, one dependency one file."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "pytorch_lightning", "mlflow", "optuna", "seaborn", "matplotlib", "pandas", "scipy", "ray", "rich"}
LEARNING = {"torch", "pytorch_lightning", "lightning", "mlflow", "optuna", "ray"}

# What a module must not pull in, directly or through others. import-linter reads the text of imports; this looks at
# what a fresh process has really loaded, `importlib.import_module` included.
FORBIDDEN = {
    "harness": HEAVY,
    "harness.cli": HEAVY,
    "harness.schema": HEAVY | {"numpy"},
    "harness.record": HEAVY,
    "harness.engine": HEAVY - {"pandas"},
    "harness.stats": (HEAVY | {"harness.spec"}) - {"pandas", "scipy"},
    "harness.report": LEARNING,
    "harness.comparison": LEARNING | {"seaborn", "matplotlib", "rich"},
    "harness.claims": LEARNING | {"seaborn", "matplotlib", "rich"},
    "harness.attention_map": LEARNING | {"seaborn"},
    "harness.tracking": LEARNING - {"mlflow"},
    "harness.progress": LEARNING | {"seaborn"},
    "harness.spec": HEAVY - {"torch"},
    "harness.space": HEAVY | {"numpy"},
    "harness.tuned": HEAVY - {"torch"},
    "harness.transformer": HEAVY - {"torch"},
    "harness.worker": {"mlflow", "optuna", "seaborn", "ray", "rich"},
    "tasks": HEAVY - {"torch"},
}


def in_fresh_process(code: str) -> str:
    """What Python code prints in a process that has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(statement: str) -> set[str]:
    """Names of all modules in a fresh process after one statement."""
    return set(in_fresh_process(f"{statement}\nimport sys\nprint(*sys.modules)").split())


@pytest.mark.parametrize("module", FORBIDDEN)
def test_import_pulls_in_no_more_than_it_needs(module: str) -> None:
    assert not FORBIDDEN[module] & loaded_after(f"import {module}")


def test_the_public_names_come_when_asked_for() -> None:
    listed = in_fresh_process("import harness\nprint(*harness.__all__)").split()
    assert {"Ablation", "ModelSpec", "TrainSpec", "RunSpec", "run", "run_study"} <= set(listed)
    in_fresh_process("import harness\nfor name in harness.__all__: getattr(harness, name)")


def test_an_unknown_name_is_an_attribute_error() -> None:
    in_fresh_process("import harness\nassert not hasattr(harness, 'no_such_name')")


def test_help_costs_half_a_second_of_cpu_at_most() -> None:
    def cpu_seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "harness", "--help"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    # The best of three: what else runs on the machine makes caches cold, never the command faster.
    assert min(cpu_seconds() for _ in range(3)) <= 0.5


def test_imports_go_one_way() -> None:
    # Without its cache, which two test processes would write at once.
    lint = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(lint, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
