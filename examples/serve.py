"""A serving engine on kernelhub: continuous batching, a paged KV cache, CUDA graphs, an OpenAI-compatible server.

    python examples/serve.py                                  # a small Llama with random weights; runs on a CPU, too
    python examples/serve.py --model qwen3-moe-tiny           # or llama-3.1-8b, qwen3-30b-a3b: shapes, random weights
    python examples/serve.py --model /models/Qwen3-8B         # config.json, *.safetensors, tokenizer.json
    curl localhost:8000/v1/completions -d '{"prompt": "Hello", "max_tokens": 16, "stream": true}'

http://localhost:8000 shows which kernel serves each layer, and the tokens per second. Before the first request the
engine warms up, verifies its kernels, captures decode steps in CUDA graphs, and seals: no request compiles anything.
HTTP has a process of its own (serve_http.py), which leaves this one's Python to the steps (serve_engine.py).
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import serve_http
import torch
from serve_engine import PAGE, Engine, Made, Request
from serve_http import Tokenizer, tokenizer_of
from serve_model import SHAPES, Config, Model, load_weights, random_weights

from kernelhub.errors import ConfigurationError


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


def obey(engine: Engine, pipe: Connection) -> None:
    """Serve the HTTP process: add and abort requests, say how the engine is.

    Raises:
        EOFError, OSError: it has ended.
    """
    requests: dict[int, Request] = {}
    sending = threading.Lock()

    def send(kind: str, what: Any) -> None:
        with sending, contextlib.suppress(OSError):  # it has ended, which the loop below finds
            pipe.send((kind, what))

    def deliver(made: Made) -> None:
        send("made", [(request.number, token, reason) for request, token, reason in made])
        for request, _, reason in made:
            if reason:
                del requests[request.number]

    engine.deliver = deliver
    threading.Thread(target=engine.serve, daemon=True).start()
    while True:
        kind, what = pipe.recv()
        if kind == "add":
            number, *of = what
            requests[number] = Request(*of, number=number)
            engine.add(requests[number])
        elif kind == "abort" and (request := requests.get(what)):
            engine.abort(request)
        elif kind == "stats":
            send("stats", engine.stats())


def main() -> None:
    given = options()
    server = ThreadingHTTPServer((given.host, given.port), BaseHTTPRequestHandler, bind_and_activate=False)
    try:
        server.server_bind()  # before weights are read; clients are refused until the engine is ready
    except (OSError, OverflowError) as error:
        raise SystemExit(f"cannot serve at {given.host}:{given.port}: {error}; give --host or --port") from None
    pipe, far = multiprocessing.Pipe()
    texts = given.tokenizer or ("bytes" if given.model in SHAPES else given.model)
    arguments = far, server.socket, given.model, texts
    process = multiprocessing.get_context("spawn").Process(target=serve_http.front, args=arguments, daemon=True)
    process.start()  # it imports what it needs while the weights are read
    far.close()
    server.socket.close()
    sizes = {name: getattr(given, name) for name in ("num_pages", "max_seqs", "max_tokens", "max_len")}
    try:
        engine, _ = build(given.model, given.device, getattr(torch, given.dtype), texts, **sizes)
    except ConfigurationError as error:  # such as a misspelt name in KERNELHUB_PREFER
        raise SystemExit(str(error)) from None
    for row in engine.kernels():
        print(f"layers {row['layers']}: {row['part']}: {row['kernel']} {row['runs']}")
    print(f"a KV cache of {PAGE * len(engine.free)} tokens, {engine.max_len} of a sequence")

    def end(number: int, _: object) -> None:
        """End as the signal would, but after the HTTP process: whoever waits for this one finds the port free."""
        process.terminate()
        process.join()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    try:
        pipe.send(engine.limits)
        pipe.recv()  # it listens
        print(f"serving {given.model} at http://{given.host}:{server.server_port}", flush=True)
        obey(engine, pipe)
    except (EOFError, OSError):
        pass
    raise SystemExit("the process that serves HTTP has ended")


if __name__ == "__main__":
    main()
