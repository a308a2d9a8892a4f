"""A real SGLang server on a CPU, from the environment of ``sglang_env.sh``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rollover.engine.http.guard as guard
from rollover.engine.http.launch import free_port

STUBS = Path(__file__).with_name("sglang_stubs")
SLOTS = 16
COMMAND = (os.environ.get("SGLANG_PYTHON", "python"), "-m", "sglang.launch_server")
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(STUBS),
}
ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    *("--max-total-tokens", "16384", "--mem-fraction-static", "0.2", "--skip-server-warmup"),
)
_START_S, _GRACE_S, _POLL_S = 300.0, 10.0, 0.5


@contextmanager
def serving(model: Path, log: Path, *arguments: str) -> Iterator[str]:
    """The url of a server of ``model``; it ends with the block, or with this process."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [*COMMAND, "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += [*ARGUMENTS, "--max-running-requests", str(SLOTS), "--sleep-on-idle", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(_GRACE_S), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **ENV},
            start_new_session=True,
        )
    try:
        _wait(process, url, log)
        yield url
    finally:
        process.communicate()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up_s = time.monotonic() + _START_S
    while time.monotonic() < give_up_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/model_info", timeout=_START_S):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
    raise AssertionError("the server did not start:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:]))
