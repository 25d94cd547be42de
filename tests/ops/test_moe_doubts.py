"""What codes may differ in kernels that are right: sums as tensor cores keep them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernelhub.ops.models.shapes import MoeModel
from kernelhub.ops.moe.experts.activations import Activations, inner_least
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.experts.problem import FP8_BLOCK, SILU
from kernelhub.ops.moe.experts.reference import joined
from kernelhub.ops.moe.experts.tolerance import compare

MODEL = MoeModel("8 experts", num_experts=8, top_k=2, hidden_size=128, intermediate_size=128)


def of_tensor_cores(arguments: dict[str, Any], rounds: bool, seed: int) -> Tensor:
    """A layer with weights of one block, whose gate and up are off by a 2^-13th of a random walk of their terms."""
    generator = torch.Generator().manual_seed(seed)
    x, ids = arguments["x"], arguments["topk_ids"]
    blocks, out = Activations(FP8_BLOCK, by_block=True), torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(MODEL.num_experts):
        tokens, places = torch.nonzero(ids == expert, as_tuple=True)
        w13 = arguments["w13"][expert].double() * arguments["w13_scale"][expert].double().repeat_interleave(128, 0)
        w2 = arguments["w2"][expert].double() * arguments["w2_scale"][expert].double()
        rows = blocks.rounded(x[tokens].double(), None, torch.float64, inner_least(""))
        walk = (rows.square() @ w13.square().t()).sqrt()
        both = rows @ w13.t() + 2.0**-13 * walk * torch.randn(walk.shape, generator=generator, dtype=torch.float64)
        inner = joined(both.to(x.dtype).double() if rounds else both, SILU, 1.702, 7.0).to(x.dtype).double()
        down = blocks.rounded(inner, None, torch.float64, inner_least(FP8_BLOCK)) @ w2.t()
        out.index_add_(0, tokens, down * arguments["topk_weights"][tokens, places].double().unsqueeze(1))
    return out.to(x.dtype)


@pytest.mark.parametrize("seed", [20, 27, 28])
def test_a_largest_number_that_rounds_the_other_way_moves_its_row(seed: int) -> None:
    """With these seeds it does, and all codes of the row change: as on an H100, where right layers were refused."""
    arguments = moe_inputs(model=MODEL, tokens=17, weights="fp8_block", seed=seed)
    arguments["activation_dtype"] = FP8_BLOCK
    for rounds in (False, True):
        agreement = compare(of_tensor_cores(arguments, rounds, seed), arguments)
        assert agreement.ok, str(agreement)


def test_a_row_of_another_scale_is_found() -> None:
    arguments = moe_inputs(model=MODEL, tokens=17, weights="fp8_block", seed=0) | {"activation_dtype": FP8_BLOCK}
    out = of_tensor_cores(arguments, False, 0)
    out[3] *= 1.04
    assert not compare(out, arguments).ok
