"""Stands in for the kernels of SGLang, which have no build for a CPU without AMX. SGLang imports their names
everywhere and calls none of them with the settings used here: one that is called says so."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any, NoReturn

__path__: list[str] = []


class _Kernel:
    """Anything that may be looked up; nothing that may be used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Kernel:
        return _named(self._name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self._name} is a stub: it needs the real kernels")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> _Kernel:
        return _named(self.__name__, name)


class _Finder:
    """Finds every submodule of this package."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _named(owner: str, name: str) -> _Kernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kernel(f"{owner}.{name}")


sys.meta_path.append(_Finder())  # type: ignore[arg-type]
sys.modules[__name__].__class__ = _Module
