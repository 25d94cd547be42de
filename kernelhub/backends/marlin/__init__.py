"""Marlin: bfloat16 and float16 times float4 weights, decoded in registers, from vLLM's compiled library.

It reads weights in an order of its own, with scales in an unsigned format that does not hold every number. So its
kernels take packed weights only, and what a weight holds is looked at once, when it is packed: a weight that Marlin
would multiply as something else is refused there.

The library registers operators with torch when it is loaded; the package `vllm` itself is never imported.

Files: `kernels` (records), `order` (the layout of codes and scales), `scales` (what their bytes mean), `fp4`
    (adapters),
`locks` (memory with which blocks wait for each other).
"""
