"""SGLang 0.5.15 as slime has it: scripted workers behind a scripted router, and slime's weight updates of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from tests.engine.servers.scripted_server import Answer, ScriptedServer, logprob_at, serve
from tests.engine.servers.sglang.scripted import ScriptedSGLang
from tests.speed import within

KNOWN = {
    *("rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("return_text_in_logprobs", "stream"),
}
KNOWN_PARAMS = {
    *("max_new_tokens", "min_new_tokens", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "stop", "stop_token_ids", "ignore_eos", "no_stop_trim"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
}


class OldSGLang(ScriptedSGLang):
    """A worker that names the weights of a whole answer, streams only when asked to, and knows no newer field."""

    def __init__(self, *, tick_s: float = 0.001, mean_tokens: float = 16.0, **settings: Any) -> None:
        super().__init__(tick_s=tick_s, **settings)
        self.max_req_input_len = 10**5
        self.reports_spans = False
        self.eos = 0
        self.mean_tokens = mean_tokens
        self.runs_on: Callable[[int, int], bool] = lambda group, num_input_tokens: False
        """Which calls, by the group of their sample and the length of their input, have no end of their own."""
        self.has_new_paths = True
        self.draws_by_seed = False
        """As with --enable-deterministic-inference: a request without a seed has the same one as all others."""
        self.fails: Callable[[Sequence[int]], bool] = lambda input_ids: False
        """Which prompts it cannot serve."""
        self.says: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
        """Changes an answer before it is sent."""

    def updated(self, update: int) -> None:
        """slime has given it new weights."""
        assert not self.requests, "slime's weights come between rollouts"
        self.weights = f"weights {update}"
        self.version = self.scheduler_version = str(update)

    def _offers(self, path: str) -> bool:
        return self.has_new_paths or path not in ("/model_info", "/server_info")

    async def _get_server_info(self, query: dict[str, str], body: Any) -> Answer:
        answer = await super()._get_server_info(query, body)
        assert isinstance(answer.body, dict)
        return Answer(body={**answer.body, "enable_deterministic_inference": self.draws_by_seed})

    _get_get_model_info = ScriptedSGLang._get_model_info
    _get_get_server_info = _get_server_info

    def _decode(self, name: str, running: Any) -> None:
        """An end token where the response is to end: a geometric law, so that resumed responses keep to it."""
        position = len(running.sampled)
        if position != running.body["stop_at"] or list(self.requests).index(name) >= self.slots:
            super()._decode(name, running)
            return
        logprob = logprob_at(running.body["sampling_params"]["sampling_seed"], position, self.weights)
        running.sampled.append([logprob, self.eos, None])
        self.sampled.add((self.weights, 0, round(logprob, 9)))
        self.decoded_tokens += 1
        self._finish(name, {"type": "stop", "matched": self.eos})

    async def _post_generate(self, query: dict[str, str], body: Any) -> Answer:
        params = body["sampling_params"]
        known = KNOWN_PARAMS | {"sampling_seed"} if self.draws_by_seed else KNOWN_PARAMS
        if unknown := (body.keys() - KNOWN) | (params.keys() - known):
            return Answer(500, {"error": {"message": f"unexpected keyword argument {min(unknown)!r}"}})
        if self.fails(body["input_ids"]):
            return Answer(400, {"error": {"message": "not this one"}})
        found = re.search(r"g(\d+)\.(\d+)(?=#)", body["rid"])
        sample = (int(found[1]), int(found[2])) if found else (0, 0)
        drawn = hashlib.blake2b(f"{sample} {body['input_ids']}".encode(), digest_size=8).digest()
        params["sampling_seed"] = params.get("sampling_seed", 42) if self.draws_by_seed else int.from_bytes(drawn[:4])
        share = (1 + int.from_bytes(drawn[4:])) / 2**32
        runs_on = self.runs_on(sample[0], len(body["input_ids"]))
        body["stop_at"] = -1 if runs_on else int(math.log(share) / math.log(1 - 1 / self.mean_tokens))
        params["stream_interval"] = 1
        if body["stream"]:
            return await super()._post_generate(query, body)
        events = [piece async for piece in self._stream(body) if piece.startswith(b"data: {")]
        return Answer(body=self.says(json.loads(events[-1].removeprefix(b"data: "))))


class Router(ScriptedServer):
    """A router that lists its workers."""

    generate_path = "/generate"

    def __init__(self, urls: Sequence[str] = ()) -> None:
        super().__init__()
        self.urls = list(urls)

    async def _get_workers(self, query: dict[str, str], body: Any) -> Answer:
        return Answer(body={"workers": [{"url": url, "worker_type": "regular"} for url in self.urls]})


class Farm:
    """Workers and a router on ports of the loopback interface, served by a thread of their own."""

    def __init__(
        self, workers: Mapping[str, OldSGLang], loop: asyncio.AbstractEventLoop, router: type[Router] = Router
    ) -> None:
        self.workers = [*workers.values()]
        self.router = router([*workers])
        self.port = 0
        self.update = 0
        self._loop = loop

    def update_weights(self) -> None:
        """As slime at its start and after each training step."""
        self.update += 1
        for worker in self.workers:
            worker.updated(self.update)

    def restart_count(self) -> None:
        """A new process of slime counts from 1 again."""
        self.update = 0

    def restart(self) -> None:
        """New workers at the old addresses: whatever was asked of the old ones is gone."""

        async def anew() -> None:
            for worker in self.workers:
                worker.restart()

        asyncio.run_coroutine_threadsafe(anew(), self._loop).result(30.0)
        self.restart_count()

    def kill(self, number: int) -> None:
        """As SIGKILL of a worker."""
        self._loop.call_soon_threadsafe(self.workers[number].kill)

    @property
    def sampled(self) -> set[tuple[str, int, float]]:
        """(weights, token, log-prob) of everything that was decoded."""
        return set().union(*(worker.sampled for worker in self.workers))

    @property
    def decoded_tokens(self) -> int:
        return sum(worker.decoded_tokens for worker in self.workers)


@contextmanager
def farm(router: type[Router] = Router) -> Iterator[Farm]:
    """Two workers."""
    loop, ready, leave = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    made: list[Farm] = []

    async def live() -> None:
        async with AsyncExitStack() as stack:
            workers = {}
            for worker in (OldSGLang(), OldSGLang()):
                workers[f"http://127.0.0.1:{await stack.enter_async_context(serve(worker))}"] = worker
            new = Farm(workers, loop, router)
            new.port = await stack.enter_async_context(serve(new.router))
            made.append(new)
            ready.set()
            await leave.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(live()), daemon=True)
    thread.start()
    assert ready.wait(within(30.0)), "the scripted servers did not start"
    try:
        yield made[0]
    finally:
        loop.call_soon_threadsafe(leave.set)
        thread.join(within(30.0))
        loop.close()
