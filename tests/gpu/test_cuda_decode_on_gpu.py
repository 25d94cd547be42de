"""Decode of latent attention by our CUDA kernel: its contract, and lengths that share programs."""

from __future__ import annotations

import pytest
import torch

import kernelhub
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from tests.contract.mla_attention import MlaContract

pytestmark = pytest.mark.gpu


class TestDecode(MlaContract):
    kernel = "cuda.decode"
    widths = (512, 64)
    page_size = 64
    fewest_cases = 10


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("tokens", [None, 3])
def test_decode_of_any_lengths(heads: int, tokens: int | None) -> None:
    """Few and many pages, odd numbers of them, sequences of none, shared by programs; always the same bits."""
    for lengths in ((1, 0, 63, 64, 65, 127, 128, 129), (8191, 3, 0, 4097), (0, 0), (32001,), (700, 64) * 150):
        arguments = mla_attention_inputs(num_heads=heads, seq_lens=lengths, q_lens=tokens, device="cuda")
        got, lse = kernelhub.mla_attention(**arguments, return_lse=True, backend="cuda.decode")
        want, want_lse = kernelhub.mla_attention(**arguments, return_lse=True, backend="triton.split_kv")
        assert compare_out(got, want, 4.5).ok
        assert compare_lse(lse, want_lse) <= lse_tolerance(got.dtype)
        for _ in range(20):
            again, again_lse = kernelhub.mla_attention(**arguments, return_lse=True, backend="cuda.decode")
            assert torch.equal(again, got)
            assert torch.equal(again_lse, lse)


def test_a_graph_reads_the_lengths_of_each_replay() -> None:
    """A captured step is replayed with other lengths, which its programs share among themselves anew."""
    arguments = mla_attention_inputs(num_heads=128, seq_lens=(4096, 100, 0, 2000), device="cuda")
    lengths = arguments["seq_lens"]
    call = lambda: kernelhub.mla_attention(**arguments, backend="cuda.decode")  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    for now in ((4096, 100, 0, 2000), (1, 64, 0, 129), (3000, 0, 0, 7)):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        graph.replay()
        want = kernelhub.mla_attention(**arguments, backend="triton.split_kv")
        assert compare_out(got, want, 4.5).ok
