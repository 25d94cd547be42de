"""Quantisation to float8 and float4, and back: `quantize_fp8`, `quantize_nvfp4`, `quantize_mxfp4`, `quantize_mxfp8`,
`dequantize_fp8`, `dequantize_nvfp4`, `dequantize_mxfp4`, `dequantize_mxfp8`.

Scales multiply on the way back: ``value = code * scale (* global_scale)``. On the way there, in float32 and rounded
to nearest even in every step, so that all kernels give the same bits:

========  =====================================================================  =======================================
format    scale of a group whose largest magnitude is ``amax``                   code
========  =====================================================================  =======================================
fp8       ``max(amax / 448, 2^-126)``; with `ue8m0` the power of two above it    ``e4m3(x / scale)``
nvfp4     ``max(e4m3(amax / 6 / global_scale), 2^-9)``, over 16 elements         ``e2m1(x / (scale * global_scale))``
mxfp4     ``2^(floor(log2 amax) - 2)``, over 32                                  ``e2m1(x / scale)``
mxfp8     ``2^(floor(log2 amax) - 8)``, over 32                                  ``e4m3(x / scale)``
========  =====================================================================  =======================================

`global_scale` is ``max(amax of the tensor / 2688, 2^-117)`` where none is given. Divisions are true ones, as in
DeepSeek's and vLLM's quantisers; a product with the reciprocal would differ in the last bit.

The scale of MX is that of the specification (OCP Microscaling Formats 1.0, section 6.3): amax may be above the
largest code (by up to a third for fp4, a seventh for fp8) and is then saturated. ``scale_rounding="up"`` takes the
least power of two that saturates nothing, as cuDNN, Transformer Engine and NVIDIA's recipe for pre-training with
MXFP8 (Mishra et al. 2025) do. The specification's is the default, since it is what "MX" names; reading a tensor back
does not depend on it.

What is not an ordinary number has a defined result:

* a group of zeros: codes 0, and the least scale of its kind, which is neither 0 nor NaN;
* tiny groups, denormals included: the least scale, codes nearest to ``x / scale``;
* infinity counts as the largest finite number of x's dtype: it saturates, and its scale is finite;
* NaN has no part in amax. fp8 and mxfp8 keep it, as code 0x7f. fp4 has no NaN: the group's scale becomes NaN and its
  codes 0, so that the whole group reads back as NaN rather than as something else;
* a scale that was given is divided by as IEEE says, whatever it is; NaN that comes of it is code 0x7f.

Files: `problem` (facets), `fp8`, `nvfp4`, `mx` (the ops: checks, launch, public functions), `arguments` (checks,
shapes, memory of results), `dequantize_call` (launch of all ways back), `adapter` (the interface of kernels),
`reference`, `inputs`, `cases`, `tolerance` (bounds of the round trip).
"""
