"""Rewards of one's own: `verification.reward: package.module:function`.

    def score(problem: Mapping[str, Any], response: str, finish_reason: str) -> float | tuple[float, str]

`problem` is the problem's whole row of the problems table (problem_id, problem, answer, solution, subject, level,
source), `response` the decoded text, `finish_reason` `stop` or `length`. The result is the reward, or the reward and
its verdict (`VERDICTS`). docs/verification.md says what happens to exceptions, and where the function runs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import numbers
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from hacpo.errors import SettingsError
from hacpo.verifying.judgement import Given, Judgement, Outcome, failure

RewardFunction = Callable[[Mapping[str, Any], str, str], object]
"""(row of the problems table, response, finish reason) -> reward, or (reward, verdict)."""

VERDICTS = get_args(Given)
"""What a function may call a response; `error` and `timeout` are said of it, not by it."""

_INSTALLED = {"site-packages", "dist-packages"}


class UnusableError(Exception):
    """There is no such function, or it does not fit; the message is one line."""


def load(name: str, root: Path) -> RewardFunction:
    """The function `package.module:function`, its module found in the project's root first.

    Runs the module. Meant for a process of its own.

    Raises:
        UnusableError: the module cannot be imported, or holds no function that takes three arguments.
    """
    module_name, function_name = name.split(":")
    sys.path.insert(0, str(root.resolve()))
    sys.dont_write_bytecode = True  # bytecode of a file edited twice in a second would be taken for the file's
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # SystemExit too: whatever the module does, the caller gets one line
        raise UnusableError(f"importing {module_name} raised {described(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UnusableError(f"{module_name} has no function {function_name!r}")
    if inspect.iscoroutinefunction(function):
        raise UnusableError(f"{function_name} is asynchronous, expected a plain function")
    with contextlib.suppress(ValueError):  # no signature is known of some functions written in C
        try:
            inspect.signature(function).bind({}, "", "")
        except TypeError as error:
            raise UnusableError(f"{function_name} does not take (problem, response, finish_reason): {error}") from None
    return cast(RewardFunction, function)


def judge(function: RewardFunction, problem: Mapping[str, Any], response: str, finish_reason: str) -> Judgement:
    """The function's reward; `error` and no reward, with the reason, where it raises or returns something else.

    A reward without a verdict is `correct` above zero, else `wrong`. Rewards are rounded to float32, as tables hold
    them.
    """
    try:
        result = function(problem, response, finish_reason)
    except BaseException as error:  # SystemExit, RecursionError and MemoryError cost this response only, too
        return failure(described(error))
    value, verdict = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(value, numbers.Real) or not (verdict is None or isinstance(verdict, str)):
        return failure(f"returned {_kind(result)}, expected a number or (number, verdict)")
    try:
        (reward,) = struct.unpack("<f", struct.pack("<f", float(value)))
    except Exception:  # too large; or a number type of the user's that does not convert
        return failure("returned a reward that is too large for a float32")
    if not abs(reward) < float("inf"):
        return failure(f"returned the reward {reward}, expected a finite number")
    if verdict is None:
        verdict = "correct" if reward > 0 else "wrong"
    if verdict not in VERDICTS:
        return failure(f"returned the verdict {verdict!r}, expected one of {', '.join(VERDICTS)}")
    return Judgement(reward, cast(Outcome, verdict))


def _kind(result: object) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(part).__name__ for part in result)})"
    return type(result).__name__


def described(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero (rewards.py:7)`: what was raised, and in which line of whose file."""
    try:
        said = str(error)
    except Exception:  # an exception class of the user's whose __str__ fails
        said = ""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    theirs = [f" ({Path(file).name}:{line})" for file, line in places if file != __file__ and "importlib" not in file]
    line = theirs[-1] if theirs else ""
    return f"{type(error).__name__}{said and f': {said}'}{line}"


def module_file(name: str, root: Path) -> Path | None:
    """The file of the function's module, relative to the project's root; None where it lies elsewhere.

    Runs no code of the module's, nor of packages above it.

    Raises:
        SettingsError: there is no such module, neither in the project nor installed.
    """
    module = name.partition(":")[0]
    root = root.resolve()
    file = next((path for path in _places(module, root) if path.is_file()), None)
    if file is None:
        if _spec(module.partition(".")[0]) is None:
            raise SettingsError(
                f"there is no module {module!r}",
                where="verification.reward",
                expected=f"{module.replace('.', '/')}.py in the project, or an installed package",
            )
        return None  # no source file, or one that only an import can find
    file = file.resolve()
    inside = file.relative_to(root) if file.is_relative_to(root) else None
    if inside is None or any(part in _INSTALLED or part.startswith(".") for part in inside.parts):
        return None
    return inside


def _places(module: str, root: Path) -> Iterator[Path]:
    """Where the file may be, most likely first: the project, the import path, editable installs."""
    spec = _spec(module.partition(".")[0])
    editable: list[Path] = []
    if spec is not None and spec.origin is not None:
        origin = Path(spec.origin)
        editable = [origin.parent.parent if spec.submodule_search_locations else origin.parent]
    for base in (root, *map(Path, sys.path), *editable):
        stem = base.joinpath(*module.split("."))
        yield stem / "__init__.py"
        yield stem.with_suffix(".py")


def _spec(top: str) -> Any:
    try:
        return importlib.util.find_spec(top)
    except (ValueError, ImportError):
        return None
