"""Every kernel of attention at its edges: metadata with strides, sequences without keys, offsets that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.backends.torch.attention.sequences import gathered
from kernelhub.errors import InvalidArgument
from kernelhub.ops.attention.adapter import DenseStep, PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.cases import largest_value
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.indexer.inputs import paged_logits_inputs
from kernelhub.ops.linear_attention.adapter import States
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.inputs import mla_attention_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.models.shapes import AttentionModel, LinearModel, MlaModel
from tests.contract.attention import split

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

    @pytest.mark.parametrize(
        "offsets", [[0, 5, 3000], [0, -5, 7], [9, 5, 2], [-9000, 5, 7], [3000, 4000, 5000], [0, 0, -(1 << 30)]]
    )
    @pytest.mark.parametrize("op", ["paged_attention", "mla_attention", "mla_attention of lists", "linear_attention"])
    def test_rows_of_other_ops_stay_as_they_are_too(self, op: str, offsets: list[int]) -> None:
        ends = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
        kernels = ["triton.chunked", "triton.recurrent"] if op == "linear_attention" else ["triton"]
        for kernel in kernels:
            around = _launched(op, kernel, ends)
            assert (around[:12] == 7.0).all()
            assert (around[24:] == 7.0).all()


def _launched(op: str, kernel: str, ends: Tensor) -> Tensor:
    """Three times 12 rows of 7.0, the middle ones the destination of a launch that checks nothing."""
    around = torch.full((36, 4, 32), 7.0, dtype=torch.float16, device=DEVICE)
    out, sizes = around[12:24], {"seq_lens": (40, 21), "q_lens": (7, 5), "dtype": torch.float16, "device": DEVICE}
    if op == "linear_attention":
        made = linear_inputs(LinearModel("small", 4, 32, 32), lengths=(7, 5), dtype=torch.float16, device=DEVICE)
        plan = kernelhub.linear_attention.prepare(**made, backend=kernel)
        memory = States(None, None, torch.zeros(2, 4, 32, 32, device=DEVICE), None)
        plan.adapter.launch(*(made[name] for name in ("q", "k", "v", "decay")), 1.0, ends, memory, out)
    elif op == "paged_attention":
        made = paged_attention_inputs(MODEL, **sizes)
        plan = kernelhub.paged_attention.prepare(**made, backend=kernel)
        step = PagedStep(made["block_table"], made["seq_lens"], ends)
        operands = (made[name] for name in ("q", "k_cache", "v_cache"))
        plan.adapter.launch(*operands, step, Values(32**-0.5), out, None)
    else:
        listed = {"topk": 5} if op.endswith("lists") else {}
        made = mla_attention_inputs(MlaModel("small", 4, 32, 16), **sizes, **listed)
        plan = kernelhub.mla_attention.prepare(**made, backend=kernel)
        step = PagedStep(made["block_table"], made["seq_lens"], ends)
        operands = (made.get(name) for name in ("q", "kv_cache", "topk_indices"))
        plan.adapter.launch(*operands, step, MlaValues(made["scale"]), out, None)
    return around


class TestSlotsOutsideOfThePool:
    """On a GPU slots of states are not looked at. One that the pool does not have stands for none."""

    @pytest.mark.parametrize("kernel", ["triton.chunked", "triton.recurrent", "torch"])
    @pytest.mark.parametrize("slot", [4, 1 << 20, 0x7FFFFFFF])
    def test_nothing_is_read_or_written_there(self, kernel: str, slot: int) -> None:
        sizes = {"lengths": (7, 5), "slots": (1, 0), "num_slots": 4}
        made = linear_inputs(LinearModel("small", 4, 32, 32), **sizes, dtype=torch.float16, device=DEVICE)
        plan = kernelhub.linear_attention.prepare(**made, out_state=made["state"].clone(), backend=kernel)
        operands = [made[name] for name in ("q", "k", "v", "decay")]
        results = []
        for first in (-1, slot):
            around = torch.full((8, 4, 32, 32), torch.nan, device=DEVICE)
            around[2:6] = made["state"]
            pool, at = around[2:6], torch.tensor([first, 0], dtype=torch.int32, device=DEVICE)
            out = torch.full_like(made["v"], torch.nan)
            plan.adapter.launch(*operands, 1.0, made["cu_seqlens"], States(pool, at, pool, at), out)
            results.append((out, around))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1].nan_to_num(9.0), results[1][1].nan_to_num(9.0))


class TestLengthsBeyondTheTable:
    """On a GPU lengths are not looked at. Kernels read no entry that a row of the table has not."""

    @pytest.mark.parametrize("columns", [0, 1])
    @pytest.mark.parametrize("op", ["paged_attention", "mla_attention", "mla_attention of lists", "paged_mqa_logits"])
    @pytest.mark.parametrize("backend", ["triton", "torch"])
    def test_they_count_as_what_the_table_has_room_for(self, op: str, columns: int, backend: str) -> None:
        """Behind the columns that are given lie entries of other pages, which hold NaN."""
        if op == "paged_mqa_logits":
            made = paged_logits_inputs(seq_lens=(70, 33), max_seq_len=80, page_size=16, device=DEVICE)
        elif op.startswith("mla_attention"):
            sizes = {
                "num_heads": 4,
                "seq_lens": (70, 33),
                "page_size": 16,
                "topk": 24 if op.endswith("lists") else None,
            }
            made = mla_attention_inputs("deepseek-v3", **sizes, dtype=torch.float16, device=DEVICE)
        else:
            made = paged_attention_inputs(MODEL, seq_lens=(70, 33), page_size=16, dtype=torch.float16, device=DEVICE)
        function, lengths = getattr(kernelhub, op.split()[0]), made["seq_lens"]
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
            if op.startswith("mla_attention"):
                listed = made.get("topk_indices")
                plan.adapter.launch(made["q"], made["kv_cache"], listed, step, MlaValues(made["scale"]), out, None)
            else:
                caches = (made["k_cache"], made["v_cache"])
                plan.adapter.launch(made["q"], *caches, step, Values(32**-0.5), out, None)
        torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2)


# Of torch's kernels entries in CPU memory have been looked at.
ON_GPU = [("paged_attention", "torch.blocked"), ("mla_attention", "torch.gathered")] if DEVICE == "cuda" else []


class TestPagesOutsideOfTheCache:
    """On a GPU entries of block tables are not looked at. A wrong one costs its own sequence's result, and no more."""

    @pytest.mark.parametrize("page", [-1, -2, "next", 1 << 20, 0x7FFFFFFF, -0x80000000])
    @pytest.mark.parametrize(
        ("op", "kernel"),
        [
            *[("paged_attention", f"triton.{name}") for name in ("split_kv", "split_kv_fixed", "prefill", "mixed")],
            *[("mla_attention", f"triton.{name}") for name in ("split_kv", "split_kv_fixed")],
            *[("mla_attention of lists", f"triton.{name}") for name in ("split_kv", "split_kv_fixed")],
            ("paged_mqa_logits", "triton.logits"),
            *ON_GPU,
        ],
    )
    def test_they_are_not_followed(self, op: str, kernel: str, page: Any) -> None:
        """Around the cache lies NaN, which no result may hold, and nothing at all beyond."""
        made, names, launch = _paged_call(op, kernel == "triton.mixed")
        caches = {name: _inside_of_nan(made[name]) for name in names}
        table = made["block_table"].clone()
        plan = getattr(kernelhub, op.split()[0]).prepare(**(made | caches), backend=kernel)
        right = launch(plan, made | caches, table)
        table[0, 1] = len(caches[names[0]]) if page == "next" else page
        wrong = launch(plan, made | caches, table)
        assert torch.equal(wrong[1:], right[1:])
        assert not wrong.isnan().any()

    @pytest.mark.parametrize("pages", [[-1, 3, 9], [9, 10, 11], [0x7FFFFFFF, 2, 0]])
    def test_torch_gathers_none_of_them_on_a_gpu(self, pages: list[int]) -> None:
        class OnDevice(Tensor):
            is_cpu = False

        cache, named = torch.arange(9 * 4 * 2.0).view(9, 4, 1, 2), torch.tensor(pages)
        made = gathered("test", cache.as_subclass(OnDevice), named).as_subclass(Tensor)
        assert torch.equal(made, cache[named.clamp(0, 8)].flatten(0, 1))
        assert len(gathered("test", cache[:0].as_subclass(OnDevice), named)) == 0

    @pytest.mark.parametrize("kernel", ["triton.write", *(["torch.scatter"] if DEVICE == "cuda" else [])])
    @pytest.mark.parametrize("slot", [20, 1 << 33, -1, -(1 << 62)])
    def test_a_slot_outside_is_not_written(self, kernel: str, slot: int) -> None:
        sizes = {"tokens": 3, "latent_dim": 16, "rope_dim": 8, "page_size": 4, "dtype": torch.float32}
        made = write_mla_cache_inputs(**sizes, device=DEVICE)
        plan = kernelhub.write_mla_cache.prepare(**made, backend=kernel)
        around = torch.full((9, 4, 24), 7.0, device=DEVICE)
        slots = torch.tensor([slot, 2, 19], device=DEVICE)
        plan.adapter.launch(made["kv_c"], made["k_rope"], around[2:7], slots, None)
        written = (around != 7.0).any(2).flatten().nonzero().flatten().tolist()
        assert written == [8 + 2, 8 + 19]

    @pytest.mark.parametrize("op", ["paged_attention", "mla_attention", "paged_mqa_logits"])
    def test_a_cache_without_pages_holds_no_keys(self, op: str) -> None:
        made, names, launch = _paged_call(op, False)
        plan = getattr(kernelhub, op).prepare(**made, backend="triton")
        result = launch(plan, made | {name: made[name][:0] for name in names}, made["block_table"])
        assert ((result == 0.0) | (result == -torch.inf)).all()


def _inside_of_nan(cache: Tensor) -> Tensor:
    """The same values, 0 for NaN of unused slots, with two pages of NaN before and behind them."""
    if cache.itemsize > 1:
        cache = cache.nan_to_num()
    around = torch.full((cache.shape[0] + 4, *cache.shape[1:]), torch.nan, device=DEVICE).to(cache.dtype)
    around[2:-2].view(torch.uint8).copy_(cache.view(torch.uint8))
    return around[2:-2]


def _paged_call(op: str, ragged: bool) -> tuple[dict[str, Any], tuple[str, ...], Any]:
    """A call of two sequences over pages of 16, the names of its caches, and its launch, which checks nothing."""
    sizes: dict[str, Any] = {"seq_lens": (70, 33), "page_size": 16, "device": DEVICE}
    if op == "paged_mqa_logits":
        made = paged_logits_inputs(**sizes, max_seq_len=80)

        def launch(plan: Any, given: dict[str, Any], table: Tensor) -> Tensor:
            out = torch.full((2, 80), 7.0, device=DEVICE)
            operands = (given["q"], given["k_cache"], given.get("k_scale_cache"), given["weights"])
            plan.adapter.launch(*operands, table, given["seq_lens"], out)
            return out

        return made, ("k_cache",), launch
    if op.startswith("mla_attention"):
        listed = {"topk": 24} if op.endswith("lists") else {}
        made = mla_attention_inputs("deepseek-v3", num_heads=4, **sizes, **listed, dtype=torch.float16)

        def launch(plan: Any, given: dict[str, Any], table: Tensor) -> Tensor:
            step = PagedStep(table, given["seq_lens"])
            out = torch.full((2, 4, 512), 7.0, dtype=torch.float16, device=DEVICE)
            values = MlaValues(given["scale"])
            plan.adapter.launch(given["q"], given["kv_cache"], given.get("topk_indices"), step, values, out, None)
            return out

        return made, ("kv_cache",), launch
    made = paged_attention_inputs(MODEL, **sizes, q_lens=(7, 3) if ragged else None, dtype=torch.float16)

    def launch(plan: Any, given: dict[str, Any], table: Tensor) -> Tensor:
        step = PagedStep(table, given["seq_lens"], given.get("cu_seqlens_q"))
        out = torch.full(given["q"].shape, 7.0, dtype=torch.float16, device=DEVICE)
        plan.adapter.launch(given["q"], given["k_cache"], given["v_cache"], step, Values(32**-0.5), out, None)
        return out[6:] if ragged else out  # the first row is of the sequence whose table is wrong

    return made, ("k_cache", "v_cache"), launch


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
