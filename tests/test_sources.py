import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from harness.schema import UserError, is_foreign, source_file, source_text
from harness.sources import ROOT, load_source, module_name
from tasks import Task

LEVEL = """
    from tasks import Copy

    class {name}(Copy):
        pass
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="mine.py"):
        file = tmp_path / name
        file.write_text(textwrap.dedent(text))
        return file

    return write


def test_levels_of_a_users_file_exist_and_lead_back_to_it(write):
    file = write(LEVEL.format(name="Mine"))
    level = load_source(file).Mine
    assert Task.levels()["Mine"] is level
    assert is_foreign(level)
    assert source_file(level) == file.resolve()
    assert source_text(level) == file.read_text()
    assert Task.parse({"kind": "Mine"}) == level()


def test_every_process_gives_the_module_the_same_name(write):
    file = write(LEVEL.format(name="Everywhere"), "my-own study.py")
    code = f"from harness.sources import load_source; print(load_source({str(file)!r}).Everywhere.__module__)"
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == load_source(file).Everywhere.__module__ == module_name(file)


def test_files_of_one_name_in_two_folders_are_two_modules(write, tmp_path):
    (tmp_path / "other").mkdir()
    first, second = write("x = 1"), write("x = 2", "other/mine.py")
    assert (load_source(first).x, load_source(second).x) == (1, 2)


def test_a_file_is_loaded_once_until_its_text_changes(write):
    file = write("x = []")
    first = load_source(file)
    assert load_source(str(file)) is first
    write("x = 22")  # as long, within the same second: the byte-code cache would not notice
    assert load_source(file).x == 22


def test_a_failed_second_edit_leaves_the_loaded_module_alone(write):
    file = write("x = 1")
    first = load_source(file)
    write("1 / 0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        load_source(file)
    assert sys.modules[module_name(file)] is first


def test_a_file_of_the_project_keeps_its_own_name():
    import tasks.copy

    assert load_source(ROOT / "tasks" / "copy.py") is tasks.copy
    assert not is_foreign(load_source(ROOT / "tasks" / "copy.py").Copy)


def test_a_file_can_import_its_neighbours_which_hide_no_package(write):
    write("y = 5", "neighbour_of_mine.py")
    write("raise RuntimeError('hides the standard library')", "copy.py")
    file = write("import copy, neighbour_of_mine; x = neighbour_of_mine.y")
    assert load_source(file).x == 5


def test_dataclasses_and_a_main_guard_work(write):
    file = write("""
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Point:
            x: int

        if __name__ == "__main__":
            raise RuntimeError
    """)
    assert load_source(file).Point(3).x == 3


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("x = 1\n1 / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("def f(:\n", 1, "SyntaxError: invalid syntax"),
        ("import nonsense_that_is_not_there\n", 1, "ModuleNotFoundError: No module named"),
        ("\n\nraise SystemExit(3)\n", 3, "SystemExit: 3"),
        ("assert False\n", 1, "AssertionError"),
        ("from tasks import Copy\n\nCopy(num_symbols=1)\n", 3, "Copy.num_symbols = 1: input should be greater"),
        ("from tasks import Copy\nCopy(num_symbol=4)\n", 2, "there is no such field in Copy; did you mean"),
        ("from tasks import Copy\nCopy().replace('x', 1)\n", 2, "Copy has no field 'x'"),
        ("def f():\n    raise ValueError('two\\nlines')\n\nf()\n", 2, "ValueError: two lines"),
    ],
)
def test_what_a_file_raises_is_one_sentence_with_file_and_line(write, text, line, words):
    file = write(text)
    with pytest.raises(UserError) as caught:
        load_source(file)
    message = str(caught.value)
    assert message.startswith(f"{file}, line {line}: ")
    assert words in message
    assert "\n" not in message
    assert module_name(file) not in sys.modules


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.py", None, "there is no such file"),
        ("folder", "", "this is a directory"),
        ("binary.py", b"\xff\xfe\x00", "this is not Python source"),
        ("null.py", b"x = 1\x00", "null bytes"),
        ("notes.txt", b"x = 1", "the name of a Python file ends in .py"),
    ],
)
def test_what_is_no_python_file_is_said_so(tmp_path, name, content, words):
    file = tmp_path / name
    if content == "":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        load_source(file)
    assert str(file) in str(caught.value)


def test_a_key_that_stands_twice_is_refused(write):
    file = write("""
        variants = {
            "a": 1,
            "b": {"a": 1},
            "a": 2,
        }
    """)
    with pytest.raises(UserError, match=r"mine\.py: the key 'a' of line 5 stands twice in its dictionary; rename one"):
        load_source(file)


def test_nothing_is_written_beside_the_file(write):
    file = write("x = 1")
    load_source(file)
    assert [path.name for path in file.parent.iterdir()] == ["mine.py"]


def test_ctrl_c_while_a_file_loads_is_ctrl_c(write):
    with pytest.raises(KeyboardInterrupt):
        load_source(write("raise KeyboardInterrupt"))


def test_a_home_directory_is_expanded(write, monkeypatch):
    file = write("x = 4")
    monkeypatch.setenv("HOME", str(file.parent))
    assert load_source(Path("~/mine.py")).x == 4


@pytest.mark.parametrize("first", ["level", "uses"])
def test_a_file_and_a_neighbour_that_imports_it_have_the_same_classes(write, first):
    level = write("class Thing:\n    pass\n", f"shared_by_{first}.py")
    uses = write(f"from {level.stem} import Thing\n", f"uses_{first}.py")
    files = [level, uses] if first == "level" else [uses, level]
    assert len({load_source(file).Thing for file in files}) == 1


def test_a_neighbour_imports_what_has_changed_since(write):
    level = write("class Thing:\n    changed = False\n", "changes_once.py")
    load_source(level)
    level.write_text("class Thing:\n    changed = True\n")
    assert load_source(level).Thing.changed
    assert load_source(write("from changes_once import Thing\n", "uses_what_changes.py")).Thing.changed
