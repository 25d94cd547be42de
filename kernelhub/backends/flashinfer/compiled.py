"""Functions that FlashInfer makes when it loads a module: no source to be held against, so looked at once loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def taking(function: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The function, if its parameters are those.

    Raises:
        ImportError: they are others, so that another kernel is taken, with this as the reason.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise ImportError(f"FlashInfer's {function.__name__} takes ({', '.join(found)}), not ({', '.join(names)})")
    return function
