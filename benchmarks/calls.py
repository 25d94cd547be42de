"""What a call of each op costs beyond its kernel's launch: choosing and checking together.

    python benchmarks/calls.py [OP ...] [--json]

Every op is called with its contract's example, in small sizes, and with its destinations; its kernel does nothing:

    call    a cached call
    fresh   the same without destinations, so that it allocates its results
    plan    a plan's `run`, or its step's, with its destinations and the plan's own weights
    miss    a call whose key is new, beyond the same call cached; the kernel that does nothing is asked first. In empty
            calls, too, of the same samples: a clock that changes within a run makes nanoseconds of two ops differ
    selection the choice alone, among all kernels of the op, every library installed: on that one of the simulated
            devices on which it takes longest

Where an op's checks differ between kinds of device (values in CPU memory are read anew at each call, in a GPU's they
are not) it is made to believe that it is on a GPU, so that machines without one time the same.

`dispatch.py` takes these figures into its own, with the goals that `--check` holds them to.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from harness import time_statements

import kernelhub
from kernelhub.dispatch.constraint import Package, anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band, Kernel
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.dispatch.standing import verified
from kernelhub.ops import functions
from kernelhub.probes.device import SIMULATED, simulated
from kernelhub.probes.finding import Finding, found

ROUNDS = 100
# Nanoseconds of a call, on a machine whose empty call takes 33 ns; more where there are many tensors to look at. Half
# of it is what memory safety costs: each operand is asked for its form and whether it is contiguous, each destination
# whether it lies apart from all that is read. Before those checks the goals were half of these.
GOAL_NS = 4_500
GOALS_NS = {
    "write_kv_cache": 6_500,
    "rms_norm_quant": 8_500,
    "silu_and_mul_quant": 6_500,
    **dict.fromkeys(("write_mla_cache", "concat_mla_k", "mqa_logits", "quantize_nvfp4", "bmm_fp8"), 5_500),
    **dict.fromkeys(("mla_attention", "paged_mqa_logits", "linear_attention", "fp8_gemm", "grouped_gemm"), 6_500),
    "fp4_gemm": 8_500,
    "all_reduce": 8_500,
    "all_reduce_rms_norm": 15_000,
    **dict.fromkeys(("moe_dispatch", "moe_combine"), 25_000),
    "expert_parallel_moe": 60_000,
    "reduce_scatter": 11_000,
    "all_gather": 11_000,
    "fused_moe": 12_000,
}
# Of a miss and the slowest selection together, which is more than any new call takes.
GOAL_MISS_NS = 50_000
# More where there are many operands, each of which is looked at.
_MANY = ("paged_attention", "mla_attention", "fp8_gemm", "fp4_gemm", "grouped_gemm", "fused_moe")
GOALS_MISS_NS = dict.fromkeys(_MANY, 60_000) | {"grouped_gemm": 80_000, "fused_moe": 120_000}
SMALL: dict[str, dict[str, Any]] = {
    "attention": {"q_tokens": 8},
    "paged_attention": {"seq_lens": (8, 7)},
    "merge_attention_states": {"tokens": 8},
    "mla_attention": {"seq_lens": (8, 7)},
    "write_kv_cache": {"tokens": 8},
    "write_mla_cache": {"tokens": 8},
    "concat_mla_k": {"tokens": 8},
    "mqa_logits": {"tokens": 4, "keys": 64},
    "paged_mqa_logits": {"seq_lens": (20, 61)},
    "topk_indices": {"keys": 512, "k": 64},
    "linear_attention": {"tokens": 4},
    "all_reduce": {"tokens": 4},
    "all_reduce_rms_norm": {"tokens": 4, "hidden_size": 256},
    "moe_dispatch": {"tokens": 4, "hidden_size": 64, "num_experts": 8, "top_k": 2},
    "moe_combine": {"tokens": 4, "hidden_size": 64, "num_experts": 8, "top_k": 2},
    "rms_norm_quant": {"tokens": 4, "width": 256},
    "silu_and_mul_quant": {"tokens": 4, "width": 256},
    "reduce_scatter": {"tokens": 4},
    "all_gather": {"tokens": 4},
    "fp4_gemm": {"tokens": 4, "n": 256, "k": 256},
    "bmm_fp8": {"batch": 4, "tokens": 4},
    "fp8_gemm": {"tokens": 4, "n": 256, "k": 256},
    "grouped_gemm": {"n": 64, "k": 128},
    "fused_moe": {"num_experts": 4, "hidden_size": 256, "intermediate_size": 128, "top_k": 2, "weights": "fp8_block"},
    "expert_parallel_moe": {
        "tokens": 4,
        "num_experts": 4,
        "hidden_size": 64,
        "intermediate_size": 32,
        "top_k": 2,
    },
    "route_experts": {"tokens": 4},
}
QUANTISER_SIZES = {"tokens": 4, "width": 512}
_MODULE = sys.modules[__name__]


def measure_ops(names: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """Nanoseconds of every op, or of those named, and what a call is in empty calls."""
    return {
        function.op.contract.name: _measure(function)
        for function in functions()
        if not names or function.op.contract.name in names
    }


def goal_ns(op: str) -> int:
    """The most that a call may cost."""
    return GOALS_NS.get(op, GOAL_NS)


def goal_miss_ns(op: str) -> int:
    """The most that the first call of a configuration may cost beyond a cached one."""
    return GOALS_MISS_NS.get(op, GOAL_MISS_NS)


def table(ops: Mapping[str, Mapping[str, float]]) -> str:
    """For people."""
    heads = (
        f"{'':24} {'call, ns':>9} {'x empty call':>13} {'fresh, ns':>10} {'plan, ns':>9} {'miss, ns':>9} {'x empty':>8}"
    )
    lines = [f"{heads} {'selection, ns':>12}   goals"]
    for op, cost in ops.items():
        figures = f"{cost['ns']:>9,.0f} {cost['ratio']:>13.1f} {cost['fresh_ns']:>10,.0f} {cost['plan_ns']:>9,.0f}"
        figures += f" {cost['miss_ns']:>9,.0f} {cost['miss_ratio']:>8,.0f} {cost['selection_ns']:>12,.0f}"
        lines.append(f"{op:24} {figures}   {goal_ns(op):,} ns, miss and selection {goal_miss_ns(op):,} ns")
    return "\n".join(lines)


def _measure(function: Any) -> dict[str, float]:
    contract = function.op.contract
    selection_ns = _slowest_selection(function)
    with _on_gpu(function.op), _nothing_runs(contract) as nothing:
        arguments = _arguments(contract.name, contract.example)
        nothing.recorded = None
        results = function(**arguments)
        assert nothing.recorded is not None, "the call launched something else"
        launched = nothing.recorded
        given = {**arguments, **_destinations(function, results, arguments)}
        plan = function.prepare(**arguments)
        assert plan.kernel == "nothing.launch"
        names: dict[str, Any] = {
            "empty": lambda a, b, c: None,
            "q": torch.empty(1),
            "function": function,
            "launch": plan.adapter.launch,
            "forget": function.op._forget,
        }
        run = plan.run
        of_run = {name: value for name, value in given.items() if name not in plan.weights}
        if hasattr(plan, "begin"):
            step = plan.begin(**_taken(plan.begin, given))
            run = step.run
        names["run"] = run
        positional, by_name = launched
        names |= {f"launched{place}": value for place, value in enumerate(positional)}
        names |= {f"named_{name}": value for name, value in by_name.items()}
        launch = [f"launched{place}" for place in range(len(positional))]
        launch += [f"{name}=named_{name}" for name in by_name]
        call = _spelled("function", function, given, names, "given")
        statements = {
            "empty": "empty(q, q, q)",
            "call": call,
            "fresh": _spelled("function", function, arguments, names, "given"),
            "plan": _spelled("run", run, _taken(run, of_run), names, "run"),
            "launch": f"launch({', '.join(launch)})",
        }
        nothing.launch = _nothing
        function.op._forget()
        names["launch"] = function.prepare(**arguments).adapter.launch
        ns = time_statements(statements, names, ROUNDS)
        rare = time_statements(
            {"call": call, "miss": f"forget(); {call}", "empty": statements["empty"]}, names, ROUNDS // 4
        )
    return {
        "ns": round(ns["call"] - ns["launch"], 1),
        "ratio": round((ns["call"] - ns["launch"]) / ns["empty"], 2),
        "fresh_ns": round(ns["fresh"] - ns["launch"], 1),
        "plan_ns": round(ns["plan"] - ns["launch"], 1),
        "miss_ns": round(rare["miss"] - rare["call"], 1),
        "miss_ratio": round((rare["miss"] - rare["call"]) / rare["empty"]),
        "selection_ns": selection_ns,
    }


class _EverythingInstalled(SimulatedMachine):
    """A machine with every package in a version that fits, so that nothing is refused for want of one."""

    def package(self, wanted: Package) -> Finding:
        return found(wanted.name, wanted.versions, f"{wanted.name} is installed")


def _slowest_selection(function: Any) -> float:
    """Nanoseconds of the choice for the op's example, on the device where it takes longest."""
    contract = function.op.contract
    asked = function.op.parse(None, (), _arguments(contract.name, contract.example))
    problem = contract.problem_of(asked.key, asked.device)
    names: dict[str, Any] = {
        "select": HUB.select,
        "op": contract.name,
        "policy": HUB.policy(contract.name),
        "machine": _EverythingInstalled({}),
    }
    names |= {name: dataclasses.replace(problem, device=device) for name, device in SIMULATED.items()}
    statements = {name: f"select(op, {name}, policy, machine)" for name in SIMULATED}
    return round(max(time_statements(statements, names, ROUNDS // 4).values()), 1)


def _nothing(*arguments: Any, **by_name: Any) -> None:
    return None


def _record(self: Any, *arguments: Any, **by_name: Any) -> None:
    type(self).recorded = (arguments, by_name)


@contextmanager
def _nothing_runs(contract: Any) -> Iterator[Any]:
    """While it lasts the op's kernel is one that does nothing: the class of its adapter."""
    methods = dict.fromkeys(contract.adapter.__abstractmethods__, _nothing)
    nothing: Any = type("Nothing", (contract.adapter,), {**methods, "launch": _record, "recorded": None})
    _MODULE.__dict__["Nothing"] = nothing
    record = Kernel(
        op=contract.name,
        name="nothing.launch",
        target=f"{__name__}:Nothing",
        summary="does nothing",
        band=Band.PLUGIN,
        standings=(verified("*", evidence="it does nothing"),),
        features=frozenset(contract.schema.features),
        constraints=(anything(*contract.problem.__dataclass_fields__),),
    )
    backend = types.SimpleNamespace(BACKEND=Backend("nothing", "kernels that do nothing"), KERNELS=(record,))
    handle = kernelhub.register_backend(backend)
    try:
        yield nothing
    finally:
        handle.remove()
        HUB.forget_report()


@contextmanager
def _on_gpu(op: Any) -> Iterator[None]:
    """While it lasts the op's problems are those of a GPU."""
    contract = op.contract
    if torch.cuda.is_available():
        yield
        return
    gpu = simulated("H200")

    def problem_of(key: Any, device: int) -> Any:
        problem = contract.problem_of(key, device)
        object.__setattr__(problem, "device", gpu)  # it is new, and `dataclasses.replace` would be timed with a miss
        return problem

    op.contract = dataclasses.replace(contract, problem_of=problem_of)
    try:
        yield
    finally:
        op.contract = contract


def _arguments(op: str, example: str) -> dict[str, Any]:
    """Of a small call of the op."""
    module, _, name = example.partition(":")
    make: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), name)
    sizes = SMALL.get(op, QUANTISER_SIZES)
    arguments = make(**sizes, device="cuda" if torch.cuda.is_available() else "cpu")
    if op.startswith("dequantize_"):
        names = list(inspect.signature(getattr(kernelhub, op)).parameters)
        codes = getattr(kernelhub, op[2:])(arguments["x"], backend="torch")
        arguments = dict(zip(names, codes, strict=False))
    return arguments


def _destinations(function: Any, results: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Results as the destinations of the next call."""
    parameters = inspect.signature(function).parameters
    names = [name for name in parameters if name == "out" or (name.startswith("out_") and name != "out_dtype")]
    if "format" in parameters and arguments.get("format", parameters["format"].default) is None:
        names = [name for name in names if name != "out_scale"]  # there are no scales
    return dict(zip(names, results if isinstance(results, tuple) else (results,), strict=False))


def _taken(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in inspect.signature(function).parameters if name in given}


def _spelled(name: str, function: Any, given: Mapping[str, Any], names: dict[str, Any], prefix: str) -> str:
    """A call in source: by place until the first argument that is not given, by name from there on."""
    words, by_place = [], True
    for parameter in inspect.signature(function).parameters.values():
        by_place = by_place and parameter.name in given and parameter.kind is not parameter.KEYWORD_ONLY
        if parameter.name in given:
            words.append(f"{prefix}_{parameter.name}" if by_place else f"{parameter.name}={prefix}_{parameter.name}")
            names[f"{prefix}_{parameter.name}"] = given[parameter.name]
    return f"{name}({', '.join(words)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", help="only these")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    known = [function.op.contract.name for function in functions()]
    for op in options.ops:
        if op not in known:
            parser.error(f"{op!r} is not an op{did_you_mean(op, known)}; the ops are {', '.join(known)}")
    torch.set_num_threads(1)
    ops = measure_ops(tuple(options.ops))
    print(json.dumps(ops, indent=1) if options.json else table(ops))
    return 0


if __name__ == "__main__":
    sys.exit(main())
