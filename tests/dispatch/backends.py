"""Fake backends for the real ops, registered at run time as a plugin would be."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

import kernelhub
from kernelhub.dispatch.api import BackendHandle
from kernelhub.dispatch.constraint import Constraint, anything
from kernelhub.dispatch.kernel import Backend, Band, Kernel, KnownBad
from kernelhub.dispatch.standing import verified
from kernelhub.ops.attention.adapter import AttentionAdapter
from kernelhub.ops.attention.problem import ATTENTION, PAGED_ATTENTION, AttentionProblem, PagedAttentionProblem
from kernelhub.ops.mla.attention.problem import MlaProblem

_FACETS = {
    "attention": list(AttentionProblem.__dataclass_fields__),
    "paged_attention": list(PagedAttentionProblem.__dataclass_fields__),
    "mla_attention": list(MlaProblem.__dataclass_fields__),
}

_FEATURES = {
    "attention": ATTENTION.schema.features,
    "paged_attention": PAGED_ATTENTION.schema.features,
    "mla_attention": frozenset[str](),
}


OF_TRUST = {"untrusted", "opt_in"}  # codes that are no limits of a record
EVERYWHERE = (verified("*", evidence="a test's own"),)


class Ones(AttentionAdapter[Any, Any]):
    """Fills the output with ones and counts its launches."""

    launches = 0

    def launch(self, q: Tensor, k: Tensor, v: Tensor, step: Any, values: Any, out: Tensor, lse: Any) -> None:
        type(self).launches += 1
        out.fill_(1.0)


class Twos(Ones):
    """Fills the output with twos."""

    launches = 0

    def launch(self, q: Tensor, k: Tensor, v: Tensor, step: Any, values: Any, out: Tensor, lse: Any) -> None:
        type(self).launches += 1
        out.fill_(2.0)


class DeviceError(AttentionAdapter[Any, Any]):
    """Fails in its launch, as a kernel with an illegal access does."""

    def launch(self, *arguments: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def record(name: str, target: str = "Ones", *constraints: Constraint, op: str = "attention", **more: Any) -> Kernel:
    """A plugin's record that takes everything but what is said."""
    mentioned = {field for constraint in constraints for field in constraint.fields}
    silent = [facet for facet in _FACETS[op] if facet not in mentioned]
    features = more.pop("features", _FEATURES[op])
    return Kernel(
        op=op,
        name=name,
        target=target if ":" in target else f"{__name__}:{target}",
        summary=name,
        band=more.pop("band", Band.PLUGIN),
        constraints=(*constraints, anything(*silent)),
        features=frozenset(features),
        **{"standings": EVERYWHERE} | more,
    )


def register(name: str, *kernels: Kernel, known_bad: tuple[KnownBad, ...] = ()) -> BackendHandle:
    """Register a backend with these records."""
    return kernelhub.register_backend(
        types.SimpleNamespace(
            __name__=f"fake.{name}", BACKEND=Backend(name, f"fake {name}"), KERNELS=kernels, KNOWN_BAD=known_bad
        )
    )


def qkv(tokens: int = 4, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Small operands of `attention`."""
    torch.manual_seed(0)
    return torch.randn(1, tokens, 4, width), torch.randn(1, tokens, 2, width), torch.randn(1, tokens, 2, width)
