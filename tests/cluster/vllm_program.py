"""A program that takes vLLM's arguments and is a scripted vLLM server: ``python -m tests.cluster.vllm_program serve DIR
--host H --port P ...``. It writes a file ``PORT.pid`` into the folder that ``PROGRAM_NOTES`` names."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.engine.servers.scripted_server import ScriptedVLLM, serve


async def main(folder: str, host: str, port: int) -> None:
    server = ScriptedVLLM(weights=folder)
    server.api_key = os.environ.get("VLLM_API_KEY")
    async with serve(server, host=host, port=port):
        notes = Path(os.environ["PROGRAM_NOTES"])
        (notes / f"{port}.pid").write_text(str(os.getpid()))
        (notes / f"{port}.arguments").write_text(" ".join(sys.argv))
        print(f"serving on {host}:{port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    given = dict(zip(sys.argv[2:], sys.argv[3:], strict=False))
    asyncio.run(main(sys.argv[2], given["--host"], int(given["--port"])))
