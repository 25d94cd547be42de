"""Expert parallelism: `moe_dispatch` moves tokens to the ranks of their experts, `moe_combine` their results back.

Rank r of W holds the experts ``r * E / W`` to ``(r + 1) * E / W - 1``. Received tokens have one of three formats:

==============  ====================================================================  ==================
format          rows                                                                  taken by
==============  ====================================================================  ==================
``tokens``      ``[R, H]``, a row a token, with local ids and weights ``[R, top_k]``  `fused_moe` (weighs)
``contiguous``  ``[R, H]``, a row per token and expert, sorted by expert, `offsets`   `grouped_gemm`
``masked``      ``[E / W, M, H]``, the first `counts` rows of each expert             `grouped_gemm`
==============  ====================================================================  ==================

Files: `problem` (facets), `dispatch` and `combine` (the public functions), `received` (what a dispatch returns, and the
handle), `formats` (from tokens to the other formats, and back), `checks`, `adapter`, `reference`, `inputs`, `cases`.
"""
