"""The start of an engine: warm-up of its attention layers before CUDA graphs are captured, then `seal`.

An engine's plugin finds the kinds of attention layers of a model (`Layers`) and the largest sizes of its steps
(`Limits`). Products and experts, whose calls depend on the number of tokens alone, are noted when a layer first calls
them (`Rows`). `EngineStart.warm_up` verifies the kernels of each kind, then runs a layer of it in the forms of serving;
a second start takes both from the caches on disk. `EngineStart.seal` seals the process, and `EngineStart.serve` runs a
step that the warm-up did not cover.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from kernelhub.dispatch.events import selection_log
from kernelhub.dispatch.explain import explain
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import KernelhubError, NoKernel, NotWarmed
from kernelhub.ops.attention.problem import FEW, FEW_TOKENS, MANY, ONE
from kernelhub.ops.models.batches import QUERIES, need_of
from kernelhub.ops.models.calls import calls_of
from kernelhub.runtime.progress import Beat
from kernelhub.runtime.seal import seal, unseal
from kernelhub.warming.defaults import CONTEXT_LEN
from kernelhub.warming.warmup import warmup

SPECULATIVE = {"q_len": FEW, "ragged": False}
DECODE = {"decode": {"q_len": ONE, "ragged": False}}
MIXED = {
    "mixed, one query each": {"q_len": ONE, "ragged": True},
    "mixed, up to 16 queries each": {"q_len": FEW, "ragged": True},
    "mixed": {"q_len": MANY, "ragged": True},
}
_LOG_EVERY_S = 5.0


class Limits(NamedTuple):
    """The largest sizes of an engine's steps.

    Attributes:
        tokens: new tokens of a step.
        sequences: sequences of a step of decode.
        context_len: tokens of a sequence.
        captured: token counts of the steps of decode that CUDA graphs capture.
        queries: queries of each sequence in a step of speculative decode, 1 without.
    """

    tokens: int
    sequences: int
    context_len: int
    captured: tuple[int, ...]
    queries: int = 1

    def counts(self, facets: dict[str, Any], queries: int = 1) -> tuple[int, ...]:
        """Token counts of the steps to warm up: powers of two, the largest count, and the sizes of CUDA graphs.

        Args:
            facets: of the steps. With one or few queries a step has as many sequences as the engine serves at most;
                counts beyond that would only take memory.
            queries: of each sequence, if all have as many.
        """
        if queries > 1:
            graphs = {count // queries for count in self.captured} & set(range(1, self.sequences + 1))
            return tuple(count * queries for count in sorted({*self.counts(facets), *graphs}))
        captured = set() if facets["ragged"] else set(self.captured)
        most = self.sequences
        if facets["ragged"] and facets["q_len"] != ONE:
            most = self.tokens if facets["q_len"] != FEW else min(self.tokens, QUERIES * self.sequences)
        return _up_to(most, captured)

    def rows(self) -> tuple[int, ...]:
        """Token counts to warm up what depends on nothing else."""
        return _up_to(self.tokens, set(self.captured))


def _up_to(most: int, more: set[int]) -> tuple[int, ...]:
    """Powers of two, other counts, and the largest one."""
    powers = {1 << power for power in range(most.bit_length())}
    return tuple(sorted({count for count in powers | more if count <= most} | {most}))


class Layers(NamedTuple):
    """The layers of a model that run the same kernels.

    Attributes:
        op: the name of their op.
        names: their names in the model.
        facets: facets of their problems, without those that depend on the step.
        steps: facets of the steps that the engine makes, by their names in the log; `SPECULATIVE` marks the steps of
            speculative decode, in which each sequence has as many queries, more than one.
        cache_bytes: most memory for the cache of a call.
        run: function that runs one of the layers with the arguments of a call of the op.
        forget: function that drops what the layer stores of the last call.
    """

    op: str
    names: list[str]
    facets: dict[str, Any]
    steps: dict[str, dict[str, Any]]
    cache_bytes: int
    run: Callable[[dict[str, Any]], None]
    forget: Callable[[], None]

    def steps_within(self, limits: Limits) -> dict[str, dict[str, Any]]:
        """The steps that an engine with these limits makes."""
        speculates = 1 < limits.queries <= FEW_TOKENS
        return {name: facets for name, facets in self.steps.items() if facets is not SPECULATIVE or speculates}

    def selection(self, facets: dict[str, Any], device: torch.device) -> Selection[Any]:
        """The selection for steps with these facets."""
        return explain(self.op, device=device, **self.facets | facets)

    def run_all(self, limits: Limits, device: torch.device) -> None:
        """Run a layer in each form that an engine with these limits serves."""
        try:
            for arguments in _calls_within(self, limits, device):
                self.run(arguments)
        finally:
            self.forget()

    def __str__(self) -> str:
        facets = self.facets
        if "num_heads" in facets:
            heads = f"{facets['num_heads']} heads of {facets['head_dim']}"
        else:
            heads = f"{facets['num_q_heads']}/{facets['num_kv_heads']} heads of {facets['head_dim_qk']}"
        return f"{len(self.names)} layers of {self.op}, {heads}"


class Rows(NamedTuple):
    """Calls of an op that depend on a step's number of tokens alone, as those of a linear layer.

    Attributes:
        function: the op's public function.
        names: a name for the log.
        arguments: function from a number of tokens to the arguments of a call.
    """

    function: Any
    names: list[str]
    arguments: Callable[[int], dict[str, Any]]

    def steps_within(self, limits: Limits) -> dict[str, int]:
        """The fewest and the most tokens of a step."""
        return {f"{count} tokens" if count > 1 else "one token": count for count in sorted({1, limits.tokens})}

    def selection(self, tokens: int, device: torch.device) -> Selection[Any]:
        """The selection for a step of so many tokens."""
        return explain(self.function, **self.arguments(tokens))

    def run_all(self, limits: Limits, device: torch.device) -> None:
        """Make the calls of each number of tokens."""
        for tokens in limits.rows():
            self.function(**self.arguments(tokens))

    def __str__(self) -> str:
        return self.names[0]


class Noted:
    """The calls of ops that layers have made since the last warm-up, one for each form."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, Rows] = {}
        self._first: list[Callable[[], None]] = []

    def at_first(self, run: Callable[[], None]) -> None:
        """Run a function when the first call is noted, once."""
        self._first.append(run)

    def note(self, form: Hashable, rows: Callable[[], Rows]) -> None:
        """Note a call, unless its form is known."""
        if form not in self._rows:
            while self._first:
                self._first.pop()()
            self._rows[form] = rows()

    def take(self) -> list[Rows]:
        """The noted calls, which are forgotten, as they refer to a model's weights."""
        rows = list(self._rows.values())
        self._rows = dict.fromkeys(self._rows, _TAKEN)
        return [each for each in rows if each is not _TAKEN]


_TAKEN = Rows(None, [], lambda tokens: {})
Kind = Layers | Rows


@dataclass(frozen=True)
class EngineStart:
    """The start of an engine's process.

    Attributes:
        engine: the name of the engine.
        log: the logger, below the engine's if its settings must apply.
        noted: calls of products and experts.
    """

    engine: str
    log: logging.Logger
    noted: Noted = field(default_factory=Noted)

    def warm_up(self, kinds: Sequence[Kind], limits: Limits, device: torch.device) -> None:
        """Compile, load and verify what steps of kernelhub's layers need, unless KERNELHUB_ENGINE_WARMUP is 0.

        A kernel that fails is an error in the log, and the next one serves.

        Raises:
            NoKernel: no kernel supports a step of some layers; the message has the layers and each kernel's reason.
        """
        for kind in kinds:
            self._refuse(kind, limits, device)
        if not HUB.settings["KERNELHUB_ENGINE_WARMUP"]:
            self.log.warning("KERNELHUB_ENGINE_WARMUP=0: kernels compile at the first requests that need them")
            return
        begun = time.monotonic()
        unseal()  # an earlier engine of this process sealed it
        steps: list[tuple[Any, Any]] = [(each, step) for each in kinds for step in each.steps_within(limits).values()]
        calls = [_call(self.engine, each, limits, device) for each in kinds]
        self.log.info("kernelhub: warming up %d kinds of layers on %s", len(kinds), device)
        try:
            with _summarised():
                done = warmup(
                    [*(each.selection(facets, device) for each, facets in steps), *calls],
                    token_counts=limits.counts(DECODE["decode"]),  # `calls` make the larger steps
                    context_len=min(CONTEXT_LEN, limits.context_len),
                    max_context_len=limits.context_len,
                    device=device,
                    heartbeat=_reporter(self.log),
                )
        except KernelhubError as error:
            self.log.error("kernelhub: the warm-up ended early: %s", error)
            return
        for failure in done.failures:
            self.log.error("kernelhub: not ready: %s", failure)
        each: Any
        for each in kinds:
            selected = (
                f"{label}: {each.selection(step, device).selected}" for label, step in each.steps_within(limits).items()
            )
            self.log.info("kernelhub: %d layers like %s: %s", len(each.names), each.names[0], "; ".join(selected))
        for hint in _quarantined(each.selection(facets, device) for each, facets in steps):
            self.log.warning("kernelhub: a quarantined kernel does not serve: %s", hint)
        self.log.info("kernelhub: ready in %.1f s: %s", time.monotonic() - begun, done.summary())

    def _refuse(self, kind: Any, limits: Limits, device: torch.device) -> None:
        """Raise for layers that could not serve, before the first request does."""
        for label, step in kind.steps_within(limits).items():
            selection = kind.selection(step, device)
            if selection.kernel is None:
                layers = f"{len(kind.names)} layers like {kind.names[0]}"
                remedy = f"select another attention backend of {self.engine}, or follow a remedy below"
                raise NoKernel(f"kernelhub has no kernel for {layers}, step {label!r}: {remedy}", selection)

    def seal(self) -> None:
        """Seal, unless KERNELHUB_ENGINE_SEAL is off; without a warm-up nothing is sealed."""
        if HUB.settings["KERNELHUB_ENGINE_SEAL"] == "off" or not HUB.settings["KERNELHUB_ENGINE_WARMUP"]:
            return
        seal()
        self.log.info("kernelhub: sealed: from now on no call may compile, load or select a kernel")

    def serve(self, call: Callable[[], Any], error: NotWarmed) -> Any:
        """Run a call that the warm-up did not cover: logged as an error, unless KERNELHUB_ENGINE_SEAL is ``raise``.

        Raises:
            NotWarmed: `error`, as configured, or while a CUDA graph is captured.
        """
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if HUB.settings["KERNELHUB_ENGINE_SEAL"] == "raise" or capturing:
            raise error
        self.log.error("kernelhub: this step waits, since the warm-up did not cover it (please report it): %s", error)
        unseal()
        try:
            return call()
        finally:
            seal()


@contextlib.contextmanager
def _summarised() -> Iterator[None]:
    """Log no line for each selection of the warm-up, which the start logs by layer; KERNELHUB_LOG=selection does."""
    level = selection_log.level
    if "selection" not in HUB.settings["KERNELHUB_LOG"]:
        selection_log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        selection_log.setLevel(level)


def _quarantined(selections: Iterable[Selection[Any]]) -> list[str]:
    """The kernels that quarantine alone keeps from serving, each with the reason and the remedy."""
    found = {}
    for decision in (decision for selection in selections for decision in selection.decisions):
        if {rejection.code for rejection in decision.rejections} == {"quarantined"}:
            found[decision.kernel] = decision.hint
    return list(found.values())


def _call(engine: str, kind: Kind, limits: Limits, device: torch.device) -> Callable[[], None]:
    """The function that makes the calls of a kind of layers."""

    def call() -> None:
        kind.run_all(limits, device)

    call.__name__ = f"steps of {engine}, {kind}"
    return call


def _calls_within(layers: Layers, limits: Limits, device: torch.device) -> Iterator[dict[str, Any]]:
    """The arguments of the op in the steps that an engine with these limits makes."""
    shortest, longest = min(CONTEXT_LEN, limits.context_len), limits.context_len
    for facets in layers.steps_within(limits).values():
        need = need_of(layers.op, layers.selection(facets, device).problem)
        for queries in range(2, limits.queries + 1) if facets is SPECULATIVE else (1,):
            asked = replace(need, sizes=((("queries", queries),),)) if queries > 1 else need
            for called in calls_of(
                asked,
                limits.counts(facets, queries),
                device,
                context_len=shortest,
                max_context_len=longest,
                filled=False,
                cache_bytes=layers.cache_bytes,
            ):
                yield dict(called.arguments)


def _reporter(log: logging.Logger) -> Callable[[Beat], None]:
    """Log the progress of a warm-up every few seconds."""
    logged = time.monotonic()

    def report(beat: Beat) -> None:
        nonlocal logged
        if time.monotonic() - logged >= _LOG_EVERY_S:
            logged = time.monotonic()
            log.info("kernelhub: %s", beat)

    return report
