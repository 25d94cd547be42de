"""The one place that holds state and decides: registry, machine, settings, contexts, report.

`HUB` is made empty at import. Records are loaded, variables read and probes asked at the first decision.
Every question about a kernel goes through `HUB.select`; every call that misses its table through
`HUB.bind`.

`HUB.lock` is for tables: nothing is imported, compiled or probed under it, but at the first decision and at a reload.
What takes time has locks of its own, see `making`. A choice that was begun before something changed what choices are
made by (`HUB.generation`) serves the call that it was made for, and is not remembered.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar

from kernelhub.dispatch.audits import AUDITS, OFF, AuditSettings
from kernelhub.dispatch.bound import Bound, configure, make_adapter, watch_imported
from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.contract import Contract, OpRecord
from kernelhub.dispatch.events import fallback_log, print_events, selection_log
from kernelhub.dispatch.fingerprint import Fingerprint, fingerprint_of, sizes_of, versions_of
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.kernel import Kernel, Watch
from kernelhub.dispatch.ledger import Ledger, caller_on_stack
from kernelhub.dispatch.load import LoadFailure, is_imported, load_attribute
from kernelhub.dispatch.lock_file import check_lock
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.making import Making, at_fork, check_not_importing, drop_half_imported, loading_registry
from kernelhub.dispatch.policy import Agreed, Layer, Layers, Names, Pins, Policy, combine, names_asked_for
from kernelhub.dispatch.reasons import kernels_on
from kernelhub.dispatch.registry import Registered, Registry
from kernelhub.dispatch.report import Report
from kernelhub.dispatch.select import as_preferred, no_kernel, select, unavailable
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.settings import Settings, did_you_mean, read_settings
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import ConfigurationError
from kernelhub.homes import PARTS

_KEPT = 2048  # entries of a table that grows with what users write, not with what they compute
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Outdated(Exception):
    """What the choice was made by has changed while it was made."""


class Hub:
    """State of the library in one process.

    Args:
        parts: what the hub needs of ops, backends and evidence, by role, as ``"module:attribute"``; see `kernelhub`.

    Attributes:
        lock: for tables.
        making: locks for what is loaded and bound.
        patience_s: how long a thread waits for another one that loads the same.
        generation: how often what choices are made by has changed.
    """

    def __init__(self, parts: Mapping[str, str]) -> None:
        self._parts = parts
        self.lock = threading.RLock()
        self.making = Making(lambda: self.lock._is_owned())  # type: ignore[attr-defined]
        self.patience_s = 0.0
        self.generation = 0
        self.registry = Registry({})
        self.machine = Machine()
        self.contexts: ContextVar[Layers] = ContextVar("kernelhub contexts", default=())
        # Filled when the first context is entered, and never emptied, since a task started inside one keeps
        # it after the block ends. Until then a call need not read the ContextVar.
        self.contexts_used: list[bool] = []
        self.layers: dict[Hashable, Layer] = {}  # those that users gave: equal ones are one object, for keys of tables
        self.configured: Layer = Layer()
        self.agreed: Mapping[str, Agreed] = {}  # what ranks agreed on, by op; it holds until a reload
        self._settings: Settings | None = None
        self._missing_said = False  # that a lock file lacks a problem
        self._policies: dict[tuple[Layers, Names | None, str], Policy] = {}
        self._caches: list[Callable[[], None]] = []
        self._on_loss: list[Callable[[int], None]] = []
        self._functions: dict[str, Any] = {}
        self._added: dict[str, Any] = {}  # backends registered at run time, which outlive a reload
        self.ledger = Ledger()
        self._watched: set[Watch] = set()  # libraries that tell, which they do until the process ends
        JOURNAL.caller = lambda: caller_on_stack(self.ledger.bound_of, Hub.bind.__code__)

    @property
    def settings(self) -> Settings:
        """The environment and config file; reading them also loads the registry."""
        if self._settings is None:
            check_not_importing()
            with loading_registry(), self.lock:
                if self._settings is None:
                    self._load()
        assert self._settings is not None
        return self._settings

    def function(self, op: str) -> Any:
        """The public function of an op by its name."""
        _ = self.settings
        if not self._functions:
            with loading_registry(), self.lock:
                self._functions = self._functions or {item.op.contract.name: item for item in self.part("functions")()}
        if op not in self._functions:
            known = ", ".join(self._functions)
            raise ConfigurationError(f"{op!r} is no op{did_you_mean(op, self._functions)}; there are {known}")
        return self._functions[op]

    def record(self, op: str) -> OpRecord[Any]:
        """The record of an op by its name."""
        _ = self.settings
        known = self.registry.contracts
        if op not in known:
            raise ConfigurationError(f"{op!r} is no op{did_you_mean(op, known)}; there are {', '.join(known)}")
        return known[op]

    def policy(self, op: str, backend: Names | None = None, contexts: Layers = ()) -> Policy:
        """What the user said about `op`, from every place."""
        key = (contexts, backend, op)
        policy = self._policies.get(key)
        if policy is None:
            generation, settings, registry = self.generation, self.settings, self.registry
            layers = (settings.force, *reversed(contexts), self.configured, settings.environment, settings.file)
            policy = combine(layers, registry.known_part(settings.foreign), op)
            if backend is not None:
                registry.check_names(backend, f"{op}(backend=)")
                policy = policy.asking(op, backend)
            pins = self._pins(op, settings, registry)
            policy = replace(policy, pins=pins) if pins else policy
            with self.lock:
                if generation == self.generation:
                    keep(self._policies, key, policy)
        return policy

    def select(self, op: str, problem: Any, policy: Policy, machine: Machine | None = None) -> Selection[Any]:
        """The selection on one problem. `explain` and every call get theirs here."""
        check_not_importing()
        _ = self.settings
        contract = self.registry.contracts[op]
        candidates, regime = self.registry.candidates(op), contract.regime(problem)
        return select(op, contract.schema, problem, regime, candidates, machine or self.machine, policy)

    def select_as_called(
        self,
        op: str,
        problem: Any,
        backend: Any,
        machine: Machine | None = None,
        *,
        packing: bool = False,
        barred: Mapping[str, tuple[Rejection, ...]] | None = None,
    ) -> Selection[Any]:
        """The selection for a problem by a call with this ``backend=``, here and now; nothing is loaded.

        Args:
            op: name of the op.
            problem: what is asked.
            backend: the call's ``backend=``.
            machine: facts of another machine.
            packing: weights as in a checkpoint will be packed for whichever kernel is chosen.
            barred: what else speaks against kernels, by name.
        """
        policy = self.policy(op, names_asked_for(op, backend), self.contexts.get())
        if packing or barred:
            policy = replace(policy, packing=packing, barred={**policy.barred, **(barred or {})})
        return self.select(op, problem, policy, machine)

    def ranked(self, op: str, problem: Any, policy: Policy) -> Sequence[Kernel]:
        """The kernels that the policy leaves, in the order in which they are tried, whether or not they can run."""
        _ = self.settings
        on_device = kernels_on(self.registry.candidates(op), problem, self.machine)
        _, kernels = on_device.ranking(self.registry.contracts[op].regime(problem))
        tuned = self.machine.tuned(problem.device).find(op, problem)
        if tuned is not None:
            kernels = tuned.ranked(kernels)
        return as_preferred(op, kernels, policy.about(problem, self.machine))

    def bind(
        self,
        op: str,
        problem: Any,
        policy: Policy,
        device: int,
        elsewhere: Callable[[int], Callable[..., Any]],
        generation: int,
        made: Callable[[], Bound | None],
        remember: Callable[[Bound], None],
    ) -> Bound:
        """Select a kernel, load its adapter and bind it; the only place where a choice may fall to the next.

        Args:
            op: name of the op.
            problem: what is asked.
            policy: what the user said.
            device: for the contract's `bind`.
            elsewhere: for the contract's `bind`.
            generation: that of `policy`.
            made: what another thread has made ready meanwhile, if it has.
            remember: is given what was made ready before another thread that asks for the same is let in.

        Raises:
            Outdated: the kernel could not be loaded, and what it was chosen by has changed meanwhile.
            NoKernel: nothing that may run can run.
            RanksDisagree: ranks agreed on another kernel for this problem.
            KernelUnavailable: the chosen adapter failed to load, and `strict` is on.
        """
        while True:
            selection = self.select(op, problem, policy)
            contract: Contract[Any] = self.function(op).op.contract
            kernel = selection.kernel
            if kernel is None:
                raise no_kernel(selection, policy.about(problem, self.machine))
            if op in self.agreed:
                self.agreed[op].check(selection)
            with self.making.alone(op, kernel.name, timeout_s=self.patience_s):
                bound = made()
                if bound is not None:
                    return bound
                try:
                    adapter = self._adapter(kernel, contract, problem)
                except LoadFailure as failure:
                    self._note_failure(selection, kernel, failure, policy, generation)
                    continue
                if self.audit.share:
                    self.part("audit")(adapter, selection, device, self.audit)
                counter = itertools.count()
                run = contract.bind(adapter, problem, device, counter.__next__, elsewhere)
                bound = Bound(selection, adapter, run, counter, device)
                self.ledger.add(bound)
                remember(bound)
            self._say_what_the_lock_lacks(selection)
            if selection_log.isEnabledFor(logging.INFO):
                selection_log.info("%s: %s for %s (%s)", op, kernel.name, problem, selection.because)
                if selection.faster:
                    selection_log.info("%s: faster: %s", op, selection.faster[0].hint)
            return bound

    def watch(self) -> None:
        """Have those backends' libraries that are imported by now tell of what they compile; imports none of them."""
        settings, modules, watched = self.settings, sys.modules, self._watched
        for watch in self.registry.watches:
            if watch.module in modules and watch not in watched:
                with self.making.alone("watches", timeout_s=self.patience_s):  # two threads would hook a library twice
                    watch_imported(self.registry.watches, watched, settings["KERNELHUB_LOAD_TIMEOUT_S"])
                break

    def configure(self, layer: Layer) -> None:
        """Replace what `configure` said, and forget every choice made under it."""
        GATE.check_change("configure")
        with self.lock:
            _ = self.settings
            self.registry.check_layer(layer)
            self.configured = layer
            self.forget_choices()

    def reload(self) -> None:
        """Read the environment, the config file and the plugins again, and ask every probe again."""
        GATE.check_change("reload")
        with self.lock:
            self.machine.forget()
            self._settings = None
            self.agreed = {}
            self.forget_choices()
            _ = self.settings

    def agree(self, agreed: Mapping[str, Agreed]) -> None:
        """Hold what ranks agreed on, beside what they agreed on before, and forget every choice made without it."""
        with self.lock:
            self.agreed = {**self.agreed, **agreed}
            self.forget_choices()

    def try_load(self, op: str, kernel: Kernel, problem: Any) -> Rejection | None:
        """Import and prepare a kernel's adapter, and say why that failed, if it did; later choices know it too."""
        try:
            with self.making.alone(op, kernel.name, timeout_s=self.patience_s):
                self._adapter(kernel, self.function(op).op.contract, problem)
        except LoadFailure as failure:
            rejection = Rejection(failure.code, failure.reason, failure.remedy)
            with self.lock:
                self.machine.cannot_load(op, kernel.name, rejection)
            return rejection
        return None

    def versions_of(self, kernel: Kernel, machine: Machine | None = None) -> dict[str, str]:
        """Versions of the libraries behind a kernel, by package."""
        return versions_of(kernel, self.registry.backends[kernel.backend].backend, machine or self.machine)

    def fingerprint_of(self, selection: Selection[Any], tuned: str = "") -> Fingerprint:
        """What must be equal in two processes that are to run the same."""
        assert selection.kernel is not None
        return fingerprint_of(selection, self.registry.backends[selection.kernel.backend].backend, self.machine, tuned)

    def chosen(self) -> list[Selection[Any]]:
        """The selection on every problem that was met since the report began, as it is now, each once.

        One that a call or a block asked for by name stands as it was, since it would be asked for again.
        """
        contexts = self.contexts.get()
        return [
            selection
            if selection.source in ("kwarg", "context")
            else self.select(selection.op, selection.problem, self.policy(selection.op, None, contexts))
            for selection in self.ledger.selections()
        ]

    def add_backend(self, module: Any) -> Registered:
        """Register a backend at run time."""
        GATE.check_change("register_backend")
        with self.lock:
            _ = self.settings
            registry = self.registry.copied()  # a choice that is being made goes on with what it began with
            registered = registry.add(module)
            self.registry = registry
            self._added[registered.name] = module
            self.forget_choices()
            return registered

    def is_of_this_process(self, backend: str) -> bool:
        """Whether a backend was registered at run time, so that no other process has it."""
        return backend in self._added

    def remove_backend(self, name: str) -> None:
        """Forget a backend that `add_backend` registered."""
        GATE.check_change("remove")
        with self.lock:
            registry = self.registry.copied()
            registry.remove(name)
            self.registry = registry
            self._added.pop(name, None)
            self.forget_choices()

    def restore(self) -> None:
        """Back to the state after import: nothing configured, registered, probed, chosen or reported."""
        with self.lock:
            GATE.open()
            GATE.lost.clear()
            self.ledger.clear()
            self.configured = Layer()
            self.machine.forget()
            self._settings = None
            self.agreed = {}
            self.registry = Registry({})
            self._added.clear()
            self.forget_choices()

    @property
    def audit(self) -> AuditSettings:
        """What share of calls is audited, and how."""
        said, settings = self.configured, self.settings
        share = settings["KERNELHUB_AUDIT"] if said.audit is None else said.audit
        if not share:
            return OFF
        return AuditSettings(
            share, settings["KERNELHUB_AUDIT_BYTES"], said.audit_action or settings["KERNELHUB_AUDIT_ACTION"]
        )

    def on_change(self, forget: Callable[[], None]) -> None:
        """Have `forget` called whenever choices made so far no longer hold."""
        self._caches.append(forget)

    def on_loss(self, forget: Callable[[int], None]) -> None:
        """Have `forget` called with the index of a device whose use a device error ended."""
        self._on_loss.append(forget)

    def forget_device(self, device: int) -> None:
        """Have every table drop the functions that run on a device that is lost."""
        with self.lock:
            for forget in self._on_loss:
                forget(device)

    def forget_choices(self) -> None:
        """Empty every table of plans."""
        with self.lock:
            self.generation += 1
            self._policies.clear()
            for forget in self._caches:
                forget()
            self.ledger.settle()

    def forget_evidence(self) -> None:
        """Choose anew with what the store of evidence says now."""
        with self.lock:
            self.machine.forget_evidence()
            self.forget_choices()

    def renew(self) -> None:
        """In a child that was forked: locks that other threads held are free, and what they had half made is gone."""
        drop_half_imported()
        self.lock = threading.RLock()
        self.making.forget()
        self.ledger.renew()
        AUDITS.renew()

    def report(self) -> Report:
        """What ran so far; choices made again after a change of configuration are counted together."""
        return self.ledger.report()

    def forget_report(self) -> None:
        """Start the report anew."""
        with self.lock:
            self.ledger.forget_report()

    def _load(self) -> None:
        """Read the settings, and register everything that they may name."""
        settings, registry = read_settings(), Registry(self.part("order"))
        plugins, timeout_s = settings["KERNELHUB_PLUGINS"], settings["KERNELHUB_LOAD_TIMEOUT_S"]
        registry.load(self.part("records"), self.part("backends")(), plugins, timeout_s)
        for module in self._added.values():
            registry.add(module)
        for layer in (settings.force, settings.environment, settings.file):
            registry.check_layer(layer)
        if settings.lock is not None:
            check_lock(settings.lock, registry.contracts)
        print_events(settings["KERNELHUB_LOG"])
        if not settings["KERNELHUB_IGNORE_VLLM_ENV"]:
            settings = self._with_engine_variables(settings, registry)
        self.machine.evidence = self.part("evidence") if settings["KERNELHUB_EVIDENCE"] else None
        self.machine.tables = settings["KERNELHUB_TUNED"]
        self.machine.load()
        JOURNAL.compile_timeout_s = settings["KERNELHUB_COMPILE_TIMEOUT_S"]
        self.patience_s = max(settings["KERNELHUB_LOAD_TIMEOUT_S"], settings["KERNELHUB_COMPILE_TIMEOUT_S"])
        self._missing_said = False
        self.registry, self._settings = registry, settings
        registry.tell_left_out()

    def _with_engine_variables(self, settings: Settings, registry: Registry) -> Settings:
        """The settings with what other projects' variables ask for; a variable that names no kernel here is logged."""
        settings = replace(settings, foreign=self.part("engine_variables")(os.environ))
        known = {override.origin for override in registry.known_part(settings.foreign).requests}
        for origin in dict.fromkeys(override.origin for override in settings.foreign.requests):
            if origin not in known:
                fallback_log.warning("%s is not obeyed: none of the kernels it names is registered", origin)
        return settings

    def _pins(self, op: str, settings: Settings, registry: Registry) -> tuple[Pins, ...]:
        """The pins of an op, strongest first."""
        pins = [self.agreed[op].pins] if op in self.agreed else []
        if settings.lock is not None:
            closed = settings["KERNELHUB_LOCK_MISSING"] == "error"
            layouts = {kernel.name: kernel.layouts for kernel in registry.candidates(op).kernels}
            pins.append(settings.lock.pins(registry.contracts[op], layouts, closed))
        return tuple(pins)

    def part(self, role: str) -> Any:
        """What the hub gets from another part of kernelhub, imported at its first use."""
        module, _, attribute = self._parts[role].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def _say_what_the_lock_lacks(self, selection: Selection[Any]) -> None:
        """Tell once that a problem was chosen for freely beside a lock file."""
        lock = self.settings.lock
        if lock is None or selection.explicit or self._missing_said:
            return
        self._missing_said = True
        fallback_log.warning(lock.lacks(selection))

    def _adapter(self, kernel: Kernel, contract: Contract[Any], problem: Any) -> Any:
        timeout_s = self.settings["KERNELHUB_LOAD_TIMEOUT_S"]
        if not is_imported(kernel.target.partition(":")[0]):  # parts of one library import each other
            with self.making.alone("import", kernel.backend, timeout_s=self.patience_s):
                load_attribute(kernel.target, timeout_s)
        adapter = make_adapter(kernel, contract, problem, timeout_s, self.watch)
        if kernel.configurable:
            configure(adapter, kernel, sizes_of(self.machine, kernel, problem))
        return adapter

    def _note_failure(
        self, selection: Selection[Any], kernel: Kernel, failure: LoadFailure, policy: Policy, generation: int
    ) -> None:
        """Remember why a chosen kernel could not be loaded; raise if nothing may take its place."""
        rejection = Rejection(failure.code, failure.reason, failure.remedy)
        op = selection.op
        failed = [kernel]
        if failure.code == "load_timeout":  # the rest of the backend would hang on the same import
            failed = [k for k in self.registry.candidates(op).kernels if k.backend == kernel.backend]
        with self.lock:
            if generation != self.generation:
                raise Outdated
            for item in failed:
                self.machine.cannot_load(op, item.name, rejection)
        if policy.strict or GATE.sealed:
            raise unavailable(selection, failure, policy.strict) from failure
        self.fall(op, kernel.name, failure)

    def fall(self, op: str, kernel: str, failure: LoadFailure) -> None:
        """Note that a chosen kernel gave way to the next, and say it once."""
        if self.ledger.add_fall(op, kernel, failure):
            fallback_log.warning("%s: falling past %s: %s; %s", op, kernel, failure.reason, failure.remedy)


def keep(table: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Remember in a table that may not grow for ever: the oldest entry gives way, but once sealed none does."""
    if len(table) >= _KEPT:
        if GATE.sealed:
            return
        table.pop(next(iter(table)), None)
    table[key] = value


HUB: Hub = Hub(PARTS)
at_fork(HUB.renew)
