"""Reading values of a tensor on the host, which waits for the device and is refused once sealed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.work import JOURNAL


def on_host(tensor: Tensor, parameter: str) -> list[Any]:
    """The values of a tensor, as `Tensor.tolist` gives them.

    Args:
        tensor: on any device.
        parameter: what it is to the op, for the message.

    Raises:
        NotWarmed: the tensor is on a device, and kernelhub is sealed.
    """
    if GATE.refuse is not None and not tensor.is_cpu:
        JOURNAL.allow("sync", parameter, JOURNAL.caller())
    values: list[Any] = tensor.tolist()
    return values
