"""Facets and constraints of `linear_attention`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.probes.device import DeviceFacts

FLOATS = ("float32", "float16", "bfloat16")
ONE, MANY, ANY = "one", "many", "any"
DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True)
class LinearProblem:
    """One configuration of `linear_attention`."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of q, k, v and the result", values=FLOATS, default="bfloat16")
    num_heads: int = facet("heads", default=64)
    head_dim: int = facet("width of a head of q and k", default=128)
    value_dim: int = facet("width of a head of v", default=128)
    q_len: str = facet("tokens per sequence: one, many, any (ragged)", values=(ONE, MANY, ANY), default=MANY)
    ragged: bool = feature("sequences of different lengths, [T, H, D] with cu_seqlens", False)
    state: bool = feature("sequences continue from a state", False)
    out_state: bool = feature("the state after the last token is kept", False)
    state_indices: bool = feature("states are in a pool, at indices", False)


def regime(problem: LinearProblem) -> str:
    """The phase that order lines speak of."""
    return DECODE if problem.q_len == ONE else PREFILL


LINEAR_ATTENTION = OpRecord(
    name="linear_attention",
    summary="attention through a state that decays by head, for prefill and decode",
    problem=LinearProblem,
    regimes=(DECODE, PREFILL),
    regime=regime,
)
