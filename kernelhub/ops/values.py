"""Values of metadata that the checks of an op look at: lengths, offsets, pages, slots, ids.

Values in CPU memory are always looked at. Values in a device's memory are looked at with ``KERNELHUB_CHECK=1`` only,
since that waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.shapes import STANDING_IN


def checks_devices() -> bool:
    """Whether KERNELHUB_CHECK asks to look at values in a device's memory.

    An op that keeps what it checked from one call to the next asks this in `bind`, and then keeps nothing: another
    value can be in the same tensor.
    """
    return bool(HUB.settings["KERNELHUB_CHECK"])


def values_to_check(tensor: Tensor) -> Tensor | None:
    """The tensor in CPU memory, for a check of its values; None where they are not to be looked at.

    A tensor on a device is copied if KERNELHUB_CHECK is set, but not while a CUDA graph is captured.
    """
    if tensor.is_cpu:
        return None if STANDING_IN and id(tensor) in STANDING_IN else tensor
    if not checks_devices() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return tensor.cpu()
