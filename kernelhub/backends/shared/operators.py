"""Operators of other projects' compiled libraries: loaded when a kernel of one is selected, checked against a schema.

Registering a name twice terminates the process, so a library is not loaded if another one has its namespace.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from kernelhub.probes.package import Library, find_library

_files: dict[str, str] = {}  # namespace -> the file that was loaded here; a process can have but one


def operator(library: Library, name: str, schema: str, capability: tuple[int, int]) -> Any:
    """An operator of the library, loaded if need be.

    Args:
        library: where it is.
        name: of the operator, in the library's namespace.
        schema: what is passed to it, as ``"(Tensor a, Tensor! out) -> ()"``; it may take more that has defaults.
        capability: of the device that it is for.

    Raises:
        ImportError: the library cannot be loaded beside what is loaded, or its operator takes other calls than ours.
    """
    qualified = f"{library.namespace}::{name}"
    registered = torch._C._dispatch_get_all_op_names()
    finding = find_library(library, capability)
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
    reason = mismatch(made._schema, name, schema)
    if reason is not None:
        raise ImportError(f"{qualified} {reason}; {library.install}")
    return made


def mismatch(registered: Any, name: str, schema: str) -> str | None:
    """How a registered schema differs from the one that is called; None if the calls fit it."""
    wanted = torch._C.parse_schema(f"{name}{schema}")
    own, ours = list(registered.arguments), list(wanted.arguments)
    taken = [_described(item) for item in own]
    if taken[: len(ours)] != [_described(item) for item in ours]:
        return f"takes ({', '.join(taken)}), not ({', '.join(map(_described, ours))})"
    extra = [item.name for item in own[len(ours) :] if not item.has_default_value()]
    if extra:
        return f"also requires {', '.join(extra)}"
    given, awaited = ([str(item.type) for item in side.returns] for side in (registered, wanted))
    return None if given == awaited else f"gives ({', '.join(given)}), not ({', '.join(awaited)})"


def _described(argument: Any) -> str:
    return f"{argument.type} {argument.name}"


def _load(library: Library, file: str, registered: list[str]) -> None:
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
