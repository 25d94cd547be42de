"""FX2: devices that nobody knows, siblings of known ones, and words for devices that are no numbers."""

from __future__ import annotations

import os

import pytest

import kernelhub
from kernelhub.dispatch.constraint import OnDevice
from kernelhub.dispatch.machine import SimulatedMachine
from tests.faults.record import NOTHING
from tests.faults.records import FAULTS
from tests.faults.scene import KERNEL, acme, code_is, run

TRITON = SimulatedMachine({"triton": "3.7.1", "torch": "2.13.0"})


@pytest.mark.parametrize(
    ("key", "device"),
    [
        pytest.param("unknown_arch", "sm_137", marks=pytest.mark.fault("unknown_arch")),
        pytest.param("sibling_arch", "sm_121", marks=pytest.mark.fault("sibling_arch")),
        pytest.param("other_vendor", "MI300X", marks=pytest.mark.fault("other_vendor")),
    ],
)
def test_a_kernel_for_one_device_is_not_taken_on_another(key, device) -> None:
    acme("fakelib:Ones", OnDevice("nvidia", only=((12, 0),)))
    assert kernelhub.explain("attention", device="sm_120", machine=TRITON).selected == KERNEL
    selection = kernelhub.explain("attention", device=device, machine=TRITON)
    code_is(FAULTS[key], next(item for item in selection.decisions if item.kernel == KERNEL))
    assert selection.selected is not None, "something portable runs there"


CALL = """
import torch, kernelhub
q = torch.randn(1, 4, 2, 16)
assert torch.allclose(kernelhub.attention(q, q, q), kernelhub.attention.reference(q, q, q), atol=1e-5)
print(kernelhub.attention.explain(q, q, q).selected)
"""


@pytest.mark.fault("odd_visible_devices")
def test_words_for_visible_devices_are_never_read_as_numbers() -> None:
    """All in one process each time a child: what CUDA makes of them is CUDA's; a call on the CPU answers."""
    words = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-GPU-8932f937/1/0", "", "-1", "0,0", "9")
    code = CALL + (
        "import os\n"
        f"for word in {words!r}:\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = word\n"
        "    kernelhub.reload()\n"
        "    assert kernelhub.attention(q, q, q).shape == q.shape\n"
        "    assert kernelhub.explain('attention', device='H200').selected\n"
    )
    told = run(code, os.environ | {"CUDA_VISIBLE_DEVICES": words[0]})
    assert told.startswith(("torch.", "triton.", "cpp."))
    assert FAULTS["odd_visible_devices"].code == NOTHING
