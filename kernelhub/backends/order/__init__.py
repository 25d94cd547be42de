"""Which kernel is expected fastest: for each op, device family x regime -> kernels in order; a file per family of ops.

These are the only files that name kernels of several backends. Each line states its evidence.
"""

from kernelhub.backends.order import (
    attention,
    comm,
    fp4_gemm,
    fp8_gemm,
    fused_quant,
    grouped_gemm,
    indexer,
    kv_cache,
    mla,
    moe,
    paged_attention,
    quant,
)

ORDER = {
    **attention.ORDER,
    **paged_attention.ORDER,
    **kv_cache.ORDER,
    **mla.ORDER,
    **fp8_gemm.ORDER,
    **fp4_gemm.ORDER,
    **grouped_gemm.ORDER,
    **moe.ORDER,
    **indexer.ORDER,
    **fused_quant.ORDER,
    **quant.ORDER,
    **comm.ORDER,
}
