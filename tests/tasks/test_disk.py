"""The cache on disk gives what was made, once; torn files and folders that cannot be written cost time only."""

from pathlib import Path

import pytest

from tasks import disk
from tasks.disk import cached


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return []


def make(made: list[bytes], content: bytes) -> bytes:
    made.append(content)
    return content


def test_it_is_made_once_a_key(made: list[bytes]) -> None:
    for content in (b"", b"bytes\n", bytes(range(256))):
        key = repr(content)
        assert [cached(key, lambda content=content: make(made, content)) for _ in range(3)] == [content] * 3
    assert made == [b"", b"bytes\n", bytes(range(256))]


@pytest.mark.parametrize("torn", [b"", b"short", b"x" * 100])
def test_a_torn_file_is_made_again(made: list[bytes], torn: bytes) -> None:
    cached("key", lambda: make(made, b"content"))
    (file,) = disk.folder().iterdir()
    file.write_bytes(torn)
    assert cached("key", lambda: make(made, b"content")) == b"content"
    assert cached("key", lambda: make(made, b"content")) == b"content"
    assert len(made) == 2


def test_a_folder_that_cannot_be_made_keeps_nothing(made: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert [cached("key", lambda: make(made, b"content")) for _ in range(2)] == [b"content"] * 2
    assert len(made) == 2


def test_an_error_leaves_nothing(made: list[bytes]) -> None:
    with pytest.raises(ZeroDivisionError):
        cached("key", lambda: bytes(1 // 0))
    assert cached("key", lambda: make(made, b"content")) == b"content"
