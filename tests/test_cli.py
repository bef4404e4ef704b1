"""The command line: bad input, a study from Ctrl-C to its report, what the other commands say of it."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import commands
from harness.tracking import without_password

ABLATION = '''
"""A study in seconds."""
from harness import Ablation, Budget, ModelSpec, TrainSpec
from harness.components.position import Learned, NoPE, RoPE, Sinusoidal
from tasks import Copy, Lengths

print("this line of a user's file is no part of an answer")
ablation = Ablation(
    question="Does the command line work?",
    model=ModelSpec(d_model=16, num_layers=1, num_heads=2),
    train=TrainSpec(steps=300, batch_size=8, eval_samples=8),
    tasks={"copy": Copy(lengths=Lengths(train=(1, 4), test=(5,)))},
    axes=("model.position",),
    baseline="sinusoidal",
    variants={"sinusoidal": {"model.position": Sinusoidal()}, "RoPE": {"model.position": RoPE()}},
    budgets={"smoke": Budget(seeds=2)},
)
'''

FEW = "with 2 seeds no difference can be significant: its comparisons (1) need 6 (--seeds 6)"
Caller = Callable[..., tuple[int, str, str]]


def harness(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does."""
    command = [sys.executable, "-m", "harness", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


def is_one_sentence(err: str) -> bool:
    """Whether stderr is one line of ours."""
    return err.startswith("harness: ") and err.count("\n") == 1 and "Traceback" not in err


# Bad input: one sentence on stderr, exit 2, nothing written

REQUESTS = {
    "no command": ("", "name a command (ablate, sweep, report"),
    "unknown command": ("ablat position", "did you mean 'ablate'?"),
    "unknown option": ("ablate position --budgt smoke", "did you mean '--budget'?"),
    "abbreviated option": ("ablate position --bud smoke", "did you mean '--budget'?"),
    "missing name": ("ablate", "missing: NAME_OR_FILE"),
    "missing value": ("ablate position --budget", "--budget: expected one argument"),
    "one too many": ("ablate position reverse", "'reverse' is one argument too many"),
    "unknown ablation": ("ablate positon", "there is no ablation 'positon'; did you mean 'position'?"),
    "missing file": ("ablate ./mine.py", "mine.py: there is no such file"),
    "folder as a file": ("ablate ./", "this is a directory"),
    "unknown budget": ("ablate position --budget quik", "did you mean 'quick'?"),
    "unknown budget of a plan": ("ablate position --budget quik --plan", "did you mean 'quick'?"),
    "no seeds": ("ablate position --seeds 0", "--seeds: '0' is not a whole number from 1 on"),
    "too many seeds": ("ablate position --seeds 1001", "choose 1 to 1000"),
    "jobs that are no number": ("ablate position --jobs many", "'many' is not a whole number from 1 on, nor 'auto'"),
    "unknown device": ("ablate position --device gpu", "--device: there is no 'gpu'; did you mean 'cpu'?"),
    "URI without scheme": ("ablate position --tracking-uri mlruns", "has no scheme"),
    "URI of unknown scheme": ("ablate position --tracking-uri htp://host", "did you mean 'http'?"),
    "URI without host": ("ablate position --tracking-uri http://:5000", "names no server"),
    "unknown study": (
        "status position",
        "there is no study 'position' in results; run `harness ablate position` first",
    ),
    "unknown study of a report": ("report position", "there is no study 'position'"),
    "unknown part of the list": ("list componets", "did you mean 'components'?"),
    "impossible port": ("dashboard --port 99999", "99999 is above 65535"),
    "malformed URI of sync": ("sync --tracking-uri nowhere", "has no scheme"),
    "no store to look at": ("dashboard", "no tracking store yet"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_a_bad_request_gets_one_sentence_and_writes_nothing(
    case: str, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request, sentence = REQUESTS[case]
    code, out, err = call(*request.split())
    assert (code, out) == (2, "")
    assert is_one_sentence(err)
    assert sentence in err
    assert list(tmp_path.iterdir()) == []


FILES = {
    "raises": ("ablation = Ablation(", "raise RuntimeError('boom')\nx = dict(", "mine.py, line 8: RuntimeError: boom"),
    "exits": ("ablation = Ablation(", "raise SystemExit(0)\nx = dict(", "SystemExit"),
    "is no Python": ("ablation = Ablation(", "ablation = = (", "mine.py, line 8: SyntaxError"),
    "defines no ablation": ("ablation = Ablation(", "dict(", "mine.py defines no ablation; write `ablation = "),
    "field that does not exist": ("d_model=16", "d_modle=16", "did you mean 'd_model'?"),
    "field of a level that does not exist": ("Sinusoidal()", "Sinusoidal(bse=10.0)", "did you mean 'base'?"),
    "field out of range": (
        "steps=300",
        "steps=0",
        "TrainSpec.steps = 0: input should be greater than or equal to 1; use at least 1",
    ),
    "wrong type": (
        "steps=300",
        "steps='many'",
        "TrainSpec.steps = 'many': input should be a valid integer; give a plain",
    ),
    "unknown level": ("Sinusoidal()}", "{'kind': 'Sinusodal'}}", "did you mean 'Sinusoidal'?"),
    "unknown task": ("Copy(lengths=Lengths(train=(1, 4), test=(5,)))", "{'kind': 'Coppy'}", "did you mean 'Copy'?"),
    "unknown axis": ('{"model.position": RoPE()}', '{"model.positon": RoPE()}', "did you mean 'position'?"),
    "unknown field of a variant": (
        '"RoPE": {"model.position": RoPE()}',
        '"RoPE": {"model.position.bsae": 3.0}',
        "did you mean 'base'?",
    ),
    "class in place of a level": (
        '"RoPE": {"model.position": RoPE()}',
        '"RoPE": {"model.position": RoPE}',
        "variants.RoPE: model.position = RoPE: this is a class; write RoPE()",
    ),
    "function in place of a value": (
        '"RoPE": {"model.position": RoPE()}',
        '"RoPE": {"model.position": print}',
        "a spec holds numbers, text and levels; give one of them",
    ),
    "unknown baseline": ('baseline="sinusoidal"', 'baseline="sinusoid"', "did you mean 'sinusoidal'?"),
    "heads that do not divide the width": ("num_heads=2", "num_heads=3", "num_heads = 3 does not divide d_model = 16"),
    "impossible combination": ("d_model=16", "d_model=6", "RoPE needs an even number"),
    "too few positions": ("RoPE()}", "Learned(max_length=4)}", "takes 4 tokens, the longest training sequence has 10"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_bad_ablation_file_gets_one_sentence_and_writes_nothing(case: str, call: Caller, tmp_path: Path) -> None:
    good, bad, sentence = FILES[case]
    file = tmp_path / "mine.py"
    assert good in ABLATION
    file.write_text(ABLATION.replace(good, bad).replace("print(", "str("))
    code, out, err = call("ablate", file, "--budget", "smoke", "--results", tmp_path / "results")
    assert (code, out) == (2, "")
    assert is_one_sentence(err)
    assert sentence in err
    assert list(tmp_path.iterdir()) == [file]


def test_results_that_cannot_be_written_are_refused(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ABLATION)
    (tmp_path / "file").touch()  # below a regular file not even root can write
    for command in (["ablate", tmp_path / "mine.py", "--budget", "smoke", "--json"], ["status", "mine"]):
        code, _, err = call(*command, "--results", tmp_path / "file" / "results")
        assert code == 2
        assert str(tmp_path / "file" / "results") in err
        assert "Traceback" not in err


def test_a_full_disk_is_said_in_a_sentence(study: Path) -> None:
    """A limit on the size of a file is what a test can set of a disk."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        f"from harness.cli import main; sys.exit(main(['report', 'mine', '--results', {str(study / 'results')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2, done.stderr
    assert is_one_sentence(done.stderr)
    assert "file too large; mend that and run it again, what was recorded is kept" in done.stderr


def test_a_real_process_refuses_in_one_line_too(tmp_path: Path) -> None:
    done = harness("ablate", "position", "--budgt", "smoke", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert is_one_sentence(done.stderr)


def test_with_json_an_error_is_a_document(call: Caller) -> None:
    code, out, err = call("ablate", "positon", "--json")
    assert code == 2
    assert json.loads(out) == {"error": err.removeprefix("harness: ").strip(), "exit_code": 2}


def test_a_bug_shows_its_traceback_and_has_an_exit_code_of_its_own(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Path) -> list[Path]:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(commands, "studies", broken)
    code, out, err = call("sync", "--json")
    assert code == 70
    assert "Traceback" in err
    assert "ZeroDivisionError: oops" in json.loads(out)["error"]


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m harness list components | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141")


def test_passwords_are_not_recorded() -> None:
    assert without_password("harness ablate x --tracking-uri http://me:secret@host:5000/a") == (
        "harness ablate x --tracking-uri http://me:…@host:5000/a"
    )
    assert without_password("harness ablate x --tracking-uri http://host:5000") == (
        "harness ablate x --tracking-uri http://host:5000"
    )


# An ablation in JSON


def test_an_ablation_can_be_json(call: Caller, tmp_path: Path) -> None:
    from harness.locate import find_ablation

    (tmp_path / "source.py").write_text(ABLATION)
    original = find_ablation(str(tmp_path / "source.py")).ablation
    (tmp_path / "mine.json").write_text(json.dumps(original.document()))
    code, out, _ = call("ablate", tmp_path / "mine.json", "--budget", "smoke", "--plan", "--json")
    assert code == 0
    assert [cell["variant"] for cell in json.loads(out)["cells"]] == ["sinusoidal", "RoPE"]
    document = original.document()
    for broken, sentence in (
        (document | {"marginn": 0.1}, "did you mean 'margin'?"),
        (document | {"margin": 2.0}, "mine.json: margin = 2.0: input should be less than 1; use less than 1"),
    ):
        (tmp_path / "mine.json").write_text(json.dumps(broken))
        code, _, err = call("ablate", tmp_path / "mine.json", "--plan")
        assert code == 2
        assert is_one_sentence(err)
        assert sentence in err
    twice = json.dumps(original.document()).replace('"margin"', '"question": "Another?", "margin"')
    (tmp_path / "mine.json").write_text(twice)
    said = call("ablate", tmp_path / "mine.json")[2]
    assert "mine.json: question: this key stands twice in its object; remove one" in said
    (tmp_path / "mine.json").write_text("{")
    assert "mine.json: this is not JSON (" in call("ablate", tmp_path / "mine.json", "--plan")[2]


# One study, from Ctrl-C to its report: conducted once for all test processes; each test has a copy


@pytest.fixture(scope="session")
def conducted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `mine.py`, `results/mine` and what two invocations said: interrupted, then finished."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "cli_study"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "second.json").exists():
            conduct(folder)
        fcntl.flock(lock, fcntl.LOCK_UN)
    return folder


@pytest.fixture
def study(conducted: Path, tmp_path: Path) -> Path:
    """A copy of the conducted study, so that no test sees what another does to it."""
    return shutil.copytree(conducted, tmp_path / "study")


def conduct(folder: Path) -> None:
    """Start the study, press Ctrl-C once its first run has ended, corrupt a record, finish it."""
    (folder / "mine.py").write_text(ABLATION)
    command = [sys.executable, "-m", "harness", "ablate", "mine.py", "--budget", "smoke", "--jobs", "1"]
    with (folder / "first.err").open("w") as err:
        first = subprocess.Popen(command, cwd=folder, stderr=err, start_new_session=True)
        limit = time.monotonic() + 200
        while "[1/4]" not in (folder / "first.err").read_text():
            assert first.poll() is None, (folder / "first.err").read_text()
            assert time.monotonic() < limit
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        pressed = time.monotonic()
        code = first.wait(60)
    (folder / "first.json").write_text(json.dumps({"code": code, "seconds": time.monotonic() - pressed}))
    (record,) = folder.glob("results/mine/runs/*/record.json")
    record.write_text(record.read_text()[:100])
    second = harness("ablate", "mine.py", "--budget", "smoke", "--jobs", "1", "--json", cwd=folder)
    said = {"code": second.returncode, "out": second.stdout, "err": second.stderr}
    (folder / "second.json").write_text(json.dumps(said))


def test_ctrl_c_saves_and_exits_130_within_seconds(study: Path) -> None:
    first = json.loads((study / "first.json").read_text())
    assert first["code"] == 130
    assert first["seconds"] < 15  # a loaded machine; two or three on an idle one
    said = (study / "first.err").read_text()
    assert "interrupted with 1 of 4 runs done" in said
    assert "go on with: harness ablate mine.py --budget smoke --jobs 1" in said
    assert "Traceback" not in said


def test_a_second_invocation_finishes_and_a_corrupt_record_is_done_again(study: Path) -> None:
    second = json.loads((study / "second.json").read_text())
    assert second["code"] == 0
    answer = json.loads(second["out"])  # one document and nothing else
    assert answer["counts"] == {"finished": 4}
    assert [row["variant"] for row in answer["verdicts"]] == ["sinusoidal", "RoPE"]
    assert "record.json is corrupt; kept as record.json.corrupt" in second["err"]
    assert "4 of 4 runs to do" in second["err"]
    assert FEW in second["err"]
    assert re.search(r"\[4/4\] copy · \S+ · seed 1: finished, score \d\.\d{3}", second["err"])
    assert len(list(study.glob("results/mine/runs/*/record.json"))) == 4
    assert len(list(study.glob("results/mine/runs/*/record.json.corrupt"))) == 1


def test_a_finished_study_is_recognised_and_nothing_is_redrawn(study: Path, call: Caller) -> None:
    page = study / "results/mine/report.html"
    before = page.stat().st_mtime_ns
    code, out, err = call("ablate", study / "mine.py", "--budget", "smoke", "--results", study / "results")
    assert (code, out) == (0, "")
    assert "mine: 4 of 4 runs finished before, and the report is up to date" in err
    assert "baseline" in err
    assert str(page) in err
    assert f"harness dashboard --results {study / 'results'}" in err
    assert page.stat().st_mtime_ns == before


def test_a_plan_costs_what_is_left_and_writes_nothing(study: Path, call: Caller) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in (study / "results").rglob("*")}

    before = files()
    asked = ("ablate", study / "mine.py", "--budget", "smoke", "--results", study / "results", "--plan")
    code, out, _ = call(*asked, "--seeds", 3, "--json")
    plan = json.loads(out)
    assert (code, plan["runs"], plan["left"]) == (0, 6, 2)
    assert plan["seconds_left"] > 0
    for cell in plan["cells"]:
        assert (cell["done"], cell["left"], cell["basis"]) == (2, 1, "runs of this cell")
        assert cell["parameters"] > 0
        assert cell["flops"] > 0
        assert cell["tokens"] > 0
    code, out, _ = call(*asked)
    assert code == 0
    assert "mine: 0 of 4 runs to do" in out
    assert "nothing is left to do" in out
    assert files() == before


def test_a_plan_without_a_folder_makes_none(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ABLATION)
    code, out, _ = call("ablate", tmp_path / "mine.py", "--plan", "--budget", "smoke", "--results", tmp_path / "new")
    assert code == 0
    assert "4 of 4 runs to do" in out
    assert FEW in out
    assert "unknown" in out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_status_tells_from_the_records_alone(study: Path, call: Caller) -> None:
    code, out, _ = call("status", "mine", "--results", study / "results")
    assert code == 0
    assert "mine (budget smoke): 4 runs: 4 finished" in out
    assert re.search(r"copy +RoPE +2/2 +\d\.\d{3} +undecided", out)
    code, out, _ = call("status", "mine", "--results", study / "results", "--json")
    answer = json.loads(out)
    assert answer["running"] is None
    assert answer["comparison"][0]["n_pairs"] == 2


def test_status_without_a_name_has_a_line_a_study(study: Path, call: Caller) -> None:
    (study / "results/broken").mkdir()
    (study / "results/broken/study.json").write_text("[]")
    next(study.glob("results/mine/runs/*/record.json")).unlink()
    with (study / "results/mine/lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, _ = call("status", "--results", study / "results")
    assert code == 1
    broken, mine = out.splitlines()
    assert "broken/study.json is corrupt (it plans no runs); run the study again" in broken
    assert mine.startswith("mine (budget smoke): 3 of 4 runs have ended; it is being run by process ")
    _, out, _ = call("status", "--results", study / "results", "--json")
    assert json.loads(out)["studies"]["mine"] == {"budget": "smoke", "runs": 4, "ended": 3, "running": None}
    assert call("status", "--results", study)[:2] == (0, f"there is no study in {study}\n")


@pytest.mark.filterwarnings("ignore")
def test_a_corrupt_plan_is_said_in_a_sentence(study: Path, call: Caller) -> None:
    for content in ("[]", "{"):
        (study / "results/mine/study.json").write_text(content)
        for command in ("status", "report"):
            code, _, err = call(command, "mine", "--results", study / "results")
            assert code == 2
            assert is_one_sentence(err)
            assert "mine/study.json is corrupt" in err
        code, out, _ = call("sync", "--results", study / "results", "--json")
        assert code == 1
        assert "study.json is corrupt" in json.loads(out)["failed"]["mine"]


def test_status_names_who_runs_a_study(study: Path, call: Caller) -> None:
    with (study / "results/mine/lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _, out, _ = call("status", "mine", "--results", study / "results")
        assert "it is being run by process" in out
        asked = ("ablate", study / "mine.py", "--budget", "smoke", "--results", study / "results")
        code, _, err = call(*asked)
        assert code == 2
        refusal = err.splitlines(keepends=True)[-1]  # below what the user's file prints
        assert is_one_sentence(refusal)
        assert "'mine' is being run by process" in refusal


def test_an_unknown_study_gets_the_nearest_name(study: Path, call: Caller) -> None:
    code, _, err = call("report", "mime", "--results", study / "results")
    assert code == 2
    assert "did you mean 'mine'?" in err


def test_a_report_is_published_into_the_reference_folder(study: Path, call: Caller) -> None:
    code, out, _ = call("report", "mine", "--publish", "--results", study / "results")
    assert code == 0
    published = study / "results/reference/mine"
    assert out.split() == [str(published / "report.md")]
    assert {"report.md", "provenance.json", "runs.csv"} <= {p.name for p in published.iterdir()}
    code, out, _ = call("list", "answers", "--json", "--results", study / "results")
    assert [answer["study"] for answer in json.loads(out)["answers"]] == ["mine"]


@pytest.mark.filterwarnings("ignore")  # importing mlflow gives some
def test_sync_finds_nothing_missing(study: Path, call: Caller) -> None:
    code, out, _ = call("sync", "--results", study / "results", "--json")
    assert code == 0
    assert json.loads(out)["failed"] == {}
    assert list(json.loads(out)["delivered"]) == ["mine"]


@pytest.mark.filterwarnings("ignore")
def test_sync_without_a_server_says_so_and_exits_1(study: Path, call: Caller) -> None:
    code, out, _ = call("sync", "--results", study / "results", "--tracking-uri", "http://127.0.0.1:9", "--json")
    assert code == 1
    assert "mine" in json.loads(out)["failed"]


def test_what_a_user_s_file_prints_is_not_in_the_answer(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ABLATION)
    _, out, err = call("ablate", tmp_path / "mine.py", "--plan", "--budget", "smoke", "--json")
    assert json.loads(out)["study"] == "mine"
    assert "this line of a user's file" in err
