"""Functions of the user's, named as path/to/file.py:function. Nothing heavy is imported here."""

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

MESSAGE_CHARS = 500


class LoadError(Exception):
    """The function cannot be had; the text says which and why."""


def describe(error: BaseException, path: str = "") -> str:
    """Type and message, and the line of `path` that it came from."""
    try:
        message = str(error)
    except Exception:  # it is the user's class
        message = "(its message cannot be shown)"
    text = type(error).__name__ + (f": {message}" if message else "")
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == path]
    text = text if len(text) <= MESSAGE_CHARS else text[:MESSAGE_CHARS] + "..."
    return text + (f" (line {lines[-1]} of {Path(path).name})" if lines else "")


def resolve(function: str) -> str:
    """path/to/file.py:function with its path made absolute.

    Raises:
        LoadError: it is no such text, or there is no such file.
    """
    path, _, name = function.rpartition(":")
    if Path(path).suffix != ".py" or not name.isidentifier():
        raise LoadError(f"is {function!r}, must be path/to/file.py:function")
    if not Path(path).is_file():
        raise LoadError(f"{path} is not a file (in {function!r})")
    return f"{Path(path).resolve()}:{name}"


def load(function: str) -> Callable[..., Any]:
    """The function of that file, which is imported.

    Raises:
        LoadError: the file cannot be imported, or has no such function.
    """
    path, _, name = function.rpartition(":")
    module = _import_file(path)
    target = getattr(module, name, None)
    if callable(target):
        return target
    own = [
        n
        for n, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    near = difflib.get_close_matches(name, own, n=1)
    hint = f" (did you mean `{near[0]}`?)" if near else ""
    raise LoadError(
        f"{path} has no function `{name}`{hint}; functions in it: {', '.join(own) or 'none'}"
    )


def _import_file(path: str) -> ModuleType:
    # The directory goes last: a neighbour called random.py must not replace the library's.
    sys.path.append(str(Path(path).parent))
    name = f"opo_user_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise LoadError(f"{path} cannot be imported: {describe(error, path)}") from None
    return module
