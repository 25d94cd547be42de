"""benchmarks/served_tokens.py with a server that is none: what it asks, and how answers are compared."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("served_tokens")
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("served_tokens", None)


class Answers(BaseHTTPRequestHandler):
    """Continues each prompt by its own first tokens, the first one of all by another if `spoiled`."""

    spoiled = False

    def log_message(self, *given: Any) -> None:
        return None

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "a model"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (asked["model"], asked["temperature"], asked["ignore_eos"]) == ("a model", 0.0, True)
        tokens = asked["prompt"][: asked["max_tokens"]]
        if asked.get("stream"):
            events = [{"choices": [{"token_ids": [token]}]} for token in tokens] + [{"choices": []}]
            lines = [f"data: {json.dumps(event)}" for event in events] + ["data: [DONE]"]
            return self._send("\n\n".join(lines).encode())
        if type(self).spoiled:
            tokens[1] = -1
        logprobs = {"token_logprobs": [-0.5 - type(self).spoiled / 4] * len(tokens)}
        return self._send(json.dumps({"choices": [{"token_ids": tokens, "logprobs": logprobs}]}).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    request_queue_size = 64


@pytest.fixture
def url() -> Iterator[str]:
    server = Server(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_two_servers_are_asked_and_compared(bench, url, tmp_path, monkeypatch, capsys) -> None:
    def run(*given: str) -> None:
        monkeypatch.setattr(sys, "argv", ["served_tokens.py", "--out", str(tmp_path / "runs.json"), *given])
        bench.main()

    run("--url", url, "--tag", "a", "--wait", "10")
    monkeypatch.setattr(Answers, "spoiled", True)
    run("--url", url, "--tag", "b", "--wait", "10")
    found = json.loads((tmp_path / "runs.json").read_text())
    assert (found["a"]["streamed_tokens"], found["a"]["streamed_same_share"]) == (bench.CONTINUED, 1)
    assert found["a"]["copied_share"] == 1
    assert found["b"]["streamed_same_share"] < 1
    run("--show")
    share = 1 - 1 / bench.CONTINUED
    assert (
        f"a, b: {{'tokens': {16 * bench.CONTINUED}, 'same_share': {share}, 'logprob_max': 0.25"
        in capsys.readouterr().out
    )


def test_a_server_that_ends_is_not_waited_for(bench) -> None:
    with pytest.raises(SystemExit, match="has ended"):
        bench.waited_for("http://127.0.0.1:9", 60.0, (1 << 22) + 1)
    with pytest.raises(SystemExit, match="no answer"):
        bench.waited_for("http://127.0.0.1:9", 0.0, None)
