"""From a call of `paged_attention` to cuDNN. Lengths and pages are read on the device: nothing waits for them.

One query also uses the graph of many queries: graphs for one query leave most of an LSE unwritten.
"""

from __future__ import annotations

from torch import Tensor

from kernelhub.backends.cudnn.graphs import Graphs, Pool, Shape, Uid
from kernelhub.backends.cudnn.queries import FEWEST_TOKENS, Queries
from kernelhub.backends.shared.operands import on_device_of, pages_by_head
from kernelhub.ops.attention.adapter import AttentionAdapter, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import PagedAttentionProblem
from kernelhub.ops.attention.tables import bound, filled_lengths, filled_table, offsets_of_queries


class SdpaPaged(AttentionAdapter[PagedAttentionProblem, PagedStep]):
    """`paged_attention` by cuDNN, for caches without NaN after the end of a sequence."""

    def __init__(self, problem: PagedAttentionProblem) -> None:
        super().__init__(problem)
        self._graphs = Graphs(problem)

    def launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: PagedStep,
        values: Values,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        if step.num_seqs == 0:  # ragged, with tokens that belong to no sequence
            return
        with on_device_of(q):
            q_at, tokens = offsets_of_queries(step, q)
            queries = Queries(self.problem, q, q_at, values.scale, out, lse)
            k, v = (pages_by_head(cache, self.problem.kv_layout) for cache in (k, v))
            self._run(queries, k, v, tokens, step, values)

    def _run(self, queries: Queries, k: Tensor, v: Tensor, tokens: int, step: PagedStep, values: Values) -> None:
        q, sequences, page_size = queries.q, queries.sequences, self.problem.page_size
        q_bound = bound(tokens, FEWEST_TOKENS)
        k_bound = bound(max(1, step.max_pages) * page_size, q_bound)  # a power of two: so whole pages
        pool = Pool(k.shape[0], page_size, k_bound // page_size, _steps(k), _steps(v))
        shape = Shape(
            sequences,
            q_bound,
            k_bound,
            (q.stride(0), q.stride(1)),
            (0, 0),
            (0, 0),
            queries.wide,
            queries.scale,
            values.window_left,
            values.window_right,
            pool,
        )
        k_lens = filled_lengths(step.seq_lens, sequences, step.max_pages * page_size)
        table = filled_table(step.block_table, step.seq_lens, page_size, sequences, pool.columns)
        keys = {Uid.K: k, Uid.V: v, Uid.K_LENS: k_lens, Uid.K_TABLE: table, Uid.V_TABLE: table}
        self._graphs.run(shape, queries.tensors(shape.wide) | keys)
        queries.blank(k_lens)
        queries.finish()


def _steps(cache: Tensor) -> tuple[int, int, int]:
    """Strides of pages, heads and tokens."""
    page, head, token, _ = cache.stride()
    return page, head, token
