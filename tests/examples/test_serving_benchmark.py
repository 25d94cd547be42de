"""benchmarks/serving.py: figures of known timings, servers that fail, and a measurement that goes on where it ended."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ON_FILE = sorted((BENCHMARKS / "results").glob("serving*.json"))


@pytest.fixture(scope="module")
def serving() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("serving")
    sys.path.remove(str(BENCHMARKS))
    sys.modules.pop("serving", None)


def test_figures_of_known_timings(serving) -> None:
    prompt = serving.Prompt(10, 3)
    timings = [serving.Timing(prompt, 1.0, (1.1, 1.3, 1.4)), serving.Timing(prompt, 1.0, (1.5, 1.6, 2.0))]
    found = serving.figures(timings, price=3.6)
    assert (found["requests"], found["input_tokens"], found["output_tokens"]) == (2, 20, 6)
    assert found["seconds"] == pytest.approx(1.0)
    assert found["output_tokens_per_s"] == pytest.approx(6.0)
    assert found["ttft_ms_p50"] == pytest.approx(500.0)
    assert found["itl_ms_p99"] == pytest.approx(400.0)
    assert found["tpot_ms_p50"] == pytest.approx(250.0)
    assert found["tokens_per_event"] == pytest.approx(1.0)
    assert found["dollars_per_million_output_tokens"] == pytest.approx(3.6 / 3600 / 6 * 1e6, abs=1e-3)


def test_streams_that_came_late_are_said(serving) -> None:
    prompt = serving.Prompt(10, 6)
    row = {"engine": "vllm", "model": "m", "backend": "CUSTOM", "workload": "1k/1k", "concurrency": 8}
    for events, said in ((tuple(range(1, 7)), False), ((1, 2, 3), True)):
        found = serving.figures([serving.Timing(prompt, 0.0, events)], None)
        table = serving.table({"rows": [{**row, **found}]})
        assert ("late streams, up to 2.0 tokens per event: 1k/1k at 8 (CUSTOM)" in table) is said


def test_a_tokenizer_has_a_text_for_each_id(tmp_path: Path, serving) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from whole_tokenizer import main

    with pytest.raises(SystemExit, match="name the folder of a model"):
        main([str(tmp_path)])
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    main([str(tmp_path)])
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.decode(list(range(300)), skip_special_tokens=False) == "".join(f"t{at} " for at in range(300))
    assert made.encode("t7 t299 ").ids == [7, 299]


def test_a_request_that_fails_ends_the_cell(serving) -> None:
    failed = serving.Timing(serving.Prompt(10, 3), 1.0, (), "HTTP 400: too long")
    with pytest.raises(SystemExit, match="1 of 1 requests failed; the first: HTTP 400: too long"):
        serving.figures([failed], None)


def test_backends_come_in_both_orders(serving) -> None:
    assert serving.order(["A", "B", "C"], 2) == [("A", 0), ("B", 0), ("C", 0), ("C", 1), ("B", 1), ("A", 1)]


def test_cells_are_named_one_by_one(serving) -> None:
    assert serving.parsed(["--cells", "1k/1k@8,sharegpt@32x1"]).cells == [("1k/1k", 8, None), ("sharegpt", 32, 1)]


@pytest.mark.parametrize("wrong", ["1k/1k", "@8", "1k/1k@", "1k/1k@0", "1k/1k@8x", "1k/1k@8x0"])
def test_wrong_cells_say_how_they_are_written(serving, capsys, wrong: str) -> None:
    with pytest.raises(SystemExit):
        serving.parsed(["--cells", wrong])
    assert f"{wrong!r} is not WORKLOAD@C or WORKLOAD@CxR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--concurrency", "0"], "'0' is no list of numbers of clients, such as 1,8,32"),
        (["--concurrency", "1,x"], "'1,x' is no list of numbers of clients"),
        (["--concurrency", ""], "'' is no list of numbers of clients"),
        (["--runs", "0"], "--runs is 0; give 1 or more"),
        (["--rounds", "0"], "--rounds is 0; give 1 or more"),
        (["--warm-rounds", "-1"], "--warm-rounds is -1; give 0 or more"),
        (["--warm-output", "0"], "--warm-output is 0; give 1 or more"),
        (["--most-prompts", "0"], "--most-prompts is 0; give 1 or more"),
        (["--max-len", "1"], "--max-len is 1; give 2 or more"),
        (["--vocab", "2"], "--vocab is 2; give 3 or more"),
    ],
)
def test_wrong_options_end_before_a_server_starts(serving, capsys, arguments: list[str], reason: str) -> None:
    with pytest.raises(SystemExit):
        serving.parsed(arguments)
    assert reason in capsys.readouterr().err


def test_workloads(serving) -> None:
    assert serving.workload("1k/8k", 2, 9216) == [(1024, 8192)] * 2
    drawn = serving.workload("sharegpt", 2000, 8192)
    assert drawn == serving.workload("sharegpt", 2000, 8192)
    lengths = sorted(prompt.length for prompt in drawn)
    assert 95 < lengths[1000] < 125
    assert (lengths[0], lengths[-1]) == (4, 2048)
    with pytest.raises(SystemExit, match="neither sharegpt nor INPUT/OUTPUT"):
        serving.workload("chat", 1, 8192)
    with pytest.raises(SystemExit, match="give --max-len"):
        serving.workload("8k/1k", 1, 8192)
    with pytest.raises(SystemExit, match="'16/0' has 16 input and 0 output tokens; give 1 or more of each"):
        serving.workload("16/0", 1, 8192)


def test_lengths_that_were_drawn_are_in_the_results(
    serving, tmp_path: Path, slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def server(*given: Any) -> Iterator[Any]:
        yield serving.Server(slow, "m", 0.0)

    monkeypatch.setattr(serving, "server", server)
    monkeypatch.setattr(serving, "machine", dict)
    out = tmp_path / "out.json"
    options = ["--runs", "1", "--rounds", "1", "--warm-rounds", "0", "--max-len", "16", "--out", str(out)]
    serving.measure(serving.parsed([*options, "--cells", "sharegpt@6,sharegpt@4,8/4@1"]))
    lengths = json.loads(out.read_text())["lengths"]
    assert list(lengths) == ["sharegpt, --max-len 16"]
    kept = [serving.Prompt(*map(int, pair.split("/"))) for pair in lengths["sharegpt, --max-len 16"].split()]
    assert kept == serving.workload("sharegpt", 6, 16)
    rows = json.loads(out.read_text())["rows"]
    assert rows[0]["input_tokens"] == sum(prompt.length for prompt in kept)
    assert rows[1]["output_tokens"] == sum(prompt.output for prompt in kept[:4])


@pytest.mark.parametrize("path", ON_FILE, ids=lambda path: path.stem)
def test_results_on_file_have_the_lengths_of_their_prompts(path: Path) -> None:
    results = json.loads(path.read_text())
    kept = [
        [[int(size) for size in pair.split("/")] for pair in pairs.split()]
        for pairs in results.get("lengths", {}).values()
    ]
    for row in results["rows"]:
        if row["workload"] == "sharegpt" and "requests" in row:
            first = [tuple(map(sum, zip(*pairs[: row["requests"]], strict=True))) for pairs in kept]
            assert (row["input_tokens"], row["output_tokens"]) in first


class Slow(BaseHTTPRequestHandler):
    """A server whose first token comes after 50 ms, and each other after 20 ms; `broken` ends its streams early."""

    broken = False

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for place in range(1 if self.broken else said["max_tokens"]):
            time.sleep(0.02 if place else 0.05)
            self.wfile.write(b'data: {"choices": []}\n\n')
            self.wfile.flush()
        if not self.broken:
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def slow() -> Iterator[tuple[str, int]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield ("127.0.0.1", server.server_port)
    server.shutdown()
    Slow.broken = False


def test_the_driver_measures_what_the_server_does(serving, slow) -> None:
    timings = serving.drive(slow, "m", [serving.Prompt(5, 4)] * 6, 3, 0, 100)
    found = serving.figures(timings, None)
    assert found["requests"] == 6
    assert 50 <= found["ttft_ms_p50"] < 150
    assert 20 <= found["itl_ms_p50"] < 60
    assert 20 <= found["tpot_ms_p50"] < 60
    assert 0.2 <= found["seconds"] < 1.5  # two rounds of 110 ms, three at a time


def test_a_stream_that_ends_early_is_a_failure(serving, slow) -> None:
    Slow.broken = True
    assert "ended early" in serving.complete(slow, "m", serving.Prompt(5, 4), 0, 100).error
    assert "Refused" in serving.complete(("127.0.0.1", 9), "m", serving.Prompt(5, 4), 0, 100).error


@pytest.fixture
def port() -> str:
    """A port that no server has: tests in other processes start servers, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.full
def test_a_measurement_goes_on_where_the_one_before_ended(serving, tmp_path, capsys, port) -> None:
    out = tmp_path / "serving.json"
    arguments = [
        "--port",
        port,
        "--backends",
        "torch",
        "--workloads",
        "8/4",
        "--runs",
        "1",
        "--max-len",
        "64",
        "--out",
        str(out),
    ]
    arguments += ["--warm-output", "2", "--engine-options", "--max-tokens 16 --num-pages 32"]
    serving.main([*arguments, "--concurrency", "1"])
    first = json.loads(out.read_text())["rows"]
    assert [(row["backend"], row["concurrency"], row["output_tokens"]) for row in first] == [("torch", 1, 40)]
    serving.main([*arguments, "--concurrency", "1,2"])
    rows = json.loads(out.read_text())["rows"]
    assert rows[:1] == first
    assert [(row["backend"], row["concurrency"]) for row in rows[1:]] == [("torch", 2)]
    assert "llama-tiny, 8/4, 2" in capsys.readouterr().out
    serving.main([*arguments, "--concurrency", "1,2,4", "--budget", "0"])
    assert json.loads(out.read_text())["rows"] == rows


def test_a_server_that_does_not_start_is_shown_with_its_log(serving, tmp_path, port) -> None:
    out = tmp_path / "new folder" / "out.json"
    options = ["--model", "no-such-model", "--out", str(out), "--runs", "1", "--port", port]
    given = serving.parsed(options)
    with pytest.raises(SystemExit, match="no-such-model is no folder with a config"):
        serving.measure(given)


def test_the_picture_has_a_bar_for_each_backend_of_each_cell(serving, tmp_path) -> None:
    pytest.importorskip("matplotlib")

    def row(backend: str, clients: int, rate: float) -> dict[str, Any]:
        figures = {"output_tokens_per_s": rate, "ttft_ms_p50": 5.0, "itl_ms_p50": 2.0}
        return {"model": "/m/llama", "workload": "1k/1k", "concurrency": clients, "backend": backend, **figures}

    rows = [row("A", 1, 90.0), row("B", 1, 80.0), row("A", 1, 110.0), row("A", 8, 500.0)]
    figure = serving.picture({"rows": rows})
    rates = figure.axes[0]
    assert [patch.get_width() for patch in rates.patches[:3]] == [100.0, 80.0, 500.0]
    assert [label.get_text() for label in rates.get_yticklabels()] == [
        "llama, 1k/1k, 1 clients",
        "llama, 1k/1k, 8 clients",
    ]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    serving.main(["--show", "--out", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")])
    assert (tmp_path / "rows.png").stat().st_size > 5000


def test_a_run_of_which_output_tokens_alone_are_known_is_shown(serving) -> None:
    cell = {"model": "m", "workload": "1k/1k", "concurrency": 8}
    known = dict.fromkeys(serving.FIGURES, 4.0)
    rows = [
        cell | {"backend": "A", "output_tokens_per_s": 90.0},
        cell | {"backend": "A"} | known | {"output_tokens_per_s": 110.0},
        cell | {"backend": "B"} | known | {"output_tokens_per_s": 50.0},
        cell | {"backend": "C", "output_tokens_per_s": 25.0},
    ]
    lines = serving.table({"rows": rows}).splitlines()[1:]
    assert "100.0 ±10.0 (2.00x)" in lines[0]
    assert lines[0].count("4.0 (1.00x)") == len(serving.FIGURES) - 1
    assert lines[2].split()[-2:] == ["25.0", "(0.25x)"]


@pytest.mark.parametrize("path", ON_FILE, ids=lambda path: path.stem)
def test_results_on_file_can_be_shown(serving, capsys, path: Path) -> None:
    serving.main(["--show", "--out", str(path)])
    said = capsys.readouterr().out.splitlines()
    assert len(said) > len({row["backend"] for row in json.loads(path.read_text())["rows"]})


def test_a_port_of_another_server_is_refused(serving, slow, tmp_path) -> None:
    options = ["--out", str(tmp_path / "out.json"), "--runs", "1", "--workloads", "8/4", "--port", str(slow[1])]
    with pytest.raises(SystemExit, match=f"port {slow[1]} is in use by another server.*--port"):
        serving.measure(serving.parsed(options))


VLLM = """#!{python}
import json, sys, pathlib
given = dict(zip(sys.argv[3::1], sys.argv[4::1]))
if "broken" in given.values():
    sys.exit("no such backend")
if sys.argv[1:3] == ["bench", "serve"]:
    found = {{"output_throughput": 123.4, "median_ttft_ms": 5.0, "completed": int(given["--num-prompts"])}}
    if given["--model"] == "gone":
        print("Connection refused")
        found["completed"] -= 1
    pathlib.Path(given["--result-dir"], given["--result-filename"]).write_text(json.dumps(found))
elif sys.argv[2] == "latency":
    pathlib.Path(given["--output-json"]).write_text(json.dumps({{"latencies": [0.5, 0.4, 0.9]}}))
else:
    count = int(given["--num-prompts"])
    found = {{"num_requests": count, "elapsed_time": 2.0, "tokens_per_second": count * 12 / 2}}
    pathlib.Path(given["--output-json"]).write_text(json.dumps(found))
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch) -> None:
    """A `vllm` that writes the results that vLLM 0.33's benchmarks write."""
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(VLLM.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")


@pytest.mark.full
def test_a_cell_is_measured_by_vllm_s_client_on_the_same_server(serving, tmp_path, capsys, port, vllm) -> None:
    out = tmp_path / "serving.json"
    arguments = ["--port", port, "--backends", "torch", "--cells", "8/4@1x4", "--vllm-cells", "8/4@2x3", "--runs", "1"]
    arguments += ["--max-len", "64", "--out", str(out), "--engine-options", "--max-tokens 16 --num-pages 32"]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    arguments += ["--tokenizer", str(tmp_path)]
    serving.main(arguments)
    own, theirs = json.loads(out.read_text())["rows"]
    assert "client" not in own
    assert (theirs["client"], theirs["concurrency"], theirs["requests"]) == ("vllm bench serve", 2, 6)
    assert (theirs["output_tokens_per_s"], theirs["ttft_ms_p50"]) == (123.4, 5.0)
    assert "example: torch by vllm bench serve" in capsys.readouterr().out
    serving.main(arguments)
    assert len(json.loads(out.read_text())["rows"]) == 2


def test_vllm_s_client_has_no_lengths_of_ours(serving, capsys) -> None:
    with pytest.raises(SystemExit):
        serving.parsed(["--vllm-cells", "sharegpt@8"])
    assert "INPUT/OUTPUT alone" in capsys.readouterr().err


def test_vllm_s_client_needs_a_tokenizer(serving, capsys) -> None:
    with pytest.raises(SystemExit):
        serving.parsed(["--vllm-cells", "8/4@2"])
    assert "llama-tiny has no tokenizer_config.json; --tokenizer" in capsys.readouterr().err


def test_vllm_s_latency_and_throughput_of_each_backend(serving, tmp_path, vllm) -> None:
    bench, out = importlib.import_module("vllm_bench"), tmp_path / "results.json"
    given = ["--model", "m", "--backends", "A,B", "--workload", "8/4", "--out", str(out)]
    bench.main(["latency", *given, "--batch", "2"])
    bench.main(["throughput", *given, "--prompts", "10"])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["what"], row["backend"]) for row in rows] == [
        ("latency", "A"),
        ("latency", "B"),
        ("throughput", "A"),
        ("throughput", "B"),
    ]
    assert (rows[0]["batch_s_p50"], rows[0]["batch_s_max"], rows[0]["output_tokens_per_s"]) == (0.5, 0.9, 16.0)
    assert (rows[2]["seconds"], rows[2]["total_tokens_per_s"], rows[2]["output_tokens_per_s"]) == (2.0, 60.0, 20.0)
    bench.main(["latency", *given, "--batch", "2"])
    assert json.loads(out.read_text())["rows"] == rows
    with pytest.raises(SystemExit, match="vllm bench latency ended with 1:\nno such backend"):
        bench.main(["latency", *given, "--backends", "broken"])


def test_requests_that_failed_for_vllm_s_client_are_said(serving, vllm) -> None:
    with pytest.raises(SystemExit, match="2 of 3 requests were completed:\nConnection refused"):
        importlib.import_module("vllm_client").served(("localhost", 1), "gone", "m", (8, 4), 3, 1)


def test_a_vllm_that_is_not_there_is_said(serving, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="vllm is not on PATH: install vLLM"):
        importlib.import_module("vllm_client").ran(["vllm", "bench"], tmp_path / "result.json", 1.0)
