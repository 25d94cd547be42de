"""What the contract does not show of the Triton kernels: merging many splits, invariance, exact bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import kernelhub
from kernelhub.backends.triton import interpreter
from kernelhub.backends.triton.attention import adapter as adapters
from kernelhub.backends.triton.attention.softmax import sequence_of, tanh
from kernelhub.backends.triton.attention.splits import Division
from kernelhub.backends.triton.formats import e4m3_scaled
from kernelhub.ops.attention.inputs import paged_attention_inputs
from kernelhub.ops.attention.tolerance import compare_lse, compare_out, lse_tolerance
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.runtime import counters
from tests.conftest import DEVICE, HAS_GPU

pytestmark = pytest.mark.device
ONE_HEAD = AttentionModel("one head", 4, 1, 64, 64)


def paged(**inputs):
    return paged_attention_inputs(ONE_HEAD, device=DEVICE, page_size=64, **inputs)


def in_parts(parts: int, ahead: bool = False) -> Any:
    """A rule that divides every call into as many parts."""
    return lambda self, num_seqs, rows, kv_bound: Division(replace(self._split_tiles(rows), ahead=ahead), parts)


class TestSplits:
    @pytest.mark.parametrize("ahead", [False, True])
    @pytest.mark.parametrize("splits", [1, 2, 7, 16, 33])
    def test_any_number_of_splits_gives_the_reference(self, splits: int, ahead: bool, monkeypatch) -> None:
        monkeypatch.setattr(adapters.SplitKV, "divide", in_parts(splits, ahead))
        monkeypatch.setattr(adapters, "CHUNK", 64)
        arguments = paged(seq_lens=(1100, 64, 65, 0))
        sinks = torch.tensor([-2.0, 0.0, 1.0, 5.0], device=DEVICE)
        out, lse = kernelhub.paged_attention(**arguments, sinks=sinks, return_lse=True, backend="triton.split_kv")
        want, want_lse = kernelhub.paged_attention.reference(**arguments, sinks=sinks, return_lse=True)
        assert compare_out(out, want, 4.5).ok
        assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)

    @pytest.mark.parametrize("ahead", [False, True])
    def test_a_window_is_split_by_what_it_sees(self, ahead: bool, monkeypatch) -> None:
        monkeypatch.setattr(adapters.SplitKV, "divide", in_parts(8, ahead))
        monkeypatch.setattr(adapters, "CHUNK", 64)
        arguments = paged(seq_lens=(900, 130)) | {"window": 300}
        out = kernelhub.paged_attention(**arguments, backend="triton.split_kv")
        assert compare_out(out, kernelhub.paged_attention.reference(**arguments), 4.5).ok

    def test_more_work_is_split_less(self) -> None:
        problem = kernelhub.explain("paged_attention", device="H200", num_q_heads=32, num_kv_heads=8).problem
        adapter = adapters.SplitKV(problem)
        parts = [adapter.divide(batch, 4, 1 << 17).parts for batch in (1, 2, 8, 16, 24, 48, 64, 104)]
        assert parts == [32, 16, 6, 3, 2, 1, 1, 3]
        assert adapter.divide(1, 4, 512).parts == 8
        assert adapters.SplitKVFixed(problem).divide(64, 4, 1 << 17).parts == adapters.FIXED_SPLITS

    @pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
    def test_tiles_follow_the_number_of_programs(self, kv_dtype: str) -> None:
        """Wide tiles, but small ones where these make one round of two."""
        facets = {"num_q_heads": 32, "num_kv_heads": 8, "kv_dtype": kv_dtype}
        facets |= {"kv_scale": "tensor"} if kv_dtype != "bfloat16" else {}
        adapter = adapters.SplitKV(kernelhub.explain("paged_attention", device="H200", **facets).problem)
        keys = [adapter.divide(batch, 4, 1 << 14).tiles.block_n for batch in (16, 32, 48, 64, 256)]
        assert keys == [128, 128, 128, 64, 128]

    def test_parts_of_fp8_fill_one_round(self) -> None:
        """24 x 4096 keys take 0.073 ms in 2 parts on an H200; with other code for values, 0.092 in 4."""
        facets = {"num_q_heads": 32, "num_kv_heads": 8, "kv_dtype": "float8_e4m3fn", "kv_scale": "tensor"}
        adapter = adapters.SplitKV(kernelhub.explain("paged_attention", device="H200", **facets).problem)
        assert [adapter.divide(batch, 4, 4096).parts for batch in (24, 48)] == [2, 1]

    def test_batch_invariant_tiles_are_the_same_for_every_batch(self) -> None:
        problem = kernelhub.explain("paged_attention", device="H200", num_q_heads=32, num_kv_heads=8).problem
        adapter = adapters.SplitKVFixed(problem)
        assert len({adapter.divide(batch, 4, 1 << 14).tiles for batch in (1, 16, 64, 256)}) == 1

    @pytest.mark.parametrize("seq_lens", [(900,), (900, 130), (100,) * 5])
    def test_a_plan_declares_the_memory_that_its_splits_take(self, seq_lens: tuple[int, ...], monkeypatch) -> None:
        arguments = paged(seq_lens=seq_lens)
        operands = [arguments[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens")]
        plan = kernelhub.paged_attention.prepare(*operands, backend="triton.split_kv")
        out = torch.empty(*operands[0].shape, dtype=torch.bfloat16, device=DEVICE)
        step = plan.begin(*operands[3:])
        step.run(*operands[:3], out)  # what is made once for all is not a step's
        taken = []
        empty = torch.empty

        def watched(*shape, **options):
            tensor = empty(*shape, **options)
            taken.append(tensor.numel() * tensor.itemsize)
            return tensor

        monkeypatch.setattr(torch, "empty", watched)
        step.run(*operands[:3], out)
        monkeypatch.undo()
        room = operands[3].shape[1] * 64
        assert sum(taken) == plan.adapter.workspace_bytes(len(seq_lens), len(seq_lens), room)


class TestOneLaunch:
    """The last program of a row block merges its parts."""

    @pytest.fixture(autouse=True)
    def in_one_launch(self, monkeypatch) -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(adapters, "ONE_LAUNCH", True)
            kernelhub.paged_attention.op._forget()
            yield
        kernelhub.paged_attention.op._forget()

    @pytest.mark.parametrize(
        ("parts", "heads", "more"),
        [
            (2, (4, 1), {}),
            (8, (4, 1), {"window": 300}),
            (5, (14, 2), {"softcap": 4.0}),  # 7 rows of 16, each with 2 parts at a time
            (3, (16, 1), {"q_lens": 1, "seq_lens": (300, 64, 1, 129)}),
            (4, (4, 2), {"q_lens": (1, 3, 1, 70), "seq_lens": (300, 64, 1, 129)}),  # ragged: the last is the prefill's
            (4, (4, 1), {"kv_dtype": torch.float8_e4m3fn}),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("ahead", [False, True])
    def test_it_gives_the_reference_and_leaves_zeros(self, ahead, parts, heads, more, monkeypatch) -> None:
        split, merge = [], []
        monkeypatch.setattr(adapters, "split_kernel", noting(adapters.split_kernel, split))
        monkeypatch.setattr(adapters, "merge_kernel", noting(adapters.merge_kernel, merge))
        for kind in (adapters.SplitKV, adapters.Mixed):
            monkeypatch.setattr(kind, "divide", in_parts(parts, ahead))
        monkeypatch.setattr(adapters, "CHUNK", 64)
        inputs, features = dict(more), {}
        for name in ("window", "softcap"):
            if name in inputs:
                features[name] = inputs.pop(name)
        model = AttentionModel("some heads", *heads, 64, 64)
        arguments = paged_attention_inputs(
            model, device=DEVICE, page_size=64, **({"seq_lens": (1100, 64, 65, 0)} | inputs)
        )
        sinks = torch.linspace(-2, 3, heads[0], device=DEVICE)
        given = arguments | features | {"sinks": sinks, "return_lse": True}
        for _ in range(2):
            out, lse = kernelhub.paged_attention(**given, backend=("triton.split_kv", "triton.mixed"))
            want, want_lse = kernelhub.paged_attention.reference(**given)
            assert compare_out(out, want, 4.5).ok
            assert compare_lse(lse, want_lse) <= lse_tolerance(out.dtype)
        assert split
        assert not merge
        assert all(not counters.any() for counters in kept())

    def test_what_may_not_count_is_merged_by_a_second_launch(self, monkeypatch) -> None:
        """A captured call, more programs than counters, many parts, and kernels that promise their bits."""
        monkeypatch.setattr(adapters, "CHUNK", 64)
        monkeypatch.setattr(adapters.SplitKV, "divide", in_parts(4))
        merge: list[Any] = []
        monkeypatch.setattr(adapters, "merge_kernel", noting(adapters.merge_kernel, merge))
        arguments = paged(seq_lens=(700, 300, 20, 5))
        want = kernelhub.paged_attention.reference(**arguments)

        def launches(backend: str = "triton.split_kv") -> int:
            kernelhub.paged_attention.op._forget()
            merge.clear()
            assert compare_out(kernelhub.paged_attention(**arguments, backend=backend), want, 4.5).ok
            return len(merge)

        assert launches() == 0
        assert launches("triton.split_kv_fixed") == 1
        monkeypatch.setattr(counters, "MOST", 3)
        assert launches() == 1
        monkeypatch.undo()
        monkeypatch.setattr(adapters, "CHUNK", 64)
        monkeypatch.setattr(adapters, "merge_kernel", noting(adapters.merge_kernel, merge))
        monkeypatch.setattr(adapters.SplitKV, "divide", in_parts(65))
        assert launches() == 1
        monkeypatch.setattr(adapters.SplitKV, "divide", in_parts(4))
        monkeypatch.setattr(adapters, "counters_of", lambda q, count: None)  # as for a captured call
        assert launches() == 1


class TestCounters:
    """Those of streams and captures, with a driver that is not here."""

    @pytest.fixture(autouse=True)
    def driver(self, monkeypatch) -> None:
        monkeypatch.setattr(counters, "_kept", {})
        monkeypatch.setattr(counters, "_arenas", {})
        monkeypatch.setattr(counters, "STREAMS", 4)
        monkeypatch.setattr(counters, "_zeros", lambda device, stream: torch.zeros(4, counters.MOST, dtype=torch.int32))
        monkeypatch.setattr(counters, "capture_of", lambda stream: self.capture)

    capture = 0

    def captured(self, device: int, capture: int, stream: int) -> int:
        self.capture = capture
        found = counters._of_capture(device, stream)
        return 0 if found is None else found.data_ptr()

    def test_each_stream_has_counters_of_its_own(self) -> None:
        first, second = (counters.address_of_stream(0, stream) for stream in (0, 77))
        assert 0 != first != second != 0
        assert counters.address_of_stream(0, 77) == second
        assert counters.address_of_stream(1, 77) not in (0, first, second)
        assert counters.address_of_stream(0, counters.PER_THREAD) == 0

    def test_a_capture_shares_counters_with_no_other_and_with_no_stream(self) -> None:
        eager = counters.address_of_stream(0, 77)
        first = self.captured(0, 5, 77)
        assert self.captured(0, 5, 77) == first
        others = [self.captured(0, 6, 77), self.captured(0, 5, 78)]
        assert len({0, eager, first, *others}) == 5

    def test_there_are_none_for_a_capture_before_any_other_call_or_when_all_are_taken(self) -> None:
        assert self.captured(0, 5, 77) == 0
        taken = [counters.address_of_stream(0, stream) for stream in range(3, 7)]
        assert 0 not in taken
        assert self.captured(0, 5, 77) == 0
        assert counters.address_of_stream(0, 99) == 0
        assert [counters.address_of_stream(0, stream) for stream in range(3, 7)] == taken

    def test_a_driver_without_memory_or_captures_gives_none(self, monkeypatch) -> None:
        monkeypatch.setattr(counters, "_zeros", lambda device, stream: None)
        assert counters.address_of_stream(0, 77) == 0
        assert self.captured(0, 0, 77) == 0


def noting(kernel: Any, calls: list[Any]) -> Any:
    """A jitted kernel whose launches are noted."""

    class Noting:
        arg_names = kernel.arg_names

        def __getitem__(self, grid: Any) -> Any:
            calls.append(grid)
            return kernel[grid]

        def warmup(self, *given: Any, **named: Any) -> Any:
            return kernel.warmup(*given, **named)

    return Noting()


def kept() -> Any:
    """All counters."""
    return list(counters._kept.values())


class TestBatchInvariance:
    @pytest.mark.parametrize("backend", ["triton.split_kv_fixed", "triton.prefill"])
    def test_a_row_s_bits_do_not_depend_on_the_batch(self, backend: str) -> None:
        arguments = paged(seq_lens=(700, 300, 20, 5))
        together = kernelhub.paged_attention(**arguments, backend=backend)
        for row in range(4):
            alone = arguments | {name: arguments[name][row : row + 1] for name in ("q", "block_table", "seq_lens")}
            assert torch.equal(kernelhub.paged_attention(**alone, backend=backend), together[row : row + 1])

    def test_the_policy_chooses_an_invariant_kernel(self) -> None:
        with kernelhub.use(batch_invariant=True):
            selection = kernelhub.explain("paged_attention", device="H200", q_len="one")
        assert selection.selected == "triton.split_kv_fixed"
        assert {d.kernel: d.code for d in selection.decisions}["triton.split_kv"] == "batch_variant"


@triton.jit
def _decode(raw, out, NATIVE: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out + i, e4m3_scaled(tl.load(raw + i), DTYPE, NATIVE).to(tl.float32) * (1.0 if NATIVE else 256.0))


@triton.jit
def _tanh(x, out):
    i = tl.arange(0, 64)
    tl.store(out + i, tanh(tl.load(x + i)))


@triton.jit
def _sequences(cu, num_seqs, sequence, block, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    s, b = sequence_of(tl.program_id(0), cu, num_seqs, GROUP, BLOCK_M)
    tl.store(sequence + tl.program_id(0), s)
    tl.store(block + tl.program_id(0), b)


class TestDeviceCode:
    @pytest.mark.parametrize("native", [False, True])
    @pytest.mark.parametrize("dtype", [tl.float16, tl.bfloat16, tl.float32])
    def test_all_256_bytes_of_e4m3_are_decoded_exactly(self, native: bool, dtype) -> None:
        if native and HAS_GPU and torch.cuda.get_device_capability() < (8, 9):
            native = False
        raw = torch.arange(256, dtype=torch.int32).to(torch.uint8).to(DEVICE)
        out = torch.empty(256, device=DEVICE)
        _decode[(1,)](raw, out, native, dtype)
        want = raw.view(torch.float8_e4m3fn).float()
        assert torch.equal(out.nan_to_num(12345.0), want.nan_to_num(12345.0))
        assert torch.equal(out.isnan(), want.isnan())

    def test_tanh_is_that_of_torch(self) -> None:
        x = torch.cat([torch.linspace(-30, 30, 60), torch.tensor([0.0, 1e-4, -200.0, 200.0])]).to(DEVICE)
        out = torch.empty_like(x)
        _tanh[(1,)](x, out)
        assert (out - torch.tanh(x)).abs().max() < 3e-7

    def test_a_static_grid_covers_every_row_block_of_a_ragged_batch_once(self) -> None:
        group, block_m = 3, 16
        lengths = [0, 1, 5, 6, 40, 0, 0, 17, 0]
        cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(DEVICE)
        programs = sum(lengths) * group // block_m + len(lengths)
        sequence = torch.full((programs,), -1, dtype=torch.int32, device=DEVICE)
        block = sequence.clone()
        _sequences[(programs,)](cu, len(lengths), sequence, block, group, block_m)
        seen = set(zip(sequence.tolist(), block.tolist(), strict=True))
        assert len(seen) == programs
        needed = {(s, b) for s, n in enumerate(lengths) for b in range(-(-n * group // block_m))}
        assert needed <= seen


@pytest.mark.skipif(HAS_GPU, reason="the interpreter is on only where there is no GPU: 5 cases")
class TestInterpreterRepair:
    """The interpreter's own arithmetic against torch, over every bit pattern."""

    @pytest.mark.parametrize(
        ("dtype", "name"), [(tl.float8e4nv, "float8_e4m3fn"), (tl.float8e5, "float8_e5m2"), (tl.bfloat16, "bfloat16")]
    )
    def test_every_value_decodes_and_encodes_as_in_torch(self, dtype, name: str) -> None:
        torch_dtype = getattr(torch, name)
        bits = torch.arange(1 << (8 * torch_dtype.itemsize), dtype=torch.int32)
        raw = bits.to(torch.uint8 if torch_dtype.itemsize == 1 else torch.uint16)
        values = raw.view(torch_dtype).float()
        decoded = torch.from_numpy(interpreter.decode(raw.numpy(), dtype).copy())
        assert torch.equal(decoded.nan_to_num(7.0), values.nan_to_num(7.0))
        finite = values.isfinite()
        encoded = torch.from_numpy(interpreter.encode(values.numpy(), dtype).copy())
        assert torch.equal(encoded[finite].int(), raw[finite].int())

    def test_rounding_is_to_nearest_even_and_fp8_saturates(self) -> None:
        import numpy as np

        values = np.array([1.00390625, 1.01171875, 3e38, -1e39, 500.0], dtype=np.float32)
        bf16 = torch.tensor(values).to(torch.bfloat16).view(torch.uint16).numpy()
        assert np.array_equal(interpreter.encode(values, tl.bfloat16), bf16)
        assert interpreter.encode(np.float32([500.0, -1e9]), tl.float8e4nv).tolist() == [0x7E, 0xFE]

    def test_a_kernel_s_functions_compute_as_often_as_they_are_called_and_leave_the_language_as_it_was(self) -> None:
        load, method = tl.load, tl.tensor.__add__
        for _ in range(2):
            values = torch.arange(8, dtype=torch.float32)
            sums = torch.zeros(2)
            _doubled[(2,)](values, sums, 3)
            assert values.tolist() == [8.0 * index for index in range(8)]
            assert sums.tolist() == [8.0 * 6, 8.0 * 22]
            assert (tl.load, tl.tensor.__add__) == (load, method)


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _doubled(pointer, sums, times):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    value = tl.load(pointer + at)
    for _ in range(times):
        value = _twice(value)
    tl.store(pointer + at, value)
    tl.store(sums + tl.program_id(0), tl.sum(value, 0))


class TestOwnScales:
    """Scales that a tensor's largest magnitude gives: in one launch, two, or three, by the number of rows."""

    @pytest.mark.parametrize("rows", [4, 5, 257])
    @pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu, None], ids=["fp8", "e8m0", "nvfp4"])
    def test_the_bits_are_those_of_the_reference(self, scale_dtype: torch.dtype | None, rows: int) -> None:
        x = torch.randn(rows, 32, device=DEVICE).bfloat16()
        x[0, 3], x[-1, 5] = torch.nan, -77.0
        x = torch.cat([x, x], 1)[:, :32]  # rows apart
        quantize = kernelhub.quantize_nvfp4 if scale_dtype is None else kernelhub.quantize_fp8
        options = {} if scale_dtype is None else {"granularity": "tensor", "scale_dtype": scale_dtype}
        want = quantize.reference(x.cpu(), **options)
        for one, other in zip(quantize(x, **options, backend="triton"), want, strict=True):
            assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))
