"""The live page is made from the files as they are, for this machine's browsers alone."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollover import cli
from rollover.report.live import open_server
from rollover.report.metrics import MetricsWriter
from tests.report.synthetic import Simulation, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", Simulation(num_steps=2))


@pytest.fixture
def server(run: Path) -> Iterator[ThreadingHTTPServer]:
    with open_server(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: ThreadingHTTPServer, path: str = "/", host: str = "localhost:8377") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_follows_the_files_of_the_run(run: Path, server: ThreadingHTTPServer) -> None:
    status, page = get(server)
    assert status == 200 and "2 steps in" in page
    assert "data-live" in page and "connect-src 'self'" in page
    with MetricsWriter(run) as writer:
        writer.write("step", 2, 99.0, {"reward/mean": 0.5, "time/step_s": 1.0})
    assert "3 steps in" in get(server)[1]


def test_head_gives_the_headers_of_the_page(server: ThreadingHTTPServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    for path, status in (("/", 200), ("/x", 404)):
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, b"")
        if status == 200:
            assert int(answer.headers["Content-Length"]) == len(get(server)[1].encode())
    connection.close()


def test_nothing_but_the_page_is_served(server: ThreadingHTTPServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for path in ("/config.json", "/../config.json", "/journal.sqlite", "/?x"):
        assert get(server, path)[0] == 404
    for host in ("evil.example", "evil.example:8377", "127.0.0.1.evil.example", ""):
        assert get(server, host=host)[0] == 403
    assert get(server, host="127.0.0.1")[0] == 200


def test_a_file_that_cannot_be_read_is_an_answer(run: Path, server: ThreadingHTTPServer) -> None:
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("{}\n" + whole)
    status, text = get(server)
    assert status == 503 and "metrics.jsonl:1 is not a metrics row" in text
    (run / "metrics.jsonl").write_text(whole)
    assert get(server)[0] == 200


def test_wrong_uses_are_one_message_each(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path), "--serve"]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert cli.main(["report", str(run), "--port", "80"]) == 2
    assert "--port has no effect without --serve" in capsys.readouterr().err
    with open_server(run, 0) as server:
        assert cli.main(["report", str(run), "--serve", "--port", str(server.server_port)]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_control_c_ends_it_well(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["report", str(run), "--serve", "--port", "0"]) == 0
    assert "report: http://127.0.0.1:" in capsys.readouterr().out
