"""How errors are put in words; numbers are tested where they are shown, in the report."""

import errno

import pytest

from harness.schema import UserError
from harness.wording import LONGEST, full_disk, in_words


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("two\nlines"), "OSError: two lines"),
        (KeyError(), "KeyError"),
        (UserError("d_model = 0: choose\n more"), "d_model = 0: choose more"),
        (RuntimeError("x" * 1000), "RuntimeError: " + "x" * LONGEST),
        (UserError("x" * 1000), "x" * 1000),
    ],
)
def test_an_exception_becomes_one_line(error: Exception, said: str) -> None:
    assert in_words(error) == said


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/file"), "/a/file: no space left on device; mend that"),
        (OSError(errno.EDQUOT, "Quota exceeded", "/tmp/copied", None, "/a/file"), "/a/file: quota exceeded; mend that"),
        (OSError(errno.EROFS, "Read-only file system"), "the disk: read-only file system; mend that"),
        (OSError(errno.EACCES, "Permission denied", "/a/file"), ""),
        (ValueError("No space left on device"), ""),
    ],
)
def test_a_full_disk_is_told_from_other_errors(error: Exception, said: str) -> None:
    assert full_disk(error).startswith(said)
    assert bool(full_disk(error)) == bool(said)
