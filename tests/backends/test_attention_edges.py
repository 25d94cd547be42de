"""Every kernel of attention at its edges: metadata with strides, sequences without keys, offsets that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.inputs import AttentionModel, paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.indexer.inputs import paged_logits_inputs
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from tests.contract.attention import largest_value, split

pytestmark = pytest.mark.device

MODEL = AttentionModel("small", 4, 2, 32, 32)
WITH_SINKS = AttentionModel("small, with sinks", 4, 2, 32, 32, sinks=True)
# torch.packed runs on CPUs alone.
PACKED = () if torch.cuda.is_available() else ("torch.packed",)
RAGGED = ("triton.prefill", "torch.blocked", *PACKED)
PAGED = ("triton.prefill", "triton.split_kv", "triton.split_kv_fixed", "torch.blocked", *PACKED)
PAGED_RAGGED = ("triton.mixed", "triton.prefill", "torch.blocked", *PACKED)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def spread(tensor: Tensor, step: int = 3) -> Tensor:
    """The same values, `step` elements apart, with garbage between."""
    garbage = torch.nan if tensor.is_floating_point() else 1 << 20
    wide = torch.full((*tensor.shape, step), garbage, dtype=tensor.dtype, device=tensor.device)
    wide[..., 0] = tensor
    return wide[..., 0]


def ragged(model: AttentionModel = MODEL, **changes: Any) -> dict[str, Any]:
    """Three sequences, the second without keys."""
    random = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(rows, heads, 32, generator=random).to(DEVICE, torch.float16)
        for name, rows, heads in (("q", 12, 4), ("k", 14, 2), ("v", 14, 2))
    }
    offsets = {"cu_seqlens_q": [0, 5, 7, 12], "cu_seqlens_k": [0, 8, 8, 14]}
    made |= {name: torch.tensor(values, dtype=torch.int32, device=DEVICE) for name, values in offsets.items()}
    if model.sinks:
        made["sinks"] = torch.randn(4, generator=random).to(DEVICE)
    return made | changes


def paged(model: AttentionModel = MODEL, q_lens: Any = None, **changes: Any) -> dict[str, Any]:
    """Three sequences, the second without keys."""
    made = paged_attention_inputs(model, seq_lens=(40, 0, 21), q_lens=q_lens, dtype=torch.float16, device=DEVICE)
    return made | changes


def agrees(function: Any, arguments: dict[str, Any], kernel: str) -> None:
    args, kwargs = split(arguments)
    out, lse = function(*args, **kwargs, return_lse=True, backend=kernel)
    wanted, wanted_lse = function.reference(*args, **kwargs, return_lse=True)
    assert not out.isnan().any()
    agreement = compare_out(out, wanted, largest_value(arguments))
    assert agreement.ok, str(agreement)
    assert compare_lse(lse, wanted_lse) <= lse_tolerance(torch.float16)


FORMS = [
    *[pytest.param(kernelhub.attention, ragged, kernel, id=f"ragged {kernel}") for kernel in RAGGED],
    *[pytest.param(kernelhub.paged_attention, paged, kernel, id=f"paged {kernel}") for kernel in PAGED],
    *[
        pytest.param(
            kernelhub.paged_attention,
            lambda model=MODEL, **changes: paged(model, q_lens=(7, 0, 3), **changes),
            kernel,
            id=f"paged ragged {kernel}",
        )
        for kernel in PAGED_RAGGED
    ],
]


@pytest.mark.parametrize(("function", "inputs", "kernel"), FORMS)
def test_metadata_with_strides_is_read_as_what_it_holds(function: Any, inputs: Any, kernel: str) -> None:
    arguments = inputs(WITH_SINKS)
    names = ("cu_seqlens_q", "cu_seqlens_k", "seq_lens", "block_table", "sinks")
    changed = {name: spread(tensor) for name, tensor in arguments.items() if name in names and tensor is not None}
    assert changed
    agrees(function, arguments | changed, kernel)


@pytest.mark.parametrize(("function", "inputs", "kernel"), FORMS)
@pytest.mark.parametrize("sink", [-torch.inf, 1.0])
def test_a_query_without_keys_gives_zeros_whatever_the_sink(
    function: Any, inputs: Any, kernel: str, sink: float
) -> None:
    """A padded batch: no keys, and with a sink of -inf no denominator either; its LSE is the sink."""
    sinks = torch.full((4,), sink, device=DEVICE)
    agrees(function, inputs(WITH_SINKS, sinks=sinks), kernel)


class TestWrongOffsets:
    """On a GPU offsets are not looked at. What lies beyond the rows of q, k and `out` is neither read nor written."""

    def launched(self, q_offsets: list[int], k_offsets: list[int]) -> Tensor:
        given = ragged()
        args, kwargs = split(given)
        plan = kernelhub.attention.prepare(*args, **kwargs, backend="triton.prefill")
        step = DenseStep(*(torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (q_offsets, k_offsets)))
        around = torch.full((36, 4, 32), 7.0, dtype=torch.float16, device=DEVICE)
        plan.adapter.launch(given["q"], given["k"], given["v"], step, Values(32**-0.5), around[12:24], None)
        return around

    @pytest.mark.parametrize(
        ("q_offsets", "k_offsets"),
        [
            ([0, 5, 7, 3000], [0, 8, 8, 3000]),
            ([0, -5, 7, 12], [0, -8, 8, 14]),
            ([9, 5, 2, 1], [9, 5, 2, 1]),
            ([-9000, 5, 7, 12], [-9000, 8, 8, 14]),
            ([3000, 3000, 3000, 3000], [3000, 4000, 4000, 5000]),
            ([0], [0]),
        ],
    )
    def test_rows_outside_stay_as_they_are(self, q_offsets: list[int], k_offsets: list[int]) -> None:
        around = self.launched(q_offsets, k_offsets)
        assert (around[:12] == 7.0).all()
        assert (around[24:] == 7.0).all()


class TestLengthsBeyondTheTable:
    """On a GPU lengths are not looked at. Kernels read no entry that a row of the table has not."""

    @pytest.mark.parametrize("columns", [0, 1])
    @pytest.mark.parametrize("op", ["paged_attention", "mla_attention", "paged_mqa_logits"])
    @pytest.mark.parametrize("backend", ["triton", "torch"])
    def test_they_count_as_what_the_table_has_room_for(self, op: str, columns: int, backend: str) -> None:
        """Behind the columns that are given lie entries of other pages, which hold NaN."""
        if op == "paged_mqa_logits":
            made = paged_logits_inputs(seq_lens=(70, 33), max_seq_len=80, page_size=16, device=DEVICE)
        elif op == "mla_attention":
            sizes = {"num_heads": 4, "seq_lens": (70, 33), "page_size": 16}
            made = mla_attention_inputs("deepseek-v3", **sizes, dtype=torch.float16, device=DEVICE)
        else:
            made = paged_attention_inputs(MODEL, seq_lens=(70, 33), page_size=16, dtype=torch.float16, device=DEVICE)
        function, lengths = getattr(kernelhub, op), made["seq_lens"]
        within = made | {
            "block_table": made["block_table"][:, :columns],
            "seq_lens": lengths.clamp(max=16 * columns),
        }
        plan = function.prepare(**within, backend=backend)
        wanted = function.reference(**within)
        memory = made["block_table"].clone()
        memory[:, columns:] = -(1 << 20)
        table = memory[:, :columns]
        shape = wanted.shape
        out = torch.full(shape, torch.nan, dtype=torch.float32 if op == "paged_mqa_logits" else torch.float16)
        out = out.to(DEVICE)
        if op == "paged_mqa_logits":
            operands = (made["q"], made["k_cache"], made.get("k_scale_cache"), made["weights"])
            plan.adapter.launch(*operands, table, lengths, out)
        else:
            step = PagedStep(table, lengths)
            plan.adapter.begin(step)
            if op == "mla_attention":
                plan.adapter.launch(made["q"], made["kv_cache"], None, step, MlaValues(made["scale"]), out, None)
            else:
                caches = (made["k_cache"], made["v_cache"])
                plan.adapter.launch(made["q"], *caches, step, Values(32**-0.5), out, None)
        torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2)


class TestAutocast:
    """Kernels state their own precision: autocast and the process's matmul precision change no bit."""

    @pytest.mark.parametrize("kernel", ["torch.sdpa", "torch.blocked", *PACKED])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_results_are_the_same_bits(self, kernel: str, dtype: torch.dtype) -> None:
        q, k, v = (torch.randn(2, 24, 4, 32, device=DEVICE) for _ in range(3))
        plain = kernelhub.attention(q, k, v, causal=True, backend=kernel)
        with torch.autocast(DEVICE, dtype=dtype):
            assert kernelhub.attention(q, k, v, causal=True, backend=kernel).equal(plain)
        torch.set_float32_matmul_precision("medium")
        try:
            again = kernelhub.attention(q, k, v, causal=True, backend=kernel)
        finally:
            torch.set_float32_matmul_precision("highest")
        if kernel != "torch.sdpa":  # whose products are torch's own
            assert again.equal(plain)


class TestSdpa:
    """torch chooses among its kernels without looking where a tensor begins, or how it is strided."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("shape", [(3, 1, 1, 16, 8, 64), (2, 40, 50, 4, 2, 64), (2, 50, 20, 4, 4, 256)])
    def test_operands_that_begin_anywhere_and_have_any_strides(self, shape: Any, dtype: torch.dtype) -> None:
        batch, queries, keys, heads, kv_heads, width = shape

        def view(rows: int, count: int, gap: int) -> Tensor:
            wide = torch.randn(1 + batch * rows * count * (width + gap), device=DEVICE).to(dtype)
            return wide[1:].view(batch, rows, count, width + gap)[..., :width]

        for gap in (0, 1, 3):
            q, k, v = view(queries, heads, gap), view(keys, kv_heads, gap), view(keys, kv_heads, gap)
            for causal in (False, True):
                out = kernelhub.attention(q, k, v, causal=causal, backend="torch.sdpa")
                want = kernelhub.attention.reference(q, k, v, causal=causal)
                agreement = compare_out(out, want, float(v.abs().max()))
                assert agreement.ok, str(agreement)

    def test_more_queries_than_keys_under_a_causal_mask(self) -> None:
        """On an H200 the first row that sees a key, and all after it, were NaN."""
        random = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, rows, 4, 256, generator=random).to(DEVICE, torch.float16) for rows in (276, 127, 127))
        out = kernelhub.attention(q, k, v, causal=True, backend="torch.sdpa")
        want = kernelhub.attention.reference(q, k, v, causal=True)
        agreement = compare_out(out, want, float(v.abs().max()))
        assert agreement.ok, str(agreement)


@pytest.mark.parametrize("kernel", PACKED)
def test_weights_down_to_e_to_the_minus_86_count_in_packed(kernel: str) -> None:
    """The bound that its docstring states: below, the CPU's operator gives 0."""
    q, k, v = torch.ones(1, 1, 1, 16), torch.zeros(1, 64, 1, 16), torch.zeros(1, 64, 1, 16)
    k[0, 1:], v[0, 1] = -86 / 16, 1.0
    out = kernelhub.attention(q, k, v, scale=1.0, backend=kernel)
    torch.testing.assert_close(out, kernelhub.attention.reference(q, k, v, scale=1.0), rtol=1e-4, atol=0.0)


def test_out_may_not_be_the_memory_of_metadata() -> None:
    given = paged()
    table = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    rows, columns = given["block_table"].shape
    inside = table[: rows * columns].view(rows, columns).copy_(given["block_table"])
    args, kwargs = split(given | {"block_table": inside})
    for _ in range(2):  # the second time with a form that is known
        kernelhub.paged_attention(*args, **kwargs, out=torch.empty_like(args[0]))
        with pytest.raises(InvalidArgument, match="overlaps block_table"):
            kernelhub.paged_attention(
                *args, **kwargs, out=table.view(torch.float16)[: args[0].numel()].view_as(args[0])
            )
