"""How a call of `fp8_gemm` becomes a launch: its problem, its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.lost import failed
from kernelhub.ops.arguments import Forms, alike, dtype_name, usable
from kernelhub.ops.formats import E4M3, E5M2
from kernelhub.ops.gemm.fp8.checks import NAME, check, check_form, form_of_a, refuse
from kernelhub.ops.gemm.fp8.problem import BLOCK, E8M0, FEW, FLOAT, GROUP, MANY, ROW, TENSOR, Fp8GemmProblem
from kernelhub.ops.gemm.fp8.scaling import by_rows, of_rows, scaling_of_form
from kernelhub.ops.operands import check_loose, check_own_memory, transformed
from kernelhub.ops.packed import PackedWeight
from kernelhub.probes.device import facts_of

_VECTORS = ("a_scale", "b_scale", "bias")
_READ = ("a", "b", *_VECTORS)


def problem_of(key: Any, device: int) -> Fp8GemmProblem:
    """The problem that a key means on a device; the key is built in `fp8_gemm`."""
    of_a, n, k, (a_dtype, rank, last), (b_dtype, b_shape), out_dtype, has_bias, many, layout = key
    return Fp8GemmProblem(
        device=facts_of(device),
        scaling=str(scaling_of_form(a_dtype, rank, last, b_dtype, b_shape, n, k)),
        n=n,
        k=k,
        rows=MANY if many else FEW,
        out_dtype=dtype_name(out_dtype),
        a_scale_dtype=FLOAT if a_dtype in (None, torch.float32) else E8M0,
        b_scale_dtype=FLOAT if b_dtype is torch.float32 else E8M0,
        weight_layout=layout,
        weight_only=None if of_a in (E4M3, E5M2) else dtype_name(of_a),
        e5m2=of_a is E5M2,
        bias=has_bias,
    )


def with_layout(key: Any, layout: str) -> Any:
    """The key of the same call with a weight of another layout."""
    return (*key[:-1], layout)


def bind(
    adapter: Any,
    problem: Fp8GemmProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the checks, the destination, the launch."""
    if problem.weight_only is not None:
        return _bind_weights(adapter, problem, device, tick, elsewhere)
    launch = adapter.launch
    n, k = problem.n, problem.k
    dtype = getattr(torch, problem.out_dtype)
    of_a = E5M2 if problem.e5m2 else E4M3
    flat = problem.scaling in (TENSOR, ROW)
    single = flat or k <= GROUP[BLOCK]  # then scales may have one element, contiguous whatever they are a view of
    seen: set[Any] = set()  # forms of scales that the problem means: a few, whatever the number of rows

    def known(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, out: Tensor | None) -> bool:
        """Nothing that `check` or `check_form` would refuse."""
        if not usable(a, of_a, device) or a.ndim != 2 or not alike(b, (n, k), E4M3, device):
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
        if transformed() or not known(a, b, a_scale, b_scale, bias, out):
            a_scale = of_rows(a, a_scale)
            if not checked:
                check(a, b, a_scale, b_scale, bias, dtype, out)
                if a.dtype is not of_a:
                    refuse("a", f"has dtype {dtype_name(a.dtype)}", f"the plan is for {dtype_name(of_a)}")
                check_form(b, a_scale, b_scale, bias, problem)
            seen.add((*form_of_a(a_scale), b_scale.dtype, b_scale.shape, bias is None))
        else:
            check_loose(NAME, _VECTORS, (a_scale, b_scale, bias))
            if single and (a_scale.is_neg() or b_scale.is_neg()):
                check(a, b, a_scale, b_scale, bias, dtype, out)
            if n == 1 and bias is not None and bias.is_neg():
                check(a, b, a_scale, b_scale, bias, dtype, out)
            if out is not None:
                check_own_memory(NAME, "out", out, _READ, (a, b, a_scale, b_scale, bias))
        if flat and b_scale.ndim == 2:
            b_scale = by_rows(b_scale, problem.scaling)
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


def _bind_weights(
    adapter: Any,
    problem: Fp8GemmProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The same of activations that are not quantised."""
    launch, n = adapter.launch_weights, problem.n
    dtype, of_a = getattr(torch, problem.out_dtype), getattr(torch, str(problem.weight_only))
    forms = Forms(device)

    def run(
        a: Tensor,
        b: Tensor | PackedWeight,
        a_scale: Tensor | None,
        b_scale: Tensor | None,
        bias: Tensor | None,
        out: Tensor | None,
        checked: bool = False,
    ) -> Tensor:
        """`checked` is as above."""
        if a.get_device() != device:
            result: Tensor = elsewhere(a.get_device())(a, b, a_scale, b_scale, bias, out)
            return result
        given: tuple[Any, ...] = (b, b_scale)
        about: tuple[Any, ...] = ()
        if isinstance(b, PackedWeight):
            given, about = tuple(b.tensors.values()), (b.op, b.layout, b.shape, b.facts["scale"])
        form = forms.of((a, *given, a_scale, bias, out), b_scale is None, *about)
        if form is None or form not in forms or transformed():
            if not checked:
                check(a, b, a_scale, b_scale, bias, dtype, out)
                if a.dtype is not of_a:
                    refuse("a", f"has dtype {dtype_name(a.dtype)}", f"the plan is for {problem.weight_only}")
                check_form(b, a_scale, b_scale, bias, problem)
            forms.add(form)
        else:
            check_loose(NAME, ("a", "b_scale", "bias"), (a, b_scale, bias))
            for factor in (b_scale, a if problem.k == 1 else None, bias if n == 1 else None):
                if factor is not None and factor.is_neg():
                    check(a, b, a_scale, b_scale, bias, dtype, out)
            if out is not None:
                check_own_memory(NAME, "out", out, ("a", "bias", *("b",) * len(given)), (a, bias, *given))
        if b_scale is not None and b_scale.ndim == 2:
            given = (b, by_rows(b_scale, problem.scaling))
        if out is None:
            out = a.new_empty((a.shape[0], n), dtype=dtype)
        if out.shape[0]:
            tick()
            try:
                launch(a, *given, bias, out)
            except Exception as error:
                failed(launch, error)
                raise
        return out

    return run
