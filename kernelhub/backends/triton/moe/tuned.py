"""Tiles that were measured, as data: one entry per device family, layer and number of tokens.

`tuned.json` holds them; `scripts/measure_expert_tiles.py`, run on a GPU, makes its entries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelhub.ops.moe.experts.problem import FP8, FP8_BLOCK, ExpertsProblem

LAYER = ("weights", "activation_dtype", "num_experts", "top_k", "hidden_size", "intermediate_size")


@dataclass(frozen=True)
class Tiles:
    """Sizes of one matrix product.

    Attributes:
        block_m: rows per program, all of one expert.
        block_n: columns per program.
        block_k: columns of the operands per step of the loop.
        num_warps: warps per program.
        num_stages: steps of the loop whose loads are in flight.
        group_m: tiles of rows that run beside each other over the same weights, for the L2 cache.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n} x {self.block_k}, {self.num_warps} warps, {self.num_stages} stages"


@dataclass(frozen=True)
class Tuned:
    """Tiles that were the fastest of those tried.

    Attributes:
        family: of the device, `DeviceFacts.family`.
        weights, activation_dtype, num_experts, top_k, hidden_size, intermediate_size: facets of the layer.
        num_tokens: of the call.
        first: of gate and up.
        second: of the down projection; as many rows.
        ms: what the call took with them.
        default_ms: what it took with `tiles.default_tiles`, in the same run; where these are the tiles, they won.
        evidence: device, versions, date.
    """

    family: str
    weights: str
    activation_dtype: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int
    first: Tiles
    second: Tiles
    ms: float
    default_ms: float
    evidence: str

    def __post_init__(self) -> None:
        if self.first.block_m != self.second.block_m:
            raise ValueError(f"{self}: both products work on the same tiles of rows")

    def fits(self, problem: ExpertsProblem) -> bool:
        """Whether it was measured for this layer on such a device. Sums of float32 tokens need other tiles.

        What is right for float8 is run for ``fp8_block``, too.
        """
        return (
            self.family == problem.device.family
            and problem.dtype != "float32"
            and self.activation_dtype == (FP8 if problem.activation_dtype == FP8_BLOCK else problem.activation_dtype)
            and all(getattr(self, name) == getattr(problem, name) for name in LAYER if name != "activation_dtype")
        )


def read(path: Path) -> tuple[Tuned, ...]:
    """The entries of a file."""

    def made(entry: dict[str, Any]) -> Tuned:
        return Tuned(**entry | {name: Tiles(*entry[name]) for name in ("first", "second")})

    return tuple(made(entry) for entry in json.loads(path.read_text()))


TUNED = read(Path(__file__).with_name("tuned.json"))
