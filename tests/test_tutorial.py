"""The tutorial works as it stands: every block in its order, in a folder of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (\w+\.py)\n")
STAYS = "   # until Ctrl-C\n"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which everything was done, and what the commands printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    bin_ = folder / "checkout" / ".venv" / "bin"  # `harness` and `python` of this interpreter, wherever that is
    bin_.mkdir(parents=True)
    (bin_ / "harness").write_text(f'#!/bin/sh\nexec {sys.executable} -m harness "$@"\n')
    (bin_ / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for file in bin_.iterdir():
        file.chmod(0o755)
    paths = {"CHECKOUT": str(folder / "checkout"), "PYTHONPATH": str(ROOT)}
    paths["PATH"] = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    printed = []
    for language, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
        if file := FILE.match(text):
            (folder / file[1]).write_text(text.replace("steps=300", "steps=60"))
        elif text.endswith(STAYS):
            printed.append(_until_ready(text.removesuffix(STAYS), folder, os.environ | paths))
        else:
            command = [sys.executable, "-c", text] if language == "python" else ["bash", "-ec", text]
            done = subprocess.run(command, cwd=folder, env=os.environ | paths, capture_output=True, text=True)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            printed.append(done.stdout)
    return folder, "\n".join(printed)


def _until_ready(command: str, folder: Path, environment: dict[str, str]) -> str:
    """What a command prints before it only waits; then it is stopped as by Ctrl-C."""
    where: dict[str, Any] = {"cwd": folder, "env": environment, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-ec", f"exec {command}"], **where) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    return "".join(lines) + rest


@pytest.mark.slow
def test_the_studies_have_run_and_their_reports_stand(said: tuple[Path, str]) -> None:
    folder, _ = said
    for study in ("scaling", "scaling-tuned", "pairs"):
        assert (folder / "results" / study / "report.html").exists()
        assert (folder / "results" / study / "tables" / "as_shown" / "verdicts.tex").exists()
    assert (folder / "results" / "scaling" / "sweep" / "summary.md").exists()


@pytest.mark.slow
def test_the_healthy_component_is_healthy_and_the_bad_run_is_named(said: tuple[Path, str]) -> None:
    _, printed = said
    healthy, bad = printed.index("none of them alarms"), printed.index("the learning rate is too high")
    assert healthy < bad


@pytest.mark.slow
def test_the_dashboard_prints_links(said: tuple[Path, str]) -> None:
    _, printed = said
    assert "http://127.0.0.1:" in printed
