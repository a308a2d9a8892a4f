"""A scripted vLLM server that really computes: it samples from whatever weights it was told to load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.engine.servers.scripted_server import Answer, ScriptedVLLM, _Running, serve


class ModelServer(ScriptedVLLM):
    """``stale_head`` keeps the output matrix it was started with, as vLLM's CPU build does with tied ones."""

    def __init__(self, folder: Path, *, context: int, stale_head: bool = False) -> None:
        super().__init__(tick_s=0.0, weights=str(folder))
        logging.disable_progress_bar()
        self.max_model_len = context
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if stale_head:
            self._model.lm_head.weight = torch.nn.Parameter(self._model.lm_head.weight.detach().clone())
        self.vocab = self._model.config.vocab_size

    async def _post_collective_rpc(self, query: dict[str, str], body: Any) -> Answer:
        answer = await super()._post_collective_rpc(query, body)
        self._model.load_state_dict(load_file(Path(self.weights) / "model.safetensors"), strict=False)
        return answer

    def logits(self, ids: list[int], decoded: int) -> torch.Tensor:
        """Of the token behind ``ids``, the last ``decoded`` of which are of this call's own output."""
        with torch.no_grad():
            logits: torch.Tensor = self._model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            return logits

    def _decode(self, name: str, running: _Running) -> None:
        body = running.body
        ids = running.__dict__.setdefault("ids", list(body["prompt"]))
        logits = self.logits(ids, running.decoded)
        logprobs = torch.log_softmax(logits / body["temperature"], -1)
        generator = torch.Generator().manual_seed(body["seed"] + len(ids))
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
        ids.append(token)
        running.unsent.append((token, float(logprobs[token])))
        running.decoded += 1
        if token in body["stop_token_ids"]:
            self._finish(name, "stop", token)
        elif running.decoded == body["max_tokens"]:
            self._finish(name, "length")
        elif running.first or len(running.unsent) >= body["stream_interval"]:
            running.flush(None)


@contextmanager
def serving(server: ScriptedVLLM) -> Iterator[str]:
    """The address of ``server``, in a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    address: list[str] = []
    ready, done = threading.Event(), asyncio.Event()

    async def main() -> None:
        async with serve(server) as port:
            address.append(f"http://127.0.0.1:{port}")
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(30)
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.wait(pending) if pending else asyncio.sleep(0))
        loop.run_until_complete(asyncio.sleep(0.01))  # what they closed is closed in a later turn
        loop.close()
