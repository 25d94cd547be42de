"""Operators with the schemas of vLLM's builds of FlashAttention: their checks, their conventions, right numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kernelhub
from kernelhub.backends.flash_attn import kernels as records
from kernelhub.backends.shared import operators
from kernelhub.dispatch.constraint import Compiled, OnDevice, Package, anything
from kernelhub.dispatch.kernel import Backend, Band
from tests.backends.cutlass_fakes import register
from tests.backends.flash_attn_numbers import (
    FEWEST_KEYS,
    FEWEST_ROWS,
    check_bounds,
    check_lse_ends,
    check_operands,
    limits_of_fa2,
    run,
)
from tests.dispatch.backends import EVERYWHERE

# As the libraries in the wheel of vLLM 0.33.0 declare them.
FA3 = (
    "(Tensor!  q,    Tensor   k,    Tensor   v,    Tensor?  k_new,    Tensor?  v_new,    Tensor?  q_v,    "
    "Tensor!? out,    Tensor?  cu_seqlens_q,    Tensor?  cu_seqlens_k,    Tensor?  cu_seqlens_k_new,    "
    "Tensor?  seqused_q,    Tensor?  seqused_k,    int?     max_seqlen_q,    int?     max_seqlen_k,    "
    "Tensor?  page_table,    Tensor?  kv_batch_idx,    Tensor?  leftpad_k,    Tensor?  rotary_cos,    "
    "Tensor?  rotary_sin,    Tensor?  seqlens_rotary,    Tensor?  q_descale,    Tensor?  k_descale,    "
    "Tensor?  v_descale,    float    softmax_scale,    bool     is_causal,    int      window_size_left,    "
    "int      window_size_right,    float    softcap,    bool     is_rotary_interleaved,    "
    "Tensor?  scheduler_metadata,    int      num_splits,    bool?    pack_gqa,    int      sm_margin,    "
    "Tensor?  s_aux,    int      cp_world_size,    int      cp_rank,    Tensor?  cp_tot_seqused_k) -> Tensor[]"
)
FA2_VARLEN = (
    "(Tensor! q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, int max_seqlen_q, int max_seqlen_k, "
    "float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool return_softmax, int num_splits, Tensor? gen) -> Tensor[]"
)
_WIDTHS = (64, 96, 128, 192, 256)


def _table(table: Any, seqused_k: Any) -> list[int]:
    for tensor in (table, seqused_k):
        assert str(tensor.dtype) == "torch.int32"
        assert tensor.stride(-1) == 1
    return seqused_k.tolist()


def fa3(
    q, k, v, k_new, v_new, q_v, out, cu_q, cu_k, cu_k_new, seqused_q, seqused_k, max_q, max_k, table, kv_batch_idx,
    leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, scale, causal, left, right,
    softcap, rotary_interleaved, metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank, cp_used,
):  # fmt: skip
    """Writes into `out`; ragged only; unused rows of large pages are read for many queries."""
    assert cu_q is not None or seqused_k is not None, "This flash attention build only supports varlen"
    check_operands(q, k, v, out)
    qk, vo = q.shape[-1], v.shape[-1]
    assert (qk == vo and qk in _WIDTHS) or (qk, vo) == (192, 128)
    for unused in (k_new, v_new, q_v, cu_k_new, seqused_q, kv_batch_idx, rotary_cos, rotary_sin, seqlens_rotary):
        assert unused is None
    for unused in (q_descale, k_descale, v_descale, metadata, pack_gqa, s_aux, cp_used):
        assert unused is None
    assert (num_splits, sm_margin, cp_world_size, cp_rank) == (0, 0, 1, 0)
    check_bounds(cu_q, max_q, cu_k, max_k)
    assert out.shape == (*q.shape[:-1], vo)
    reads_tail, lengths = False, None
    if table is not None:
        assert cu_k is None
        lengths = _table(table, seqused_k)
        assert leftpad_k is None or not leftpad_k.any()
        rows = (max_q if cu_q is not None else q.shape[1]) * q.shape[-2] // k.shape[-2]
        whole_tiles = any(k.shape[1] % keys == 0 for keys in FEWEST_KEYS)
        reads_tail = leftpad_k is None and whole_tiles and rows > FEWEST_ROWS
    else:
        assert cu_k is not None
    window = (left, right)
    lse = run(q, k, v, scale, causal, window, softcap, None, -math.inf, out, cu_q, cu_k, lengths, table, reads_tail)
    return [out, lse, q.new_empty(0), q.new_empty(0)]


def _fa2(q, k, v, out, table):
    check_operands(q, k, v, out)
    assert k.shape[-1] == v.shape[-1] == q.shape[-1]
    assert q.shape[-1] in _WIDTHS
    assert out.is_contiguous(), "written through a view, of which there may be none"
    assert out.shape == q.shape
    assert table is None or k.shape[1] % 16 == 0, "Paged KV cache block size must be divisible by 16"


def fa2_varlen(
    q, k, v, out, cu_q, cu_k, seqused_k, leftpad_k, table, alibi, max_q, max_k, dropout, scale, zero, causal, left,
    right, softcap, return_softmax, num_splits, gen,
):  # fmt: skip
    """Writes into `out`; an LSE of +inf where no key is seen, and of no use where heads are taken for queries."""
    _fa2(q, k, v, out, table)
    assert leftpad_k is alibi is gen is None
    assert (dropout, zero, return_softmax, num_splits) == (0.0, False, False, 1)
    check_bounds(cu_q, max_q, None, None)
    assert cu_k.shape == cu_q.shape
    assert type(max_k) is int
    if max_q == 1:
        assert q.shape[0] == cu_q.shape[0] - 1, "heads are taken for queries: one query in each sequence"
    lengths = None
    if table is not None:
        lengths, cu_k = _table(table, seqused_k), None
        check_lse_ends(q, cu_q, max_q, lengths)
    else:
        check_bounds(None, None, cu_k, max_k)
    window = limits_of_fa2(causal, (left, right), max_k)
    lse = run(q, k, v, scale, False, window, softcap, None, math.inf, out, cu_q, cu_k, lengths, table, False)
    misplaced = max_q == 1 or (lengths is not None and 0 in lengths)
    return [out, lse.flip(0) if misplaced else lse]


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Backend `fake`: the records of vLLM's builds without what they ask of the machine; and their operators."""
    made = [
        dataclasses.replace(
            kernel,
            name=kernel.name.replace("flash_attn.vllm_", "fake."),
            band=Band.PLUGIN,
            standings=EVERYWHERE,
            constraints=(
                anything("device"),
                *(item for item in kernel.constraints if not isinstance(item, (OnDevice, Package, Compiled))),
            ),
        )
        for kernel in records.KERNELS
        if "vllm" in kernel.name
    ]
    module = SimpleNamespace(__name__="fake", BACKEND=Backend("fake", "FlashAttention in plain torch"), KERNELS=made)
    libraries = [
        register("_vllm_fa3_C", {"fwd": FA3}, fwd=fa3),
        register("_vllm_fa2_C", {"varlen_fwd": FA2_VARLEN}, varlen_fwd=fa2_varlen),
    ]
    handle = kernelhub.register_backend(module)
    try:
        yield
    finally:
        handle.remove()
        for library in libraries:
            library._destroy()
        operators._files.clear()
