"""The ops: one folder per family. See docs/design.md for the files of an op."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernelhub.homes import OPS

if TYPE_CHECKING:
    from kernelhub.dispatch.op import OpFunction


def functions() -> tuple[OpFunction[Any, Any, Any], ...]:
    """The public function of every op."""
    return tuple(getattr(importlib.import_module(home), name) for name, home in OPS.items())
