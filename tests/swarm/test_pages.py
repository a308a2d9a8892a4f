"""The live page of a swarm: its data, its metrics, who may ask for it, and that it is drawn."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollover.errors import ConfigError
from rollover.swarm.coordinator.status.board import MAX_CURVES, MAX_POINTS, MAX_PUBLICATIONS, StatusBoard
from rollover.swarm.coordinator.status.pages import listener as listener_module
from rollover.swarm.coordinator.status.pages.listener import AdminListener, names_this_machine
from rollover.swarm.coordinator.status.pages.prometheus import exposition
from rollover.swarm.coordinator.status.snapshot import SwarmStatus, WorkerStatus, read_status
from rollover.swarm.publication.publications import PublishedWeights
from tests.speed import within

NOW_S = 1.76e9


def worker(name: str, **changes: Any) -> WorkerStatus:
    known: dict[str, Any] = {
        **{"state": "ready", "version": 7, "lag": 1, "num_calls": 4, "max_running": 16, "tokens_per_s": 220.4},
        **{"num_decoded": 6410, "num_held": 58, "note": ""},
    }
    return WorkerStatus(name=name, **{**known, **changes})


def status(*workers: WorkerStatus, **changes: Any) -> SwarmStatus:
    known: dict[str, Any] = {"url": "wss://10.0.0.1:8790", "version": 8, "num_waiting": 3, "time_s": NOW_S}
    return SwarmStatus(**{**known, **changes}, workers=workers)


def made(version: int, kind: str, reason: str, wire_bytes: int, full_bytes: int) -> PublishedWeights:
    return PublishedWeights(
        version=version,
        manifest="9c1e",
        time_s=NOW_S,
        kind=kind,
        reason=reason,
        wire_bytes=wire_bytes,
        full_bytes=full_bytes,
        elapsed_s=0.4,
    )


def a_board(folder: Path) -> StatusBoard:
    return StatusBoard(folder, run="sums", mode="push_pull")


@asynccontextmanager
async def listener(board: StatusBoard, address: tuple[str, int] = ("127.0.0.1", 0)) -> AsyncIterator[AdminListener]:
    made = AdminListener(address, board)
    made.serve()
    try:
        yield made
    finally:
        await made.close()


async def asked(board: StatusBoard, *paths: str, **headers: str) -> list[httpx.Response]:
    """The answers of a listener to GETs of these paths."""
    async with listener(board) as it, httpx.AsyncClient(base_url=it.url) as client:
        return [await client.get(path, headers=headers) for path in paths]


# -- the board ------------------------------------------------------------------------------------------------------


def test_the_board_puts_together_what_coordinator_publisher_and_run_say(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    board.published(made(8, "delta", "made from 7", 81, 9437))
    board.step_ended(6, {"drift/attic": 0.5})
    board.step_ended(7, {"staleness/max": 1.0, "drift/kitchen": 3e-6, "swarm/convergence_s": 5.5, "loss": float("nan")})
    board.write(status(worker("kitchen"), worker("attic"), worker("cellar")))
    shown = read_status(tmp_path)
    assert (shown.run, shown.mode, shown.step) == ("sums", "push_pull", 7)
    assert shown.convergence_s == 5.5
    assert shown.metrics == {"staleness/max": 1.0, "drift/kitchen": 3e-6, "swarm/convergence_s": 5.5}, "JSON has no NaN"
    drift = {w.name: w.drift for w in shown.workers}
    assert drift == {"kitchen": 3e-6, "attic": 0.5, "cellar": None}, "no tokens of a worker say nothing of it"
    assert [(p.version, p.kind, p.wire_bytes, p.time_s) for p in shown.publications] == [(8, "delta", 81, NOW_S)]
    assert board.status == shown


def test_what_the_board_remembers_has_a_limit(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    for version in range(MAX_PUBLICATIONS + 5):
        board.published(made(version, "full", "", 1, 1))
    for i in range(MAX_POINTS + 7):
        board.write(status(worker("a", tokens_per_s=float(i)), worker("b", tokens_per_s=0.5)))
    assert board.status is not None
    assert [p.version for p in board.status.publications] == list(range(5, MAX_PUBLICATIONS + 5))
    assert board.curves()["history"] == tuple(i + 0.5 for i in range(7, MAX_POINTS + 7))
    assert board.curves()["histories"]["a"][-1] == MAX_POINTS + 6
    board.write(status(*(worker(f"w{i}") for i in range(MAX_CURVES + 1))))
    assert board.curves()["histories"] == {}


# -- metrics --------------------------------------------------------------------------------------------------------


def test_the_metrics_are_those_of_the_state() -> None:
    shown = exposition(
        status(
            worker("laptop", drift=2e-6, prepare_s=4.1, pause_s=0.3, wire_bytes=81_264),
            worker("old", state="sent away", num_held=0, tokens_per_s=0.0),
            convergence_s=5.5,
            counters={"fenced": 2, "out_of_order": 9, "late_accepted": 1},
            publications=(made(8, "delta", "", 81, 9437),),
            metrics={"staleness/mean": 0.25, "staleness/max": 1.0, "rollout/wasted_tokens/failed": 12.0},
        )
    )
    found = {
        (sample.name.removeprefix("rollover_"), *sample.labels.values()): sample.value
        for metric in text_string_to_metric_families(shown.decode())
        for sample in metric.samples
    }
    expected = {
        ("workers", "ready"): 1,
        ("workers", "sent away"): 1,
        ("version",): 8,
        ("worker_num_held", "laptop"): 58,
        ("worker_drift", "laptop"): 2e-6,
        ("worker_prepare_s", "laptop"): 4.1,
        ("worker_wire_bytes", "laptop"): 81264,
        ("worker_tokens_per_s", "old"): 0.0,
        ("convergence_s",): 5.5,
        ("late_accepted_total",): 1,
        ("fenced_total",): 2,
        ("metrics", "staleness/mean"): 0.25,
        ("metrics", "rollout/wasted_tokens/failed"): 12,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert ("worker_drift", "old") not in found and ("step",) not in found, "what is unknown is left out"


# -- who may ask ------------------------------------------------------------------------------------------------------


OURS = ("127.0.0.1:8791", "localhost", "LOCALHOST:1", "[::1]:8791", "127.8.0.1:9")
OTHERS = ("", "evil.example:8791", "127.0.0.1.evil.example", "10.0.0.1:8791", "[::2]", "a b", "::1")


@pytest.mark.parametrize("host", OURS + OTHERS)
def test_names_of_this_machine_alone_are_answered(host: str) -> None:
    assert names_this_machine(host) is (host in OURS)


async def test_a_page_of_the_web_cannot_read_it_by_a_name_of_its_own(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    board.write(status(worker("laptop")))
    for answer in await asked(board, "/", "/status.json", "/metrics", host="evil.example:8791"):
        assert answer.status_code == 421
        assert "laptop" not in answer.text and "address 127.0.0.1 or localhost, not 'evil.example:8791'" in answer.text


async def test_the_page_loads_nothing_and_may_not_be_framed_or_kept(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    page, before = await asked(board, "/", "/status.json")
    assert before.json()["status"] is None, "nothing was written yet"
    for text in ("src=", 'href="http', "@import", "url(", "innerHTML"):
        assert text not in page.text, text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert page.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in page.headers


async def test_the_state_is_answered_as_it_was_written_last(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    board.write(status(worker("laptop", num_calls=3)))
    state, metrics, missing = await asked(board, "/status.json", "/metrics", "/v1/session")
    (shown,) = state.json()["status"]["workers"]
    assert (shown["name"], shown["num_calls"]) == ("laptop", 3)
    assert state.json()["history"] == [220.4]
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert 'rollover_worker_tokens_per_s{worker="laptop"} 220.4' in metrics.text
    assert missing.status_code == 404


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    board = a_board(tmp_path)
    async with listener(board) as first:
        port = int(first.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"cannot listen on engine\.admin = '127\.0\.0\.1:{port}': .*port 0"):
            AdminListener(("127.0.0.1", port), board)


def test_the_page_writes_numbers_as_people_do() -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("needs Node.js")
    page = (Path(listener_module.__file__).parent / "page.html").read_text()
    functions = page[page.index("const int =") : page.index("function ago(")]
    calls = "percent(1), percent(0.0123), percent(1.234), small(150), small(0.02), bytes(999_999), bytes(81_000), bytes(2e12)"
    asked = subprocess.run(
        [node, "-e", f"{functions} console.log([{calls}].join('; '))"], capture_output=True, text=True
    )
    assert asked.stdout.strip() == "100 %; 1.2 %; 120 %; 150; 0.02; 1,000 kB; 81 kB; 2,000 GB"


# -- drawn ------------------------------------------------------------------------------------------------------------


def test_a_browser_draws_the_page_without_an_error(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    board = a_board(tmp_path)
    board.published(made(8, "delta", "made from 7", 81_000, 9_437_000))
    away = worker("<b>old</b>", state="sent away", note="its log-probs are 0.2 nats off")
    for _ in range(3):
        board.write(status(worker("kitchen", drift=2e-6, prepare_s=1.0, pause_s=0.1), away))

    async def main() -> bytes:
        async with asyncio.timeout(within(60)), listener(board) as it:
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
            drawing = await asyncio.create_subprocess_exec(
                *(*command, "--virtual-time-budget=3000", "--dump-dom", it.url),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                return (await drawing.communicate())[0]
            finally:
                if drawing.returncode is None:
                    drawing.kill()
                    await drawing.wait()

    drawn = asyncio.run(main()).decode()
    body = drawn[drawn.index("<main>") : drawn.index("<script>")]
    for text in ("kitchen", "sent away", "its log-probs are 0.2 nats off", "81 kB", "1 of 2", "&lt;b&gt;old"):
        assert text in body, body
    assert "does not answer" not in body
