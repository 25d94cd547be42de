"""What every kernel of `write_kv_cache` must do, to the bit. Subclass `KvCacheContract` and name the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.kv_cache.inputs import write_kv_cache_inputs
from kernelhub.testing import OpContract
from tests.conftest import DEVICE

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CACHES = ("k_cache", "v_cache")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class RopeContract(OpContract):
    """With a rotary embedding; the kernel is another one than that without."""

    op = "write_kv_cache"
    device = DEVICE

    def inputs(self, **changes: Any) -> dict[str, Any]:
        sizes = {"tokens": 11, "num_kv_heads": 2, "num_q_heads": 3, "head_dim_qk": 32, "rope": "neox"}
        return write_kv_cache_inputs(**sizes | {"device": self.device} | changes)

    def check(self, arguments: dict[str, Any]) -> None:
        want = kernelhub.write_kv_cache.reference(**arguments)
        got = kernelhub.write_kv_cache(**arguments, backend=self.kernel)
        for name, one, other in zip((*CACHES, "q"), got, want, strict=True):
            assert one is arguments[name]
            assert torch.equal(bits(one), bits(other)), name

    @pytest.mark.parametrize("rope", ["neox", "interleaved"])
    def test_operands_may_have_any_strides_and_any_address(self, rope) -> None:
        arguments = self.inputs(rope=rope, rotary_dim=16)
        q, k, cache = arguments["q"], arguments["k"], arguments["cos_sin_cache"]
        shifted = torch.zeros(q.numel() + 1, dtype=q.dtype, device=q.device)[1:].view(q.shape)
        moved = {
            "q": shifted.copy_(q),
            "k": k.permute(2, 1, 0).contiguous().permute(2, 1, 0),
            "positions": arguments["positions"].repeat_interleave(2)[::2],
            "cos_sin_cache": cache.t().contiguous().t(),
        }
        self.check(arguments | moved)
        self.check(arguments | {"q": q.permute(2, 1, 0).contiguous().permute(2, 1, 0)})

    def test_queries_beside_keys_are_rotated_in_place_and_nothing_else(self) -> None:
        for _ in range(3):  # known calls, too
            arguments = self.inputs(rotary_dim=24)
            k, v, tail = arguments["k"].clone(), arguments["v"].clone(), arguments["q"][..., 24:].clone()
            self.check(arguments)
            assert torch.equal(arguments["k"], k)
            assert torch.equal(arguments["v"], v)
            assert torch.equal(arguments["q"][..., 24:], tail)

    def test_garbage_in_tokens_of_padding_is_not_used(self) -> None:
        arguments = self.inputs(skipped=2)
        padding = arguments["slot_mapping"] < 0
        arguments["positions"][padding] = 1 << 60
        for name in ("q", "k", "v"):
            arguments[name][padding] = torch.nan
        before = arguments["q"].clone()
        want = kernelhub.write_kv_cache.reference(**arguments)
        got = kernelhub.write_kv_cache(**arguments, backend=self.kernel)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, want, strict=True))
        assert torch.equal(bits(got[2][padding]), bits(before[padding]))

    def test_one_vector_and_its_angle_give_what_the_paper_says(self) -> None:
        angle = torch.tensor([0.5, 1.25], device=self.device)
        arguments = self.inputs(tokens=1, num_kv_heads=1, num_q_heads=1, head_dim_qk=4, skipped=0, dtype=torch.float32)
        arguments |= {
            "cos_sin_cache": torch.cat([angle.cos(), angle.sin()])[None],
            "positions": torch.zeros_like(arguments["positions"]),
        }
        x = torch.tensor([1.0, 2.0, -3.0, 4.0], device=self.device)
        for is_neox, pairs in ((True, ((0, 2), (1, 3))), (False, ((0, 1), (2, 3)))):
            arguments["q"].copy_(x)
            q = kernelhub.write_kv_cache(**arguments | {"is_neox": is_neox}, backend=self.kernel)[2].flatten()
            for (i, j), of in zip(pairs, angle, strict=True):
                turned = torch.view_as_complex(x[[i, j]]) * torch.polar(torch.ones_like(of), of)
                torch.testing.assert_close(q[[i, j]], torch.view_as_real(turned))

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs(rope="interleaved", kv_dtype=FP8, kv_layout="HND")
        plan = kernelhub.write_kv_cache.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        given = {name: value for name, value in arguments.items() if name not in ("kv_layout", "is_neox")}
        for _ in range(4):
            want = kernelhub.write_kv_cache.reference(**arguments)
            got = plan.run(**given)
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, want, strict=True))
        for parameter, wrong in (
            ("q", {"q": None}),
            ("cos_sin_cache", {"cos_sin_cache": given["cos_sin_cache"][:, :16]}),
            ("cos_sin_cache", {"cos_sin_cache": None, "positions": None, "q": None}),
        ):
            with pytest.raises(InvalidArgument, match="the plan") as caught:
                plan.run(**given | wrong)
            assert caught.value.parameter == parameter


class KvCacheContract(OpContract):
    op = "write_kv_cache"
    device = DEVICE

    def inputs(self, **changes: Any) -> dict[str, Any]:
        sizes = {"tokens": 11, "num_kv_heads": 2, "num_q_heads": 1, "head_dim_qk": 32, "device": self.device}
        return write_kv_cache_inputs(**sizes | changes)

    def run(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return kernelhub.write_kv_cache(**arguments, backend=self.kernel)

    def check(self, arguments: dict[str, Any]) -> None:
        want = kernelhub.write_kv_cache.reference(**arguments)
        got = self.run(arguments)
        for name, cache, other in zip(CACHES, got, want, strict=True):
            assert cache is arguments[name]
            assert torch.equal(bits(cache), bits(other)), name

    def test_nan_and_negative_zero_keep_their_bits(self) -> None:
        arguments = self.inputs()
        for name in ("k", "v"):
            random = torch.randint(-(1 << 15), 1 << 15, arguments[name].shape, dtype=torch.int16)
            arguments[name].copy_(random.view(torch.bfloat16))
        self.check(arguments)

    @pytest.mark.parametrize("kv_dtype", [None, FP8, E5M2])
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_caches_may_be_halves_of_one_tensor(self, kv_dtype, layout) -> None:
        """As vLLM's of [num_pages, 2, ...], and every second column of a wider one; nothing beside them is written."""
        arguments = self.inputs(kv_dtype=kv_dtype, kv_layout=layout)
        want = kernelhub.write_kv_cache.reference(**arguments)
        shape = arguments["k_cache"].shape
        both = torch.zeros(shape[0], 2, *shape[1:-1], 2 * shape[-1], device=self.device).to(kv_dtype or torch.bfloat16)
        moved = dict(zip(CACHES, (both[:, 0, ..., ::2], both[:, 1, ..., ::2]), strict=True))
        for name, half in moved.items():
            half.copy_(arguments[name])
        for _ in range(2):  # the second call knows the caches
            self.run(arguments | moved)
        for name, other in zip(CACHES, want, strict=True):
            assert torch.equal(bits(moved[name]), bits(other))
        assert not bits(both[..., 1::2]).any()

    def test_tokens_may_have_any_strides_and_any_address(self) -> None:
        for kv_dtype in (None, FP8):
            arguments = self.inputs(kv_dtype=kv_dtype)
            want = kernelhub.write_kv_cache.reference(**arguments)
            k, v = arguments["k"], arguments["v"]
            shifted = torch.zeros(v.numel() + 1, dtype=v.dtype, device=v.device)[1:].view(v.shape)
            moved = {
                "k": k.permute(2, 1, 0).contiguous().permute(2, 1, 0),
                "v": shifted.copy_(v),
                "slot_mapping": arguments["slot_mapping"].repeat_interleave(2)[::2],
            }
            got = self.run(arguments | moved)
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, want, strict=True))

    def test_what_is_half_way_after_division_goes_to_even(self) -> None:
        """With the reciprocal of the scale instead, some of these come out on one side of the half."""
        halves = torch.tensor([(m + 0.5) / 8 * 2.0**e for m in range(8, 16) for e in range(-5, 8)])
        for scale in (0.0171, 0.3):
            values = (halves * torch.tensor(scale))[None, None].to(self.device)
            sizes = {"num_kv_heads": 1, "head_dim_qk": len(halves), "tokens": 1, "skipped": 0}
            arguments = self.inputs(dtype=torch.float32, kv_dtype=FP8, **sizes)
            self.check(arguments | {"k": values, "v": -values, "k_scale": scale, "v_scale": scale})

    def test_a_scale_of_a_head_may_be_expanded(self) -> None:
        arguments = self.inputs(kv_dtype=FP8)
        scale = torch.full((1,), 0.3, device=self.device)
        self.check(arguments | {"k_scale": scale.expand(2), "v_scale": torch.ones(4, device=self.device)[::2]})

    def test_garbage_in_skipped_tokens_is_not_read(self) -> None:
        for kv_dtype in (None, FP8):
            arguments = self.inputs(kv_dtype=kv_dtype)
            want = kernelhub.write_kv_cache.reference(**arguments)
            for name in ("k", "v"):
                arguments[name][arguments["slot_mapping"] < 0] = torch.nan
            arguments["slot_mapping"][arguments["slot_mapping"] < 0] = -(1 << 62)
            got = self.run(arguments)
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, want, strict=True))

    def test_attention_reads_what_was_written(self) -> None:
        for layout in ("NHD", "HND"):
            arguments = self.inputs(tokens=20, skipped=0, kv_layout=layout, dtype=torch.float32)
            arguments["slot_mapping"] = torch.arange(20, device=self.device) + 16
            caches = self.run(arguments)
            q = torch.randn(1, 2, 32, device=self.device)
            table = torch.tensor([[1, 2]], dtype=torch.int32, device=self.device)
            length = torch.tensor([20], dtype=torch.int32, device=self.device)
            out = kernelhub.paged_attention.reference(q, *caches, table, length, kv_layout=layout)
            scores = torch.einsum("bhd,thd->bht", q, arguments["k"]) / 32**0.5
            want = torch.einsum("bht,thd->bhd", scores.softmax(-1), arguments["v"])
            torch.testing.assert_close(out, want, rtol=0, atol=1e-5)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs(kv_dtype=FP8, kv_layout="HND")
        want = kernelhub.write_kv_cache.reference(**arguments)
        plan = kernelhub.write_kv_cache.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        del arguments["kv_layout"]
        for _ in range(2):
            got = plan.run(**arguments)
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got, want, strict=True))
        for other in ({"kv_dtype": None}, {"kv_dtype": FP8, "num_kv_heads": 3}, {"kv_dtype": E5M2}):
            changed = self.inputs(kv_layout="HND", **other)
            del changed["kv_layout"]
            with pytest.raises(InvalidArgument, match="the plan is for"):
                plan.run(**changed)
