"""cuDNN graphs of attention over packed sequences, or over pages, one for each class of shapes.

Building one takes some 40 ms, and up to 1.5 s where cuDNN has to compile (seen on an H200). Lengths and offsets
are read on the device, so a graph is built for upper bounds of sizes, rounded up to powers of two.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import cudnn
import torch
from torch import Tensor

from kernelhub.backends.cudnn.requirements import INSTALL, LOWEST_BACKEND
from kernelhub.dispatch.work import JOURNAL
from kernelhub.ops.attention.problem import AttentionProblem
from kernelhub.runtime.scratch import scratch

_MOST_GRAPHS = 256


class Pool(NamedTuple):
    """A paged cache.

    Attributes:
        pages: how many it has.
        page_size: tokens of each, a power of two.
        columns: pages of a sequence, at most: as many as hold the most keys of a graph.
        k: (page, head, token) strides of k; likewise v.
    """

    pages: int
    page_size: int
    columns: int
    k: tuple[int, int, int]
    v: tuple[int, int, int]


class Shape(NamedTuple):
    """The properties of a call that a graph depends on, in addition to the problem.

    Attributes:
        sequences: how many, at most.
        q_tokens: of a sequence, at most.
        k_tokens: of a sequence, at most; no fewer than of q.
        q: (token, head) strides of q; likewise k, v, where they are packed.
        wide: offsets do not fit 32 bits.
        scale: factor of q k^T.
        left: keys before its own that a query sees, or -1.
        right: keys after its own that a query sees, or -1.
        pool: where k and v are, if they are paged.
    """

    sequences: int
    q_tokens: int
    k_tokens: int
    q: tuple[int, int]
    k: tuple[int, int]
    v: tuple[int, int]
    wide: bool
    scale: float
    left: int
    right: int
    pool: Pool | None = None


class Uid:
    """Names of a graph's tensors."""

    Q, K, V, Q_LENS, K_LENS, Q_AT, K_AT, V_AT, OUT, OUT_AT, LSE, LSE_AT, K_TABLE, V_TABLE = range(1, 15)


class Unsupported(RuntimeError):
    """cuDNN or its frontend cannot run this here."""


class Graphs(threading.local):
    """The graphs of one problem; each thread has its own, since a cuDNN handle belongs to one thread."""

    def __init__(self, problem: AttentionProblem) -> None:
        if cudnn.backend_version() < LOWEST_BACKEND:
            raise Unsupported(f"cuDNN is {cudnn.backend_version()}, {LOWEST_BACKEND} is needed; {INSTALL}")
        self._problem = problem
        self._handles: dict[int, Any] = {}
        self._graphs: dict[tuple[int, Shape], tuple[Any, int]] = {}

    def run(self, shape: Shape, tensors: dict[int, Tensor]) -> None:
        """Run the graph of a shape, building it if there is none yet, on the current stream of the operands' device."""
        q = tensors[Uid.Q]
        device = q.get_device()
        if device not in self._handles:
            self._handles[device] = cudnn.create_handle()
        handle = self._handles[device]
        made = self._graphs.get((device, shape))
        if made is None:
            with JOURNAL.doing("compile", f"a graph for {shape}", "cudnn"):
                if len(self._graphs) >= _MOST_GRAPHS:
                    self._graphs.clear()
                made = self._graphs[device, shape] = self.build(shape, handle)
        graph, workspace_bytes = made
        if q.is_cuda:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        workspace = scratch("cudnn", (max(1, workspace_bytes),), torch.uint8, q.device)
        graph.execute(tensors, workspace, handle=handle)

    def build(self, shape: Shape, handle: Any) -> tuple[Any, int]:
        """The graph of a shape, and the bytes of its workspace."""
        problem, types = self._problem, cudnn.data_type
        dtype = {"bfloat16": types.BFLOAT16, "float16": types.HALF}[problem.q_dtype]
        graph = cudnn.pygraph(
            io_data_type=dtype, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle
        )
        offset_type = types.INT64 if shape.wide else types.INT32

        def small(name: str, uid: int, length: int, kind: Any) -> Any:
            return graph.tensor(name=name, dim=(length, 1, 1, 1), stride=(1, 1, 1, 1), data_type=kind, uid=uid)

        def packed(name: str, uid: int, heads: int, tokens: int, width: int, strides: tuple[int, int], at: int) -> Any:
            dim, stride = _packed(shape.sequences, heads, tokens, width, strides)
            tensor = graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype, uid=uid)
            return tensor.set_ragged_offset(small(f"{name}_at", at, shape.sequences + 1, offset_type))

        def paged(name: str, uid: int, width: int, strides: tuple[int, int, int], pool: Pool) -> Any:
            dim = (pool.pages, kv_heads, pool.page_size, width)
            return graph.tensor(name=name, dim=dim, stride=(*strides, 1), data_type=dtype, uid=uid)

        def table(name: str, uid: int, pool: Pool) -> Any:
            dim, stride = (shape.sequences, 1, pool.columns, 1), (pool.columns, pool.columns, 1, 1)
            return graph.tensor(name=name, dim=dim, stride=stride, data_type=types.INT32, uid=uid)

        qk, vo, heads, kv_heads = problem.head_dim_qk, problem.head_dim_vo, problem.num_q_heads, problem.num_kv_heads
        band: dict[str, Any] = {}
        if shape.left >= 0:
            band["diagonal_band_left_bound"] = shape.left + 1  # it counts the query's own position
        if shape.right >= 0:
            band["diagonal_band_right_bound"] = shape.right
        if band:
            band["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
        pages: dict[str, Any] = {}
        if (pool := shape.pool) is None:
            k = packed("k", Uid.K, kv_heads, shape.k_tokens, qk, shape.k, Uid.K_AT)
            v = packed("v", Uid.V, kv_heads, shape.k_tokens, vo, shape.v, Uid.V_AT)
        else:
            k, v = paged("k", Uid.K, qk, pool.k, pool), paged("v", Uid.V, vo, pool.v, pool)
            pages["paged_attention_k_table"] = table("k_table", Uid.K_TABLE, pool)
            pages["paged_attention_v_table"] = table("v_table", Uid.V_TABLE, pool)
            pages["paged_attention_max_seq_len_kv"] = shape.k_tokens
        out, lse = graph.sdpa(
            name="sdpa",
            q=packed("q", Uid.Q, heads, shape.q_tokens, qk, shape.q, Uid.Q_AT),
            k=k,
            v=v,
            attn_scale=shape.scale,
            generate_stats=problem.lse,
            use_padding_mask=True,
            seq_len_q=small("q_lens", Uid.Q_LENS, shape.sequences, types.INT32),
            seq_len_kv=small("k_lens", Uid.K_LENS, shape.sequences, types.INT32),
            **band,
            **pages,
        )
        results = [(out, Uid.OUT, vo, dtype, Uid.OUT_AT)]
        results += [(lse, Uid.LSE, 1, types.FLOAT, Uid.LSE_AT)] if problem.lse else []
        for tensor, uid, width, kind, at in results:
            dim, stride = _packed(shape.sequences, heads, shape.q_tokens, width, (heads * width, width))
            tensor.set_output(True).set_data_type(kind).set_dim(dim).set_stride(stride).set_uid(uid)
            tensor.set_ragged_offset(small(f"at_{uid}", at, shape.sequences + 1, offset_type))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        if getattr(graph, "selected_engine", None) is not None:
            raise Unsupported("the frontend would run its own engine, not cuDNN")
        return graph, graph.get_workspace_size()


def _packed(
    sequences: int, heads: int, tokens: int, width: int, strides: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions and strides of packed sequences, as if each began a bound of tokens after the one before."""
    return (sequences, heads, tokens, width), (tokens * strides[0], strides[1], strides[0], 1)
