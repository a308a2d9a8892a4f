"""Reading the stream of a ``/generate`` call: each token once, whatever the events repeat, under its true version."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from rollover.engine.servers.http.answer import Reader
from rollover.engine.servers.sglang.answers import Generation
from rollover.engine.servers.sglang.reply import Reply
from rollover.errors import EngineError
from rollover.kept_codec import decode_kept
from rollover.types import FinishReason
from tests.engine.contract import request

IDS = (10, 11, 12, 13, 14, 15)


def event(total: int, ids: tuple[int, ...], reason: dict[str, Any] | None = None, **meta: Any) -> Generation:
    pairs = [[-float(t), t, None] for t in ids]
    values = {"completion_tokens": total, "finish_reason": reason, "output_token_logprobs": pairs, **meta}
    return received({"output_ids": list(ids), "meta_info": values})


def received(event: Any) -> Generation:
    """As it comes from a server."""
    return Reader("the server").event(Generation, json.dumps(event), "POST /generate")


def spans(*parts: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]


def reply(*, incremental: bool = False, num_experts: int = 0, **asked: Any) -> Reply:
    return Reply(request("a", **asked), label="3", incremental=incremental, num_experts=num_experts)


def tokens_of(deltas: list[Any]) -> list[tuple[tuple[int, ...], int | None]]:
    return [(d.token_ids, None if d.label is None else int(d.label)) for d in deltas]


def test_lists_that_grew_after_the_count_are_cut_at_the_count() -> None:
    stream = reply()
    assert tokens_of(stream.read(event(2, IDS), certain=True)) == [(IDS[:2], 3)]
    assert tokens_of(stream.read(event(3, IDS), certain=True)) == [(IDS[2:3], 3)]


def test_an_abort_before_prefill_has_no_tokens_whatever_it_says() -> None:
    end = event(
        1,
        (0,),
        {"type": "abort", "message": "Abort before prefill"},
        weight_versions=spans(("3", 0, 0)),
        output_token_logprobs=None,
    )
    (delta,) = reply().read(end, certain=True)
    assert (delta.token_ids, delta.logprobs, delta.finish_reason) == ((), (), FinishReason.ABORT)


def test_a_call_that_only_began_under_the_next_version_has_that_one() -> None:
    stream = reply(max_new_tokens=2)
    stream.read(event(1, IDS[:1]), certain=False)
    end = event(2, IDS[:2], {"type": "length"}, weight_versions=spans(("4", 0, 2)))
    assert tokens_of(stream.read(end, certain=False)) == [(IDS[:2], 4)]


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        (spans(("3", 0, 1), ("4", 1, 3)), "another program changes them"),
        (spans(("default", 0, 3)), "another program changes them"),
        (spans(("3", 0, 2)), "3 tokens"),
        (spans(("3", 0, 1), ("4", 2, 3)), "3 tokens"),
        ([], "3 tokens"),
    ],
)
def test_spans_that_cannot_be_true_are_refused(parts: list[dict[str, Any]], complaint: str) -> None:
    stream = reply()
    stream.read(event(2, IDS[:2]), certain=True)
    with pytest.raises(EngineError, match=complaint):
        stream.read(event(3, IDS[:3], {"type": "abort"}, weight_versions=parts), certain=True)


@pytest.mark.parametrize(
    "broken",
    [
        event(3, IDS[:2]),
        event(1, IDS[:1]),
        event(3, IDS[:3], output_token_logprobs=[[-1.0, 10, None], [-1.0, 11, None], [-1.0, 99, None]]),
        event(3, IDS[:3], output_token_logprobs=None),
        received({"meta_info": {}, "output_ids": [1]}),
    ],
    ids=["too few tokens", "fewer than before", "other ids", "no log-probs", "no count"],
)
def test_events_that_contradict_themselves_are_refused(broken: Generation) -> None:
    stream = reply()
    stream.read(event(2, IDS[:2]), certain=True)
    with pytest.raises(EngineError):
        stream.read(broken, certain=True)


@pytest.mark.parametrize(
    "reason",
    [
        {"type": "abort", "message": "out of memory", "status_code": 500},
        {"type": "abort", "message": "too long", "err_type": "BadRequestError"},
        {"type": "stop", "matched": "NaN happened"},
        {"type": "stop", "matched": 2},
        {"type": "paused"},
    ],
    ids=["inner error", "rejection", "NaN", "its own end token", "unknown"],
)
def test_failures_are_no_partials(reason: Any) -> None:
    with pytest.raises(EngineError):
        reply(stop_token_ids=(1,)).read(event(1, IDS[:1], reason, weight_versions=spans(("3", 0, 1))), certain=True)


def test_a_finish_that_an_abort_hides_wins() -> None:
    abort = {"type": "abort", "message": "Aborted"}
    end = event(3, IDS[:3], abort, weight_versions=spans(("3", 0, 3)))
    assert reply(stop_token_ids=(12,)).read(end, certain=True)[-1].finish_reason is FinishReason.STOP
    assert reply(max_new_tokens=3).read(end, certain=True)[-1].finish_reason is FinishReason.LENGTH
    resumed = reply(max_new_tokens=5, response_ids=(8, 9))
    assert resumed.read(end, certain=True)[-1].finish_reason is FinishReason.LENGTH
    assert reply(max_new_tokens=4).read(end, certain=True)[-1].finish_reason is FinishReason.ABORT


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        ({"output_ids": [1]}, "'meta_info'"),
        ({"meta_info": {"completion_tokens": "3"}}, "'meta_info.completion_tokens'"),
        ({"meta_info": {"completion_tokens": 10**400}}, "'meta_info.completion_tokens'"),
        ({"meta_info": {"finish_reason": "abort"}}, "'meta_info.finish_reason'"),
        ({"meta_info": {"output_token_logprobs": [[-1.0]]}}, "'meta_info.output_token_logprobs.0.1'"),
        ({"meta_info": [], "output_ids": []}, "'meta_info'"),
        ([], "the whole of it"),
    ],
)
def test_events_of_another_type_are_refused_naming_the_field(broken: Any, field: str) -> None:
    with pytest.raises(EngineError, match=re.escape(field)):
        received(broken)


MASKS = [[12, 10], [11], [4, 12, 7], [13, 3]]


@pytest.mark.parametrize("incremental", [False, True])
def test_kept_sets_come_with_their_own_log_probs(incremental: bool) -> None:
    stream = reply(incremental=incremental, top_k=3, returns_kept=True)
    found = []
    for first, last in ((0, 2), (2, 4)):
        start = first if incremental else 0
        kept = {
            "output_token_sampling_mask": MASKS[start:last],
            "output_token_sampling_logprobs": [-0.1 * t for t in range(start, last)],
        }
        found += stream.read(event(last, IDS[start:last], **kept), certain=True)
    assert [p for d in found for p in d.logprobs] == [-0.1 * t for t in range(4)]
    counts, ids = decode_kept([k for d in found for k in d.kept])
    assert counts.tolist() == [2, 1, 3, 2] and ids.tolist() == [10, 12, 11, 4, 7, 12, 3, 13]


def test_tokens_without_the_kept_sets_that_were_asked_for_are_refused() -> None:
    with pytest.raises(EngineError, match=r"2 tokens with 0 kept sets and 0 log-probs .* SGLang 0\.5\.23 or later"):
        reply(top_k=3, returns_kept=True).read(event(2, IDS[:2]), certain=True)


def as_sent(ids: list[list[int]]) -> str:
    return b64encode(np.array(ids, dtype="<i4").tobytes()).decode()


@pytest.mark.parametrize(("num_experts", "width"), [(256, "B"), (257, "H")])
def test_routes_come_with_the_whole_reply(num_experts: int, width: str) -> None:
    stream = reply(returns_routes=True, num_experts=num_experts)
    assert stream.read(event(2, IDS[:2]), certain=True) == []
    ids = [[0, 255, 3, 4], [9, 8, 7, 6], [1, 2, 3, 4]]
    last = {"weight_versions": spans(("3", 0, 3)), "routed_experts": as_sent(ids)}
    [delta] = stream.read(event(3, IDS[:3], {"type": "abort"}, **last), certain=True)
    assert delta.token_ids == IDS[:3] and delta.finish_reason is FinishReason.ABORT
    assert [memoryview(route).cast(width).tolist() for route in delta.routes] == ids


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"weight_versions": spans(("3", 0, 2))}, "start it with --enable-return-routed-experts"),
        ({"weight_versions": spans(("3", 0, 1), ("4", 1, 2)), "routed_experts": as_sent([[0], [1]])}, "stops for new"),
        ({"weight_versions": spans(("3", 0, 2)), "routed_experts": as_sent([[0, 1, 2]])}, "3 ids .* of 2 tokens"),
        ({"weight_versions": spans(("3", 0, 2)), "routed_experts": as_sent([[0], [8]])}, "with 8 experts"),
    ],
)
def test_routes_that_cannot_be_those_of_the_tokens_are_refused(meta: dict[str, Any], reason: str) -> None:
    stream = reply(returns_routes=True, num_experts=8)
    with pytest.raises(EngineError, match=reason):
        stream.read(event(2, IDS[:2], {"type": "abort"}, **meta), certain=True)
