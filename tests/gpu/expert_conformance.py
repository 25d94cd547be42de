"""Conformance of a dispatch and a combine on several GPUs; `test_comm_on_gpu.py` and a person run it.

    python -m tests.gpu.expert_conformance triton.push triton.push --ranks 2
    python -m tests.gpu.expert_conformance deep_ep.normal deep_ep.normal --exact --width 3072 --ranks 2

With a capacity, but for `--exact`. Dtypes that a pair does not have are left out, and named in the answer. The scenes
but `exchanges` and `graphs` have bfloat16 tokens; for a short run give `--scenes many large --dtypes bfloat16`.

It starts the ranks and prints one JSON object: for each scene, what was wrong on each rank; an empty list is right.
A scene that did not end is named under `at`, with the step it had reached, and each rank prints its stack to stderr
shortly before the limit. Payloads are small integers and weights 1/2 and 1, whose sums are exact in every dtype and
order.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
os.environ.setdefault("KERNELHUB_COMM_TIMEOUT_S", "20")

import torch
import torch.distributed as dist
from torch import Tensor

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import KernelhubError, RanksDisagree
from kernelhub.ops.comm.experts.cases import by_expert
from kernelhub.ops.comm.experts.problem import FORMATS, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched
from kernelhub.ops.comm.experts.results import outputs_of
from kernelhub.ops.formats import E4M3
from tests.gpu.comm_conformance import run_ranks, wait_for
from tests.runtime.expert_scenes import same, wanted_by_expert
from tests.runtime.world import _free_port

EXPERTS = 48  # of all ranks; 2, 3, 4, 6 and 8 divide it
WIDTH = 2880
TOP_K = {torch.bfloat16: 4, torch.float16: 2, torch.float32: 1, E4M3: 8}  # few, since each is compiled
ROUTINGS = ("random", "some twice, some none", "to one rank", "all to one", "none")
SCENES = ("exchanges", "graphs", "again", "renewed", "delayed", "side_streams", "large", "many", "missing")
Tokens = dict[str, Tensor]


class Layer:
    """Plans of a dispatch and of the combine of what it gives, on one rank.

    Args:
        pair: names of the kernels.
        dtype: of the tokens.
        format: of the received tokens.
        most: most tokens of a rank.
        width: columns.
        exact: whether the dispatch has no capacity.
    """

    def __init__(
        self, pair: tuple[str, str], dtype: torch.dtype, format: str, most: int, width: int, exact: bool
    ) -> None:
        self.width = width
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.dtype, self.format, self.top_k, self.most = dtype, format, TOP_K[dtype], most
        self.of_y = torch.bfloat16 if dtype is E4M3 else dtype
        group, example = dist.group.WORLD, self.tokens(0, "random")
        options: dict[str, Any] = {"group": group, "num_experts": EXPERTS, "format": format}
        options["max_tokens"] = None if exact else most
        self.dispatch = kernelhub.moe_dispatch.prepare(**example, **options, backend=pair[0])
        sent = self.dispatch.run(**example)
        self.combine = kernelhub.moe_combine.prepare(self.experts(sent), sent.handle, group, backend=pair[1])
        self.combine.run(self.experts(sent), sent.handle)

    def tokens(self, seed: int, routing: str, rank: int | None = None, count: int | None = None) -> Tokens:
        """A rank's tokens; one in four ranks has none."""
        rank = self.rank if rank is None else rank
        chosen = torch.Generator().manual_seed(1000 * seed + rank)
        if count is None:
            count = (0, self.most, 1, self.most // 2)[(seed + rank) % 4]
        x = torch.randint(-4, 5, (count, self.width), generator=chosen).float()
        ids = torch.rand(count, EXPERTS, generator=chosen).topk(self.top_k, 1).indices.int()
        if routing == "to one rank":
            ids %= EXPERTS // self.size
        elif routing == "all to one":
            ids.fill_(EXPERTS - 1)
        elif routing == "none":
            ids.fill_(-1)
        elif routing == "some twice, some none":
            ids[:, -1] = ids[:, 0]
            ids[::2, 0] = torch.tensor([-1, EXPERTS, 2**31 - 1, -(2**31)], dtype=torch.int32).repeat(count)[
                : len(ids[::2])
            ]
        weights = torch.randint(1, 3, ids.shape, generator=chosen).float() / 2
        weights = weights.masked_fill((ids < 0) | (ids >= EXPERTS), torch.nan)
        made = {"x": x.to(self.dtype), "topk_ids": ids, "topk_weights": weights}
        if self.dtype is E4M3:
            columns = -(-self.width // 128)
            made["scales"] = torch.randint(-1, 2, (count, columns), generator=chosen).float().exp2()
        return {name: part.to("cuda") for name, part in made.items()}

    def experts(self, sent: Dispatched) -> Tensor:
        """What this rank's experts give, NaN in every row that belongs to none."""
        x, local = values(sent.x, sent.scales), EXPERTS // self.size
        first = self.rank * local
        if sent.topk_ids is not None:
            assert sent.topk_weights is not None
            y = weighed(x, torch.where(sent.topk_ids >= 0, sent.topk_ids + first, -1), sent.topk_weights)
            named = (sent.topk_ids >= 0).any(1, keepdim=True)
        elif sent.offsets is not None:
            row = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
            number = torch.searchsorted(sent.offsets, row, right=True)
            y, named = expert(x, (number + first)[:, None]), (number < local)[:, None]
        else:
            number = torch.arange(local, device=x.device)[:, None, None]
            y = expert(x, number + first)
            named = torch.arange(x.shape[1], device=x.device)[:, None] < sent.counts[:, None, None]
        return torch.where(named, y, torch.nan).to(self.of_y)

    def wanted(self, given: Tokens) -> Tensor:
        """The result of this rank's tokens, without a dispatch."""
        x = values(given["x"], given.get("scales"))
        return weighed(x, given["topk_ids"], given["topk_weights"]).to(self.of_y)

    def run(self, given: Tokens, out: Dispatched | None = None) -> Tensor:
        sent = self.dispatch.run(**given) if out is None else self.dispatch.run(**given, out=out)
        found: Tensor = self.combine.run(self.experts(sent), sent.handle)
        return found


def counts(sent: Dispatched) -> list[Tensor]:
    """Rows of each expert, their ends, and where each token is."""
    return [sent.counts, *([] if sent.offsets is None else [sent.offsets]), *sent.handle[2:4]]


def values(x: Tensor, scales: Tensor | None) -> Tensor:
    return x.float() if scales is None else x.float() * scales.repeat_interleave(128, -1)[..., : x.shape[-1]]


def expert(x: Tensor, number: Tensor) -> Tensor:
    """An expert whose results are exact."""
    return x * (number % 3 + 1) - number % 2


def weighed(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighed sum over the experts of each token, by global ids."""
    total = torch.zeros_like(x)
    for choice in range(ids.shape[1]):
        number = ids[:, choice, None]
        term = weights[:, choice, None] * expert(x, number)
        total += torch.where((number >= 0) & (number < EXPERTS), term, 0.0)
    return total


class Scenes:
    """The scenes of a pair of kernels on one rank."""

    def __init__(
        self,
        pair: tuple[str, str],
        calls: int,
        width: int,
        exact: bool,
        scenes: Sequence[str],
        dtypes: Sequence[str],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.pair, self.calls, self.width, self.exact = pair, calls, width, exact
        self.dtypes = [getattr(torch, name) for name in dtypes]
        self.scenes, self.write = scenes, write
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.lacking: dict[torch.dtype, str] = {}
        self.answers: dict[str, Any] = {"at": "begin", "seconds": {}}
        self.began = time.monotonic()

    def at(self, *step: object) -> None:
        """Record where this rank is, for the case that it does not end."""
        self.answers["at"] = " ".join(map(str, step))
        self.answers["at_s"] = round(time.monotonic() - self.began, 1)
        self.write(self.answers)

    def layer(self, dtype: torch.dtype, format: str, most: int) -> Layer:
        return Layer(self.pair, dtype, format, most, self.width, self.exact)

    def find_dtypes(self) -> None:
        """Which dtypes the pair lacks; every rank finds the same."""
        for dtype in self.dtypes:
            self.at("find_dtypes", dtype)
            try:
                self.layer(dtype, TOKENS, 8)
            except KernelhubError as error:
                self.lacking[dtype] = str(error)

    def exchanges(self) -> list[str]:
        """Every format, dtype, routing and number of choices, twice."""
        wrong: list[str] = []
        ended = self.answers["exchanged"] = []
        for dtype in [one for one in self.dtypes if one not in self.lacking]:
            for format in FORMATS:
                self.at("exchanges", dtype, format, "prepare")
                layer = self.layer(dtype, format, 17)
                for seed, routing in enumerate((*ROUTINGS, *ROUTINGS)):
                    self.at("exchanges", dtype, format, routing, seed)
                    parts = [layer.tokens(seed, routing, other) for other in range(self.size)]
                    given = parts[self.rank]
                    sent = layer.dispatch.run(**given)
                    got = by_expert(sent)
                    on_cpu = [{name: part.cpu() for name, part in tokens.items()} for tokens in parts]
                    want = wanted_by_expert(self.rank, self.size, format, on_cpu, EXPERTS)
                    got["rows"] = got["rows"].view(torch.uint8)
                    label = f"{dtype} {format} {routing} {seed}"
                    wrong += [f"{label}: {name}" for name in want if not same(got[name].cpu().contiguous(), want[name])]
                    if not torch.equal(layer.combine.run(layer.experts(sent), sent.handle), layer.wanted(given)):
                        wrong.append(f"{label}: combine")
                ended.append(f"{dtype} {format}: {len(wrong)} wrong until then")
        return wrong

    def large(self) -> list[str]:
        """More rows than one launch sends, or than a program places in one step, all to all."""
        wrong = []
        for format, most in zip(FORMATS, (16384, 16384, 700), strict=True):
            self.at("large", format, most)
            layer = self.layer(torch.bfloat16, format, most)
            given = layer.tokens(5, "random", count=most - 100 * self.rank)
            if not torch.equal(layer.run(given), layer.wanted(given)):
                wrong.append(format)
        return wrong

    def graphs(self) -> list[str]:
        """Two layers in one graph, replayed with other tokens and routings; in between eager calls."""
        wrong = []
        if self.exact:  # its shapes follow from values
            return wrong
        for dtype, format in ((torch.bfloat16, TOKENS), (E4M3, FORMATS[1]), (torch.float16, FORMATS[2])):
            if dtype in self.lacking or dtype not in self.dtypes:
                continue
            self.at("graphs", dtype, format, "prepare")
            layer = self.layer(dtype, format, 24)
            given = layer.tokens(0, "random", count=20)
            layer.run(given)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = (layer.run(given), layer.run(given))
            for turn in range(200):
                if turn % 20 == 0:
                    self.at("graphs", dtype, format, "replay", turn, f"{len(wrong)} wrong")
                changed = layer.tokens(turn, ROUTINGS[turn % len(ROUTINGS)], count=20)
                for name, place in given.items():
                    place.copy_(changed[name])
                graph.replay()
                results = [*found, *([layer.run(changed)] if turn % 3 == 0 else [])]
                if not all(torch.equal(result, layer.wanted(changed)) for result in results):
                    wrong.append(f"{dtype} {format}, replay {turn}")
        return wrong

    def again(self) -> list[str]:
        """Dispatches into one earlier result, eagerly and by replays of a graph, in memory that holds anything."""
        wrong = []
        if self.exact:  # its shapes follow from values
            return wrong
        for dtype, format in ((torch.bfloat16, TOKENS), (E4M3, FORMATS[1]), (torch.bfloat16, FORMATS[2])):
            if dtype in self.lacking or dtype not in self.dtypes:
                continue
            self.at("again", dtype, format, "prepare", f"{len(wrong)} wrong")
            layer = self.layer(dtype, format, 24)
            out, given = layer.dispatch.results(), layer.tokens(0, "random", count=20)
            layer.run(given, out)
            torch.cuda.synchronize()
            graph, captured = torch.cuda.CUDAGraph(), layer.dispatch.results()
            with torch.cuda.graph(graph):
                found = layer.run(given, captured)
            for turn in range(80):
                if turn % 20 == 0:
                    self.at("again", dtype, format, turn, f"{len(wrong)} wrong")
                results = []
                for place in (*outputs_of(out), *outputs_of(captured)):
                    place.view(torch.uint8).fill_(0xA5)
                changed = layer.tokens(turn, ROUTINGS[turn % len(ROUTINGS)], count=20)
                for name, place in given.items():
                    place.copy_(changed[name])
                if turn % 2:
                    graph.replay()
                    results.append((found, changed))
                other = layer.tokens(turn, ROUTINGS[turn % 3])
                results.append((layer.run(other, out), other))
                if not all(torch.equal(result, layer.wanted(of)) for result, of in results):
                    wrong.append(f"{dtype} {format}, turn {turn}")
                if turn % 10 == 0:
                    anew = layer.dispatch.run(**other)
                    if not all(
                        same(part.cpu(), like.cpu()) for part, like in zip(counts(out), counts(anew), strict=True)
                    ):
                        wrong.append(f"{dtype} {format}, turn {turn}: counts")
        return wrong

    def renewed(self) -> list[str]:
        """Dispatches of layers in turn, each into its earlier result, without a pause, compared on the device."""
        wrong = []
        if self.exact:  # its shapes follow from values
            return wrong
        for dtype, format in ((torch.bfloat16, TOKENS), (E4M3, FORMATS[1]), (torch.bfloat16, FORMATS[2])):
            if dtype in self.lacking or dtype not in self.dtypes:
                continue
            self.at("renewed", dtype, format, "prepare", f"{len(wrong)} wrong")
            layer, cases = self.layer(dtype, format, 24), []
            for seed, routing in enumerate(ROUTINGS[:4]):
                given = layer.tokens(seed, routing, count=(20, 7)[seed % 2])
                cases.append((given, layer.wanted(given), layer.dispatch.results()))
            errors = torch.zeros((), dtype=torch.int64, device="cuda")
            for turn in range(self.calls // 5):
                if turn % 100 == 0:
                    self.at("renewed", dtype, format, turn)
                given, want, out = cases[turn % len(cases)]
                for place in outputs_of(out):
                    place.view(torch.uint8).fill_(0xA5)
                errors += layer.run(given, out).ne(want).any()
            if int(errors):
                wrong.append(f"{dtype} {format}: {int(errors)} of {self.calls // 5} calls")
        return wrong

    def delayed(self) -> list[str]:
        """One rank comes later, another each time."""
        wrong = []
        layers = [self.layer(torch.bfloat16, format, 24) for format in FORMATS]
        chosen = random.Random(0)
        for turn in range(100):
            if turn % 10 == 0:
                self.at("delayed", turn, f"{len(wrong)} wrong")
            late, cycles = chosen.randrange(self.size), chosen.randrange(1, 2_000_000)
            layer = layers[turn % 3]
            given = layer.tokens(turn, "random")
            if late == self.rank:
                torch.cuda._sleep(cycles)
            sent = layer.dispatch.run(**given)
            if late != self.rank:
                torch.cuda._sleep(cycles // 2)
            if not torch.equal(layer.combine.run(layer.experts(sent), sent.handle), layer.wanted(given)):
                wrong.append(f"{layer.format}, call {turn}")
        return wrong

    def many(self) -> list[str]:
        """Calls without a pause, of several sizes and routings in turn; each result is compared on the device."""
        layers = [self.layer(torch.bfloat16, TOKENS, most) for most in (4, 64)]
        cases = []
        for seed, routing in enumerate(ROUTINGS[:4]):
            for layer in layers:
                given = layer.tokens(seed, routing)
                cases.append((layer, given, layer.wanted(given)))
        errors = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(self.calls):
            if turn % 100 == 0:
                self.at("many", turn)
            layer, given, want = cases[turn % len(cases)]
            errors += layer.run(given).ne(want).any()
        return [] if not int(errors) else [f"{int(errors)} of {self.calls} calls"]

    def side_streams(self) -> list[str]:
        """Calls on two streams in turn, each after the other."""
        layer = self.layer(torch.bfloat16, FORMATS[1], 24)
        given = [layer.tokens(seed, "random") for seed in range(20)]
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in range(2)], []
        for turn, tokens in enumerate(given):
            stream = streams[turn % 2]
            stream.wait_stream(streams[(turn + 1) % 2])
            with torch.cuda.stream(stream):
                found.append(layer.run(tokens))
        torch.cuda.synchronize()
        pairs = zip(found, given, strict=True)
        return [f"call {turn}" for turn, (got, of) in enumerate(pairs) if not torch.equal(got, layer.wanted(of))]

    def missing(self) -> list[str]:
        """The last rank does not call: the others end in time, and the combine names it. No call can follow."""
        if self.pair != ("triton.push", "triton.push"):
            return []
        layer = self.layer(torch.bfloat16, TOKENS, 24)
        if self.rank == self.size - 1:
            return []
        sent = layer.dispatch.run(**layer.tokens(1, "random"))
        torch.cuda.synchronize()
        try:
            layer.combine.run(layer.experts(sent), sent.handle)
        except RanksDisagree as error:
            return [] if error.ranks == (self.size - 1,) else [str(error)]
        return ["no error"]

    def act(self) -> None:
        answers = self.answers
        self.at("first layer")
        try:
            layer = self.layer(torch.bfloat16, TOKENS, 8)
        except KernelhubError as error:
            answers["unsupported"] = str(error)
            self.at("end")
            return
        self.find_dtypes()
        answers["kernels"] = [layer.dispatch.kernel, layer.combine.kernel, *map(str, self.lacking)]
        for name in self.scenes:
            began = time.monotonic()
            self.at(name)
            answers[name] = getattr(self, name)()
            torch.cuda.synchronize()
            answers["seconds"][name] = round(time.monotonic() - began, 1)
        self.at("end")


def live(
    rank: int,
    size: int,
    port: int,
    folder: str,
    limit_s: float,
    after: Path | None,
    pair: tuple[str, str],
    *of_scenes: Any,
) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    _ = HUB.settings
    place = Path(folder) / str(rank)
    torch.zeros(1, device="cuda")
    wait_for(after)
    faulthandler.dump_traceback_later(max(1.0, limit_s - 3.0))

    def write(answers: dict[str, Any]) -> None:  # whole, also if the process is ended in between
        place.with_suffix(".new").write_text(json.dumps(answers))
        place.with_suffix(".new").replace(place)

    Scenes(pair, *of_scenes, write).act()
    store.set(f"ended/{rank}", "")
    store.wait([f"ended/{other}" for other in range(size)], timedelta(seconds=60))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dispatch")
    parser.add_argument("combine")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--calls", type=int, default=10_000, help="calls of the scene `many`")
    parser.add_argument("--width", type=int, default=WIDTH, help="columns of a token")
    parser.add_argument("--exact", action="store_true", help="without max_tokens")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=SCENES)
    dtypes = [str(dtype)[6:] for dtype in TOP_K]
    parser.add_argument("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="of the tokens of `exchanges`")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--after", type=Path, help="begin once there is this file; the limit counts from then")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (options.ranks, _free_port(), folder, options.limit_s, options.after)
        given = (*given, (options.dispatch, options.combine), options.calls, options.width, options.exact)
        given = (*given, options.scenes, options.dtypes)

        def show(ended: list[int | None]) -> None:
            files = [Path(folder) / str(rank) for rank in range(options.ranks)]
            answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
            print(json.dumps({"ended": ended, "ranks": answers}), flush=True)

        run_ranks(live, given, options.ranks, options.limit_s, options.after, show)


if __name__ == "__main__":
    main()
