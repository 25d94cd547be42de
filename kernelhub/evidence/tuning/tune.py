"""`kernelhub.tune`: measure the fastest right kernel for each problem class of a model on this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from kernelhub.dispatch.audits import unaudited
from kernelhub.dispatch.fingerprint import record_digest
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.order import line_for, ranked
from kernelhub.dispatch.plan import Plan
from kernelhub.dispatch.problem_class import facets_of
from kernelhub.dispatch.selection import Decision, Selection
from kernelhub.dispatch.standing import UNTRUSTED
from kernelhub.errors import ConfigurationError
from kernelhub.evidence.apart import Child
from kernelhub.evidence.earn import BUDGET_S, earn
from kernelhub.evidence.tuning import tables
from kernelhub.evidence.tuning.counts import usual_counts
from kernelhub.evidence.tuning.decide import decide_for_all
from kernelhub.evidence.tuning.entry import Kind, MeasuredSize, TuningEntry
from kernelhub.evidence.tuning.measure import Limits, MeasurementAborted, measure
from kernelhub.evidence.tuning.operands import NoRoom, Room, out_of_memory
from kernelhub.evidence.tuning.report import LeftOut, Tuning
from kernelhub.evidence.verify import device_here
from kernelhub.ops.models.calls import calls_of, holds, need_of
from kernelhub.ops.models.description import Description
from kernelhub.ops.models.problems import PHASES, Need, problems_of
from kernelhub.ops.serving import SCALE_BITS
from kernelhub.probes.device import facts
from kernelhub.runtime.caches import root

What = Plan | Need | Selection[Any]
Progress = Callable[[str, int, int], None]


def tune(
    what: str | Path | Description | What | Iterable[What],
    *,
    token_counts: Sequence[int] | None = None,
    tp: int = 1,
    ep: int = 1,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    page_size: int | None = None,
    quantization: str | None = None,
    phases: Sequence[str] = PHASES,
    ops: Sequence[str] | None = None,
    backend: str | Sequence[str] | None = None,
    device: torch.device | str | None = None,
    context_len: int = 1024,
    configurations: bool = True,
    samples: int = 30,
    budget_s: float | None = None,
    memory_bytes: int | None = None,
    packing: bool = False,
    progress: Progress | None = None,
) -> Tuning:
    """Measure every kernel that supports each problem class; selection then uses the fastest right one.

    Kernels that are not verified on this family of devices are verified first, in a child process (docs/trust.md).
    Each kernel that selection accepts is checked against the reference on the same call before it is timed. A wrong
    kernel is reported, and its time is not used. Kernels with other tiles are tried with those too. Times are
    medians of interleaved samples: on a GPU by replayed CUDA graphs, or by events if a kernel is not capture-safe, with
    operands outside of the L2 cache; on a CPU by the clock. The selection changes only if another kernel is faster by
    more than the noise and by more than 3 %. Results are stored after each problem class, below ``tuned`` in the cache
    folder. Selection reads them once; a call never measures.

    Args:
        what: a model, as of `problems_of`; or needs, plans or selections, one or several.
        token_counts: new tokens of a step; by default some of decode and some of prefill, fewer on a CPU.
        tp, ep, dtype, kv_dtype, page_size, quantization, phases: of a model, as of `problems_of`.
        ops: only these ops, by name.
        backend: only kernels of these backends, or these kernels, or globs. Others are not measured, and rank below.
        device: ``"cuda"``, ``"cuda:1"`` or ``"cpu"``; by default the first GPU, else the CPU.
        context_len: tokens of a sequence in a paged cache.
        configurations: whether to try other sizes of kernels, such as tiles.
        samples: most samples per kernel.
        budget_s: seconds after which nothing new begins; measurements until then are stored.
        memory_bytes: most device memory for operands and checks; by default half of the free memory.
        packing: as of ``prepare``: kernels for packed weights are also verified and measured, with weights that they
            packed. Others are measured with weights as in a checkpoint.
        progress: called as each problem class begins, with its name, its position and the number of classes.

    Returns:
        The measurements, with the regret of the selections and of the order without measurements. Everything that was
        left out (no time, no memory, weights that only a plan packs) is listed with the reason.

    Raises:
        ConfigurationError: an unknown model, op, backend or device; kernelhub is sealed; ``KERNELHUB_FORCE`` or an
            agreement of ranks forces kernels.
        KeyboardInterrupt: as usual; earlier measurements are stored.

    Example:
        >>> import kernelhub
        >>> needs = [need for need in kernelhub.problems_of("gpt-oss-120b", tp=8) if need.op == "route_experts"]
        >>> found = kernelhub.tune(needs, token_counts=[3], device="cpu", backend="torch", samples=5)
        >>> found.entries[0].chosen, found.regret[0].chosen_regret.us
        ('torch.routing', 0.0)
    """
    where = device_here(device)
    needs = needs_of(
        what, tp=tp, ep=ep, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, quantization=quantization,
        phases=phases, ops=ops,
    )  # fmt: skip
    _refuse_where_times_would_lie()
    _check_numbers(token_counts, samples, budget_s, context_len)
    words = (backend,) if isinstance(backend, str) else tuple(backend or ())
    HUB.registry.check_names(words, "backend=")
    begun = time.monotonic()
    until = begun + (budget_s if budget_s is not None else float("inf"))
    limits = Limits(Room(where, memory_bytes), samples, configurations=configurations, until=until)
    run = _TuneRun(where, limits, words, context_len, packing)
    try:
        with torch.no_grad(), HUB.ledger.unreported(), unaudited():
            for place, need in enumerate(needs):
                if progress is not None:
                    progress(_name(need), place, len(needs))
                run.measure(need, token_counts)
    finally:
        HUB.forget_evidence()
    heeded = HUB.settings["KERNELHUB_EVIDENCE"]
    unheeded = "" if heeded else "KERNELHUB_EVIDENCE=0: selection ignores measurements until it is unset"
    kept = root.best()
    unwritten = "" if kept.ok else f"valid in this process only: {kept.reason}; {kept.remedy}"
    elapsed_s = time.monotonic() - begun
    return Tuning(facts(where), tuple(run.entries), tuple(run.left_out), run.wrong, unwritten, unheeded, elapsed_s)


def needs_of(what: Any, *, ops: Sequence[str] | None = None, **model: Any) -> list[Need]:
    """The problem classes that `tune` would measure, for the same arguments.

    Raises:
        ConfigurationError: an unknown model or op, or an object that is not a plan, selection or need.
    """
    ops = (ops,) if isinstance(ops, str) else ops
    for name in ops or ():
        HUB.function(name)
    if isinstance(what, str | Path | Description):
        found = list(problems_of(what, **model))
    else:
        items = [what] if isinstance(what, Plan | Need | Selection) or not isinstance(what, Iterable) else list(what)
        found = [_need(item) for item in items]
    unique = {(need.op, need.facets): need for need in reversed(found)}
    return [need for need in reversed(unique.values()) if ops is None or need.op in ops]


class _TuneRun:
    """The measurements of one run so far."""

    def __init__(
        self, device: torch.device, limits: Limits, words: tuple[str, ...], context_len: int, packing: bool
    ) -> None:
        self.entries: list[TuningEntry] = []
        self.left_out: list[LeftOut] = []
        self.wrong: dict[tuple[str, str], str] = {}
        self._device = device
        self._limits = limits
        self._words = words
        self._context_len = context_len
        self._packing = packing
        self._ended = ""

    def measure(self, need: Need, token_counts: Sequence[int] | None) -> None:
        """Measure one problem class at every size; stored immediately, also on an interrupt."""
        name = _name(need)
        if not self._ended:
            self._earn_trust(need, token_counts)
        kernels = self._kernels(need)
        if self._ended or not kernels:
            self.left_out.append(LeftOut(name, self._ended or "no requested kernel can run it here"))
            return
        counts = token_counts if token_counts is not None else usual_counts(need, self._device)
        sizes: list[MeasuredSize] = []
        try:
            for size in self._sizes(need, kernels, counts):
                sizes.append(size)
        except MeasurementAborted as error:  # the kernel may have corrupted earlier results
            self._ended = str(error)
            self.left_out.append(LeftOut(name, self._ended))
            return
        except KeyboardInterrupt:
            self._keep(need, kernels, sizes)
            raise
        self._keep(need, kernels, sizes)

    def _earn_trust(self, need: Need, token_counts: Sequence[int] | None) -> None:
        """Verify kernels whose only rejection is trust, each in a process that it may end."""
        counts = token_counts if token_counts is not None else usual_counts(need, self._device)
        untrusted = [item for item in self._decisions(need) if [said.code for said in item.rejections] == [UNTRUSTED]]
        records = {kernel.name: kernel for kernel in HUB.registry.candidates(need.op).kernels}
        wanted = [record for item in untrusted if self._is_asked_for(record := records[item.kernel])]
        if not wanted:
            return
        with Child() as child:
            for kernel in wanted:
                left_s = self._limits.until - time.monotonic()
                if left_s <= 0:
                    self.left_out.append(LeftOut(f"{_name(need)}: {kernel.name}", "no time left of budget_s"))
                    continue
                budget_s = min(left_s, BUDGET_S)
                found = earn(
                    kernel, need, self._device, counts, context_len=self._context_len, budget_s=budget_s, child=child
                )
                if found.result.failures:
                    self.wrong[need.op, kernel.name] = found.result.reason
                elif not found.ok:
                    self.left_out.append(LeftOut(f"{_name(need)}: {kernel.name}", found.result.why_not))
        HUB.forget_evidence()

    def _decisions(self, need: Need) -> Sequence[Decision]:
        """The decision about each kernel, without users' requests and preferences."""
        policy = dataclasses.replace(
            HUB.policy(need.op, None, HUB.contexts.get()),
            requests=(), prefers=(), pins=(), deterministic=False, batch_invariant=False, unsafe=False,
            packing=self._packing,
        )  # fmt: skip
        return HUB.select(need.op, need.problem(self._device), policy).decisions

    def _is_asked_for(self, kernel: Kernel) -> bool:
        return not self._words or any(map(kernel.matches, self._words))

    def _kernels(self, need: Need) -> list[Kernel]:
        """Kernels that selection accepts without users' requests and preferences, ranked without measurements."""
        problem = need.problem(self._device)
        accepted = {item.kernel for item in self._decisions(need) if item.accepted}
        candidates = HUB.registry.candidates(need.op)
        line = line_for(candidates.lines, problem.device, HUB.registry.contracts[need.op].regime(problem))
        return [
            kernel
            for kernel in ranked(candidates.kernels, line)
            if kernel.name in accepted and self._is_asked_for(kernel)
        ]

    def _sizes(self, need: Need, kernels: Sequence[Kernel], counts: Sequence[int]) -> Iterator[MeasuredSize]:
        """Measurements at each size; sizes that cannot be measured are recorded."""
        name, function = _name(need), HUB.function(need.op)
        made = False
        try:
            bits = self._scale_bits(need, kernels, counts)
            calls = calls_of(need, counts, self._device, context_len=self._context_len, scale_bits=bits)
            for call in calls:
                made = True
                if time.monotonic() > self._limits.until:
                    self.left_out.append(LeftOut(f"{name}, from {call.tokens} tokens on", "no time left of budget_s"))
                    return
                try:
                    size = measure(function, kernels, call.arguments, call.tokens, call.label, self._limits)
                except NoRoom as error:
                    self.left_out.append(LeftOut(call.label, str(error)))
                    continue
                for kernel, why in size.out.items():
                    self.left_out.append(LeftOut(f"{call.label}: {kernel}", why))
                yield size
        except ConfigurationError as error:
            self.left_out.append(LeftOut(name, str(error)))
            return
        except Exception as error:
            if not out_of_memory(error):
                raise
            self.left_out.append(LeftOut(name, f"out of memory: {str(error).partition(chr(10))[0]}"))
            return
        if not made:
            self.left_out.append(LeftOut(name, f"no call of it has {' or '.join(map(str, counts))} tokens"))

    def _scale_bits(self, need: Need, kernels: Sequence[Kernel], counts: Sequence[int]) -> int | None:
        """Most significant bits of scales that the layouts of all kernels for packed weights can represent."""
        most, packing = 0, [kernel for kernel in kernels if kernel.needs_packing]
        for kernel in packing:
            for place, bits in enumerate(SCALE_BITS):
                calls = calls_of(need, counts, self._device, context_len=self._context_len, scale_bits=bits)
                if (call := next(calls, None)) is None or holds(kernel, call):
                    most = max(most, place)
                    break
        return SCALE_BITS[most]

    def _keep(self, need: Need, kernels: Sequence[Kernel], sizes: Sequence[MeasuredSize]) -> None:
        wrong = {kernel: why for size in sizes for kernel, why in size.wrong.items()}
        self.wrong.update({(need.op, kernel): why for kernel, why in wrong.items()})
        right = [size.excluding(wrong) for size in sizes]
        if not any(size.times for size in right):
            return
        problem = need.problem(self._device)
        order = tuple(kernel.name for kernel in kernels)
        choice = decide_for_all(order, [size.plain_times for size in right])
        kinds = {
            kernel.name: Kind(HUB.versions_of(kernel), record_digest(kernel))
            for kernel in kernels
            if kernel.name in choice.ranking
        }
        entry = TuningEntry(
            need.op,
            facets_of(problem),
            HUB.registry.contracts[need.op].regime(problem),
            order,
            choice.ranking,
            choice.word,
            tuple(right),
            kinds,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        self.entries.append(entry)
        tables.keep(facts(self._device), [entry])


def _need(item: Any) -> Need:
    if isinstance(item, Need):
        return item
    selection = item.selection if isinstance(item, Plan) else item
    if not isinstance(selection, Selection):
        raise ConfigurationError(
            f"tune: {item!r} is not a plan, a selection of explain or a need; problems_of(model) returns needs"
        )
    return need_of(selection.op, selection.problem)


def _refuse_where_times_would_lie() -> None:
    """Refuse states in which a kernel requested by name does not run, or compilation is forbidden."""
    if GATE.sealed:
        raise ConfigurationError("tune: kernelhub is sealed, and measurements compile; tune before seal(), or unseal()")
    if HUB.settings.force.requests:
        origin = HUB.settings.force.requests[0].origin
        raise ConfigurationError(f"tune: {origin} forces one kernel in place of all others; unset it to measure them")
    if HUB.agreed:
        raise ConfigurationError("tune: ranks agreed on kernels; call reload() on every rank, tune, and agree again")


def _check_numbers(token_counts: Sequence[int] | None, samples: int, budget_s: float | None, context_len: int) -> None:
    if isinstance(token_counts, int):
        raise ConfigurationError(f"tune: token_counts is {token_counts}; give a list of numbers, [{token_counts}]")
    if type(context_len) is not int or context_len < 1:
        raise ConfigurationError(f"tune: context_len is {context_len!r}; give a number of tokens, 1 or more")
    for count in token_counts or ():
        if type(count) is not int or count < 1:
            raise ConfigurationError(f"tune: token_counts contains {count!r}; give numbers of tokens, 1 or more")
    if token_counts is not None and not token_counts:
        raise ConfigurationError("tune: token_counts is empty; omit it for the default counts")
    if type(samples) is not int or samples < 1:
        raise ConfigurationError(f"tune: samples is {samples!r}; give a number, 1 or more")
    if budget_s is not None and not budget_s > 0:
        raise ConfigurationError(f"tune: budget_s is {budget_s!r}; give a positive number of seconds")


def _name(need: Need) -> str:
    return f"{need.op} ({', '.join(need.layers)})" if need.layers else need.op
