"""Sealing a process that is ready to serve: from then on a call either runs at once or says what was missing."""

from __future__ import annotations

from types import TracebackType

from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.runtime.lines import not_warmed


class Sealed:
    """What `seal` returns: as a context manager it unseals at the end of the block."""

    def __enter__(self) -> Sealed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unseal()


def seal() -> Sealed:
    """From now on nothing that a call does may decide, compile, load, download, tune, pack or wait for the device.

    A call that would raises `kernelhub.errors.NotWarmed`, before anything is launched, under CUDA-graph capture too,
    with the line to run before sealing. Calls that are ready cost what they cost before. No choice falls to another
    kernel, and `configure`, `reload`, `register_backend`, `verify` and `agree`, which would have every choice made
    again, raise `ConfigurationError`. A call that another thread began before is finished. Code that is not kernelhub's
    may go on compiling; `kernelhub.report().after_seal` lists it.

    Returns:
        A context manager that unseals at the end of a block; sealing does not wait for the block.

    Example:
        >>> import torch, kernelhub
        >>> q = torch.randn(1, 64, 8, 64)
        >>> _ = kernelhub.attention(q, q, q, causal=True)  # the warm-up
        >>> with kernelhub.seal():
        ...     _ = kernelhub.attention(q, q, q, causal=True)
        ...     try:
        ...         kernelhub.attention(q, torch.randn(1, 9, 8, 64), torch.randn(1, 9, 8, 64), softcap=30.0)
        ...     except kernelhub.errors.NotWarmed as error:
        ...         print(error.line.split(", v=")[0])
        kernelhub.warm('attention', q='float32[1, 64, 8, 64]', k='float32[1, 9, 8, 64]'
    """
    HUB.watch()
    with HUB.lock:
        GATE.close(not_warmed)
    return Sealed()


def unseal() -> None:
    """Allow all work again, for instance to run the lines of `NotWarmed` and seal once more."""
    GATE.open()
