"""Facets of published models, for ``--model``: each family of ops has a table of its own.

A new family of ops adds one `Family` here; nothing else of the command line knows what a model is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kernelhub.cli.facets import defaults
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError
from kernelhub.ops.attention.inputs import MODELS, AttentionModel
from kernelhub.ops.attention.problem import ONE, AttentionProblem
from kernelhub.ops.gemm.fp4.inputs import MODELS as FP4_LAYERS
from kernelhub.ops.gemm.fp4.inputs import Fp4Layer
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.ops.merge.problem import MergeProblem
from kernelhub.ops.mla.problem import ConcatProblem


@dataclass(frozen=True)
class Family:
    """Models whose shapes a family of ops knows.

    Attributes:
        problem: base class of the family's problems.
        models: the models by name.
        facets: facets of a model, from the model and from what else is known of the problem.
    """

    problem: type
    models: Mapping[str, Any]
    facets: Callable[[Any, Mapping[str, Any]], dict[str, Any]]

    def with_model(self, name: str, contract: Contract[Any], written: Mapping[str, Any]) -> dict[str, Any]:
        """The facets of a model, except where the user wrote others.

        Raises:
            ConfigurationError: there is no such model.
        """
        if name not in self.models:
            known = ", ".join(self.models)
            raise ConfigurationError(f"--model: {name!r} is unknown{did_you_mean(name, self.models)}; it takes {known}")
        known_facets = {**defaults(contract), **written}
        return {**self.facets(self.models[name], known_facets), **written}


def family_of(contract: Contract[Any]) -> Family | None:
    """The models that an op has shapes of, if any."""
    return next((family for family in _FAMILIES if issubclass(contract.problem, family.problem)), None)


def _attention_facets(model: AttentionModel, known: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a causal call. A single query sees all keys, so for it causal is no feature."""
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


def _concat_facets(model: AttentionModel, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_heads": model.num_q_heads, "nope_dim": model.head_dim_vo}


def _fp4_facets(layer: Fp4Layer, known: Mapping[str, Any]) -> dict[str, Any]:
    return {"n": layer.n, "k": layer.k, "b_format": layer.b_format}


_FAMILIES = (
    Family(AttentionProblem, MODELS, _attention_facets),
    Family(MergeProblem, MODELS, _merge_facets),
    Family(
        ConcatProblem,
        {name: model for name, model in MODELS.items() if model.head_dim_qk != model.head_dim_vo},
        _concat_facets,
    ),
    Family(Fp4GemmProblem, FP4_LAYERS, _fp4_facets),
)
