"""An experiment for processes. Tests may be coroutines: each runs in an event loop of its own, with a deadline, or in
virtual time if its module says ``IN_VIRTUAL_TIME``."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path

import pytest

from tests import runs
from tests.speed import within

DEADLINE_S = within(200.0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or getattr(pyfuncitem.module, "IN_VIRTUAL_TIME", False):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def law() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await pyfuncitem.obj(**given)

    asyncio.run(law())
    return True


@pytest.fixture
def experiment_folder(tiny_model: Path, tmp_path: Path) -> Path:
    return runs.write_experiment(tmp_path, tiny_model).parent
