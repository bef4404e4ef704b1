"""Loads a user's own Python file, so that the levels, tasks and ablations in it exist in this process.

The module's name is a function of the file's path alone: every process that loads the file gives its classes
the same `__module__`, and `harness.schema.source_file` finds the file again from it.
"""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.schema import OWN_PACKAGES, UserError
from harness.wording import in_words

ROOT = Path(__file__).resolve().parent.parent
TEXT = "__harness_source__"  # where a loaded module keeps the text it was made from


def load_source(path: str | Path) -> ModuleType:
    """The module that a Python file defines; loaded again only if the file's text has changed.

    A file of the project's own packages is imported under its own name. Any other can import its neighbours,
    as if it were run as a script; they come last on the path, so that none of them hides a package.

    Raises:
        UserError: no such file, the file raises (where, and what), or a dictionary in it names a key twice.
    """
    file = Path(path).expanduser().resolve()
    text = _read(file)
    name = module_name(file)
    known = sys.modules.get(name) or _imported(file)
    if known is not None and getattr(known, TEXT, text) == text:
        return known
    try:
        _refuse_repeated_keys(ast.parse(text, str(file)))
        return importlib.import_module(name) if _is_own(file) else _execute(name, file, text)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a file that exits defines nothing
        raise UserError(_sentence(file, error)) from error


def module_name(file: Path) -> str:
    """`ablations.position` for a file of the project, else `user_`, the file's stem, a hash of its path."""
    if _is_own(file):
        return ".".join(file.relative_to(ROOT).with_suffix("").parts)
    stem = re.sub(r"\W", "_", file.stem)
    return f"user_{stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


def _is_own(file: Path) -> bool:
    return file.is_relative_to(ROOT) and file.relative_to(ROOT).parts[0] in OWN_PACKAGES


def _read(file: Path) -> str:
    if file.is_dir():
        raise UserError(f"{file}: this is a directory; name a Python file in it")
    try:
        return importlib.util.decode_source(file.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{file}: there is no such file") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, SyntaxError) as error:
        raise UserError(f"{file}: this is not Python source ({error})") from error


def _refuse_repeated_keys(tree: ast.Module) -> None:
    """Python keeps the last of two equal keys: of two variants of one name the first would be gone, and nobody told.
    After an unpacking (`**other`) a key may replace an earlier one on purpose.
    """
    for node in ast.walk(tree):
        seen: set[Any] = set()
        for key in node.keys if isinstance(node, ast.Dict) else []:
            if key is None:
                seen.clear()
            elif isinstance(key, ast.Constant):
                if key.value in seen:
                    raise UserError(
                        f"the key {key.value!r} of line {key.lineno} stands twice in its dictionary; rename one"
                    )
                seen.add(key.value)


def _execute(name: str, file: Path, text: str) -> ModuleType:
    """Run the text as a module, without the byte-code cache: it takes a quick second edit for the first."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise UserError("the name of a Python file ends in .py")
    module = importlib.util.module_from_spec(spec)
    setattr(module, TEXT, text)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pydantic look their own module up while it runs
    try:
        exec(compile(text, str(file), "exec"), module.__dict__)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    if sys.modules.get(file.stem) is before and _can_be_imported(file):
        sys.modules[file.stem] = module  # a neighbour that imports it gets the same classes
    return module


def _imported(file: Path) -> ModuleType | None:
    """The module that a neighbour of this file has imported from it."""
    found = sys.modules.get(file.stem)
    return found if found is not None and getattr(found, "__file__", None) == str(file) else None


def _can_be_imported(file: Path) -> bool:
    """Whether `import` of the file's name gives this file, and not a package that has that name as well."""
    path = importlib.machinery.PathFinder.find_spec(file.stem)
    return path is not None and path.origin == str(file)


def _sentence(file: Path, error: BaseException) -> str:
    """File, line and exception in one sentence."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == str(file)), None)
    if isinstance(error, SyntaxError) and error.filename == str(file):
        line = error.lineno
    where = f"{file}, line {line}" if line else str(file)
    if isinstance(error, SyntaxError):  # in words it would name the place once more
        return f"{where}: {type(error).__name__}: {error.msg}"
    return f"{where}: {in_words(error)}"
