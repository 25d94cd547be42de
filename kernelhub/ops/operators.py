"""The operators of torch.library behind the ops: what torch.compile, torch.export and fake tensors see of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelhub.dispatch.op import Backend

_LIBRARY = torch.library.Library("kernelhub", "FRAGMENT")


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    """Define an operator of the namespace ``kernelhub``.

    Args:
        schema: as of `torch.library.Library.define`, e.g. ``"double(Tensor x) -> Tensor"``.
        run: what it does, on any device.
        fake: gives results of the right shape and dtype for tensors without memory; None if it returns nothing.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernelhub::{name}", fake or _nothing, lib=_LIBRARY)


def names_of(backend: Backend) -> list[str] | None:
    """``backend=`` as an operator takes it."""
    return None if backend is None else [backend] if isinstance(backend, str) else list(backend)


def _nothing(*arguments: Any) -> None:
    return None
