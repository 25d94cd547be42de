"""What the kernels need on the machine, and their calls of the libraries' Python functions.

FlashAttention-3 is called as the torch operator that its library registers, whose schema the adapter checks; `FA3` is
the library's own wrapper of that operator, which has the same parameters and can be read beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kernelhub.backends.flash_attn import vllm_libraries
from kernelhub.backends.flash_attn.fa3_build import compiled_with, library
from kernelhub.dispatch.constraint import Compiled, Constraint, OnDevice, Package, Rejection, Takes
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes.finding import Finding
from kernelhub.probes.package import package
from kernelhub.probes.signature import Call

FA3_INSTALL = 'pip install "kernelhub[flash-attn-3]"'
FA3_BUILD = "build FlashAttention-3 from source with it"
FA2_INSTALL = 'pip install --no-build-isolation "flash-attn>=2.7,<3"'
FA4_INSTALL = 'pip install "kernelhub[flash-attn-4]"'

FA3 = Call(
    "flash_attn_interface:_flash_attn_forward",
    ("q", "k", "v"),
    (
        "out_",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "page_table",
        "leftpad_k",
        "softmax_scale",
        "causal",
        "window_size_left",
        "window_size_right",
        "softcap",
        "num_splits",
    ),
)
_FA2_FEATURES = ("softmax_scale", "causal", "window_size", "softcap")
FA2 = Call("flash_attn:flash_attn_func", ("q", "k", "v"), (*_FA2_FEATURES, "return_attn_probs"))
FA2_VARLEN = Call(
    "flash_attn:flash_attn_varlen_func",
    ("q", "k", "v"),
    (
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        *_FA2_FEATURES,
        "return_attn_probs",
        "block_table",
    ),
)
FA2_CACHE = Call(
    "flash_attn:flash_attn_with_kvcache",
    ("q", "k_cache", "v_cache"),
    ("cache_seqlens", "block_table", *_FA2_FEATURES, "num_splits", "return_softmax_lse"),
)
_FA4_FEATURES = ("softmax_scale", "causal", "window_size", "learnable_sink", "num_splits", "return_lse")
FA4 = Call("flash_attn.cute:flash_attn_func", ("q", "k", "v"), _FA4_FEATURES)
FA4_VARLEN = Call(
    "flash_attn.cute:flash_attn_varlen_func",
    ("q", "k", "v"),
    (
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "seqused_k",
        "page_table",
        *_FA4_FEATURES,
    ),
)
CALLS = (FA3, FA2, FA2_VARLEN, FA2_CACHE, FA4, FA4_VARLEN)


@dataclass(frozen=True)
class Holds:
    """A probe of this folder that must succeed.

    Args:
        what: what is looked for, as the machine remembers the answer.
        probe: looks for it.
    """

    what: str
    probe: Callable[[], Finding]

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask(("flash_attn", self.what), self.probe).rejection


@dataclass(frozen=True)
class Where:
    """A constraint that matters for some problems only.

    Args:
        reads: the facets that `applies` reads.
        applies: problem -> whether the constraint matters.
        constraint: the constraint.
    """

    reads: tuple[str, ...]
    applies: Callable[[Any], bool]
    constraint: Constraint

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.reads, *self.constraint.fields)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return self.constraint.reject(problem, machine) if self.applies(problem) else None


def where_asked(feature: str, constraint: Constraint) -> Where:
    """A constraint that applies if a feature is requested."""
    return Where((feature,), lambda problem: bool(getattr(problem, feature)), constraint)


def fa3_part(part: str) -> Holds:
    """A part of FlashAttention-3 that must have been compiled."""
    return Holds(f"FlashAttention-3 with {part}", lambda: compiled_with(part, FA3_BUILD))


@dataclass(frozen=True)
class Fa3Width:
    """The tiles of FlashAttention-3 for this width of heads were compiled."""

    fields = ("head_dim_qk",)

    def reject(self, problem: Any, machine: Machine) -> Rejection | None:
        width = next((limit for limit in (128, 192, 256) if problem.head_dim_qk <= limit), None)
        return None if width is None else fa3_part(f"HDIM{width}").reject(problem, machine)


FA3_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((9, 0),)),
    Package("flash_attn_interface", distribution="tokenspeed-fa3", install=FA3_INSTALL),
    Holds("FlashAttention-3", lambda: library(FA3_INSTALL)),
    Takes(FA3, FA3_INSTALL),
    Fa3Width(),
    Where(("q_dtype",), lambda problem: problem.q_dtype == "float16", fa3_part("FP16")),
    where_asked("ragged", fa3_part("VARLEN")),
    where_asked("window_left", fa3_part("LOCAL")),
    where_asked("window_right", fa3_part("LOCAL")),
    where_asked("softcap", fa3_part("SOFTCAP")),
)

# A default build holds code for sm_80, which later sm_8x run, and sm_90; for Blackwell it depends on the builder.
FA2_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))),
    Package("flash_attn", ">=2.7,<3", distribution="flash-attn", install=FA2_INSTALL),
    Holds("flash_attn_2_cuda", lambda: package("flash_attn_2_cuda", distribution="flash-attn", install=FA2_INSTALL)),
)

# The first is what FlashAttention-4 is compiled with at run time; flash_attn itself is a folder without code there.
FA4_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3))),
    Package("cutlass", ">=4.6.2", distribution="nvidia-cutlass-dsl", install=FA4_INSTALL),
    Holds("quack", lambda: package("quack", ">=0.5.3", distribution="quack-kernels", install=FA4_INSTALL)),
    Holds("tvm_ffi", lambda: package("tvm_ffi", ">=0.1.12", distribution="apache-tvm-ffi", install=FA4_INSTALL)),
)

# What other versions were compiled with has not been read. Code for FlashAttention-2 is for sm_80, and PTX.
_VLLM = Package("vllm", ">=0.33", install=vllm_libraries.VLLM_INSTALL)
VLLM_FA3_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((9, 0),)),
    _VLLM,
    Compiled(vllm_libraries.FA3),
)
VLLM_FA2_MACHINE: tuple[Constraint, ...] = (
    OnDevice("nvidia", only=((8, 0), (8, 6), (8, 7), (8, 9), (9, 0))),
    _VLLM,
    Compiled(vllm_libraries.FA2),
)
