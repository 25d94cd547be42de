"""How a call of `merge_attention_states` becomes a launch: its problem, its checks, its run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, is_grad_enabled

from kernelhub.dispatch.lost import failed
from kernelhub.errors import InvalidArgument
from kernelhub.ops.arguments import alike, describe, dtype_name, lse_shape
from kernelhub.ops.merge.problem import MANY, TWO, MergeProblem
from kernelhub.probes.device import facts_of

NAME = "merge_attention_states"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def refuse(parameter: str, problem: str, fix: str) -> NoReturn:
    """Raise the error that names the parameter."""
    raise InvalidArgument(NAME, parameter, problem, fix)


def problem_of(key: Any, device: int) -> MergeProblem:
    """The problem that a key means on a device; the key is built in `merge_attention_states`."""
    dtype, heads, width, parts, rank, returns_lse = key
    return MergeProblem(
        device=facts_of(device),
        dtype=dtype_name(dtype),
        num_heads=heads,
        head_dim=width,
        parts=TWO if parts == 2 else MANY,
        batched=rank == 4,
        lse=returns_lse,
    )


def check(outs: Any, lses: Any) -> None:
    """The states themselves, whatever is wrong with them."""
    for parameter, tensors in (("outs", outs), ("lses", lses)):
        if not isinstance(tensors, list | tuple | Tensor):
            refuse(parameter, f"is {type(tensors).__name__}", "give tensors in a list, or one stacked tensor")
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                refuse(parameter, f"holds {type(tensor).__name__} at {index}", "give torch.Tensors")
    if len(outs) < 2:
        refuse("outs", f"holds {len(outs)} states", "there is nothing to merge below two")
    if len(lses) != len(outs):
        refuse("lses", f"holds {len(lses)}", f"outs holds {len(outs)}")
    first = outs[0]
    if first.ndim not in (3, 4):
        refuse("outs", f"holds shape {list(first.shape)}", "give [T, H, D] or [B, S, H, D]")
    if first.dtype not in _FLOATS:
        refuse("outs", f"holds dtype {dtype_name(first.dtype)}", "give float32, float16 or bfloat16")
    if first.is_meta:
        refuse("outs", "holds tensors on meta", "give tensors with memory, or fake ones under torch.compile")
    wanted = lse_shape(first.shape)
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first.shape or out.dtype is not first.dtype:
            refuse("outs", f"holds {describe(out)} at {index}", f"the first is {describe(first)}")
        if lse.shape != wanted or lse.dtype is not torch.float32:
            refuse("lses", f"holds {describe(lse)} at {index}", f"give float32 {list(wanted)}")
        for parameter, tensor in (("outs", out), ("lses", lse)):
            if tensor.device != first.device:
                refuse(parameter, f"holds one on {tensor.device} at {index}", f"move it to {first.device}")
            if tensor.requires_grad and is_grad_enabled():
                refuse(parameter, f"requires grad at {index}", "kernels are for inference; call under torch.no_grad()")


def check_form(first: Tensor, parts: int, problem: MergeProblem) -> None:
    """States are those that the kernel was made for: a plan may be run with others than it was prepared for."""
    form = (dtype_name(first.dtype), first.shape[-2], first.shape[-1], first.ndim == 4, TWO if parts == 2 else MANY)
    wanted = (problem.dtype, problem.num_heads, problem.head_dim, problem.batched, problem.parts)
    if form != wanted:
        shape = f"{'[B, S' if problem.batched else '[T'}, {problem.num_heads}, {problem.head_dim}]"
        refuse(
            "outs",
            f"holds {parts} states of {describe(first)}",
            f"the plan is for {problem.parts} of {problem.dtype} {shape}",
        )


def check_destination(parameter: str, given: Tensor, like: Tensor) -> None:
    """A destination of the shape, dtype and device of the parts."""
    if given.shape != like.shape or given.dtype is not like.dtype:
        refuse(parameter, f"is {describe(given)}", f"give {describe(like)}")
    if given.device != like.device:
        refuse(parameter, f"is on {given.device}", f"move it to {like.device}")


def bind(
    adapter: Any,
    problem: MergeProblem,
    device: int,
    tick: Callable[[], int],
    elsewhere: Callable[[int], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that a call runs: the destinations, the launch."""
    launch = adapter.launch
    ndim, two = 4 if problem.batched else 3, problem.parts == TWO
    num_heads, head_dim = problem.num_heads, problem.head_dim
    returns_lse, dtype, float32 = problem.lse, getattr(torch, problem.dtype), torch.float32

    def known(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> bool:
        """Nothing that `check` or `check_form` would refuse."""
        shape, count = outs[0].shape, len(outs)
        if len(shape) != ndim or shape[-2] != num_heads or shape[-1] != head_dim or (count == 2) is not two:
            return False
        if type(outs) is not type(lses) or len(lses) != count:
            return False
        wanted = (num_heads, shape[0]) if ndim == 3 else (shape[0], num_heads, shape[1])
        for tensor in outs:
            if not alike(tensor, shape, dtype, device):
                return False
        for tensor in lses:  # noqa: SIM110 - a generator costs more than all of this
            if not alike(tensor, wanted, float32, device):
                return False
        return True

    def run(outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor | None, out_lse: Tensor | None) -> Any:
        first = outs[0]
        if first.get_device() != device:
            return elsewhere(first.get_device())(outs, lses, out, out_lse)
        if not known(outs, lses):
            check(outs, lses)
            check_form(first, len(outs), problem)
        if out is None:
            out = torch.empty_like(first, memory_format=torch.contiguous_format)
        elif not alike(out, first.shape, dtype, device):
            check_destination("out", out, first)
        if out_lse is not None:
            if not returns_lse:
                refuse("out_lse", "is given to a plan without LSE", "prepare it with return_lse=True")
            check_destination("out_lse", out_lse, lses[0])
        elif returns_lse:
            out_lse = torch.empty_like(lses[0], memory_format=torch.contiguous_format)
        if out.numel():
            tick()
            try:
                launch(outs, lses, out, out_lse)
            except Exception as error:
                failed(launch, error)
                raise
        return out if out_lse is None else (out, out_lse)

    return run
