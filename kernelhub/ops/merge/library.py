"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.formats import E4M3
from kernelhub.ops.operators import define, names_of


def merge_attention_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    out: Tensor | None = None,
    out_lse: Tensor | None = None,
    return_lse: bool = False,
    out_scale: float | Tensor | None = None,
    backend: Backend = None,
) -> Any:
    """`kernelhub.merge_attention_states` through its operator."""
    names = names_of(backend)
    states = (list(outs), list(lses))
    scales = (None, out_scale) if isinstance(out_scale, Tensor) else (out_scale, None)
    ops = torch.ops.kernelhub
    if out is None and out_lse is None:
        merged, lse = ops.merge_attention_states.default(*states, *scales, names)
    else:
        merged = states[0][0].new_empty(states[0][0].shape, dtype=_dtype(states[0], *scales)) if out is None else out
        lse = states[1][0].new_empty(states[1][0].shape) if out_lse is None else out_lse
        ops.merge_attention_states_out.default(*states, *scales, names, merged, lse)
    return (merged, lse) if return_lse or out_lse is not None else merged


def _functional(
    outs: list[Tensor], lses: list[Tensor], value: float | None, scale: Tensor | None, backend: list[str] | None
) -> tuple[Tensor, Tensor]:
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states as eager

    given = value if scale is None else plain(scale)
    merged, lse = eager(
        list(map(plain, outs)), list(map(plain, lses)), return_lse=True, out_scale=given, backend=backend
    )
    return merged, lse


def _mutating(
    outs: list[Tensor],
    lses: list[Tensor],
    value: float | None,
    scale: Tensor | None,
    backend: list[str] | None,
    out: Tensor,
    out_lse: Tensor,
) -> None:
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states as eager

    given = value if scale is None else plain(scale)
    eager(list(map(plain, outs)), list(map(plain, lses)), out, out_lse, out_scale=given, backend=backend)


def _fake(
    outs: list[Tensor], lses: list[Tensor], value: float | None, scale: Tensor | None, backend: list[str] | None
) -> tuple[Tensor, Tensor]:
    merged = outs[0].new_empty(outs[0].shape, dtype=_dtype(outs, value, scale))
    return merged, lses[0].new_empty(lses[0].shape)


def _dtype(outs: list[Tensor], value: float | None, scale: Tensor | None) -> torch.dtype:
    return outs[0].dtype if value is None and scale is None else E4M3


_STATES = "Tensor[] outs, Tensor[] lses, float? out_scale_value, Tensor? out_scale, str[]? backend"
define(f"merge_attention_states({_STATES}) -> (Tensor, Tensor)", _functional, _fake)
define(f"merge_attention_states_out({_STATES}, Tensor(a!) out, Tensor(b!) out_lse) -> ()", _mutating)
