"""How calls of `quantize_mxfp4` and `quantize_mxfp8` become launches: their problem, their checks, their run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.ops.arguments import dtype_name, refuse, usable
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.operands import check_loose, check_operand, transformed
from kernelhub.ops.quant.arguments import any_rows, as_rows, check_x, destination, shape_of
from kernelhub.ops.quant.problem import MX_GROUP, QuantizeMxProblem
from kernelhub.probes.device import facts_of

Run = Callable[..., Any]
ROUNDINGS = ("floor", "up")


def mx_problem(key: Any, device: int) -> QuantizeMxProblem:
    """The problem that a key means; the key is built in `quantize_mxfp4` and `quantize_mxfp8`."""
    dtype, round_up = key
    return QuantizeMxProblem(facts_of(device), dtype_name(dtype), round_up)


def check_mx(op: str, x: Any, scale_rounding: Any) -> None:
    """Everything that the contract says of a call but its destinations."""
    if scale_rounding not in ROUNDINGS:
        refuse(op, "scale_rounding", f"is {scale_rounding!r}", "give 'floor' or 'up'")
    check_x(op, x, MX_GROUP if op == "quantize_mxfp4" else 1)


def bind_mx(op: str) -> Callable[..., Run]:
    """What binds a kernel of `quantize_mxfp4` or `quantize_mxfp8`."""
    fp4 = op == "quantize_mxfp4"

    def bind(
        adapter: Any, problem: QuantizeMxProblem, device: int, tick: Callable[[], int], elsewhere: Callable[[int], Run]
    ) -> Run:
        launch, dtype = adapter.launch, getattr(torch, problem.dtype)
        multiple, per_byte, codes_dtype = (MX_GROUP, 2, torch.uint8) if fp4 else (1, 1, E4M3)

        def run(x: Tensor, out: Tensor | None, out_scale: Tensor | None) -> tuple[Tensor, Tensor]:
            if x.get_device() != device:
                result: tuple[Tensor, Tensor] = elsewhere(x.get_device())(x, out, out_scale)
                return result
            shape = shape_of(op, x)
            known = usable(x, dtype, device) and shape and shape[-1] and not shape[-1] % multiple
            if transformed() or not known:
                check_mx(op, x, "floor")
                if x.dtype is not dtype:
                    refuse(op, "x", f"has dtype {dtype_name(x.dtype)}", f"the plan is for {problem.dtype}")
            else:
                check_loose(op, ("x",), (x,))
                if shape[-1] == 1 and x.is_neg():  # one element is contiguous whatever it is a view of
                    check_operand(op, "x", x)
            *lead, width = shape
            scales = (*lead, -(-width // MX_GROUP))
            out = destination(op, "out", out, (*lead, width // per_byte), codes_dtype, device, ("x",), (x,))
            out_scale = destination(op, "out_scale", out_scale, scales, E8M0, device, ("x", "out"), (x, out))
            if x.numel():
                codes, scale = as_rows(op, "out", out, False), as_rows(op, "out_scale", out_scale, False)
                tick()
                try:
                    launch(any_rows(x, False), codes, scale, None)
                except Exception as error:
                    failed(launch, error)
                    raise
            return out, out_scale

        return run

    return bind
