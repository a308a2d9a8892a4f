"""What a turn of an episode costs in prefill: how much of its context an engine finds in its cache.

    python benchmarks/turns.py --out benchmarks/results/turns-DATE.json                        # the embedded engine
    python benchmarks/turns.py --vllm-python .venv-vllm/bin/python --sglang-python .venv-sglang/bin/python --out FILE

Sixteen episodes side by side, four of each prompt: a prompt of 300 tokens, then six turns of 40 sampled tokens with
observations of 100 between them. A call sends the whole context. New in it are the observation and the last sampled
token, which the engine has not run through the model yet; in a first call, the prompt. All else could be found, and
engines count what they find: in the embedded engine's statistics and in the counters that servers publish. No weights
change meanwhile, as in a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from engine import machine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

PROMPTS, SIBLINGS, TURNS = 4, 4, 6
PROMPT, SAMPLED, OBSERVED, TOOL_S = 300, 40, 100, 0.05
NAMES = {"vllm": "vllm:prefix_cache_hits_total", "sglang": "sglang:cached_tokens_total"}
"""Tokens of requests that were in the cache, as each server counts them."""


class Episode:
    """One of the siblings of a prompt, played turn by turn."""

    def __init__(self, prompt: int, sibling: int, vocabulary: int) -> None:
        self._name, self._seed = f"{prompt}.{sibling}", sibling
        self._prompt_ids = tuple(random.Random(prompt).choices(range(5, vocabulary), k=PROMPT))
        self._lots, self._vocabulary = random.Random(self._name), vocabulary
        self._response: tuple[int, ...] = ()

    async def play(self, engine: Any, turns: Sequence[int]) -> int:
        """Play these turns. Return the tokens of their contexts."""
        from tests.engine.contract import collect, request, tokens

        sent = 0
        for turn in turns:
            if turn:
                await asyncio.sleep(TOOL_S)
                self._response += tuple(self._lots.choices(range(5, self._vocabulary), k=OBSERVED))
            sent += PROMPT + len(self._response)
            call = request(
                self._name, prompt_ids=self._prompt_ids, response_ids=self._response, call=turn,
                max_new_tokens=len(self._response) + SAMPLED, seed=self._seed,
            )  # fmt: skip
            self._response += tokens(await collect(engine, call))
        return sent


async def measured(engine: Any, found: Callable[[], int], vocabulary: int) -> dict[str, Any]:
    """Play all episodes over an engine that counts what it ``found`` in its cache."""
    episodes = [Episode(i, k, vocabulary) for i in range(PROMPTS) for k in range(SIBLINGS)]
    rows: dict[str, Any] = {}
    for name, turns in (("first turns", range(1)), ("later turns", range(1, TURNS))):
        before = found()
        sent = sum(await asyncio.gather(*(one.play(engine, turns) for one in episodes)))
        in_cache, num_turns = found() - before, len(turns) * len(episodes)
        new = num_turns * (OBSERVED + 1) if turns[0] else PROMPTS * PROMPT
        rows[name] = {
            "sent_tokens_per_turn": sent / num_turns,
            "new_tokens_per_turn": new / num_turns,
            "prefilled_tokens_per_turn": round((sent - in_cache) / num_turns, 1),
            "found_of_findable": round(in_cache / (sent - new), 4),
        }
    return rows


def counted(url: str, name: str) -> int:
    """Return the sum of a server's counter over its labels."""
    page = httpx.get(f"{url}/metrics", trust_env=False).raise_for_status().text
    rows = [line for line in page.splitlines() if line.startswith(name)]
    return round(sum(float(line.rpartition(" ")[2]) for line in rows))


@asynccontextmanager
async def served(kind: str, python: str, folder: Path) -> AsyncIterator[tuple[Any, Callable[[], int]]]:
    """Start a real server as the tests do and open an engine over it."""
    os.environ[f"{kind.upper()}_PYTHON"] = python
    if kind == "vllm":
        from tests.real import test_vllm as real

        config = real.VLLMConfig(launch=True, launch_command=real.COMMANDS[1], max_running=real.MAX_RUNNING)
        server = real.RealServer(
            lambda port: [*real.COMMANDS[1], *real.launch_arguments(config, folder, port), *real.ARGUMENTS],
            real.ENV,
            folder.parent / "vllm.log",
        )
        opened = lambda: real.engine_of(server, folder)  # noqa: E731
    else:
        from tests.real import test_sglang
        from tests.real.sglang_server import sglang_server

        server = sglang_server(folder, folder.parent / "sglang.log", "--enable-metrics")
        opened = lambda: test_sglang.opened(server.url, folder)  # noqa: E731
    server.start()
    try:
        await asyncio.to_thread(server.wait_until_ready)
        async with opened() as engine:
            yield engine, lambda: counted(server.url, NAMES[kind])
    finally:
        await asyncio.to_thread(server.stop)


async def embedded(folder: Path, vocabulary: int) -> dict[str, Any]:
    from rollover.engine.embedded import EmbeddedConfig
    from rollover.engine.embedded.engine import EmbeddedEngine

    engine = EmbeddedEngine.from_folder(folder, EmbeddedConfig(max_running=PROMPTS * SIBLINGS, kv_cache_bytes=2**28))
    try:
        return await measured(engine, lambda: engine.stats().cached_tokens, vocabulary)
    finally:
        await engine.close()


async def real(kind: str, python: str, folder: Path, vocabulary: int) -> dict[str, Any]:
    async with served(kind, python, folder) as (engine, found):
        return await measured(engine, found, vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="of an environment with vLLM for this processor")
    parser.add_argument("--sglang-python")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from tests.real.models import real_model

    with tempfile.TemporaryDirectory() as name:
        folder = real_model(Path(name) / "model", max_position=8192)
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        found = {"embedded": asyncio.run(embedded(folder, vocabulary))}
        for kind, python in (("vllm", options.vllm_python), ("sglang", options.sglang_python)):
            if python:
                found[kind] = asyncio.run(real(kind, python, folder, vocabulary))
    for kind, row in found.items():
        print(kind, json.dumps(row))
    record = {"date": str(date.today()), "machine": machine(), "engines": found}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
