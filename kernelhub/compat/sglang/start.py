"""The start of an SGLang model runner: `kernelhub.compat.start` between its pool and its CUDA graphs.

SGLang's `ModelRunner` allocates its pool, creates its attention backend, then calls its `init_cuda_graphs`, also if
CUDA graphs are disabled. `follow` wraps that method of the runner. Before it runs, every kind of attention layer is
called as serving calls it, with the layer itself and the pool, and its kernels are verified. After it, kernelhub is
sealed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_exec, get_schedule
from torch import Tensor

from kernelhub.compat.start import DECODE, MIXED, EngineStart, Layers, Limits

START = "init_cuda_graphs"
ENGINE = EngineStart("SGLang", logging.getLogger("kernelhub.compat.sglang"))
_SINKS = ("sinks", "attention_sink_bias")  # attributes of SGLang's models that are passed to their layers as sinks


def follow(
    runner: Any,
    facets: Callable[[Any, Tensor | None], dict[str, Any]],
    run: Callable[[Any, Tensor | None, dict[str, Any]], None],
) -> None:
    """Wrap the runner's start, once: with overlapped batches a runner has several backends of the same layers.

    Args:
        runner: SGLang's `ModelRunner`.
        facets: function from a layer and its sinks to the facets of its problems, without those that depend on the
            step.
        run: function that runs a layer and its sinks with the arguments of a call of `paged_attention`.
    """
    if START in vars(runner):
        return
    plain = getattr(runner, START)

    @functools.wraps(plain)
    def start(*args: Any, **kwargs: Any) -> Any:
        kinds = _kinds_of(runner.model, facets, run)
        if kinds:
            ENGINE.warm_up(kinds, limits_of(runner), runner.req_to_token_pool.req_to_token.device)
        result = plain(*args, **kwargs)
        if kinds:
            ENGINE.seal()
        return result

    setattr(runner, START, start)


def limits_of(runner: Any) -> Limits:
    """The limits of a `ModelRunner`. A mixed step has a chunk of a prompt and a token of each running sequence."""
    schedule, graphs = get_schedule(), get_exec().graph.cuda_graph_config.decode
    sequences, context_len = int(runner.max_running_requests), int(runner.model_config.context_len)
    chunk = int(schedule.chunked_prefill_size or 0)
    tokens = chunk if chunk > 0 else max(int(schedule.max_prefill_tokens), context_len)
    return Limits(tokens + sequences, sequences, context_len, tuple(graphs.bs or ()))


def _kinds_of(
    model: Any,
    facets: Callable[[Any, Tensor | None], dict[str, Any]],
    run: Callable[[Any, Tensor | None, dict[str, Any]], None],
) -> list[Layers]:
    """The kinds of a model's attention layers."""
    kinds: dict[tuple[Any, ...], Layers] = {}
    for name, layer, sinks in _layers_of(model):
        said = facets(layer, sinks)
        key = tuple(sorted(said.items()))
        if key not in kinds:
            call = functools.partial(run, layer, sinks)
            kinds[key] = Layers("paged_attention", [], said, DECODE | MIXED, 1, call, lambda: None)
        kinds[key].names.append(name)
    return list(kinds.values())


def _layers_of(model: Any) -> Iterator[tuple[str, Any, Tensor | None]]:
    """The attention layers of a model, each with its name and the sinks that the module around it has."""
    for prefix, owner in model.named_modules():
        for name, layer in owner.named_children():
            if isinstance(layer, RadixAttention):
                sinks = (getattr(owner, attribute, None) for attribute in _SINKS)
                yield f"{prefix}.{name}", layer, next((each for each in sinks if each is not None), None)
