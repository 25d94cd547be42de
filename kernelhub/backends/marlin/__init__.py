"""Marlin: bfloat16 and float16 times float4 weights, decoded in registers, from vLLM's compiled library.

It has its own weight layout, with scales in an unsigned format that does not represent every number. So its kernels
support packed weights only, and packing checks the values once: it rejects a weight that Marlin would multiply as
something else.

The library registers operators with torch when it is loaded; the package `vllm` itself is never imported.

Files: `kernels` (records), `order` (the layout of codes and scales), `scales` (what their bytes mean), `fp4`
    (adapters),
`locks` (memory with which blocks wait for each other).
"""
