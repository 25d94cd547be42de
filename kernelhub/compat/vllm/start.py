"""The start of a vLLM worker: `kernelhub.compat.start` between its KV cache and its CUDA graphs.

vLLM calls `Worker.compile_or_warm_up_model` once its KV cache is allocated; graphs are captured in it. `follow` wraps
that method. Before it runs, every kind of attention layer is called as serving calls it, with the layer itself and a
small cache of the same strides, and its kernels are verified. After it, kernelhub is sealed.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.compat.start import EngineStart, Kind, Layers, Limits, Rows
from kernelhub.dispatch.kernel import GraphLevel
from kernelhub.dispatch.selection import Selection
from kernelhub.ops.attention.problem import FEW, FEW_TOKENS, ONE

WORKER = "vllm.v1.worker.gpu_worker"
START = "compile_or_warm_up_model"
_CACHE_BYTES = 1 << 28  # most memory for the cache of a call
logger = logging.getLogger("vllm.plugins.kernelhub")  # below vLLM's logger, so that its settings apply
ENGINE = EngineStart("vLLM", logger)


class LayerKind(NamedTuple):
    """The properties that layers with the same kernels share.

    Attributes:
        facets: facets of their problems, without those that depend on the step.
        block: shape of a block of the cache, ``(KH, N, 2 * D)``, ``(2, N, KH, D)`` or, of latents, ``(N, D)``.
        strides: strides of the cache.
        stored: dtype of the cache.
    """

    facets: tuple[tuple[str, Any], ...]
    block: tuple[int, ...]
    strides: tuple[int, ...]
    stored: torch.dtype


def queries_of(config: Any) -> int:
    """Queries of each sequence in a step of speculative decode, 1 without; by a `VllmConfig`."""
    speculative = getattr(config, "speculative_config", None)
    return 1 + int(getattr(speculative, "num_speculative_tokens", None) or 0)


def capture_safe(selection: Selection[Any]) -> bool:
    """Whether a kernel is selected that a CUDA graph can capture."""
    return selection.kernel is not None and selection.kernel.graph is not GraphLevel.NONE


def graphs_of(support: Any, captured: Callable[[str], bool], queries: int) -> Any:
    """The member of vLLM's AttentionCGSupport: which decode steps a CUDA graph can capture.

    Args:
        support: vLLM's enumeration.
        captured: whether decode with so many queries of each sequence, one or few, can be captured.
        queries: queries of each sequence in a step of speculative decode, 1 without.
    """
    if not captured(ONE):
        return support.NEVER
    if 1 < queries <= FEW_TOKENS and captured(FEW):
        return support.UNIFORM_BATCH
    return support.UNIFORM_SINGLE_TOKEN_DECODE


class Parts(NamedTuple):
    """A kind of vLLM backend whose layers run one op; its module imports vLLM and this module.

    Attributes:
        impl: the class of the layers.
        op: the name of the op.
        steps: facets of the steps that vLLM makes, by their names in the log; as of `Layers`.
        caches: the op's parameters that receive vLLM's cache.
        facets: function from a layer, the dtype of its queries and its cache to the facets of its problems.
        run: function that makes one call from a layer, a cache in vLLM's form, and the other arguments.
        forget: function that drops a layer's references to its last cache.
        writes: function from layers' names, one of them, the dtype of its keys and its cache to the calls that write
            the caches of these layers; None where vLLM's kernel does.
    """

    impl: type[Any]
    op: str
    steps: dict[str, dict[str, Any]]
    caches: tuple[str, ...]
    facets: Callable[[Any, torch.dtype, Tensor], dict[str, Any]]
    run: Callable[[Any, Tensor, dict[str, Any]], None]
    forget: Callable[[Any], None]
    writes: Callable[[list[str], Any, torch.dtype, Tensor], Rows | None] | None = None


def follow(parts: Parts | None = None) -> None:
    """Wrap vLLM's start of a worker, once; log a warning if this vLLM has no such method.

    Args:
        parts: a kind of layers to warm up, in addition to the calls that are noted.
    """
    try:
        worker = importlib.import_module(WORKER).Worker
        plain = getattr(worker, START)
    except (ImportError, AttributeError) as error:
        logger.warning("kernelhub does not warm up at vLLM's start: %s.Worker.%s is missing: %s", WORKER, START, error)
        return
    if not hasattr(plain, "_parts"):
        setattr(worker, START, _followed(plain, [] if parts is None else [parts]))
    elif parts is not None and parts not in plain._parts:
        plain._parts.append(parts)


def _followed(plain: Callable[..., Any], parts: list[Parts]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        warm_up(self.vllm_config, self.device, parts)
        result = plain(self, *args, **kwargs)
        ENGINE.seal()
        return result

    start._parts = parts  # type: ignore[attr-defined]
    return start


def limits_of(config: Any) -> Limits:
    """The limits of a `VllmConfig`."""
    scheduler, graphs = config.scheduler_config, config.compilation_config.cudagraph_capture_sizes
    longest = int(config.model_config.max_model_len)
    sizes = int(scheduler.max_num_batched_tokens), int(scheduler.max_num_seqs), longest
    return Limits(*sizes, tuple(graphs or ()), queries_of(config))


def warm_up(config: Any, device: torch.device, parts: list[Parts]) -> None:
    """Warm up the layers of a worker's model that kernelhub runs."""
    found = [(each, kind, *of) for each in parts for kind, of in kinds_of(config, each).items()]
    writes = [
        each.writes(names, layers[0], config.model_config.dtype, cache_of(layers[0]))
        for each, _, names, layers in found
        if each.writes is not None
    ]
    kinds: list[Kind] = [
        *(_layers(*of) for of in found),
        *(each for each in writes if each is not None),
        *ENGINE.noted.take(),
    ]
    if kinds:
        ENGINE.warm_up(kinds, limits_of(config), device)


def kinds_of(config: Any, parts: Parts) -> dict[LayerKind, tuple[list[str], list[Any]]]:
    """The kinds of kernelhub's layers of a model, with names and layers of each."""
    found: dict[LayerKind, tuple[list[str], list[Any]]] = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        impl, cache = getattr(layer, "impl", None), cache_of(layer)
        if isinstance(impl, parts.impl) and isinstance(cache, Tensor) and cache.ndim > 2:
            facets = parts.facets(impl, config.model_config.dtype, cache)
            kind = LayerKind(tuple(sorted(facets.items())), tuple(cache.shape[1:]), cache.stride(), cache.dtype)
            names, layers = found.setdefault(kind, ([], []))
            names.append(name)
            layers.append(layer)
    return found


def cache_of(layer: Any) -> Any:
    """The cache of a layer; None if it has none."""
    cache = getattr(layer, "kv_cache", None)
    while isinstance(cache, list | tuple) and cache:  # releases before 0.33: one for each virtual engine
        cache = cache[0]
    return cache


def _layers(parts: Parts, kind: LayerKind, names: list[str], layers: list[Any]) -> Layers:
    """A kind of layers, of which the first one is called."""
    block_bytes = kind.stored.itemsize * kind.strides[0]
    page = torch.Size(kind.block).numel() * kind.stored.itemsize

    def run(arguments: dict[str, Any]) -> None:
        given = [arguments.pop(name) for name in parts.caches]
        shape = given[0].shape[0], *kind.block
        cache = torch.empty_strided(shape, kind.strides, dtype=kind.stored, device=given[0].device).zero_()
        parts.run(layers[0], cache, arguments)

    most = max(_CACHE_BYTES * page // block_bytes, 1)
    forget = functools.partial(parts.forget, layers[0].impl)
    return Layers(parts.op, names, dict(kind.facets), parts.steps, most, run, forget)
