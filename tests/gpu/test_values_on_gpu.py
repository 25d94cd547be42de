"""What only a GPU can show of lengths, offsets, pages and slots: what every kernel of this machine makes of them.

Each kernel that can run a call here is asked for, those of libraries too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.indexer.inputs import paged_logits_inputs
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.models.shapes import AttentionModel, LinearModel

pytestmark = pytest.mark.gpu
MODEL, SMALL = AttentionModel("grouped", 8, 2, 128, 128), LinearModel("small", 4, 64, 64)
LENGTHS = {"seq_lens": (300, 65), "device": "cuda"}


def paged(**changes: Any) -> dict[str, Any]:
    made = paged_attention_inputs(MODEL, **LENGTHS, **changes)
    # Some kernels multiply what lies in unused rows by zero, and are refused for it; not what this is about.
    return made | {name: made[name].nan_to_num() for name in ("k_cache", "v_cache")}


# op, its arguments, and of its metadata the parameter, the place and the value of a wrong entry
CALLS: dict[str, tuple[str, Any, str, Any, int]] = {
    "decode": ("paged_attention", paged, "block_table", (0, 1), 0x7FFFFFFF),
    "mixed": ("paged_attention", lambda: paged(q_lens=(40, 1)), "seq_lens", 0, 1 << 20),
    "packed": (
        "attention",
        lambda: attention_inputs(MODEL, q_lens=(40, 9), kv_lens=(40, 9), device="cuda") | {"causal": True},
        "cu_seqlens_k",
        2,
        1 << 20,
    ),
    "latent": ("mla_attention", lambda: mla_attention_inputs(num_heads=128, **LENGTHS), "block_table", (0, 1), -1),
    "latent, listed": (
        "mla_attention",
        lambda: mla_attention_inputs(num_heads=128, topk=128, **LENGTHS),
        "seq_lens",
        1,
        1 << 20,
    ),
    "indexer": ("paged_mqa_logits", lambda: paged_logits_inputs(**LENGTHS, fused=True), "block_table", (0, 1), 1 << 20),
    "groups": ("grouped_gemm", lambda: grouped_gemm_inputs(device="cuda"), "offsets", 1, 1 << 20),
    "states": (
        "linear_attention",
        lambda: linear_inputs(
            LinearModel("small", 4, 64, 64), lengths=(3, 6), slots=(3, 0), num_slots=5, device="cuda"
        ),
        "state_indices",
        1,
        1 << 20,
    ),
    "slots": ("write_mla_cache", lambda: write_mla_cache_inputs(tokens=5, device="cuda"), "slot_mapping", 1, 1 << 40),
}


def kernels(op: str, arguments: dict[str, Any]) -> Iterator[str]:
    """Those that can run the call on this machine."""
    for decision in getattr(kernelhub, op).explain(**arguments).decisions:
        if decision.accepted:
            yield decision.kernel


def run(op: str, arguments: dict[str, Any], kernel: str) -> Tensor:
    if op == "write_mla_cache":
        arguments = arguments | {"kv_cache": arguments["kv_cache"].clone()}
    made = getattr(kernelhub, op)(**arguments, backend=kernel)
    torch.cuda.synchronize()
    result: Tensor = made[0] if isinstance(made, tuple) else made
    if op == "grouped_gemm":  # what lies behind the last group is not written
        result = result[: int(arguments["offsets"][-1])]
    return result.float()


def one_on(tensor: Tensor) -> Tensor:
    """The same values, one element past an aligned address."""
    memory = tensor.new_zeros(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_entry_is_named_before_any_kernel_reads_it(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With KERNELHUB_CHECK=1; the device is there for the next call."""
    monkeypatch.setenv("KERNELHUB_CHECK", "1")
    kernelhub.reload()
    op, inputs, parameter, place, value = CALLS[call]
    right = inputs()
    wrong = right | {parameter: right[parameter].clone()}
    wrong[parameter][place] = value
    for kernel in kernels(op, right):
        with pytest.raises(InvalidArgument) as caught:
            run(op, wrong, kernel)
        assert caught.value.parameter == parameter, kernel
        run(op, right, kernel)


@pytest.mark.parametrize("call", CALLS)
def test_metadata_may_begin_anywhere(call: str) -> None:
    """At 4 bytes past an aligned address, as a slice of an engine's own tensor does."""
    op, inputs, *_ = CALLS[call]
    given = inputs()
    indices = {
        name: one_on(value)
        for name, value in given.items()
        if isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)
    }
    assert indices
    assert all(index.data_ptr() % 16 for index in indices.values())
    for kernel in kernels(op, given):
        want = run(op, given, kernel)
        got = run(op, given | indices, kernel)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, msg=lambda text, kernel=kernel: f"{kernel}: {text}")
