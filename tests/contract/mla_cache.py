"""What every kernel of `write_mla_cache` must do, to the bit. Subclass `MlaCacheContract` and name the kernel."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.testing import OpContract
from tests.conftest import DEVICE

FP8 = torch.float8_e4m3fn


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class MlaCacheContract(OpContract):
    op = "write_mla_cache"
    device = DEVICE

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return write_mla_cache_inputs(**{"tokens": 18, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any]) -> Tensor:
        return kernelhub.write_mla_cache(**arguments, backend=self.kernel)

    def want(self, arguments: dict[str, Any]) -> Tensor:
        """The cache after the call, element by element, by another way than the reference's."""
        k_rope = arguments["k_rope"]
        rows = torch.cat([arguments["kv_c"], k_rope.reshape(len(k_rope), k_rope.shape[-1])], 1)
        cache = arguments["kv_cache"].clone()
        if cache.dtype is FP8:
            rows = (rows.double() / float(arguments["kv_scale"])).float()  # exact: the scale is a power of two
            rows = rows.clamp(-448, 448).to(FP8)
        slots = arguments["slot_mapping"].cpu()
        flat = bits(cache).flatten(0, -2)
        flat[slots[slots >= 0].to(self.device)] = bits(rows)[(slots >= 0).to(self.device)]
        return flat.view(cache.dtype).view(cache.shape)

    def test_a_scale_that_is_no_power_of_two_divides(self) -> None:
        for dtype in FLOATS:
            for kv_scale in (0.0171, torch.tensor([0.0171], device=self.device), torch.tensor(3.3, device=self.device)):
                arguments = self.inputs(dtype=dtype, kv_dtype=FP8, tokens=40) | {"kv_scale": kv_scale}
                want = kernelhub.write_mla_cache.reference(**arguments)
                self.run(arguments)
                assert torch.equal(bits(arguments["kv_cache"]), bits(want))

    def test_what_is_half_way_after_division_goes_to_even(self) -> None:
        """With the reciprocal of the scale instead, some of these come out on one side of the half."""
        halves = torch.tensor([(m + 0.5) / 8 * 2.0**e for m in range(8, 16) for e in range(-5, 8)])
        for kv_scale in (0.0171, 0.3, 1.7):
            scale = torch.tensor(kv_scale)
            values = halves * scale
            exact = values / scale == halves
            assert exact.sum() > 50
            arguments = self.inputs(dtype=torch.float32, kv_dtype=FP8, tokens=1, skipped=0, latent_dim=len(halves))
            arguments |= {"kv_c": values[None].to(self.device), "kv_scale": kv_scale}
            row = self.run(arguments).flatten(0, 1).view(torch.uint8)[int(arguments["slot_mapping"][0])].cpu()
            assert torch.equal(row[: len(halves)][exact] & 1, torch.zeros_like(row[: len(halves)][exact]))

    def test_fp8_is_rounded_to_nearest_even_and_saturates(self) -> None:
        values = torch.tensor(
            [1.0625, 1.1875, 464.0, 465.0, -1e30, torch.inf, 2.0**-10, 1.5 * 2.0**-9, -0.0, torch.nan]
        )
        arguments = self.inputs(dtype=torch.float32, kv_dtype=FP8, tokens=1, skipped=0, latent_dim=10)
        arguments |= {"kv_c": values[None].to(self.device), "kv_scale": 1.0}
        slot = int(arguments["slot_mapping"][0])
        row = self.run(arguments).flatten(0, 1).view(torch.uint8)[slot, :10].cpu().view(FP8).float()
        want = [1.0, 1.25, 448.0, 448.0, -448.0, 448.0, 0.0, 2.0**-8, -0.0]
        assert row[:9].tolist() == want
        assert torch.signbit(row[8])
        assert row[9].isnan()

    def test_nan_and_negative_zero_keep_their_bits(self) -> None:
        arguments = self.inputs()
        for name in ("kv_c", "k_rope"):
            arguments[name].copy_(
                torch.randint(-(1 << 15), 1 << 15, arguments[name].shape, dtype=torch.int16).view(torch.bfloat16)
            )
        want = self.want(arguments)
        self.run(arguments)
        assert torch.equal(bits(arguments["kv_cache"]), bits(want))

    def test_operands_may_have_any_strides(self) -> None:
        for kv_dtype in (torch.bfloat16, FP8):
            arguments = self.inputs(kv_dtype=kv_dtype)
            want = self.want(arguments)
            pages, page_size, width = want.shape
            layers = torch.zeros(pages, 3, page_size, 2 * width, device=self.device).to(kv_dtype)
            cache = layers[:, 1, :, ::2]
            cache.copy_(arguments["kv_cache"])
            moved = {
                "kv_c": arguments["kv_c"].T.contiguous().T,
                "k_rope": arguments["k_rope"].repeat(1, 2).unflatten(1, (2, -1))[:, :1],
                "kv_cache": cache,
                "slot_mapping": arguments["slot_mapping"].repeat_interleave(2)[::2],
            }
            self.run(arguments | moved)
            assert torch.equal(bits(cache), bits(want))
            assert not bits(layers[:, 0]).any()
            assert not bits(layers[:, 2]).any()
            assert not bits(layers[:, 1, :, 1::2]).any()

    def test_rows_may_begin_at_any_byte_and_have_gaps(self) -> None:
        """A CPU stores elements of 16 and of 8 bytes where rows lie so, and the cache's own elsewhere."""
        for rope_dim in (64, 60, 57, 0):
            arguments = self.inputs(rope_dim=rope_dim)
            want = self.want(arguments)
            pages, page_size, width = want.shape
            for start, after_row, after_page in itertools.product((0, 4, 1), (0, 8, 4, 3), (0, 8, 4, 3)):
                row = width + after_row
                page = page_size * row + after_page
                memory = torch.zeros(start + pages * page, dtype=torch.bfloat16, device=self.device)
                cache = memory.as_strided(want.shape, (page, row, 1), start)
                cache.copy_(arguments["kv_cache"])
                self.run(arguments | {"kv_cache": cache})
                assert torch.equal(bits(cache), bits(want))
                cache.zero_()
                assert not bits(memory).any()

    def test_the_cache_may_have_a_dimension_of_one_head(self) -> None:
        arguments = self.inputs()
        want = self.want(arguments)
        headed = arguments["kv_cache"].unsqueeze(2)
        assert self.run(arguments | {"kv_cache": headed}) is headed
        assert torch.equal(bits(arguments["kv_cache"]), bits(want))

    def test_no_tokens_write_nothing(self) -> None:
        arguments = self.inputs(tokens=0)
        before = arguments["kv_cache"].clone()
        self.run(arguments)
        assert torch.equal(arguments["kv_cache"], before)

    def test_attention_reads_what_was_written(self) -> None:
        arguments = self.inputs(tokens=40, skipped=0, page_size=16, spare_pages=0)
        arguments["slot_mapping"] = torch.arange(40, device=self.device)
        cache = self.run(arguments)
        q = torch.randn(1, 2, 576, device=self.device).to(torch.bfloat16)
        table = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=self.device)
        length = torch.tensor([40], dtype=torch.int32, device=self.device)
        out = kernelhub.mla_attention.reference(q, cache, table, length, scale=0.1)
        rows = torch.cat([arguments["kv_c"], arguments["k_rope"]], 1).float()
        want = torch.softmax(q[0].float() @ rows.T * 0.1, 1) @ rows[:, :512]
        torch.testing.assert_close(out[0], want, rtol=0, atol=1e-5)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs(kv_dtype=FP8)
        want = self.want(arguments)
        plan = kernelhub.write_mla_cache.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        assert torch.equal(bits(plan.run(**arguments)), bits(want))
        for other in (
            {"kv_dtype": None},
            {"kv_dtype": FP8, "dtype": torch.float16},
            {"kv_dtype": FP8, "page_size": 16},
        ):
            with pytest.raises(InvalidArgument, match="the plan is for"):
                plan.run(**self.inputs(**other))
