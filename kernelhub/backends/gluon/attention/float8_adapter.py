"""From a call of `attention` or `paged_attention` to the launch of the Gluon prefill over keys and values of float8."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from kernelhub.backends.gluon.attention.adapter import Prefill
from kernelhub.backends.gluon.attention.prefill import prefill_kernel
from kernelhub.backends.gluon.language import VERSION
from kernelhub.ops.attention.problem import AttentionProblem

_SCALES = {"value": 1, "tensor": 2, "head": 3}


class PrefillOfFloat8(Prefill):
    """As `Prefill`, with factors of keys and values as numbers, tensors or for each head."""

    kernel: ClassVar[Any] = prefill_kernel

    def __init__(self, problem: AttentionProblem) -> None:
        super().__init__(problem)
        # With a window of 128, of heads of 64, that takes 0.84 of the time (gluon_tiles_h200.json).
        own = problem.head_dim_qk == 64 and problem.window_left
        if own:
            self._block_n = 64
        self._static |= {
            "BLOCK_N": self._block_n,
            "SCALES": _SCALES[problem.kv_scale or "value"],
            "NARROW": problem.q_dtype == "bfloat16",
            "Q_STAGES": 2 if own else 1,
            "PINGPONG": False,
            # Of heads of 64, 2 x 4096 tokens take 0.748 ms without and 0.793 with (gluon_tiles_h200.json): the contract
            # has to run on a GPU so before all calls with such heads go without.
            "LATE": not own and VERSION < (3, 9),
            "OWN": own,
            "PACK": 1,
            # Registers of a thread of the second warpgroup and of one that converts; the first has what is left. With
            # 3.9.0, LATE, 216 and 56 a loop of 708 instructions reads 24 words, one with a softcap 32 and spills 3.
            "MULTIPLY_WITH": 224 if VERSION >= (3, 9) and not problem.window_left else 216,
            "CONVERT_WITH": 48 if VERSION >= (3, 9) else 56,
        }

    def scales(self, k_scale: Tensor | None, v_scale: Tensor | None, nothing: Tensor) -> tuple[Tensor, ...]:
        """Factors on the device, or any tensor in place of those that there are not."""
        return nothing if k_scale is None else k_scale, nothing if v_scale is None else v_scale

    def factor_of_values(self, factor: float) -> tuple[float, ...]:
        return (factor,)
