"""The op under torch.compile, torch.export and fake tensors; see `kernelhub.ops.attention.library`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.op import Backend
from kernelhub.ops.arguments import plain
from kernelhub.ops.operators import define, names_of


def merge_attention_states(
    outs: Sequence[Tensor] | Tensor,
    lses: Sequence[Tensor] | Tensor,
    out: Tensor | None = None,
    out_lse: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = None,
) -> Any:
    """`kernelhub.merge_attention_states` through its operator."""
    names = names_of(backend)
    states = (list(outs), list(lses))
    ops = torch.ops.kernelhub
    if out is None and out_lse is None:
        merged, lse = ops.merge_attention_states.default(*states, names)
    else:
        merged = states[0][0].new_empty(states[0][0].shape) if out is None else out
        lse = states[1][0].new_empty(states[1][0].shape) if out_lse is None else out_lse
        ops.merge_attention_states_out.default(*states, names, merged, lse)
    return (merged, lse) if return_lse or out_lse is not None else merged


def _functional(outs: list[Tensor], lses: list[Tensor], backend: list[str] | None) -> tuple[Tensor, Tensor]:
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states as eager

    merged, lse = eager(list(map(plain, outs)), list(map(plain, lses)), return_lse=True, backend=backend)
    return merged, lse


def _mutating(outs: list[Tensor], lses: list[Tensor], backend: list[str] | None, out: Tensor, out_lse: Tensor) -> None:
    from kernelhub.ops.merge.merge_attention_states import merge_attention_states as eager

    eager(list(map(plain, outs)), list(map(plain, lses)), out, out_lse, backend=backend)


def _fake(outs: list[Tensor], lses: list[Tensor], backend: list[str] | None) -> tuple[Tensor, Tensor]:
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


define("merge_attention_states(Tensor[] outs, Tensor[] lses, str[]? backend) -> (Tensor, Tensor)", _functional, _fake)
define(
    "merge_attention_states_out(Tensor[] outs, Tensor[] lses, str[]? backend, Tensor(a!) out, Tensor(b!) out_lse)"
    " -> ()",
    _mutating,
)
