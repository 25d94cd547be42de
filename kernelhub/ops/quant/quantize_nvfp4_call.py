"""How a call of `quantize_nvfp4` becomes a launch: its problem, its checks, its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.ops.arguments import alike, describe, dtype_name, refuse, usable
from kernelhub.ops.formats import E4M3
from kernelhub.ops.operands import check_loose, check_own_memory, transformed
from kernelhub.ops.quant.arguments import any_rows, as_rows, check_one, check_x, destination, shape_of
from kernelhub.ops.quant.problem import NVFP4_GROUP, QuantizeNvfp4Problem
from kernelhub.ops.quant.reference import LEAST_GLOBAL_SCALE
from kernelhub.probes.device import facts_of

Run = Callable[..., Any]


def nvfp4_problem(key: Any, device: int) -> QuantizeNvfp4Problem:
    """The problem that a key means; the key is built in `quantize_nvfp4`."""
    dtype, static = key
    return QuantizeNvfp4Problem(facts_of(device), dtype_name(dtype), static)


def check_nvfp4(x: Any, global_scale: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    check_x("quantize_nvfp4", x, NVFP4_GROUP)
    if global_scale is not None:
        check_one("quantize_nvfp4", "global_scale", global_scale, x)


def bind_nvfp4(
    adapter: Any, problem: QuantizeNvfp4Problem, device: int, tick: Callable[[], int], elsewhere: Callable[[int], Run]
) -> Run:
    """The function that a call of `quantize_nvfp4` runs."""
    launch, op, dtype = adapter.launch, "quantize_nvfp4", getattr(torch, problem.dtype)
    static, float32 = problem.static, torch.float32

    def known(x: Tensor, shape: tuple[int, ...], global_scale: Tensor | None) -> bool:
        """Nothing that `check_nvfp4` would refuse."""
        if not usable(x, dtype, device) or not shape or not shape[-1] or shape[-1] % NVFP4_GROUP:
            return False
        if global_scale is None or not static:
            return global_scale is None and not static
        return usable(global_scale, float32, device) and global_scale.numel() == 1

    def run(
        x: Tensor,
        global_scale: Tensor | None,
        out: Tensor | None,
        out_scale: Tensor | None,
        out_global_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if x.get_device() != device:
            result: tuple[Tensor, Tensor, Tensor] = elsewhere(x.get_device())(
                x, global_scale, out, out_scale, out_global_scale
            )
            return result
        shape = shape_of(op, x)
        if transformed() or not known(x, shape, global_scale):
            check_nvfp4(x, global_scale)
            if x.dtype is not dtype:
                refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"the plan is for {problem.dtype}")
            if (global_scale is not None) != static:
                wanted = "a global scale" if static else "no global scale"
                refuse(op, "global_scale", f"is {'missing' if static else 'given'}", f"the plan is for {wanted}")
        else:
            check_loose(op, ("x", "global_scale"), (x, global_scale))
            if global_scale is not None and (global_scale.is_neg() or global_scale.is_nested):
                check_nvfp4(x, global_scale)
        if global_scale is None:
            if out_global_scale is None:
                global_scale = x.new_empty(1, dtype=float32)
            else:
                global_scale = out_global_scale
                if not alike(global_scale, (1,), float32, device):
                    check_one(op, "out_global_scale", global_scale, x)
                    if global_scale.ndim > 1:
                        refuse(op, "out_global_scale", f"is {describe(global_scale)}", "give float32 [1]")
                check_own_memory(op, "out_global_scale", global_scale, ("x",), (x,))
        elif out_global_scale is not None:
            refuse(op, "out_global_scale", "is given beside global_scale", "the one that is given is the result")
        *lead, width = shape
        names = ("x", "global_scale" if out_global_scale is None else "out_global_scale", "out")
        out = destination(op, "out", out, (*lead, width // 2), torch.uint8, device, names[:2], (x, global_scale))
        scales, others = (*lead, width // NVFP4_GROUP), (x, global_scale, out)
        out_scale = destination(op, "out_scale", out_scale, scales, E4M3, device, names, others)
        if x.numel():
            codes, scale = as_rows(op, "out", out, False), as_rows(op, "out_scale", out_scale, False)
            tick()
            try:
                launch(any_rows(x, False), codes, scale, global_scale)
            except Exception as error:
                failed(launch, error)
                raise
        elif not problem.static:
            global_scale.fill_(LEAST_GLOBAL_SCALE)
        return out, out_scale, global_scale

    return run
