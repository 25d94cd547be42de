"""Whether the library's functions run cuDNN's graphs, when they make one, and what releases differ in.

They keep the process's last 256 graphs, keyed by all that a graph is made from, from 0.7.1 on. Where the frontend
cannot be imported they would run binaries of another kind without a word, which are downloaded: that is refused here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable, Iterator
from typing import Any

import cudnn
from flashinfer.cudnn.decode import CUDNN_AVAILABLE
from flashinfer.cudnn.prefill import CUDNN_AVAILABLE as ALSO_AVAILABLE
from flashinfer.cudnn.prefill import cudnn_batch_prefill_with_kv_cache

from kernelhub.dispatch.work import JOURNAL

LOWEST_BACKEND = 91900  # cuDNN 9.19, which torch 2.11 brings
FEWEST_TOKENS = 128  # a graph for one query leaves most heads' LSE unwritten (NVIDIA/cudnn-frontend#1083)
_MOST_CLASSES = 256
# The base is passed from 0.7.1 on, where the default is base 2; it is natural before.
TAKES_BASE = "lse_base" in inspect.signature(cudnn_batch_prefill_with_kv_cache).parameters
NATURAL: dict[str, Any] = {"lse_base": "ln"} if TAKES_BASE else {}


class Unsupported(RuntimeError):
    """FlashInfer would not run cuDNN here."""


class Classes:
    """The classes of sizes in an adapter's calls; the library makes a graph for each.

    Raises:
        Unsupported: there is no frontend to make graphs with, or cuDNN is too old.
    """

    def __init__(self) -> None:
        if not (CUDNN_AVAILABLE and ALSO_AVAILABLE):
            raise Unsupported("FlashInfer could not import cuDNN's frontend, and would run other kernels instead")
        version = cudnn.backend_version()
        if version < LOWEST_BACKEND:
            raise Unsupported(f"cuDNN is {version}, {LOWEST_BACKEND} is needed; install a torch that includes it")
        self._met: set[Hashable] = set()

    def meet(self, key: Hashable) -> contextlib.AbstractContextManager[Any]:
        """Run the library's call inside: a new class is reported, and rejected after seal()."""
        if key in self._met:
            return contextlib.nullcontext()
        if len(self._met) >= _MOST_CLASSES:
            self._met.clear()
        return self._making(key)

    @contextlib.contextmanager
    def _making(self, key: Hashable) -> Iterator[None]:
        with JOURNAL.doing("compile", f"cuDNN's graph for {key}", "flashinfer"):
            yield
        self._met.add(key)
