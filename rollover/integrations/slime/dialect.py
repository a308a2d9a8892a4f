"""SGLang servers that slime owns: their ``/generate`` and the few control calls that a guest may make.

They differ from the servers that ``engine.servers.sglang.dialect`` describes in several ways:

* slime loads their weights, and only while no call is open. So a whole call has one label, ``weight_version`` in its
answer, which older versions (0.5.15 is in slime's image) return where newer ones return spans.
* Answers are not streamed: events of these versions repeat the whole response, which makes a response of n tokens cost
  n * n / 2 of them. A server that was started with ``--incremental-streaming-output`` repeats nothing and is read as a
  stream, so its death costs only the tokens that were in transit.
* Requests contain only fields that older versions know. A seed is sent to servers that were started with
``--enable-deterministic-inference``, which would otherwise draw the same noise for all siblings.
* Control calls have an older and a newer path.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from rollover.engine.servers.calls.call import Delta, GenerationCall
from rollover.engine.servers.calls.dialect import Traits
from rollover.engine.servers.http.answer import Count
from rollover.engine.servers.http.client import HTTPClient
from rollover.engine.servers.sglang.answers import Generation, Meta, ModelInfo, WeightSpan
from rollover.engine.servers.sglang.dialect import NamedCalls, generate_body
from rollover.engine.servers.sglang.reply import Reply
from rollover.errors import EngineError, EngineTimeout

_LOADS = ("num_reqs", "num_total_reqs")
"""Names that versions of SGLang use for the number of all requests of a rank; without them, running and waiting ones
are counted separately."""


class LentMeta(Meta):
    """The rest of an answer besides its tokens, including the fields of versions before 0.5.23."""

    weight_version: str | None = None
    completion_tokens: Count | None = None
    spec_accept_token_num: Count | None = None
    spec_draft_token_num: Count | None = None
    spec_verify_ct: Count | None = None


class LentGeneration(Generation):
    """An answer of a server that may be older than 0.5.23."""

    meta_info: LentMeta


class LentDialect(NamedCalls):
    """Implements ``Dialect`` for one SGLang worker whose weights belong to slime.

    Args:
        response_timeout_s: longest wait for a whole response, if it is not streamed.
    """

    traits = Traits(keeps_calls=False, keeps_kv=False, silence_s=0.0, aborts_all_at_once=True)

    def __init__(self, client: HTTPClient, *, response_timeout_s: float) -> None:
        super().__init__(client)
        self.weights = LentLabel(client)
        self._response_timeout_s = response_timeout_s
        self._streams = False
        self._draws_by_seed = False
        self.usage: Counter[str] = Counter()
        """Sums over all calls of what the host reports of its servers' caches and drafts, by the host's names."""

    # -- checks ----------------------------------------------------------------------------------------------

    async def identify(self) -> None:
        info = await self.weights.info()
        if not info.is_generation:
            raise EngineError(f"{self._client} serves a model that does not generate text")
        if info.preferred_sampling_params is not None:
            raise EngineError(
                f"{self._client} changes how tokens are drawn: start it without --preferred-sampling-params"
            )

    async def check_model(self) -> int:
        """Determine how the server answers, and return its context length, or no limit if it does not report one."""
        body = await _of_either(self._client, "/server_info", "/get_server_info")
        info = _table(body)
        self._streams = info.get("incremental_streaming_output") is True
        self._draws_by_seed = info.get("enable_deterministic_inference") is True
        longest = info.get("max_req_input_len")
        return longest if isinstance(longest, int) and longest > 0 else 1 << 30

    async def check_health(self, *, decode: bool, timeout_s: float) -> None:
        """Ask the scheduler itself for its number of calls. Nothing is decoded, since a call of ours could not be told
        apart from requests that slime waits for."""
        await self._client.call("GET", "/v1/loads", params={"include": "core"}, timeout_s=timeout_s)

    # -- calls -----------------------------------------------------------------------------------------------

    async def decode(self, call: GenerationCall) -> AsyncGenerator[Delta, None]:
        """Yield the decoded tokens, labelled with the weights in force. Raises ``EngineError`` when other weights
        sampled an answer, or it does not say which ones did."""
        reply = Reply(call.request, label=call.label, incremental=self._streams, shown=self._client.reader.shown)
        if not self._streams:
            answer = await self._client.ask(
                LentGeneration, "POST", "/generate", body=self._body(call), timeout_s=self._response_timeout_s
            )
            deltas = reply.read(_with_spans(answer, call), certain=True)
            self._count(answer.meta_info, call)
            yield Delta(num_held_tokens=reply.num_tokens, num_cached_tokens=answer.meta_info.cached_tokens or 0)
            for delta in deltas:
                yield delta
            return
        stream = self._client.events(LentGeneration, "/generate", self._body(call), call.patience)
        async with aclosing(stream) as events:
            num_sent = 0
            async for event in events:
                if event.meta_info.finish_reason is not None:
                    self._count(event.meta_info, call)
                num_sent = max(num_sent, event.meta_info.completion_tokens or 0)
                for delta in reply.read(_with_spans(event, call, num_sent), certain=True):
                    yield delta

    def _count(self, meta: LentMeta, call: GenerationCall) -> None:
        self.usage.update(
            cached_tokens=meta.cached_tokens or 0,
            total_prompt_tokens=call.num_input_tokens,
            completion_token_num=meta.completion_tokens or 0,
            spec_accept_token_num=meta.spec_accept_token_num or 0,
            spec_draft_token_num=meta.spec_draft_token_num or 0,
            spec_verify_ct=meta.spec_verify_ct or 0,
        )

    def _body(self, call: GenerationCall) -> dict[str, Any]:
        body = generate_body(self._rid(call.request_id), call.request)
        if self._draws_by_seed:
            body["sampling_params"]["sampling_seed"] = call.request.seed >> 1
        return {**body, "stream": self._streams}

    async def num_calls(self) -> int | None:
        """Count the calls of all ranks; ``None`` when the answer has no known form."""
        body = await self._client.call("GET", "/v1/loads", params={"include": "core"})
        try:
            return _num_requests(json.loads(body))
        except ValueError:
            return None


class LentLabel:
    """Reads which weights a server has, which is all that a guest may do."""

    def __init__(self, client: HTTPClient) -> None:
        self._client = client

    async def info(self) -> ModelInfo:
        """Ask the server which model it serves."""
        body = await _of_either(self._client, "/model_info", "/get_model_info")
        return self._client.reader.typed(ModelInfo, body, "GET /model_info")

    async def label(self) -> str:
        return (await self.info()).weight_version


async def _of_either(client: HTTPClient, path: str, older: str) -> bytes:
    try:
        return await client.call("GET", path)
    except EngineTimeout:
        raise
    except EngineError as error:
        try:
            return await client.call("GET", older)
        except EngineError:
            raise error from None


def _with_spans(answer: LentGeneration, call: GenerationCall, num_sent: int | None = None) -> LentGeneration:
    """Return an answer in the form of newer servers: with ids and, at its end, with spans of labels. Raises
    ``EngineError`` when it does not say which weights sampled its tokens."""
    meta = answer.meta_info
    pairs = meta.output_token_logprobs or []
    num_tokens = meta.completion_tokens
    if num_tokens is None:  # aborted in the queue, by a server that then reports less
        num_tokens = len(pairs) if num_sent is None else num_sent
    spans = meta.weight_versions
    if spans is None and meta.finish_reason is not None:
        if num_tokens and meta.weight_version is None:
            raise EngineError(
                f"{call.request_id}: the server does not say which weights sampled its tokens"
                " (meta_info.weight_version): use a newer SGLang"
            )
        spans = [WeightSpan(version=meta.weight_version or call.label, start=0, end=num_tokens)]
    ids = answer.output_ids or [token for _, token, _ in pairs]
    full = meta.model_copy(update={"completion_tokens": num_tokens, "weight_versions": spans})
    return answer.model_copy(update={"output_ids": ids, "meta_info": full})


def _table(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _num_requests(load: Any) -> int | None:
    """Read the count of a rank, of a list of ranks, or of a table with such a list; ``None`` if there is none."""
    if isinstance(load, list):
        counts = [_num_requests(each) for each in load]
        return None if None in counts else sum(n for n in counts if n is not None)
    if not isinstance(load, dict):
        return None
    if "loads" in load:
        return _num_requests(load["loads"])
    for key in _LOADS:
        if isinstance(load.get(key), int):
            return int(load[key])
    running, waiting = load.get("num_running_reqs"), load.get("num_waiting_reqs")
    return running + waiting if isinstance(running, int) and isinstance(waiting, int) else None
