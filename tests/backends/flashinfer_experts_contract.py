"""What every kernel of FlashInfer's mixtures of experts must do, on a model of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from kernelhub.ops.moe.experts.tolerance import compare
from tests.backends.test_flashinfer import OnFake


def check(out: torch.Tensor, arguments: dict[str, Any]) -> None:
    agreement = compare(out, arguments)
    assert agreement.ok, str(agreement)


class Experts(OnFake):
    """Subclass it, say how a kernel is called, and parametrise by kernel.

    Attributes:
        inputs: arguments of a call of a kernel, with weights as in a checkpoint.
        run: that call.
    """

    inputs: ClassVar[Callable[..., dict[str, Any]]]
    run: ClassVar[Callable[..., torch.Tensor]]

    @pytest.mark.parametrize("tokens", [1, 2, 17, 90])
    def test_matches_the_reference_in_float64(self, kernel, tokens) -> None:
        arguments = self.inputs(kernel, tokens=tokens)
        out = torch.full_like(arguments["x"], torch.nan)
        assert self.run(kernel, arguments, out=out) is out
        check(out, arguments)
        assert torch.equal(self.run(kernel, arguments), out)

    def test_halves_of_w13_are_distinguished(self, kernel) -> None:
        arguments = self.inputs(kernel)
        half = arguments["w13"].shape[1] // 2
        swapped = dict(arguments)
        for name in ("w13", "w13_scale", "w13_bias"):
            if name in arguments and arguments[name].ndim > 1:
                raw = arguments[name]
                swapped[name] = (raw.view(torch.uint8) if raw.itemsize == 1 else raw).roll(half, 1).view(raw.dtype)
        out = self.run(kernel, arguments)
        check(out, arguments)
        assert not compare(out, swapped).ok
        check(self.run(kernel, swapped), swapped)

    def test_an_expert_that_is_chosen_twice_counts_twice(self, kernel) -> None:
        arguments = self.inputs(kernel, top_k=3)
        arguments["topk_ids"][:, 1] = arguments["topk_ids"][:, 0]
        arguments["topk_ids"][3] = 4
        check(self.run(kernel, arguments), arguments)

    def test_ids_outside_of_the_experts_are_left_out(self, kernel) -> None:
        arguments = self.inputs(kernel)
        for outside in (-1, arguments["w13"].shape[0], 1 << 30, -(1 << 31)):
            ids, weights = arguments["topk_ids"].clone(), arguments["topk_weights"].clone()
            ids[0, 1], ids[2] = outside, outside
            weights[2, 0] = torch.nan
            out = self.run(kernel, arguments | {"topk_ids": ids, "topk_weights": weights})
            check(out, arguments | {"topk_ids": ids})
            assert not out[2].any()

    def test_a_map_says_which_experts_are_here(self, kernel) -> None:
        arguments = self.inputs(kernel, tokens=9)
        experts = arguments["w13"].shape[0]
        table = torch.full((experts + 3,), -1, dtype=torch.int32)
        table[[2, 0, experts + 2]] = torch.tensor([1, 3, 0], dtype=torch.int32)
        table[1] = experts + 4  # which is nowhere
        ids = torch.randint(-2, experts + 5, arguments["topk_ids"].shape, dtype=torch.int32)
        mapped = arguments | {"expert_map": table, "topk_ids": ids}
        mapped["topk_ids"][0] = torch.tensor([2, 0], dtype=torch.int32)
        check(self.run(kernel, mapped), mapped)

    def test_operands_may_have_any_strides(self, kernel) -> None:
        arguments = self.inputs(kernel)
        want = self.run(kernel, arguments)
        width = arguments["x"].shape[1]
        wide = torch.full((7, 2 * width), torch.nan, dtype=torch.bfloat16)
        moved = {name: arguments[name].t().contiguous().t() for name in ("x", "topk_weights", "topk_ids")}
        for name in ("w13", "w2"):
            raw = arguments[name].view(torch.uint8) if arguments[name].itemsize == 1 else arguments[name]
            moved[name] = torch.cat([raw, raw], 2)[..., : raw.shape[2]].view(arguments[name].dtype)
        self.run(kernel, arguments | moved, out=wide[:, ::2])
        assert torch.equal(wide[:, ::2], want)
        assert wide[:, 1::2].isnan().all()
        place = arguments["x"].clone()
        self.run(kernel, arguments | {"x": place}, out=place)
        assert torch.equal(place, want)

    def test_no_tokens_give_an_empty_result(self, kernel) -> None:
        arguments = self.inputs(kernel, tokens=0)
        assert self.run(kernel, arguments).shape == (0, arguments["x"].shape[1])
