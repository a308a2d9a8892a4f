"""A worker against a scripted coordinator on loopback."""

from __future__ import annotations

import msgspec

from rollover.swarm.wire.messages import PROTOCOL, Abort, Adopt, Decoded, Hello, Ready, Release, Serving
from tests.swarm.worker_kit import TOKEN, Bench, acked, assign, head, tokens, with_worker


@with_worker()
async def test_a_worker_joins_fetches_the_head_and_serves_it(bench: Bench) -> None:
    link = await bench.coordinator.next_link()
    assert bench.coordinator.authorizations == [f"Bearer {TOKEN.text}"]
    assert link.hello == Hello(protocols=(PROTOCOL,), software=link.hello.software)
    await link.welcome(head(8), blob_urls=("https://relay/blobs",))
    serving = await link.serving(8)
    assert (serving.manifest, serving.prepare_s, serving.wire_bytes) == (head(8).manifest, 0.5, 1000)
    assert isinstance(link.seen[0], Ready) and link.seen[0].max_running == 64
    own = f"http://127.0.0.1:{bench.coordinator.port}/v1/blobs"
    assert bench.fetcher.asked == [(head(8), ("https://relay/blobs", own), 1)]
    assert bench.engine.events == [("pause", 0), ("load", 8), ("resume", 8)]
    await link.send(assign("a", limit=5))
    await bench.until(lambda: bench.engine.requests)
    await bench.engine.tick(5)
    assert await link.ended("a") == "length"
    assert bench.coordinator.response("a") == tokens(7, 0, 5, 8)
    assert set(bench.coordinator.versions["a"].values()) == {8}


@with_worker()
async def test_a_worker_decodes_on_through_a_cut_and_is_asked_for_the_rest(bench: Bench) -> None:
    link = await bench.decoding(6)
    await link.until(lambda: len(bench.coordinator.tokens.get("a", {})) == 6)
    await link.send(acked("a", 4))
    await link.send(assign("b"))  # it arrives behind the acknowledgement
    await bench.until(lambda: len(bench.engine.requests) == 2)
    await link.cut()
    await bench.engine.tick(10)
    back = await bench.member_again(head(0))
    assert back.hello.run_id == "sums" and back.hello.served == (head(0),)
    held = {call.call_id: (call.start, call.end, call.is_running) for call in back.hello.held}
    assert held == {"a": (4, 16, True), "b": (0, 10, True)}
    for call in back.hello.held:
        await back.adopt(call, offset=len(bench.coordinator.tokens.get(call.call_id, {})))
    await bench.engine.tick(40)
    assert [await back.ended(name) for name in ("a", "b")] == ["length", "length"]
    assert bench.coordinator.response("a") == bench.coordinator.response("b") == tokens(7, 0, 40)
    assert bench.coordinator.num_repeated == 0
    assert len(bench.engine.requests) == 2


@with_worker()
async def test_nothing_is_sent_of_a_held_call_until_somebody_asks_for_it(bench: Bench) -> None:
    link = await bench.decoding(0, assign("a"), assign("b"))
    await link.cut()
    await bench.engine.tick(8)
    back = await bench.member_again(head(1, 2), epoch=2)
    await back.send(Release(call_ids=("b",)))
    await back.adopt(back.hello.held[0], as_id="a2")
    await bench.engine.tick(40)
    assert await back.ended("a2") == "length"
    assert {message.call_id for message in back.all(Decoded)} == {"a2"}
    assert bench.coordinator.response("a2") == tokens(7, 0, 8) + tokens(7, 8, 40, 1)
    assert bench.engine.stats().num_running == 0
    await back.cut()
    last = await bench.again()
    assert [call.call_id for call in last.hello.held] == ["a2"]
    assert last.hello.run_epoch == 2


@with_worker()
async def test_a_call_that_was_stopped_decodes_on_when_it_is_adopted(bench: Bench) -> None:
    link = await bench.decoding(5)
    await link.send(Abort(call_ids=("a",)))
    assert await link.ended("a") == "abort"
    del bench.coordinator.endings["a"]
    await link.cut()
    back = await bench.again()
    assert [(call.end, call.is_running) for call in back.hello.held] == [(5, False)]
    await back.welcome(head(0))
    await back.adopt(back.hello.held[0], as_id="b", offset=3)
    await bench.until(lambda: len(bench.engine.requests) == 2)
    assert bench.engine.requests[1].response_ids == tokens(7, 0, 5)
    await bench.engine.tick(35)
    assert await back.ended("b") == "length"
    assert bench.coordinator.response("b") == tokens(7, 0, 40)


@with_worker()
async def test_what_cannot_be_adopted_is_said_and_forgotten(bench: Bench) -> None:
    link = await bench.decoding(5, assign("a"), assign("b"))
    await link.until(lambda: len(bench.coordinator.tokens.get("b", {})) == 5)
    await link.cut()
    back = await bench.again()
    await back.welcome(head(0))
    await back.send(Adopt(held="a", call_id="a1", offset=9, prefix=""))
    await back.send(Adopt(held="b", call_id="b1", offset=5, prefix="0" * 64))
    await back.send(Adopt(held="c", call_id="c1", offset=0, prefix=""))
    ends = [await back.ended(name) for name in ("a1", "b1", "c1")]
    assert ends == [
        "failed: a is held from 0 to 5, not from 9",
        "failed: b has tokens before 5 that differ from the coordinator's",
        "failed: c is no longer held here",
    ]
    await bench.until(lambda: bench.engine.stats().num_running == 0)
    await back.cut()
    assert (await bench.again()).hello.held == ()


@with_worker()
async def test_a_run_that_went_back_to_an_older_checkpoint_is_served_from_there(bench: Bench) -> None:
    link = await bench.decoding(5, version=8)
    await link.until(lambda: len(bench.coordinator.tokens.get("a", {})) == 5)
    await link.cut()
    back = await bench.member_again(head(5, 2), epoch=2)
    (serving,) = back.all(Serving)  # nothing of the version that this coordinator does not know
    assert serving.manifest == head(5, 2).manifest
    assert bench.engine.events == [("pause", 0), ("load", 5), ("resume", 5)]
    await back.adopt(back.hello.held[0], offset=5)
    assert await back.ended("a") == "failed: the run went back to version 5"
    assert set(bench.coordinator.versions["a"].values()) == {8}


@with_worker()
async def test_an_abort_ends_calls_wherever_they_are(bench: Bench) -> None:
    link = await bench.decoding(3, assign("running"), assign("waiting", least_version=3))
    await link.send(Abort(call_ids=("running", "waiting", "unknown")))
    assert [await link.ended(name) for name in ("running", "waiting")] == ["abort", "abort"]
    assert bench.coordinator.response("running") == tokens(7, 0, 3)
    assert bench.coordinator.response("waiting") == ()
    await link.send(Abort(call_ids=("running",)))
    await link.send(assign("next", limit=1))
    await bench.until(lambda: len(bench.engine.requests) == 2)
    await bench.engine.tick()
    assert await link.ended("next") == "length"
    assert "unknown" not in bench.coordinator.endings


@with_worker()
async def test_a_call_waits_for_the_weights_that_it_asks_for(bench: Bench) -> None:
    link = await bench.decoding(0, assign("a", limit=2, least_version=2), assign("b", limit=2), version=1)
    assert [request.sample_key for request in bench.engine.requests] == ["b."]
    await link.send(head(2))
    await link.serving(2)
    await bench.until(lambda: len(bench.engine.requests) == 2)
    await bench.engine.tick(2)
    assert await link.ended("a") == "length"
    assert set(bench.coordinator.versions["a"].values()) == {2}


@with_worker(version_timeout_s=0.01)
async def test_a_call_whose_weights_do_not_come_is_handed_back(bench: Bench) -> None:
    link = await bench.member(head(1))
    await link.send(assign("a", least_version=2))
    assert await link.ended("a") == "failed: waited 0.01 s for weights version 2, but this worker serves 1"


@with_worker()
async def test_a_call_that_cannot_be_understood_fails_alone(bench: Bench) -> None:
    link = await bench.member(head(0))
    await link.send(msgspec.structs.replace(assign("a"), prompt_ids=b"abc"))
    await link.send(msgspec.structs.replace(assign("b"), top_p=2.0))
    assert "3 bytes are not a whole number of 4-byte values" in await link.ended("a")
    assert "top_p must lie in (0, 1]" in await link.ended("b")
    assert not link.is_closed
