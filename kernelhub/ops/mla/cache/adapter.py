"""The adapter interface of `write_mla_cache`."""

from __future__ import annotations

import abc

from torch import Tensor

from kernelhub.ops.known_calls import Repeatable
from kernelhub.ops.mla.cache.problem import MlaCacheProblem


class MlaCacheAdapter(Repeatable, abc.ABC):
    """A kernel of the op, made for one problem. To write one:

    1. In `__init__(problem)` choose what is static.
    2. In `launch` write the rows of `kv_cache` that slots name, those alone, and return nothing.

    The op has checked what its contract says. Tensors may have any strides.
    """

    def __init__(self, problem: MlaCacheProblem) -> None:
        self.problem = problem

    @abc.abstractmethod
    def launch(
        self, kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: float | Tensor | None
    ) -> None:
        """Write the rows.

        Args:
            kv_c: [T, V]; T > 0.
            k_rope: [T, R]; R may be 0.
            kv_cache: [num_pages, page_size, V + R], at least one page.
            slot_mapping: int64 [T], negative for tokens that are not to be written.
            kv_scale: None unless the cache is fp8; then a float, or float32 of one element, to divide by.
        """
