"""Rows and experts with the shapes of real models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernelhub.ops import formats
from kernelhub.ops.gemm.grouped.problem import BLOCK, BLOCKS, PARTNERS, SMALL, SPAN

PAIRS = tuple(f"{rows} x {weights}" for rows, several in PARTNERS.items() for weights in several)


def grouped_gemm_inputs(
    *,
    sizes: Sequence[int] = (5, 0, 19, 1),
    n: int = 192,
    k: int = 256,
    format: str = "bfloat16",
    a_dtype: torch.dtype = torch.bfloat16,
    masked: bool = False,
    spare: int = 3,
    bias: bool = False,
    powers_of_two: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `grouped_gemm`.

    Args:
        sizes: rows per group.
        n, k: the weights of a group are [n, k].
        format: of the weights: ``"float"`` or the name of a float dtype, which is that of the rows too; or a geometry
            of scales: ``"tensor"``, ``"channel"``, ``"block"`` (fp8), ``"nvfp4"``, ``"mxfp4"``; or of `PAIRS`,
            formats of rows and weights.
        a_dtype: of the rows beside fp4 weights.
        masked: every group's rows in a place of its own.
        spare: rows beyond those of the groups, or of the largest. They hold NaN.
        bias: with a bias.
        powers_of_two: scales of groups and blocks are UE8M0.
        device: where the tensors are made.
        seed: of the random numbers, which are the same for every device.
    """
    random = torch.Generator(device="cpu").manual_seed(seed)
    groups = len(sizes)
    shape = (groups, max([*sizes, 0]) + spare) if masked else (sum(sizes) + spare,)
    tokens = torch.randn(*shape, k, generator=random, dtype=torch.float32, device="cpu")
    weights = torch.randn(groups, n, k, generator=random, dtype=torch.float32, device="cpu")
    counts = torch.tensor(list(sizes), dtype=torch.int32, device="cpu")
    if masked:
        there = torch.arange(shape[-1], device="cpu") < counts[:, None]
        arguments: dict[str, Any] = {"group_sizes": counts}
    else:
        there = torch.arange(shape[0], device="cpu") < sum(sizes)
        arguments = {"offsets": counts.cumsum(0).int()}
    tokens = torch.where(there.unsqueeze(-1), tokens, torch.nan)
    draw = _Draw(random)
    of_rows, _, of_weights = format.rpartition(" x ")
    if of_weights in SMALL:
        arguments |= draw.small("b", weights, of_weights)
        arguments |= draw.small("a", tokens, of_rows) if of_rows else {"a": tokens.to(a_dtype)}
        if of_rows == "nvfp4":  # a factor for each group, as of the weights
            arguments["a_global_scale"] = draw.factors((groups,))
    elif format in ("tensor", "channel", "block"):
        arguments |= draw.fp8(tokens, weights, format, powers_of_two)
    else:
        dtype = getattr(torch, format)
        arguments |= {"a": tokens.to(dtype), "b": weights.to(dtype)}
    if bias:
        arguments["bias"] = torch.randn(groups, n, generator=random, dtype=torch.float32, device="cpu").to(
            torch.bfloat16
        )
    return {name: value.to(device) for name, value in arguments.items()}


class _Draw:
    """Quantised operands: random scales, so that one that is left out or swapped shows."""

    def __init__(self, random: torch.Generator) -> None:
        self.random = random

    def factors(self, shape: tuple[int, ...]) -> Tensor:
        """Within a factor of 4 of each other."""
        return 0.02 * torch.exp2(2 * torch.rand(shape, generator=self.random, dtype=torch.float32, device="cpu"))

    def fp8(self, rows: Tensor, weights: Tensor, geometry: str, powers_of_two: bool) -> dict[str, Any]:
        lead, k = tuple(rows.shape[:-1]), rows.shape[-1]
        groups, n, _ = weights.shape
        blocks = -(-k // BLOCK)
        shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "tensor": ((1,), (groups,)),
            "channel": (lead, (groups, n)),
            "block": ((*lead, blocks), (groups, -(-n // BLOCK), blocks)),
        }
        a_scale, b_scale = (self.factors(shape) for shape in shapes[geometry])
        if powers_of_two and geometry in BLOCKS:
            a_scale, b_scale = formats.to_e8m0_up(a_scale), formats.to_e8m0_up(b_scale)
        return {
            "a": formats.to_e4m3(rows * 40),
            "b": formats.to_e4m3(weights * 40),
            "a_scale": a_scale,
            "b_scale": b_scale,
        }

    def small(self, name: str, values: Tensor, geometry: str) -> dict[str, Tensor]:
        """Rows of either operand with a scale for 16 or 32 columns. Scales of rows of NaN are NaN: fp4 has none."""
        unknown = values.isnan().any(-1, keepdim=True)
        factors = self.factors((*values.shape[:-1], -(-values.shape[-1] // SPAN[geometry])))
        factors = torch.where(unknown, torch.nan, factors)
        if geometry == "mxfp8":
            return {name: formats.to_e4m3(values * 40), f"{name}_scale": formats.to_e8m0_up(factors)}
        codes = formats.to_e2m1(values * 2)
        if geometry == "mxfp4":
            return {name: codes, f"{name}_scale": formats.to_e8m0_up(factors * 20)}
        made = {name: codes, f"{name}_scale": formats.to_e4m3(factors * 20 * 64)}
        return made | ({"b_global_scale": self.factors(values.shape[:1])} if name == "b" else {})
