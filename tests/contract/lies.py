"""Which kernels of a module are wrong in one way each."""

from __future__ import annotations


def lies_of(base: type, module: str) -> list[type]:
    """The subclasses that a module defines; other modules of a test run may define some, too."""
    return [lie for lie in base.__subclasses__() if lie.__module__ == module]
