"""The dashboard starts a real MLflow server, shows the way, and leaves nothing behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from harness.dashboard import _signals_raise, dashboard
from harness.schema import UserError
from harness.tracking import Mirror, default_uri

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:mlflow\..*")


def wait_until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.05)


def planned(results, name):
    """A study that has only been planned, and its store."""
    document = {"study": name, "question": "?", "claims": [], "axes": ["model.position"], "baseline": "a", "commit": ""}
    document |= {"variants": ["a"], "tasks": ["copy"], "seeds": [0], "budget": "quick", "score": "exact_match"}
    document |= {"margin": 0.1, "runs": [], "differences": {}, "command": "harness ablate", "environment": {}}
    (results / name).mkdir()
    (results / name / "study.json").write_text(json.dumps(document))
    Mirror(default_uri(results), results / name).deliver()


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    results = tmp_path_factory.mktemp("dashboard") / "results"
    results.mkdir()
    planned(results, "norm")
    planned(results, "position")
    os.utime(results / "norm" / "study.json", (1, 1))
    return results


def children_of(process):
    return [child for child in psutil.Process(process.pid).children(recursive=True) if child.is_running()]


@pytest.mark.slow
def test_it_serves_loopback_only_links_the_last_study_and_leaves_nothing(mirrored, capfd):
    with dashboard(mirrored) as shown:
        with urlopen(f"{shown.address}/", timeout=30) as page:
            assert b"MLflow" in page.read()
        assert shown.study == "position"
        assert any(f"{shown.address}/#/experiments/" in link.address for link in shown.links)
        started = children_of(shown.keeper)
        assert any("uvicorn" in " ".join(child.cmdline()) for child in started)
        listening = [c for child in started for c in child.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
        assert len(started) <= 3  # no job runners
    assert not any(child.is_running() for child in started)
    assert capfd.readouterr().out == ""
    assert sorted(path.name for path in mirrored.iterdir() if not path.name.startswith(".")) == [
        "mlartifacts",
        "mlflow.db",
        "norm",
        "position",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_the_command_ends_its_server(mirrored, number):
    command = [sys.executable, "-m", "harness", "dashboard", "--results", str(mirrored)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}

    def heed_interrupts():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # xdist's workers ignore it, and a child would inherit that

    with subprocess.Popen(command, cwd=ROOT, preexec_fn=heed_interrupts, **pipes) as process:
        assert process.stdout.readline().startswith("MLflow at http://127.0.0.1:")
        started = children_of(process)
        assert len(started) >= 3
        process.send_signal(number)
        expected = {signal.SIGINT: 0, signal.SIGKILL: -signal.SIGKILL}
        assert process.wait(30) == expected.get(number, 128 + number)
    wait_until(lambda: not any(child.is_running() for child in started), 30)


@pytest.mark.parametrize("command", ["sleep 100", "sleep 100 & sleep 100", "trap '' TERM; sleep 100 & wait"])
def test_the_keeper_ends_all_that_it_started_when_its_input_closes(command, monkeypatch):
    code = f"import harness.dashboard as d; d.STOPPING = .5; d.keep(['sh', '-c', {command!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, cwd=ROOT) as keeper:
        wait_until(lambda: children_of(keeper))
        started = children_of(keeper)
        keeper.stdin.close()
        keeper.wait(30)
    wait_until(lambda: not any(child.is_running() for child in started), 5)


def test_the_keeper_ends_with_its_command():
    command = [sys.executable, "-m", "harness.dashboard", "sh", "-c", "exit 7"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as keeper:
        assert keeper.wait(60) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_block_and_is_then_as_before(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, _signals_raise():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == before


def test_without_a_store_there_is_nothing_to_show(results):
    with pytest.raises(UserError, match="holds no tracking store yet"), dashboard(results):
        pass


@pytest.mark.parametrize("port", [-1, 70_000, "taken"])
def test_a_port_that_cannot_be_had_is_refused(results, port):
    shutil.copy(__file__, results / "mlflow.db")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if port == "taken" else port
        with pytest.raises(UserError, match=f"port = {port} is taken or may not be used"), dashboard(results, port):
            pass


def test_a_server_that_does_not_start_says_why(results, monkeypatch, tmp_path):
    shutil.copy(__file__, results / "mlflow.db")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho some trouble >&2; echo the reason >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(UserError, match="did not start: the reason"), dashboard(results):
        pass
