"""Decode over pages by our CUDA kernel: its contract, and lengths that share programs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import kernelhub
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel
from tests.contract.attention import PagedContract

pytestmark = pytest.mark.gpu

HALVES, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
LENGTHS: tuple[tuple[int, ...], ...] = (
    (1, 0, 15, 16, 17, 63, 64, 65, 127, 128, 129),
    (8191, 3, 0, 4097),
    (0, 0),
    (32001,),
    (700, 64) * 150,
)


class TestDecode(PagedContract):
    kernel = "cuda.paged_decode"
    widest = HALVES


@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 1, 64), (8, 4, 256)], ids=str)
@pytest.mark.parametrize("tokens", [None, 3])
@pytest.mark.parametrize("kv_dtype", [HALVES, FLOAT8], ids=["bfloat16", "float8"])
def test_decode_of_any_lengths(heads: tuple[int, int, int], tokens: int | None, kv_dtype: torch.dtype) -> None:
    """Few and many pages, sequences of none, shared by programs; always the same bits."""
    model = AttentionModel("any", heads[0], heads[1], heads[2], heads[2])
    for lengths in LENGTHS:
        arguments = paged_attention_inputs(
            model, seq_lens=[max(n, tokens or 0) for n in lengths], q_lens=tokens, kv_dtype=kv_dtype, device="cuda"
        )
        got, lse = kernelhub.paged_attention(**arguments, return_lse=True, backend="cuda.paged_decode")
        want, want_lse = kernelhub.paged_attention(**arguments, return_lse=True, backend="triton.split_kv")
        assert compare_out(got, want, largest_value(arguments)).ok
        assert compare_lse(lse, want_lse) <= lse_tolerance(got.dtype)
        for _ in range(10):
            again, again_lse = kernelhub.paged_attention(**arguments, return_lse=True, backend="cuda.paged_decode")
            assert torch.equal(again, got)
            assert torch.equal(again_lse, lse)


@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 1, 64), (8, 4, 256)], ids=str)
@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize("kv_dtype", [HALVES, FLOAT8], ids=["bfloat16", "float8"])
def test_ragged_steps_of_any_lengths(heads: tuple[int, int, int], most: int, kv_dtype: torch.dtype) -> None:
    """Some sequences without queries, others with up to the bound; rows of no sequence stay as they are."""
    model = AttentionModel("any", heads[0], heads[1], heads[2], heads[2])
    draw = random.Random(most)
    for lengths in LENGTHS:
        queries = [draw.randint(0, most) for _ in lengths]
        arguments = paged_attention_inputs(
            model, seq_lens=lengths, q_lens=queries, kv_dtype=kv_dtype, device="cuda"
        ) | {"max_seqlen_q": most}
        q, count = arguments["q"], sum(queries)
        arguments["q"] = torch.cat([q, q.new_full((5, *q.shape[1:]), torch.nan)])  # q may be empty
        out = torch.full_like(arguments["q"], torch.nan)
        got, lse = kernelhub.paged_attention(**arguments, out=out, return_lse=True, backend="cuda.paged_decode")
        want, want_lse = kernelhub.paged_attention.reference(**arguments, return_lse=True)
        assert out[count:].isnan().all()
        if not count:
            continue
        assert compare_out(got[:count], want[:count], largest_value(arguments)).ok
        assert compare_lse(lse[:, :count], want_lse[:, :count]) <= lse_tolerance(got.dtype)
        for _ in range(10):
            again = kernelhub.paged_attention(**arguments, return_lse=True, backend="cuda.paged_decode")
            assert torch.equal(again[0][:count], got[:count])
            assert torch.equal(again[1][:, :count], lse[:, :count])


@pytest.mark.parametrize("most", [1, 4])
def test_a_graph_reads_the_offsets_of_each_replay(most: int) -> None:
    """A captured ragged step is replayed with other lengths and other numbers of queries, none among them."""
    arguments: dict[str, Any] = paged_attention_inputs(
        "llama-3.1-8b", seq_lens=(4096,) * 4, q_lens=(most,) * 4, device="cuda"
    ) | {"max_seqlen_q": most}
    lengths, offsets = arguments["seq_lens"], arguments["cu_seqlens_q"]
    out = torch.empty_like(arguments["q"])
    call = lambda: kernelhub.paged_attention(**arguments, out=out, backend="cuda.paged_decode")  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for now, queries in (
        ((4096, 100, 0, 2000), (1, 0, most, 1)),
        ((1, 64, 0, 129), (most, most, most, most)),
        ((3000, 9, 0, 7), (0, 0, 0, 0)),
        ((3000, 9, 80, 7), (0, most, 0, 1)),
    ):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        offsets.copy_(torch.tensor([0, *queries]).cumsum(0).int())
        count = sum(queries)
        out.fill_(torch.nan)
        graph.replay()
        want = kernelhub.paged_attention.reference(**arguments)
        assert out[count:].isnan().all()
        assert not count or compare_out(out[:count], want[:count], largest_value(arguments)).ok


@pytest.mark.parametrize("window", [None, 127])
def test_a_graph_reads_the_lengths_of_each_replay(window: int | None) -> None:
    """A captured step is replayed with other lengths, which its programs share among themselves anew."""
    arguments: dict[str, Any] = paged_attention_inputs(
        "llama-3.1-8b", seq_lens=(4096, 4096, 4096, 4096), device="cuda"
    ) | {"window": window}
    lengths = arguments["seq_lens"]
    call = lambda: kernelhub.paged_attention(**arguments, backend="cuda.paged_decode")  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for now in ((4096, 100, 0, 2000), (1, 64, 0, 129), (3000, 0, 0, 7)):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        want = kernelhub.paged_attention(**arguments, backend="triton.split_kv")
        assert compare_out(got, want, largest_value(arguments)).ok
