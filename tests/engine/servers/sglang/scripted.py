"""A scripted SGLang server, with the peculiarities of version 0.5.23.

It is two processes: the front, which takes calls and streams answers, and the scheduler, which hears of what the front
was told ``lag_s`` later and, except for ``/server_info``, tells nobody when.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from tests.engine.servers.scripted_server import CONTEXT, Answer, ScriptedServer

if TYPE_CHECKING:
    from tests.engine.servers.meetings import Meetings, Seat

MODEL_TYPE = "qwen3"


class _Running:
    """A request: what the scheduler has sampled, and what the front has of it."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        self.sampled: list[list[Any]] = []
        self.ids: list[int] = []
        self.pairs: list[list[Any]] = []
        self.changes: list[tuple[str, int]] = []
        """Versions that were replaced, and how many tokens had been sampled then."""
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.abort_sent = self.to_finish = False


class ScriptedSGLang(ScriptedServer):
    """An SGLang worker. ``requests`` are known to the scheduler, in its order; it runs the first ``slots``.
    ``aborts_by_id`` is false while aborts come too early: they are remembered and have no effect."""

    generate_path, load_path = "/generate", "/update_weights_from_disk"

    def __init__(self, *, incremental: bool = False, lag_s: float = 0.0, slots: int = 64, tick_s: float = 0.01) -> None:
        super().__init__(tick_s=tick_s)
        self.incremental = incremental
        self.lag_s = lag_s
        self.slots = slots
        self.model_type = MODEL_TYPE
        self.model_path = "/elsewhere"
        self.preferred_sampling_params: dict[str, Any] | None = None
        self.max_req_input_len = CONTEXT - 6
        self.reports_spans = True
        self.eos: int | None = None
        """Ends requests that do not ignore it."""
        self.dp_size = 1
        self.scheduler_version = "default"
        self.meetings: Meetings | None = None
        self.seat: Seat | None = None
        """Where its workers sit."""
        self.session = False
        """Whether weights may come."""
        self._gate = asyncio.Event()
        """Closed while the front is paused: new calls wait there."""
        self._gate.set()
        self._retracts = False
        self._fronted: dict[str, _Running] = {}

    def restart(self) -> None:
        super().restart()
        self.scheduler_version = "default"
        self._fronted.clear()
        self._gate.set()

    # -- control ---------------------------------------------------------------------------------------------

    async def _get_model_info(self, query: dict[str, str], body: Any) -> Answer:
        return Answer(
            body={
                "model_path": self.model_path,
                "is_generation": True,
                "weight_version": self.version,
                "model_type": self.model_type,
                "preferred_sampling_params": self.preferred_sampling_params,
            }
        )

    async def _get_server_info(self, query: dict[str, str], body: Any) -> Answer:
        await asyncio.sleep(self.lag_s)
        return Answer(
            body={
                "max_req_input_len": self.max_req_input_len,
                "incremental_streaming_output": self.incremental,
                "tp_size": 2,
                "dp_size": self.dp_size,
                "pp_size": 1,
                "enable_memory_saver": self.can_sleep,
                "internal_states": [{}],
                "enable_lora": self.adapters is not None,
                "max_lora_rank": self.adapter_rank,
                "lora_target_modules": ["lm_head"],
            }
        )

    async def _get_health(self, query: dict[str, str], body: Any) -> Answer:
        return Answer(200 if self._gate.is_set() else 503)

    async def _get_v1_loads(self, query: dict[str, str], body: Any) -> Answer:
        running = min(len(self.requests), self.slots)
        return Answer(body={"loads": [{"num_running_reqs": running, "num_waiting_reqs": len(self.requests) - running}]})

    async def _post_pause_generation(self, query: dict[str, str], body: Any) -> Answer:
        if body is None:
            return Answer(400, {"message": "Field required"})
        self._gate.clear()
        if self.lag_s:
            asyncio.get_running_loop().call_later(self.lag_s, self._pause, body["mode"])
        else:
            self._pause(body["mode"])
        return Answer(body={"status": "ok"})

    def _pause(self, mode: str) -> None:
        self.paused = True
        self._retracts = mode == "retract"

    async def _post_continue_generation(self, query: dict[str, str], body: Any) -> Answer:
        if body is None:
            return Answer(400, {"message": "Field required"})
        self.paused = self._retracts = False
        self._gate.set()
        for running in list(self.requests.values()):
            self._go_on(running)
        return Answer(body={"status": "ok"})

    def _go_on(self, running: _Running) -> None:
        if self._ticker is None or self._ticker.done():
            self._start(running.body["rid"], running)

    async def _post_abort_request(self, query: dict[str, str], body: Any) -> Answer:
        if body["abort_all"]:
            self._schedule_abort("")
        elif body["rid"]:
            self._abort_request(body["rid"])
        return Answer()

    def _abort_request(self, rid: str) -> None:
        known = self._fronted.get(rid)
        if known is None or known.abort_sent:
            return
        known.abort_sent = True
        if self.aborts_by_id and rid in self.requests:
            self._schedule_abort(rid)

    def _schedule_abort(self, prefix: str) -> None:
        for number, (rid, running) in enumerate(list(self.requests.items())):
            if rid.startswith(prefix):
                if number >= self.slots or self._retracts:
                    self._abort_queued(rid, running)
                else:
                    running.to_finish = True

    async def _post_update_weight_version(self, query: dict[str, str], body: Any) -> Answer:
        if body.get("abort_all_requests", True):
            self._schedule_abort("")
        self.version = self.scheduler_version = body["new_version"]
        return Answer(body={"success": True})

    async def _post_release_memory_occupation(self, query: dict[str, str], body: Any) -> Answer:
        """It says nothing of it when it cannot, and dies when it is not idle."""
        assert body["tags"] == ["weights", "kv_cache", "cuda_graph"]
        if self.requests or not self.paused:
            return self.die()
        self.asleep.update(body["tags"])
        self.weights = "nothing"
        return Answer()

    async def _post_resume_memory_occupation(self, query: dict[str, str], body: Any) -> Answer:
        """It dies when it is asked to take what it has."""
        if not self.asleep >= {*body["tags"]}:
            return self.die()
        self.asleep -= {*body["tags"]}
        return Answer()

    async def _post_update_weights_from_disk(self, query: dict[str, str], body: Any) -> Answer:
        assert "weights" not in self.asleep
        if self.load_error is not None:
            return Answer(400, {"success": False, "message": self.load_error})
        return self._updated(body["model_path"], body)

    async def _post_load_lora_adapter(self, query: dict[str, str], body: Any) -> Answer:
        if self.adapters is None:
            return Answer(400, {"success": False, "error_message": "LoRA is not enabled.", "loaded_adapters": None})
        self.adapters[body["lora_name"]] = body["lora_path"]
        return Answer(body={"success": True, "error_message": "", "loaded_adapters": self.adapters})

    async def _post_unload_lora_adapter(self, query: dict[str, str], body: Any) -> Answer:
        assert self.adapters is not None
        while any(running.body.get("lora_path") == body["lora_name"] for running in self._fronted.values()):
            await asyncio.sleep(self.tick_s)
        del self.adapters[body["lora_name"]]
        return Answer(body={"success": True, "error_message": "", "loaded_adapters": self.adapters})

    def _updated(self, weights: str, body: Any) -> Answer:
        self.weights = weights
        if body.get("weight_version") is None:
            return Answer(body={"success": True, "message": "Succeeded"})
        for running in self.requests.values():
            if running.sampled and body["weight_version"] != self.scheduler_version:
                running.changes.append((self.scheduler_version, len(running.sampled)))
        self.scheduler_version = body["weight_version"]
        if body.get("flush_cache", True) and self.requests and not self._retracts:
            return Answer(400, {"success": False, "message": "Weights were updated, but the cache was not flushed"})
        self.version = body["weight_version"]
        return Answer(body={"success": True, "message": "Succeeded", "num_paused_requests": 0})

    # -- weights through a process group ---------------------------------------------------------------------

    async def _post_init_weights_update_group(self, query: dict[str, str], body: Any) -> Answer:
        assert self.meetings is not None
        self.seat = self.meetings.meet(body, 2)
        return Answer(body={"success": True, "message": "Succeeded"})

    async def _post_begin_weight_update(self, query: dict[str, str], body: Any) -> Answer:
        return self._session(open_now=True)

    async def _post_end_weight_update(self, query: dict[str, str], body: Any) -> Answer:
        return self._session(open_now=False)

    def _session(self, *, open_now: bool) -> Answer:
        if self.session == open_now:
            return Answer(400, {"success": False, "message": "a weight-update session is already open, or none is"})
        self.session = open_now
        return Answer(body={"success": True, "message": "Success"})

    async def _post_update_weights_from_distributed(self, query: dict[str, str], body: Any) -> Answer:
        assert self.seat is not None and self.session and body["load_format"] == "flattened_bucket"
        try:
            weights = await self.seat.receive(body["names"], body["dtypes"], body["shapes"])
        except RuntimeError as e:
            return Answer(400, {"success": False, "message": str(e)})
        if self.load_error is not None:
            return Answer(400, {"success": False, "message": self.load_error})
        return self._updated(weights, body)

    async def _post_destroy_weights_update_group(self, query: dict[str, str], body: Any) -> Answer:
        if self.seat is not None:
            self.seat.leave()
        return Answer(body={"success": True, "message": "Succeeded"})

    # -- decoding --------------------------------------------------------------------------------------------

    async def _post_generate(self, query: dict[str, str], body: Any) -> Answer:
        params = body["sampling_params"]
        if not all(0 <= int(token) < self.vocab for token in params.get("logit_bias", {})):
            return Answer(400, {"error": {"message": "logit_bias must has keys in the vocabulary"}})
        if body.get("stream"):
            return Answer(stream=self._stream(body), headers={"content-type": "text/event-stream"})
        await self._gate.wait()
        spans = {"weight_versions": [{"version": self.version, "start": 0, "end": 1}]} if self.reports_spans else {}
        return Answer(body={"output_ids": [0], "meta_info": {"completion_tokens": 1, **spans}})

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        rid, running = body["rid"], _Running(body)
        self._fronted[rid] = running
        try:
            await self._gate.wait()
            if len(body["input_ids"]) >= self.max_req_input_len:
                reason = {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"}
                self._send(running, reason)
            else:
                self._start(rid, running)
            async with aclosing(self._events(running)) as pieces:
                async for piece in pieces:
                    yield piece
            yield b"data: [DONE]\n\n"
        finally:
            self._fronted.pop(rid, None)
            self.requests.pop(rid, None)
            asyncio.get_running_loop().call_later(2.0, self._abort_whoever, rid)

    def _abort_whoever(self, rid: str) -> None:
        """In case the client had hung up; meanwhile the id may be another request's."""
        if rid in self.requests:
            self._abort_request(rid)

    def _decode(self, name: str, running: _Running) -> None:
        if list(self.requests).index(name) >= self.slots:
            return
        params, position = running.body["sampling_params"], len(running.sampled)
        token, logprob = self._draw(running.body, [token for _, token, _ in running.sampled])
        running.sampled.append([logprob, token, None])
        self.decoded_tokens += 1
        text = "".join(self.text.get(token, "") for _, token, _ in running.sampled)
        matched = next((s for s in params["stop"] if s in text), None)
        ends = token in params["stop_token_ids"] or token == self.eos
        if running.to_finish:
            self._finish(name, {"type": "abort", "message": "Aborted"})
        elif matched is not None:
            self._finish(name, {"type": "stop", "matched": matched})
        elif ends and not params["ignore_eos"]:
            self._finish(name, {"type": "stop", "matched": token})
        elif position + 1 == params["max_new_tokens"]:
            self._finish(name, {"type": "length", "length": params["max_new_tokens"]})
        elif position == 0 or len(running.sampled) - len(running.ids) >= params["stream_interval"]:
            self._send(running, None)

    def _draw(self, body: dict[str, Any], sampled: list[int]) -> tuple[int, float]:
        """The next token of a request and its log-prob."""
        params, weights = body["sampling_params"], self.weights_under(body.get("lora_path"))
        return self.scripted_token(params["sampling_seed"], len(sampled), weights, params["temperature"])

    def _finish(self, name: str, reason: dict[str, Any]) -> None:
        self._send(self.requests.pop(name), reason)

    def _send(self, running: _Running, reason: dict[str, Any] | None) -> None:
        """What has been sampled since the last time, or all of it; then as it is when the event leaves the front."""
        new = running.sampled[len(running.ids) :]
        running.ids += [token for _, token, _ in new]
        running.pairs += new
        meta = {
            "id": running.body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(running.body["input_ids"]),
            "cached_tokens": len(running.body["input_ids"]) // 2,
            "weight_version": self.version,
            "completion_tokens": len(running.ids),
            "output_token_logprobs": new if self.incremental else running.pairs,
        }
        ids = [token for _, token, _ in new] if self.incremental else running.ids
        self._emit(running, ids, meta)

    def _abort_queued(self, name: str, running: _Running) -> None:
        """Not told by the scheduler's own way: what it has sampled and not sent is lost, the last token is repeated."""
        del self.requests[name]
        meta = {
            "id": name,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": self.version,
            "completion_tokens": len(running.ids),
            "output_token_logprobs": running.pairs,
        }
        self._emit(running, running.ids[-1:] if self.incremental else running.ids, meta)

    def _emit(self, running: _Running, ids: list[int], meta: dict[str, Any]) -> None:
        final = meta["finish_reason"] is not None
        if final and self.reports_spans:
            meta["weight_versions"] = self._spans(running)
        running.events.put_nowait({"text": "", "output_ids": ids, "meta_info": meta})
        if final:
            running.events.put_nowait(None)

    def _spans(self, running: _Running) -> list[dict[str, Any]]:
        total, spans, start = len(running.ids), [], 0
        for version, end in [*running.changes, (self.scheduler_version, total)]:
            end = min(end, total)
            if end > start or not spans:
                spans.append({"version": version, "start": start, "end": end})
            start = max(start, end)
        return spans
