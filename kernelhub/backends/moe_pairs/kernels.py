"""The pairing table: which format of dispatched tokens goes with which op for experts, and what is converted between.

A pair names no kernels. The dispatch, the experts and the combine are ops, each of which selects its kernel for the
format.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kernelhub.dispatch.constraint import AnyOf, OnDevice, OneOf, Rule, anything, dtype_in
from kernelhub.dispatch.kernel import Backend, Band, Choose, Kernel
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.standing import untested, verified
from kernelhub.ops.comm.experts.problem import (
    ALL,
    CONTIGUOUS,
    EXACT,
    FIXED,
    FP8,
    MASKED,
    TOKENS,
    CombineProblem,
    DispatchProblem,
)
from kernelhub.ops.comm.problem import USUAL
from kernelhub.ops.gemm.grouped.problem import GroupedGemmProblem
from kernelhub.ops.moe.experts.problem import ACTIVATIONS, FEW, FLOATS, FORMATS, FP8_BLOCK, MANY, PLAIN, ExpertsProblem
from kernelhub.ops.moe.parallel.problem import ParallelProblem

BACKEND = Backend("moe_pairs", "a dispatch, experts and a combine that fit each other", portable=True)

FUSED_MOE, GROUPED_GEMM = "fused_moe", "grouped_gemm"
JOIN = "silu(gate) * up between the two products, in torch"
_HALF = "half the bytes to send"
QUANTISE = "quantize_fp8 of the tokens before the dispatch, and of silu(gate) * up, per 1 x 128"


class Pair(NamedTuple):
    """One line of the table.

    Attributes:
        name: of the pair.
        target: its adapter.
        format: of the dispatched tokens.
        experts: the op that runs experts.
        weights: formats of weights.
        converters: steps between the ops, in words.
        float8: tokens are dispatched in float8, with scales.
        use: what the pair is for.
    """

    name: str
    target: str
    format: str
    experts: str
    weights: tuple[str, ...]
    converters: tuple[str, ...]
    float8: bool
    use: str

    def selections(self, problem: ParallelProblem, choose: Choose) -> tuple[Selection[Any], ...]:
        """The selections of the ops of a pair: dispatch, experts for few and for many rows, combine."""
        exchanged: dict[str, Any] = {
            **{name: getattr(problem, name) for name in _OF_EXCHANGE},
            "format": self.format,
        }
        of_tokens = {"dtype": FP8, "scales": True} if self.float8 else {"dtype": problem.dtype}
        dispatch = choose("moe_dispatch", DispatchProblem(**exchanged, **of_tokens))
        rows = (dispatch.kernel.gives if dispatch.kernel else "") or (ALL if problem.capacity == EXACT else FIXED)
        combine = choose("moe_combine", CombineProblem(**exchanged, dtype=problem.dtype, rows=rows))
        return (dispatch, *(choose(self.experts, need) for need in _experts_of(self, problem)), combine)

    @property
    def steps(self) -> tuple[str, ...]:
        """What the pair runs: its ops, and the converters between them."""
        of_tokens, of_inner = (
            ((f"quantize_fp8 of {what}, in blocks of 1 x 128",) if self.float8 else ())
            for what in ("the tokens", "silu(gate) * up")
        )
        dispatch = (*of_tokens, f"moe_dispatch in format {self.format}")
        if self.experts == FUSED_MOE:
            return (*dispatch, "fused_moe, which applies the weights of the router", "moe_combine, which sums")
        return (
            *dispatch,
            "grouped_gemm by w13",
            "silu_and_mul of gate and up, in torch",
            *of_inner,
            "grouped_gemm by w2",
            "moe_combine, which applies the weights of the router and sums",
        )


PAIRS = (
    Pair("tokens", "Tokens", TOKENS, FUSED_MOE, FORMATS, (), False, "every format of weights"),
    Pair("contiguous", "Contiguous", CONTIGUOUS, GROUPED_GEMM, (PLAIN,), (JOIN,), False, "many tokens"),
    Pair("masked", "Masked", MASKED, GROUPED_GEMM, (PLAIN,), (JOIN,), False, "few tokens"),
    Pair("contiguous_fp8", "ContiguousFp8", CONTIGUOUS, GROUPED_GEMM, (FP8_BLOCK,), (QUANTISE, JOIN), True, _HALF),
    Pair("masked_fp8", "MaskedFp8", MASKED, GROUPED_GEMM, (FP8_BLOCK,), (QUANTISE, JOIN), True, _HALF),
)
BY_NAME = {pair.name: pair for pair in PAIRS}

_CPU = verified(
    "cpu",
    evidence="CPU, 2 cores, 2026-11-25, torch 2.13.0+cpu, gloo: 60 tests passed, none failed "
    "(benchmarks/results/ranks_cpu.json)",
)
_GPU = untested("volta", "ampere", "ada", "hopper", "blackwell", "blackwell_rtx", "thor", "cdna3", "cdna4")


def _multiplied(problem: ParallelProblem) -> str | None:
    """A pair of plain products multiplies in the dtype of the tokens."""
    if problem.activation_dtype != problem.dtype:
        return f"activation_dtype is {problem.activation_dtype}; its products are of {problem.dtype}"
    return None


def _multiplied_in_blocks(problem: ParallelProblem) -> str | None:
    """Gate and up are rounded before they are quantised again, as the opt-in format says."""
    if problem.activation_dtype != FP8_BLOCK:
        return f"activation_dtype is {problem.activation_dtype}; it rounds as {FP8_BLOCK} says, which is opt-in"
    return None


def _experts_of(pair: Pair, problem: ParallelProblem) -> list[Any]:
    """The problems of the experts, by the rows that come."""
    local = problem.num_experts // problem.world_size
    if pair.experts == FUSED_MOE:
        alike = {name: getattr(problem, name) for name in _OF_LAYER}
        return [ExpertsProblem(**alike, num_experts=local, rows=rows) for rows in (FEW, MANY)]
    of_rows = {"a_dtype": FP8, "b_dtype": FP8, "a_scale": "group", "b_scale": "block"} if pair.float8 else {}
    usual: dict[str, Any] = {"a_dtype": problem.dtype, "b_dtype": problem.dtype} | of_rows
    both, inner, hidden = 2 * problem.intermediate_size, problem.intermediate_size, problem.hidden_size
    return [
        GroupedGemmProblem(
            device=problem.device,
            **usual,
            out_dtype=problem.dtype,
            num_groups=local,
            n=n,
            k=k,
            rows=rows,
            masked=pair.format == MASKED,
        )
        for n, k in ((both, hidden), (hidden, inner))
        for rows in (FEW, MANY)
    ]


_OF_EXCHANGE = (
    *("device", "hidden_size", "top_k", "num_experts", "world_size", "group_backend"),
    *("capacity", "link", "peers"),
)
_OF_LAYER = (
    *("device", "dtype", "weights", "activation_dtype", "top_k", "hidden_size", "intermediate_size"),
    *("activation", "w13_bias", "w2_bias"),
)


def _record(pair: Pair) -> Kernel:
    by_tokens = pair.experts == FUSED_MOE
    converters = f"; {'; '.join(pair.converters)}" if pair.converters else ""
    rule = _multiplied_in_blocks if pair.float8 else _multiplied
    return Kernel(
        op="expert_parallel_moe",
        name=f"moe_pairs.{pair.name}",
        target=f"kernelhub.backends.moe_pairs.layer:{pair.target}",
        summary=f"dispatch in format {pair.format}, {pair.experts}, combine: {pair.use}{converters}",
        band=Band.PORTABLE if by_tokens else Band.REFERENCE,
        constraints=(
            AnyOf((OnDevice("nvidia"), OnDevice("amd"), OnDevice("cpu"))),
            dtype_in("dtype", *FLOATS),
            anything("hidden_size", "intermediate_size", "num_experts", "top_k", "world_size", "capacity"),
            anything("link", "peers"),
            OneOf("weights", pair.weights, why=f"{pair.experts} runs these in format {pair.format}"),
            anything("activation_dtype")
            if by_tokens
            else Rule(("activation_dtype", "dtype"), rule, "activation_dtype"),
            OneOf("group_backend", (USUAL,), why="the group has neither NCCL for a GPU nor gloo for a CPU"),
        ),
        features=frozenset({*(f"activation={name}" for name in ACTIVATIONS[1:]), "w13_bias", "w2_bias"})
        if by_tokens
        else frozenset(),
        calls=pair.selections,
        steps=pair.steps,
        standings=(_CPU, _GPU),
    )


KERNELS = tuple(_record(pair) for pair in PAIRS)
