"""Products of float8 matrices: `fp8_gemm`, and `bmm_fp8` in `batched`.

Values are code * scale. The shapes and dtypes of the scales determine how a and b are scaled:

========  ==============================================  ================================================
scaling   a_scale                                         b_scale
========  ==============================================  ================================================
tensor    float32 [] or [1]                               float32 [] or [1]
row       float32 [M] or [M, 1] (token), or as above      float32 [N] or [N, 1] (channel), or as above
block     [M, ceil(K/128)], float32 or e8m0               [ceil(N/128), ceil(K/128)], float32 or e8m0
mx        e8m0 [M, ceil(K/32)]                            e8m0 [N, ceil(K/32)]
========  ==============================================  ================================================

Of row, at least one of the two is per row. Weights are [N, K], as in checkpoints. Scales are in linear, row-major
order or have any strides; none is swizzled.

Files: `problem` (facets), `op` (launch, plan, the public function), `checks`, `scaling` (geometry of scales),
`adapter` (the interface of kernels), `reference`, `tolerance`, `inputs`, `cases`.
"""
