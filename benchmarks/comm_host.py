"""What a call of a collective, of a dispatch or of a combine keeps the host, by Triton's kernels over NVLink.

    python benchmarks/comm_host.py --ranks 2 [--few | --quantised] [--json FILE]  # on GPUs
    python benchmarks/comm_host.py --stub [--against CHECKOUT]       # without

On GPUs: microseconds of 20 calls in a row, which the queue never fills, the least of several rounds, on the slowest
rank. `out` is a run of a plan into given memory, of a dispatch into an earlier result, `run` one that allocates its
results, `call` a direct call with the same arguments. `layers` are runs of four layers in turn. `fill` is what torch
takes to fill one element: a launch and little else; `empty` an allocation.

`--stub` needs no GPU: a stub takes the place of the driver (see `host_stub`), and one process is rank 0 of two. Its
figures are empty Python calls, and only compare two versions on one machine. `--against` measures another checkout as
well, in the order before, after, after, before, and prints after over before.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

# Before CUDA and NCCL start: multicast over NVLink is off in every kernel here.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")

import torch
import torch.distributed as dist

import kernelhub
from kernelhub.ops.comm.experts.inputs import dispatch_inputs
from kernelhub.ops.comm.experts.problem import FORMATS

SAMPLE, ROUNDS = 20, 25
HIDDEN, EXPERTS, TOP_K, TOKENS = 2048, 128, 8, 64  # of Qwen3-30B-A3B
LAYERS = 4
COLLECTIVE = ["triton.one_shot", "torch.distributed"]  # the second for messages that the first does not take
ALL, EXPERTS_ALONE, QUANTISED, FEW = "all", "experts", "quantised", "few"  # what is timed on GPUs
Calls = dict[str, Callable[[], Any]]
BOUND: list[Any] = []


def ways() -> list[tuple[str, torch.dtype]]:
    """Formats and dtypes of a dispatch."""
    return [*((format, torch.bfloat16) for format in FORMATS), (FORMATS[1], torch.float8_e4m3fn)]


def exchanged(device: torch.device, group: Any, format: str, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of a dispatch."""
    return dispatch_inputs(
        tokens=TOKENS,
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        top_k=TOP_K,
        dtype=dtype,
        format=format,
        max_tokens=TOKENS,
        device=device,
        group=group,
    )


def on_gpus(rank: int, size: int, port: int, place: Path | None, which: str, after: Path | None, turns: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    names = {"device": torch.cuda.get_device_name(device), "ranks": size, "date": date.today().isoformat()}
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    found: dict[str, Any] = {**names, **versions, "host_us": {}}
    calls = gpu_calls(device, which)
    for call in calls.values() if after else ():  # whatever is compiled or learned is, before the first turn
        for _ in range(20):
            call()
        torch.cuda.synchronize()
    dist.barrier()
    for turn in range(turns):
        wait_for(after and after.with_name(f"{after.name}.{turn}"))
        for name, call in calls.items():
            label = name if turns == 1 else f"{name}, turn {turn}"
            found["host_us"][label] = slowest(host_us(call))
            if rank == 0:
                print(f"{label:44} {found['host_us'][label]:8.2f} us", flush=True)
                if place is not None:
                    place.write_text(json.dumps(found, indent=1) + "\n")
        dist.barrier()
        if rank == 0 and after is not None:
            after.with_name(f"{after.name}.{turn}.ended").touch()
    sys.stdout.flush()
    os._exit(0)


def wait_for(file: Path | None) -> None:
    """Until somebody has written a file: processes import and compile at once, and then take turns on the GPUs."""
    while file is not None and not file.exists():
        time.sleep(0.02)


def gpu_calls(device: torch.device, which: str) -> Calls:
    """What is timed, by name: `all` but quantised norms, `experts` or `quantised` alone, or a `few` of each kind."""
    group: Any = dist.group.WORLD
    one = torch.empty(1, dtype=torch.float32, device=device)
    calls: Calls = {"torch, fill": one.zero_, "torch, empty": lambda: torch.empty_like(one)}
    if which == QUANTISED:
        return calls | quantised(device, group)
    if which in (ALL, FEW):
        calls |= sums(device, group) | parts(device, group)
    if which == FEW:
        calls |= quantised(device, group, (8,), (None,))
    return calls | exchanges(device, group)


def sums(device: torch.device, group: Any) -> Calls:
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16, device=device)
    residual, weight, out, residual_out = x.clone(), x[0].clone(), torch.empty_like(x), torch.empty_like(x)
    total = kernelhub.all_reduce.prepare(x, group, backend=COLLECTIVE).run
    norm = kernelhub.all_reduce_rms_norm.prepare(x, residual, weight, 1e-5, group, backend=COLLECTIVE).run
    return {
        "all_reduce, out": lambda: total(x, out=out),
        "all_reduce, run": lambda: total(x),
        "all_reduce, call": lambda: kernelhub.all_reduce(x, group, out=out),
        "all_reduce, call, no out": lambda: kernelhub.all_reduce(x, group),
        "all_reduce_rms_norm, out": lambda: norm(x, residual, weight, 1e-5, out=out, residual_out=residual_out),
        "all_reduce_rms_norm, run": lambda: norm(x, residual, weight, 1e-5),
        "all_reduce_rms_norm, call, no out": lambda: kernelhub.all_reduce_rms_norm(x, residual, weight, 1e-5, group),
    }


def parts(device: torch.device, group: Any) -> Calls:
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16, device=device)
    calls: Calls = {}
    for function in (kernelhub.all_gather, kernelhub.reduce_scatter):
        of = x.repeat(dist.get_world_size(), 1) if function is kernelhub.reduce_scatter else x
        run = function.prepare(of, group).run
        out = torch.empty_like(run(of))
        calls[f"{function.__name__}, out"] = lambda run=run, of=of, out=out: run(of, out=out)
        calls[f"{function.__name__}, run"] = lambda run=run, of=of: run(of)
        calls[f"{function.__name__}, call"] = lambda function=function, of=of: function(of, group)
    return calls


QUANTISED_BY = (None, "comm_pairs.sum_then_quant", "triton.one_shot_quant", "torch.distributed")


def quantised(
    device: torch.device, group: Any, rows_of: Sequence[int] = (8, 256), kernels: Sequence[str | None] = QUANTISED_BY
) -> Calls:
    """Norms in fp8_group, by kernel, and by their parts one after the other."""
    calls: Calls = {}
    for rows in rows_of:
        x = torch.ones(rows, 4096, dtype=torch.bfloat16, device=device)
        residual, weight, added, summed = x.clone(), x[0].clone(), torch.empty_like(x), torch.empty_like(x)
        given = (x, residual, weight, 1e-5)
        for kernel in kernels:
            plan = kernelhub.all_reduce_rms_norm.prepare(*given, group, format="fp8_group", backend=kernel)
            codes, scale, _ = plan.run(*given)
            places = {"out": codes, "out_scale": scale, "residual_out": added}
            label = f"{rows} rows, {kernel or 'selected'}"
            calls[f"{label}, out"] = lambda run=plan.run, given=given, places=places: run(*given, **places)
            calls[f"{label}, run"] = lambda run=plan.run, given=given: run(*given)
        total = kernelhub.all_reduce.prepare(x, group).run
        norm = kernelhub.rms_norm_quant.prepare(x, weight, 1e-5, residual, format="fp8_group").run
        of_norm = (summed, weight, 1e-5, residual)
        to = {"out": codes, "out_scale": scale, "out_residual": added}
        calls[f"{rows} rows, all_reduce, out"] = lambda run=total, x=x, out=summed: run(x, out=out)
        calls[f"{rows} rows, rms_norm_quant, out"] = lambda run=norm, of=of_norm, to=to: run(*of, **to)
    return calls


def exchanges(device: torch.device, group: Any) -> Calls:
    calls: Calls = {}
    for format, dtype in ways():
        given = exchanged(device, group, format, dtype)
        plan = kernelhub.moe_dispatch.prepare(**given, backend="triton.push")
        operands = [given["x"], given["topk_ids"], given["topk_weights"], given.get("scales")]
        sent = plan.run(*operands)
        y = sent.x.to(torch.bfloat16)
        combine = kernelhub.moe_combine.prepare(y, sent.handle, group, backend="triton.push").run
        label = f"{format}, {str(dtype)[6:]}"
        if hasattr(plan, "results"):  # older versions, which --against and a copy of this file measure, have no `out`
            calls |= into_results(label, plan.run, operands, [plan.results() for _ in range(LAYERS + 1)])
        calls[f"moe_dispatch, {label}, run"] = lambda run=plan.run, operands=operands: run(*operands)
        if format == FORMATS[0]:
            calls[f"moe_dispatch, {label}, call"] = lambda given=given: kernelhub.moe_dispatch(**given)
        place = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
        calls[f"moe_combine, {label}, out"] = lambda run=combine, y=y, sent=sent, place=place: run(
            y, sent.handle, out=place
        )
        calls[f"moe_combine, {label}, run"] = lambda run=combine, y=y, sent=sent: run(y, sent.handle)
        if format == FORMATS[0]:
            calls[f"moe_combine, {label}, call"] = lambda y=y, sent=sent: kernelhub.moe_combine(y, sent.handle, group)
    return calls


def into_results(label: str, run: Callable[..., Any], operands: list[Any], results: list[Any]) -> Calls:
    """Dispatches into one earlier result, and of layers in turn, each with tensors of its own."""
    layers = [([copied(one) for one in operands], out) for out in results[1:]]
    turns = itertools.cycle(layers)

    def layer() -> Any:
        given, out = next(turns)
        return run(*given, out=out)

    return {
        f"moe_dispatch, {label}, out": lambda: run(*operands, out=results[0]),
        f"moe_dispatch, {label}, out, {LAYERS} layers": layer,
    }


def copied(one: Any) -> Any:
    return one.clone() if isinstance(one, torch.Tensor) else one


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call of the host, the least of short samples, which all ranks begin together."""
    for _ in range(6):
        call()
    least_s = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(SAMPLE):
            call()
        least_s = min(least_s, (time.perf_counter() - begin) / SAMPLE)
    torch.cuda.synchronize()
    return 1e6 * least_s


def slowest(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return round(float(found), 2)


def on_stub(profiled: str | None) -> dict[str, float]:
    """Empty Python calls of each call on a stub of the driver."""
    from host import in_empty_calls, profile
    from host_stub import install_stub

    install_stub()
    calls = stub_calls()
    if profiled:
        print(profile(calls[profiled]))
        return {}
    return {name: round(in_empty_calls(call), 1) for name, call in calls.items()}


def stub_calls() -> Calls:
    """The same calls, of a kernel that is bound for rank 0 of two; memory is the CPU's."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from kernelhub.backends.shared.slot_memory import Workspace
    from kernelhub.backends.triton.comm.adapter import OneShot, OneShotRmsNorm
    from kernelhub.backends.triton.comm.experts.adapter import PushRows, PushSums
    from kernelhub.backends.triton.comm.parts import AllGather, ReduceScatter
    from kernelhub.backends.triton.comm.quantised import OneShotRmsNormQuant
    from kernelhub.ops.comm.experts.problem import CombineProblem, DispatchProblem
    from kernelhub.ops.comm.problem import (
        AllGatherProblem,
        AllReduceProblem,
        AllReduceRmsNormProblem,
        ReduceScatterProblem,
    )
    from kernelhub.probes.device import simulated

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group: Any = dist.group.WORLD
    memories = [torch.zeros(8 << 20, dtype=torch.uint8, device="cpu") for _ in range(2)]
    workspace = Workspace(0, memories[0], [memory.data_ptr() for memory in memories], 1 << 17)
    facets = {"device": simulated("H200"), "link": "nvlink", "peers": "atomics", "world_size": 2}

    def planned(function: Any, adapter: Any, *given: Any, **named: Any) -> Any:
        getattr(adapter, "parts", adapter).attach(group.group_name, workspace)
        return plan_of(function, adapter, *given, **named)

    x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16, device="cpu")
    residual, weight, out, residual_out = x.clone(), x[0].clone(), torch.empty_like(x), torch.empty_like(x)
    sizes = {**facets, "dtype": "bfloat16", "message": "32KB"}
    of_norm = {**sizes, "weight_dtype": "bfloat16", "hidden_size": HIDDEN}
    total = planned(kernelhub.all_reduce, OneShot(AllReduceProblem(**sizes)), x, group)
    layer = (x, residual, weight, 1e-5)
    norm = planned(kernelhub.all_reduce_rms_norm, OneShotRmsNorm(AllReduceRmsNormProblem(**of_norm)), *layer, group)
    of_quantised = AllReduceRmsNormProblem(**of_norm, format="fp8_group")
    one_launch = OneShotRmsNormQuant(of_quantised)
    one_launch.attach(group.group_name, workspace)
    adapter, norm_alone = pair_of(of_quantised, group, workspace)
    pair, one_launch = (
        plan_of(kernelhub.all_reduce_rms_norm, one, *layer, group, format="fp8_group") for one in (adapter, one_launch)
    )
    codes, scale, _ = pair(*layer)
    places = {"out": out, "residual_out": residual_out}
    of_format = {"out": codes, "residual_out": residual_out, "out_scale": scale}
    calls: Calls = {
        "all_reduce, out": lambda: total(x, out=out),
        "all_reduce, in place": lambda: total(x, out=x),
        "all_reduce, run": lambda: total(x),
        "all_reduce_rms_norm, out": lambda: norm(*layer, **places),
        "all_reduce_rms_norm, in place": lambda: norm(*layer, out=x, residual_out=residual),
        "all_reduce_rms_norm, run": lambda: norm(*layer),
        "rms_norm_quant, out": lambda: norm_alone(x, weight, 1e-5, residual, None, None, codes, scale, residual_out),
    }
    for name, run in (("comm_pairs.sum_then_quant", pair), ("triton.one_shot_quant", one_launch)):
        calls[f"{name}, out"] = lambda run=run: run(*layer, **of_format)
        calls[f"{name}, run"] = lambda run=run: run(*layer)
    calls |= {
        "all_reduce, call": direct(kernelhub.all_reduce, OneShot(AllReduceProblem(**sizes)), workspace, x, group),
        "all_reduce_rms_norm, call": direct(
            kernelhub.all_reduce_rms_norm,
            OneShotRmsNorm(AllReduceRmsNormProblem(**of_norm)),
            workspace,
            *layer,
            group,
        ),
    }
    for op, adapter in (
        (kernelhub.all_gather, AllGather(AllGatherProblem(**sizes))),
        (kernelhub.reduce_scatter, ReduceScatter(ReduceScatterProblem(**sizes))),
    ):
        run = planned(op, adapter, x, group)
        calls[f"{op.__name__}, run"] = lambda run=run: run(x)
        calls[f"{op.__name__}, call"] = direct(op, adapter, workspace, x, group)
    facets |= {"capacity": "few", "hidden_size": HIDDEN, "top_k": TOP_K, "num_experts": EXPERTS}
    for format, dtype in ways():
        given = exchanged(torch.device("cpu"), group, format, dtype)
        scales = given.get("scales")
        problem = DispatchProblem(**facets, dtype=str(dtype)[6:], format=format, scales=scales is not None)
        run = planned(kernelhub.moe_dispatch, PushRows(problem), **given)
        operands = [given["x"], given["topk_ids"], given["topk_weights"], scales]
        sent = run(*operands)
        y = torch.zeros(sent.x.shape, dtype=torch.bfloat16, device="cpu")
        of_y = CombineProblem(**facets, dtype="bfloat16", format=format, rows="fixed")
        combine = planned(kernelhub.moe_combine, PushSums(of_y), y, sent.handle, group)
        place = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cpu")
        label = f"{format}, {str(dtype)[6:]}"
        calls |= into_results(label, run, operands, [run(*operands) for _ in range(LAYERS + 1)])
        calls[f"moe_dispatch, {label}, run"] = lambda run=run, operands=operands: run(*operands)
        calls[f"moe_combine, {label}, out"] = lambda run=combine, y=y, sent=sent, place=place: run(
            y, sent.handle, out=place
        )
        calls[f"moe_combine, {label}, run"] = lambda run=combine, y=y, sent=sent: run(y, sent.handle)
        if format == FORMATS[0]:
            of_call = PushRows(problem), workspace
            calls[f"moe_dispatch, {label}, call"] = direct(kernelhub.moe_dispatch, *of_call, **given)
            of_call = PushSums(of_y), workspace
            calls[f"moe_combine, {label}, call"] = direct(kernelhub.moe_combine, *of_call, y, sent.handle, group)
    one = torch.empty(1, dtype=torch.float32, device="cpu")
    return {"torch, empty": lambda: torch.empty_like(one), **calls}


def direct(function: Any, adapter: Any, workspace: Any, *given: Any, **named: Any) -> Callable[[], Any]:
    """A direct call, which finds this kernel; `decide` would select another one on a CPU."""
    getattr(adapter, "parts", adapter).attach(dist.group.WORLD.group_name, workspace)
    bound = bound_of(function, adapter)
    function.op.table[function.op.parse(None, given, named).key] = bound.run
    return functools.partial(function, *given, **named)


def bound_of(function: Any, adapter: Any) -> Any:
    """A kernel that is bound for rank 0 of two."""
    from types import SimpleNamespace

    from kernelhub.dispatch.bound import Bound
    from kernelhub.dispatch.hub import HUB

    counter, selection = itertools.count(), SimpleNamespace(selected="the kernel", problem=adapter.problem)
    run = function.op.contract.bind(adapter, adapter.problem, -1, counter.__next__, int)
    bound = Bound(selection, adapter, run, counter, -1)  # type: ignore[arg-type]  # reports are not asked
    HUB.ledger.add(bound)
    BOUND.append(bound)  # of one that is gone its selection would be asked
    return bound


def plan_of(function: Any, adapter: Any, *given: Any, **named: Any) -> Any:
    """The run of a plan whose kernel is bound for rank 0 of two; `prepare` would ask the other rank."""
    from kernelhub.ops.comm.preparing import CollectivePlan
    from kernelhub.ops.comm.problem import BUCKETS
    from kernelhub.ops.comm.topology import GroupFacts

    op, bound = function.op, bound_of(function, adapter)
    parsed = op.parse(None, given, named)
    kind = inspect.signature(function.prepare).return_annotation
    if not issubclass(kind, CollectivePlan):
        return kind(op, bound, parsed).run
    return kind(op, dict.fromkeys(BUCKETS, bound), "32KB", parsed, GroupFacts("nvlink", "atomics", "a stub")).run


def pair_of(problem: Any, group: Any, workspace: Any) -> tuple[Any, Any]:
    """The adapter of the quantised norm by two kernels of Triton, and the run of its norm alone."""
    from kernelhub.backends.comm_pairs.kernels import parts_of
    from kernelhub.backends.comm_pairs.norm import SumThenQuant
    from kernelhub.backends.triton.comm.adapter import OneShot
    from kernelhub.backends.triton.fused_quant.adapter import Norm
    from kernelhub.dispatch.bound import Bound

    made = []
    for kind, (op, need) in zip((OneShot, Norm), parts_of(problem), strict=True):
        adapter = kind(need)
        run = getattr(kernelhub, op).op.contract.bind(adapter, need, -1, int, int)
        made.append(Bound(None, adapter, run, None, -1))  # type: ignore[arg-type]  # reports are not asked
    made[0].adapter.attach(group.group_name, workspace)
    pair = SumThenQuant(problem)
    pair.part_bounds[:] = made
    return pair, made[1].run


def against(before: Path) -> dict[str, tuple[float, float, float]]:
    """For each call after over before: of the means of two runs each, then least and most of pairs of runs."""
    runs = []
    after = Path(__file__).parent.parent
    for folder in (before.resolve(), after, after, before.resolve()):
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, str(after / "benchmarks" / "comm_host.py"), "--stub"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        runs.append(json.loads(done.stdout))
    found = {}
    for name in (one for one in runs[1] if one in runs[0]):
        first, second, third, fourth = (run[name] for run in runs)
        pairs = [new / old for new in (second, third) for old in (first, fourth)]
        found[name] = (round((second + third) / (first + fourth), 2), round(min(pairs), 2), round(max(pairs), 2))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--json", type=Path, help="file for the results, rewritten after each row")
    parser.add_argument("--experts", action="store_true", help="dispatches and combines only")
    parser.add_argument("--few", action="store_true", help="a few of each kind")
    parser.add_argument("--quantised", action="store_true", help="quantised norms only")
    parser.add_argument("--after", type=Path, help="turn 0 begins with FILE.0, and so on; FILE.0.ended is written then")
    parser.add_argument("--turns", type=int, default=1, help="how often all is measured")
    parser.add_argument("--stub", action="store_true", help="on a stub of the driver, in empty calls of Python")
    parser.add_argument("--profile", metavar="CALL", help="with --stub: where this call spends its time")
    parser.add_argument("--against", type=Path, help="with --stub: a checkout of another version, to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.stub and options.against:
        for name, ratios in against(options.against).items():
            print(f"{name:44} " + "{:.2f} ({:.2f}-{:.2f})".format(*ratios))
        return
    if options.stub:
        print(json.dumps(on_stub(options.profile), indent=1))
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = {QUANTISED: options.quantised, EXPERTS_ALONE: options.experts, FEW: options.few}
    which = next((name for name, given in asked.items() if given), ALL)
    given = (options.ranks, port, options.json, which, options.after, options.turns)
    torch.multiprocessing.spawn(on_gpus, given, nprocs=options.ranks)


if __name__ == "__main__":
    main()
