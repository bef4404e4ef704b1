"""The tests behind laws: whether they are there, what became of them, and how they are run.

What became of them is a record, as the scores of runs are: `harness claims --run` writes `laws.json` into the results
folder, `--publish` puts it into `results/reference/claims.json`, each test with the commit at which it ran.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from harness.machine import commit
from harness.record import write_atomically
from harness.schema import UserError
from harness.sources import ROOT

LOCAL = "laws.json"
Outcomes = Mapping[str, Mapping[str, str]]  # by test: `outcome` (passed, failed), `commit`


def there(test: str) -> bool:
    """Whether a test is in this checkout; an installation without tests takes the record's word."""
    file, _, name = test.partition("::")
    return not (ROOT / "tests").is_dir() or name.partition("[")[0] in _functions(ROOT / file)


@cache
def _functions(file: Path) -> frozenset[str]:
    if not file.exists():
        return frozenset()
    return frozenset(node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))


def recorded(results: Path) -> dict[str, dict[str, str]]:
    """What the last `--run` left in a results folder; empty where there was none.

    Raises:
        UserError: the file is corrupt.
    """
    return _read(results / LOCAL)


def published(results: Path) -> dict[str, dict[str, str]]:
    """What the published record says.

    Raises:
        UserError: the file is corrupt.
    """
    return _read(results / "reference" / "claims.json")


def _read(path: Path) -> dict[str, dict[str, str]]:
    try:
        document = json.loads(path.read_text()) if path.exists() else {}
        return {str(test): dict(found) for test, found in document.get("laws", {}).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path} is corrupt ({error}); delete it and run `harness claims --run`") from error


def run(tests: Iterable[str], results: Path) -> dict[str, dict[str, str]]:
    """Run tests with pytest in a process of their own and record what becomes of them; those that are missing are not.

    Raises:
        UserError: pytest or the tests are not installed, or pytest could not run them.
    """
    wanted = sorted({test for test in tests if there(test)})
    if not (ROOT / "tests").is_dir() or find_spec("pytest") is None:
        raise UserError("laws are tests of a checkout of this project; run `make setup` in one")
    if not wanted:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={page}", *wanted]
        # One thread, as the results of tests are those of one; stdout belongs to the command's answer.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
        if not page.exists() or done.returncode not in (0, 1):
            raise UserError(f"pytest ended with {done.returncode} before it had run the tests; its output says why")
        outcomes = outcomes_of(page.read_text(), wanted)
    found = {test: {"outcome": outcome, "commit": commit()} for test, outcome in outcomes.items()}
    write_atomically(results / LOCAL, json.dumps({"laws": recorded(results) | found}, indent=1, sort_keys=True))
    return found


def outcomes_of(page: str, wanted: Iterable[str]) -> dict[str, str]:
    """What became of each test, by a page of JUnit: *passed* if all of its cases did, or were left out but for one."""
    cases: dict[str, list[str]] = {}
    for case in ElementTree.fromstring(page).iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        state = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '')}"
        for known in {name, name.partition("[")[0]}:
            cases.setdefault(known, []).append(state)
    return {test: _of_all(cases.get(test, [])) for test in wanted}


def _of_all(states: list[str]) -> str:
    return "failed" if "failed" in states else "passed" if "passed" in states else "missing"
