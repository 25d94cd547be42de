"""The start of a vLLM worker: warm-up of its attention layers before CUDA graphs are captured, then `seal`.

vLLM calls `Worker.compile_or_warm_up_model` once its KV cache is allocated; graphs are captured in it. `follow` wraps
that method. Before it runs, every kind of attention layer is called as serving calls it, with the layer itself and a
small cache of the same strides, and its kernels are verified; a second start takes both from the caches on disk. After
it, kernelhub is sealed.
"""

from __future__ import annotations

import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.dispatch.explain import explain
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import GraphLevel
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import KernelhubError, NotWarmed
from kernelhub.ops.attention.problem import FEW, FEW_TOKENS, ONE
from kernelhub.ops.models.batches import need_of
from kernelhub.ops.models.calls import calls_of
from kernelhub.ops.models.problems import Need
from kernelhub.runtime.progress import Beat
from kernelhub.runtime.seal import seal, unseal
from kernelhub.warming.defaults import CONTEXT_LEN
from kernelhub.warming.warmup import warmup

WORKER = "vllm.v1.worker.gpu_worker"
START = "compile_or_warm_up_model"
_CACHE_BYTES = 1 << 28  # most memory for the cache of a call
_SAY_EVERY_S = 5.0
logger = logging.getLogger("vllm.plugins.kernelhub")  # below vLLM's logger, so that its settings apply


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


class Limits(NamedTuple):
    """The largest sizes of the engine's steps."""

    tokens: int
    sequences: int
    context_len: int
    captured: tuple[int, ...]
    queries: int = 1  # of each sequence in a step of speculative decode

    @classmethod
    def of(cls, config: Any) -> Limits:
        """The limits of a `VllmConfig`."""
        scheduler, graphs = config.scheduler_config, config.compilation_config.cudagraph_capture_sizes
        longest = int(config.model_config.max_model_len)
        sizes = int(scheduler.max_num_batched_tokens), int(scheduler.max_num_seqs), longest
        return cls(*sizes, tuple(graphs or ()), queries_of(config))

    def counts(self, ragged: bool, queries: int = 1) -> tuple[int, ...]:
        """Token counts of the steps to warm up: powers of two, the largest count, and the sizes of CUDA graphs.

        Args:
            ragged: sequences have different numbers of queries; otherwise each has `queries`.
        """
        if queries > 1:
            graphs = {count // queries for count in self.captured} & set(range(1, self.sequences + 1))
            return tuple(count * queries for count in sorted({*self.counts(False), *graphs}))
        most = self.tokens if ragged else self.sequences
        powers = {1 << power for power in range(most.bit_length()) if 1 << power <= most}
        graphs = set() if ragged else {count for count in self.captured if count <= most}
        return tuple(sorted(powers | {most} | graphs))


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
        steps: facets of the steps that vLLM makes, by their names in the log; `SPECULATIVE` stands for steps of
            speculative decode, in which each sequence has as many queries, more than one.
        caches: the op's parameters that receive vLLM's cache.
        facets: function from a layer, the dtype of its queries and its cache to the facets of its problems.
        run: function that makes one call from a layer, a cache in vLLM's form, and the other arguments.
        forget: function that drops a layer's references to its last cache.
    """

    impl: type[Any]
    op: str
    steps: dict[str, dict[str, Any]]
    caches: tuple[str, ...]
    facets: Callable[[Any, torch.dtype, Tensor], dict[str, Any]]
    run: Callable[[Any, Tensor, dict[str, Any]], None]
    forget: Callable[[Any], None]

    def steps_within(self, limits: Limits) -> dict[str, dict[str, Any]]:
        """The steps that an engine with these limits makes."""
        speculates = 1 < limits.queries <= FEW_TOKENS
        return {name: facets for name, facets in self.steps.items() if facets is not SPECULATIVE or speculates}


SPECULATIVE = {"q_len": FEW, "ragged": False}


def follow(parts: Parts) -> None:
    """Wrap vLLM's start of a worker, once; log a warning if this vLLM has no such method."""
    try:
        worker = importlib.import_module(WORKER).Worker
        plain = getattr(worker, START)
    except (ImportError, AttributeError) as error:
        logger.warning("kernelhub does not warm up at vLLM's start: %s.Worker.%s is missing: %s", WORKER, START, error)
        return
    if not hasattr(plain, "_parts"):
        setattr(worker, START, _followed(plain, [parts]))
    elif parts not in plain._parts:
        plain._parts.append(parts)


def _followed(plain: Callable[..., Any], parts: list[Parts]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        warm_up(self.vllm_config, self.device, parts)
        result = plain(self, *args, **kwargs)
        seal_now()
        return result

    start._parts = parts  # type: ignore[attr-defined]
    return start


def warm_up(config: Any, device: torch.device, parts: list[Parts]) -> None:
    """Compile, load and verify what steps of kernelhub's layers need, unless KERNELHUB_ENGINE_WARMUP is 0.

    A kernel that fails is an error in vLLM's log, and the next one serves.
    """
    kinds = [(each, kind, *layers) for each in parts for kind, layers in kinds_of(config, each).items()]
    if not kinds:
        return
    if not HUB.settings["KERNELHUB_ENGINE_WARMUP"]:
        logger.warning("KERNELHUB_ENGINE_WARMUP=0: kernels compile at the first requests that need them")
        return
    begun, limits = time.monotonic(), Limits.of(config)
    selections = [
        _selection(each, kind, facets, device)
        for each, kind, *_ in kinds
        for facets in each.steps_within(limits).values()
    ]
    calls = [
        _named(_caller(layers[0], each, kind, limits, device), kind, names, each.op)
        for each, kind, names, layers in kinds
    ]
    logger.info("kernelhub: warming up %d kinds of attention layers on %s", len(kinds), device)
    try:
        done = warmup(
            [*selections, *calls],
            token_counts=limits.counts(ragged=True),
            context_len=min(CONTEXT_LEN, limits.context_len),
            max_context_len=limits.context_len,
            device=device,
            heartbeat=_reporter(),
        )
    except KernelhubError as error:
        logger.error("kernelhub: the warm-up ended early: %s", error)
        return
    for failure in done.failures:
        logger.error("kernelhub: not ready: %s", failure)
    for each, kind, names, _ in kinds:
        steps = each.steps_within(limits)
        chosen = {label: _selection(each, kind, facets, device).selected for label, facets in steps.items()}
        logger.info("kernelhub: %d layers like %s: %s", len(names), names[0], _listed(chosen))
    logger.info("kernelhub: ready in %.1f s: %s", time.monotonic() - begun, done.summary())


def seal_now() -> None:
    """Seal, unless KERNELHUB_ENGINE_SEAL is off; without a warm-up nothing is sealed."""
    if HUB.settings["KERNELHUB_ENGINE_SEAL"] == "off" or not HUB.settings["KERNELHUB_ENGINE_WARMUP"]:
        return
    seal()
    logger.info("kernelhub: sealed: from now on no call may compile, load or select a kernel")


def serve(call: Callable[[], Any], error: NotWarmed) -> Any:
    """Run a call that the warm-up did not cover: logged as an error, unless KERNELHUB_ENGINE_SEAL is ``raise``.

    Raises:
        NotWarmed: `error`, as configured, or while a CUDA graph is captured.
    """
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if HUB.settings["KERNELHUB_ENGINE_SEAL"] == "raise" or capturing:
        raise error
    logger.error("kernelhub: this step waits, since the warm-up did not cover it (please report it): %s", error)
    unseal()
    try:
        return call()
    finally:
        seal()


def kinds_of(config: Any, parts: Parts) -> dict[LayerKind, tuple[list[str], list[Any]]]:
    """The kinds of kernelhub's layers of a model, with names and layers of each."""
    found: dict[LayerKind, tuple[list[str], list[Any]]] = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        impl, cache = getattr(layer, "impl", None), getattr(layer, "kv_cache", None)
        while isinstance(cache, list | tuple) and cache:  # releases before 0.33: one for each virtual engine
            cache = cache[0]
        if isinstance(impl, parts.impl) and isinstance(cache, Tensor) and cache.ndim > 2:
            facets = parts.facets(impl, config.model_config.dtype, cache)
            kind = LayerKind(tuple(sorted(facets.items())), tuple(cache.shape[1:]), cache.stride(), cache.dtype)
            names, layers = found.setdefault(kind, ([], []))
            names.append(name)
            layers.append(layer)
    return found


def _selection(parts: Parts, kind: LayerKind, facets: dict[str, Any], device: torch.device) -> Selection[Any]:
    return explain(parts.op, device=device, **dict(kind.facets) | facets)


def _caller(layer: Any, parts: Parts, kind: LayerKind, limits: Limits, device: torch.device) -> Callable[[], None]:
    """The function that makes the calls of one layer."""

    def call() -> None:
        try:
            for cache, arguments in _steps(parts, kind, limits, device):
                parts.run(layer, cache, arguments)
        finally:
            parts.forget(layer.impl)

    return call


def _steps(
    parts: Parts, kind: LayerKind, limits: Limits, device: torch.device
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The steps of a layer as vLLM makes them: a cache, and the op's other arguments."""
    for facets in parts.steps_within(limits).values():
        need = need_of(parts.op, _selection(parts, kind, facets, device).problem)
        for queries in range(2, limits.queries + 1) if facets is SPECULATIVE else (1,):
            asked = replace(need, sizes=((("queries", queries),),)) if queries > 1 else need
            yield from _steps_of(asked, limits.counts(facets["ragged"], queries), parts, kind, limits, device)


def _steps_of(
    need: Need, counts: tuple[int, ...], parts: Parts, kind: LayerKind, limits: Limits, device: torch.device
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The steps of one class with these numbers of tokens."""
    block_bytes = kind.stored.itemsize * kind.strides[0]
    page = torch.Size(kind.block).numel() * kind.stored.itemsize
    most = max(_CACHE_BYTES * page // block_bytes, 1)
    shortest, longest = min(CONTEXT_LEN, limits.context_len), limits.context_len
    for called in calls_of(
        need, counts, device, context_len=shortest, max_context_len=longest, filled=False, cache_bytes=most
    ):
        arguments = dict(called.arguments)
        pages = {arguments.pop(name).shape[0] for name in parts.caches}.pop()
        cache = torch.empty_strided((pages, *kind.block), kind.strides, dtype=kind.stored, device=device).zero_()
        yield cache, arguments


def _named(call: Callable[[], None], kind: LayerKind, names: list[str], op: str) -> Callable[[], None]:
    facets = dict(kind.facets)
    if "num_heads" in facets:
        heads = f"{facets['num_heads']} heads of {facets['head_dim']}"
    else:
        heads = f"{facets['num_q_heads']}/{facets['num_kv_heads']} heads of {facets['head_dim_qk']}"
    call.__name__ = f"steps of vLLM, {len(names)} layers of {op}, {heads}"
    return call


def _listed(chosen: dict[str, str | None]) -> str:
    return "; ".join(f"{label}: {kernel}" for label, kernel in chosen.items())


def _reporter() -> Callable[[Beat], None]:
    """Log the progress of a warm-up every few seconds."""
    said = time.monotonic()

    def report(beat: Beat) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            logger.info("kernelhub: %s", beat)

    return report
