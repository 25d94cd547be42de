"""The C++ kernels of attention keep the contracts of their ops on this CPU."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kernelhub
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.probes.device import facts_of
from kernelhub.probes.toolchain import cxx_compiler
from tests.contract.attention import DenseContract, PagedContract
from tests.contract.mla_attention import MlaContract

pytestmark = pytest.mark.skipif(not cxx_compiler().ok, reason="no C++ compiler here: all cases of cpp.split_kv")


class TestDense(DenseContract):
    kernel = "cpp.split_kv"
    device = "cpu"


class TestPaged(PagedContract):
    kernel = "cpp.split_kv"
    device = "cpu"


class TestLatent(MlaContract):
    fewest_cases = 40
    kernel = "cpp.split_kv"
    device = "cpu"


AMX = facts_of(-1).arch == "amx"
needs_amx = pytest.mark.skipif(not AMX, reason="this CPU has no AMX: all cases of cpp.amx")


@needs_amx
class TestDenseByAmx(DenseContract):
    kernel = "cpp.amx"
    device = "cpu"


@needs_amx
class TestPagedByAmx(PagedContract):
    kernel = "cpp.amx"
    device = "cpu"
    model = AttentionModel("groups of eight", 16, 2, 64, 64)  # smaller groups are refused in decode


@needs_amx
class TestLatentByAmx(MlaContract):
    fewest_cases = 20
    kernel = "cpp.amx"
    device = "cpu"


DOTS = facts_of(-1).arch == "avx512_bf16"
needs_dots = pytest.mark.skipif(not DOTS, reason="this CPU has no AVX-512 BF16, or AMX: all cases of cpp.avx512_bf16")


@needs_dots
class TestDenseByDots(DenseContract):
    kernel = "cpp.avx512_bf16"
    device = "cpu"


@needs_dots
class TestPagedByDots(PagedContract):
    kernel = "cpp.avx512_bf16"
    device = "cpu"
    model = AttentionModel("groups of twelve", 24, 2, 64, 64)  # smaller groups are refused in decode


@needs_dots
class TestLatentByDots(MlaContract):
    fewest_cases = 20
    kernel = "cpp.avx512_bf16"
    device = "cpu"


@pytest.mark.parametrize(
    "kernel",
    [
        "cpp.split_kv",
        pytest.param("cpp.avx512_bf16", marks=needs_dots),
        pytest.param("cpp.amx", marks=needs_amx),
    ],
)
@pytest.mark.parametrize("largest", [3e9, 1e32, 1e37])
def test_scores_far_apart_choose_one_key(kernel: str, largest: float) -> None:
    """Scores whose rounding errors are larger than any exponent that a weight may have."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 12, 64, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k = ((x * (largest / 24) ** 0.5).bfloat16() for x in (q, k))
    got = kernelhub.attention(q, k, v.bfloat16(), causal=True, scale=1.0, backend=kernel)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double())
    first = scores.masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf).topk(2)
    want = v.bfloat16().transpose(1, 2).gather(2, first.indices[..., :1].expand(-1, -1, -1, 64)).transpose(1, 2)
    clear = (first.values[..., 0] - first.values[..., 1] > 1e-3 * first.values[..., 0].abs()).transpose(1, 2)
    assert clear.float().mean() > 0.9
    assert torch.equal(got[clear], want[clear])


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    """OpenMP's would be waited for without end."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        arguments = paged_attention_inputs("llama-3.1-8b", seq_lens=(40, 30))
        want = kernelhub.paged_attention(**arguments, backend="cpp.split_kv")
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            same = torch.equal(kernelhub.paged_attention(**arguments, backend="cpp.split_kv"), want)
            os._exit(0 if same else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        torch.set_num_threads(before)


def test_calls_of_several_threads_do_not_disturb_each_other() -> None:
    """Each with a scale of its own."""
    arguments = paged_attention_inputs("llama-3.1-8b", seq_lens=(200, 100))
    scales = [0.01 * i for i in range(1, 5)]
    want = [kernelhub.paged_attention(**arguments, scale=scale, backend="cpp.split_kv") for scale in scales]

    def call(i: int) -> bool:
        got = kernelhub.paged_attention(**arguments, scale=scales[i % 4], backend="cpp.split_kv")
        return torch.equal(got, want[i % 4])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(200)))


KERNELS = [
    "cpp.split_kv",
    pytest.param("cpp.amx", marks=needs_amx),
    pytest.param("cpp.avx512_bf16", marks=needs_dots),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("threads", [2, 5])
def test_neither_threads_nor_the_batch_change_a_bit(threads: int, kernel: str) -> None:
    """Of sequences in several pieces and in one; kernels on tiles take groups of 16 heads."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        model = "llama-3.1-8b" if kernel == "cpp.split_kv" else AttentionModel("groups of 16", 64, 4, 64, 64)
        arguments = paged_attention_inputs(model, seq_lens=(2500, 1, 1024, 1025))
        want = kernelhub.paged_attention(**arguments, backend=kernel)
        torch.set_num_threads(threads)
        assert torch.equal(kernelhub.paged_attention(**arguments, backend=kernel), want)
        alone = {name: arguments[name][:1] for name in ("q", "block_table", "seq_lens")}
        assert torch.equal(kernelhub.paged_attention(**arguments | alone, backend=kernel), want[:1])
    finally:
        torch.set_num_threads(before)


@needs_dots
def test_a_step_gives_each_sequence_the_bits_that_it_has_alone() -> None:
    """Of a ragged step, single tokens are multiplied by vectors, and of prompts the rows that fill tiles on tiles."""
    lens, queries = (1030, 5, 310, 64, 300), (1, 1, 300, 3, 65)
    arguments = paged_attention_inputs("llama-3.1-8b", seq_lens=lens, q_lens=queries)
    want = kernelhub.paged_attention(**arguments, backend="cpp.avx512_bf16")
    first = 0
    for b, count in enumerate(queries):
        alone = {
            "q": arguments["q"][first : first + count],
            "block_table": arguments["block_table"][b : b + 1],
            "seq_lens": arguments["seq_lens"][b : b + 1],
            "cu_seqlens_q": torch.tensor([0, count], dtype=torch.int32),
        }
        got = kernelhub.paged_attention(**arguments | alone, backend="cpp.avx512_bf16")
        assert torch.equal(got, want[first : first + count])
        first += count
