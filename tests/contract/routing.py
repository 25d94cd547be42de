"""What every kernel of `route_experts` must do. Subclass `RoutingContract` and name the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.moe.routing.inputs import routing_inputs
from kernelhub.testing import OpContract
from tests.conftest import DEVICE


class RoutingContract(OpContract):
    op = "route_experts"
    device = DEVICE

    def inputs(self, **changes: Any) -> dict[str, Any]:
        return routing_inputs(**{"tokens": 7, "device": self.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
        return kernelhub.route_experts(**arguments, **more, backend=self.kernel)

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
