"""A device error is final: remembered with what ran, raised by every later call there, never tried elsewhere."""

from __future__ import annotations

import json
import time
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import is_final
from kernelhub.dispatch.op import Op, Request
from kernelhub.errors import DeviceLost, InvalidArgument
from kernelhub.ops import functions
from kernelhub.ops.attention.adapter import AttentionAdapter
from tests.dispatch.backends import Twos, qkv, record, register

ACCELERATOR_ERROR = getattr(torch, "AcceleratorError", RuntimeError)  # torch 2.8 and later
_HINT = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
FINAL = {
    "torch, illegal access": ACCELERATOR_ERROR(f"CUDA error: an illegal memory access was encountered{_HINT}"),
    "torch before 2.8": RuntimeError(f"CUDA error: an illegal memory access was encountered{_HINT}"),
    "torch, launch failure": ACCELERATOR_ERROR(f"CUDA error: unspecified launch failure{_HINT}"),
    "torch, ECC": ACCELERATOR_ERROR(f"CUDA error: uncorrectable ECC error encountered{_HINT}"),
    "torch, misaligned": ACCELERATOR_ERROR(f"CUDA error: misaligned address{_HINT}"),
    "torch, assert": ACCELERATOR_ERROR(f"CUDA error: device-side assert triggered{_HINT}"),
    "triton": RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    "driver": RuntimeError("CUDA driver error: CUDA_ERROR_ILLEGAL_ADDRESS"),
    "HIP": RuntimeError("HIP error: an illegal memory access was encountered"),
    "library": RuntimeError("Error in function 'Run': cudaErrorIllegalAddress"),
}
NOT_FINAL = {
    "out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free"),
    "out of memory of the driver": RuntimeError("CUDA error: out of memory"),
    "Triton's": RuntimeError("Triton Error [CUDA]: out of memory"),
    "invalid configuration": ACCELERATOR_ERROR("CUDA error: invalid configuration argument"),
    "capture": ACCELERATOR_ERROR("CUDA error: operation not permitted when stream is capturing"),
    "no image": ACCELERATOR_ERROR("CUDA error: no kernel image is available for execution on the device"),
    "shapes": RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    "library's assertion": ValueError("head_dim must be 64"),
    "an argument": ValueError("CUDA error: an illegal instruction is no mode"),
    "an assembler": RuntimeError("line 3: illegal instruction 'vfoo'"),
    "not implemented": NotImplementedError("CUDA error: misaligned address is not handled"),
    "ours": InvalidArgument("attention", "q", "is an illegal memory access", "joke"),
}


class Fails(AttentionAdapter[Any, Any]):
    """Raises at its next launch, once; later launches would be fine."""

    error: Exception | None = None
    launches = 0

    def launch(self, q: Tensor, k: Tensor, v: Tensor, step: Any, values: Any, out: Tensor, lse: Any) -> None:
        Fails.launches += 1
        error, Fails.error = Fails.error, None
        if error is not None:
            raise error
        out.fill_(3.0)


class FailsInBegin(Fails):
    """Raises where it plans a step."""

    def begin(self, step: Any) -> None:
        error, Fails.error = Fails.error, None
        if error is not None:
            raise error


PAGED = (
    torch.zeros(2, 4, 16),
    *torch.zeros(2, 4, 16, 2, 16),
    torch.zeros(2, 4, dtype=torch.int32),
    torch.full((2,), 9, dtype=torch.int32),
)


@pytest.fixture
def failing(monkeypatch):
    """A kernel that fails when told, and another that would do for both ops."""
    Fails.error, Fails.launches = None, 0
    monkeypatch.setattr("kernelhub.dispatch.lost._can_be_lost", lambda device: True)  # the CPU stands for a GPU here
    home = "tests.runtime.test_lost"
    register(
        "bad",
        record("bad.k", f"{home}:Fails"),
        record("bad.k", f"{home}:Fails", op="paged_attention"),
        record("bad.begin", f"{home}:FailsInBegin", op="paged_attention"),
    )
    register("spare", record("spare.k", "Twos"))
    yield
    Fails.error = None


class TestClasses:
    @pytest.mark.parametrize("error", FINAL.values(), ids=FINAL)
    def test_of_a_device(self, error: Exception) -> None:
        assert is_final(error)

    @pytest.mark.parametrize("error", NOT_FINAL.values(), ids=NOT_FINAL)
    def test_others(self, error: Exception) -> None:
        assert not is_final(error)


class TestLost:
    @pytest.mark.parametrize("error", FINAL.values(), ids=FINAL)
    @pytest.mark.fault("device_error")
    def test_the_first_is_raised_as_it_is_and_then_every_call_says_so(self, error: Exception, failing) -> None:
        kernelhub.attention(*qkv(), backend="bad")
        Fails.error = error
        with pytest.raises(type(error)) as first:
            kernelhub.attention(*qkv(), backend="bad")
        assert first.value is error
        launches, spare = Fails.launches, Twos.launches
        for call in (
            lambda: kernelhub.attention(*qkv(), backend="bad"),
            lambda: kernelhub.attention(*qkv(), backend="spare"),
            lambda: kernelhub.attention(*qkv()),
            lambda: kernelhub.attention(*qkv(), causal=True),
            lambda: kernelhub.paged_attention(*PAGED),
            lambda: kernelhub.attention.prepare(*qkv()),
        ):
            with pytest.raises(DeviceLost) as lost:
                call()
            assert (lost.value.device, lost.value.op, lost.value.kernel) == (-1, "attention", "bad.k")
            assert str(error).splitlines()[0] in str(lost.value)
            assert "KERNELHUB_CHECK=1" in str(lost.value), "how a wrong page or length is found"
        assert (Fails.launches, Twos.launches) == (launches, spare), "something was launched on a lost device"

    @pytest.mark.parametrize("error", NOT_FINAL.values(), ids=NOT_FINAL)
    @pytest.mark.fault("launch_refused")
    def test_another_error_ends_its_call_only(self, error: Exception, failing) -> None:
        Fails.error = error
        with pytest.raises(type(error)):
            kernelhub.attention(*qkv(), backend="bad")
        assert kernelhub.health().ok
        assert float(kernelhub.attention(*qkv(), backend="bad").mean()) == 3.0

    def test_it_is_never_tried_on_another_kernel(self, failing) -> None:
        spare = Twos.launches
        Fails.error = FINAL["triton"]
        with pytest.raises(RuntimeError, match="Triton Error"):
            kernelhub.attention(*qkv(), backend=("bad", "spare"))
        assert Twos.launches == spare
        assert kernelhub.report().fallbacks == ()

    def test_plans_and_steps_that_are_held_say_so(self, failing) -> None:
        plan = kernelhub.paged_attention.prepare(*PAGED, backend="bad.k")
        held, step = plan.run, plan.begin(*PAGED[3:])
        Fails.error = FINAL["torch, illegal access"]
        with pytest.raises(ACCELERATOR_ERROR):
            step.run(*PAGED[:3])
        for call in (lambda: plan.run(*PAGED), lambda: plan.begin(*PAGED[3:])):
            with pytest.raises(DeviceLost, match=r"paged_attention by bad\.k raised"):
                call()
        for call in (lambda: held(*PAGED), lambda: step.run(*PAGED[:3])):
            Fails.error = FINAL["torch, illegal access"]  # a lost device fails every launch
            with pytest.raises(DeviceLost, match=r"paged_attention by bad\.k raised"):
                call()

    def test_an_error_while_a_step_is_planned_counts(self, failing) -> None:
        plan = kernelhub.paged_attention.prepare(*PAGED, backend="bad.begin")
        Fails.error = FINAL["torch, ECC"]
        with pytest.raises(ACCELERATOR_ERROR, match="ECC"):
            plan.begin(*PAGED[3:])
        with pytest.raises(DeviceLost, match="ECC"):
            plan.begin(*PAGED[3:])

    def test_under_torch_compile_too(self, failing) -> None:
        compiled = torch.compile(lambda q, k, v: kernelhub.attention(q, k, v, backend="bad"), backend="eager")
        compiled(*qkv())
        Fails.error = FINAL["torch, launch failure"]
        with pytest.raises(RuntimeError):
            compiled(*qkv())
        with pytest.raises(DeviceLost):
            compiled(*qkv())

    def test_the_last_plans_are_reported_newest_first(self, failing) -> None:
        kernelhub.attention(*qkv(), backend="spare")
        for _ in range(3):
            kernelhub.attention(*qkv(), backend="torch.blocked")
        Fails.error = FINAL["driver"]
        with pytest.raises(RuntimeError):
            kernelhub.attention(*qkv(), backend="bad")
        plans = kernelhub.health().last_plans
        assert plans == ("attention bad.k, 1 calls", "attention torch.blocked, 3 calls", "attention spare.k, 1 calls")

    @pytest.mark.parametrize("function", functions(), ids=lambda function: str(function.__name__))
    def test_the_tables_of_every_op_drop_what_runs_there(self, function: Any) -> None:
        op: Op[Any] = function.op
        for device in (0, 1):
            run: Any = object()
            op._bound[Request(None, (), "key", device)] = Bound(None, None, run, None, device)  # type: ignore[arg-type]
            op.table[device] = op._overrides["torch", (), device] = run
        HUB.forget_device(0)
        assert (list(op.table), list(op._overrides)) == ([1], [("torch", (), 1)])
        HUB.forget_selections()


class TestHealth:
    def test_all_is_well(self) -> None:
        kernelhub.attention(*qkv())
        told = json.loads(kernelhub.health().to_json())
        assert (told["ok"], told["reason"], told["device"], told["sealed"]) == (True, "", None, False)

    def test_a_lost_device_is_reported(self, failing) -> None:
        before = time.time()
        Fails.error = FINAL["torch, illegal access"]
        with pytest.raises(RuntimeError):
            kernelhub.attention(*qkv(), backend="bad")
        health = kernelhub.health()
        assert (health.ok, health.device, health.op, health.kernel) == (False, -1, "attention", "bad.k")
        assert health.lost_devices == (-1,)
        assert before <= (health.since or 0) <= time.time()
        assert "illegal memory access" in health.reason
        assert "start another" in health.reason
        assert json.loads(health.to_json())["last_plans"] == ["attention bad.k, 1 calls"]

    def test_the_first_error_stays(self, failing) -> None:
        kernelhub.attention(*qkv(), backend="bad")
        Fails.error = FINAL["torch, ECC"]
        with pytest.raises(RuntimeError):
            kernelhub.attention(*qkv(), backend="bad")
        for _ in range(3):
            with pytest.raises(DeviceLost, match="ECC"):
                kernelhub.attention(*qkv())
        assert "ECC" in kernelhub.health().reason


class TestNames:
    """A traceback names the kernel that raised, and whose it is."""

    @pytest.fixture
    def plain(self):
        Fails.error = None
        register("bad", record("bad.k", "tests.runtime.test_lost:Fails"))
        yield
        Fails.error = None

    @pytest.mark.parametrize("error", [ValueError("CUDA error: an illegal instruction"), *FINAL.values()], ids=repr)
    def test_a_cpu_is_never_lost(self, error: Exception, plain) -> None:
        Fails.error = error
        with pytest.raises(type(error)):
            kernelhub.attention(*qkv(), backend="bad")
        assert kernelhub.health().ok
        assert float(kernelhub.attention(*qkv(), backend="bad").mean()) == 3.0

    def test_an_error_of_a_launch_names_kernel_and_origin(self, plain) -> None:
        Fails.error = ValueError("head_dim must be 64")
        with pytest.raises(ValueError, match="head_dim must be 64") as raised:
            kernelhub.attention(*qkv(), backend="bad")
        assert str(raised.value) == "head_dim must be 64"
        told = "".join(traceback.format_exception(raised.value))
        assert "raised by kernel bad.k of attention" in told
        assert "a third-party kernel of" in told

    def test_an_error_without_a_text_is_raised_as_it_is(self, plain) -> None:
        class Mute(RuntimeError):
            def __str__(self) -> str:
                raise ValueError("no text")

        Fails.error = Mute()
        with pytest.raises(Mute):
            kernelhub.attention(*qkv(), backend="bad")
