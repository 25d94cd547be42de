"""FlashAttention-3, called as the torch operator that its library registers.

Its Python functions are not used: each call goes through an autograd function and a custom operator, which
cost more than a decode launch, and none of them takes a destination.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor

from kernelhub.backends.flash_attn.operands import NO_LIMIT, Ends, FlashAdapter, keep_tail
from kernelhub.backends.shared.operands import is_aligned
from kernelhub.ops.attention.adapter import DenseStep, PagedStep, ProblemT, StepT
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import ONE, AttentionProblem, PagedAttentionProblem

_LIBRARY = "flash_attn_3._C"

# The operator's parameters in their order. What follows them in some builds has defaults.
PARAMETERS = (
    "q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
    "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left",
    "window_size_right", "attention_chunk", "softcap", "is_rotary_interleaved", "scheduler_metadata", "num_splits",
    "pack_gqa", "sm_margin",
)  # fmt: skip

# Keys per tile of the library's kernels. A page of whole tiles is loaded by the tensor memory accelerator where there
# are more query rows than a tile has, of which it has 64 at least.
_KEY_TILES = (64, 80, 96, 112, 128, 144, 160, 176, 192)
_FEWEST_TILE_ROWS, _MOST_TILE_ROWS = 64, 192
_MOST_SPLITS, _WAVES, _CACHE_BYTES = 128, 4, 50 << 20


def operator() -> Any:
    """The library's forward operator.

    Raises:
        RuntimeError: another library has registered the name, or the parameters are not those we pass.
    """
    if _LIBRARY not in sys.modules:
        if hasattr(torch.ops.flash_attn_3, "fwd"):
            raise RuntimeError(
                "another library has registered torch.ops.flash_attn_3 in this process, and a second would terminate it"
            )
        importlib.import_module(_LIBRARY)
    forward = torch.ops.flash_attn_3.fwd.default
    arguments = forward._schema.arguments
    names = tuple(argument.name for argument in arguments)
    if names[: len(PARAMETERS)] != PARAMETERS:
        raise RuntimeError(f"torch.ops.flash_attn_3.fwd takes ({', '.join(names)}), not what this adapter passes")
    extra = [argument.name for argument in arguments[len(PARAMETERS) :] if not argument.has_default_value()]
    if extra:
        raise RuntimeError(f"torch.ops.flash_attn_3.fwd also requires {', '.join(extra)}")
    return forward


class FlashAttention3(FlashAdapter[ProblemT, StepT]):
    """Shared by the kernels of both ops.

    Attributes:
        chunk: what is passed for `attention_chunk`, which some builds' operators lack.
        last: what is passed behind `sm_margin`.
    """

    loads_tiles = True
    chunk: tuple[Any, ...] = (0,)
    last: tuple[Any, ...] = ()

    def __init__(self, problem: ProblemT) -> None:
        super().__init__(problem)
        self._forward = self.operator()

    def operator(self) -> Any:
        """The operator that is called."""
        return operator()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, ends: Ends, values: Values, out: Tensor, wants_lse: bool
    ) -> Tensor | None:
        causal = values.window_right == 0
        target = out if is_aligned(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
        _, lse, *_ = self._forward(
            q, k, v, None, None, None, target,
            ends.cu_seqlens_q, ends.cu_seqlens_k, None, None, ends.seqused_k, ends.max_seqlen_q, ends.max_seqlen_k,
            ends.page_table, None, self.left_padding(ends), None, None, None, None, None, None,
            values.scale, causal,
            min(values.window_left, NO_LIMIT), -1 if causal else min(values.window_right, NO_LIMIT),
            *self.chunk, values.softcap, True, None, 0, None, 0, *self.last,
        )  # fmt: skip
        if target is not out:
            keep_tail(out, target, ends)
        made: Tensor = lse
        return made

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """Parts of results in float32, where keys are split.

        The library splits while the tiles of one sequence leave a fifth of the multiprocessors idle, into as few parts
        as keep them nearly as busy as they get; that is within a few waves. Where every query sees all keys it also
        splits heads whose keys and values do not fit the cache, for which it counts 50 MiB.
        """
        problem = self.problem
        sms = problem.device.num_sms
        rows = -(-num_tokens // max(1, num_seqs)) * problem.group_size
        tiles = problem.num_kv_heads * -(-rows // _MOST_TILE_ROWS)
        parts = min(_MOST_SPLITS, sms, -(-max_kv_len // _KEY_TILES[0]), _WAVES * sms // max(1, tiles) + 1)
        if tiles >= 0.8 * sms:
            masked = problem.causal or problem.window_left or problem.window_right
            head_bytes = 2 * max_kv_len * (problem.head_dim_qk + problem.head_dim_vo)
            parts = 1 if masked else min(_MOST_SPLITS, -(-head_bytes // _CACHE_BYTES))
        row_bytes = problem.num_q_heads * 4
        return num_tokens * row_bytes * (1 + (parts * (problem.head_dim_vo + 1) if parts > 1 else 0))

    def left_padding(self, ends: Ends) -> Tensor | None:
        """Tokens of each sequence's pages to leave out."""
        return None


class Dense(FlashAttention3[AttentionProblem, DenseStep]):
    """`attention`, batched or ragged."""


class Paged(FlashAttention3[PagedAttentionProblem, PagedStep]):
    """`paged_attention`, decode, prefill and mixed.

    Loaded by the tensor memory accelerator, a last page's unused rows come along, and a NaN in them spoils the result
    (Dao-AILab/flash-attention#1974, #2374). The library's other way of loading fills in zeros, and is taken where there
    is a left padding, be it of zero tokens.
    """

    def __init__(self, problem: PagedAttentionProblem) -> None:
        super().__init__(problem)
        whole_tiles = any(problem.page_size % keys == 0 for keys in _KEY_TILES)
        few_rows = problem.q_len == ONE and problem.group_size <= _FEWEST_TILE_ROWS
        self._pads = whole_tiles and not few_rows

    def left_padding(self, ends: Ends) -> Tensor | None:
        return torch.zeros_like(ends.seqused_k) if self._pads and ends.seqused_k is not None else None
