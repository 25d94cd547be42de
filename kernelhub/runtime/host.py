"""Reading values of a tensor on the host, which waits for the device and is refused once sealed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import KernelUnavailable


def refuse_in_graph(device: torch.device, why: str) -> None:
    """Refuse what a CUDA graph cannot hold while one is captured on the device's current stream.

    Raises:
        KernelUnavailable: with the reason and what to do.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise KernelUnavailable(
            f"{why}; for calls in graphs choose a kernel that can be captured, e.g. `backend='triton'` "
            "(`plan.graph` and `kernelhub backends` tell which)"
        )


def on_host(tensor: Tensor, parameter: str) -> list[Any]:
    """The values of a tensor, as `Tensor.tolist` gives them.

    Args:
        tensor: on any device.
        parameter: what it is to the op, for the message.

    Raises:
        NotWarmed: the tensor is on a device, and kernelhub is sealed.
        KernelUnavailable: a CUDA graph is being captured, in which nothing can be read on the host.
    """
    if GATE.refuse is not None and not tensor.is_cpu:
        JOURNAL.allow("sync", parameter, JOURNAL.caller())
    refuse_in_graph(tensor.device, f"this kernel reads {parameter} on the host, which a CUDA graph cannot hold")
    values: list[Any] = tensor.tolist()
    return values
