"""Scripted vLLM and SGLang servers that really compute: they sample from whatever weights they were told to load."""

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

from tests.engine.servers.scripted_server import Answer, ScriptedServer, ScriptedVLLM, serve
from tests.engine.servers.sglang.scripted import ScriptedSGLang
from tests.speed import within


def read_model(folder: Path) -> Any:
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_weights(model: Any, folder: str) -> None:
    model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)


def draw(logits: torch.Tensor, *, temperature: float, seed: int) -> tuple[int, float]:
    """A token and its log-prob."""
    logprobs = torch.log_softmax(logits / temperature, -1)
    token = int(torch.multinomial(logprobs.exp(), 1, generator=torch.Generator().manual_seed(seed)))
    return token, float(logprobs[token])


class ModelServer(ScriptedVLLM):
    """``stale_head`` keeps the output matrix it was started with, as vLLM's CPU build does with tied ones."""

    def __init__(self, folder: Path, *, context: int, stale_head: bool = False) -> None:
        super().__init__(tick_s=0.0, weights=str(folder))
        self.max_model_len = context
        self._model = read_model(folder)
        if stale_head:
            self._model.lm_head.weight = torch.nn.Parameter(self._model.lm_head.weight.detach().clone())
        self.vocab = self._model.config.vocab_size

    async def _post_collective_rpc(self, query: dict[str, str], body: Any) -> Answer:
        answer = await super()._post_collective_rpc(query, body)
        load_weights(self._model, self.weights)
        return answer

    def logits(self, ids: list[int], decoded: int) -> torch.Tensor:
        """Of the token behind ``ids``, the last ``decoded`` of which are of this call's own output."""
        with torch.no_grad():
            logits: torch.Tensor = self._model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            return logits

    def draw(self, logits: torch.Tensor, *, temperature: float, seed: int) -> tuple[int, float]:
        return draw(logits, temperature=temperature, seed=seed)

    def _draw(self, body: dict[str, Any], sampled: list[int]) -> tuple[int, float]:
        ids = [*body["prompt"], *sampled]
        logits = self.logits(ids, len(sampled))
        return self.draw(logits, temperature=body["temperature"], seed=body["seed"] + len(ids))


class SGLangModelServer(ScriptedSGLang):
    """The same before SGLang's endpoints."""

    def __init__(self, folder: Path, *, context: int) -> None:
        super().__init__(tick_s=0.0)
        self.max_req_input_len = context - 6
        self._model = read_model(folder)
        self.vocab = self._model.config.vocab_size

    async def _post_update_weights_from_disk(self, query: dict[str, str], body: Any) -> Answer:
        answer = await super()._post_update_weights_from_disk(query, body)
        load_weights(self._model, self.weights)
        return answer

    def _draw(self, body: dict[str, Any], sampled: list[int]) -> tuple[int, float]:
        ids, params = [*body["input_ids"], *sampled], body["sampling_params"]
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        return draw(logits, temperature=params["temperature"], seed=params["sampling_seed"] + len(ids))


@contextmanager
def serving(server: ScriptedServer) -> Iterator[str]:
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
    assert ready.wait(within(30))
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(within(30))
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.wait(pending) if pending else asyncio.sleep(0))
        loop.run_until_complete(asyncio.sleep(0.01))  # what they closed is closed in a later turn
        loop.close()
