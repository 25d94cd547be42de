"""Facets of ops that serving a published model does not need by default, and of single layers, for ``--model``.

Names and shapes are those of `kernelhub.ops.models.shapes`. Where `problems_of` lists a model's problem of an op,
``--model`` takes that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelhub.cli.facets import defaults
from kernelhub.dispatch.contract import OpRecord
from kernelhub.ops.attention.problem import ONE, AttentionProblem
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.ops.gemm.fp8.batched.problem import BmmFp8Problem
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem
from kernelhub.ops.gemm.grouped.problem import FP4, GroupedGemmProblem
from kernelhub.ops.gemm.grouped.problem import complete as complete_grouped
from kernelhub.ops.indexer.problem import LogitsProblem, TopKProblem
from kernelhub.ops.linear_attention.problem import LinearProblem
from kernelhub.ops.merge.problem import MergeProblem
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.mla.cache.problem import MlaCacheProblem
from kernelhub.ops.mla.concat.problem import ConcatProblem
from kernelhub.ops.models.layers import Setting, layer_calls
from kernelhub.ops.models.published import describe
from kernelhub.ops.models.shapes import (
    ABSORBED,
    ATTENTION,
    FP4_LAYERS,
    FP8_LAYERS,
    GROUPED,
    INDEXERS,
    LINEAR_ATTENTION,
    MLA,
    MOE,
    AbsorbedProjection,
    AttentionModel,
    ExpertModel,
    Fp4Layer,
    LinearLayer,
    LinearModel,
)
from kernelhub.ops.moe.experts.problem import FP8, ExpertsProblem
from kernelhub.ops.moe.routing.problem import RoutingProblem


@dataclass(frozen=True)
class Family:
    """Models whose shapes a family of ops has.

    Attributes:
        problem: base class of the family's problems.
        models: the models by name.
        facets: names of facets that are those of a layer of the model, or a function from the model and the given
            facets to the facets of the problem.
    """

    problem: type
    models: Mapping[str, Any]
    facets: Callable[[Any, Mapping[str, Any]], dict[str, Any]] | tuple[str, ...]

    def facets_of(self, name: str, contract: OpRecord[Any], written: Mapping[str, Any]) -> dict[str, Any]:
        """The facets of one of `models`, except those that the user gave."""
        known = {**defaults(contract), **written}
        if isinstance(self.facets, tuple):
            return {**_of_layers(name, contract.name, self.facets, known), **written}
        return {**self.facets(self.models[name], known), **written}


def family_of(contract: OpRecord[Any]) -> Family | None:
    """The family of models of an op; None without one."""
    return next((family for family in _FAMILIES if issubclass(contract.problem, family.problem)), None)


def _of_layers(name: str, op: str, names: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Facets of the problem of an op that a layer of the whole model has. A single query attends to all keys."""
    setting = Setting(1, 1, known.get("dtype", "bfloat16"), "bfloat16", 16)
    layer = next(item for item in layer_calls(describe(name), setting) if item.op == op)
    facets = {**layer.facets, "causal": known.get("ragged") or known.get("q_len") != ONE}
    return {name: facets[name] for name in names}


def _attention_facets(model: AttentionModel, known: Mapping[str, Any]) -> dict[str, Any]:
    """Facets of a causal call. A single query attends to all keys, so it does not need the feature causal."""
    return {
        "num_q_heads": model.num_q_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim_qk": model.head_dim_qk,
        "head_dim_vo": model.head_dim_vo,
        "causal": known["ragged"] or known["q_len"] != ONE,
        "window_left": model.window is not None,
        "softcap": model.softcap is not None,
        "sinks": model.sinks,
    }


def _merge_facets(model: AttentionModel, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_heads": model.num_q_heads, "head_dim": model.head_dim_vo}


def _expert_facets(model: ExpertModel, known: Mapping[str, Any]) -> dict[str, Any]:
    """Facets of the gate and up projection, in the format of the model's checkpoint."""
    n, k = model.w13
    facets: dict[str, Any] = {"num_groups": model.num_experts, "n": n, "k": k, "bias": model.bias}
    if model.format == "block":
        facets |= {"a_dtype": FP8, "b_dtype": FP8, "a_scale": "group", "b_scale": "block"}
    elif model.format == "mxfp4":
        facets |= {"b_dtype": FP4, "b_scale": "mxfp4"}
    elif model.format == "nvfp4 x nvfp4":
        facets |= {"a_scale": "nvfp4", "b_scale": "nvfp4", "a_global_scale": True, "global_scale": True}
    return complete_grouped(facets)


def _linear_facets(model: LinearModel, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_heads": model.num_heads, "head_dim": model.head_dim, "value_dim": model.value_dim}


def _fp8_gemm_facets(layer: LinearLayer, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"n": layer.n, "k": layer.k, "scaling": layer.scaling}


def _bmm_fp8_facets(projection: AbsorbedProjection, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"n": projection.n, "k": projection.k}


def _fp4_facets(layer: Fp4Layer, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"n": layer.n, "k": layer.k, "b_format": layer.b_format}


_ROUTING = (
    *("num_experts", "top_k", "num_groups", "topk_groups"),
    *("scoring", "correction_bias", "renormalize", "scaling_factor"),
)
_EXPERTS = (
    *("num_experts", "top_k", "hidden_size", "intermediate_size"),
    *("activation", "w13_bias", "w2_bias", "weights", "activation_dtype"),
)
_FAMILIES = (
    Family(AttentionProblem, ATTENTION, _attention_facets),
    Family(MergeProblem, ATTENTION, _merge_facets),
    Family(ConcatProblem, MLA, ("num_heads", "nope_dim", "rope_dim")),
    Family(GroupedGemmProblem, GROUPED, _expert_facets),
    Family(MlaProblem, MLA, ("num_heads", "head_dim", "value_dim", "causal", "sparse")),
    Family(LogitsProblem, INDEXERS, ("num_heads", "head_dim")),
    Family(TopKProblem, INDEXERS, ("k",)),
    Family(LinearProblem, LINEAR_ATTENTION, _linear_facets),
    Family(MlaCacheProblem, MLA, ("latent_dim", "rope_dim")),
    Family(RoutingProblem, MOE, _ROUTING),
    Family(ExpertsProblem, MOE, _EXPERTS),
    Family(BmmFp8Problem, ABSORBED, _bmm_fp8_facets),
    Family(Fp8GemmProblem, FP8_LAYERS, _fp8_gemm_facets),
    Family(Fp4GemmProblem, FP4_LAYERS, _fp4_facets),
)
