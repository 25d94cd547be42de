"""The compiled libraries that have the operators, and what adapters pass to them."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernelhub.probes.package import Library

VLLM = Library("vllm", "_C_custom_ar", 'pip install "vllm>=0.26,<0.34"', ("_C_stable_libtorch*.so",))
# SGLang's library has two builds; fast math distinguishes them.
SGL = Library(
    "sgl_kernel",
    "sgl_kernel",
    'pip install "sglang-kernel>=0.4.5,<0.4.11"',
    ("sm100/common_ops*.so",),
    (((9, 0), ("sm90/common_ops*.so",)),),
)

# What adapters pass, as the libraries of vLLM 0.33.0 and of sglang-kernel 0.4.10 declare it. Where SGLang's
# library declares nothing, torch infers types, and numbers the arguments.
_REDUCE = "(int fa, Tensor inp, Tensor! out, int reg_buffer, int reg_buffer_sz_bytes) -> ()"
SCHEMAS = {
    VLLM: {
        "init_custom_ar": "(int[] ipc_tensors, Tensor rank_data, int rank, bool fully_connected) -> int",
        "register_buffer": "(int fa, int[] ipc_tensors) -> ()",
        "all_reduce": _REDUCE,
        "meta_size": "() -> int",
        "dispose": "(int fa) -> ()",
    },
    SGL: {
        "init_custom_ar": "(int[] ipc_tensors, Tensor rank_data, int rank, bool full_nvlink) -> int",
        "register_buffer": "(int _0, int[] _1) -> ()",
        "all_reduce": _REDUCE,
        "meta_size": "() -> int",
        "dispose": "(int _0) -> ()",
    },
}


class Operators(NamedTuple):
    """The operators of one library."""

    init_custom_ar: Any
    register_buffer: Any
    all_reduce: Any
    meta_size: Any
    dispose: Any


def operators_of(library: Library, capability: tuple[int, int]) -> Operators:
    """The operators, loaded if need be.

    Raises:
        ImportError: the library cannot be loaded beside what is loaded, or its operators take other calls than ours.
    """
    from kernelhub.backends.shared import operators  # needs torch, which the records do not

    _check_beside(library)
    schemas = SCHEMAS[library]
    return Operators(*(operators.operator(library, name, schemas[name], capability) for name in Operators._fields))


def _check_beside(library: Library) -> None:
    """vLLM's library registers its other operators, too, which must not be registered twice."""
    import sys

    import torch

    registered = torch._C._dispatch_get_all_op_names()
    if library is not VLLM or any(name.startswith("_C_custom_ar::") for name in registered):
        return
    taken = next((name for name in registered if name.startswith("_C::")), None)
    if taken is not None and "vllm" not in sys.modules:
        raise ImportError(
            f"another library of this process has registered {taken}, and loading vLLM's as well could end the "
            "process; remove one of the two"
        )
