"""Records of FlashInfer's quantisation: what gives the bits of the ops, which of the library's kernels is one.

Its quantisers divide by approximate reciprocals, and keep neither infinity nor NaN as the ops do.
"""

from __future__ import annotations

from kernelhub.backends.flashinfer import calls
from kernelhub.backends.flashinfer.requirements import SM80_ON, Module, requirements
from kernelhub.dispatch.constraint import dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel

KERNELS = (
    Kernel(
        op="dequantize_nvfp4",
        name="flashinfer.dequantize",
        target="kernelhub.backends.flashinfer.quant.nvfp4:DequantizeNvfp4",
        summary="a row per block of threads, to float16; compiled at first use unless built ahead",
        band=Band.TUNED,
        constraints=(
            *requirements(SM80_ON, calls.DEQUANTIZE_NVFP4, calls.DEQUANTIZE_MODULE),
            Module((), lambda _: ("fp4_kv_dequant",)),
            dtype_in("out_dtype", "float16", why="products below 2^-126 become 0, which bfloat16 would tell"),
        ),
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        source="FlashInfer (Ye et al. 2025)",
    ),
)
