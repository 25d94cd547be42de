"""Loading a library's operators, once a kernel of it has been chosen, and holding our calls against their schemas."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.cutlass.libraries import Library, find

# What adapters pass, as the libraries declare it: vLLM 0.33.0 (its wheel), sgl-kernel 0.3.21, sglang-kernel 0.4.10.
SCHEMAS = {
    "cutlass_scaled_mm": ("(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()"),
    "cutlass_scaled_mm_supports_fp8": "(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8": "(int cuda_device_capability) -> bool",
    "cutlass_scaled_fp4_mm": (
        "(Tensor! out, Tensor a, Tensor b, Tensor block_scale_a, Tensor block_scale_b, Tensor alpha) -> ()"
    ),
    "cutlass_scaled_mm_supports_fp4": "(int cuda_device_capability) -> bool",
    "fp8_scaled_mm": (
        "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype, Tensor? bias) -> Tensor"
    ),
    "fp8_blockwise_scaled_mm": (
        "(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, ScalarType out_dtype) -> Tensor"
    ),
}

_files: dict[str, str] = {}  # namespace -> the file that was loaded here; a process can have but one


def operator(library: Library, name: str, capability: tuple[int, int]) -> Any:
    """An operator of the library, loaded if need be.

    Raises:
        ImportError: the library cannot be loaded beside what is loaded, or its operator takes other calls than ours.
    """
    qualified = f"{library.namespace}::{name}"
    registered = torch._C._dispatch_get_all_op_names()
    finding = find(library, capability)
    if qualified not in registered:
        if finding.value is None:
            raise ImportError(f"{finding.reason}; {finding.remedy}")
        if _files.get(library.namespace) != finding.value:
            _load(library, finding.value, registered)
        if qualified not in torch._C._dispatch_get_all_op_names():
            raise ImportError(f"{finding.value} does not register {qualified}; {library.install}")
    elif library.namespace in _files and finding.value not in (None, _files[library.namespace]):
        raise ImportError(
            f"{finding.value} is the library for this device, but {_files[library.namespace]} has been loaded for "
            "another one, and a process can have but one of them"
        )
    made = getattr(getattr(torch.ops, library.namespace), name).default
    reason = mismatch(made._schema, name)
    if reason is not None:
        raise ImportError(f"{qualified} {reason}; {library.install}")
    return made


def supports(library: Library, predicate: str, capability: tuple[int, int]) -> None:
    """Ask the library itself whether it was compiled for the device.

    Raises:
        ImportError: it says no.
    """
    if not operator(library, predicate, capability)(10 * capability[0] + capability[1]):
        sm = f"sm_{capability[0]}{capability[1]}"
        raise ImportError(f"this {library.package} was compiled without {sm}: {predicate} says so; {library.install}")


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Libraries launch on the current device, so that must be the operands' one."""
    if tensor.is_cuda and torch.cuda.current_device() != tensor.get_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def mismatch(schema: Any, name: str) -> str | None:
    """How a registered schema differs from that of `SCHEMAS`; None if our calls fit it."""
    wanted = torch._C.parse_schema(f"{name}{SCHEMAS[name]}")
    own, ours = list(schema.arguments), list(wanted.arguments)
    taken = [_told(item) for item in own]
    if taken[: len(ours)] != [_told(item) for item in ours]:
        return f"takes ({', '.join(taken)}), not ({', '.join(map(_told, ours))})"
    extra = [item.name for item in own[len(ours) :] if not item.has_default_value()]
    if extra:
        return f"also asks for {', '.join(extra)}"
    given, awaited = ([str(item.type) for item in side.returns] for side in (schema, wanted))
    return None if given == awaited else f"gives ({', '.join(given)}), not ({', '.join(awaited)})"


def _told(argument: Any) -> str:
    return f"{argument.type} {argument.name}"


def _load(library: Library, file: str, registered: list[str]) -> None:
    """Load the file, unless the namespace is another library's: to register a name twice ends the process."""
    prefix = f"{library.namespace}::"
    taken = next((name for name in registered if name.startswith(prefix)), None)
    if taken is not None and library.package not in sys.modules:
        raise ImportError(
            f"another library of this process has registered {taken}, and loading {file} as well could end the "
            "process; remove one of the two"
        )
    try:
        torch.ops.load_library(file)
    except OSError as error:
        raise ImportError(
            f"{file} cannot be loaded with torch {torch.__version__}: {error.__cause__ or error}; install a build of "
            f"{library.package} for it"
        ) from error
    _files[library.namespace] = file
