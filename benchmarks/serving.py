"""Serving: engines with kernelhub's attention and with others, driven over HTTP as clients do.

    python benchmarks/serving.py --engine example --model llama-tiny --workloads 64/16 --concurrency 1,4
    python benchmarks/serving.py --engine vllm --model /models/llama8b --backends CUSTOM,FLASH_ATTN \\
        --workloads 1k/1k,8k/1k,1k/8k,sharegpt --concurrency 1,8,32,128 --budget 520 --out results.json

Every backend gets a server of its own, started fresh, in the order A B C C B A; one pass of all cells on one server is
a run. A cell is a workload at a concurrency C: all of --workloads at all of --concurrency, or those of --cells. It has
2 C prompts to warm up (--warm-rounds, --warm-output), then 10 C (--rounds and at least 4, or its own: 1k/8k@8x1; at
most --most-prompts), C at a time, each a list of seeded token ids, `ignore_eos`, streamed. Results go to --out after
each cell; a later command with the same --out goes on with what is missing, so that commands with a --budget add up.
The lengths that sharegpt drew are in it, too.
`--show` prints the table, `--plot` draws it. --vllm-cells are measured by `vllm bench serve`, too, on the same server
(vllm_client.py): rows with a "client".

TTFT: from sending a request to its first token. ITL: between two events of a stream. TPOT: the time of a request after
its first token over its other tokens. Output tokens are those that were asked for. Tokens per event: above 1 the
server joined tokens since it, or this client, did not keep up; then the table says so, and ITL is no property of a
kernel. Models of random weights need a tokenizer with a text for each id (whole_tokenizer.py). The price is --price
dollars per hour.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import platform
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from vllm_client import needed, served

ROOT = Path(__file__).parents[1]
VLLM = "vllm bench serve"
FIGURES = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "tpot_ms_p50", "output_tokens_per_s")
JOINED = 1.05  # tokens per event, above which streams were late
HIGHER_IS_BETTER = {"output_tokens_per_s", "total_tokens_per_s"}


class Prompt(NamedTuple):
    """A request's sizes in tokens."""

    length: int
    output: int


class Cell(NamedTuple):
    """A workload at a concurrency, and prompts for each client; `rounds` None: those of the command."""

    workload: str
    clients: int
    rounds: int | None = None


class Timing(NamedTuple):
    """When a request was sent and its events with text came, in seconds; `error` if it failed."""

    prompt: Prompt
    sent: float
    events: tuple[float, ...]
    error: str = ""


def workload(name: str, count: int, longest: int) -> list[Prompt]:
    """Sizes of the prompts of a workload: ``1k/1k`` and the like, or ``sharegpt``.

    ``sharegpt`` draws log-normal lengths as ShareGPT's are: medians of 110 and 130, sigmas of 1.3 and 1.0, 4 to 2048.

    Raises:
        SystemExit: the workload is unknown, or longer than the model serves.
    """
    if name == "sharegpt":
        draw = random.Random(0)
        clip = min(2048, longest // 2)
        sizes = [
            (draw.lognormvariate(math.log(110), 1.3), draw.lognormvariate(math.log(130), 1.0)) for _ in range(count)
        ]
        return [Prompt(*(int(min(max(size, 4), clip)) for size in pair)) for pair in sizes]
    parts = re.fullmatch(r"(\d+)(k?)/(\d+)(k?)", name)
    if parts is None:
        raise SystemExit(f"workload {name!r} is neither sharegpt nor INPUT/OUTPUT, such as 1k/1k or 64/16")
    length, output = (int(parts[at]) * (1024 if parts[at + 1] else 1) for at in (1, 3))
    if not length or not output:
        raise SystemExit(f"workload {name!r} has {length} input and {output} output tokens; give 1 or more of each")
    if length + output > longest:
        raise SystemExit(f"workload {name} has {length + output} tokens; the server takes {longest}: give --max-len")
    return [Prompt(length, output)] * count


def complete(address: tuple[str, int], model: str, prompt: Prompt, seed: int, vocab: int) -> Timing:
    """Stream one completion."""
    draw = random.Random(seed)
    ids = [draw.randrange(2, vocab) for _ in range(prompt.length)]
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": prompt.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    events: list[float] = []
    connection = http.client.HTTPConnection(*address, timeout=600)
    sent = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return Timing(prompt, sent, (), f"HTTP {answer.status}: {answer.read()[:300].decode(errors='replace')}")
        ended = False
        for line in answer:
            if line.startswith(b"data:"):
                if line[5:].strip() == b"[DONE]":
                    ended = True
                    break
                events.append(time.perf_counter())
    except (OSError, http.client.HTTPException) as error:
        return Timing(prompt, sent, tuple(events), f"{type(error).__name__}: {error}")
    finally:
        connection.close()
    return Timing(prompt, sent, tuple(events), "" if ended and events else "the stream ended early")


def drive(
    address: tuple[str, int], model: str, prompts: Sequence[Prompt], concurrency: int, seed: int, vocab: int
) -> list[Timing]:
    """All prompts, so many at a time: a client sends its next request when the one before has ended.

    One process reads at most 5000 to 9000 events a second, so that from 9 clients on several processes share them.
    """
    processes = max(1, min(-(-concurrency // 8), len(os.sched_getaffinity(0)) // 2))
    shares = [concurrency // processes + (rank < concurrency % processes) for rank in range(processes)]
    context = multiprocessing.get_context("spawn")
    following = context.Value("q", 0)
    given = (following, address, model, prompts, seed, vocab)
    if processes == 1:
        return _clients(concurrency, *given)
    with ProcessPoolExecutor(processes, context, _take, (following,)) as pool:
        list(pool.map(_ready, range(processes)))  # they have started before the first request is sent
        parts = [pool.submit(_clients, share, None, *given[1:]) for share in shares]
        return [timing for part in parts for timing in part.result()]


_following: Any = None


def _take(following: Any) -> None:
    global _following
    _following = following


def _ready(_: int) -> None:
    time.sleep(0.2)  # so that no process takes two of these calls


def _clients(
    count: int,
    following: Any,
    address: tuple[str, int],
    model: str,
    prompts: Sequence[Prompt],
    seed: int,
    vocab: int,
) -> list[Timing]:
    """So many clients as threads of this process, which share the number of the next prompt with other processes."""
    following = following or _following
    timings: list[Timing] = []

    def client() -> None:
        while True:
            with following.get_lock():
                place = following.value
                following.value += 1
            if place >= len(prompts):
                return
            timings.append(complete(address, model, prompts[place], seed * 1_000_003 + place, vocab))

    threads = [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return timings


def share(values: Sequence[float], part: float) -> float:
    """The value below which a part of them is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def figures(timings: Sequence[Timing], price: float | None) -> dict[str, Any]:
    """The figures of a cell.

    Raises:
        SystemExit: a request failed; the text has its error.
    """
    failed = [timing.error for timing in timings if timing.error]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(timings)} requests failed; the first: {failed[0]}")
    first = [1e3 * (timing.events[0] - timing.sent) for timing in timings]
    gaps = [1e3 * (b - a) for timing in timings for a, b in zip(timing.events, timing.events[1:], strict=False)]
    rest = [
        1e3 * (timing.events[-1] - timing.events[0]) / (timing.prompt.output - 1)
        for timing in timings
        if timing.prompt.output > 1
    ]
    wall = max(timing.events[-1] for timing in timings) - min(timing.sent for timing in timings)
    given, made = (sum(timing.prompt[at] for timing in timings) for at in (0, 1))
    found = {
        "requests": len(timings),
        "input_tokens": given,
        "output_tokens": made,
        "seconds": wall,
        "output_tokens_per_s": made / wall,
        "total_tokens_per_s": (given + made) / wall,
        "tokens_per_event": made / sum(len(timing.events) for timing in timings),
    }
    for name, values in (("ttft", first), ("itl", gaps), ("tpot", rest)):
        for part in (50, 99) if values else ():
            found[f"{name}_ms_p{part}"] = share(values, part / 100)
    if price is not None:
        found["dollars_per_million_output_tokens"] = price / 3600 / found["output_tokens_per_s"] * 1e6
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


class Server(NamedTuple):
    """A server that answers."""

    address: tuple[str, int]
    model: str
    start_s: float


@contextlib.contextmanager
def server(engine: str, backend: str, given: argparse.Namespace, log: Path) -> Iterator[Server]:
    """Start an engine's server, and stop it in the end.

    Raises:
        SystemExit: it ended, or did not answer within --start-timeout; the text has the end of its log. Or something
            else has the port, which would be measured in its place.
    """
    port = given.port
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise SystemExit(f"port {port} is in use by another server: end that, or give another --port")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    if engine == "example":
        command = [sys.executable, str(ROOT / "examples" / "serve.py"), "--model", given.model, "--port", str(port)]
        command += ["--max-len", str(given.max_len), "--max-seqs", str(_most_clients(given))]
        command += given.engine_options.split()
        if backend != "auto":
            environment["KERNELHUB_PREFER"] = backend
    else:
        needed("vllm")
        command = ["vllm", "serve", given.model, "--port", str(port), "--attention-backend", backend]
        command += ["--max-model-len", str(given.max_len), "--no-enable-prefix-caching"]
        command += ["--max-num-seqs", str(_most_clients(given)), *given.engine_options.split()]
    begun = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        while (model := _model_of(("127.0.0.1", port))) is None:
            if process.poll() is not None or time.monotonic() - begun > given.start_timeout:
                state = "ended" if process.poll() is not None else f"has not answered for {given.start_timeout:g} s"
                raise SystemExit(f"{engine} {backend} {state}:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield Server(("127.0.0.1", port), model, round(time.monotonic() - begun, 2))
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _most_clients(given: argparse.Namespace) -> int:
    most: int = max([cell.clients for cell in given.cells] or given.concurrency)
    return most


def _model_of(address: tuple[str, int]) -> str | None:
    """The name of the model that a server serves; None while it does not answer."""
    connection = http.client.HTTPConnection(*address, timeout=5)
    try:
        connection.request("GET", "/v1/models")
        answer = connection.getresponse()
        return str(json.loads(answer.read())["data"][0]["id"]) if answer.status == 200 else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def order(backends: Sequence[str], runs: int) -> list[tuple[str, int]]:
    """Backends with the number of their run: A B C, then C B A, and so on, so that drift hits all alike."""
    return [(name, run) for run in range(runs) for name in (backends if run % 2 == 0 else backends[::-1])]


def machine() -> dict[str, Any]:
    """Device and versions."""
    import torch

    import kernelhub

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "kernelhub": kernelhub.__version__}
    return {"device": device, **versions, "date": time.strftime("%Y-%m-%d")}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure the cells that the results lack, as far as the budget goes."""
    begun = time.monotonic()
    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"rows": []}
    results.setdefault("machine", machine())
    done = {_key(row) for row in results["rows"]}
    cells = given.cells or [Cell(name, clients) for name in given.workloads for clients in given.concurrency]
    for cell in (*cells, *given.vllm_cells):
        workload(cell.workload, cell.clients, given.max_len)  # wrong names end here, not after a server has started
    for backend, run in order(given.backends, given.runs):
        row = {"engine": given.engine, "model": given.model, "backend": backend, "run": run}
        missing = [
            cell for cell in cells if _key({**row, "workload": cell.workload, "concurrency": cell.clients}) not in done
        ]
        checks = [
            cell
            for cell in given.vllm_cells
            if _key({**row, "client": VLLM, "workload": cell.workload, "concurrency": cell.clients}) not in done
        ]
        if not missing and not checks:
            continue
        longest = max([item["server_start_s"] for item in results["rows"]], default=0.0)
        if _left(begun, given.budget) < longest:
            break
        with server(given.engine, backend, given, given.out.with_suffix(f".{backend}.log")) as running:
            for name, clients, rounds in missing:
                took = [
                    item["cell_s"]
                    for item in results["rows"]
                    if (item["workload"], item["concurrency"]) == (name, clients)
                ]
                if _left(begun, given.budget) < max(took, default=0.0):
                    break
                since = time.monotonic()
                count = min(rounds * clients if rounds else max(given.rounds * clients, 4), given.most_prompts)
                first = [
                    Prompt(prompt.length, min(prompt.output, given.warm_output or prompt.output))
                    for prompt in workload(name, given.warm_rounds * clients, given.max_len)
                ]
                drive(running.address, running.model, first, clients, 1, given.vocab)
                prompts = workload(name, count, given.max_len)
                _keep_lengths(name, prompts, given.max_len, results)
                found = figures(drive(running.address, running.model, prompts, clients, 2, given.vocab), given.price)
                measured = {**row, "workload": name, "concurrency": clients, "server_start_s": running.start_s, **found}
                _keep(measured, results, since, given.out)
            for name, clients, rounds in checks:
                own = [item for item in results["rows"] if (item["workload"], item["concurrency"]) == (name, clients)]
                if _left(begun, given.budget) < max([item["cell_s"] for item in own], default=0.0):
                    break
                since = time.monotonic()
                sizes = workload(name, 1, given.max_len)[0]
                count = rounds * clients if rounds else max(given.rounds * clients, 4)
                found = served(running.address, running.model, given.tokenizer, tuple(sizes), count, clients)
                measured = {**row, "client": VLLM, "workload": name, "concurrency": clients, **found}
                _keep({**measured, "server_start_s": running.start_s}, results, since, given.out)
    return results


def _keep(row: dict[str, Any], results: dict[str, Any], since: float, out: Path) -> None:
    """Add a row to the results, and to their file."""
    row["cell_s"] = round(time.monotonic() - since, 2)
    results["rows"].append(row)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(row), flush=True)


def _keep_lengths(name: str, prompts: Sequence[Prompt], longest: int, results: dict[str, Any]) -> None:
    """Add drawn sizes to the results, INPUT/OUTPUT of each prompt; a cell of fewer prompts has the first of them."""
    if name == "sharegpt":
        kept = results.setdefault("lengths", {})
        label = f"{name}, --max-len {longest}"
        if len(prompts) > len(kept.get(label, "").split()):
            kept[label] = " ".join(f"{prompt.length}/{prompt.output}" for prompt in prompts)


def _left(begun: float, budget: float | None) -> float:
    return math.inf if budget is None else budget - (time.monotonic() - begun)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (
        row.get("client"),
        *(row[name] for name in ("engine", "model", "backend", "run", "workload", "concurrency")),
    )


Cells = dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]]


def cells_of(results: dict[str, Any]) -> Cells:
    """Rows of each (model, workload, concurrency) and backend, in the order of the file."""
    cells: Cells = {}
    for row in results["rows"]:
        cell = cells.setdefault((row["model"], row["workload"], row["concurrency"]), {})
        name = f"example: {row['backend']}" if row.get("engine") == "example" else row["backend"]
        name += f" by {row['client']}" if "client" in row else ""
        cell.setdefault(name, []).append(row)
    return cells


def medians_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The median of each figure over a backend's runs that have it: of some, output tokens/s alone are known."""
    return {
        figure: statistics.median(row[figure] for row in rows if figure in row)
        for figure in FIGURES
        if any(figure in row for row in rows)
    }


def table(results: dict[str, Any]) -> str:
    """The median of each cell's runs, its spread, and the ratio to the best other backend."""
    lines = [
        f"{'model, workload, concurrency':<34} {'backend':<12} runs " + " ".join(f"{name:>20}" for name in FIGURES)
    ]
    for (model, name, clients), backends in cells_of(results).items():
        medians = {backend: medians_of(rows) for backend, rows in backends.items()}
        for backend, rows in backends.items():
            shown = []
            for figure in FIGURES:
                mine = medians[backend].get(figure)
                others = [medians[other][figure] for other in backends if other != backend and figure in medians[other]]
                if mine is None:
                    shown.append(f"{'':>20}")
                    continue
                best = (max if figure in HIGHER_IS_BETTER else min)(others) if others else None
                ratio = (
                    ""
                    if not best or not mine
                    else f" ({mine / best if figure in HIGHER_IS_BETTER else best / mine:.2f}x)"
                )
                values = [row[figure] for row in rows if figure in row]
                spread = f" ±{(max(values) - min(values)) / 2:.1f}" if len(values) > 1 else ""
                shown.append(f"{mine:.1f}{spread}{ratio}".rjust(20))
            label = f"{Path(model).name}, {name}, {clients}"
            lines.append(f"{label:<34} {backend:<12} {len(rows):>4} " + " ".join(shown))
    lines.append("ratios: against the best other backend; above 1 is better")
    late = [row for row in results["rows"] if row.get("tokens_per_event", 1) > JOINED]
    if late:
        most = max(row["tokens_per_event"] for row in late)
        cells = ", ".join(sorted({f"{row['workload']} at {row['concurrency']} ({row['backend']})" for row in late}))
        lines.append(f"late streams, up to {most:.1f} tokens per event: {cells}; the server's process was the limit")
    return "\n".join(lines)


def picture(results: dict[str, Any]) -> Any:
    """A matplotlib figure: for each cell a bar per backend, of output tokens/s, TTFT and ITL; lines from run to run."""
    from matplotlib.figure import Figure

    shown = {
        "output_tokens_per_s": "output tokens/s (more is better)",
        "ttft_ms_p50": "TTFT p50, ms (less is better)",
        "itl_ms_p50": "ITL p50, ms (less is better)",
    }
    cells = cells_of(results)
    names = list(dict.fromkeys(backend for backends in cells.values() for backend in backends))
    colours = dict(zip(names, ("#2f855a", "#c05621", "#718096", "#2b6cb0", "#a0aec0", "#805ad5"), strict=False))
    bars = sum(len(backends) + 1 for backends in cells.values())
    figure = Figure(figsize=(12, 0.22 * bars + 1.4), layout="constrained")
    all_axes = figure.subplots(1, len(shown), sharey=True)
    for axes, (name, title) in zip(all_axes, shown.items(), strict=True):
        place, middles = 0, []
        for backends in cells.values():
            middles.append(place + (len(backends) - 1) / 2)
            for backend, rows in backends.items():
                values = [row[name] for row in rows if name in row]
                if values:
                    axes.barh(place, statistics.median(values), 0.9, color=colours.get(backend, "#a0aec0"))
                    axes.plot([min(values), max(values)], [place, place], color="#1f2933", linewidth=1)
                place += 1
            place += 1
        labels = [f"{Path(model).name}, {load}, {clients} clients" for model, load, clients in cells]
        axes.set_yticks(middles, labels, fontsize=8)
        axes.set_xlabel(title)
        medians = [bar.get_width() for bar in axes.patches]
        if medians and max(medians) > 20 * min(medians):
            axes.set_xscale("log")
    all_axes[0].set_ylim(bars - 1.5, -0.5)
    handles = [all_axes[0].barh(0, 0, color=colours.get(name, "#a0aec0"), label=name) for name in names]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(names), frameon=False)
    return figure


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("example", "vllm"), default="example")
    parser.add_argument("--model", default="llama-tiny", help="as the engine takes it")
    parser.add_argument(
        "--backends", type=_names, default=["auto"], help="of vLLM; of the example, kernelhub's, or auto"
    )
    parser.add_argument("--workloads", type=_names, default=["64/16"])
    parser.add_argument("--concurrency", type=_counts, default=[1, 4], help="clients at a time, such as 1,8,32")
    parser.add_argument(
        "--cells",
        type=_cells,
        default=[],
        help="WORKLOAD@C,... in place of --workloads and --concurrency; WORKLOAD@CxR has R rounds",
    )
    parser.add_argument(
        "--vllm-cells", type=_fixed_cells, default=[], help="cells that `vllm bench serve` measures, too, as --cells"
    )
    parser.add_argument("--tokenizer", help="the folder whose tokenizer `vllm bench serve` takes; that of --model")
    parser.add_argument("--rounds", type=int, default=10, help="prompts of a cell, for each client")
    parser.add_argument("--warm-rounds", type=int, default=2, help="prompts before a cell, for each client")
    parser.add_argument("--warm-output", type=int, help="most output tokens of a prompt of these; else the workload's")
    parser.add_argument("--runs", type=int, default=2, help="of every backend")
    parser.add_argument("--most-prompts", type=int, default=1280, help="of a cell")
    parser.add_argument("--max-len", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--vocab", type=int, default=500, help="prompts are drawn of token ids below this")
    parser.add_argument("--price", type=float, help="dollars per hour of the machine")
    parser.add_argument(
        "--budget", type=float, help="seconds; cells that would take longer are left for the next command"
    )
    parser.add_argument("--start-timeout", type=float, default=400.0, help="seconds")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--engine-options", default="", help="more options of the server, in one string")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "serving.json")
    parser.add_argument("--show", action="store_true", help="print the table of --out, and measure nothing")
    parser.add_argument("--plot", type=Path, help="write a picture of --out, such as serving.png")
    given = parser.parse_args(arguments)
    least = {"rounds": 1, "warm_rounds": 0, "warm_output": 1, "runs": 1, "most_prompts": 1, "max_len": 2, "vocab": 3}
    for name, smallest in least.items():
        value = getattr(given, name)
        if value is not None and value < smallest:
            parser.error(f"--{name.replace('_', '-')} is {value}; give {smallest} or more")
    given.tokenizer = given.tokenizer or given.model
    if given.vllm_cells and not (Path(given.tokenizer) / "tokenizer_config.json").exists():
        parser.error(
            f"`vllm bench serve` needs a tokenizer: {given.tokenizer} has no tokenizer_config.json; --tokenizer"
        )
    return given


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _counts(text: str) -> list[int]:
    counts = _names(text)
    if not counts or not all(re.fullmatch(r"[1-9]\d*", part) for part in counts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of clients, such as 1,8,32")
    return [int(part) for part in counts]


def _cells(text: str) -> list[Cell]:
    """``1k/1k@8,1k/8k@32x1`` as workloads with numbers of clients and of rounds."""
    cells = []
    for part in _names(text):
        shape = re.fullmatch(r"(.+)@([1-9]\d*)(?:x([1-9]\d*))?", part)
        if shape is None:
            raise argparse.ArgumentTypeError(f"{part!r} is not WORKLOAD@C or WORKLOAD@CxR, such as 1k/1k@8")
        cells.append(Cell(shape[1], int(shape[2]), int(shape[3]) if shape[3] else None))
    return cells


def _fixed_cells(text: str) -> list[Cell]:
    """Cells whose prompts are alike: `vllm bench serve` has no ShareGPT-like lengths of ours."""
    cells = _cells(text)
    if any(cell.workload == "sharegpt" for cell in cells):
        raise argparse.ArgumentTypeError("`vllm bench serve` measures INPUT/OUTPUT alone, such as 1k/1k@8")
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    if given.show and not given.out.exists():
        raise SystemExit(f"there is no {given.out}: measure first")
    results = json.loads(given.out.read_text()) if given.show else measure(given)
    print(table(results))
    if given.plot:
        picture(results).savefig(given.plot, dpi=110)


if __name__ == "__main__":
    main()
