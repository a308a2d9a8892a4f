"""Finds a function of the user's and its parameters before it is called.

Importing it runs the user's module, which may raise, exit or hang: that is a ``DataError`` that names the module. The
run itself imports it only after a separate process has done so and returned (``python -m
rollover.environments.user_function MODULE``).
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache, partial
from typing import Any

from rollover.environments.keeper import describe_exit, environment, keep
from rollover.errors import DataError, nearest

PATH = re.compile(r"[\w.]+:\w+")
ALWAYS_GIVEN = ("prompts", "completions", "completion_ids", "transcripts")

_CAME_BACK = 79
"""Exit code of the process that imports a module when the import has ended, even with an exception."""
_IMPORT_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0
_MEND = "; move script code under `if __name__ == '__main__':`"
_GENERATORS = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def import_in_run(path: str, what: str = "function") -> Callable[..., Any]:
    """Import as ``import_function`` does, into the run itself: also ``DataError`` when importing the module ends the
    process or never ends."""
    _check_import(path.partition(":")[0], os.getcwd())
    return import_function(path, what)


@cache
def _check_import(module_name: str, folder: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "rollover.environments.user_function", module_name],
        cwd=folder,
        env=environment(),
        stdin=subprocess.PIPE,  # never written to: the keeper ends when it is closed
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as keeper:
        try:
            code = keeper.wait(_IMPORT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DataError(f"importing {module_name!r} took more than {_IMPORT_TIMEOUT_S:g} s{_MEND}") from None
        finally:
            assert keeper.stdin is not None
            keeper.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                keeper.wait(_END_TIMEOUT_S)
            keeper.kill()
    if code != _CAME_BACK:
        raise DataError(f"the process that imports the module {module_name!r} {describe_exit(code)}{_MEND}")


def import_function(path: str, what: str = "function") -> Callable[..., Any]:
    """Import ``"module:function"``; modules in the working directory are found too. ``what`` it is, for messages."""
    module_name, _, function_name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise DataError(
            f"{what} {path}: the module {module_name!r} ends the program when it is imported "
            f"(exit code {error.code}){_MEND}"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything on import
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        remedy = f"it must be installed or be in {os.getcwd()}" if is_missing else "fix it"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise DataError(f"{what} {path}: cannot import {module_name!r} ({reason}); {remedy}") from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        hint = nearest(function_name, names)
        raise DataError(f"{what} {path}: no function {function_name!r} in {module_name}{hint}")
    called = _unwrapped(function)
    if any(yields(f) for f in (called, type(called).__call__) for yields in _GENERATORS):
        raise DataError(f"{what} {path} is a generator: return a list in place of each yield")
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling ``function`` returns at once, with something to await: an ``async`` function, a
    ``functools.partial`` of one, or an instance whose ``__call__`` is one."""
    called = _unwrapped(function)
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(type(called).__call__)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def required_names(path: str, *, given: Collection[str]) -> tuple[str, ...]:
    """Return the arguments that the function requires, except the arguments ``given`` and the arguments that every
    function receives. Raises ``DataError`` like ``import_function``."""
    parameters = parameters_of(path, import_function(path))
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(p.name for p in by_name if p.default is p.empty and p.name not in {*ALWAYS_GIVEN, *given})


def accepted_names(
    path: str, function: Callable[..., Any], columns: Collection[str], params: Collection[str], whose: str
) -> set[str] | None:
    """Return the names that the function, called ``whose`` in errors, takes by keyword; ``None`` for any.

    Raises:
        DataError: it requires more than it can get, does not take one of ``params``, or caches by its arguments.
    """
    if hasattr(_unwrapped(function), "cache_info"):
        raise DataError(
            f"{whose} is wrapped in functools.cache or lru_cache, which cannot hash the lists that it is called with;"
            " cache a function that it calls instead"
        )
    offered = {*ALWAYS_GIVEN, *columns, *params}
    parameters = parameters_of(path, function)
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise DataError(
                f"{whose} takes {parameter.name!r} by position only; write it as f(prompts, completions, **columns)"
            )
        is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_one and parameter.default is parameter.empty and parameter.name not in offered:
            hint = nearest(parameter.name, offered)
            raise DataError(
                f"{whose} asks for {parameter.name!r}, which is neither prompts, "
                f"completions, completion_ids, transcripts, a column nor in reward.params{hint}"
            )
    names = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    for name in params:
        if name not in names:
            raise DataError(f"{whose} takes no {name!r} (reward.params){nearest(name, names)}")
    return names


def parameters_of(path: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function. Raises ``DataError`` if Python does not know them."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        raise DataError(f"function {path} has no signature; wrap it in a function of Python") from None


def _import_and_come_back() -> None:
    sys.path.append(os.getcwd())
    try:
        importlib.import_module(sys.argv[1])
    finally:
        os._exit(_CAME_BACK)  # the code that loads the function reports what it raised


if __name__ == "__main__":
    keep(_import_and_come_back)
