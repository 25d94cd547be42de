"""Every LLM kernel behind one stable call: kernelhub runs the fastest correct kernel on this device and reports why.

>>> import torch, kernelhub
>>> q, k, v = torch.randn(3, 1, 64, 8, 64)
>>> kernelhub.attention(q, k, v, causal=True).shape
torch.Size([1, 64, 8, 64])

Each public name is imported at its first use. `import kernelhub` imports only `homes`, the table of their modules.
"""

from __future__ import annotations

import importlib
import sys
from _thread import get_ident
from typing import Any

from kernelhub.homes import HOMES, MODULES

__version__ = "0.1.0"

__all__ = ["__version__", *MODULES, *HOMES]

_begun: set[tuple[int, str]] = set()  # the modules that a thread is about to import


def __getattr__(name: str) -> Any:
    if name not in MODULES and name not in HOMES:
        from difflib import get_close_matches

        close = [] if name.startswith("_") else get_close_matches(name, __all__, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise AttributeError(f"module 'kernelhub' has no attribute {name!r}{meant}")
    home = f"kernelhub.{name}" if name in MODULES else HOMES[name]
    import_of_home = (get_ident(), home)
    if import_of_home in _begun and home not in sys.modules:
        # Code that interrupted the import before Python knew the module. A second import would run it twice.
        raise _used_during_import(name, home)
    _begun.add(import_of_home)
    try:
        module = importlib.import_module(home)
        value: Any = module if name in MODULES else getattr(module, name)
    except (ImportError, AttributeError) as error:
        half = _half_imported()
        raise (_used_during_import(name, half) if half else error) from error
    finally:
        _begun.discard(import_of_home)
    globals()[name] = value
    return value


def _half_imported() -> str | None:
    """The module of kernelhub whose import has begun last and not ended; None if there is none."""
    half = None
    for name, module in list(sys.modules.items()):
        if name.startswith("kernelhub.") and getattr(getattr(module, "__spec__", None), "_initializing", False):
            half = name
    return half


def _used_during_import(name: str, module: str) -> Exception:
    """The error of a name that is used while a module of kernelhub is being imported."""
    message = (
        f"kernelhub.{name} is used while {module} is still being imported: by a signal handler, a logging handler "
        "or a finaliser that interrupted the import; use it after the import, or use the name once before such code "
        "can run"
    )
    try:
        from kernelhub.errors import KernelhubError
    except ImportError:  # it is the very module that is being imported
        return ImportError(message)
    return KernelhubError(message)


def __dir__() -> list[str]:
    return sorted(__all__)
