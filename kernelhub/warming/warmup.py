"""`kernelhub.warmup`: everything that serving will need, compiled, loaded and verified before the first request."""

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
from kernelhub.warming.bar import bar
from kernelhub.warming.beat import Heart, Tell
from kernelhub.warming.building import build_better
from kernelhub.warming.crew import JOB_BYTES, free_device_bytes, jobs_here, max_jobs, peak
from kernelhub.warming.defaults import CONTEXT_LEN, MAX_CONTEXT_LEN, VERIFY_BUDGET_S
from kernelhub.warming.forms import checked
from kernelhub.warming.jobs import Compiled, compile_in_children
from kernelhub.warming.journal import Journal
from kernelhub.warming.lengths import told_of_lengths
from kernelhub.warming.outcome import BEFORE, COMPILED, DECIDED, FAILED, LOADED, Outcome, WarmUp
from kernelhub.warming.proof import Proof
from kernelhub.warming.ready import WANT_OF_MEMORY, Sizing, make_ready
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
    """Make ready what serving will need: afterwards `kernelhub.seal()` holds, and such calls pass.

    Each problem class is called at each token count, directly and by ``prepare``, ``begin`` and ``run``, with packed
    weights where the chosen kernel packs, in the forms that engines use (docs/warmup.md). One process of a node
    compiles; others wait for it, then load what it left in the caches on disk. What is done is kept there too, so a
    warm-up that was interrupted goes on where it was.

    Args:
        what: a model's name or config.json, as of `problems_of`; plans, selections of `explain`, needs of
            `problems_of`, lines of `NotWarmed`, functions that make calls; or several of these.
        token_counts: numbers of new tokens per engine step. 1, 2, 4, ... 512, which are the usual sizes of CUDA graphs,
            and 1024 to 8192 by default, on a CPU 1, 4, 16, 64, 256; the largest must be the most that a step will have.
        tp, ep, dtype, kv_dtype, page_size, quantization, phases: as of `problems_of`, for models.
        device: ``"cuda"``, ``"cuda:1"``, ``"cpu"``, or a product that is here, ``"H200"``; the first GPU unless given,
            else the CPU.
        context_len: tokens in the cache for each sequence of the calls that are made.
        max_context_len: the longest sequence that will be served; block tables have room for it.
        jobs: processes that compile, and that verify. By default min(cores, free memory / 4 GB) shared among the ranks
            of this node (LOCAL_WORLD_SIZE), and 1 where little is to be compiled, or there is no GPU. FlashInfer's
            ninja gets as many (MAX_JOBS).
        verify: hold each kernel that is chosen against its reference, unless evidence is stored that it is right. One
            that is wrong is quarantined, and the next best is taken. Before that, kernels that would be first but are
            not verified on this family of devices are verified for each problem class, best first, until one is right:
            it is chosen from then on, in later processes too (docs/trust.md).
        verify_budget_s: most seconds for those that would be first; what is left over is listed in `WarmUp.notes`.
        build: build kernels that take minutes to compile, and are otherwise chosen only once they are built.
        packing: as of ``prepare``, for engines that pack weights when they load a model: kernels that need that are
            ranked with the others, verified where they would be first, and made ready with packed weights.
        progress: called with a `Beat` as each item begins and each second; True shows a bar on standard error.
        heartbeat: called with a `Beat` each second by a thread, also while a compiler runs: for liveness probes.
        timeout_s: how long another process that compiles on this node is waited for.

    Returns:
        What was made ready, how, and what failed. Failures are not raised: look at `ok`.

    Raises:
        ConfigurationError: kernelhub is sealed; an unknown model, device or piece of `what`.
        LockTimeout: another process of this node compiles for longer than `timeout_s`; it is named.
        DeviceLost: a device error, which ends the use of the device in this process.

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
        raise ConfigurationError(f"jobs is {jobs!r}; it is a number of processes, 1 or more")
    where = device_here(device)
    setting = {"tp": tp, "ep": ep, "dtype": dtype, "kv_dtype": kv_dtype, "page_size": page_size}
    setting |= {"quantization": quantization, "phases": phases}
    counts = checked(token_counts, where.type == "cuda")
    items = items_of(what, counts, setting, on_gpu=where.type == "cuda", packing=packing)
    sizing = Sizing(context_len, max(context_len, max_context_len))
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(bar(sys.stderr)) if progress is True else progress
        heart = stack.enter_context(Heart(heartbeat, shown))
        return _Run(items, where, sizing, heart, jobs, verify, verify_budget_s, build).run(timeout_s)


class _Run:
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
        self.journal = Journal(facts(device))
        self.proof = Proof()
        self.trusting = Trusting()
        self.verify_budget_s = verify_budget_s
        self.outcomes: dict[Item, Outcome] = {}
        self.in_children: dict[str, dict[str, Any]] = {}
        self.lost = Compiled()
        self.processes = 1
        self.taken_over: dict[str, str] = {}  # how, by key
        self.tried: set[str] = {""}  # keys of items that got another try; those without a key get none
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
                if mine.waited_for:  # what it found is on disk
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
            torch.cuda.empty_cache()  # an engine sizes its cache by what is free
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
            (*self.notes, *self.lost.notes, *told_of_lengths(self.outcomes.values(), self.device), *self._not_tried()),
            tuple(self.trusting.earnings),
            self.heart.stages,
        )

    def _not_tried(self) -> list[str]:
        """What would be first, and was not verified within the time."""
        return [
            f"{op} {kernel} would be first for {label}, and {self.verify_budget_s:g} s were too few to verify it: "
            "warm up again, or give a larger verify_budget_s"
            for op, kernel, label in self.trusting.left
        ]

    def _done(self) -> dict[str, str]:
        """How items were made ready, by key, that are on disk with the kernels that are chosen for them."""
        done = self.journal.done()
        kept = {item.key: item for item in self.items if item.key in done}
        return {key: done[key][1] for key, item in kept.items() if done[key][0] == self._kernel(item)}

    def _pending(self) -> bool:
        """Whether something is to be compiled or verified."""
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
            # A kernel that could not be loaded has given way to another, of which nothing is known yet.
            while self.verify and self.proof.settle(self.items, self.device, self.heart, self.jobs):
                self._in_this_process()

    def _in_children(self) -> None:
        """Compile with several processes, if that pays."""
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
        """How many processes pay: each needs a context of its own on the device, and some seconds to start."""
        if self.device.type != "cuda" or todo < _ENOUGH_FOR_CHILDREN:
            return 1
        return max(
            1, min(jobs_here(), free_device_bytes(self.device) // JOB_BYTES, todo // (_ENOUGH_FOR_CHILDREN // 2))
        )

    def _in_this_process(self) -> None:
        """Make every item ready here: what is on disk is loaded, the rest is compiled.

        Another round follows where a kernel got another try, for which all choices were forgotten.
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
                self.journal.note(item.key, outcome.kernel, outcome.how, outcome.seconds)
            if outcome.how == DECIDED and self.taken_over.get(item.key) in (COMPILED, LOADED):
                outcome = replace(outcome, how=LOADED)  # our own libraries do not tell that they are loaded
            self.outcomes[item] = self._joined(item, outcome)

    def _made(self, item: Item) -> Outcome:
        """Make an item ready; where a compiler was killed for memory, after another try, alone and with one job."""
        kernel = self._kernel(item)
        outcome = make_ready(item, self.device, self.sizing, self.heart.step, item in self.before)
        if outcome.how != FAILED or WANT_OF_MEMORY not in outcome.reason or item.key in self.tried:
            return outcome
        self.tried.add(item.key)
        self.notes.append(f"{item.op} {kernel}: {outcome.reason}; tried again alone with one job")
        alone = compile_in_children([(item, kernel)], 1, 1, self.device, self.sizing, lambda item: None, self._answered)
        if alone.lost:
            return replace(outcome, reason=alone.lost[item.key])
        with HUB.lock:
            HUB.machine.forget_failure(item.op, kernel)
            HUB.forget_choices()
        return make_ready(item, self.device, self.sizing, self.heart.step, item in self.before)

    def _answered(self, item: Item, answer: dict[str, Any]) -> None:
        """A child has made an item, or failed."""
        self.in_children[item.key] = answer
        if answer["how"] != FAILED:
            self.journal.note(item.key, answer["kernel"], answer["how"], answer["seconds"])

    def _joined(self, item: Item, outcome: Outcome) -> Outcome:
        """With what a child did for the same kernel before, or an earlier round of this warm-up."""
        if outcome.how == FAILED:
            return outcome
        child, earlier = self.in_children.get(item.key) if item.key else None, self.outcomes.get(item)
        told = [(outcome.how, outcome.seconds)]
        if child is not None and child["kernel"] == outcome.kernel and child["how"] != FAILED:
            told.append((child["how"], child["seconds"]))
        if earlier is not None and earlier.kernel == outcome.kernel and earlier.how != FAILED:
            told.append((earlier.how, earlier.seconds))
        how = min((one for one, _ in told), key=_STRENGTH.index)
        if how == BEFORE and len(told) > 1:
            how = told[-1][0]
        return replace(outcome, how=how, seconds=sum(seconds for _, seconds in told))


def _is_ready(item: Item, device: torch.device) -> bool:
    """Whether such calls were decided before this warm-up."""
    assert item.need is not None
    problem = item.need.problem(device)
    if item.packing and (kernel := item.selection(device).kernel) is not None and kernel.needs_packing:
        problem = replace(problem, weight_layout=kernel.packs_to)
    return problem in HUB.function(item.op).op.ready()
