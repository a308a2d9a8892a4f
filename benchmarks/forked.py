"""``rollover`` in processes that are forked from one which has imported all that a run needs and compiled its kernels:
they start in a fraction of a second. What they print goes to a file each; whoever started them ends them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
HEAD_DIM, BLOCK_SIZE, GROUP = 32, 32, 1
"""Of the models that the benchmarks make; kernels are compiled for these sizes before the first fork."""
LEAVE_S = 20.0


def preload() -> None:
    """Import and compile; called in the server from which processes are forked."""
    import transformers.models.qwen3  # noqa: F401

    import rollover.run.session
    import rollover.swarm.coordinator.open
    import rollover.swarm.worker.joining
    import rollover.trainer.sft  # noqa: F401
    from rollover.engine.embedded.native import compiled
    from rollover.errors import EngineError

    with contextlib.suppress(EngineError):  # there is no compiler: runs fall back as well
        compiled(HEAD_DIM, BLOCK_SIZE, GROUP)


class Forks:
    """Processes of ``rollover``, each started in ``cwd``.

    Example: ``with Forks() as forks: forks.start("trainer", folder, "train", "run.toml").join()``
    """

    def __init__(self) -> None:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT)])  # of the server and what it forks
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        sys.path[:0] = [place for place in (str(HERE), str(ROOT)) if place not in sys.path]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["preloaded"])
        forkserver.ensure_running()
        self._started: list[Any] = []

    def start(self, log: Path, cwd: Path, *argv: str, machine: Any = None, report: Path | None = None) -> Any:
        """Start ``rollover argv``, held back to the speed of ``machine`` where one is given."""
        process = self._context.Process(target=_main, args=(str(log), str(cwd), argv, machine, report))
        process.start()
        self._started.append(process)
        return process

    def call(self, function: Any, *args: Any) -> None:
        """Run a function of a module to its end. Raises ``RuntimeError`` when it fails."""
        process = self._context.Process(target=function, args=args)
        process.start()
        self._started.append(process)
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{function.__name__} ended with {process.exitcode}")

    def end(self, processes: Sequence[Any]) -> None:
        """Ask processes to leave, and kill those that do not."""
        for process in processes:
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGTERM)
        for process in processes:
            process.join(LEAVE_S)
            if process.exitcode is None:
                process.kill()
                process.join()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            if process.exitcode is None:
                process.kill()
                process.join()


def _main(log: str, cwd: str, argv: Sequence[str], machine: Any, report: Path | None) -> None:
    import torch

    from rollover import cli

    torch.set_num_threads(1)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(cwd)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if machine is not None:
        from edge import hold_back

        assert report is not None
        hold_back(machine, report)
    code = cli.main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
