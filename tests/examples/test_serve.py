"""examples/serve.py: the tokens are those of transformers; the server answers right and wrong input."""

from __future__ import annotations

import http.client
import importlib
import json
import multiprocessing
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelhub

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # attention is sharp, so that what is left out shows
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, rope_scaling=ROPE | {"original_max_position_embeddings": 64})
    ),
    "qwen3, tied": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True
        )
    ),
}
PROMPTS = [list(b"The kettle began to sing."), [7], list(b"It was the first cold morning of the year, " * 2)]


@pytest.fixture(scope="module")
def serve() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("serve")
    sys.path.remove(str(EXAMPLES))
    for name in ("serve", "serve_engine", "serve_http", "serve_model"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def unsealed() -> Iterator[None]:
    yield
    kernelhub.unseal()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Checkpoints, and the models that they are of."""
    made = {}
    for name, model_of in MODELS.items():
        torch.manual_seed(0)
        model = model_of().eval()
        folder = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(folder)
        made[name] = folder, model
    return made


def built(serve: Any, folder: Path | str, **sizes: int) -> Any:
    given = {"num_pages": 64, "max_seqs": 4, "max_tokens": 64, "max_len": 128} | sizes
    engine, tokenizer = serve.build(str(folder), torch.device("cpu"), torch.float32, "bytes", **given)
    return engine, tokenizer


def unwarmed(serve: Any, **sizes: int) -> Any:
    """An engine that has not been started."""
    config, given = serve.SHAPES["llama-tiny"], {"num_pages": 64, "max_seqs": 4, "max_len": 128} | sizes
    weights = serve.random_weights(config, torch.device("cpu"), torch.float32)
    return serve.Engine(serve.Model(config, weights), **given)


def completed(serve: Any, engine: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """What the engine generates, all requests at once, greedily."""
    requests = [serve.Request(list(prompt), tokens, ignore_eos=True) for prompt in prompts]
    for request in requests:
        engine.add(request)
    for _ in range(500):
        if not engine.running and not engine.waiting:
            break
        engine.step()
    return [request.ids[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)]


def wanted(model: Any, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """What transformers generates, each request alone."""
    found = []
    for prompt in prompts:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(tokens):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(serve, folders, name) -> None:
    folder, model = folders[name]
    engine, _ = built(serve, folder)
    assert completed(serve, engine, PROMPTS, 12) == wanted(model, PROMPTS, 12)
    assert len(engine.free) == 63
    assert not kernelhub.report().after_seal
    ops = {row["part"] for row in engine.kernels() if row["kernel"] != "not yet"}
    assert ops == {"attention, decode", "attention, mixed with prefill", "write_kv_cache", "rms_norm_quant"} | (
        {"route_experts", "fused_moe"} if name == "qwen3_moe" else {"silu_and_mul_quant"}
    )


def test_chunks_of_prompts_and_preemption_change_no_token(serve, folders) -> None:
    folder, model = folders["llama"]
    want = wanted(model, PROMPTS * 2, 20)
    engine, _ = built(serve, folder, num_pages=11, max_tokens=8, max_len=128)
    engine.graphs[4] = lambda: engine._decode(4, None)  # as a graph does: of four sequences, some of them padding
    assert completed(serve, engine, PROMPTS * 2, 20) == want
    assert engine.preempted
    assert len(engine.free) == 10


def test_steps_mix_prompts_with_decodes_up_to_their_budget(serve) -> None:
    engine = unwarmed(serve, max_tokens=16)
    first, second = serve.Request([1] * 6, 8), serve.Request([2] * 40, 8)
    engine.add(first)
    engine.step()
    engine.add(second)
    taken = []
    while second.generated == 0:
        before = first.computed, second.computed
        engine.step()
        taken.append((first.computed - before[0], second.computed - before[1]))
    assert taken == [(1, 15), (1, 15), (1, 10)]
    assert [first.results.get_nowait()[1] for _ in range(first.generated)] == [""] * 4


def test_the_cache_has_room_for_all_sequences_if_memory_allows(serve, monkeypatch) -> None:
    """A cache for fewer makes requests wait for others to end."""
    monkeypatch.setattr(serve.Engine, "start", lambda engine: None)
    engine, _ = built(serve, "llama-tiny", num_pages=0, max_seqs=3, max_len=128)
    assert len(engine.free) == 3 * 8
    config, gib = serve.SHAPES["llama-3.1-8b"], 1 << 30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gib, 80 * gib))
    for wanted, pages in ((4609, 4609), (1 << 20, 48 * gib // (2 * 32 * 16 * 8 * 128 * 2))):
        assert serve.pages_that_fit(config, torch.device("cuda"), torch.bfloat16, wanted) == pages
    monkeypatch.setattr(serve, "pages_that_fit", lambda *of: -3)
    with pytest.raises(SystemExit, match="llama-tiny leaves no memory for a KV cache"):
        built(serve, "llama-tiny", num_pages=0)


def test_a_request_that_can_never_run_is_refused(serve) -> None:
    engine, _ = built(serve, "llama-tiny", max_len=64)
    for ids, most, reason in (([], 4, "empty"), ([1] * 60, 8, "68|60 tokens of prompt and 8"), ([512], 4, "0 to 511")):
        with pytest.raises(ValueError, match=reason):
            engine.add(serve.Request(ids, most))


def test_wrong_models_end_with_the_reason(serve, folders, tmp_path) -> None:
    with pytest.raises(SystemExit, match=r"no folder with a config\.json, and no shape: llama-tiny"):
        built(serve, "llama-tyni")
    for text, reason in (
        ('{"model_type": "gemma3"}', "model_type 'gemma3'"),
        ('{"model_type": "llama"}', "config.json has no num_attention_heads"),
        ("{", "config.json is not JSON"),
        ("[1]", "holds no object"),
        (
            '{"model_type": "llama", "num_attention_heads": "x", "hidden_size": 8, "num_hidden_layers": 1}',
            "value of another type",
        ),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SystemExit, match=reason):
            built(serve, tmp_path)
    folder, _ = folders["llama"]
    said = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"num_hidden_layers": 3}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(SystemExit, match=r"layers\.2.* is missing; config\.json asks for"):
        built(serve, tmp_path)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"mlp_only_layers": [0]}, "dense layers among experts"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(serve, folders, tmp_path, given, reason) -> None:
    said = json.loads((folders["qwen3_moe"][0] / "config.json").read_text())
    said.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(said | given))
    with pytest.raises(SystemExit, match=f"{reason} is not supported.*serve the model with vLLM or SGLang"):
        built(serve, tmp_path)


def test_a_checkpoint_needs_its_tokenizer(serve, folders, tmp_path, capsys) -> None:
    folder, _ = folders["llama"]
    sizes = {"num_pages": 16, "max_seqs": 2, "max_tokens": 16, "max_len": 32}
    given = torch.device("cpu"), torch.float32
    with pytest.raises(SystemExit, match=r"there is no .*tokenizer\.json: put it there, or give --tokenizer FOLDER"):
        serve.build(str(folder), *given, **sizes)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"tokenizer\.json cannot be read"):
        serve.build(str(folder), *given, str(tmp_path), **sizes)
    assert "random" not in capsys.readouterr().out


def test_random_weights_and_broken_ones_are_said(serve, folders, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(serve.Engine, "start", lambda engine: None)
    (tmp_path / "config.json").write_text((folders["llama"][0] / "config.json").read_text())
    built(serve, tmp_path)
    assert f"{tmp_path} has no *.safetensors: its weights are random" in capsys.readouterr().out
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(SystemExit, match=r"model\.safetensors cannot be read"):
        built(serve, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--max-seqs 0", "--max-seqs is 0; give 1 or more"),
        ("--max-len 1", "--max-len is 1; give 2 or more"),
        ("--max-tokens -5", "--max-tokens is -5; give 0 or more"),
        ("--num-pages 1", "one page stays unused"),
        ("--device gpu", "--device is 'gpu'; give cpu, cuda or cuda:1"),
        ("--device meta", "--device is meta; give cpu"),
        ("--device cuda:99", "GPUs here"),
    ],
)
def test_wrong_options_end_with_the_reason(serve, monkeypatch, capsys, arguments, reason) -> None:
    monkeypatch.setattr(sys, "argv", ["serve.py", *arguments.split()])
    with pytest.raises(SystemExit):
        serve.main()
    assert reason in capsys.readouterr().err


def test_a_misspelt_kernel_of_a_variable_ends_with_the_nearest_name() -> None:
    environment = {**os.environ, "KERNELHUB_PREFER": "trition", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "serve.py"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "KERNELHUB_PREFER=trition: 'trition' is not a backend or kernel (did you mean triton?)"
    )


def test_an_address_that_cannot_be_had_ends_before_weights_are_read(serve, monkeypatch) -> None:
    monkeypatch.setattr(serve, "build", lambda *given, **sizes: pytest.fail("the model was built"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments in (f"--port {taken.getsockname()[1]}", "--port 99999", "--host 203.0.113.1"):
            monkeypatch.setattr(sys, "argv", ["serve.py", *arguments.split()])
            with pytest.raises(SystemExit, match=r"cannot serve at .*; give --host or --port"):
                serve.main()


@pytest.fixture(scope="module")
def server(serve) -> Iterator[Any]:
    engine, tokenizer = built(serve, "llama-tiny")
    threading.Thread(target=engine.serve, daemon=True).start()
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), serve.serve_http.handler(engine, tokenizer, "llama-tiny"))
    threading.Thread(target=http_server.serve_forever, daemon=True).start()

    def ask(path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", http_server.server_port, timeout=60)
        text = body if body is None or isinstance(body, str) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, text)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    ask.engine, ask.port = engine, http_server.server_port
    yield ask
    http_server.shutdown()


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def test_the_server_completes_streams_and_shows_its_kernels(server) -> None:
    body = {"prompt": "Hello", "max_tokens": 6, "temperature": 0}
    status, text = server("/v1/completions", body)
    whole = json.loads(text)
    assert (status, whole["choices"][0]["finish_reason"]) == (200, "length")
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    status, text = server("/v1/completions", body | {"stream": True})
    *parts, last = events(text)
    assert last == "[DONE]"
    choices = [json.loads(part)["choices"][0] for part in parts]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["length"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, counts, last = events(server("/v1/completions", body | options)[1])
    assert len(parts) == 6
    assert (json.loads(counts)["choices"], json.loads(counts)["usage"]) == ([], whole["usage"])
    status, text = server("/stats")
    stats = json.loads(text)
    assert (status, stats["compiled_after_seal"]) == (200, [])
    assert stats["tokens"] >= 12
    mixed = kernelhub.explain("paged_attention", q_len="many", q_dtype="float32", ragged=True, causal=True).selected
    assert [row["kernel"] for row in stats["layers"][:2]] == ["cpp.split_kv", mixed]
    assert "not yet" not in [row["kernel"] for row in stats["layers"]]
    assert json.loads(server("/v1/models")[1])["data"][0]["id"] == "llama-tiny"
    assert "<title>kernelhub" in server("/")[1]


def test_many_clients_at_once_get_what_each_gets_alone(server) -> None:
    bodies = [{"prompt": [token] * (3 + token), "max_tokens": 9, "temperature": 0} for token in range(1, 9)]
    alone = [json.loads(server("/v1/completions", body)[1])["choices"] for body in bodies]
    found: dict[int, Any] = {}

    def ask(place: int) -> None:
        found[place] = json.loads(server("/v1/completions", bodies[place])[1])["choices"]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(bodies))] == alone


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{", "the body is not JSON"),
        ([], "no JSON object"),
        ({}, "prompt is neither a string nor a list of token ids"),
        ({"prompt": ["a", "b"]}, "prompt is neither"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [512]}, "token 512 is none of 0 to 511"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; give 1 or more"),
        ({"prompt": "a", "max_tokens": "3"}, "max_tokens is '3'"),
        ({"prompt": "a", "max_tokens": 4096}, "more than the 128"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "stream": "yes"}, "true or false"),
        ({"prompt": "a", "stream_options": 1}, "stream_options is no JSON object"),
        ({"prompt": "a", "stream_options": {"include_usage": "yes"}}, "include_usage are true or false"),
        ({"prompt": "a", "model": "gpt-4"}, "there is no model 'gpt-4'; this server has 'llama-tiny'"),
        ({"prompt": "a", "n": 2}, "n is not supported"),
        ({"prompt": "a", "logprobs": 5}, "logprobs is not supported"),
    ],
)
def test_wrong_requests_get_the_reason(server, body, reason) -> None:
    status, text = server("/v1/completions", body)
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")
    assert reason in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("header", ["Content-Length: abc", "Content-Length: -5", "Transfer-Encoding: chunked"])
def test_a_body_of_unknown_length_is_answered(server, header) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: here\r\n{header}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 411 ")
    assert b"no Content-Length" in answer


def test_a_client_that_leaves_before_its_answer_is_no_error(server, serve) -> None:
    errors: list[Any] = []

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # server_close waits for them

        def handle_error(self, request: Any, client_address: Any) -> None:
            errors.append(sys.exc_info()[1])

    http_server = Server(
        ("127.0.0.1", 0), serve.serve_http.handler(server.engine, serve.serve_http.Bytes(), "llama-tiny")
    )
    threading.Thread(target=http_server.serve_forever, daemon=True).start()
    with socket.create_connection(("127.0.0.1", http_server.server_port), timeout=60) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 ")  # from here on the server reads the body
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset when closed
    http_server.shutdown()
    http_server.server_close()
    assert errors == []


def test_other_paths_say_what_there_is(server) -> None:
    for path, body in (("/v2", None), ("/v1/chat/completions", {})):
        status, text = server(path, body)
        assert status == 404
        assert "/v1/completions" in text


def test_a_client_that_leaves_gives_its_pages_back(server, serve) -> None:
    engine = server.engine
    request = serve.Request([1, 2, 3], 100, ignore_eos=True)
    engine.add(request)
    request.results.get()
    request.aborted = True
    while request.results.get()[0] is not None:
        pass
    assert request.generated < 100
    assert len(engine.free) == 63


@pytest.fixture(scope="module")
def front(serve) -> Any:
    """The HTTP process's side of an engine, with the pipe between them."""
    engine, _ = built(serve, "llama-tiny")
    pipe, end = multiprocessing.Pipe()
    made = serve.serve_http.Front(end, engine.limits)
    made.engine = engine
    for run in (lambda: serve.obey(engine, pipe), made.receive):
        threading.Thread(target=run, daemon=True).start()
    return made


def test_requests_from_another_process_get_their_tokens(serve, front) -> None:
    requests = [serve.Request(list(prompt), 12, ignore_eos=True) for prompt in PROMPTS]
    for request in requests:
        front.add(request)
    given = [[request.results.get(timeout=60) for _ in range(12)] for request in requests]
    assert [[reason for _, reason in results] for results in given] == [[""] * 11 + ["length"]] * 3
    assert [[token for token, _ in results] for results in given] == [request.ids[-12:] for request in requests]
    assert [request.ids[:-12] for request in requests] == PROMPTS
    assert [request.generated for request in requests] == [12] * 3
    alone = unwarmed(serve)
    wanted = completed(serve, alone, PROMPTS, 12)
    assert [request.ids[-12:] for request in requests] == wanted
    assert not front.requests
    assert front.stats()["tokens"] >= 36


def test_another_process_refuses_and_aborts_requests(serve, front) -> None:
    with pytest.raises(ValueError, match="more than the 128"):
        front.add(serve.Request([1], 128))
    request = serve.Request([1, 2, 3], 100, ignore_eos=True)
    front.add(request)
    request.results.get(timeout=60)
    front.abort(request)
    results = list(iter(lambda: request.results.get(timeout=60), (None, "abort")))
    assert len(results) < 99
    front.abort(request)  # whose end may have met it on its way
    while front.stats()["running"]:
        pass
    assert front.stats()["free_pages"] == 63


@pytest.mark.full
class TestProcesses:
    """The server as a user starts it: an engine's process and one for HTTP."""

    @pytest.fixture
    def started(self) -> Iterator[tuple[subprocess.Popen[str], int]]:
        command = [sys.executable, "examples/serve.py", "--port", "0", "--max-tokens", "64", "--max-len", "128"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        made = subprocess.Popen(
            [*command, "--max-seqs", "4"],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        found = next((re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in made.stdout if "http://" in line), None)
        assert found is not None, made.communicate()
        yield made, int(found[1])
        made.kill()
        made.wait()

    def front_of(self, made: subprocess.Popen[str]) -> int:
        children = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()
        return next(int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text())

    def test_many_clients_connect_at_once(self, started) -> None:
        """A connection beyond the queue of those that wait would be tried again after a second."""
        made, port = started
        front = self.front_of(made)
        os.kill(front, signal.SIGSTOP)  # so that none of them is accepted meanwhile
        held = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(128)]
        os.kill(front, signal.SIGCONT)
        for connection in held:
            connection.settimeout(60)
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        for connection in held:
            with connection:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")

    @pytest.mark.parametrize("which", ["engine", "http"])
    def test_no_process_stays_when_the_other_ends(self, started, which) -> None:
        made, port = started
        front = self.front_of(made)
        os.kill(made.pid if which == "engine" else front, signal.SIGTERM)
        _, errors = made.communicate(timeout=60)
        assert made.returncode == (-signal.SIGTERM if which == "engine" else 1)
        assert which == "engine" or "the process that serves HTTP has ended" in errors
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", port), timeout=60)


@pytest.mark.parametrize("strips", [False, True], ids=["bytes", "a tokenizer that strips the first space"])
def test_streamed_pieces_are_the_text_of_all_tokens(serve, strips) -> None:
    """Characters of several bytes come whole, and each token is decoded a fixed number of times."""
    text = "h\u00e9llo w\u00f6rld \u03bb\U0001f600 and more"
    sizes: list[int] = []

    class Tokenizer(serve.serve_http.Bytes):
        def decode(self, ids: list[int]) -> str:
            sizes.append(len(ids))
            decoded = super().decode(ids)
            return decoded.removeprefix(" ") if strips else decoded

    request = serve.Request([1], 64)
    *first, last = text.encode()
    for token in first:
        request.results.put((token, ""))
    request.results.put((last, "length"))
    parts = list(serve.serve_http.pieces(request, Tokenizer()))
    assert "".join(new for new, _ in parts) == text
    assert [reason for _, reason in parts if reason] == ["length"]
    assert not any("\ufffd" in new for new, _ in parts)
    assert max(sizes) <= 8
