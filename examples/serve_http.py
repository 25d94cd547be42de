"""The HTTP side of examples/serve.py: requests and their checks, text of tokens, streams; `front` is its process.

Threads of one Python process run one at a time. Streams of 64 clients took half of an engine's time between its steps
when they were threads of the engine's process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from serve_engine import Engine, Limits, Request


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Bytes:
    """One token for each byte of UTF-8, for models without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(token % 256 for token in ids).decode(errors="replace")


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a folder's tokenizer.json, or ``bytes``.

    Raises:
        SystemExit: it cannot be read.
    """
    path = Path(name) / "tokenizer.json"
    if name == "bytes":
        return Bytes()
    if not path.exists():
        raise SystemExit(f"there is no {path}: put it there, or give --tokenizer FOLDER, or --tokenizer bytes")
    try:
        from tokenizers import Tokenizer as Fast

        fast = Fast.from_file(str(path))
    except Exception as error:  # the package raises plain ones
        raise SystemExit(f"{path} cannot be read: {error}; --tokenizer takes another folder, or bytes") from None

    class OfFile:
        def encode(self, text: str) -> list[int]:
            return list(fast.encode(text).ids)

        def decode(self, ids: list[int]) -> str:
            return str(fast.decode(ids))

    return OfFile()


class Refused(ValueError):
    """A request that cannot be served, as the client is told."""


def parsed(body: bytes, tokenizer: Tokenizer, name: str) -> tuple[Request, bool, bool]:
    """The request of a body of /v1/completions, whether to stream, and whether the stream ends with the counts."""
    try:
        said = json.loads(body)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise Refused("the body is no JSON object")
    known = {"model", "prompt", "max_tokens", "temperature", "stream", "ignore_eos", "user", "stream_options"}
    if unknown := sorted(set(said) - known - {name for name, value in said.items() if value in (None, 1)}):
        raise Refused(f"{unknown[0]} is not supported; give {', '.join(sorted(known))}")
    if said.get("model") not in (None, name):
        raise Refused(f"there is no model {said['model']!r}; this server has {name!r}")
    prompt, most, heat = said.get("prompt"), said.get("max_tokens", 16), said.get("temperature", 1.0)
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise Refused("prompt is neither a string nor a list of token ids")
    if type(most) is not int or most < 1:
        raise Refused(f"max_tokens is {most!r}; give 1 or more")
    if isinstance(heat, bool) or not isinstance(heat, int | float) or not 0 <= heat <= 2:
        raise Refused(f"temperature is {heat!r}; give 0 (greedy) to 2")
    options = said.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused("stream_options is no JSON object")
    flags = {name: said.get(name) or False for name in ("stream", "ignore_eos")}
    flags["include_usage"] = options.get("include_usage") or False
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise Refused("stream, ignore_eos and include_usage are true or false")
    return Request(prompt, most, float(heat), flags["ignore_eos"]), flags["stream"], flags["include_usage"]


def pieces(request: Request, tokenizer: Tokenizer) -> Iterator[tuple[str, str | None]]:
    """The new text of each token and, at last, why it ended; a character whose bytes are not all there waits."""
    ids: list[int] = []
    before, shown = 0, 0  # of ids: those before are not decoded again; those up to `shown` have been yielded
    while True:
        token, reason = request.results.get()
        if token is not None:
            ids.append(token)
        # A tokenizer's text of a token depends on the ones before it, so the last piece is decoded with the new one.
        text, known = tokenizer.decode(ids[before:]), tokenizer.decode(ids[before:shown])
        whole = bool(reason) or not text.endswith("\ufffd")
        yield text[len(known) :] if whole else "", reason or None
        if reason:
            return
        if whole:
            before, shown = shown, len(ids)


def handler(engine: Engine | Front, tokenizer: Tokenizer, name: str) -> type[BaseHTTPRequestHandler]:
    """The handler of the server's requests."""
    page = Path(__file__).with_name("serve.html").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # which keeps an event until the one before has been acknowledged

        def do_GET(self) -> None:
            if self.path == "/":
                return self._send(200, page, "text/html; charset=utf-8")
            if self.path == "/v1/models":
                return self._json(200, {"object": "list", "data": [{"id": name, "object": "model"}]})
            if self.path == "/stats":
                return self._json(200, {"model": name, **engine.stats()})
            return self._refuse(404, f"there is no {self.path}; there are /, /stats, /v1/models, /v1/completions")

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a client that leaves is no error of the server
                super().handle()

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length") or ""
            if not length.isdecimal():  # a body of unknown length cannot be skipped: the connection ends
                self.close_connection = True
                return self._refuse(411, "the request has no Content-Length")
            body = self.rfile.read(int(length))
            if self.path != "/v1/completions":
                return self._refuse(404, f"there is no {self.path}; POST to /v1/completions")
            try:
                request, stream, counted = parsed(body, tokenizer, name)
                engine.add(request)
            except ValueError as error:
                return self._refuse(400, str(error))
            begun: dict[str, Any] = {"id": f"cmpl-{id(request):x}", "object": "text_completion", "model": name}
            begun["created"] = int(time.time())
            try:
                return self._stream(request, begun, counted) if stream else self._whole(request, begun)
            except (BrokenPipeError, ConnectionResetError):
                engine.abort(request)  # the client disconnected: free its pages
                return None

        def _whole(self, request: Request, begun: dict[str, Any]) -> None:
            parts = list(pieces(request, tokenizer))
            text, reason = "".join(new for new, _ in parts), parts[-1][1]
            if reason is not None and reason.startswith("error"):
                return self._refuse(500, reason)
            return self._json(200, {**begun, "choices": [_choice(text, reason)], "usage": _usage(request)})

        def _stream(self, request: Request, begun: dict[str, Any], counted: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for new, reason in pieces(request, tokenizer):
                self._event(json.dumps({**begun, "choices": [_choice(new, reason)]}))
            if counted:
                self._event(json.dumps({**begun, "choices": [], "usage": _usage(request)}))
            self._event("[DONE]")
            self.close_connection = True

        def _event(self, text: str) -> None:
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()

        def _refuse(self, status: int, message: str) -> None:
            kind = "invalid_request_error" if status < 500 else "internal_error"
            self._json(status, {"error": {"message": message, "type": kind, "code": status}})

        def _json(self, status: int, value: Any) -> None:
            self._send(status, json.dumps(value).encode(), "application/json")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing for each request."""

    return Handler


class Front:
    """The engine of another process, for this one's handlers: requests go there by a pipe, and results come back."""

    def __init__(self, pipe: Connection, limits: Limits) -> None:
        self.pipe, self.limits = pipe, limits
        self.sending, self.asking = threading.Lock(), threading.Lock()
        self.numbers = itertools.count(1)
        self.requests: dict[int, Request] = {}
        self.answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def _send(self, kind: str, what: Any = None) -> None:
        with self.sending:
            self.pipe.send((kind, what))

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it can never run.
        """
        self.limits.check(request)
        request.number = next(self.numbers)
        self.requests[request.number] = request
        self._send("add", (request.number, request.ids, request.max_tokens, request.temperature, request.ignore_eos))

    def abort(self, request: Request) -> None:
        """End a request whose client has left."""
        self._send("abort", request.number)

    def stats(self) -> dict[str, Any]:
        """How the engine is."""
        with self.asking:
            self._send("stats")
            return self.answers.get()

    def receive(self) -> None:
        """Give requests their results.

        Raises:
            EOFError, OSError: the engine's process has ended.
        """
        while True:
            kind, what = self.pipe.recv()
            if kind == "stats":
                self.answers.put(what)
                continue
            for number, token, reason in what:
                request = self.requests.pop(number) if reason else self.requests[number]
                if token is not None:
                    request.ids.append(token)
                    request.generated += 1
                request.results.put((token, reason))


def front(pipe: Connection, listener: socket.socket, name: str, texts: str) -> None:
    """Serve HTTP at a bound socket, as soon as the engine at the other end of the pipe says that it is ready."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine's process ends by it, and this one with that
    try:
        limits = pipe.recv()
    except EOFError:
        return
    engine = Front(pipe, limits)

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            engine.receive()
        os._exit(1)  # with the engine; other threads may wait for clients

    threading.Thread(target=receive, daemon=True).start()
    made = handler(engine, tokenizer_of(texts), name)
    server = ThreadingHTTPServer(listener.getsockname()[:2], made, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.request_queue_size = 1024  # by default five connections wait, and others try again after a second
    server.server_activate()
    pipe.send(("listening", None))
    server.serve_forever()


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _usage(request: Request) -> dict[str, int]:
    """What a finished request counts."""
    prompt, generated = len(request.ids) - request.generated, request.generated
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
