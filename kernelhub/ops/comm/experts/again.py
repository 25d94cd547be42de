"""Dispatches into earlier results that come again, made with as little Python as that takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.autograd import forward_ad

from kernelhub.dispatch.lost import failed
from kernelhub.dispatch.whole_calls import WATCHED
from kernelhub.ops.comm.experts.problem import TOKENS
from kernelhub.ops.comm.experts.received import Dispatched, Handle
from kernelhub.ops.comm.experts.results import Results

_PARTS = len(Handle._fields)


def into_earlier(
    launch: Callable[[tuple[Any, ...]], int],
    of_adapter: Any,
    results: Results,
    group: Any,
    num_experts: int,
    format: str,
    max_tokens: int | None,
) -> Callable[..., bool]:
    """What makes a call like one that was made into an earlier result, with nothing looked up.

    It takes the arguments of a call that has `out`, and returns whether it made the call. What it compares itself are
    the values; `launch` compares all that is to be known of tensors, and where the launches may be made.

    Args:
        launch, of_adapter: as of `KnownCalls.launcher`; given ``x, topk_ids, topk_weights, scales`` and then the
            tensors of the result, as of `places_of`.
        results: of such calls.
        group, num_experts, format, max_tokens: of the call.
    """
    of, experts, form, most = weakref.ref(group), num_experts, format, max_tokens
    numbers, splits, sent, state = results.shared
    by_token = format == TOKENS
    known = getattr(launch, "__self__", None)

    def again(
        x: Any,
        topk_ids: Any,
        topk_weights: Any,
        group: Any,
        num_experts: Any,
        scales: Any,
        format: Any,
        max_tokens: Any,
        out: Any,
    ) -> bool:
        if num_experts is not experts and (type(num_experts) is not int or num_experts != experts):
            return False
        if max_tokens is not most and (type(max_tokens) is not int or max_tokens != most):
            return False
        if format is not form and (type(format) is not str or format != form):
            return False
        if of() is not group or type(out) is not Dispatched or forward_ad._current_level >= 0:
            return False
        parts: Any = out
        rows, of_rows, ids, weights, counts, offsets, handle = parts
        if type(handle) is not list or len(handle) != _PARTS:
            return False
        if not by_token:
            if ids is not None or weights is not None:
                return False
            _, _, ids, weights, _, _, _ = handle
        given = (x, topk_ids, topk_weights, scales, rows, of_rows, counts, offsets, ids, weights)
        try:
            launched = launch(given) == 2
        except Exception as error:
            failed(of_adapter, error)
            raise
        if not launched:
            return False
        if WATCHED.launched is not None:
            WATCHED.launched.append((of_adapter, known, given))
        handle[:] = (numbers, topk_ids, ids, weights, splits, sent, state)
        return True

    return again
