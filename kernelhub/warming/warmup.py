"""`kernelhub.warmup`: compile, load and verify everything that serving needs before the first request."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.errors import ConfigurationError
from kernelhub.ops.models.problems import PHASES
from kernelhub.probes.device import facts
from kernelhub.runtime.caches.store import PATIENCE_S
from kernelhub.runtime.progress import Heart, Tell, bar
from kernelhub.warming.building import build_better
from kernelhub.warming.completed import CompletedItems
from kernelhub.warming.crew import JOB_BYTES, free_device_bytes, jobs_here, max_jobs, peak
from kernelhub.warming.defaults import CONTEXT_LEN, MAX_CONTEXT_LEN, VERIFY_BUDGET_S
from kernelhub.warming.forms import checked
from kernelhub.warming.jobs import ChildResults, compile_in_children
from kernelhub.warming.lengths import notes_on_lengths
from kernelhub.warming.outcome import BEFORE, COMPILED, DECIDED, FAILED, LOADED, Outcome, WarmUp
from kernelhub.warming.proof import Proof
from kernelhub.warming.ready import OUT_OF_MEMORY, Sizing, make_ready
from kernelhub.warming.there import device_here
from kernelhub.warming.trusting import Trusting
from kernelhub.warming.turn import Turn, turn
from kernelhub.warming.wanted import Item, What, items_of

_ENOUGH_FOR_CHILDREN = 8  # items: a child takes some seconds to start
_STRENGTH = (COMPILED, LOADED, DECIDED, BEFORE)


def warmup(
    what: What,
    *,
    token_counts: Sequence[int] | None = None,
    tp: int = 1,
    ep: int = 1,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    page_size: int | None = None,
    quantization: str | None = None,
    phases: Sequence[str] = PHASES,
    device: str | torch.device | None = None,
    context_len: int = CONTEXT_LEN,
    max_context_len: int = MAX_CONTEXT_LEN,
    jobs: int | None = None,
    verify: bool = True,
    verify_budget_s: float = VERIFY_BUDGET_S,
    build: bool = False,
    packing: bool = False,
    progress: Tell | Literal[True] | None = None,
    heartbeat: Tell | None = None,
    timeout_s: float = PATIENCE_S,
) -> WarmUp:
    """Prepare what serving needs: such calls then run after `kernelhub.seal()`.

    Each problem class is called at each token count, directly and by ``prepare``, ``begin`` and ``run``, with packed
    weights where the selected kernel packs, in the forms that engines use (docs/warmup.md). One process of a node
    compiles; others wait for it, then load its results from the caches on disk. Finished items are recorded there too,
    so an interrupted warm-up continues.

    Args:
        what: a model's name or config.json, as of `problems_of`; plans, selections of `explain`, needs of
            `problems_of`, lines of `NotWarmed`, functions that make calls; or several of these.
        token_counts: numbers of new tokens per engine step. 1, 2, 4, ... 512, which are the usual sizes of CUDA graphs,
            and 1024 to 8192 by default, on a CPU 1, 4, 16, 64, 256; the largest must be the most that a step will have.
        tp, ep, dtype, kv_dtype, page_size, quantization, phases: as of `problems_of`, for models.
        device: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, or a product of this machine, ``"H200"``; by default the first GPU,
            else the CPU.
        context_len: tokens in the cache for each sequence of the calls.
        max_context_len: the longest sequence that will be served; block tables have room for it.
        jobs: processes that compile and verify. By default min(cores, free memory / 4 GB), shared among the ranks of
            this node (LOCAL_WORLD_SIZE); 1 if there is little to compile, or no GPU. FlashInfer's ninja gets as many
            (MAX_JOBS).
        verify: check each selected kernel against its reference, unless stored evidence says that it is right. A wrong
            kernel is quarantined, and the next best is used. Before that, kernels that would rank first but are not
            verified on this family of devices are verified for each problem class, best first, until one is right.
            Selection then accepts it, in later processes too (docs/trust.md).
        verify_budget_s: time limit for kernels that would rank first; `WarmUp.notes` lists those that are left.
        build: build kernels that take minutes to compile, which selection otherwise accepts only once they are built.
        packing: as of ``prepare``, for engines that pack weights when they load a model: kernels for packed weights are
            ranked with the others, verified if they would rank first, and prepared with packed weights.
        progress: called with a `Beat` as each item begins and every second; True shows a bar on standard error.
        heartbeat: called with a `Beat` every second by a thread, also while a compiler runs: for liveness probes.
        timeout_s: how long to wait for another process that compiles on this node.

    Returns:
        What is ready, how it was prepared, and what failed. Failures are not raised: check `ok`.

    Raises:
        ConfigurationError: kernelhub is sealed; an unknown model, device or piece of `what`.
        LockTimeout: another process of this node compiles for longer than `timeout_s`; the message names it.
        DeviceLost: a device error, after which the device is unusable in this process.

    Example:
        >>> import kernelhub
        >>> need = kernelhub.problems_of("llama-3.1-8b", tp=8, phases=["decode"])
        >>> done = kernelhub.warmup(need, token_counts=[1, 4], device="cpu", verify=False)
        >>> done.ok, done.items[0].op, done.items[0].tokens
        (True, 'paged_attention', (1, 4))
    """
    if GATE.sealed:
        raise ConfigurationError("kernelhub is sealed: warm up before seal(), or unseal() first")
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise ConfigurationError(f"jobs is {jobs!r}; give a number of processes, 1 or more")
    for name, tokens in (("context_len", context_len), ("max_context_len", max_context_len)):
        if type(tokens) is not int or tokens < 1:
            raise ConfigurationError(f"{name} is {tokens!r}; give a number of tokens, 1 or more")
    where = device_here(device)
    setting = {"tp": tp, "ep": ep, "dtype": dtype, "kv_dtype": kv_dtype, "page_size": page_size}
    setting |= {"quantization": quantization, "phases": phases}
    counts = checked(token_counts, where.type == "cuda")
    items = items_of(what, counts, setting, on_gpu=where.type == "cuda", packing=packing)
    sizing = Sizing(context_len, max(context_len, max_context_len))
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(bar(sys.stderr)) if progress is True else progress
        heart = stack.enter_context(Heart(heartbeat, shown))
        return _WarmupRun(items, where, sizing, heart, jobs, verify, verify_budget_s, build).run(timeout_s)


class _WarmupRun:
    """One warm-up."""

    def __init__(
        self,
        items: list[Item],
        device: torch.device,
        sizing: Sizing,
        heart: Heart,
        jobs: int | None,
        verify: bool,
        verify_budget_s: float,
        build: bool,
    ) -> None:
        self.items, self.device, self.sizing, self.heart = items, device, sizing, heart
        self.jobs, self.verify, self.build = jobs, verify, build
        self.completed = CompletedItems(facts(device))
        self.proof = Proof()
        self.trusting = Trusting()
        self.verify_budget_s = verify_budget_s
        self.outcomes: dict[Item, Outcome] = {}
        self.in_children: dict[str, dict[str, Any]] = {}
        self.lost = ChildResults()
        self.processes = 1
        self.taken_over: dict[str, str] = {}  # key -> how it was prepared
        self.tried: set[str] = {""}  # keys of items that got a second try; items without a key get none
        self.notes: list[str] = []
        self.before = {item for item in items if item.need and _is_ready(item, device)}

    def run(self, timeout_s: float) -> WarmUp:
        begun = time.monotonic()
        mine = Turn()
        self.taken_over = self._done()
        if self._pending() or self.build:
            self.heart.stage("waiting", 1)
            with contextlib.ExitStack() as held:
                mine = held.enter_context(turn(timeout_s, lambda holder, waited: self.heart.step(f"for {holder}")))
                if mine.waited_for:  # the other process left its results on disk
                    HUB.forget_evidence()
                    self.taken_over = self._done()
                if not self._pending() and not self.build:
                    held.close()
                self._make_all()
        else:
            self._make_all()
        if mine.note:
            self.notes.append(mine.note)
        most = peak(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # an engine sizes its cache by the free memory
        return WarmUp(
            str(facts(self.device)),
            tuple(self.outcomes[item] for item in self.items),
            sum(item.key in self.taken_over for item in self.items if item.need is not None),
            self.processes,
            mine.waited_s,
            mine.waited_for,
            tuple(self.proof.verified),
            tuple(self.proof.quarantined),
            tuple(self.proof.unverified),
            time.monotonic() - begun,
            most,
            (*self.notes, *self.lost.notes, *notes_on_lengths(self.outcomes.values(), self.device), *self._not_tried()),
            tuple(self.trusting.earnings),
            self.heart.stages,
        )

    def _not_tried(self) -> list[str]:
        """Notes on kernels that would rank first and were not verified within the time."""
        return [
            f"{op} {kernel} would be first for {label}, but was not verified within {self.verify_budget_s:g} s: "
            "warm up again, or give a larger verify_budget_s"
            for op, kernel, label in self.trusting.left
        ]

    def _done(self) -> dict[str, str]:
        """How items were prepared, by key, for items that are on disk with their currently selected kernels."""
        done = self.completed.done()
        kept = {item.key: item for item in self.items if item.key in done}
        return {key: done[key][1] for key, item in kept.items() if done[key][0] == self._kernel(item)}

    def _pending(self) -> bool:
        """Whether there is anything to compile or verify."""
        if any(item.need is None or item.key not in self.taken_over for item in self.items):
            return True
        if not self.verify:
            return False
        return bool(self.proof.unknown(self.items, self.device)) or self.trusting.pending(self.items, self.device)

    def _kernel(self, item: Item) -> str:
        if item.need is None:
            return ""
        return item.selection(self.device).selected or ""

    def _make_all(self) -> None:
        with max_jobs(self.jobs or jobs_here()):
            if self.build:
                self.notes += build_better(self.items, self.device, self.sizing, self.heart)
            if self.verify:
                context_len, budget_s = self.sizing.context_len, self.verify_budget_s
                self.trusting.settle(self.items, self.device, self.heart, budget_s, context_len, self.jobs)
                self.proof.settle(self.items, self.device, self.heart, self.jobs)
            self._in_children()
            self._in_this_process()
            # Another kernel replaced one that could not be loaded, and has no evidence yet.
            while self.verify and self.proof.settle(self.items, self.device, self.heart, self.jobs):
                self._in_this_process()

    def _in_children(self) -> None:
        """Compile with several processes, if that is faster."""
        jobs = [(item, self._kernel(item)) for item in self.items if item.need and item.key not in self.taken_over]
        self.processes = min(self.jobs or self._automatic(len(jobs)), max(1, len(jobs)))
        if self.processes < 2:
            return
        self.heart.stage("compiling", len(jobs))
        ninja_jobs = max(1, jobs_here() // self.processes)

        def begun(item: Item) -> None:
            self.heart.step(f"{item.op}: {item.label}", len(self.in_children))

        self.lost = compile_in_children(
            jobs, self.processes, ninja_jobs, self.device, self.sizing, begun, self._answered
        )

    def _automatic(self, todo: int) -> int:
        """The useful number of processes: each needs its own device context, and some seconds to start."""
        if self.device.type != "cuda" or todo < _ENOUGH_FOR_CHILDREN:
            return 1
        return max(
            1, min(jobs_here(), free_device_bytes(self.device) // JOB_BYTES, todo // (_ENOUGH_FOR_CHILDREN // 2))
        )

    def _in_this_process(self) -> None:
        """Prepare every item in this process: load items that are on disk, and compile the rest.

        If a kernel got a second try, which clears all selections, another round follows.
        """
        tried = -1
        while tried != len(self.tried):
            tried = len(self.tried)
            self._round()

    def _round(self) -> None:
        self.heart.stage("making ready", len(self.items))
        for place, item in enumerate(self.items):
            self.heart.step(f"{item.op}: {item.label}", place)
            if item.key and item.key in self.lost.lost:
                reason = self.lost.lost[item.key]
                self.outcomes[item] = Outcome(item.op, "", item.label, (), FAILED, 0.0, reason)
                continue
            outcome = self._made(item)
            if item.need is not None and outcome.how != FAILED and item.key not in self.taken_over:
                self.completed.note(item.key, outcome.kernel, outcome.how, outcome.seconds)
            if outcome.how == DECIDED and self.taken_over.get(item.key) in (COMPILED, LOADED):
                outcome = replace(outcome, how=LOADED)  # our own libraries do not report their loading
            self.outcomes[item] = self._joined(item, outcome)

    def _made(self, item: Item) -> Outcome:
        """Prepare an item; if a compiler was killed for memory, try again alone and with one job."""
        kernel = self._kernel(item)
        outcome = make_ready(item, self.device, self.sizing, self.heart.step, item in self.before)
        if outcome.how != FAILED or OUT_OF_MEMORY not in outcome.reason or item.key in self.tried:
            return outcome
        self.tried.add(item.key)
        self.notes.append(f"{item.op} {kernel}: {outcome.reason}; tried again alone with one job")
        alone = compile_in_children([(item, kernel)], 1, 1, self.device, self.sizing, lambda item: None, self._answered)
        if alone.lost:
            return replace(outcome, reason=alone.lost[item.key])
        with HUB.lock:
            HUB.machine.forget_failure(item.op, kernel)
            HUB.forget_selections()
        return make_ready(item, self.device, self.sizing, self.heart.step, item in self.before)

    def _answered(self, item: Item, answer: dict[str, Any]) -> None:
        """Record that a child prepared an item, or failed."""
        self.in_children[item.key] = answer
        if answer["how"] != FAILED:
            self.completed.note(item.key, answer["kernel"], answer["how"], answer["seconds"])

    def _joined(self, item: Item, outcome: Outcome) -> Outcome:
        """Add what a child, or an earlier round of this warm-up, did for the same kernel."""
        if outcome.how == FAILED:
            return outcome
        child, earlier = self.in_children.get(item.key) if item.key else None, self.outcomes.get(item)
        parts = [(outcome.how, outcome.seconds)]
        if child is not None and child["kernel"] == outcome.kernel and child["how"] != FAILED:
            parts.append((child["how"], child["seconds"]))
        if earlier is not None and earlier.kernel == outcome.kernel and earlier.how != FAILED:
            parts.append((earlier.how, earlier.seconds))
        how = min((one for one, _ in parts), key=_STRENGTH.index)
        if how == BEFORE and len(parts) > 1:
            how = parts[-1][0]
        return replace(outcome, how=how, seconds=sum(seconds for _, seconds in parts))


def _is_ready(item: Item, device: torch.device) -> bool:
    """Whether such calls had a selection before this warm-up."""
    assert item.need is not None
    problem = item.need.problem(device)
    if item.packing and (kernel := item.selection(device).kernel) is not None and kernel.needs_packing:
        problem = replace(problem, weight_layout=kernel.packs_to)
    return problem in HUB.function(item.op).op.ready()
