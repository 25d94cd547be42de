"""How a call of `fp8_gemm` becomes a launch: its problem, its checks, its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import (
    alike,
    check_has_memory,
    check_is_tensor,
    check_wants_no_gradient,
    describe,
    dtype_name,
    usable,
)
from kernelhub.ops.formats import E4M3
from kernelhub.ops.gemm.fp8.problem import E8M0, FEW, FLOAT, FLOATS, MANY, Fp8GemmProblem
from kernelhub.ops.gemm.fp8.scaling import blocks, fits_b, scaling_of_form
from kernelhub.probes.device import facts_of

NAME = "fp8_gemm"
_FLOATS = tuple(getattr(torch, name) for name in FLOATS)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> Fp8GemmProblem:
    """The problem that a key means on a device; the key is built in `fp8_gemm`."""
    _, n, k, (a_dtype, rank, last), (b_dtype, b_shape), out_dtype, has_bias, many = key
    return Fp8GemmProblem(
        device=facts_of(device),
        scaling=str(scaling_of_form(a_dtype, rank, last, b_dtype, b_shape, n, k)),
        n=n,
        k=k,
        rows=MANY if many else FEW,
        out_dtype=dtype_name(out_dtype),
        a_scale_dtype=FLOAT if a_dtype is torch.float32 else E8M0,
        b_scale_dtype=FLOAT if b_dtype is torch.float32 else E8M0,
        bias=has_bias,
    )


def check(a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, out_dtype: Any, out: Any) -> None:
    """Everything that the contract says of a call."""
    operands = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}
    operands |= {name: value for name, value in (("bias", bias), ("out", out)) if value is not None}
    for parameter, tensor in operands.items():
        check_is_tensor(NAME, parameter, tensor)
    if out_dtype not in _FLOATS:
        refuse("out_dtype", f"is {out_dtype}", f"give torch.{', torch.'.join(FLOATS)}")
    for parameter, tensor, shape in (("a", a, "[M, K]"), ("b", b, "[N, K]")):
        if tensor.ndim != 2:
            refuse(parameter, f"has shape {list(tensor.shape)}", f"give {shape}")
        if tensor.dtype is not E4M3:
            refuse(parameter, f"has dtype {dtype_name(tensor.dtype)}", "give float8_e4m3fn")
    check_has_memory(NAME, "a", a)
    n, k = b.shape
    if 0 in (n, k):
        refuse("b", f"has shape {list(b.shape)}", "give at least one row and one column")
    if a.shape[1] != k:
        refuse("a", f"has {a.shape[1]} columns", f"b has {k}: give [M, {k}]")
    _check_scales(a, a_scale, b_scale, n, k)
    if bias is not None and (bias.shape != (n,) or bias.dtype is not out_dtype):
        refuse("bias", f"is {describe(bias)}", f"give {dtype_name(out_dtype)} [{n}]")
    if out is not None and (out.shape != (a.shape[0], n) or out.dtype is not out_dtype):
        refuse("out", f"is {describe(out)}", f"give {dtype_name(out_dtype)} {[a.shape[0], n]}")
    for parameter, tensor in operands.items():
        if tensor.device != a.device:
            refuse(parameter, f"is on {tensor.device}", f"move it to {a.device}, where a is")
        check_wants_no_gradient(NAME, parameter, tensor)


def form_of_a(scale: Tensor) -> tuple[torch.dtype, int, int]:
    """What a key holds of a_scale: nothing that depends on the number of rows, but whether there is one scale."""
    rank = scale.ndim
    return scale.dtype, rank, 1 if rank == 0 else scale.shape[1] if rank == 2 else int(scale.shape[0] == 1)


def _check_scales(a: Tensor, a_scale: Tensor, b_scale: Tensor, n: int, k: int) -> None:
    tokens = a.shape[0]
    if scaling_of_form(*form_of_a(a_scale), b_scale.dtype, b_scale.shape, n, k) is None:
        parameter, told = ("a_scale", a_scale) if fits_b(b_scale.dtype, b_scale.shape, n, k) else ("b_scale", b_scale)
        refuse(
            parameter,
            f"is {describe(told)}" + (f" beside a b_scale of {describe(b_scale)}" if told is a_scale else ""),
            f"for a [{tokens}, {k}] and b [{n}, {k}] give float32 [], [{tokens}] by float32 [], [{n}], or "
            f"[{tokens}, {blocks(k, 128)}] by [{blocks(n, 128)}, {blocks(k, 128)}] in float32 or float8_e8m0fnu, or "
            f"float8_e8m0fnu [{tokens}, {blocks(k, 32)}] by [{n}, {blocks(k, 32)}]",
        )
    if (a_scale.ndim == 2 or (a_scale.ndim == 1 and a_scale.shape[0] != 1)) and a_scale.shape[0] != tokens:
        legal = [tokens, *a_scale.shape[1:]]
        refuse("a_scale", f"is {describe(a_scale)}", f"a has {tokens} rows: give {legal}")


def bind(
    adapter: Any,
    problem: Fp8GemmProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch."""
    launch = adapter.launch
    n, k = problem.n, problem.k
    dtype = getattr(torch, problem.out_dtype)
    seen: set[Any] = set()  # forms of scales that the problem means: a few, whatever the number of rows

    def known(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor | None) -> bool:
        """Nothing that `check` or `check_form` would refuse."""
        if not usable(a, E4M3, device) or a.ndim != 2 or not alike(b, (n, k), E4M3, device):
            return False
        rows, columns = a.shape
        if not isinstance(a_scale, Tensor) or not isinstance(b_scale, Tensor):
            return False
        a_dtype, b_dtype, a_form = a_scale.dtype, b_scale.dtype, a_scale.shape
        if columns != k or not usable(a_scale, a_dtype, device) or not usable(b_scale, b_dtype, device):
            return False
        rank = len(a_form)
        last = 1 if rank == 0 else a_form[1] if rank == 2 else int(a_form[0] == 1)
        if (a_dtype, rank, last, b_dtype, b_scale.shape, bias is None) not in seen:
            return False
        if rank and a_form[0] != rows and (rank == 2 or a_form[0] != 1):
            return False
        return (bias is None or alike(bias, (n,), dtype, device)) and (
            out is None or alike(out, (rows, n), dtype, device)
        )

    def run(
        a: Tensor,
        b: Tensor,
        a_scale: Tensor,
        b_scale: Tensor,
        bias: Tensor | None,
        out: Tensor | None,
        checked: bool = False,
    ) -> Tensor:
        """`checked`: the call was checked, and this function made for it."""
        if a.get_device() != device:
            result: Tensor = elsewhere(a.get_device())(a, b, a_scale, b_scale, bias, out)
            return result
        if not known(a, b, a_scale, b_scale, bias, out):
            if not checked:
                check(a, b, a_scale, b_scale, bias, dtype, out)
                check_form(b, a_scale, b_scale, bias, problem)
            seen.add((*form_of_a(a_scale), b_scale.dtype, b_scale.shape, bias is None))
        if out is None:
            out = a.new_empty((a.shape[0], n), dtype=dtype)
        if out.shape[0]:
            tick()
            try:
                launch(a, b, a_scale, b_scale, bias, out)
            except Exception as error:
                failed(launch, error)
                raise
        return out

    return run


def check_form(b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, problem: Fp8GemmProblem) -> None:
    """Operands are those that the kernel was made for: a plan may be run with others than it was prepared for."""
    scaling = scaling_of_form(*form_of_a(a_scale), b_scale.dtype, b_scale.shape, *b.shape)
    dtypes = tuple(FLOAT if scale.dtype is torch.float32 else E8M0 for scale in (a_scale, b_scale))
    form = (scaling, *b.shape, bias is not None, *dtypes)
    wanted = (
        problem.scaling,
        problem.n,
        problem.k,
        problem.bias,
        problem.a_scale_dtype,
        problem.b_scale_dtype,
    )
    if form != wanted:
        text = f"a b of {[problem.n, problem.k]}, scaling {problem.scaling} ({', '.join(wanted[4:])})"
        told = f"is {describe(b)} with scales {describe(a_scale)} and {describe(b_scale)}"
        refuse("b", told, f"the plan is for {text}, {'with' if problem.bias else 'without'} bias")
