"""Locks between processes, with real processes that are really killed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.locks import held, holder, signed

HOLD = """
import sys, time
from pathlib import Path
from harness.locks import signed
with signed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_has_one_holder_and_is_free_again_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(path), pytest.raises(TimeoutError, match=str(path)), held(path, seconds=0.1):
        pass
    with held(path):
        pass


def test_a_folder_can_be_held_and_nothing_is_written_into_it(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(TimeoutError), held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_whoever_waits_gets_it_when_it_is_free_or_stops_when_told(tmp_path: Path) -> None:
    path, got = tmp_path / "lock", threading.Event()

    def wait() -> None:
        with held(path, seconds=10):
            got.set()

    with held(path):
        thread = threading.Thread(target=wait)
        thread.start()
        with pytest.raises(TimeoutError), held(path, seconds=10, stop=lambda: True):
            pass
        assert not got.is_set()
    thread.join(5)
    assert got.is_set()


def test_the_holder_signs_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder(path) is None
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        known = holder(path) or {}
        assert known["pid"] == process.pid
        assert {"host", "since"} < known.keys()
        with pytest.raises(TimeoutError), signed(path):
            pass
        assert (holder(path) or {})["pid"] == process.pid  # the second has not written over the first
        process.kill()
    assert holder(path) is None
    with signed(path):
        assert (holder(path) or {})["pid"] == os.getpid()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 3}'])
def test_a_holder_that_has_not_signed_yet_is_nobody_in_particular(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock"
    path.write_text(text)
    with held(path):
        assert holder(path) == {}
