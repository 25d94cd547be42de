"""From a call of `grouped_gemm` to its Triton launch."""

from __future__ import annotations

import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeated_grouped import RepeatedGrouped
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.fp4 import by_ptx, left_of
from kernelhub.backends.triton.gemm.grouped.grouped import grouped_gemm_kernel
from kernelhub.backends.triton.gemm.grouped.tiles import Tiles, rows_of_a_tile, tiles
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.operands import as_bytes, strides_of
from kernelhub.backends.triton.planes import DecodedPlanes, Planes, wide, words
from kernelhub.backends.triton.requirements import has_float8
from kernelhub.backends.triton.two_scales import LEFT_OF_BOTH
from kernelhub.ops.gemm.grouped.adapter import GroupedOperands
from kernelhub.ops.gemm.grouped.problem import BLOCKS, FP4, FP8, SMALL, GroupedGemmProblem

if triton.knobs.runtime.interpret:
    interpreter.repair()

# Programs per multiprocessor at most, each of which then takes several tiles: more than can run at once, so that one
# that is late holds up little, and few enough that starting them costs nothing where groups are mostly empty.
_PROGRAMS_PER_SM = 8
_GROUP_M = 8  # tiles along M that take the same weights one after the other


class Grouped(RepeatedGrouped):
    """All groups in one launch; tiles of 16, 64 or 128 rows, by how many rows there may be."""

    def __init__(self, problem: GroupedGemmProblem) -> None:
        super().__init__(problem)
        self._launchers: dict[tuple[int, bool], tuple[Tiles, Launcher]] = {}
        device = problem.device
        native = has_float8(device)
        mx = problem.b_scale == "mxfp8"
        fp8, fp4 = problem.b_dtype == FP8 and not mx, problem.b_dtype == FP4
        # Quantised rows are decoded: beside fp4 weights once, into planes, else in each tile.
        rows = "bfloat16" if problem.a_scale in SMALL else problem.a_dtype
        # An e8m0 scale may be beyond what float16 holds, so there it is applied to sums.
        self._quads = within = fp4 and not (problem.b_scale == "mxfp4" and rows == "float16")
        form = problem.b_scale or ""
        ptx = within and by_ptx(device.vendor, rows, form)
        self._decoded = problem.a_scale if within and problem.a_scale in SMALL else None
        self._planes = Planes(problem.k, problem.masked)
        self._decoded_planes = DecodedPlanes(problem.k, self._decoded or "", problem.masked)
        self._static = {
            "G": problem.num_groups,
            "G_PAD": triton.next_power_of_2(problem.num_groups),
            "N": problem.n,
            "K": problem.k,
            "MASKED": problem.masked,
            "FORMAT": "e4m3" if fp8 else "e2m1" if fp4 else "mx" if mx else "float",
            "NATIVE": native,
            "A_SCALE": (problem.a_scale or "").removesuffix("_e8m0"),
            "A_SCALE_FORMAT": "e8m0" if problem.a_scale == "group_e8m0" else "float32",
            "B_SCALE": ("within" if within else "row") if fp4 else (problem.b_scale or "").removesuffix("_e8m0"),
            "B_SCALE_FORMAT": {"nvfp4": "e4m3", "mxfp4": "e8m0", "block_e8m0": "e8m0"}.get(
                problem.b_scale or "", "float32"
            ),
            "QUADS": form if within else "",
            "PTX": ptx,
            "HAS_A_GLOBAL": problem.a_global_scale,
            "HAS_GLOBAL": problem.global_scale,
            "HAS_BIAS": problem.bias,
            # Each operand is decoded to a 256th, and two scales of blocks are multiplied over a power of two.
            "FACTOR": (65536.0 if mx or (fp8 and not native) else left_of(form, rows, ptx) * self._decoded_planes.left)
            * (LEFT_OF_BOTH if problem.b_scale in BLOCKS else 1.0),
            "PRECISION": "ieee",
            "GROUP_M": _GROUP_M,
        }

    def _launch_anew(self, operands: GroupedOperands, out: Tensor) -> None:
        problem = self.problem
        a, b = as_bytes(operands.a), as_bytes(operands.b)
        lengths = operands.group_sizes if problem.masked else operands.offsets
        assert lengths is not None
        rows = a.shape[-2]
        of_b, aligned, in_words = b.stride(), not b.data_ptr() & 15, False
        if self._quads:
            in_words = wide(b)
            if in_words:
                b, of_b = words(b)
        chosen, launch = self._launcher(rows_of_a_tile(problem, rows), in_words)
        most = -(-rows // chosen.block_m) * problem.num_groups
        if not problem.masked:
            most = rows // chosen.block_m + min(problem.num_groups, rows)
        programs = min(most * -(-problem.n // chosen.block_n), _PROGRAMS_PER_SM * problem.device.num_sms)
        a_scale, b_scale, bias = operands.a_scale, operands.b_scale, operands.bias
        with on_device_of(a):
            if self._decoded is not None:
                assert a_scale is not None
                a = self._decoded_planes(a, as_bytes(a_scale), lengths if problem.masked else None)
            elif self._quads:
                a = self._planes(a, lengths if problem.masked else None)
            strides = (*strides_of(a, 3), *of_b, *strides_of(out, 3))
            aligned = aligned and not (a.data_ptr() | out.data_ptr()) & 15
            launch(
                programs,
                (a.get_device(), strides, None if bias is None else bias.dtype) if aligned else None,
                a,
                b,
                out,
                None if a_scale is None else as_bytes(a_scale),
                None if b_scale is None else as_bytes(b_scale),
                operands.a_global_scale,
                operands.b_global_scale,
                bias,
                lengths,
                rows,
                *strides,
                *self._a_scale_strides(a_scale),
                *self._b_scale_strides(b_scale),
                _per_group(operands.a_global_scale),
                _per_group(operands.b_global_scale),
                *((0, 0) if bias is None else bias.stride()),
            )

    def _launcher(self, block_m: int, in_words: bool) -> tuple[Tiles, Launcher]:
        made = self._launchers.get((block_m, in_words))
        if made is None:
            chosen = tiles(self.problem, block_m)
            static = {
                **self._static,
                "WIDE": in_words,
                "SWAP": chosen.swap,
                "BLOCK_M": chosen.block_m,
                "BLOCK_N": chosen.block_n,
                "BLOCK_K": chosen.block_k,
            }
            made = chosen, Launcher(grouped_gemm_kernel, static, chosen.num_warps, chosen.num_stages)
            self._launchers[block_m, in_words] = made
        return made

    def _a_scale_strides(self, scale: Tensor | None) -> tuple[int, ...]:
        """(group, row, block of columns)."""
        if scale is None or self.problem.a_scale == "tensor":
            return 0, 0, 0
        strides = scale.stride() if self.problem.masked else (0, *scale.stride())
        return strides if len(strides) == 3 else (*strides, 0)

    def _b_scale_strides(self, scale: Tensor | None) -> tuple[int, ...]:
        """(group, row or block of rows, block of columns)."""
        if scale is None or self.problem.b_scale == "tensor":
            return _per_group(scale), 0, 0
        strides = scale.stride()
        return strides if len(strides) == 3 else (*strides, 0)


def _per_group(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)
