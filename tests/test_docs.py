"""What README and docs show works as it is shown."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_snippet_of_the_readme_learns_its_task(tmp_path: Path) -> None:
    (snippet,) = blocks("README.md")
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=True)
    status, score, backend = done.stdout.split()
    assert (status, backend) == ("finished", "flash")
    assert float(score) >= 0.98
    assert list(tmp_path.iterdir()) == []


def test_the_users_own_file_of_the_docs_plans(tmp_path: Path) -> None:
    (text,) = blocks("docs/own-component.md")
    (tmp_path / "my_ablation.py").write_text(text)
    command = [sys.executable, "-m", "harness", "ablate", "my_ablation.py", "--plan", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["left"] == 12


def test_links_lead_somewhere() -> None:
    for page in ("README.md", "docs/method.md", "docs/own-component.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"
