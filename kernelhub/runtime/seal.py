"""Sealing a process that is ready to serve: afterwards a call runs immediately or raises with what is missing."""

from __future__ import annotations

from types import TracebackType

from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.runtime.lines import not_warmed


class Sealed:
    """The result of `seal`: a context manager that unseals at the end of its block."""

    def __enter__(self) -> Sealed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        unseal()


def seal() -> Sealed:
    """Forbid calls to decide, compile, load, download, tune, pack or wait for the device.

    A call that would do so raises `kernelhub.errors.NotWarmed` before anything is launched, also under CUDA-graph
    capture, with the line to run before sealing. Calls that are ready cost the same as before. No selection uses a
    fallback. `configure`, `reload`, `register_backend`, `verify` and `agree`, which would repeat every selection, raise
    `ConfigurationError`. A call that another thread began before runs to its end. Third-party code may still compile;
    `kernelhub.report().after_seal` lists it.

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
    """Allow all work again, for instance to run the lines of `NotWarmed` and then seal again."""
    GATE.open()
