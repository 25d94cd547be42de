"""The records of the Gluon kernels of experts."""

from __future__ import annotations

from kernelhub.backends.gluon.requirements import MACHINE
from kernelhub.backends.gluon.standings import standings
from kernelhub.dispatch.constraint import Between, MultipleOf, OneOf, Rule, dtype_in
from kernelhub.dispatch.kernel import Band, GraphLevel, Kernel
from kernelhub.ops.moe.experts.problem import (
    ACTIVATIONS,
    BLOCK_FORMATS,
    FLOATS,
    FP8,
    FP8_BLOCK,
    PLAIN,
    ExpertsProblem,
)

_HALVES = ("bfloat16", "float16")
_FEATURES = frozenset(
    {
        *(f"activation={name}" for name in ACTIVATIONS[1:]),
        *("w13_bias", "w2_bias", "apply_router_weight_on_input", "expert_map", "residual"),
    }
)


def _as_they_are(problem: ExpertsProblem) -> str | None:
    if problem.activation_dtype != problem.dtype:
        return f"activation_dtype is {problem.activation_dtype}, and tokens are multiplied in {problem.dtype}"
    return None


KERNELS = (
    Kernel(
        op="fused_moe",
        name="gluon.experts",
        target="kernelhub.backends.gluon.moe.adapter:Experts",
        summary="rows sorted on the device; activation and float8 in the first product; sums in a fixed order",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *FLOATS),
            OneOf("weights", BLOCK_FORMATS, why="scales of 128 columns are multiplied in at each step"),
            dtype_in("activation_dtype", FP8, FP8_BLOCK, why="tensor cores multiply float8 with float8"),
            Between("num_experts", 1, 1023, why="a program holds the counts of all experts"),
            Between("top_k", 1, 64),
            MultipleOf("hidden_size", 16, why="TMA reads rows of whole 16 bytes"),
            MultipleOf("intermediate_size", 128, why="a tile has whole blocks of gate and of up"),
        ),
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        source="DeepSeek-V3 (2024), section 3.3; the tiles are those of DeepGEMM on Hopper",
        standings=standings(81, "gluon_h200.json"),
    ),
    Kernel(
        op="fused_moe",
        name="gluon.experts_halves",
        target="kernelhub.backends.gluon.moe.halves_adapter:ExpertsOfHalves",
        summary="rows sorted on the device; bfloat16 or float16; activation in the first product; sums in fixed order",
        band=Band.PORTABLE,
        constraints=(
            *MACHINE,
            dtype_in("dtype", *_HALVES),
            OneOf("weights", (PLAIN,), why="tensor cores multiply weights in the dtype of the tokens"),
            dtype_in("activation_dtype", *_HALVES),
            Rule(("activation_dtype", "dtype"), _as_they_are, "value"),
            Between("num_experts", 1, 1023, why="a program holds the counts of all experts"),
            Between("top_k", 1, 64),
            MultipleOf("hidden_size", 8, why="TMA reads rows of whole 16 bytes"),
            MultipleOf("intermediate_size", 8, why="TMA reads rows of whole 16 bytes"),
        ),
        features=_FEATURES,
        graph=GraphLevel.FULL,
        deterministic=True,
        standings=standings(73, "gluon_more_h200.json"),
    ),
)
