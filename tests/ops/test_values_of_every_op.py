"""Lengths, offsets, pages and slots that lie outside are named, by every op that takes any.

In CPU memory always. On a GPU, where a look waits for the device, with KERNELHUB_CHECK=1: so a caller whose wrong entry
ends the process in a kernel finds it by running once more with that setting.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.evidence.poison import copied
from kernelhub.ops import functions
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.indexer.inputs import paged_logits_inputs
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.models.shapes import AttentionModel, IndexerModel, LinearModel, MlaModel
from tests.conftest import DEVICE
from tests.fuzz.drawn import DRAWN

pytestmark = pytest.mark.device
MODEL, LATENT = AttentionModel("small", 4, 2, 32, 32), MlaModel("small", 3, 16, 8)
PAGES = {"seq_lens": (40, 9), "page_size": 16, "device": DEVICE}
LARGEST = 0x7FFFFFFF


def dense() -> dict[str, Any]:
    return attention_inputs(MODEL, q_lens=(5, 3), kv_lens=(5, 3), device=DEVICE)


def paged(**changes: Any) -> dict[str, Any]:
    return paged_attention_inputs(MODEL, **PAGES, **changes)


def latent(**changes: Any) -> dict[str, Any]:
    return mla_attention_inputs(LATENT, **PAGES, **changes, dtype=torch.float32)


def logits() -> dict[str, Any]:
    return paged_logits_inputs(IndexerModel("small", 3, 32, 8), **PAGES, dtype=torch.float32)


def states() -> dict[str, Any]:
    sizes = {"lengths": (3, 6), "slots": (3, 0), "num_slots": 5}
    return linear_inputs(LinearModel("small", 3, 16, 16), **sizes, dtype=torch.float32, device=DEVICE)


def rows(**changes: Any) -> dict[str, Any]:
    return grouped_gemm_inputs(sizes=(5, 2), n=32, k=32, **changes, device=DEVICE)


def slots() -> dict[str, Any]:
    return write_mla_cache_inputs(tokens=5, latent_dim=16, rope_dim=8, page_size=4, device=DEVICE)


def kv_slots() -> dict[str, Any]:
    return write_kv_cache_inputs(tokens=5, num_kv_heads=2, head_dim_qk=16, page_size=4, device=DEVICE)


# (op, its arguments, the parameter, the place, the value there, words of the refusal)
PAGE = ("block_table", (0, 1))
WRONG = [
    ("attention", dense, "cu_seqlens_q", 2, LARGEST, "ends at 2147483647"),
    ("attention", dense, "cu_seqlens_k", 1, -3, "falls from 0 to -3"),
    ("paged_attention", paged, *PAGE, LARGEST, "names page 2147483647"),
    ("paged_attention", paged, *PAGE, -1, "names page -1"),
    ("paged_attention", paged, "seq_lens", 1, 49, "is 49 for sequence 1"),
    ("paged_attention", paged, "seq_lens", 1, -1, "is -1 for sequence 1"),
    ("paged_attention", lambda: paged(q_lens=(3, 2)), "cu_seqlens_q", 2, 99, "ends at 99"),
    ("mla_attention", latent, *PAGE, 99, "names page 99"),
    ("mla_attention", lambda: latent(topk=7), *PAGE, -2, "names page -2"),
    ("mla_attention", latent, "seq_lens", 0, 49, "is 49 for sequence 0"),
    ("mla_attention", lambda: latent(q_lens=(3, 2)), "cu_seqlens_q", 1, 9, "falls from 9 to 5"),
    ("paged_mqa_logits", logits, *PAGE, 99, "names page 99"),
    ("paged_mqa_logits", logits, "seq_lens", 1, 49, "is 49 for sequence 1"),
    ("linear_attention", states, "cu_seqlens", 2, 10, "ends at 10"),
    ("linear_attention", states, "state_indices", 1, 5, "state has 5 slots"),
    ("write_kv_cache", kv_slots, "slot_mapping", 2, 1 << 40, "is 1099511627776 for token 2"),
    ("write_mla_cache", slots, "slot_mapping", 2, 1 << 40, "is 1099511627776 for token 2"),
    ("grouped_gemm", rows, "offsets", 1, 99, "is 99 at 1"),
    ("grouped_gemm", lambda: rows(masked=True), "group_sizes", 0, -1, "is -1 at 0"),
]
# Ops whose contract gives every value a meaning: what lies outside stands for none. Contract tests hold kernels to it.
ANYTHING = {"fused_moe": "topk_ids", "mqa_logits": "cu_seqlen_ks", "topk_indices": "row_ends"}
ANYTHING |= dict.fromkeys(("moe_dispatch", "expert_parallel_moe"), "topk_ids")
# Layers of an engine step: what a step's run takes beside its metadata.
STEPS = {"attention": ("q", "k", "v"), "paged_attention": ("q", "k_cache", "v_cache")}
STEPS["mla_attention"] = ("q", "kv_cache", "topk_indices")
IDS = [f"{op} {parameter} {value}" for op, _, parameter, _, value, _ in WRONG]


def call(op: str, arguments: dict[str, Any]) -> None:
    getattr(kernelhub, op)(**copied(arguments))


def changed(tensor: Tensor, place: Any, value: int) -> Tensor:
    other = tensor.clone()
    other[place] = value
    return other


@pytest.fixture(params=["always"] if DEVICE == "cuda" else ["always", "as it is"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "always":
        monkeypatch.setenv("KERNELHUB_CHECK", "1")
        kernelhub.reload()


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(("op", "inputs", "parameter", "place", "value", "words"), WRONG, ids=IDS)
def test_a_call_names_what_is_outside(op: str, inputs: Any, parameter: str, place: Any, value: int, words: str) -> None:
    """When its form is new, and after a right call."""
    right = inputs()
    wrong = right | {parameter: changed(right[parameter], place, value)}
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=words) as caught:
            call(op, wrong)
        assert caught.value.parameter == parameter
        call(op, right)


@pytest.mark.parametrize(
    ("op", "inputs", "parameter", "place", "value", "words"), [one for one in WRONG if one[0] in STEPS]
)
def test_a_step_names_what_was_written_to_its_metadata_since(
    op: str, inputs: Any, parameter: str, place: Any, value: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine fills the same tensors anew for each replay of a graph; KERNELHUB_CHECK=1 looks at each run."""
    monkeypatch.setenv("KERNELHUB_CHECK", "1")
    kernelhub.reload()
    given = inputs()
    operands = [given[name] for name in STEPS[op] if name in given]
    names = ("block_table", "seq_lens", "cu_seqlens_q", "cu_seqlens_k")
    metadata = {name: given[name] for name in names if given.get(name) is not None}
    step = getattr(kernelhub, op).prepare(**given).begin(**metadata)
    step.run(*operands)
    metadata[parameter][place] = value
    with pytest.raises(InvalidArgument, match=words) as caught:
        step.run(*operands)
    assert caught.value.parameter == parameter


def test_every_op_with_metadata_is_here() -> None:
    """An op that takes integers names those that lie outside, or says that they stand for none."""
    named = {op for op, *_ in WRONG} | set(ANYTHING)
    for function in functions():
        name = function.__name__
        if name in DRAWN:
            example = DRAWN[name](random.Random(1), torch.device("cpu")).values()
        else:
            module, made = function.op.contract.example.split(":")
            example = getattr(importlib.import_module(module), made)().values()
        if any(isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) for value in example):
            assert name in named
