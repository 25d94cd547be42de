"""Libraries that kernelhub does not call: `explain` gives the reason, and nothing is selected in their place."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.backends.unsupported.kernels import KERNELS, LIBRARIES, NO_ADAPTER
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import KernelhubError, NoKernel
from kernelhub.ops.comm.inputs import all_reduce_inputs

EVERYTHING = SimulatedMachine({"deep_ep": "1.2.1", "flashinfer": "0.7.2", "triton": "3.6.0"}, verified=("*",))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: f"{kernel.op}-{kernel.name}")
def test_explain_gives_the_reason_and_what_to_do(kernel) -> None:
    item = next(item for item in LIBRARIES if kernel.name == f"unsupported.{item.name}")
    for device, link in (("H200", "nvlink"), ("MI300X", "none"), ("CPU", "none")):
        asked = {"device": device, "machine": EVERYTHING, "world_size": 4, "link": link}
        if kernel.op == "expert_parallel_moe":  # its steps are connected, not it
            del asked["link"]
        told = kernelhub.explain(kernel.op, **asked, backend=kernel.name)
        assert told.selected is None
        (decision,) = (decision for decision in told.decisions if decision.kernel == kernel.name)
        (rejection,) = (found for found in decision.rejections if found.code == NO_ADAPTER)
        assert item.library in rejection.reason
        assert item.reason in rejection.reason
        assert rejection.remedy == item.remedy


def test_remedies_name_kernels_that_exist() -> None:
    known = {
        name
        for op in ("all_reduce", "moe_dispatch", "expert_parallel_moe")
        for name in getattr(kernelhub, op).kernels()
    }
    for item in LIBRARIES:
        words = {word.strip(",;:") for word in item.remedy.split()}
        named = {word for word in words if word.startswith(("triton.", "torch.", "flashinfer.", "moe_pairs."))}
        assert named <= known
        assert named or "torch's kernels" in item.remedy


def test_a_request_fails_with_the_reason_even_past_the_limits() -> None:
    given = all_reduce_inputs(tokens=2, hidden_size=8, device=torch.device("cpu"))
    with pytest.raises(NoKernel, match="NVLink multicast"):
        kernelhub.all_reduce(**given, backend="unsupported.torch_multimem")
    forced = kernelhub.use(all_reduce="unsupported.torch_multimem", unsafe=True)
    with forced, pytest.raises(KernelhubError, match="does not call this library"):
        kernelhub.all_reduce(**given)
