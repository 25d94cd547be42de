"""KERNELHUB_CHECK=1 checks values in a device's memory like those in CPU memory."""

from __future__ import annotations

import torch

import kernelhub
from kernelhub.ops.values import checks_devices, values_to_check


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and can be copied from there."""

    is_cpu = False


def test_values_in_cpu_memory_are_always_looked_at() -> None:
    lengths = torch.tensor([1, 2])
    assert values_to_check(lengths) is lengths


def test_values_on_a_device_are_looked_at_when_the_setting_says_so(monkeypatch) -> None:
    lengths = torch.tensor([1, 2]).as_subclass(OnDevice)
    assert not checks_devices()
    assert values_to_check(lengths) is None
    monkeypatch.setenv("KERNELHUB_CHECK", "1")
    kernelhub.reload()
    assert checks_devices()
    copy = values_to_check(lengths)
    assert copy is not None
    assert copy.tolist() == [1, 2]
