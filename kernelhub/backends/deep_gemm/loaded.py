"""The library itself: importing this module imports it, so only adapters do.

A second copy that registers torch's namespace ``deep_gemm`` would end the process, not raise. So it is looked whether
some other library has claimed the namespace, and vLLM's copy, loaded without vLLM, is left where vLLM finds it should
it be imported later.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from kernelhub.backends.deep_gemm import copies
from kernelhub.backends.deep_gemm.requirements import CALLS
from kernelhub.backends.deep_gemm.watch import watched
from kernelhub.probes.finding import Finding
from kernelhub.probes.signature import Header, mismatch

_NAMESPACE = "deep_gemm::"


def function(name: str) -> Callable[..., Any]:
    """The library's function that accepts one of the calls `CALLS[name]`.

    Raises:
        ImportError: there is none, with what is wrong with each that has the name.
    """
    wrong = []
    for call in CALLS[name]:
        made: Callable[..., Any] | None = getattr(_LIBRARY, copies.name_of(call), None)
        if made is None:
            wrong.append(f"no {copies.name_of(call)}")
            continue
        header = _header(made)
        reason = None if header is None else mismatch(call, header)
        if reason is None:
            return watched(_LIBRARY.__name__, made)
        wrong.append(f"{copies.name_of(call)} {reason}")
    raise ImportError(f"{_LIBRARY.__name__} at {_LIBRARY.__file__} cannot be called: {'; '.join(dict.fromkeys(wrong))}")


def _load() -> ModuleType:
    copy = copies.find()
    if isinstance(copy, Finding):
        raise ImportError(copy.reason)
    if copy.module in sys.modules:
        return importlib.import_module(copy.module)
    if copy.registers_operators and _namespace_is_taken():
        raise ImportError(
            f"another library of this process has registered torch's operators {_NAMESPACE}*, and loading "
            f"{copy.folder} as well would terminate the process; remove one of the two"
        )
    if "." not in copy.module:
        return importlib.import_module(copy.module)
    return _load_apart(copy)


def _load_apart(copy: copies.Copy) -> ModuleType:
    """Load a copy inside another package without that package.

    Under its own name even ``from . import _C`` would import the package, so it gets another one, and its own besides.
    """
    name = copy.module.replace(".", "_")
    spec = importlib.util.spec_from_file_location(
        name, copy.folder / "__init__.py", submodule_search_locations=[str(copy.folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    for loaded in [loaded for loaded in sys.modules if loaded == name or loaded.startswith(f"{name}.")]:
        sys.modules[copy.module + loaded[len(name) :]] = sys.modules[loaded]
    return module


def _namespace_is_taken() -> bool:
    return any(name.startswith(_NAMESPACE) for name in torch._C._dispatch_get_all_op_names())


def _header(made: Callable[..., Any]) -> Header | None:
    """Its parameters, of Python functions or as pybind writes them into docstrings; None if they are unknown."""
    if inspect.isfunction(made):
        return copies.header_of_text(f"{made.__name__}{_without_defaults(inspect.signature(made))}")
    if not inspect.isbuiltin(made):
        return None
    return copies.header_of_text((made.__doc__ or "").strip().split("\n")[0])


def _without_defaults(signature: inspect.Signature) -> str:
    """A signature as source, every default and annotation written as None."""
    plain = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=parameter.empty if parameter.default is parameter.empty else None,
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


_LIBRARY = _load()
