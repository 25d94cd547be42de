"""From a compiled Triton or Gluon kernel to a kernel of kernelhub's own launcher.

Triton's launcher parses each argument on its own and asks the driver about each pointer. The launcher of `csrc/launch`
learns once which kinds of arguments a compiled variant takes.

Triton still launches what needs more than parameters and launch attributes: scratch memory, instrumentation, hooks of a
profiler. The parameters that the driver reports for the function must be those of the signature, so a release of Triton
with other parameters is launched by Triton, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kernelhub.runtime import launch

# Kinds of scalars as the launcher names them, by Triton's name of the type.
_SCALARS = {
    "i1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "B",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "fp64": "d",
}
_SIZES = {"b": 1, "B": 1, "h": 2, "H": 2, "i": 4, "I": 4, "f": 4}
_SCRATCH = 2  # pointers that Triton adds to each kernel: global and profile scratch
_WARP = 32
_MOST_SHARED = 228 << 10  # beyond it Triton sets another attribute
_PORTABLE_CLUSTER = 8  # a larger one needs an attribute of the function
_MAP_BYTES = 128
_FLOAT32 = 7  # CU_TENSOR_MAP_DATA_TYPE_FLOAT32, which may be rounded to another type
# Triton numbers three types of tensor maps unlike the driver.
_TYPES = {8: 10, 9: 8, 10: 9}

Sizes = Callable[[int, int], list[int]]


def direct_launch(
    compiled: Any,
    given: int,
    native: launch.Native | None = None,
    sizes: Sizes = launch.parameter_sizes,
    cluster: int = 1,
    captured_only: bool = False,
) -> Any:
    """The launcher's kernel of a compiled variant on the current device, or None if Triton has to launch it.

    Args:
        compiled: Triton's CompiledKernel, loaded.
        given: how many arguments are passed; those after them are static.
        native: the launcher; by default that of the process.
        sizes: bytes of the parameters of a function, by the driver.
        cluster: programs that are launched as a cluster, though each was compiled for itself.
        captured_only: a programmatic launch is one only where it is captured: it takes the host 1.7 us longer.
    """
    metadata = compiled.metadata
    signature = list(compiled.src.signature.values())
    if not launch.in_use() or not _plain(metadata) or any(kind != "constexpr" for kind in signature[given:]):
        return None
    kinds, maps = [_kind(kind) for kind in signature[:given]], _maps(metadata, signature)
    native = native or launch.native()
    if native is None or maps is None or None in kinds:
        return None
    spelled = "".join(filter(None, kinds))
    expected = [*_parameters(spelled, maps), *[8] * _SCRATCH]
    if len(expected) > native.module.MAX_PARAMETERS or sizes(compiled.function, len(expected) + 1) != expected:
        return None
    return native.module.Kernel(
        native.driver,
        compiled.function,
        spelled,
        compiled.name,
        torch.cuda.current_device(),
        _WARP * metadata.num_warps,
        metadata.shared,
        owner=compiled,
        scratch=_SCRATCH,
        maps=maps,
        cluster=cluster * metadata.num_ctas,
        cooperative=bool(metadata.launch_cooperative_grid),
        programmatic=bool(metadata.launch_pdl) * (launch.CAPTURED_ONLY if captured_only else 1),
    )


def _plain(metadata: Any) -> bool:
    """Whether a launch needs parameters and launch attributes only."""
    return bool(
        metadata.target.backend == "cuda"
        and metadata.num_ctas <= _PORTABLE_CLUSTER
        and not metadata.global_scratch_size
        and not metadata.profile_scratch_size
        and not getattr(metadata, "instrumentation_mode", "")
        and metadata.shared <= _MOST_SHARED
    )


def _kind(kind: Any) -> str | None:
    """An argument's kind as the launcher names it; None for one that only Triton can pass."""
    if not isinstance(kind, str):
        return None
    if kind == "constexpr":
        return "-"
    if kind.startswith("tensordesc"):
        return "T"
    return "P" if kind.startswith("*") else _SCALARS.get(kind)


def _maps(metadata: Any, signature: Sequence[Any]) -> tuple[tuple[Any, ...], ...] | None:
    """Facts of the tensor maps, one for each descriptor in the signature; None for one that only Triton can encode."""
    count = sum(isinstance(kind, str) and kind.startswith("tensordesc") for kind in signature)
    facts: Sequence[Mapping[str, Any] | None] = getattr(metadata, "tensordesc_meta", None) or [None] * count
    if len(facts) != count:
        return None
    maps = []
    for fact in facts:  # None: the descriptor is passed as a pointer
        if fact is None or fact.get("is_im2col") or fact["elem_type"] == _FLOAT32:
            return None
        kind = _TYPES.get(fact["elem_type"], fact["elem_type"])
        box = tuple(int(size) for size in fact["block_size"])
        maps.append((fact["swizzle"], fact["elem_size"], kind, int(fact["fp4_padded"]), box))
    return tuple(maps)


def _parameters(kinds: str, maps: Sequence[tuple[Any, ...]]) -> Iterator[int]:
    """Bytes of each parameter. A descriptor is a map, its sizes in 4 bytes each, its strides in 8."""
    of_maps = iter(maps)
    for kind in kinds.replace("-", ""):
        if kind == "T":
            rank = len(next(of_maps)[-1])
            yield from (_MAP_BYTES, *[4] * rank, *[8] * rank)
        else:
            yield _SIZES.get(kind, 8)
