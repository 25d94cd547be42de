"""Read a tensor's values on the host. That waits for the device, so a sealed process refuses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import KernelUnavailable


def refuse_in_graph(device: torch.device, why: str) -> None:
    """Raise if the device's current stream is capturing a CUDA graph.

    Raises:
        KernelUnavailable: `why`, and what to do.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelUnavailable(
            f"{why}; choose a capture-safe kernel for calls in CUDA graphs (`plan.graph` and `kernelhub backends` say "
            "which kernels are)"
        )


def on_host(tensor: Tensor, parameter: str) -> list[Any]:
    """The values of a tensor, as `Tensor.tolist` returns them.

    Args:
        tensor: on any device.
        parameter: its name in the op's signature, for the message.

    Raises:
        NotWarmed: the tensor is on a GPU, and kernelhub is sealed.
        KernelUnavailable: a CUDA graph is being captured, in which nothing can be read on the host.
    """
    if GATE.refuse is not None and not tensor.is_cpu:
        JOURNAL.allow("sync", parameter, JOURNAL.caller())
    refuse_in_graph(tensor.device, f"this kernel reads {parameter} on the host, which a CUDA graph cannot hold")
    values: list[Any] = tensor.tolist()
    return values
