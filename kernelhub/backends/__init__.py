"""The backends: one folder each.

In each, `kernels.py` has the records, which are data and light to import. A large backend has a folder for each
family of ops, whose `__init__.py` holds the family's records. Adapters are beside the records and are imported once a
kernel is selected. `order/` ranks kernels by device and phase, `shared/` is what adapters of several backends use.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

_NO_BACKENDS = {"order", "shared"}


def builtin() -> list[ModuleType]:
    """The module of records of each built-in backend, sorted by name."""
    folders = {item.name for item in pkgutil.iter_modules(__path__) if item.ispkg} - _NO_BACKENDS
    return [importlib.import_module(f"{__name__}.{name}.kernels") for name in sorted(folders)]
