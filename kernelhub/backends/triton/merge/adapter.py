"""From a call of `merge_attention_states` to its Triton launch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from kernelhub.backends.shared.operands import on_device_of
from kernelhub.backends.shared.repeat import Repeated
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.launch import Launcher
from kernelhub.backends.triton.merge.merge import MOST_APART, merge_apart_kernel, merge_states_kernel
from kernelhub.backends.triton.operands import as_bytes, strides_of
from kernelhub.ops.merge.adapter import MergeAdapter
from kernelhub.ops.merge.problem import MergeProblem
from kernelhub.ops.precision import without_autocast

if triton.knobs.runtime.interpret:
    interpreter.repair()

# Elements of a tile: 16 per thread with 4 warps. On an H200 a merge of 2 x 8192 tokens, 128 heads of 128, takes 0.38,
# 0.23, 0.21 and 0.24 ms with 512, 1024, 2048 and 4096.
_TILE = 2048


class Merge(MergeAdapter):
    """All parts in one launch. More than eight parts, or three and more of different strides, that are not stacked
    already, are stacked first."""

    def __init__(self, problem: MergeProblem) -> None:
        super().__init__(problem)
        width = triton.next_power_of_2(problem.head_dim)
        self._block = max(1, _TILE // width)
        static = {
            "HEADS": problem.num_heads,
            "D": problem.head_dim,
            "D_PAD": width,
            "BLOCK": self._block,
            "HAS_LSE": problem.lse,
            "SCALE": {"value": 1, "tensor": 2}.get(problem.out_scale or "", 0),
        }
        self._repeated = Repeated()
        self._launch = Launcher(merge_states_kernel, static, num_warps=4, num_stages=1)
        self._launch_apart = {
            parts: Launcher(merge_apart_kernel, {**static, "PARTS": parts}, num_warps=4, num_stages=1)
            for parts in range(3, MOST_APART + 1)
        }

    def launch(
        self,
        outs: Sequence[Tensor] | Tensor,
        lses: Sequence[Tensor] | Tensor,
        out: Tensor,
        lse: Tensor | None,
        out_scale: float | Tensor | None = None,
    ) -> None:
        given = (outs, lses, out, lse, out_scale)
        self._repeated.run(*_identified(*given), self._launch_anew, *given)

    def repeated(self, *given: Any) -> Any:
        return self._repeated.sequence_of(*_identified(*given))

    def _launch_anew(
        self,
        outs: Sequence[Tensor] | Tensor,
        lses: Sequence[Tensor] | Tensor,
        out: Tensor,
        lse: Tensor | None,
        out_scale: float | Tensor | None,
    ) -> None:
        out = as_bytes(out)
        scale = (None, out_scale) if isinstance(out_scale, Tensor) else (float(out_scale or 1.0), None)
        if not isinstance(outs, Tensor) and not isinstance(lses, Tensor) and _apart(outs) and _apart(lses):
            self._merge_apart(outs, lses, out, lse, scale)
            return
        apart = (0, 0)
        if len(outs) > 2:
            outs, lses = _stacked(outs), _stacked(lses)
            apart = (outs.stride(0), lses.stride(0))
        (a, b), (lse_a, lse_b) = _first_two(outs), _first_two(lses)
        strides = (*strides_of(a, 4), *strides_of(b, 4), *strides_of(out, 4))
        tokens = a.shape[-3]
        blocks = -(-tokens // self._block)
        aligned = not (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 15
        with on_device_of(a):
            self._launch(
                blocks * self.problem.num_heads * (a.shape[0] if a.ndim == 4 else 1),
                (a.get_device(), strides, apart[0]) if aligned else None,
                a,
                b,
                out,
                lse_a,
                lse_b,
                lse,
                *scale,
                len(outs),
                tokens,
                *apart,
                *strides,
                *strides_of(lse_a, 3),
                *strides_of(lse_b, 3),
                *((0, 0, 0) if lse is None else strides_of(lse, 3)),
            )

    def _merge_apart(
        self,
        outs: Sequence[Tensor],
        lses: Sequence[Tensor],
        out: Tensor,
        lse: Tensor | None,
        scale: tuple[float | None, Tensor | None],
    ) -> None:
        parts, first = len(outs), outs[0]
        tokens = first.shape[-3]
        strides = (*strides_of(first, 4), *strides_of(out, 4))
        pointers = out.data_ptr()
        for part in outs:
            pointers |= part.data_ptr()
        unused = (None,) * (MOST_APART - parts)
        with on_device_of(first):
            self._launch_apart[parts](
                -(-tokens // self._block) * self.problem.num_heads * (first.shape[0] if first.ndim == 4 else 1),
                None if pointers & 15 else (first.get_device(), strides),
                *outs,
                *unused,
                *lses,
                *unused,
                out,
                lse,
                *scale,
                tokens,
                *strides,
                *strides_of(lses[0], 3),
                *((0, 0, 0) if lse is None else strides_of(lse, 3)),
            )


def _identified(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    out: Tensor,
    lse: Tensor | None,
    out_scale: float | Tensor | None = None,
) -> tuple[Hashable, list[Tensor]]:
    """The key and the tensors of a call that may be repeated."""
    on_host = None if isinstance(out_scale, Tensor) else out_scale
    of_parts = [*([outs] if isinstance(outs, Tensor) else outs), *([lses] if isinstance(lses, Tensor) else lses)]
    more = [one for one in (lse, out_scale) if isinstance(one, Tensor)]
    key = (out.shape, len(outs), isinstance(outs, Tensor), isinstance(lses, Tensor), lse is None, on_host)
    return key, [out, *of_parts, *more]


def _apart(parts: Sequence[Tensor]) -> bool:
    """Three parts or more, not stacked, which one launch can read where they are."""
    return 3 <= len(parts) <= MOST_APART and all(part.stride() == parts[0].stride() for part in parts)


@without_autocast  # which stacks no parts of another half precision than its own
def _stacked(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """The parts as one tensor [parts, ...], without a copy if the caller passed one."""
    return parts if isinstance(parts, Tensor) else torch.stack(tuple(parts))


def _first_two(parts: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    return parts.narrow(0, 0, 2).unbind(0) if isinstance(parts, Tensor) else parts
