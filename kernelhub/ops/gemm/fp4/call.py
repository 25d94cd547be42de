"""How a call of `fp4_gemm` becomes a launch: its problem, its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.ops.arguments import Forms
from kernelhub.ops.formats import E8M0
from kernelhub.ops.gemm.fp4.adapter import Activations, Weights
from kernelhub.ops.gemm.fp4.operands import NAME, a_format_of, check, fp4_format_of, refuse
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.ops.operands import check_loose, check_own_memory, transformed
from kernelhub.ops.packed import PackedWeight, layout_of
from kernelhub.probes.device import facts_of

_READ = ("a", "a_scale", "b_scale", "a_global_scale", "b_global_scale", "bias")
_LOOSE = ("a", "a_scale", "bias")


def key_of(
    a: Tensor, b: Tensor | PackedWeight, a_scale: Tensor | None, b_scale: Tensor | None, bias: Any, out_dtype: Any
) -> Any:
    """The key of a call. Whatever is wrong with the arguments, `check` says."""
    if isinstance(b, PackedWeight):
        b_format: str = b.facts["format"]
    else:
        b_format = fp4_format_of(b_scale)
    n, half = b.shape
    return a_format_of(a, a_scale), b_format, str(out_dtype)[6:], n, 2 * half, layout_of(b), bias is not None


def with_layout(key: Any, layout: str) -> Any:
    """The key of the same call with a weight of another layout."""
    return (*key[:5], layout, *key[6:])


def problem_of(key: Any, device: int) -> Fp4GemmProblem:
    """The problem that a key means on a device."""
    where = facts_of(device)
    return Fp4GemmProblem(where, *key)


def bind(
    adapter: Any,
    problem: Fp4GemmProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch.

    That the operands are of the problem's form is known of a call by its key; a plan sees to it by itself.
    """
    launch, out_dtype = adapter.launch, getattr(torch, problem.out_dtype)
    forms, n = Forms(device), problem.n

    def run(
        a: Tensor,
        b: Tensor | PackedWeight,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        a_global_scale: Tensor | None,
        b_global_scale: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None,
        checked: bool = False,
    ) -> Tensor:
        """`checked`: the call was checked."""
        if a.get_device() != device:
            result: Tensor = elsewhere(a.get_device())(
                a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out
            )
            return result
        rest = (a, a_scale, b_scale, a_global_scale, b_global_scale, bias, out)
        if isinstance(b, PackedWeight):
            form = forms.of((*rest, *b.tensors.values()), b.op, b.layout, b.shape, b.facts["format"])
        else:
            form = forms.of((*rest, b))
        if form is None or form not in forms or transformed():
            if not checked:
                check(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out)
            forms.add(form)
        else:
            check_loose(NAME, _LOOSE, (a, a_scale, bias))
            for factor in (a_scale, a_global_scale, b_global_scale, bias if n == 1 else None):
                if factor is not None and factor.is_neg():
                    check(a, b, a_scale, b_scale, a_global_scale, b_global_scale, bias, out_dtype, out)
            if out is not None:
                _check_out(out, rest[:-1], b)
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()  # kernels read it element after element
        if out is None:
            out = a.new_empty((*a.shape[:-1], n), dtype=out_dtype)
        if out.numel():
            rows = out if out.ndim == 2 else _rows_of(out)
            tick()
            try:
                launch(_activations(a, a_scale, a_global_scale), _weights(b, b_scale, b_global_scale), bias, rows)
            except Exception as error:
                failed(launch, error)
                raise
        return out

    return run


def _check_out(out: Tensor, operands: tuple[Tensor | None, ...], b: Tensor | PackedWeight) -> None:
    weight = tuple(b.tensors.values()) if isinstance(b, PackedWeight) else (b,)
    check_own_memory(NAME, "out", out, (*_READ, *("b",) * len(weight)), (*operands, *weight))


def _activations(a: Tensor, scale: Tensor | None, global_scale: Tensor | None) -> Activations:
    if a.dtype is torch.float4_e2m1fn_x2:
        a = a.view(torch.uint8)
    if scale is not None:
        if scale.dtype is torch.float32:
            scale = scale.reshape(-1, 1)
        else:
            scale = _exponents(scale)
            scale = scale if scale.ndim == 2 else scale.reshape(-1, scale.shape[-1])
    return Activations(a if a.ndim == 2 else a.reshape(-1, a.shape[-1]), scale, global_scale)


def _weights(b: Tensor | PackedWeight, scale: Tensor | None, global_scale: Tensor | None) -> Weights:
    codes: Tensor | None
    if isinstance(b, PackedWeight):
        codes, scale, global_scale = b.tensors["codes"], b.tensors["scale"], b.tensors["global_scale"]
    else:
        codes = b
    assert codes is not None
    assert scale is not None
    return Weights(codes if codes.dtype is torch.uint8 else codes.view(torch.uint8), _exponents(scale), global_scale)


def _exponents(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.dtype is E8M0 else scale


def _rows_of(out: Tensor) -> Tensor:
    try:
        return out.view(-1, out.shape[-1])
    except RuntimeError:
        refuse("out", f"has strides {list(out.stride())}", "give memory whose rows are evenly spaced")


def form_of(problem: Fp4GemmProblem) -> Any:
    """The key whose problem it is."""
    layout = problem.weight_layout
    return problem.a_format, problem.b_format, problem.out_dtype, problem.n, problem.k, layout, problem.bias


def refuse_form(problem: Fp4GemmProblem, a: Tensor, b: Any, a_scale: Any, b_scale: Any, bias: Any) -> NoReturn:
    """A plan was run with other operands than it was prepared for."""
    if layout_of(b) != problem.weight_layout:
        fix = f"the plan is for {problem.weight_layout}; give what its pack() gives, or prepare one with this weight"
        refuse("b", f"is laid out as {layout_of(b)}", fix)
    if (bias is not None) != problem.bias:
        refuse("bias", f"is {'missing' if problem.bias else 'given'}", "prepare a plan for that")
    if a_format_of(a, a_scale) != problem.a_format:
        refuse("a", f"is {a_format_of(a, a_scale)}", f"the plan is for {problem.a_format}")
    form = b.facts["format"] if isinstance(b, PackedWeight) else fp4_format_of(b_scale)
    wanted = f"{problem.b_format} [{problem.n}, {problem.k} / 2]"
    refuse("b", f"is {form} {list(b.shape)}", f"the plan is for {wanted}")
