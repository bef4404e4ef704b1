"""Set-up: what is pinned, what git ignores, what `make` says and passes on."""

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = {
    canonicalize_name(name): version
    for line in (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8").splitlines()
    for name, version in re.findall(r"^(\S+)==(\S+)$", line)
}


def requirements() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(line) for lines in (PROJECT["dependencies"], *extras) for line in lines]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_what_is_wanted_is_pinned_to_a_version_that_is_wanted(requirement: Requirement) -> None:
    assert PINNED[canonicalize_name(requirement.name)] in requirement.specifier


def test_all_that_our_dependencies_need_is_pinned() -> None:
    seen: set[str] = set()
    others = [Requirement(line).name for line in PROJECT["optional-dependencies"]["bench"]]  # in .venv-bench only
    left = [requirement for requirement in requirements() if requirement.name not in others]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        left += [Requirement(line) for line in distribution(name).requires or []]
    from_cuda = {name for name in seen if name.startswith(("nvidia-", "cuda-")) or name == "triton"}
    # pip freeze leaves out setuptools; what CUDA needs is pinned by torch.
    assert seen - from_cuda - PINNED.keys() == {"setuptools"}


def test_torch_has_an_upper_bound_and_no_local_build() -> None:
    torch = next(requirement for requirement in requirements() if requirement.name == "torch")
    assert {clause.operator for clause in torch.specifier} == {">=", "<"}
    assert "+" not in PINNED["torch"]


def ignored(path: str) -> bool:
    return subprocess.run(["git", "check-ignore", "--quiet", path], cwd=ROOT, check=False).returncode == 0


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("results/position/runs/0123456789abcdef/record.json", True),
        ("results/mlflow.db", True),
        ("results/mlflow.db-journal", True),
        ("results/mlartifacts/1/x.png", True),
        ("mlflow.db", True),
        (".venv/bin/python", True),
        (".venv-bench/bin/python", True),
        ("results/reference/position/report.md", False),
        ("results/reference/position/figures/curves.svg", False),
        ("results/reference/bench.md", False),
        ("ablations/position.py", False),
    ],
)
def test_git_ignores_what_runs_write_and_keeps_what_is_published(path: str, expected: bool) -> None:
    assert ignored(path) is expected


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that `make` reads, and an environment that counts as installed; its Python prints its arguments
    and exits with FAKE_EXIT, but for the studies in FAKE_FINE.
    """
    for name in ("Makefile", "pyproject.toml", ".ci/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    fake = """#!/bin/sh
[ "$*" = "-m pip --version" ] && exit
printf "[%s]" "$@"
case " $FAKE_FINE " in *" $4 "*) exit;; esac
exit ${FAKE_EXIT:-0}
"""
    python.write_text(fake, encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / ".venv/installed").touch()
    return tmp_path


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`make` as from a plain shell: nothing of a make that runs these tests, nothing of its options."""
    plain = {"PATH": os.environ["PATH"], **environment}
    command = [shutil.which("make") or "make", "--silent", *arguments]
    return subprocess.run(command, cwd=folder, env=plain, capture_output=True, text=True, check=False)


def test_make_runs_a_study_with_no_option_that_was_not_given(clone: Path) -> None:
    assert make(clone, "ablation-output-projection").stdout == "[-m][harness][ablate][output-projection]"


def test_make_passes_on_what_is_given(clone: Path) -> None:
    where = ["TRACKING_URI=http://127.0.0.1:1", "RESULTS=/tmp/two words"]
    done = make(clone, "ablation-position", "BUDGET=smoke", "SEEDS=2", "JOBS=auto", "DEVICE=cpu", *where)
    assert done.stdout == (
        "[-m][harness][ablate][position][--budget][smoke][--seeds][2][--jobs][auto][--device][cpu]"
        "[--tracking-uri][http://127.0.0.1:1][--results][/tmp/two words]"
    )


def test_the_command_s_own_exit_code_can_be_read(clone: Path) -> None:
    done = make(clone, "ablation-position", FAKE_EXIT="130")
    assert done.returncode == 2
    assert "Error 130" in done.stderr


@pytest.fixture
def studies(clone: Path) -> Path:
    """A clone with three ablations, and what is beside such."""
    (clone / "ablations").mkdir()
    for name in ("__init__", "baseline", "first", "second_one", "third"):
        (clone / "ablations" / f"{name}.py").touch()
    return clone


def asked(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The studies that `make` has asked for."""
    return re.findall(r"\[ablate\]\[(\w+)\]", done.stdout)


def test_all_studies_are_run_one_after_the_other_with_the_same_options(studies: Path) -> None:
    done = make(studies, "ablations", "BUDGET=smoke", "RESULTS=/tmp/two words")
    said = "[-m][harness][ablate][{}][--budget][smoke][--results][/tmp/two words]"
    assert done.stdout == "".join(map(said.format, ("first", "second_one", "third")))
    assert done.returncode == 0


def test_a_study_with_failed_runs_keeps_no_other_waiting_and_is_not_forgotten(studies: Path) -> None:
    done = make(studies, "ablations", FAKE_EXIT="1", FAKE_FINE="first third")
    assert asked(done) == ["first", "second_one", "third"]
    assert done.returncode == 2
    assert "Error 1" in done.stderr


@pytest.mark.parametrize("code", ["2", "130"])
def test_an_interrupted_study_stops_all_and_the_next_call_goes_on(studies: Path, code: str) -> None:
    done = make(studies, "ablations", FAKE_EXIT=code, FAKE_FINE="first third")
    assert asked(done) == ["first", "second_one"]
    assert f"Error {code}" in done.stderr
    again = make(studies, "ablations")  # of studies that are done `harness ablate` does nothing
    assert (asked(again), again.returncode) == (["first", "second_one", "third"], 0)


def test_an_unfinished_installation_is_taken_up_again(clone: Path) -> None:
    (clone / ".venv/installed").unlink()
    assert "[pip][install]" in make(clone, "setup").stdout
    assert (clone / ".venv/installed").exists()


def test_a_failed_installation_leaves_no_mark(clone: Path) -> None:
    (clone / ".venv/installed").unlink()
    done = make(clone, "setup", FAKE_EXIT="1")
    assert done.returncode == 2
    assert "[pip][install]" in done.stdout
    assert not (clone / ".venv/installed").exists()


def test_changed_requirements_are_installed(clone: Path) -> None:
    os.utime(clone / ".venv/installed", (0, 0))
    assert "[pip][install]" in make(clone, "setup").stdout


def test_without_python_one_sentence_says_so(clone: Path, tmp_path: Path) -> None:
    shutil.rmtree(clone / ".venv")
    for tool in ("sh", "touch"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    done = make(clone, "ablation-position", PATH=str(tmp_path / "bin"))
    assert done.returncode == 2
    assert "no Python 3.11 or 3.12 here" in done.stderr.splitlines()[0]
    assert not (clone / ".venv").exists()
