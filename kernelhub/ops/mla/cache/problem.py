"""Facets and constraints of `write_mla_cache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.problem import facet, feature
from kernelhub.ops.attention.problem import FLOATS, FP8
from kernelhub.ops.mla.attention.problem import KV_SCALES
from kernelhub.probes.device import DeviceFacts


@dataclass(frozen=True)
class MlaCacheProblem:
    """One configuration of `write_mla_cache`."""

    device: DeviceFacts = facet("where the tensors are")
    dtype: str = facet("dtype of the new tokens", values=FLOATS, default="bfloat16")
    kv_dtype: str = facet(
        "dtype of the cache: that of the tokens, or float8_e4m3fn", values=(*FLOATS, FP8), default="bfloat16"
    )
    latent_dim: int = facet("width of the latent", default=512)
    rope_dim: int = facet("width of the rotary part", least=0, default=64)
    page_size: int = facet("tokens per page of the cache", default=64)
    kv_scale: str | None = feature("how the scale of an fp8 cache arrives", None, KV_SCALES)


def complete(facets: dict[str, Any]) -> dict[str, Any]:
    """Facets that a user wrote out, with the dtype of the cache that follows."""
    implied: dict[str, Any] = {"kv_dtype": FP8 if facets.get("kv_scale") else facets.get("dtype", "bfloat16")}
    if facets.get("kv_dtype") == FP8:
        implied["kv_scale"] = KV_SCALES[0]
    return implied | facets


def contradiction(problem: MlaCacheProblem) -> str | None:
    """Problems that no call can have."""
    if problem.kv_dtype not in (problem.dtype, FP8):
        return f"kv_dtype is {problem.kv_dtype}, neither dtype, {problem.dtype}, nor {FP8}"
    if (problem.kv_dtype == FP8) != (problem.kv_scale is not None):
        return f"kv_dtype is {problem.kv_dtype} with kv_scale {problem.kv_scale}; scales belong to {FP8}"
    return None


WRITE_MLA_CACHE = OpRecord(
    name="write_mla_cache",
    summary="write latents and rotary parts of new tokens into the pages of a latent cache",
    problem=MlaCacheProblem,
    complete=complete,
    contradiction=contradiction,
)
