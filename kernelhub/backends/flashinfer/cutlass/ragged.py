"""From a call of `attention` to CUTLASS's prefill for Blackwell, as FlashInfer has it.

Tables assign a tile of a head and sequence to each of its blocks. The library allocates them with a fixed size and
fills them without a bounds check, so they are allocated here, as large as the step's tiles. It stores at an address
that is before the result by the rows of the longest sequence, so as many rows of ours precede the result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from flashinfer.prefill import fmha_varlen, get_fmha_module
from torch import Tensor

from kernelhub.backends.flashinfer.steps import split_scale, stream_of, write_lse
from kernelhub.backends.flashinfer.trtllm.packed import Packed, packed_dense
from kernelhub.backends.shared.operands import aligned, on_device_of
from kernelhub.ops.arguments import refuse
from kernelhub.ops.attention.adapter import AttentionAdapter, DenseStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import ONE, AttentionProblem
from kernelhub.ops.host import refuse_in_graph

_TILE = 256  # queries of a tile
_FEWEST_ROWS = 128  # before the result, however short the sequences are
_MOST_ELEMENTS = 1 << 31  # offset of results from their first address: an int holds it
_LIBRARY_BYTES = 32 << 20  # that the library takes once for each device, and does not use
_MOST_PLANS = 8  # of a step: the batched calls that share it, and the streams that they are on

Tables = tuple[Tensor, Tensor, Tensor, Tensor]


class Plan(NamedTuple):
    """A step, ready to run.

    Attributes:
        at: where the queries are.
        keys: which keys they need, as int64 on the device; None for all.
        tables: int32 on the device: where the tiles of each block begin, and the tile, head and sequence of each.
    """

    at: Packed
    keys: Tensor | None
    tables: Tables


class Ragged(AttentionAdapter[AttentionProblem, DenseStep]):
    """Packed sequences, or batches of sequences of one length."""

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        self._causal = problem.causal or (problem.q_len == ONE and not problem.ragged)
        if problem.device.type == "cuda":  # one token, to load or compile the module
            dtype, dims = self._q
            q = torch.zeros(1, *dims, dtype=dtype, device="cuda")
            k, v = (q.new_zeros(1, *dims) for _, dims in (self._k, self._v))
            ends = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
            self.compute(q, k, v, DenseStep(ends, ends, q_offsets=[0, 1], k_offsets=[0, 1]), Values(1.0))

    def begin(self, step: DenseStep) -> None:
        if step.cu_seqlens_q is not None and step.num_seqs:
            self._plan(step, (), step.cu_seqlens_q.device)

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: DenseStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if q.ndim == 3 and step.num_seqs == 0:  # tokens that belong to no sequence
            return
        made, base2 = self._attend(q, k, v, step, values, lse is not None)
        if q.ndim == 4:
            out.copy_(made.view(out.shape))
        else:
            out[: made.shape[0]].copy_(made)
        if lse is not None and base2 is not None:
            write_lse(base2, lse)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, step: DenseStep, values: Values) -> Tensor:
        """As `launch`; where all queries belong to sequences, the result is what the kernel wrote, not a copy of it."""
        shape = (*q.shape[:-1], self.problem.head_dim_vo)
        if q.ndim == 3 and step.num_seqs == 0:
            return q.new_empty(shape)
        made, _ = self._attend(q, k, v, step, values, False)
        if q.ndim == 4 or made.shape[0] == q.shape[0]:
            return made.view(shape)
        out = q.new_empty(shape)
        out[: made.shape[0]].copy_(made)
        return out

    def workspace_bytes(self, num_seqs: int, num_tokens: int, max_kv_len: int) -> int:
        """The result with the rows before it, tables of tiles, and what the library takes."""
        problem = self.problem
        rows = 2 * num_tokens + _FEWEST_ROWS
        tiles = (num_tokens // _TILE + num_seqs) * problem.num_q_heads
        itemsize: int = self._q[0].itemsize
        return rows * problem.num_q_heads * problem.head_dim_vo * itemsize + 12 * tiles + _LIBRARY_BYTES

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, step: DenseStep, values: Values, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The result of the queries that belong to sequences, [T, H, DV], and their LSE to base 2, [T, H]."""
        shape: tuple[int, ...] = ()
        if q.ndim == 4:
            shape = (q.shape[0], q.shape[1], k.shape[1])
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        at, keys, tables = self._plan(step, shape, q.device)
        if keys is not None:
            k, v = k[keys], v[keys]
        elif not shape and k.shape[0] != (last := step.k_offsets()[-1]):  # what follows may be NaN, and tiles reach it
            k, v = k[:last], v[:last]
        sm_scale, factor = split_scale(values.scale)
        q = q[: at.num_rows] if at.rows is None else q[at.rows]
        if factor != 1.0:
            q = q * factor
        heads, width = q.shape[1], self.problem.head_dim_vo
        before = max(at.most_q, _FEWEST_ROWS)
        made = q.new_empty((before + q.shape[0], heads, width))[before:]
        lse = q.new_empty((q.shape[0], heads), dtype=torch.float32) if wants_lse else None
        if q.shape[0]:
            with on_device_of(q):
                fmha_varlen(
                    aligned(q),
                    aligned(k),
                    aligned(v),
                    at.q_offsets,
                    at.kv_offsets,
                    plan_info=tables,
                    max_qo_len=at.most_q,
                    out=made,
                    lse=lse,
                    causal=self._causal,
                    sm_scale=sm_scale,
                )
        if at.rows is None:
            return made, lse
        whole = made.new_zeros((at.num_rows, heads, width)).index_copy_(0, at.rows, made)
        if lse is not None:
            lse = lse.new_full((at.num_rows, heads), -torch.inf).index_copy_(0, at.rows, lse)
        return whole, lse

    def _plan(self, step: DenseStep, shape: tuple[int, ...], device: torch.device) -> Plan:
        """The plan of a step, made once for a shape and a stream."""
        known: dict[tuple[int, ...], Plan] | None = step.state
        if known is None:
            known = step.state = {}
        key = (*shape, stream_of(device))
        if key not in known:
            refuse_in_graph(
                device, "CUTLASS's prefill plans for the lengths of a step, and replays of a graph do not plan"
            )
            if len(known) >= _MOST_PLANS:
                known.clear()
            known[key] = self._made(step, shape, device)
        return known[key]

    def _made(self, step: DenseStep, shape: tuple[int, ...], device: torch.device) -> Plan:
        problem, (dtype, _) = self.problem, self._q
        blocks = _blocks(device)
        at, keys = packed_dense(step, shape, self._causal, device)
        row = problem.num_q_heads * problem.head_dim_vo
        if at.most_q * row >= _MOST_ELEMENTS:
            most = (_MOST_ELEMENTS - 1) // row
            refuse(
                "attention",
                "q",
                f"has a sequence of {at.most_q} queries, whose results CUTLASS's prefill cannot address with 32 bits",
                f"give at most {most} queries of a sequence at once, or use another kernel, such as `backend='triton'`",
            )
        tiles = problem.num_q_heads * sum(-(-length // _TILE) for length in at.q_lens)
        # What comes before the library's plan on the stream is the copy of the offsets. It has to be a copy: the plan
        # is launched so that it may begin before a kernel has ended that lets it.
        first, *entries = (torch.empty(size, dtype=torch.int32, device=device) for size in (blocks + 1, *[tiles] * 3))
        if tiles:
            widths = (problem.head_dim_qk, problem.head_dim_vo)
            module = get_fmha_module(dtype, dtype, dtype, torch.int32, *widths, 0, False, False, device)
            offsets = (at.q_offsets, at.kv_offsets)
            module.plan(*offsets, first, *entries, _TILE, problem.num_q_heads, blocks, self._causal)
        return Plan(at, keys, (first, entries[0], entries[1], entries[2]))


def _blocks(device: torch.device) -> int:
    """Blocks of a launch: one per multiprocessor of the first device, which the library queries."""
    return torch.cuda.get_device_properties(0).multi_processor_count if device.type == "cuda" else 1
