"""A FlashMLA in torch, in the generations that there are: strict about what it takes, as the library is.

`write` makes the folder of such a package. Its functions compute right answers in the library's conventions, and refuse
operands that the compiled functions refuse, so that the adapters' conversions are proven by numbers.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

GENERATIONS = ("stateful", "legacy", "tensors")

_MATH = '''
"""Fake FlashMLA."""
import dataclasses
import torch

CALLED = []


def rows_of(tensor):
    *steps, entry = tensor.stride()
    assert entry == 1, tensor.stride()
    assert tensor.data_ptr() % 16 == 0
    assert all(step * tensor.element_size() % 16 == 0 for step in steps), tensor.stride()


def dense(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal):
    rows_of(q)
    rows_of(k_cache)
    assert q.dtype in (torch.bfloat16, torch.float16) and k_cache.dtype is q.dtype
    assert k_cache.shape[1:] == (64, 1, 576) and q.shape[3] == 576 and head_dim_v == 512
    assert block_table.dtype is cache_seqlens.dtype is torch.int32
    assert block_table.stride(1) == 1 and block_table.shape[1] > 0 and cache_seqlens.is_contiguous()
    assert softmax_scale > 0, "it takes the largest product before it scales"
    batch, tokens, heads, _ = q.shape
    out = torch.zeros(batch, tokens, heads, 512, dtype=q.dtype)
    lse = torch.full((batch, heads, tokens), torch.inf)
    for i, length in enumerate(cache_seqlens.tolist()):
        pages = block_table[i, : -(-length // 64)].long()
        keys = k_cache[pages].flatten(0, 2)[:length].float()
        for t in range(tokens):
            seen = length - (tokens - 1 - t) if causal else length
            if seen > 0:
                scores = q[i, t].float() @ keys[:seen].T * softmax_scale
                out[i, t] = (scores.softmax(1) @ keys[:seen, :512]).to(q.dtype)
                lse[i, :, t] = scores.logsumexp(1)
    return out, lse


def sparse(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
    rows_of(q)
    rows_of(kv)
    assert q.dtype is kv.dtype is torch.bfloat16 and indices.dtype is torch.int32
    assert q.ndim == kv.ndim == indices.ndim == 3
    assert q.shape[1] in (64, 128) and q.shape[2] == kv.shape[2] == 576 and kv.shape[1] == 1 and d_v == 512
    assert indices.shape[2] % 128 == 0 and indices.stride(2) == 1 and indices.data_ptr() % 16 == 0
    assert topk_length.shape == q.shape[:1] and topk_length.dtype is torch.int32 and attn_sink is None
    assert sm_scale > 0, "it takes the largest product before it scales"
    out = torch.zeros(*q.shape[:2], 512, dtype=q.dtype)
    lse = torch.full(q.shape[:2], torch.inf)
    for t in range(q.shape[0]):
        listed = indices[t, 0, : int(topk_length[t])].long()
        listed = listed[(listed >= 0) & (listed < kv.shape[0])]
        if len(listed):
            keys = kv[listed, 0].float()
            scores = q[t].float() @ keys.T * sm_scale
            out[t], lse[t] = (scores.softmax(1) @ keys[:, :512]).to(q.dtype), scores.logsumexp(1)
    return out, lse, lse
'''

_SCHEDULE = """
@dataclasses.dataclass
class FlashMLASchedMeta:
    filled_for: tuple = None


def get_mla_metadata(*args, **kwargs):
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None{more}
):
    assert isinstance(tile_scheduler_metadata, FlashMLASchedMeta) and num_splits is None
    assert is_fp8_kvcache is False and indices is None
    {check}
    held = (q.shape, causal, tuple(cache_seqlens.tolist()))
    CALLED.append("first" if tile_scheduler_metadata.filled_for is None else "again")
    assert tile_scheduler_metadata.filled_for in (None, held), "a schedule of other lengths"
    tile_scheduler_metadata.filled_for = held
    return dense(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)
"""

_SPARSE = """
def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None{more}):
    {check}
    return sparse(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)
"""

_TENSORS = """
def get_mla_metadata(cache_seqlens, {rows}, num_heads_k):
    assert num_heads_k == 1
    return torch.tensor([{rows}]), cache_seqlens.clone()


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None,
    causal=False,
):
    assert tile_scheduler_metadata.item() == q.shape[1] * q.shape[2]
    assert torch.equal(num_splits, cache_seqlens), "a schedule of other lengths"
    return dense(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512):
    raise AssertionError("its LSE has base 2")
"""


def source(generation: str) -> str:
    """`flash_mla_interface.py` of a generation."""
    if generation == "stateful":
        return _MATH + _SCHEDULE.format(more="", check="") + _SPARSE.format(more="", check="")
    if generation == "legacy":
        more, check = ", enable_batch_invariant=False, use_legacy=False", "assert use_legacy"
        return _MATH + _SCHEDULE.format(more=more, check=check) + _SPARSE.format(more=", use_legacy=False", check=check)
    if generation == "dropped":
        schedule = _SCHEDULE.format(more=", enable_batch_invariant=False", check="")
        return _MATH + schedule + _SPARSE.format(more="", check="")
    rows = {"tensors": "num_heads_per_head_k", "tensors 2025-09": "num_q_tokens_per_head_k"}[generation]
    return _MATH + _TENSORS.format(rows=rows)


def write(root: Path, generation: str, *, init: str = "") -> Path:
    """Make the package in a folder, which belongs on `sys.path`."""
    package = root / "flash_mla"
    package.mkdir(parents=True)
    legacy = "def has_legacy():\n    return True\n" if generation == "legacy" else ""
    (package / "__init__.py").write_text(init or textwrap.dedent(legacy))
    (package / "flash_mla_interface.py").write_text(source(generation))
    return root
