"""From a call of `fp8_gemm` to its Gluon launch. The number of rows decides the tiles."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernelhub.backends.gluon.gemm.fp8.product import product_kernel
from kernelhub.backends.gluon.gemm.fp8.tiles import Tiles, tiles
from kernelhub.backends.gluon.launch import Launcher, descriptor, rows_for_tma
from kernelhub.backends.shared.operands import is_writable_by_tma, on_device_of, strides_of_scale
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.shared.scales import as_bytes
from kernelhub.ops.gemm.fp8.adapter import Fp8GemmAdapter
from kernelhub.ops.gemm.fp8.problem import BLOCK, E8M0, FLOAT, Fp8GemmProblem

# Where rows and columns are many, scales of a that are read down the columns are worth a copy: 4096 rows with
# 7168 x 18432 took 0.89 ms on an H100, and 0.97 from rows; with 7168 x 2304 there was no difference.
_MANY_ROWS, _LONG_K = 2048, 8192
_REACH = 1 << 31  # of offsets within a tensor of scales, and within a tile of the result


class Fp8Gemm(Fp8GemmAdapter):
    """Scaled by tensor, by row or by block."""

    def __init__(self, problem: Fp8GemmProblem) -> None:
        super().__init__(problem)
        self._launchers: dict[tuple[Tiles, bool], Launcher] = {}
        self._repeated = Repeated()

    def launch(self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor) -> None:
        given = (a, b, a_scale, b_scale, bias, out)
        self._repeated.run(*self.identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*self.identified(*given))

    def _launch_anew(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        problem = self.problem
        m, n = out.shape
        tile = tiles(m, n, problem.device.num_sms)
        a, b = rows_for_tma(a), rows_for_tma(b)
        a_scale, b_scale = _reached(as_bytes(a_scale)), _reached(as_bytes(b_scale))
        if problem.scaling == BLOCK and m >= _MANY_ROWS and problem.k >= _LONG_K and a_scale.stride(0) != 1:
            a_scale = a_scale.t().contiguous().t()
        by_tma = problem.out_dtype != FLOAT and is_writable_by_tma(out)
        launcher = self._launchers.get((tile, by_tma)) or self._launcher(tile, by_tma)
        strides = (
            *strides_of_scale(a_scale),
            *strides_of_scale(b_scale),
            0 if bias is None else bias.stride(0),
            *((0, 0) if by_tma else out.stride()),
        )
        programs = self._programs(-(-m // tile.block_m) * -(-n // tile.block_n))
        with on_device_of(a):
            launcher(
                programs,
                (a.get_device(), strides, out.data_ptr() & 15),
                descriptor(a, (tile.block_m, 128)),
                descriptor(b, (tile.block_n, 128)),
                descriptor(out, (tile.block_m // 2, tile.block_n)) if by_tma else None,
                out,
                a_scale,
                b_scale,
                bias,
                m,
                n,
                problem.k,
                *strides,
            )

    def workspace_bytes(self, *, num_tokens: int) -> int:
        """Operands that TMA cannot read as they are and scales of a, in a copy."""
        k = self.problem.k
        return (num_tokens + self.problem.n) * k + 4 * num_tokens * -(-k // 128)

    def _programs(self, count: int) -> int:
        """Programs that take so many tiles in turn."""
        return min(self.problem.device.num_sms, count)

    def _launcher(self, tile: Tiles, by_tma: bool) -> Launcher:
        problem = self.problem
        static = {
            "BM": tile.block_m,
            "BN": tile.block_n,
            "WAVES": tile.block_m // 128,
            "GROUP": tile.group,
            "STAGES": tile.stages,
            "BLOCKS": problem.scaling == BLOCK,
            "A_E8M0": problem.a_scale_dtype == E8M0,
            "B_E8M0": problem.b_scale_dtype == E8M0,
            "HAS_BIAS": problem.bias,
            "BY_TMA": by_tma,
        }
        launcher = self._launchers[tile, by_tma] = Launcher(product_kernel, static)
        return launcher


def _reached(scale: Tensor) -> Tensor:
    """The scales, or a copy where they are so far apart that 32 bits do not reach them."""
    far = sum((size - 1) * abs(stride) for size, stride in zip(scale.shape, scale.stride(), strict=True))
    return scale if far < _REACH else scale.contiguous()
