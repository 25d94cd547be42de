"""Records of the Triton kernels of quantisation."""

from __future__ import annotations

from kernelhub.backends.triton import standings
from kernelhub.backends.triton.requirements import MACHINE
from kernelhub.dispatch.constraint import Between, anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.quant.problem import FLOATS

_HOME = "kernelhub.backends.triton.quant.adapter"
_FP8 = (
    Between("group_size", 1, 1024, why="a program holds whole groups"),
    anything("granularity", "scale_dtype"),
)


def _record(op: str, target: str, field: str, features: frozenset[str] = frozenset(), fp8: bool = False) -> Kernel:
    return Kernel(
        op=op,
        name="triton.quantize" if op.startswith("quantize") else "triton.dequantize",
        target=f"{_HOME}:{target}",
        summary="groups of a row per program, bit-identical to the reference",
        band=Band.PORTABLE,
        constraints=(*MACHINE, dtype_in(field, *FLOATS), *(_FP8 if fp8 else ())),
        features=features,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.STANDINGS,
    )


KERNELS = (
    _record("quantize_fp8", "QuantizeFp8", "dtype", frozenset({"ue8m0", "static", "column"}), fp8=True),
    _record("quantize_nvfp4", "QuantizeNvfp4", "dtype", frozenset({"static"})),
    _record("quantize_mxfp4", "QuantizeMxfp4", "dtype", frozenset({"round_up"})),
    _record("quantize_mxfp8", "QuantizeMxfp8", "dtype", frozenset({"round_up"})),
    _record("dequantize_fp8", "DequantizeFp8", "out_dtype", fp8=True),
    _record("dequantize_nvfp4", "DequantizeNvfp4", "out_dtype"),
    _record("dequantize_mxfp4", "DequantizeMxfp4", "out_dtype"),
    _record("dequantize_mxfp8", "DequantizeMxfp8", "out_dtype"),
)
