"""The adapter interface of `write_kv_cache`."""

from __future__ import annotations

import abc

from torch import Tensor

from kernelhub.ops.known_calls import Repeatable
from kernelhub.ops.kv_cache.problem import KvCacheProblem

Scale = float | Tensor | None


class KvCacheAdapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write the places of `k_cache` and `v_cache` that slots name, those alone, and return nothing.

    The op has checked what its contract says. Tensors may have any strides.
    """

    def __init__(self, problem: KvCacheProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Scale,
        v_scale: Scale,
    ) -> None:
        """Write the tokens.

        Args:
            k: [T, KH, D]; T > 0.
            v: [T, KH, DV].
            k_cache: [num_pages, page_size, KH, D] whatever `kv_layout` says, at least one page.
            v_cache: [num_pages, page_size, KH, DV].
            slot_mapping: int64 [T], negative for tokens that are not to be written.
            k_scale: None unless the caches are float8; then a float, or float32 of one element or [KH], contiguous,
                to divide by.
            v_scale: as k_scale.
        """
