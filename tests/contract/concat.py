"""What every kernel of `concat_mla_k` must do. Subclass `ConcatContract` and name the kernel."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.errors import InvalidArgument
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.testing import OpContract
from tests.conftest import DEVICE


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


class ConcatContract(OpContract):
    op = "concat_mla_k"
    device = DEVICE
    heads: ClassVar[int] = 5

    @classmethod
    def selection(cls, **changes: Any) -> Any:
        return kernelhub.concat_mla_k.explain(**cls.inputs(**changes), backend=cls.kernel)

    @classmethod
    def inputs(cls, **changes: Any) -> dict[str, Any]:
        return concat_inputs(**{"tokens": 18, "num_heads": cls.heads, "device": cls.device} | changes)

    def run(self, arguments: dict[str, Any], **more: Any) -> Tensor:
        return kernelhub.concat_mla_k(**arguments, **more, backend=self.kernel)

    def want(self, arguments: dict[str, Any]) -> Tensor:
        """Element by element, by another way than the reference's."""
        k_nope, k_rope = arguments["k_nope"], arguments["k_rope"]
        rows = [bits(k_nope), bits(k_rope.reshape(k_rope.shape[0], 1, -1)).expand(-1, k_nope.shape[1], -1)]
        return torch.cat(rows, 2)

    def test_nan_and_negative_zero_keep_their_bits(self) -> None:
        arguments = self.inputs(dtype=torch.bfloat16)
        for tensor in arguments.values():
            tensor.view(torch.int16).random_(-(1 << 15), 1 << 15)
        assert torch.equal(bits(self.run(arguments)), self.want(arguments))

    def test_in_place_only_the_rotary_part_is_written(self) -> None:
        arguments = self.inputs()
        want = self.want(arguments)
        out = torch.zeros(*arguments["k_nope"].shape[:2], 192, dtype=torch.bfloat16, device=self.device)
        own = out[..., :128]
        own.copy_(arguments["k_nope"])
        assert self.run({"k_nope": own, "k_rope": arguments["k_rope"]}, out=out) is out
        assert torch.equal(bits(out), want)

    def test_operands_may_have_any_strides(self) -> None:
        arguments = self.inputs()
        want = self.want(arguments)
        moved = {
            "k_nope": arguments["k_nope"].transpose(0, 2).contiguous().transpose(0, 2),
            "k_rope": arguments["k_rope"].repeat(1, 1, 2).unflatten(2, (2, -1))[:, 0, 1],
        }
        wide = torch.zeros(18, self.heads + 2, 2 * 192, dtype=torch.bfloat16, device=self.device)
        out = wide[:, 1:-1, ::2]
        self.run(moved, out=out)
        assert torch.equal(bits(out), want)
        assert not wide[:, 0].any()
        assert not wide[:, -1].any()
        assert not wide[:, :, 1::2].any()

    def test_a_plan_gives_what_the_call_gives(self) -> None:
        arguments = self.inputs()
        plan = kernelhub.concat_mla_k.prepare(**arguments, backend=self.kernel)
        assert plan.kernel == self.kernel
        assert torch.equal(plan.run(**arguments), self.run(arguments))
        with pytest.raises(InvalidArgument, match="the plan is for bfloat16"):
            plan.run(**self.inputs(dtype=torch.float16))
        with pytest.raises(InvalidArgument, match="the plan is for"):
            plan.run(**self.inputs(rope_dim=32))
