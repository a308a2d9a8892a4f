"""Sorts tests into tiers, skips what needs a GPU where there is none, and lends tiny experiments to end-to-end tests."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rollover import cli
from rollover.engine import sampling_check
from tests import runs, tiers, virtual_time

HAS_GPU = any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd"))

if not HAS_GPU:
    # Triton reads this when it is first imported (transformers does, where it is installed): its own functions are
    # then interpreted too, as ours are in the tests.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Ignored by what nohup or a script begins in the background, and by every process that it begins.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples in every run: a test fails for everyone or for nobody.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if tiers.is_deep(item.nodeid, getattr(item, "fixturenames", [])):
            item.add_marker(pytest.mark.deep)
            item.add_marker(pytest.mark.xdist_group(tiers.group(item.nodeid)))
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
    items.sort(key=lambda item: not item.nodeid.startswith(tiers.LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if any(item.get_closest_marker(tier) for tier in ("deep", "agents", "vllm", "sglang", "verl", "gpu")):
        return (yield)
    with tiers.shallow(item.nodeid):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in virtual time unless it waits for threads or processes."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run = asyncio.run if pyfuncitem.get_closest_marker("real_time") else virtual_time.run
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 model folder with a tokenizer of one token per character."""
    return runs.save_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process draw each prompt of the sampling check once: servers that are made of Python take seconds
    for all draws."""
    monkeypatch.setattr(sampling_check, "MAX_DRAWS", 1)


@pytest.fixture
def experiment(tiny_model: Path, tmp_path: Path, few_draws: None) -> Iterator[Path]:
    """The working directory, with ``run.toml`` and all it names in it."""
    with runs.working_in(tmp_path, tiny_model):
        yield tmp_path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> runs.Say:
    """What ``rollover`` says when it refuses what it is given."""

    def say(*argv: str) -> str:
        capsys.readouterr()
        assert cli.main(argv) == 2, capsys.readouterr().out[-500:]
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert err.startswith("error: ")
        return err.removeprefix("error: ").strip()

    return say


@pytest.fixture
def done(capsys: pytest.CaptureFixture[str]) -> runs.Say:
    """What ``rollover`` prints when it does what it is told."""

    def say(*argv: str) -> str:
        capsys.readouterr()
        assert cli.main(argv) == 0, capsys.readouterr().err[-2000:]
        return capsys.readouterr().out

    return say


@pytest.fixture
def processes(experiment: Path) -> runs.Processes:
    return runs.Processes(experiment)


@pytest.fixture
def harmless_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of a test can be imported here, without a process that tries it first."""
    monkeypatch.setattr("rollover.environments.user_function._check_import", lambda *found: None)
