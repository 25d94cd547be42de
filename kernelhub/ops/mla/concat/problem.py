"""Facets and constraints of `concat_mla_k`."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet
from kernelhub.probes.device import DeviceFacts

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


@dataclass(frozen=True)
class ConcatProblem:
    """One configuration of `concat_mla_k`."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of the keys", values=DTYPES, default="bfloat16")
    num_heads: int = facet("heads", default=128)
    nope_dim: int = facet("width of a head's non-rotary part", default=128)
    rope_dim: int = facet("width of the rotary part", default=64)


CONCAT_MLA_K = OpRecord(
    name="concat_mla_k",
    summary="concatenate each head's part of latent attention's keys with the rotary part that all heads share",
    problem=ConcatProblem,
)
