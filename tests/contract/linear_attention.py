"""What every kernel of `linear_attention` must do. Subclass `LinearContract` and name the kernel."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.evidence.cases import CASES
from kernelhub.ops.linear_attention.inputs import linear_inputs
from kernelhub.ops.linear_attention.tolerance import result_error_allowed, state_error_allowed
from kernelhub.ops.models.shapes import LinearModel
from kernelhub.testing import KernelCase, OpContract
from tests.conftest import DEVICE

SMALL = LinearModel("small", 3, 32, 16)
ABSOLUTE = ("q", "k", "v", "state")


class LinearContract(OpContract):
    """The op's cases, within a bound that depends on whether the kernel multiplies in the dtype of its operands.

    The op's own bound allows every kernel to, since no record says it.
    """

    op = "linear_attention"
    device = DEVICE
    rounds_operands: ClassVar[bool] = False

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return linear_inputs(**{"model": SMALL, "batch": 2, "tokens": 40, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        return kernelhub.linear_attention(**arguments, **more, backend=self.kernel)

    def check(self, got: tuple[Tensor, Tensor], arguments: dict[str, Any]) -> None:
        """The result and new states, against the recurrence in float64."""
        self.check_against(got, arguments, arguments)

    def check_against(
        self, got: tuple[Tensor, Tensor], arguments: dict[str, Any], bounded: dict[str, Any], factor: float = 1.0
    ) -> None:
        """`bounded`: whose absolute values bound the error."""
        reference = kernelhub.linear_attention.reference
        want, want_state = reference(**arguments, return_state=True, dtype=torch.float64)
        sized = {name: value.abs() if name in ABSOLUTE else value for name, value in bounded.items()}
        sized["scale"] = abs(bounded.get("scale", 1.0))
        size, size_state = reference(**sized, return_state=True, dtype=torch.float64)
        q = arguments["q"]
        about = (q.dtype, bounded["q"].shape[-3], q.shape[-1])
        rounds = {"rounds_operands": self.rounds_operands}
        out, state = got
        assert (out.shape, out.dtype) == (want.shape, q.dtype)
        assert (state.shape, state.dtype) == (want_state.shape, torch.float32)
        for past in CASES[self.op].untouched(arguments).values():  # rows that nobody writes
            out, want, size = out[~past], want[~past], size[~past]
        excess = (out.double() - want).abs() - factor * result_error_allowed(want, size, *about, **rounds)
        assert (excess <= 1e-30).all(), f"off by {float((out.double() - want).abs().max()):.3g}"
        excess = (state.double() - want_state).abs() - factor * state_error_allowed(size_state, *about, **rounds)
        assert (excess <= 1e-30).all(), f"a state off by {float((state.double() - want_state).abs().max()):.3g}"

    def test_case(self, case: KernelCase) -> None:
        case.check()
        made = next(item for item in CASES[self.op].cases() if item.label == case.label).make(torch.device(self.device))
        arguments = {name: value for name, value in made.items() if name not in ("return_state", "out_state")}
        before = None if "state" not in arguments else arguments["state"].clone()
        self.check(self.run(arguments, return_state=True), arguments)
        if before is not None:
            assert torch.equal(arguments["state"], before), "a state that is only read was written"

    def test_the_reference_in_float32_is_within_its_tolerance(self) -> None:
        for changes in ({"lengths": (70, 1, 0, 33)}, {"tokens": 1}, {"state": True}, {"slots": (3, -1)}):
            arguments = self.inputs(**changes, dtype=torch.float32)
            made = kernelhub.linear_attention.reference(**arguments, return_state=True)
            LinearContract.check(self, made, arguments)

    def test_states_go_on_in_place(self) -> None:
        for tokens in (1, 30):
            arguments = self.inputs(tokens=tokens, slots=(3, 0), num_slots=5)
            want, want_states = self.run(arguments, return_state=True)
            pool = arguments["state"]
            before = pool.clone()
            got, states = self.run(arguments, out_state=pool)
            assert states is pool
            assert torch.equal(got, want)
            assert torch.equal(pool[[3, 0]], want_states)
            assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])

    def test_states_go_elsewhere(self) -> None:
        arguments = self.inputs(state=True)
        want = self.run(arguments, return_state=True)[1]
        elsewhere = torch.full_like(arguments["state"], torch.nan)
        assert torch.equal(self.run(arguments, out_state=elsewhere)[1], want)
        assert torch.equal(elsewhere, want)

    def test_states_of_inference_mode_are_written(self) -> None:
        for options in ({"slots": (3, 0), "num_slots": 5}, {"state": True}):
            arguments = self.inputs(**options)
            want, states = self.run(arguments, out_state=arguments["state"].clone())
            with torch.inference_mode():
                pool = arguments["state"].clone()
            got, _ = self.run(arguments | {"state": pool}, out_state=pool)
            assert torch.equal(got, want)
            assert torch.equal(pool, states)

    def test_a_negative_slot_starts_from_zero_and_keeps_nothing(self) -> None:
        for tokens in (1, 20):
            arguments = self.inputs(tokens=tokens, slots=(-1, 2), num_slots=3)
            pool = arguments["state"]
            before = pool.clone()
            got, _ = self.run(arguments, out_state=pool)
            assert torch.equal(pool[:2], before[:2])
            assert not torch.equal(pool[2], before[2])
            alone = {name: arguments[name][:1] for name in "qkv"} | {"decay": arguments["decay"]}
            assert torch.equal(got[:1], self.run(alone))

    def test_states_may_be_kept_in_a_pool_without_coming_from_it(self) -> None:
        arguments = self.inputs()
        want, want_states = self.run(arguments, return_state=True)
        pool = torch.zeros(4, *want_states.shape[1:], device=self.device)
        at = torch.tensor([3, 1], dtype=torch.int32, device=self.device)
        got, _ = self.run(arguments, state_indices=at, out_state=pool)
        assert torch.equal(got, want)
        assert torch.equal(pool[[3, 1]], want_states)
        assert not pool[[0, 2]].any()

    def test_parts_of_a_sequence_are_the_whole(self) -> None:
        """Also of one of each length on both sides of a chunk's end, and token by token."""
        for dtype in (torch.float32, torch.bfloat16):
            whole = self.inputs(batch=1, tokens=140, state=True, dtype=dtype)
            state, pieces, first = whole["state"], [], 0
            for size in (1, 63, 65, 2, 9):
                part = whole | {name: whole[name][:, first : first + size] for name in "qkv"} | {"state": state}
                out, state = self.run(part, return_state=True)
                pieces.append(out)
                first += size
            self.check_against((torch.cat(pieces, 1), state), whole, whole, factor=5.0)

    def test_ragged_sequences_are_each_alone(self) -> None:
        arguments = self.inputs(lengths=(5, 0, 70), state=True)
        got, states = self.run(arguments, return_state=True)
        assert torch.equal(states[1], arguments["state"][1]), "a sequence without tokens passes its state on"
        for index, rows in ((0, slice(0, 5)), (2, slice(5, 75))):
            alone = {name: arguments[name][None, rows] for name in "qkv"} | {"decay": arguments["decay"]}
            one, state = self.run(alone, state=arguments["state"][index : index + 1], return_state=True)
            torch.testing.assert_close(got[rows], one[0], rtol=0, atol=0)
            torch.testing.assert_close(states[index], state[0], rtol=0, atol=0)

    def test_decays_of_every_size_neither_overflow_nor_vanish(self) -> None:
        arguments = self.inputs(batch=1, tokens=130, dtype=torch.float32)
        arguments["decay"] = torch.tensor([0.0, 50.0, 1e4], device=self.device)
        got, state = self.run(arguments, return_state=True)
        self.check((got, state), arguments)
        q, k, v = (arguments[name][0, :, 2] for name in "qkv")
        alone = (q * k).sum(-1, keepdim=True) * v  # nothing of the past is left
        torch.testing.assert_close(got[0, :, 2], alone, rtol=1e-5, atol=1e-5)

    def test_states_beyond_the_range_of_half_precision(self) -> None:
        arguments = self.inputs(batch=1, tokens=20, dtype=torch.float16, state=True)
        arguments["state"] *= 3e5
        arguments["q"] *= 2.0**-8
        self.check(self.run(arguments, return_state=True), arguments)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs(state=True)
        want, want_states = self.run(arguments, return_state=True)
        moved = dict(arguments)
        for name in "qkv":
            moved[name] = arguments[name].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        moved["state"] = arguments["state"].transpose(2, 3).contiguous().transpose(2, 3)
        moved["decay"] = arguments["decay"].repeat_interleave(2)[::2]
        wide = torch.zeros(*want.shape[:-1], 2 * want.shape[-1] + 2, dtype=want.dtype, device=self.device)
        out = wide[..., 1:-1:2]
        states = torch.zeros(2, 3, 16, 32, device=self.device).transpose(2, 3)
        self.run(moved, out=out, out_state=states)
        # Tiles of other strides are multiplied alike, but a matrix product may sum in another order.
        torch.testing.assert_close(out, want, rtol=2**-7, atol=1e-4)
        torch.testing.assert_close(states, want_states, rtol=1e-5, atol=1e-5)
        assert not wide[..., 0::2].any()

    def test_no_tokens_pass_the_states_on(self) -> None:
        arguments = self.inputs(tokens=0, state=True)
        out, states = self.run(arguments, return_state=True)
        assert out.shape == (2, 0, 3, 16)
        assert torch.equal(states, arguments["state"])
        assert self.run(self.inputs(batch=0)).shape == (0, 40, 3, 16)
        assert self.run(self.inputs(tokens=0)).shape == (2, 0, 3, 16)
        out, states = self.run(self.inputs(batch=0), return_state=True)
        assert states.shape == (0, 3, 32, 16)

    def test_the_same_call_gives_the_same_bits(self) -> None:
        arguments = self.inputs(state=True)
        first = self.run(arguments, return_state=True)
        for got, want in zip(self.run(arguments, return_state=True), first, strict=True):
            assert torch.equal(got, want)

    def test_explain_reads_the_call(self) -> None:
        arguments = self.inputs(lengths=(3, 4), slots=(1, 0))
        problem = kernelhub.linear_attention.explain(**arguments, backend=self.kernel).problem
        assert (problem.q_len, problem.ragged, problem.state, problem.out_state) == ("any", True, True, False)
        assert (problem.num_heads, problem.head_dim, problem.value_dim, problem.state_indices) == (3, 32, 16, True)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs(state=True)
        plan = kernelhub.linear_attention.prepare(**arguments, return_state=True, backend=self.kernel)
        assert plan.kernel == self.kernel
        for got, want in zip(plan.run(**arguments), self.run(arguments, return_state=True), strict=True):
            assert torch.equal(got, want)
        with pytest.raises(InvalidArgument, match="the plan is for bfloat16"):
            plan.run(**self.inputs(state=True, dtype=torch.float16))
        with pytest.raises(InvalidArgument, match="without state and"):
            plan.run(**self.inputs())
        without = kernelhub.linear_attention.prepare(**arguments, backend=self.kernel)
        with pytest.raises(InvalidArgument, match="out_state is given to a plan without it"):
            without.run(**arguments, out_state=torch.empty_like(arguments["state"]))
