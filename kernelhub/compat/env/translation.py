"""Translation of an environment: each variable of another project that is set, and its meaning in kernelhub."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kernelhub.compat.env.attention import ATTENTION
from kernelhub.compat.env.experts import EXPERTS
from kernelhub.compat.env.gemm import GEMM
from kernelhub.compat.env.libraries import LIBRARIES
from kernelhub.compat.env.variable import DEEP_GEMM, FLASHINFER, VLLM, EngineVariable, Meaning
from kernelhub.dispatch.policy import FOREIGN, Layer, Override
from kernelhub.dispatch.settings import parse_bool

# name -> (owner, what to write instead)
SUCCESSORS = {
    "VLLM_ALL2ALL_BACKEND": (VLLM, "--all2all-backend"),
    "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION": (VLLM, "--attention-config.disable_flashinfer_q_quantization"),
    "VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH": (
        VLLM,
        "--attention-config.flash_attn_max_num_splits_for_cuda_graph",
    ),
    "VLLM_MXFP4_USE_MARLIN": (VLLM, "--moe-backend marlin"),
    "VLLM_TEST_FORCE_FP8_MARLIN": (VLLM, "--linear-backend marlin"),
    "VLLM_USE_FBGEMM": (VLLM, "--linear-backend"),
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": (VLLM, "--moe-backend flashinfer_trtllm"),
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS": (VLLM, "--moe-backend flashinfer_cutlass"),
    "VLLM_USE_NVFP4_CT_EMULATIONS": (VLLM, "--linear-backend emulation"),
    "VLLM_V1_USE_PREFILL_DECODE_ATTENTION": (VLLM, "--attention-backend ROCM_ATTN"),
    "FLASHINFER_CACHE_DIR": (FLASHINFER, "FLASHINFER_WORKSPACE_BASE, the folder above .cache/flashinfer"),
    "DG_CACHE_DIR": (DEEP_GEMM, "DG_JIT_CACHE_DIR"),
    "DG_NVCC_COMPILER": (DEEP_GEMM, "DG_JIT_NVCC_COMPILER"),
    "DG_PTXAS_VERBOSE": (DEEP_GEMM, "DG_JIT_PTXAS_VERBOSE"),
    "DG_JIT_PRINT_NVCC_COMMAND": (DEEP_GEMM, "DG_JIT_PRINT_COMPILER_COMMAND"),
    "DG_PRINT_AUTOTUNE": (DEEP_GEMM, "DG_PRINT_CONFIGS"),
}

# Current names of vLLM that resemble a variable that chooses kernels, but choose none of kernelhub's.
LOOK_ALIKES = frozenset(
    {"VLLM_FLASHINFER_ALLREDUCE_BACKEND", "VLLM_USE_FLASHINFER_MOE_INT4", "VLLM_USE_FLASHINFER_SAMPLER"}
)


IGNORE = "KERNELHUB_IGNORE_VLLM_ENV"
VARIABLES = {variable.name: variable for variable in (*ATTENTION, *GEMM, *EXPERTS, *LIBRARIES)}

_PREFIXES = ("VLLM_", "FLASHINFER_", "DG_", "FORCE_NUM_")
_NEAR = 0.85  # similarity above which a name counts as misspelt: one letter in seven may differ

logger = logging.getLogger("kernelhub.env")
_warned: set[str] = set()


@dataclass(frozen=True)
class Translation:
    """One variable that is set, and its translation.

    Attributes:
        name: full name.
        text: its value.
        owner: the project that the variable belongs or seems to belong to.
        says: its effect here, as a sentence; empty if it is invalid.
        successor: what replaces it in the project's current version; empty if that still reads it.
        problem: what is wrong with it; empty if it is valid.
        meaning: its overrides, with their origin.
    """

    name: str
    text: str
    owner: str
    says: str = ""
    successor: str = ""
    problem: str = ""
    meaning: Meaning = Meaning("")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: getattr(self, name) for name in ("name", "text", "owner", "says", "successor", "problem")} | {
            "overrides": [{"op": override.ops, "names": list(override.names)} for override in self.meaning.overrides]
        }


def translate(environ: Mapping[str, str] | None = None) -> tuple[Translation, ...]:
    """Every variable of another project that is set and concerns kernels, by name; an empty value sets none."""
    environ = os.environ if environ is None else environ
    return tuple(found for name in sorted(environ) if (found := _translation(name, environ[name])) is not None)


def said(environ: Mapping[str, str]) -> Layer:
    """The policy of an environment; invalid variables are ignored with one warning each."""
    translations = translate(environ)
    for item in translations:
        if item.problem and item.owner == VLLM and item.name not in _warned:
            _warned.add(item.name)
            logger.warning("%s=%s is ignored: %s", item.name, item.text, item.problem)
    meanings = [item.meaning for item in translations]
    return Layer(
        requests=_all(meaning.requests for meaning in meanings),
        prefers=_all(meaning.prefers for meaning in meanings),
        disables=_all(meaning.disables for meaning in meanings),
        batch_invariant=next(
            (meaning.batch_invariant for meaning in meanings if meaning.batch_invariant is not None), None
        ),
    )


def flag(name: str, default: bool) -> bool:
    """A switch of vLLM as it was when the settings were read; its default if it is unset, invalid or ignored."""
    from kernelhub.dispatch.hub import HUB  # reads this module while it reads its settings

    if HUB.settings[IGNORE]:
        return default
    try:
        text = HUB.machine.variable(name)
        return parse_bool(text) if text.strip() else default
    except ValueError:
        return default


def _translation(name: str, text: str) -> Translation | None:
    variable = VARIABLES.get(name)
    if variable is not None:
        return _read(variable, text) if text.strip() else None
    if name in SUCCESSORS:
        owner, successor = SUCCESSORS[name]
        problem = f"{owner} no longer reads it, and kernelhub does not; write {successor}"
        return Translation(name, text, owner, successor=successor, problem=problem)
    if not name.startswith(_PREFIXES) or name in LOOK_ALIKES:
        return None
    near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=_NEAR)
    if not near:
        return None
    return Translation(name, text, VARIABLES[near[0]].owner, problem=f"not a known variable; did you mean {near[0]}?")


def _read(variable: EngineVariable, text: str) -> Translation:
    try:
        meaning = variable.read(text)
    except ValueError as error:
        problem = f"{error}; write {variable.grammar}"
        return Translation(variable.name, text, variable.owner, successor=variable.successor, problem=problem)
    origin = f"{variable.name}={text}"
    undo = f"unset {variable.name}, or set {IGNORE}=1"

    def placed(overrides: tuple[Override, ...]) -> tuple[Override, ...]:
        return tuple(replace(override, source=FOREIGN, origin=origin, undo=undo) for override in overrides)

    meaning = replace(
        meaning,
        requests=placed(meaning.requests),
        prefers=placed(meaning.prefers),
        disables=placed(meaning.disables),
    )
    return Translation(variable.name, text, variable.owner, meaning.says, variable.successor, meaning=meaning)


def _all(groups: Iterable[tuple[Override, ...]]) -> tuple[Override, ...]:
    return tuple(override for group in groups for override in group)
