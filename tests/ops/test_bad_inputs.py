"""Arguments that break the contract: one clear error that names the parameter, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kernelhub
from kernelhub.errors import InvalidArgument, NoKernel
from tests.dispatch.backends import Ones, record, register

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def watched_kernel():
    """A kernel that takes everything and counts its launches: after an error there may have been none."""
    register("watch", record("watch.k", "Ones"), record("watch.k", "Ones", op="paged_attention"))
    Ones.launches = 0


def dense(**changes: Any) -> dict[str, Any]:
    base = {"q": torch.zeros(2, 6, 4, 32), "k": torch.zeros(2, 8, 2, 32), "v": torch.zeros(2, 8, 2, 32)}
    return base | changes


def ragged(**changes: Any) -> dict[str, Any]:
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    base = {"q": torch.zeros(6, 4, 32), "k": torch.zeros(6, 2, 32), "v": torch.zeros(6, 2, 32)}
    return base | {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets} | changes


def paged(**changes: Any) -> dict[str, Any]:
    base = {
        "q": torch.zeros(2, 4, 32),
        "k_cache": torch.zeros(5, 4, 2, 32),
        "v_cache": torch.zeros(5, 4, 2, 32),
        "block_table": torch.tensor([[0, 1], [4, 2]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 8], dtype=torch.int32),
    }
    return base | changes


def paged_ragged(**changes: Any) -> dict[str, Any]:
    return paged(q=torch.zeros(5, 4, 32), cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32)) | changes


def fp8(**changes: Any) -> dict[str, Any]:
    cache = torch.zeros(5, 4, 2, 32).to(FP8)
    return paged(k_cache=cache, v_cache=cache, k_scale=1.0, v_scale=1.0) | changes


def wide(rows: list[list[int]]) -> torch.Tensor:
    """A block table of more pages than are compared in Python, whose further entries are not read."""
    return torch.cat([torch.tensor(rows, dtype=i32), torch.full((len(rows), 300), -7, dtype=i32)], 1)


z = torch.zeros
i32 = torch.int32

BAD_DENSE = [
    ("q", dense(q=z(2, 6, 4, 32).int()), "dtype int32"),
    ("q", dense(q=z(2, 6, 4, 32).double()), "dtype float64"),
    ("q", dense(q=z(6, 4, 32)), "shape"),
    ("q", dense(q=[[1.0]]), "list"),
    ("q", dense(q=z(2, 6, 3, 32)), "has 3 heads, k has 2"),
    ("q", dense(q=z(2, 6, 0, 32)[:, :, :0], k=z(2, 8, 0, 32), v=z(2, 8, 0, 32)), "heads"),
    ("k", dense(k=z(2, 8, 2, 16)), "head width 16"),
    ("k", dense(k=z(3, 8, 2, 32), v=z(3, 8, 2, 32)), "batch of 3"),
    ("k", dense(k=z(2, 8, 2, 32).half()), "dtype float16"),
    (
        "k_scale",
        dense(k=z(2, 8, 2, 32).to(torch.float8_e5m2), v=z(2, 8, 2, 32).to(torch.float8_e5m2)),
        "is None with an fp8 k",
    ),
    ("k", dense(k=z(2, 8, 2, 32, device="meta")), "is on meta"),
    ("v", dense(v=z(2, 7, 2, 32)), "shape"),
    ("v", dense(v=z(2, 8, 1, 32)), "shape"),
    ("v", dense(v=z(2, 8, 2, 32).half()), "dtype"),
    ("window", dense(window=-2), "-2"),
    ("window", dense(window=(3, -7)), "-7"),
    ("window", dense(window=2.5), "2.5"),
    ("window", dense(window=(1, 2, 3)), "1, 2, 3"),
    ("window", dense(window=True), "True"),
    ("softcap", dense(softcap=-1.0), "-1.0"),
    ("softcap", dense(softcap=float("inf")), "inf"),
    ("softcap", dense(softcap=float("nan")), "nan"),
    ("sinks", dense(sinks=z(2)), r"\[2\]"),
    ("sinks", dense(sinks=z(4, 1)), r"\[4, 1\]"),
    ("sinks", dense(sinks=z(4).int()), "int32"),
    ("scale", dense(scale=float("nan")), "nan"),
    ("scale", dense(scale="0.1"), "0.1"),
    ("k_scale", dense(k_scale=1.0, v_scale=1.0), "float32 k"),
    ("out", dense(out=z(2, 6, 4, 31)), "shape"),
    ("out", dense(out=z(2, 6, 4, 32).half()), "dtype"),
    (
        "cu_seqlens_k",
        dense(q=z(6, 4, 32), k=z(6, 2, 32), v=z(6, 2, 32), cu_seqlens_q=torch.tensor([0, 6], dtype=i32)),
        "missing",
    ),
    ("cu_seqlens_q", ragged(cu_seqlens_q=torch.tensor([0, 2, 6])), "int64"),
    ("cu_seqlens_q", ragged(cu_seqlens_q=torch.tensor([0, 4, 2], dtype=i32)), "falls from 4 to 2"),
    ("cu_seqlens_q", ragged(cu_seqlens_q=torch.tensor([1, 2, 6], dtype=i32)), "starts at 1"),
    ("cu_seqlens_q", ragged(cu_seqlens_q=torch.tensor([0, 2, 7], dtype=i32)), "ends at 7"),
    ("cu_seqlens_q", ragged(cu_seqlens_q=torch.tensor([[0, 2, 6]], dtype=i32)), "shape"),
    ("cu_seqlens_k", ragged(cu_seqlens_k=torch.tensor([0, 6], dtype=i32)), "offsets"),
    ("max_seqlen_q", ragged(max_seqlen_q=3), "a sequence has 4"),
    ("max_seqlen_q", ragged(max_seqlen_q=-1), "-1"),
    ("max_seqlen_k", ragged(max_seqlen_k=3), "a sequence has 4"),
]
BAD_PAGED = [
    ("q", paged(q=z(3, 4, 32)), "2 sequences"),
    ("q", paged(q=z(2, 4)), "shape"),
    ("q", paged_ragged(q=z(2, 2, 4, 32)), "shape"),
    ("k_cache", paged(k_cache=z(5, 8, 32)), "shape"),
    ("k_cache", paged(k_cache=z(5, 0, 2, 32), v_cache=z(5, 0, 2, 32)), "at least one token"),
    ("k_cache", paged(k_cache=z(5, 4, 2, 32).bfloat16()), "bfloat16"),
    ("v_cache", paged(v_cache=z(5, 4, 1, 32)), "all but D agree"),
    ("v_cache", paged(v_cache=z(4, 4, 2, 32)), "all but D agree"),
    ("kv_layout", paged(kv_layout="NDH"), "NDH"),
    ("block_table", paged(block_table=torch.tensor([[0, 1], [4, 2]])), "int64"),
    ("block_table", paged(block_table=torch.tensor([[0, 1], [5, 2]], dtype=i32)), "names page 5"),
    ("block_table", paged(block_table=torch.tensor([[0, 1], [4, -1]], dtype=i32)), "names page -1"),
    ("block_table", paged(block_table=wide([[0, 1], [5, 2]])), "names page 5"),
    ("block_table", paged(block_table=wide([[0, 1], [4, -1]])), "names page -1"),
    ("block_table", paged(block_table=torch.tensor([0, 1], dtype=i32)), "shape"),
    ("block_table", paged(block_table=None), "NoneType"),
    ("seq_lens", paged(seq_lens=torch.tensor([5, 9], dtype=i32)), "is 9 for sequence 1"),
    ("seq_lens", paged(seq_lens=torch.tensor([5, -1], dtype=i32)), "is -1 for sequence 1"),
    ("seq_lens", paged(seq_lens=torch.tensor([5], dtype=i32)), "1 lengths"),
    ("seq_lens", paged(seq_lens=[5, 8]), "list"),
    ("cu_seqlens_q", paged_ragged(cu_seqlens_q=torch.tensor([0, 5], dtype=i32)), "2 offsets for 2 sequences"),
    ("cu_seqlens_q", paged_ragged(cu_seqlens_q=torch.tensor([0, 2, 6], dtype=i32)), "ends at 6"),
    ("max_seqlen_q", paged_ragged(max_seqlen_q=2), "a sequence has 3"),
    ("max_seqlen_q", paged_ragged(max_seqlen_q=2.0), "2.0"),
    ("k_scale", fp8(k_scale=None, v_scale=None), "None with an fp8"),
    ("v_scale", fp8(v_scale=None), "another form"),
    ("v_scale", fp8(v_scale=torch.ones(2)), "another form"),
    ("k_scale", fp8(k_scale=torch.ones(3), v_scale=torch.ones(3)), r"\[3\]"),
    ("k_scale", fp8(k_scale=torch.ones(2).half(), v_scale=torch.ones(2).half()), "float16"),
    ("k_scale", fp8(k_scale=float("inf"), v_scale=1.0), "inf"),
]


def run(arguments: dict[str, Any]) -> Any:
    function = kernelhub.attention if "k" in arguments else kernelhub.paged_attention
    return function(**arguments)


def label(case: Any) -> str:
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize(("parameter", "arguments", "words"), BAD_DENSE + BAD_PAGED, ids=label)
@pytest.mark.fault("bad_operand")
def test_the_parameter_is_named_and_nothing_is_launched(parameter: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        run(arguments)
    assert caught.value.parameter == parameter
    assert str(caught.value).startswith(("attention: ", "paged_attention: "))
    assert "; " in str(caught.value), "an error says what would be right"
    assert Ones.launches == 0


@pytest.mark.parametrize(
    "good", [dense(), ragged(), paged(), paged_ragged(), fp8()], ids=("dense", "ragged", "paged", "paged ragged", "fp8")
)
@pytest.mark.fault("bad_operand")
def test_the_same_holds_once_the_key_is_known(good: dict[str, Any]) -> None:
    """After a good call of the same configuration, what differs from call to call is still checked."""
    run(good)
    Ones.launches = 0
    bad = [case for case in BAD_DENSE + BAD_PAGED if ("k" in case[1]) == ("k" in good)]
    for parameter, arguments, words in bad:
        with pytest.raises(InvalidArgument, match=words) as caught:
            run(arguments)
        assert caught.value.parameter == parameter
    assert Ones.launches == 0


def test_out_may_not_be_the_memory_of_q() -> None:
    arguments = dense()
    with pytest.raises(InvalidArgument, match="overlaps q in memory"):
        run(arguments | {"out": arguments["q"]})


@pytest.mark.parametrize("parameter", ["q", "k", "v", "sinks"])
def test_a_parameter_tensor_is_taken_like_any_tensor_without_grad(parameter: str) -> None:
    arguments = dense(sinks=torch.zeros(4))
    run(arguments)
    run(arguments)
    arguments[parameter] = nn.Parameter(arguments[parameter])
    with pytest.raises(InvalidArgument, match="requires grad") as caught:
        run(arguments)
    assert caught.value.parameter == parameter
    with torch.no_grad():
        assert run(arguments).shape == (2, 6, 4, 32)


def test_inference_tensors_are_taken() -> None:
    with torch.inference_mode():
        assert run(dense(q=torch.zeros(2, 6, 4, 32) + 1)).shape == (2, 6, 4, 32)


@pytest.mark.parametrize("window", [0, -1, (0, 0), (-1, -1), 10**6, (3, 3)])
def test_every_window_from_no_limit_up_is_taken(window: Any) -> None:
    run(dense(window=window))


def test_an_empty_window_on_both_sides_leaves_a_query_its_own_key() -> None:
    torch.manual_seed(0)
    v = torch.randn(1, 5, 2, 32)
    out = kernelhub.attention(torch.randn(1, 5, 2, 32), torch.randn(1, 5, 2, 32), v, window=(0, 0), backend="torch")
    assert torch.allclose(out, v, atol=1e-6)


def test_what_no_kernel_can_do_is_refused_with_all_reasons_not_with_an_error_from_below() -> None:
    with pytest.raises(NoKernel) as caught:
        kernelhub.attention(**dense(softcap=3.0), backend=("torch.sdpa", "torch.packed"))
    for name in ("torch.sdpa", "torch.packed"):
        assert f"- {name}" in str(caught.value)


@pytest.mark.parametrize("backend", ["torch.packed", "torch.blocked"])
def test_head_counts_of_any_ratio(backend: str) -> None:
    for heads, kv_heads in ((3, 1), (5, 5), (7, 1), (12, 4), (128, 1)):
        q = torch.randn(1, 2, heads, 32)
        kv = torch.randn(1, 3, kv_heads, 32)
        out = kernelhub.attention(q, kv, kv, backend=backend)
        assert torch.allclose(out, kernelhub.attention.reference(q, kv, kv), atol=1e-5)
