"""Calls that differ in their sizes only have one key, so the table of plans does not grow with them."""

from __future__ import annotations

from typing import Any

import pytest

import kernelhub
from kernelhub.ops.indexer.inputs import logits_inputs, paged_logits_inputs, topk_inputs
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.models.shapes import IndexerModel, LinearModel

INDEXER = IndexerModel("small", 4, 16, 8)
LINEAR = LinearModel("small", 2, 16, 8)


def key(op: str, arguments: dict[str, Any]) -> Any:
    return getattr(kernelhub, op).op.parse(None, (), arguments).key


SAME = [
    ("mqa_logits", [logits_inputs(INDEXER, tokens=tokens, keys=keys) for tokens, keys in ((1, 1), (3, 90), (40, 41))]),
    (
        "paged_mqa_logits",
        [
            paged_logits_inputs(INDEXER, seq_lens=lengths, next_n=next_n, max_seq_len=columns, fused=fused)
            for lengths, next_n, columns, fused in (
                ((1,), 1, 5, True),
                ((70, 9), 3, 80, False),
                ((200,) * 5, 1, 300, True),
            )
        ],
    ),
    ("topk_indices", [topk_inputs(tokens=tokens, keys=keys, k=8) for tokens, keys in ((1, 1), (3, 90), (31, 4100))]),
    ("topk_indices", [topk_inputs(tokens=tokens, keys=keys, k=8) for tokens, keys in ((32, 1), (40, 4100))]),
    ("linear_attention", [linear_inputs(LINEAR, batch=batch, tokens=tokens) for batch, tokens in ((1, 2), (3, 90))]),
    ("linear_attention", [linear_inputs(LINEAR, batch=batch, tokens=1) for batch in (1, 9)]),
    ("linear_attention", [linear_inputs(LINEAR, lengths=lengths) for lengths in ((1,), (1, 1), (90, 0, 4))]),
]
OTHER = [
    ("mqa_logits", [logits_inputs(INDEXER), logits_inputs(INDEXER, k_scale=False), logits_inputs()]),
    (
        "paged_mqa_logits",
        [
            paged_logits_inputs(INDEXER),
            paged_logits_inputs(INDEXER, k_scale=False),
            paged_logits_inputs(INDEXER, page_size=16),
        ],
    ),
    ("topk_indices", [topk_inputs(k=8), topk_inputs(k=9), topk_inputs(k=8, ranges=False)]),
    (
        "linear_attention",
        [
            linear_inputs(LINEAR, tokens=1),
            linear_inputs(LINEAR, tokens=2),
            linear_inputs(LINEAR, tokens=2, state=True),
            linear_inputs(LINEAR, tokens=2, slots=(0,)),
            linear_inputs(LINEAR, lengths=(2,)),
            linear_inputs(LINEAR, tokens=2) | {"return_state": True},
        ],
    ),
]


@pytest.mark.parametrize(("op", "calls"), SAME)
def test_sizes_are_not_in_the_key(op: str, calls: list[dict[str, Any]]) -> None:
    assert len({key(op, arguments) for arguments in calls}) == 1


@pytest.mark.parametrize(("op", "calls"), OTHER)
def test_what_kernels_must_honour_is(op: str, calls: list[dict[str, Any]]) -> None:
    keys = [key(op, arguments) for arguments in calls]
    assert len(set(keys)) == len(calls)
    contract = getattr(kernelhub, op).op.contract
    assert len({contract.problem_of(one, -1) for one in keys}) == len(calls)
