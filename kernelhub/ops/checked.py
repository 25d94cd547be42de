"""Operands that a call has checked in full just before it bound a kernel, so that the bound function need not again."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any


class Checked(threading.local):
    """Those of one op, in this thread."""

    _operands: tuple[Any, ...] = ()

    def run(self, operands: tuple[Any, ...], run: Callable[..., Any], *arguments: Any) -> Any:
        """Run the bound function with operands that were checked."""
        self._operands = operands
        try:
            return run(*arguments)
        finally:
            self._operands = ()

    def holds(self, operands: tuple[Any, ...]) -> bool:
        """Whether these very operands were checked."""
        known = self._operands
        return len(known) == len(operands) and all(map(operator.is_, known, operands))
