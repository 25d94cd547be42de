"""A serving engine on kernelhub: continuous batching, a paged KV cache, CUDA graphs, an OpenAI-compatible server.

    python examples/serve.py                                  # a small Llama with random weights; runs on a CPU, too
    python examples/serve.py --model qwen3-moe-tiny           # or llama-3.1-8b, qwen3-30b-a3b: shapes, random weights
    python examples/serve.py --model /models/Qwen3-8B         # config.json, *.safetensors, tokenizer.json
    curl localhost:8000/v1/completions -d '{"prompt": "Hello", "max_tokens": 16, "stream": true}'

http://localhost:8000 shows which kernel serves each layer, and the tokens per second. Before the first request the
engine warms up, verifies its kernels, captures decode steps in CUDA graphs, and seals: no request compiles anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import torch
from serve_engine import PAGE, Engine, Request
from serve_model import SHAPES, Config, Model, load_weights, random_weights

from kernelhub.errors import ConfigurationError


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


def handler(engine: Engine, tokenizer: Tokenizer, name: str) -> type[BaseHTTPRequestHandler]:
    """The handler of the server's requests."""
    page = Path(__file__).with_suffix(".html").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

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
                request.aborted = True  # the client disconnected: free its pages
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


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


def _usage(request: Request) -> dict[str, int]:
    """What a finished request counts."""
    prompt, generated = len(request.ids) - request.generated, request.generated
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def pages_that_fit(config: Config, device: torch.device, dtype: torch.dtype, wanted: int) -> int:
    """Pages of a KV cache for all sequences, `wanted`, or as many as leave 15 % of the memory to steps."""
    if device.type == "cpu":
        return min(wanted, 2048)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    page = 2 * config.layers * PAGE * config.kv_heads * config.head_dim * dtype.itemsize
    return min(wanted, int(free - 0.15 * total) // page)


def build(
    model: str, device: torch.device, dtype: torch.dtype, tokenizer: str | None = None, **sizes: int
) -> tuple[Engine, Tokenizer]:
    """An engine that is ready, and its tokenizer: that of the model, or the one named."""
    folder = None if model in SHAPES else Path(model)
    if folder is not None and not (folder / "config.json").exists():
        raise SystemExit(f"{model} is no folder with a config.json, and no shape: {', '.join(SHAPES)}")
    config = SHAPES[model] if folder is None else Config.read(folder)
    text = tokenizer_of(tokenizer or ("bytes" if folder is None else model))
    if folder is not None and list(folder.glob("*.safetensors")):
        weights = load_weights(folder, config, device, dtype)
    else:
        print(f"{model} has no *.safetensors: its weights are random")
        weights = random_weights(config, device, dtype)
    made = Model(config, weights)
    if not sizes["num_pages"]:
        wanted = 1 + sizes["max_seqs"] * -(-sizes["max_len"] // PAGE)
        sizes["num_pages"] = pages_that_fit(config, device, dtype, wanted)
    if sizes["num_pages"] < 2:
        raise SystemExit(f"{model} leaves no memory for a KV cache of {PAGE} tokens: use a larger GPU")
    engine = Engine(made, **sizes)
    engine.start()
    return engine, text


def options() -> argparse.Namespace:
    """The options; wrong ones end here, before weights are read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-tiny", help=f"a checkpoint's folder, or {', '.join(SHAPES)}")
    parser.add_argument("--tokenizer", help="a folder with tokenizer.json, or bytes; that of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 for any that is free")
    parser.add_argument("--num-pages", type=int, default=0, help=f"pages of {PAGE} tokens; 0: as memory allows")
    parser.add_argument("--max-seqs", type=int, default=64, help="sequences of a step")
    parser.add_argument("--max-tokens", type=int, default=0, help="new tokens of a step; 0: 8192 on a GPU, else 2048")
    parser.add_argument("--max-len", type=int, default=2048, help="tokens of a sequence")
    given = parser.parse_args()
    for name, least in {"num_pages": 0, "max_seqs": 1, "max_tokens": 0, "max_len": 2, "port": 0}.items():
        if getattr(given, name) < least:
            parser.error(f"--{name.replace('_', '-')} is {getattr(given, name)}; give {least} or more")
    if given.num_pages == 1:
        parser.error("--num-pages is 1, and one page stays unused: give 2 or more, or 0")
    try:
        given.device = torch.device(given.device)
    except RuntimeError:
        parser.error(f"--device is {given.device!r}; give cpu, cuda or cuda:1")
    if given.device.type not in ("cpu", "cuda"):
        parser.error(f"--device is {given.device}; give cpu, cuda or cuda:1")
    if given.device.type == "cuda" and (given.device.index or 0) >= torch.cuda.device_count():
        parser.error(f"--device is {given.device}; torch {torch.__version__} has {torch.cuda.device_count()} GPUs here")
    given.max_tokens = given.max_tokens or (8192 if given.device.type == "cuda" else 2048)
    return given


def main() -> None:
    given = options()
    server = ThreadingHTTPServer((given.host, given.port), BaseHTTPRequestHandler, bind_and_activate=False)
    try:
        server.server_bind()  # before weights are read; clients are refused until the engine is ready
    except (OSError, OverflowError) as error:
        raise SystemExit(f"cannot serve at {given.host}:{given.port}: {error}; give --host or --port") from None
    sizes = {name: getattr(given, name) for name in ("num_pages", "max_seqs", "max_tokens", "max_len")}
    try:
        engine, tokenizer = build(given.model, given.device, getattr(torch, given.dtype), given.tokenizer, **sizes)
    except ConfigurationError as error:  # such as a misspelt name in KERNELHUB_PREFER
        raise SystemExit(str(error)) from None
    threading.Thread(target=engine.serve, daemon=True).start()
    server.RequestHandlerClass = handler(engine, tokenizer, given.model)
    server.server_activate()
    for row in engine.kernels():
        print(f"layers {row['layers']}: {row['part']}: {row['kernel']} {row['runs']}")
    print(f"a KV cache of {PAGE * len(engine.free)} tokens, {engine.max_len} of a sequence")
    print(f"serving {given.model} at http://{given.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
