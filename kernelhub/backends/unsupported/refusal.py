"""The target of all records, which only `unsafe=True` reaches."""

from __future__ import annotations

from typing import Any, NoReturn

from kernelhub.errors import KernelUnavailable


def refuse(problem: Any) -> NoReturn:
    """There is no adapter.

    Raises:
        KernelUnavailable: always.
    """
    raise KernelUnavailable("kernelhub does not call this library; `kernelhub explain` gives the reason")
