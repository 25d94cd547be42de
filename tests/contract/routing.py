"""What every kernel of `route_experts` must do. Subclass `RoutingContract` and name the kernel."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.models.shapes import MOE, MoeModel
from kernelhub.ops.moe.routing.inputs import routing_inputs
from kernelhub.ops.moe.routing.tolerance import decided, weights_agree
from tests.conftest import DEVICE


def layer(num_experts: int, top_k: int, **more: Any) -> MoeModel:
    return MoeModel(f"{num_experts} experts, {top_k} of them", num_experts, top_k, 1, 1, **more)


def grouped(num_experts: int, top_k: int, num_groups: int, topk_groups: int, **more: Any) -> MoeModel:
    return layer(num_experts, top_k, num_groups=num_groups, topk_groups=topk_groups, **more)


BIASED = {"scoring": "sigmoid", "correction_bias": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, by what is unusual about it."""

    label: str
    inputs: dict[str, Any]

    def __str__(self) -> str:
        return self.label


CASES = [
    *(Case(name, {"model": name}) for name in MOE),
    *(Case(f"{dtype}"[6:], {"dtype": dtype}) for dtype in (torch.bfloat16, torch.float16)),
    *(Case(f"{tokens} tokens", {"tokens": tokens}) for tokens in (1, 3, 5, 17)),
    *(
        Case(f"{top_k} of {experts}", {"model": layer(experts, top_k)})
        for experts, top_k in ((1, 1), (8, 8), (9, 2), (129, 22), (160, 1), (511, 10), (512, 22))
    ),
    *(
        Case(f"{groups[2]} groups of {groups[0] // groups[2]}, {groups[3]} chosen", {"model": grouped(*groups, **more)})
        for groups, more in (
            ((12, 3, 4, 1), {}),
            ((12, 6, 4, 2), BIASED),
            ((8, 3, 8, 5), BIASED),
            ((160, 6, 8, 3), BIASED),
            ((60, 4, 3, 2), {"scoring": "sigmoid"}),
            ((16, 8, 2, 1), {"scoring": "softmax_after_topk", **BIASED}),
            ((64, 8, 8, 8), BIASED),
        )
    ),
    Case("softmax, biased", {"model": layer(32, 5, correction_bias=True, renormalize=False)}),
    Case("logits chosen by a bias", {"model": layer(32, 5, scoring="softmax_after_topk", correction_bias=True)}),
    Case("sigmoid, not renormalized", {"model": layer(32, 5, scoring="sigmoid", renormalize=False)}),
]


class RoutingContract:
    kernel: ClassVar[str]
    device: ClassVar[str] = DEVICE

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        return CASES

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return routing_inputs(**{"tokens": 7, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
        return kernelhub.route_experts(**arguments, **more, backend=self.kernel)

    def check(self, got: tuple[Tensor, Tensor], arguments: dict[str, Any]) -> None:
        weights, ids = got
        want, want_ids = kernelhub.route_experts.reference(**arguments, dtype=torch.float64)
        assert (weights.shape, weights.dtype) == (want.shape, torch.float32)
        assert (ids.shape, ids.dtype) == (want.shape, torch.int32)
        ordered = ids.sort(1).values
        assert (ordered[:, 1:] > ordered[:, :-1]).all(), "an expert is chosen twice"
        assert ((ids >= 0) & (ids < arguments["logits"].shape[1])).all()
        sure = decided(**arguments)
        assert int(sure.sum()) >= 0.8 * len(sure), "the inputs leave too much to rounding"
        assert torch.equal(ids[sure], want_ids[sure])
        assert weights_agree(weights, want, arguments.get("scaling_factor", 1.0))[sure].all()

    def test_matches_the_reference_in_float64(self, case: Case) -> None:
        arguments = self.inputs(**case.inputs)
        shape = (arguments["logits"].shape[0], arguments["top_k"])
        weights = torch.full(shape, torch.nan, device=self.device)
        ids = torch.full(shape, -7, dtype=torch.int32, device=self.device)
        got = self.run(arguments, out_weights=weights, out_ids=ids)
        assert got[0] is weights
        assert got[1] is ids
        self.check(got, arguments)
        again = self.run(arguments)
        self.check(again, arguments)
        assert torch.equal(again[0], weights)
        assert torch.equal(again[1], ids)

    def test_equal_experts_are_taken_by_their_ids(self) -> None:
        for scoring in ("softmax", "sigmoid", "softmax_after_topk"):
            logits = torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0, -1.0], [2.0] * 6], device=self.device)
            _, ids = self.run({"logits": logits, "top_k": 5, "scoring": scoring})
            assert ids.tolist() == [[1, 3, 0, 2, 4], [0, 1, 2, 3, 4]]
            _, ids = self.run({"logits": logits, "top_k": 2, "scoring": scoring, "num_groups": 3, "topk_groups": 2})
            assert ids.tolist() == [[1, 3], [0, 1]]

    def test_equal_groups_are_taken_by_their_numbers(self) -> None:
        arguments = {
            "logits": torch.zeros(3, 12, device=self.device),
            "top_k": 4,
            "scoring": "sigmoid",
            "num_groups": 4,
            "topk_groups": 2,
            "correction_bias": torch.tensor([0.0, 0, 0, 1, 1, 0, 2, 0, 0, 1, 1, 0], device=self.device),
        }
        # Sums of the best two of each group: 1, 3, 3, 3 with 0.5 each added; groups 1 and 2 are chosen.
        assert self.run(arguments)[1].tolist() == [[6, 3, 4, 5]] * 3

    def test_nan_is_never_chosen_before_a_number_and_does_not_spread(self) -> None:
        inf, nan = torch.inf, torch.nan
        rows = [[nan, 1.0, nan, 0.0], [-inf, 1.0, -inf, 0.0], [nan] * 4, [-inf] * 4, [0.0, inf, 1.0, 2.0]]
        logits = torch.tensor(rows, device=self.device)
        weights, ids = self.run({"logits": logits, "top_k": 3, "renormalize": True})
        assert ids.tolist() == [[1, 3, 0], [1, 3, 0], [0, 1, 2], [0, 1, 2], [1, 3, 2]]
        e = 1 / (1 + torch.e)
        want = [[1 - e, e, 0.0], [1 - e, e, 0.0], [0.0] * 3, [0.0] * 3, [1.0, 0.0, 0.0]]
        torch.testing.assert_close(weights.cpu(), torch.tensor(want), rtol=2**-15, atol=0)
        for scoring in ("sigmoid", "softmax_after_topk"):
            weights, ids = self.run({"logits": logits, "top_k": 3, "scoring": scoring, "renormalize": True})
            assert weights.isfinite().all()
            assert ids.tolist()[:4] == [[1, 3, 0], [1, 3, 0], [0, 1, 2], [0, 1, 2]]
        bias = torch.tensor([0.0, nan, 0.0, -inf], device=self.device)
        _, ids = self.run({"logits": torch.zeros(1, 4, device=self.device), "top_k": 4, "correction_bias": bias})
        assert ids.tolist() == [[0, 2, 1, 3]]

    def test_every_argument_matters(self) -> None:
        base = self.inputs(tokens=32)
        weights, ids = self.run(base)
        for change in (
            {"scoring": "softmax"},
            {"num_groups": None, "topk_groups": None},
            {"topk_groups": 2},
            {"correction_bias": None},
            {"correction_bias": -base["correction_bias"]},
            {"renormalize": False},
            {"scaling_factor": 1.0},
        ):
            other = self.run(base | change)
            assert not (torch.equal(other[0], weights) and torch.equal(other[1], ids)), change
            self.check(other, base | change)

    def test_no_groups_is_none_nought_or_one(self) -> None:
        plain = self.inputs(model="minimax-m2.5")
        want = self.run(plain)
        for groups in ((None, None), (0, 0), (1, 1), (1, None), (0, 1)):
            got = self.run(plain | {"num_groups": groups[0], "topk_groups": groups[1]})
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        arguments = self.inputs(tokens=9)
        weights, ids = self.run(arguments)
        one = self.run(arguments | {"logits": arguments["logits"][4:5]})
        assert torch.equal(one[0], weights[4:5])
        assert torch.equal(one[1], ids[4:5])

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        weights, ids = self.run(arguments)
        wide = torch.full((7, 16), torch.nan, device=self.device)
        wide_ids = torch.full((7, 16), -7, dtype=torch.int32, device=self.device)
        moved = arguments | {
            "logits": arguments["logits"].t().contiguous().t(),
            "correction_bias": arguments["correction_bias"].repeat_interleave(2)[::2],
        }
        self.run(moved, out_weights=wide[:, ::2], out_ids=wide_ids[:, 1::2])
        assert torch.equal(wide[:, ::2], weights)
        assert torch.equal(wide_ids[:, 1::2], ids)
        assert wide[:, 1::2].isnan().all()
        assert (wide_ids[:, ::2] == -7).all()

    def test_no_tokens_give_an_empty_result(self) -> None:
        weights, ids = self.run(self.inputs(tokens=0))
        assert weights.shape == ids.shape == (0, 8)

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.route_experts.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        for got, want in zip(
            plan.run(arguments["logits"], arguments["correction_bias"]), self.run(arguments), strict=True
        ):
            assert torch.equal(got, want)
        with pytest.raises(InvalidArgument, match="the plan is for float32"):
            plan.run(arguments["logits"].half(), arguments["correction_bias"])
        with pytest.raises(InvalidArgument, match="the plan is for a routing with one"):
            plan.run(arguments["logits"])
        assert kernelhub.route_experts.explain(**arguments, backend=self.kernel).problem == plan.selection.problem
