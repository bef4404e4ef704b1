"""What README and docs show works as it is shown."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_snippet_of_the_readme_learns_its_task(tmp_path: Path) -> None:
    (snippet,) = blocks("README.md")
    two_threads = os.environ | {"OMP_NUM_THREADS": "2"}  # which would wait for those of the tests beside it
    command = [sys.executable, "-c", f"{snippet}print(torch.get_num_threads())"]
    done = subprocess.run(command, cwd=tmp_path, env=two_threads, capture_output=True, text=True, check=True)
    status, score, backend, threads = done.stdout.split()
    assert (status, backend, threads) == ("finished", "flash", "1")
    assert float(score) >= 0.98
    assert list(tmp_path.iterdir()) == []


def test_the_users_own_file_of_the_docs_plans(tmp_path: Path) -> None:
    (text,) = blocks("docs/own-component.md")
    (tmp_path / "my_ablation.py").write_text(text)
    command = [sys.executable, "-m", "harness", "ablate", "my_ablation.py", "--plan", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["left"] == 28


def test_the_users_own_level_task_and_ablation_work_in_the_commands(tmp_path: Path) -> None:
    (text,) = blocks("docs/own-component.md")
    (tmp_path / "my_ablation.py").write_text(text.replace("steps=600", "steps=10"))

    def said(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "harness", *arguments, "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    assert said("ablate", "my_ablation.py", "--seeds", "1")["counts"] == {"finished": 4}
    assert said("status", "my_ablation.py")["counts"] == {"finished": 4}
    assert [*said("sync")["delivered"]] == ["my-ablation"]
    (tmp_path / "results/my-ablation/report.html").unlink()
    assert said("report", "my_ablation.py")["files"][0] == "results/my-ablation/report.html"
    assert "Shift" in (tmp_path / "results/my-ablation/report.html").read_text()
    specs = {path: json.loads(path.read_text()) for path in tmp_path.glob("results/my-ablation/runs/*/spec.json")}
    mine = [str(path) for path, spec in specs.items() if spec["model"]["position"]["kind"] == "Fading"]
    assert len(mine) == 2
    assert said("cost", mine[0], "--load", "my_ablation.py", "--length", "8")["parameters"] > 0
    assert "Shift" in {task["name"] for task in said("list", "tasks", "--load", "my_ablation.py")["tasks"]}
    levels = said("list", "components", "--load", "my_ablation.py")["components"]["model.position"]
    assert "Fading" in {level["name"] for level in levels}


def test_the_snippets_of_the_method_run(tmp_path: Path) -> None:
    for snippet in blocks("docs/method.md"):
        subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, check=True)


def test_links_lead_somewhere() -> None:
    for page in ("README.md", "docs/method.md", "docs/own-component.md", "results/reference/claims.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_the_module_of_the_docs_is_diagnosed(tmp_path: Path) -> None:
    snippet, excerpt = blocks("docs/diagnostics.md")
    assert indent(excerpt, " " * 12) in (ROOT / "docs/examples/huggingface.py").read_text()
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line[:1] != " "] == ["scale_fit"]
    assert "q·k is not scaled at all" in done.stdout
    mended = snippet.replace("q @ k.mT", "q @ k.mT / 8**0.5")
    done = subprocess.run([sys.executable, "-c", mended], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == ""
