"""The devices of this machine are the same whether torch reads them or not."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from kernelhub.probes import here
from kernelhub.probes.torch_build import TorchBuild

COMPARE = """
import sys
from kernelhub.probes import here
before = here.cpu(), here.gpus(), [here.memory_bytes(index) for index, _ in enumerate(here.gpus())]
assert "torch" not in sys.modules, "torch was needed"
import torch
assert before == (here.cpu(), here.gpus(), [here.memory_bytes(index) for index, _ in enumerate(here.gpus())])
assert len(before[1]) == torch.cuda.device_count()
"""


@pytest.mark.device
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch reads them: 1 case")
def test_devices_are_read_without_torch_as_torch_reads_them() -> None:
    answer = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


RELEASED = TorchBuild("2.13.0", cuda="13.0")


class Driver:
    """A libcuda of one H200 that answers each question, or one of them with a status."""

    def __init__(self, version: int = 13000, **statuses: int) -> None:
        self.version, self.statuses = version, statuses

    def __getattr__(self, function: str):
        def answer(number, *arguments) -> int:
            if function == "cuDriverGetVersion":
                number._obj.value = self.version
            elif function == "cuDeviceGetCount":
                number._obj.value = 1
            elif function == "cuDeviceGetName":
                number.value = b"NVIDIA H200"
            elif function == "cuDeviceGetAttribute":
                number._obj.value = {16: 132, 75: 9, 76: 0, 97: 232448}[arguments[0]]
            return self.statuses.get(function, 0)

        return answer


@pytest.fixture
def read(monkeypatch):
    """What is read of a driver, for a torch that is not imported."""

    def read(driver: Driver | None, build: TorchBuild = RELEASED):
        def load(name: str) -> Driver:
            if driver is None:
                raise OSError(name)
            return driver

        monkeypatch.setattr(ctypes, "CDLL", load)
        monkeypatch.setattr(here, "torch_build", lambda: build)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        return here._read_gpus.__wrapped__()

    return read


def test_the_driver_names_the_gpus(read) -> None:
    (device,) = read(Driver())
    assert (device.name, device.arch, device.num_sms, device.shared_memory_bytes) == (
        "NVIDIA H200",
        "sm_90",
        132,
        232448,
    )
    assert not device.simulated


@pytest.mark.parametrize("driver", [None, Driver(cuInit=100)], ids=["no driver", "no device"])
def test_without_a_driver_or_a_device_there_is_no_gpu(driver, read) -> None:
    assert read(driver) == ()


def test_a_torch_for_cpus_has_no_gpu(read) -> None:
    assert read(Driver(), TorchBuild("2.13.0+cpu")) == ()


@pytest.mark.parametrize(
    "driver",
    [Driver(cuInit=3), Driver(cuDeviceGetAttribute=1), Driver(cuDeviceGetName=1), Driver(version=12080)],
    ids=["not initialised", "no attribute", "no name", "a driver too old for torch"],
)
def test_what_the_driver_leaves_open_is_for_torch(driver, read) -> None:
    assert read(driver) is None


def test_rocm_is_for_torch(read) -> None:
    assert read(Driver(), TorchBuild("2.13.0", hip="7.0")) is None
