"""What every kernel of `merge_attention_states` must do. Subclass `MergeContract` and name the kernel."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.evidence.cases import CASES
from kernelhub.ops.merge.inputs import merge_inputs
from kernelhub.ops.merge.tolerance import quantized_error_allowed
from kernelhub.testing import OpContract
from tests.conftest import DEVICE


class MergeContract(OpContract):
    op = "merge_attention_states"
    device = DEVICE
    quantises: ClassVar[bool] = True

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return merge_inputs(**{"tokens": 20, "num_heads": 5, "head_dim": 64, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        return kernelhub.merge_attention_states(**arguments, **more, backend=self.kernel)

    def check(self, got: tuple[torch.Tensor, torch.Tensor], arguments: dict[str, Any]) -> None:
        """Compare a result and its LSE with the reference, within the op's tolerance."""
        results = {"out": got[0], "out_lse": got[1]}
        judgement = CASES[self.op].judge(results, arguments | {"return_lse": True})
        assert judgement.ok, judgement.figures

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

    def test_autocast_changes_nothing(self) -> None:
        device = torch.device(self.device).type
        for parts, dtype in itertools.product((2, 4, 9), (torch.bfloat16, torch.float16)):
            arguments = self.inputs(parts=parts, dtype=dtype)
            want = self.run(arguments, return_lse=True)
            for other in (torch.bfloat16, torch.float16):
                with torch.autocast(device, other):
                    got = self.run(arguments, return_lse=True)
                assert torch.equal(got[0], want[0])
                assert torch.equal(got[1], want[1])

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

    def test_the_largest_lse_do_not_overflow(self) -> None:
        arguments = self.inputs(dtype=torch.float16, empty=False)
        shifted = arguments | {"lses": [lse - 1e6 for lse in arguments["lses"]]}
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
