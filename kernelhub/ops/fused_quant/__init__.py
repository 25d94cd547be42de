"""What stands before a product, in one pass with its quantisation: `rms_norm_quant` and `silu_and_mul_quant`.

Both compute a row of floats in float32. They give it as it is, or as codes and scales for `fp8_gemm` and `fp4_gemm`:

==============  ==================================  ===================================================================
format          codes                               scales
==============  ==================================  ===================================================================
None            x's dtype, rounded once             none
``fp8_tensor``  float8_e4m3fn                       the given one of the tensor
``fp8_token``   float8_e4m3fn                       one for each row
``fp8_group``   float8_e4m3fn                       one for each 128 elements of a row
``mxfp8``       float8_e4m3fn                       float8_e8m0fnu, one for each 32 elements
``nvfp4``       float4_e2m1, two a byte             float8_e4m3fn, one for each 16 elements, beside a given global scale
==============  ==================================  ===================================================================

Scales and codes follow from the row as in `kernelhub.ops.quant`, with what that says of zeros, infinity and NaN; x's
dtype determines the largest finite number. A row is not rounded to x's dtype before it is quantised. The order of a sum
differs between kernels, so that results are compared within `tolerance` and not to the bit; the residual sum is exact.

Files: `problem` (facets), `norm`, `activation` (the ops), `formats` (checks, shapes and memory of results), `adapter`,
`reference`, `tolerance`, `inputs`, `cases`, `serving`.
"""
