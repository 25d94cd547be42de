"""What only a GPU can show of linear attention: tensor cores' numbers at real sizes, graphs, syncs, large pools."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.backends.triton.linear_attention.linear import chunk_kernel, recurrent_kernel
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.linear_attention.tolerance import result_error_allowed, state_error_allowed
from tests.gpu.test_attention_on_gpu import captured

pytestmark = pytest.mark.gpu

MODEL = "ring-mini-linear-2.0"


def agree(got: Any, arguments: dict[str, Any], rounds: bool = True) -> None:
    """A result and new states against the recurrence in float64."""
    reference = kernelhub.linear_attention.reference
    want, want_state = reference(**arguments, return_state=True, dtype=torch.float64)
    sized = {name: value.abs() if name in ("q", "k", "v", "state") else value for name, value in arguments.items()}
    size, size_state = reference(**sized, return_state=True, dtype=torch.float64)
    q = arguments["q"]
    about = (q.dtype, q.shape[-3], q.shape[-1])
    out, state = got
    error = (out.double() - want).abs()
    assert (error <= result_error_allowed(want, size, *about, rounds_operands=rounds)).all(), float(error.max())
    error = (state.double() - want_state).abs()
    assert (error <= state_error_allowed(size_state, *about, rounds_operands=rounds)).all(), float(error.max())


class TestNumbers:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("kernel", ["triton.chunked", "triton.recurrent", "torch.chunked"])
    def test_prefill_at_real_sizes(self, kernel, dtype) -> None:
        for changes in ({"batch": 1, "tokens": 1500, "state": True}, {"lengths": (700, 1, 0, 64, 65), "state": True}):
            arguments = linear_inputs(MODEL, dtype=dtype, device="cuda", **changes)
            got = kernelhub.linear_attention(**arguments, return_state=True, backend=kernel)
            agree(got, arguments, rounds=kernel == "triton.chunked")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("moved", ["q", "k", "v", "qkv"])
    def test_operands_that_come_element_by_element(self, moved, dtype) -> None:
        """Tokens lie next to each other: no load of theirs is an asynchronous copy."""
        arguments = linear_inputs(MODEL, batch=1, tokens=300, state=True, dtype=dtype, device="cuda")
        for name in moved:
            arguments[name] = arguments[name].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        got = kernelhub.linear_attention(**arguments, return_state=True, backend="triton.chunked")
        agree(got, arguments)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_decode_at_real_sizes(self, dtype) -> None:
        slots = (7, -1, 0, 3, 15)
        arguments = linear_inputs("minimax-text-01", batch=5, tokens=1, slots=slots, dtype=dtype, device="cuda")
        got = kernelhub.linear_attention(**arguments, return_state=True, backend="triton.recurrent")
        agree(got, arguments, rounds=False)

    def test_half_precision_states_beyond_its_range(self) -> None:
        arguments = linear_inputs(MODEL, batch=1, tokens=200, state=True, dtype=torch.float16, device="cuda")
        arguments["state"] *= 3e5
        arguments["q"] *= 2.0**-8
        agree(kernelhub.linear_attention(**arguments, return_state=True, backend="triton.chunked"), arguments)

    def test_a_pool_beyond_two_to_the_31_elements(self) -> None:
        slots = 2100
        pool = torch.zeros(slots, 64, 128, 128, device="cuda")
        assert pool.numel() > 1 << 31
        arguments = linear_inputs("minimax-text-01", batch=2, tokens=1, slots=(0, 1), num_slots=2, device="cuda")
        pool[slots - 1], pool[3] = arguments["state"][0], arguments["state"][1]
        want, want_states = kernelhub.linear_attention(**arguments, return_state=True)
        far = arguments | {
            "state": pool,
            "state_indices": torch.tensor([slots - 1, 3], dtype=torch.int32, device="cuda"),
        }
        for tokens_kernel in ("triton.recurrent", "triton.chunked"):
            before = pool[[slots - 1, 3]].clone()
            got, _ = kernelhub.linear_attention(**far, out_state=pool, backend=tokens_kernel)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-1)
            torch.testing.assert_close(pool[[slots - 1, 3]], want_states, rtol=1e-2, atol=1e-2)
            assert not pool[[0, 1, slots - 2]].any()
            pool[[slots - 1, 3]] = before


class TestServing:
    def test_the_gpu_is_served_by_the_kernel_of_the_phase(self) -> None:
        decode = linear_inputs(MODEL, batch=3, tokens=1, device="cuda")
        prefill = linear_inputs(MODEL, lengths=(30, 4), device="cuda")
        assert kernelhub.linear_attention.explain(**decode).selected == "triton.recurrent"
        assert kernelhub.linear_attention.explain(**prefill).selected == "triton.chunked"

    def test_a_captured_decode_goes_on_at_every_replay(self) -> None:
        arguments = linear_inputs(MODEL, batch=3, tokens=1, slots=(4, 0, 2), device="cuda")
        out = torch.empty_like(arguments["v"])
        graph = captured(lambda: kernelhub.linear_attention(**arguments, out=out, out_state=arguments["state"]))
        for slots in ((4, 0, 2), (1, -1, 3)):
            for name in "qkv":
                arguments[name].normal_()
            arguments["state"].normal_()
            arguments["state_indices"].copy_(torch.tensor(slots))
            begun = arguments | {"state": arguments["state"].clone()}
            graph.replay()
            kept = [index for index, slot in enumerate(slots) if slot >= 0]
            at = [slots[index] for index in kept]
            _, states = kernelhub.linear_attention(**begun, return_state=True)
            agree((out, states), begun, rounds=False)
            assert torch.equal(arguments["state"][at], states[kept])

    def test_a_captured_ragged_prefill_reads_the_offsets_of_each_replay(self) -> None:
        arguments = linear_inputs(MODEL, lengths=(70, 30, 28), state=True, device="cuda")
        out = torch.empty_like(arguments["v"])
        states = torch.empty_like(arguments["state"])
        graph = captured(lambda: kernelhub.linear_attention(**arguments, out=out, out_state=states))
        arguments["cu_seqlens"].copy_(torch.tensor([0, 1, 100, 128]))
        graph.replay()
        agree((out, states), arguments)

    def test_no_call_waits_for_the_gpu_and_none_compiles_for_other_sizes(self) -> None:
        compiled = set()
        for size in (64, 2, 3, 700):
            calls = [
                linear_inputs(MODEL, batch=min(size, 9), tokens=1, slots=tuple(range(min(size, 9))), device="cuda"),
                linear_inputs(MODEL, lengths=(size, 5, size + 1), state=True, device="cuda"),
                linear_inputs(MODEL, batch=2, tokens=size, device="cuda"),
            ]
            for arguments in calls:
                kernelhub.linear_attention(**arguments, return_state=True)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    kernelhub.linear_attention(**arguments, return_state=True)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            kernels = (chunk_kernel, recurrent_kernel)
            device = torch.cuda.current_device()
            compiled.add(tuple(len(kernel.device_caches[device][0]) for kernel in kernels))
        assert len(compiled) == 1
