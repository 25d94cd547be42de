"""Operands of collectives on this process alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.ops.fused_quant.inputs import form_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_reduce_inputs(
    *,
    tokens: int = 64,
    hidden_size: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    group: ProcessGroup | str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `all_reduce`: by default 64 tokens of Llama 3.1 8B, in a group of this process alone.

    Args:
        tokens: rows.
        hidden_size: elements of a row.
        dtype: of x.
        device: where x is made.
        group: the group; by default one with this process as its only rank.
        seed: of the random numbers, which are the same for every device.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randn(tokens, hidden_size, generator=random, dtype=torch.float32, device="cpu").to(dtype).to(device)
    return {"x": x, "group": alone(x.device) if group is None else group}


def all_reduce_rms_norm_inputs(
    *,
    tokens: int = 64,
    hidden_size: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
    eps: float = 1e-5,
    format: str | None = None,
    device: torch.device | str = "cpu",
    group: ProcessGroup | str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `all_reduce_rms_norm`: by default 64 tokens of Llama 3.1 8B, in a group of this process alone.

    Args:
        tokens: rows.
        hidden_size: elements of a row.
        dtype: of x and residual.
        weight_dtype: of weight; by default `dtype`.
        eps, format: as of the op; a scale that the format is given is made.
        device: where the tensors are made.
        group: the group; by default one with this process as its only rank.
        seed: of the random numbers, which are the same for every device.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu").to(of).to(device)

    x, residual = normal(tokens, hidden_size), normal(tokens, hidden_size)
    weight = normal(hidden_size, of=weight_dtype or dtype)
    where = alone(x.device) if group is None else group
    return {"x": x, "residual": residual, "weight": weight, "eps": eps, "group": where, **form_of(format, device)}


def reduce_scatter_inputs(
    *,
    tokens: int = 64,
    hidden_size: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    group: ProcessGroup | str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `reduce_scatter`: as of `all_reduce_inputs`."""
    return all_reduce_inputs(tokens=tokens, hidden_size=hidden_size, dtype=dtype, device=device, group=group, seed=seed)


def all_gather_inputs(
    *,
    tokens: int = 64,
    hidden_size: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
    unequal: bool = False,
    device: torch.device | str = "cpu",
    group: ProcessGroup | str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `all_gather`: as of `all_reduce_inputs`; `unequal` gives `rows`, for a group of one rank."""
    floating = dtype.is_floating_point
    given = all_reduce_inputs(
        tokens=tokens,
        hidden_size=hidden_size,
        dtype=dtype if floating else torch.float32,
        device=device,
        group=group,
        seed=seed,
    )
    if not floating:
        given["x"] = (given["x"].abs() * 50).to(dtype)
    return given | ({"rows": (tokens,)} if unequal else {})


def alone(device: torch.device) -> str:
    """Name of a group of which this process is the only rank, with the usual backend of a device. Made at first use."""
    name: str = _group_of_one(device).group_name
    return name


@functools.cache  # torch's table of names does not keep a group
def _group_of_one(device: torch.device) -> ProcessGroup:
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    kind, backend, store = c10d.ProcessGroup.BackendType, torch.device(device.type), c10d.HashStore()
    group: Any = torch.distributed.ProcessGroup(store, 0, 1)
    if device.type == "cpu":
        group._register_backend(backend, kind.GLOO, c10d.ProcessGroupGloo(store, 0, 1))
        group._set_default_backend(kind.GLOO)
    else:
        group._register_backend(backend, kind.NCCL, c10d.ProcessGroupNCCL(store, 0, 1))
        group._set_default_backend(kind.NCCL)
    group._set_group_name(f"kernelhub.alone.{device}")
    c10d._register_process_group(group.group_name, group)
    made: ProcessGroup = group
    return made
