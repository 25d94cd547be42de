"""Records of the torch kernels of quantisation."""

from __future__ import annotations

from kernelhub.backends.torch import standings
from kernelhub.backends.torch.devices import ANYWHERE
from kernelhub.dispatch.constraint import anything, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.quant.problem import FLOATS

_HOME = "kernelhub.backends.torch.quant.quantize"
_FP8 = anything("granularity", "group_size", "scale_dtype")


def _record(op: str, target: str, field: str, features: frozenset[str] = frozenset(), fp8: bool = False) -> Kernel:
    return Kernel(
        op=op,
        name="torch.quantize" if op.startswith("quantize") else "torch.dequantize",
        target=f"{_HOME}:{target}",
        summary="one block of rows at a time in float32",
        band=Band.REFERENCE,
        constraints=(ANYWHERE, dtype_in(field, *FLOATS), *([_FP8] if fp8 else [])),
        features=features,
        graph=GraphLevel.FULL,
        deterministic=True,
        batch_invariant=True,
        standings=standings.EVERYWHERE,
    )


KERNELS = (
    _record("quantize_fp8", "QuantizeFp8", "dtype", frozenset({"ue8m0", "static", "column"}), fp8=True),
    _record("quantize_nvfp4", "QuantizeNvfp4", "dtype", frozenset({"static"})),
    _record("quantize_mxfp4", "QuantizeMxfp4", "dtype", frozenset({"round_up"})),
    _record("quantize_mxfp8", "QuantizeMxfp8", "dtype", frozenset({"round_up"})),
    _record("dequantize_fp8", "DequantizeFp8", "out_dtype", fp8=True),
    _record("dequantize_nvfp4", "DequantizeNvfp4", "out_dtype"),
    _record("dequantize_mxfp4", "Dequantize", "out_dtype"),
    _record("dequantize_mxfp8", "Dequantize", "out_dtype"),
)
