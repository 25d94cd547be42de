"""Products with float4 weights: `fp4_gemm`.

``out = (a * its scales) @ (b * its scales)^T + bias``, accumulated in float32. b is a weight ``[N, K]``; formats:

=========  ======================================  ==========================================  =====================
b          codes, two a byte, first in the low     scales                                      global scale
=========  ======================================  ==========================================  =====================
nvfp4      uint8 ``[N, K / 2]``                    float8_e4m3fn ``[N, K / 16]``               float32, one element
mxfp4      uint8 ``[N, K / 2]``                    float8_e8m0fnu ``[N, K / 32]`` or bytes     none
=========  ======================================  ==========================================  =====================

a is bfloat16 or float16 (weight-only quantisation), float8_e4m3fn with a float32 scale of the tensor or of each row,
mxfp8, nvfp4 or mxfp4. Every product of a code with its group's scale is exact in bfloat16, so a kernel loses nothing
by multiplying there; float16 holds code x scale of nvfp4 exactly too, not that of mxfp4.

Weights may come packed (`kernelhub.ops.packed`).

Files: `problem` (facets), `op` (checks, launch, plan, the public function), `adapter` (the interface of kernels),
`reference` (also the formats, derived from dtypes), `tolerance`, `inputs`, `cases`.
"""
