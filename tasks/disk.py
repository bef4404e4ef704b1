"""A cache on disk for what takes seconds to make and follows from its key alone, shared by all processes of a user."""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.record import write_atomically

DIGEST = hashlib.sha256().digest_size


def folder() -> Path:
    """`ablation-harness` in `$XDG_CACHE_HOME`, else in `~/.cache`; anything in it may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ablation-harness"


def cached(key: str, make: Callable[[], bytes]) -> bytes:
    """What `make` gives, from disk if it has been made before.

    Args:
        key: all that the result follows from, versions of libraries included.
        make: a pure function of the key.

    A file that is torn (its content no longer has the digest at its head) is made again. Where the folder cannot be
    written the result is only not kept.
    """
    file = folder() / hashlib.sha256(key.encode()).hexdigest()
    with suppress(OSError):
        digest, content = (stored := file.read_bytes())[:DIGEST], stored[DIGEST:]
        if hashlib.sha256(content).digest() == digest:
            return content
    content = make()
    with suppress(OSError):
        write_atomically(file, hashlib.sha256(content).digest() + content)
    return content
