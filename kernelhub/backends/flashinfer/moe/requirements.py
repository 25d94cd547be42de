"""Shared by the records of FlashInfer's mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.backends.flashinfer import calls
from kernelhub.backends.flashinfer.requirements import (
    DATACENTRE_BLACKWELL,
    INSTALL,
    Module,
    Products,
    requirements,
)
from kernelhub.dispatch.constraint import (
    Between,
    Constraint,
    MultipleOf,
    OneOf,
    Package,
    Rejection,
    Rule,
    SameValue,
    anything,
    dtype_in,
)
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.ops.moe.experts.problem import ExpertsProblem
from kernelhub.probes.signature import Call

FOLDER = "kernelhub.backends.flashinfer.moe"
SOURCE = "TensorRT-LLM"
COMPILED = "compiled at first use, for an hour, unless built ahead"
HALVES = ("float16", "bfloat16")
MAPPED = frozenset({"expert_map"})


def _names(problem: ExpertsProblem) -> tuple[str, ...]:
    major, minor = problem.device.capability
    return ("fused_moe_120" if major == 12 else f"fused_moe_{10 * major + minor}",)


MODULE = Module(("device",), _names)
CHOICES = (Between("num_experts", 1, 511), Between("top_k", 1, 64))


def widths(multiple: int, why: str) -> tuple[MultipleOf, ...]:
    return tuple(MultipleOf(name, multiple, why=why) for name in ("hidden_size", "intermediate_size"))


# Before, the binaries of TensorRT-LLM read past the end of small intermediates.
_BINARIES = Package("flashinfer", ">=0.6.18,<0.7.3", distribution="flashinfer-python", install=INSTALL)
PACKED = "weights are packed"
BF16 = dtype_in("dtype", "bfloat16", why="the kernel supports no other dtypes")


def _more_than_chosen(problem: ExpertsProblem) -> str | None:
    if problem.num_experts > problem.top_k:
        return None
    return f"num_experts is {problem.num_experts}, top_k {problem.top_k}; the routing needs num_experts > top_k"


def trtllm(call: Call, *more: Constraint) -> tuple[Constraint, ...]:
    """The requirements of every kernel of TensorRT-LLM on the machine and on the routing."""
    return (
        *requirements(DATACENTRE_BLACKWELL, calls.CHOICES, call),
        _BINARIES,
        Module((), lambda _: ("fused_moe_trtllm_sm100",)),
        Products(),
        BF16,
        Between("num_experts", 4, 1024),
        MultipleOf("num_experts", 4, why="the routing kernels require it"),
        Between("top_k", 1, 32),
        Rule(("num_experts", "top_k"), _more_than_chosen, "range"),
        *more,
    )


BOTH_BIASES = SameValue("w13_bias", "w2_bias", why="the library requires both biases or neither")
ANY_WIDTH = anything("hidden_size", "intermediate_size")  # packing fills them up


def asked(form: str, why: str) -> Constraint:
    """Its error exceeds the tolerance, so it is opt-in."""
    return OneOf(
        "activation_dtype", (form,), "dtype", why, f"opt in, if that accuracy suffices: activation_dtype={form!r}"
    )


def layout(name: str) -> dict[str, Any]:
    """A kernel that reads this layout only."""
    return {"layouts": (name,), "packs_to": name}


@dataclass(frozen=True)
class UsualScales:
    """CUTLASS's experts look at a variable each time they quantise to NVFP4; it makes other scales of all of them."""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        if machine.variable(_4_OVER_6) != "1":
            return None
        return Rejection("rule", f"{_4_OVER_6}=1 also makes NVFP4 scales of one fourth", f"unset {_4_OVER_6}")


_4_OVER_6 = "FLASHINFER_NVFP4_4OVER6"
