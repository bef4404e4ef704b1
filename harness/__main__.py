"""`python -m harness`: the console script without its installation."""

import sys

from harness.cli import main

if __name__ == "__main__":
    sys.exit(main())
