"""A real SGLang server on a CPU, from the environment of ``sglang_env.sh``."""

from __future__ import annotations

import os
from pathlib import Path

from tests.real.servers import RealServer

SLOTS = 16
COMMAND = (os.environ.get("SGLANG_PYTHON", "python"), "-m", "sglang.launch_server")
ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).with_name("sglang_stubs")),
}
ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    *("--max-total-tokens", "16384", "--mem-fraction-static", "0.2", "--skip-server-warmup"),
)


def sglang_server(model: Path, log: Path, *arguments: str) -> RealServer:
    own = ("--model-path", str(model), "--max-running-requests", str(SLOTS), "--sleep-on-idle")
    address = ("--host", "127.0.0.1", "--port")
    return RealServer(lambda port: [*COMMAND, *own, *address, str(port), *ARGUMENTS, *arguments], ENV, log)
