"""What every kernel of `merge_attention_states` must do. Subclass `MergeContract` and name the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.merge.tolerance import largest_error_allowed, lse_error_allowed, quantized_error_allowed
from tests.conftest import DEVICE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, by what is unusual about it."""

    label: str
    inputs: dict[str, Any]

    def __str__(self) -> str:
        return self.label


CASES = [
    *(Case(f"{dtype}"[6:], {"dtype": dtype}) for dtype in DTYPES),
    *(Case(f"{parts} parts", {"parts": parts}) for parts in (3, 4, 8, 9)),
    *(Case(f"width {width}", {"head_dim": width}) for width in (1, 16, 72, 80, 96, 192, 256, 512)),
    *(Case(f"{heads} heads", {"num_heads": heads}) for heads in (1, 3, 7)),
    *(Case(f"{tokens} tokens", {"tokens": tokens}) for tokens in (1, 2, 31, 33, 200)),
    *(Case(f"batch of {batch}", {"batch": batch, "tokens": 5}) for batch in (1, 3)),
    Case("batch of 3, 5 parts", {"batch": 3, "tokens": 37, "parts": 5, "dtype": torch.float16}),
    Case("every row has keys", {"empty": False}),
]


class MergeContract:
    kernel: ClassVar[str]
    device: ClassVar[str] = DEVICE
    quantises: ClassVar[bool] = True

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        return CASES

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return merge_inputs(**{"tokens": 20, "num_heads": 5, "head_dim": 64, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        return kernelhub.merge_attention_states(**arguments, **more, backend=self.kernel)

    def check(self, got: Any, arguments: dict[str, Any]) -> None:
        want, want_lse = kernelhub.merge_attention_states.reference(
            arguments["outs"], arguments["lses"], return_lse=True, dtype=torch.float64
        )
        out, lse = got if isinstance(got, tuple) else (got, None)
        assert out.shape == want.shape
        assert out.dtype is arguments["outs"][0].dtype
        largest = max(float(part.double().nan_to_num().abs().max()) for part in arguments["outs"])
        assert float((out.double() - want).abs().max()) <= largest_error_allowed(out.dtype, largest)
        assert out.isfinite().all()
        if lse is not None:
            assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
            keys = want_lse != -torch.inf
            assert ((lse.double() - want_lse).abs() <= lse_error_allowed(want_lse))[keys].all()

    def test_matches_the_reference_in_float64(self, case: Case) -> None:
        arguments = self.inputs(**case.inputs)
        first = arguments["outs"][0]
        out = torch.full_like(first, torch.nan)
        out_lse = torch.full_like(arguments["lses"][0], torch.nan)
        got = self.run(arguments, out=out, out_lse=out_lse)
        assert got[0] is out
        assert got[1] is out_lse
        self.check(got, arguments)
        self.check(self.run(arguments), arguments)

    def test_states_may_come_stacked(self) -> None:
        for parts in (2, 4):
            arguments = self.inputs(parts=parts)
            stacked = {name: torch.stack(tensors) for name, tensors in arguments.items()}
            for got, want in zip(self.run(stacked, return_lse=True), self.run(arguments, return_lse=True), strict=True):
                assert torch.equal(got, want)

    def test_merges_in_place(self) -> None:
        for parts in (2, 3):
            for place in range(parts):
                arguments = self.inputs(parts=parts)
                want, want_lse = self.run(arguments, return_lse=True)
                out, lse = arguments["outs"][place], arguments["lses"][place]
                assert self.run(arguments, out=out, out_lse=lse)[0] is out
                assert torch.equal(out, want)
                assert torch.equal(lse, want_lse)

    def test_a_part_without_keys_changes_nothing(self) -> None:
        arguments = self.inputs(empty=False)
        for mark in (-torch.inf, torch.inf):
            nothing = torch.full_like(arguments["outs"][0], torch.nan), torch.full_like(arguments["lses"][0], mark)
            for at in (0, 1):
                outs, lses = [arguments["outs"][0]], [arguments["lses"][0]]
                outs.insert(at, nothing[0])
                lses.insert(at, nothing[1])
                out, lse = self.run({"outs": outs, "lses": lses}, return_lse=True)
                assert torch.equal(out, arguments["outs"][0])
                torch.testing.assert_close(lse, arguments["lses"][0], rtol=0, atol=2**-17)

    def test_large_lse_do_not_overflow(self) -> None:
        arguments = self.inputs(dtype=torch.float32, empty=False)
        for shift in (300.0, -300.0, 1e4):
            shifted = arguments | {"lses": [lse + shift for lse in arguments["lses"]]}
            out, lse = self.run(shifted, return_lse=True)
            assert lse.isfinite().all()
            want = kernelhub.merge_attention_states.reference(**shifted, dtype=torch.float64)
            torch.testing.assert_close(out.double(), want, rtol=0, atol=4e-3 if shift > 1e3 else 4e-4)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs(batch=2)
        want = self.run(arguments, return_lse=True)
        moved = {
            "outs": [part.transpose(1, 2).contiguous().transpose(1, 2) for part in arguments["outs"]],
            "lses": [part.transpose(1, 2).contiguous().transpose(1, 2) for part in arguments["lses"]],
        }
        wide = torch.full((*want[0].shape[:-1], 2 * want[0].shape[-1]), torch.nan, device=self.device)
        out = wide.to(want[0].dtype)[..., ::2]
        got = self.run(moved, out=out, return_lse=True)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        assert self.run(moved).is_contiguous()

    def test_of_many_states_each_may_have_its_own_strides(self) -> None:
        arguments = self.inputs(parts=4)
        want = self.run(arguments, return_lse=True)
        for name, place in (("outs", 2), ("lses", 1)):
            part = arguments[name][place]
            arguments[name][place] = part.transpose(0, 1).contiguous().transpose(0, 1)
            for got, wanted in zip(self.run(arguments, return_lse=True), want, strict=True):
                assert torch.equal(got, wanted)

    def test_a_float8_result_is_the_merged_one_over_its_scale(self) -> None:
        if not self.quantises:
            pytest.skip(f"{self.kernel} gives no float8 result: its record says so")
        for parts in (2, 3, 9):
            arguments = self.inputs(parts=parts)
            for scale in (0.02, torch.tensor(0.02, device=self.device), torch.tensor([0.02], device=self.device)):
                out = torch.zeros_like(arguments["outs"][0], dtype=torch.float8_e4m3fn)
                got, lse = self.run(arguments, out=out, out_scale=scale, return_lse=True)
                want, want_lse = kernelhub.merge_attention_states.reference(
                    **arguments, return_lse=True, out_scale=scale, dtype=torch.float64
                )
                assert got is out
                allowed = quantized_error_allowed(want, 8.0, 0.02)
                assert ((got.double() - want).abs() <= allowed).all()
                assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
        assert self.run(arguments, out_scale=1e-9).float().abs().max() == 448

    def test_no_tokens_give_an_empty_result(self) -> None:
        out, lse = self.run(self.inputs(tokens=0, empty=False), return_lse=True)
        assert (out.shape, lse.shape) == ((0, 5, 64), (5, 0))

    def test_explain_reads_the_call(self) -> None:
        arguments = self.inputs(parts=3)
        selection = kernelhub.merge_attention_states.explain(**arguments, return_lse=True, backend=self.kernel)
        assert selection.selected == self.kernel
        assert (selection.problem.parts, selection.problem.num_heads, selection.problem.lse) == ("many", 5, True)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.merge_attention_states.prepare(**arguments, return_lse=True, backend=self.kernel)
        assert plan.kernel == self.kernel
        for got, want in zip(plan.run(**arguments), self.run(arguments, return_lse=True), strict=True):
            assert torch.equal(got, want)
        without = kernelhub.merge_attention_states.prepare(**arguments, backend=self.kernel)
        with pytest.raises(InvalidArgument, match="out_lse is given to a plan without LSE"):
            without.run(**arguments, out_lse=torch.empty_like(arguments["lses"][0]))
        with pytest.raises(InvalidArgument, match="float32"):
            plan.run([part.float() for part in arguments["outs"]], arguments["lses"])

    def test_attention_over_chunks_is_attention(self) -> None:
        q, k, v = (torch.randn(2, tokens, 4, 32, device=self.device) for tokens in (6, 50, 50))
        states = [
            kernelhub.attention(q, k[:, keys], v[:, keys], return_lse=True)
            for keys in (slice(0, 20), slice(20, 20), slice(20, 50))
        ]
        outs, lses = zip(*states, strict=True)
        merged, lse = self.run({"outs": outs, "lses": lses}, return_lse=True)
        want, want_lse = kernelhub.attention.reference(q, k, v, return_lse=True)
        torch.testing.assert_close(merged, want, rtol=0, atol=2e-5)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=2e-5)


class MergeOfHalves(MergeContract):
    """Of a kernel that takes neither float32 nor any width of heads, and gives no float8 result."""

    quantises: ClassVar[bool] = False
    widths: ClassVar[tuple[int, ...]]

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        cases = super().accepted_cases()
        return [
            case
            for case in cases
            if case.inputs.get("dtype") is not torch.float32 and case.inputs.get("head_dim", 64) in cls.widths
        ]

    def test_large_lse_do_not_overflow(self) -> None:
        arguments = self.inputs(dtype=torch.float16, empty=False)
        for shift in (300.0, -300.0, 1e4, -1e6):
            shifted = arguments | {"lses": [lse + shift for lse in arguments["lses"]]}
            self.check(self.run(shifted, return_lse=True), shifted)

    def test_attention_over_chunks_is_attention(self) -> None:
        q, k, v = (torch.randn(2, tokens, 4, 64, device=self.device).half() for tokens in (6, 50, 50))
        states = [
            kernelhub.attention(q, k[:, keys], v[:, keys], return_lse=True)
            for keys in (slice(0, 20), slice(20, 20), slice(20, 50))
        ]
        outs, lses = zip(*states, strict=True)
        merged, lse = self.run({"outs": outs, "lses": lses}, return_lse=True)
        want, want_lse = kernelhub.attention.reference(*(part.float() for part in (q, k, v)), return_lse=True)
        torch.testing.assert_close(merged.float(), want, rtol=0, atol=4e-3)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=2e-3)
