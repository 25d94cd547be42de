"""What a form of the result asks of a call's arguments, and the shapes and memory of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops.arguments import dtype_name, refuse, usable
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.fused_quant.problem import FORMATS, FP8_GROUP, FP8_TENSOR, FP8_TOKEN, MXFP8, NONE, NVFP4, SCALED
from kernelhub.ops.operands import check_flag, check_operand
from kernelhub.ops.quant.arguments import FP8_SCALE_DTYPES, as_rows, check_one, destination, new_scale

GROUPS = {FP8_GROUP: 128, MXFP8: 32, NVFP4: 16}
LAYOUTS = ("row", "column")
GIVEN = {FP8_TENSOR: "scale", NVFP4: "global_scale"}  # the scale that a format is given
_NAMES = FORMATS[1:]


def format_of(op: str, format: Any) -> str:
    """The facet of the argument, None of which means floats."""
    if format is None:
        return NONE
    if format not in _NAMES:
        hint = "; mxfp4 has quantize_mxfp4" if format == "mxfp4" else ""
        refuse(op, "format", f"is {format!r}", f"give None or one of {', '.join(_NAMES)}{hint}")
    return str(format)


def check_format(
    op: str,
    like: Tensor,
    width: int,
    format: Any,
    scale: Any,
    global_scale: Any,
    ue8m0: Any,
    scale_dtype: Any,
    scale_layout: Any,
) -> None:
    """Everything that the contract says of the form of the result."""
    name = format_of(op, format)
    check_flag(op, "ue8m0", ue8m0)
    if scale_dtype not in FP8_SCALE_DTYPES:
        refuse(op, "scale_dtype", f"is {scale_dtype}", "give torch.float32 or torch.float8_e8m0fnu")
    if scale_layout not in LAYOUTS:
        refuse(op, "scale_layout", f"is {scale_layout!r}", "give 'row' or 'column'")
    if name not in SCALED:
        for parameter, usual, given in (
            ("ue8m0", False, ue8m0),
            ("scale_dtype", torch.float32, scale_dtype),
            ("scale_layout", "row", scale_layout),
        ):
            if given != usual:
                refuse(
                    op, parameter, f"is {given} for format {format!r}", f"leave it alone; it is of {', '.join(SCALED)}"
                )
    for wanted, parameter, given in ((FP8_TENSOR, "scale", scale), (NVFP4, "global_scale", global_scale)):
        if name == wanted:
            if given is None:
                refuse(op, parameter, f"is missing for format {format!r}", "give float32 of one element, as calibrated")
            check_one(op, parameter, given, like)
        elif given is not None:
            refuse(op, parameter, f"is given for format {format!r}", f"it belongs to {wanted}")
    if name == NVFP4 and width % 16:
        refuse(op, "x", f"gives rows of {width}", "groups of nvfp4 are 16 wide; pad the width to a multiple")


@lru_cache(1024)
def scale_shape(shape: tuple[int, ...], format: str) -> tuple[int, ...]:
    """Shape of the scales of a result of this shape."""
    *lead, width = shape
    return (*lead, 1 if format == FP8_TOKEN else -(-width // GROUPS[format]))


def scale_kind(format: str, scale_dtype: torch.dtype) -> torch.dtype:
    """Dtype of the scales that a call makes."""
    return {MXFP8: E8M0, NVFP4: E4M3}.get(format, scale_dtype)


def out_form(shape: Sequence[int], format: str, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a result."""
    *lead, width = shape
    if format == NVFP4:
        return (*lead, width // 2), torch.uint8
    return (*lead, width), dtype if format == NONE else E4M3


def fresh(like: Tensor, shape: Sequence[int], format: str, scale_dtype: torch.dtype, column: bool) -> dict[str, Tensor]:
    """New memory for a result and its scales, for fake tensors too."""
    form, dtype = out_form(shape, format, like.dtype)
    made = {"out": like.new_empty(form, dtype=dtype)}
    if format in (FP8_TOKEN, *GROUPS):
        scales = (*shape[:-1], 1 if format == FP8_TOKEN else -(-shape[-1] // GROUPS[format]))
        made["out_scale"] = new_scale(like, scales, scale_kind(format, scale_dtype), column, False)
    return made


class Results:
    """The results of one configuration's calls: memory that is given or made, and rows of it for a launch."""

    def __init__(self, op: str, problem: Any, device: int) -> None:
        self._op, self._device, self._format, self._column = op, device, problem.format, problem.column
        self._dtype = getattr(torch, problem.dtype)
        self._scale_dtype = scale_kind(problem.format, getattr(torch, problem.scale_dtype))
        self._given = GIVEN.get(problem.format)
        self._makes_scales = problem.format in (FP8_TOKEN, *GROUPS)

    def given(self, scale: Tensor | None, global_scale: Tensor | None) -> Tensor | None:
        """The scale that the kernel reads."""
        return scale if self._given == "scale" else global_scale

    def known(self, scale: Any, global_scale: Any) -> bool:
        """Nothing about the given scales that a check would refuse."""
        wanted, other = (global_scale, scale) if self._given == "global_scale" else (scale, global_scale)
        if other is not None or (wanted is None) != (self._given is None):
            return False
        return wanted is None or (
            usable(wanted, torch.float32, self._device) and wanted.numel() == 1 and not wanted.is_neg()
        )

    def made(
        self,
        like: Tensor,
        shape: tuple[int, ...],
        out: Tensor | None,
        out_scale: Tensor | None,
        names: Sequence[str],
        read: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """Memory of the result and of its scales; `read` are operands, by `names`, the first of them x."""
        if out is not None:
            form, dtype = out_form(shape, self._format, self._dtype)
            destination(self._op, "out", out, form, dtype, self._device, names, read)
            names, read = (*names, "out"), (*read, out)
        if out_scale is not None:
            self._scales(shape, out_scale, names, read)
        return self.completed(like, shape, out, out_scale)

    def completed(
        self, like: Tensor, shape: tuple[int, ...], out: Tensor | None, scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The same, of destinations that were checked."""
        if out is None:
            form, dtype = out_form(shape, self._format, self._dtype)
            out = like.new_empty(*form, dtype=dtype)
        if scale is None and self._makes_scales:
            scale = new_scale(like, scale_shape(shape, self._format), self._scale_dtype, self._column, False)
        return out, scale

    def check(
        self,
        shape: tuple[int, ...],
        out: Tensor | None,
        out_scale: Tensor | None,
        names: Sequence[str],
        read: Sequence[Tensor | None],
    ) -> None:
        """Refuse what `made` refuses, without making memory."""
        if out is not None:
            form, dtype = out_form(shape, self._format, self._dtype)
            destination(self._op, "out", out, form, dtype, self._device, names, read)
            names, read = (*names, "out"), (*read, out)
        if out_scale is not None:
            self._scales(shape, out_scale, names, read)

    def _scales(
        self, shape: tuple[int, ...], given: Tensor, names: Sequence[str], read: Sequence[Tensor | None]
    ) -> Tensor:
        """The destination of the scales."""
        if not self._makes_scales:
            fix = "the scale that is given is the result" if self._given == "scale" else "leave it out"
            refuse(self._op, "out_scale", f"is given for format {self._format}", fix)
        scales = scale_shape(shape, self._format)
        return destination(self._op, "out_scale", given, scales, self._scale_dtype, self._device, names, read)

    def rows(self, out: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The same as matrices."""
        op = self._op
        return as_rows(op, "out", out, False), None if scale is None else as_rows(op, "out_scale", scale, False)

    def returned(self, out: Tensor, made: Tensor | None, scale: Tensor | None, *more: Tensor | None) -> Any:
        """What the call returns: one tensor, or a tuple of those that there are."""
        scale = made if made is not None else scale if self._given == "scale" else None
        present = [tensor for tensor in (scale, *more) if tensor is not None]
        return (out, *present) if present else out


def dtype_of(op: str, parameter: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """The plan's dtype."""
    check_operand(op, parameter, tensor)
    if tensor.dtype is not dtype:
        refuse(op, parameter, f"has dtype {dtype_name(tensor.dtype)}", f"the plan is for {dtype_name(dtype)}")
