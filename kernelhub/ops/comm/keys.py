"""From the key of a collective's call to its problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kernelhub.ops.arguments import dtype_name
from kernelhub.ops.comm.problem import CollectiveProblem
from kernelhub.probes.device import facts_of

ProblemT = TypeVar("ProblemT", bound=CollectiveProblem)


def from_keys(kind: type[ProblemT], *own: str) -> Callable[[Any, int], ProblemT]:
    """The function that gives the problem which a key means on a device; an op's public function builds its keys.

    Args:
        kind: class of the problem.
        own: facets of the op's own, which its keys have between `group_backend` and `link`.
    """
    names = ("dtype", "world_size", "group_backend", *own, "link", "peers", "message")

    def problem_of(key: Any, device: int) -> ProblemT:
        facets: dict[str, Any] = {
            name: dtype_name(value) if isinstance(value, torch.dtype) else value
            for name, value in zip(names, key, strict=True)
        }
        return kind(device=facts_of(device), **facets)

    return problem_of
