"""`moe_dispatch` under torch.compile: one operator whose results are the tensors of a `Dispatched`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernelhub.ops.arguments import refuse
from kernelhub.ops.comm.experts.checks import check_like
from kernelhub.ops.comm.experts.problem import CONTIGUOUS, MASKED, TOKENS
from kernelhub.ops.comm.experts.received import Dispatched, Handle, Header
from kernelhub.ops.comm.experts.results import renew
from kernelhub.ops.comm.group import resolved
from kernelhub.ops.operators import Traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PARTS = Dispatched._fields[:-1]
# Not the names themselves, some of which are parameters.
_RESULTS = (*(f"received_{part}" for part in _PARTS), *(f"handle_{part}" for part in Handle._fields))
_OUT = "out"  # is no part of the operator, whose results are copied there
_OPTIONAL = ("scales", "topk_ids", "topk_weights", "offsets")  # where they are missing, of float64


class TracedDispatch:
    """Replaces `moe_dispatch` in traced code. Only with `max_tokens` do its shapes not depend on values."""

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Define the operator, and return what takes the place of the function."""

        signature = inspect.signature(function)
        rest = [one for name, one in signature.parameters.items() if name != _OUT]
        at = list(signature.parameters).index(_OUT)

        @functools.wraps(function)
        def flat(*args: Any, **named: Any) -> tuple[Tensor, ...]:
            sent = function(*args, **named)
            if sent.handle[-1].numel():  # of a size that no graph knows
                fix = "select another kernel, or call outside of torch.compile"
                refuse("moe_dispatch", "backend", "is of a kernel whose handles have state", fix)
            parts = [_missing(sent.x) if part is None else part for part in sent[:-1]]
            return (*parts, *(part.clone() for part in sent.handle))

        flat.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        operator = Traced(_memory, _RESULTS).of(flat)

        def traced(*args: Any, **named: Any) -> Dispatched:
            out = args[at] if len(args) > at else named.pop(_OUT, None)
            results = operator(*args[:at], *args[at + 1 :], **named)
            parts = dict(zip(_PARTS, results[: len(_PARTS)], strict=True))
            for name in _OPTIONAL:
                if parts[name].dtype is torch.float64:
                    parts[name] = None
            sent = Dispatched(**parts, handle=list(results[len(_PARTS) :]))
            if out is None:
                return sent
            check_like(out, sent, _format_of(sent))
            return renew(out, sent)

        traced.__name__ = traced.__qualname__ = function.__name__
        traced.__signature__ = signature  # type: ignore[attr-defined]
        return traced


def _format_of(sent: Dispatched) -> str:
    """`Dispatched.format`, which Dynamo does not look up."""
    return TOKENS if sent.topk_ids is not None else CONTIGUOUS if sent.offsets is not None else MASKED


def _missing(x: Tensor) -> Tensor:
    """In place of a result that a format does not have."""
    return x.new_empty(0, dtype=torch.float64)


def _memory(
    x: Tensor,
    topk_ids: Tensor,
    group: ProcessGroup | str,
    num_experts: int,
    scales: Tensor | None,
    format: str,
    max_tokens: int | None,
    **others: Any,
) -> dict[str, Tensor]:
    if max_tokens is None:
        fix = "give the most tokens of a rank, or call outside of torch.compile: exact shapes depend on values"
        refuse("moe_dispatch", "max_tokens", "is None", fix)
    size = resolved("moe_dispatch", group).size()
    local, top_k = num_experts // size, topk_ids.shape[1]
    received = size * max_tokens
    counts = x.new_empty(local, dtype=torch.int32)
    per_token = {
        "received_topk_ids": x.new_empty((received, top_k), dtype=torch.int32),
        "received_topk_weights": x.new_empty((received, top_k), dtype=torch.float32),
    }
    form: tuple[Any, ...] = (local, received)
    if format == TOKENS:
        form = (received,)
    elif format == CONTIGUOUS:
        form = (received * min(top_k, local),)
    return {
        "received_x": x.new_empty((*form, x.shape[1])),
        "received_scales": _missing(x) if scales is None else scales.new_empty((*form, scales.shape[1])),
        **(per_token if format == TOKENS else {name: _missing(x) for name in per_token}),
        "received_counts": counts,
        "received_offsets": torch.empty_like(counts) if format == CONTIGUOUS else _missing(x),
        "handle_header": torch.empty(len(Header._fields), dtype=torch.int64, device="cpu"),
        "handle_topk_ids": topk_ids.new_empty(topk_ids.shape),
        "handle_slots": x.new_empty((received, top_k), dtype=torch.int32),
        "handle_weights": x.new_empty((received, top_k), dtype=torch.float32),
        "handle_splits": torch.empty(0, dtype=torch.int64, device="cpu"),
        "handle_sent": x.new_empty(0, dtype=torch.int64),
        "handle_state": x.new_empty(0, dtype=torch.int32),
    }
