"""How errors are put in words; numbers are tested where they are shown, in the report."""

import pytest

from harness.schema import UserError
from harness.wording import LONGEST, in_words


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
