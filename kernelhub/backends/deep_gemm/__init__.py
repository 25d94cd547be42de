"""DeepGEMM: float8 products in blocks, grouped products and the indexer's logits, on Hopper and Blackwell.

One library in many distributions: upstream's own builds, tokenspeed-deepgemm, sgl-deep-gemm, sgl-kernel up to 0.3.21,
and a copy inside vLLM. They differ in how they are bound (pybind, torch's operators, tvm-ffi) and in names of functions
and parameters, so each function is looked up under all its names (`requirements.CALLS`).

Files: `kernels` (records), `requirements` (what they need on the machine), `copies` (folders of copies, what their
sources say), `loaded` (importing it imports the library), `layouts` (scales and rows as the library reads them), and
the adapters `fp8_gemm`, `grouped`, `indexer`.
"""
