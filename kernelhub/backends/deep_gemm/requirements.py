"""What DeepGEMM's kernels need on the machine: a complete copy, functions that support our calls, a toolkit, a cache.

All facts come from files. Only `loaded` imports the library, once one of its kernels has been selected.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kernelhub.backends.deep_gemm import copies
from kernelhub.dispatch.constraint import AnyOf, Constraint, OnDevice, Package, Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.probes import cache, toolchain
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.signature import Call
from kernelhub.probes.toolchain import driver

HOPPER: Constraint = OnDevice("nvidia", only=((9, 0),))
BLACKWELL: Constraint = OnDevice("nvidia", only=((10, 0), (10, 3)))
BOTH: Constraint = OnDevice("nvidia", only=((9, 0), (10, 0), (10, 3)))

INSTALL = copies.INSTALL
_INSTALLED = AnyOf((Package("deep_gemm", install=INSTALL), Package("vllm", install=INSTALL)))
_OLDEST_TOOLKIT = {9: (12, 3), 10: (12, 9)}  # by generation, as the library asserts
_PROGRAMS = ("nvcc", "cuobjdump")  # it compiles with the first and finds the kernel's name with the second


def _calls(*calls: tuple[str, tuple[str, ...]], keywords: tuple[str, ...] = ()) -> tuple[Call, ...]:
    return tuple(Call(f"deep_gemm:{name}", positional, keywords) for name, positional in calls)


_GROUPED = ("a", "b", "d", "grouped_layout")
_GROUPED_TO_2_2 = ("a", "b", "d", "m_indices")
_MASKED = ("a", "b", "d", "masked_m", "expected_m")
_RANGES = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")
_PAGES = ("weights", "context_lens", "block_table", "schedule_meta", "max_context_len")

# What adapters call, under the names of all versions, newest first. The first that fits is taken.
CALLS: dict[str, tuple[Call, ...]] = {
    "fp8_gemm": _calls(
        ("fp8_gemm_nt", ("a", "b", "d")),
        ("fp8_fp4_gemm_nt", ("a", "b", "d")),
        ("gemm_fp8_fp8_bf16_nt", ("lhs", "rhs", "out")),
    ),
    "fp8_contiguous": _calls(
        ("m_grouped_fp8_gemm_nt_contiguous", _GROUPED),
        ("m_grouped_fp8_fp4_gemm_nt_contiguous", _GROUPED),
        ("m_grouped_fp8_gemm_nt_contiguous", _GROUPED_TO_2_2),
        ("m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", ("lhs", "rhs", "out", "m_indices")),
    ),
    "fp8_masked": _calls(
        ("m_grouped_fp8_gemm_nt_masked", _MASKED),
        ("m_grouped_fp8_fp4_gemm_nt_masked", _MASKED),
        ("fp8_m_grouped_gemm_nt_masked", _MASKED),
        ("m_grouped_gemm_fp8_fp8_bf16_nt_masked", ("lhs", "rhs", "out", "masked_m", "expected_m")),
    ),
    "bf16_contiguous": _calls(
        ("m_grouped_bf16_gemm_nt_contiguous", _GROUPED), ("m_grouped_bf16_gemm_nt_contiguous", _GROUPED_TO_2_2)
    ),
    "bf16_masked": _calls(("m_grouped_bf16_gemm_nt_masked", _MASKED), ("bf16_m_grouped_gemm_nt_masked", _MASKED)),
    "alignment": _calls(("get_mk_alignment_for_contiguous_layout", ()), ("get_m_alignment_for_contiguous_layout", ())),
    "mqa_logits": _calls(
        ("fp8_mqa_logits", _RANGES), ("fp8_mqa_logits", (*_RANGES[:3], "ks", "ke")), keywords=("clean_logits",)
    ),
    # Only since 2.5.0, which has `indices`, is every token's length its own in every copy.
    "paged_mqa_logits": _calls(
        ("fp8_paged_mqa_logits", ("q", "fused_kv_cache", *_PAGES)),
        ("fp8_paged_mqa_logits", ("q", "kv_cache", *_PAGES)),
        keywords=("clean_logits", "indices"),
    ),
    "paged_metadata": _calls(("get_paged_mqa_logits_metadata", ("context_lens", "block_kv", "num_sms"))),
    "num_sms": _calls(("get_num_sms", ())),
}


@dataclass(frozen=True)
class Whole:
    """A copy with headers and compiled modules, which broken distributions lack."""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask("deep_gemm copy", copies.whole).rejection


@dataclass(frozen=True)
class Offers:
    """Functions that take our calls."""

    names: tuple[str, ...]

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        for name in self.names:
            finding = machine.ask(("deep_gemm offers", name), functools.partial(copies.offers, CALLS[name]))
            if not finding.ok:
                return finding.rejection
        return None


@dataclass(frozen=True)
class Lacks:
    """A complete copy without a function of this name, which identifies old releases."""

    name: str

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        finding = machine.ask(("deep_gemm names", self.name), functools.partial(copies.names, self.name))
        return None if finding.code == "symbol_missing" else Rejection("rule", finding.reason)

    def __str__(self) -> str:
        return f"deep_gemm without {self.name}"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit, since the library compiles every kernel when it is first needed."""

    fields = ("device",)

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        oldest = _OLDEST_TOOLKIT.get(problem.device.capability[0])
        if oldest is None:
            return None  # no device of the library's
        return machine.ask(("deep_gemm toolkit", oldest), lambda: toolkit(oldest), "nvcc").rejection


@dataclass(frozen=True)
class WritableCache:
    """A writable folder for the kernels that the library compiles."""

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        return machine.ask("deep_gemm cache", lambda: cache.writable(_cache_folder(), "DG_JIT_CACHE_DIR")).rejection


def machine_for(*calls: str) -> tuple[Constraint, ...]:
    """The machine's requirements of a kernel that makes these calls of `CALLS`."""
    return (_INSTALLED, Whole(), Offers(calls), Toolkit(), WritableCache())


def toolkit(oldest: tuple[int, int]) -> Finding:
    """A CUDA toolkit where the library looks for it: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda. None is started."""
    root = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if root is None:
        on_path = shutil.which("nvcc")
        root = str(Path(on_path).parent.parent) if on_path else "/usr/local/cuda"
    remedy = f"set CUDA_HOME to a CUDA toolkit of {oldest[0]}.{oldest[1]} or newer"
    lacks = [name for name in _PROGRAMS if not Path(root, "bin", name).is_file()]
    if lacks:
        reason = f"DeepGEMM compiles its kernels, but {root}/bin has no {' and no '.join(lacks)}"
        return lacking("CUDA toolkit", "toolkit_missing", reason, remedy)
    version = _version_of(Path(root))
    if version is not None and version < oldest:
        reason = f"the CUDA toolkit at {root} is {version[0]}.{version[1]}; DeepGEMM needs {oldest[0]}.{oldest[1]} here"
        return lacking("CUDA toolkit", "toolkit_version", reason, remedy, f"{version[0]}.{version[1]}")
    fitting = None if version is None else toolchain.of_files(Path(root, "bin", "nvcc"), version, driver().value)
    if fitting is not None and not fitting.ok:
        return fitting
    return found("CUDA toolkit", root, f"CUDA toolkit at {root}")


def _version_of(root: Path) -> tuple[int, int] | None:
    """As the toolkit's own list of its parts has it, which those of system packages lack."""
    try:
        major, minor = json.loads((root / "version.json").read_text())["cuda"]["version"].split(".")[:2]
        return int(major), int(minor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _cache_folder() -> Path:
    explicit = os.environ.get("DG_JIT_CACHE_DIR")
    return Path(explicit) if explicit else Path(os.path.expanduser("~")) / ".deep_gemm"
