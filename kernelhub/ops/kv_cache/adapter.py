"""The adapter interface of `write_kv_cache`."""

from __future__ import annotations

import abc

from torch import Tensor

from kernelhub.ops.known_calls import Repeatable
from kernelhub.ops.kv_cache.problem import KvCacheProblem
from kernelhub.ops.kv_cache.rope import Rope

Scale = float | Tensor | None


class KvCacheAdapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write the places of `k_cache` and `v_cache` that slots name, those alone, and return nothing. A
       kernel whose record has no feature ``rope`` never receives `rope`.

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
        rope: Rope | None = None,
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
            rope: if the problem has a rotary embedding; then keys are rotated in float32, without fused operations, and
                rounded to their dtype before they are stored, and q is rotated in place. A token whose position has no
                row of the cache is not written, and its q stays.
        """
