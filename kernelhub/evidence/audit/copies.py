"""Copies of the operands and results of a launch, and the memory of the copies and of the recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernelhub.evidence.audit.launches import Read, Rows, Unpacked
from kernelhub.ops.case import Arguments

_WIDE = 8  # bytes of an element of a reference in float64
_WIDE_COPIES = 3  # of operands and results that a reference and its comparison hold at one time
_ATTENDING = ("attention", "paged_attention", "mla_attention")
_SCORES = 4  # matrices of scores that a reference of attention holds at one time
MOST_RECURRENT_TOKENS = 4096  # of `linear_attention`, whose reference processes them one by one


def copied(arguments: Arguments) -> Arguments:
    """Copies of the arguments; of large ones, only the rows that the call reads."""
    unpacked: dict[int, tuple[Tensor | None, ...]] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Unpacked):
            return _copy(value)
        if id(value.weight) not in unpacked:
            unpacked[id(value.weight)] = value.weight.unpack()
        return unpacked[id(value.weight)][value.place]

    return {name: copy(value) for name, value in arguments.items()}


def copied_results(read: Read) -> dict[str, Tensor]:
    """Copies of the results, in the shapes of the op."""
    made = {name: _copy(value) for name, value in read.results.items()}
    return {name: value.reshape(read.forms[name]) if name in read.forms else value for name, value in made.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Rows):
        return value.copied()
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, list):
        return [_copy(part) for part in value]
    return value


def tensors_of(arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    """Every tensor of arguments that are copies."""
    for value in arguments.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list):
            yield from (part for part in value if isinstance(part, Tensor))


def bytes_of_copies(read: Read) -> int:
    """Bytes of the copies of a launch."""
    return sum(map(_bytes, read.arguments.values())) + sum(map(_bytes, read.results.values()))


def _bytes(value: Any) -> int:
    if isinstance(value, (Rows, Unpacked)):
        return value.num_bytes
    if isinstance(value, Tensor):
        return value.numel() * value.itemsize
    return sum(map(_bytes, value)) if isinstance(value, list) else 0


def _elements(value: Any) -> int:
    if isinstance(value, Unpacked):
        return value.num_elements
    if isinstance(value, Rows):
        return value.num_bytes // value.source.itemsize
    if isinstance(value, Tensor):
        return value.numel() * (2 if value.dtype is torch.uint8 else 1)  # two codes a byte
    return sum(map(_elements, value)) if isinstance(value, list) else 0


def bytes_of_reference(op: str, read: Read) -> int:
    """Upper bound on the bytes of recomputing a launch by the op's reference, without the copies, from shapes alone."""
    arguments = read.arguments
    elements = sum(map(_elements, arguments.values())) + sum(map(_elements, read.results.values()))
    if op == "fused_moe":
        experts: int = max(arguments["w13"].shape[0], 1)
        weights = _elements(arguments["w13"]) + _elements(arguments["w2"])
        pairs: int = arguments["topk_ids"].numel()
        # One expert at a time, and three values of its width for each of its tokens.
        width: int = max(arguments["x"].shape[-1], 1)
        of_one: int = weights // experts
        return _WIDE * (_WIDE_COPIES * (elements - weights + 2 * of_one) + 4 * pairs * of_one // width)
    scores = 0
    if op in _ATTENDING:
        q = arguments["q"]
        queries, keys = _longest(arguments)
        scores = _SCORES * q.shape[-2] * queries * keys
        if op != "mla_attention":  # the heads of keys and values are repeated for the heads of queries
            elements += keys * q.shape[-2] * q.shape[-1] * 2
    elif op == "mqa_logits":
        scores = _WIDE_COPIES * arguments["q"].shape[0] * arguments["q"].shape[1] * arguments["k"].shape[0]
    elif op == "paged_mqa_logits":
        scores = _WIDE_COPIES * arguments["q"].shape[2] * read.results["out"].numel()  # type: ignore[union-attr]
    return _WIDE * (_WIDE_COPIES * elements + scores)


def _longest(arguments: Arguments) -> tuple[int, int]:
    """Upper bounds on the queries and keys of one sequence, from shapes alone."""
    q = arguments["q"]
    ragged = arguments.get("cu_seqlens_q") is not None
    queries = (arguments.get("max_seqlen_q") or q.shape[0]) if ragged else 1 if q.ndim == 3 else q.shape[1]
    if "k" in arguments:
        k = arguments["k"]
        return queries, (arguments.get("max_seqlen_k") or k.shape[0]) if ragged else k.shape[1]
    cache = arguments.get("k_cache", arguments.get("kv_cache"))
    assert isinstance(cache, Rows)
    assert cache.keep is not None
    return queries, arguments["block_table"].shape[1] * cache.keep.shape[1]


def takes_too_long(op: str, arguments: Arguments) -> bool:
    """Whether the reference of a call would delay its caller for seconds."""
    return op == "linear_attention" and arguments["q"].shape[:-2].numel() > MOST_RECURRENT_TOKENS
