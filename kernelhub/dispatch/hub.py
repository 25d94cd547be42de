"""The state of dispatch in one process: registry, machine, settings, contexts, report.

`HUB` is empty at import. The first selection loads the records, reads the variables and runs the probes. `HUB.select`
makes every selection; `HUB.bind` serves every call that misses its table.

`HUB.lock` protects tables. No import, compile or probe runs under it, except at the first selection and at a reload;
slow work has its own locks (`making`). `HUB.generation` counts the changes of what selections depend on. A selection
that started before such a change serves its call and is not stored.
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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kernelhub.dispatch.audits import AUDITS, OFF, AuditSettings
from kernelhub.dispatch.bound import Bound, configure, make_adapter, watch_imported
from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.contract import Contract, OpRecord
from kernelhub.dispatch.events import fallback_log, print_events, selection_log
from kernelhub.dispatch.fingerprint import SelectionFingerprint, fingerprint_of, sizes_of, versions_of
from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.kernel import Kernel, Watch
from kernelhub.dispatch.ledger import Ledger, caller_on_stack
from kernelhub.dispatch.load import LoadFailure, is_imported, load_attribute
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.making import Making, at_fork, check_not_importing, drop_half_imported, loading_registry
from kernelhub.dispatch.policy import Agreed, Layer, Layers, Names, Pins, Policy, combine, requested_names
from kernelhub.dispatch.reasons import kernels_on
from kernelhub.dispatch.registry import Registered, Registry
from kernelhub.dispatch.select import as_preferred, no_kernel, select, unavailable
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.settings import Settings, did_you_mean, read_settings
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import ConfigurationError
from kernelhub.homes import PARTS

if TYPE_CHECKING:
    from kernelhub.dispatch.report import Report

_KEPT = 2048  # entries of a table that grows with the requests that users write, not with their problems
_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class LayersOf(NamedTuple):
    """Types of the launcher's extension: of an engine's layers, and of the calls of layers."""

    layer: Callable[..., Any]
    layers: Callable[..., Any]


class Outdated(Exception):
    """The inputs of a selection changed while it was made or bound; the caller selects again."""


class Hub:
    """State of the library in one process; `HUB` is the only instance.

    Args:
        parts: objects of other rooms that the hub uses, by role, as ``"module:attribute"``; see `kernelhub.homes`.

    Attributes:
        lock: lock of all tables.
        making: locks of loading and binding.
        patience_s: longest wait, in seconds, for another thread that loads the same kernel.
        generation: number of changes of what selections depend on.
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
        # Not empty once a context was entered. It is never cleared, since a task that starts inside a context keeps
        # the context after the block ends. While it is empty, a call does not read the ContextVar.
        self.contexts_used: list[bool] = []
        self.layers: dict[Hashable, Layer] = {}  # by arguments: equal arguments give one object, the key of tables
        self.configured: Layer = Layer()
        self.agreed: Mapping[str, Agreed] = {}  # agreements of ranks, by op; valid until a reload
        self._settings: Settings | None = None
        self._unlocked_logged = False  # that a lock file lacks a problem
        self._policies: dict[tuple[Layers, Names | None, str], Policy] = {}
        self._caches: list[Callable[[], None]] = []
        self._on_loss: list[Callable[[int], None]] = []
        self._functions: dict[str, Any] = {}
        self._added: dict[str, Any] = {}  # backends registered at run time; a reload keeps them
        self.ledger = Ledger()
        self.known_of: Callable[..., Any] | None = None  # compares known calls in C, once the launcher is loaded
        self.calls_of: Callable[..., tuple[Any, Callable[..., Any]]] | None = None  # makes whole calls, likewise
        self.layers_of: LayersOf | None = None  # makes calls of an engine's layers, likewise
        self.fresh_of: Callable[..., Any] | None = None  # makes the results of whole calls, likewise
        self._on_launcher: list[Callable[[], None]] = []
        self._watched: set[Watch] = set()  # hooked libraries; they stay hooked until the process ends
        JOURNAL.caller = lambda: caller_on_stack(self.ledger.bound_of, Hub.bind.__code__)

    @property
    def settings(self) -> Settings:
        """The settings of environment and config file. The first access also loads the registry."""
        if self._settings is None:
            check_not_importing()
            with loading_registry(), self.lock:
                if self._settings is None:
                    self._load()
        assert self._settings is not None
        return self._settings

    def function(self, op: str) -> Any:
        """The public function of an op by its name; ConfigurationError if there is no such op."""
        _ = self.settings
        if not self._functions:
            with loading_registry(), self.lock:
                self._functions = self._functions or {item.op.contract.name: item for item in self.part("functions")()}
        if op not in self._functions:
            known = ", ".join(self._functions)
            raise ConfigurationError(f"{op!r} is not an op{did_you_mean(op, self._functions)}; the ops are {known}")
        return self._functions[op]

    def record(self, op: str) -> OpRecord[Any]:
        """The record of an op by its name; ConfigurationError if there is no such op."""
        _ = self.settings
        known = self.registry.contracts
        if op not in known:
            raise ConfigurationError(f"{op!r} is not an op{did_you_mean(op, known)}; the ops are {', '.join(known)}")
        return known[op]

    def policy(self, op: str, backend: Names | None = None, contexts: Layers = ()) -> Policy:
        """The policy for `op`: all requests, preferences and settings.

        Args:
            op: name of the op.
            backend: names of the call's ``backend=``.
            contexts: layers of the `use` blocks that the call is in, outermost first.
        """
        key = (contexts, backend, op)
        policy = self._policies.get(key)
        if policy is None:
            generation, settings, registry = self.generation, self.settings, self.registry
            layers = (settings.force, *reversed(contexts), self.configured, settings.environment, settings.file)
            policy = combine(layers, registry.known_part(settings.foreign), op)
            if backend is not None:
                registry.check_names(backend, f"{op}(backend=)")
                policy = policy.requesting(op, backend)
            pins = self._pins(op, settings, registry)
            policy = replace(policy, pins=pins) if pins else policy
            with self.lock:
                if generation == self.generation:
                    keep(self._policies, key, policy)
        return policy

    def select(self, op: str, problem: Any, policy: Policy, machine: Machine | None = None) -> Selection[Any]:
        """The selection for one problem. Both `explain` and calls use it."""
        check_not_importing()
        _ = self.settings
        contract = self.registry.contracts[op]
        candidates, regime = self.registry.candidates(op), contract.regime(problem)
        parts = {kernel: self._made_of(kernel, problem, machine) for kernel in candidates.made_of_parts}
        found = select(op, contract.schema, problem, regime, candidates, machine or self.machine, policy, parts)
        if found.kernel is not None and found.kernel.calls is not None:
            calls, contexts = found.kernel.calls, self.contexts.get()

            def choose(op: str, need: Any) -> Selection[Any]:
                return self.select(op, need, self.policy(op, None, contexts), machine)

            found.calling(lambda: calls(problem, choose))
        return found

    def _made_of(self, kernel: Kernel, problem: Any, machine: Machine | None) -> tuple[Selection[Any], ...]:
        """The selections of the ops that a kernel is made of."""
        assert kernel.parts is not None
        needs, contexts = kernel.parts(problem), self.contexts.get()
        return tuple(self.select(op, need, self.policy(op, None, contexts), machine) for op, need in needs)

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
        """The selection for a problem under the current contexts. No adapter is imported.

        Args:
            op: name of the op.
            problem: the problem.
            backend: the call's ``backend=``.
            machine: facts of another machine; by default this one.
            packing: checkpoint weights will be packed for the selected kernel.
            barred: further rejections, by kernel.
        """
        policy = self.policy(op, requested_names(op, backend), self.contexts.get())
        if packing or barred:
            policy = replace(policy, packing=packing, barred={**policy.barred, **(barred or {})})
        return self.select(op, problem, policy, machine)

    def ranked(self, op: str, problem: Any, policy: Policy) -> Sequence[Kernel]:
        """The kernels that requests leave, in the order in which they are tried, supported or not."""
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
        """Select a kernel, import its adapter and bind it. Fallbacks happen only here.

        Args:
            op: name of the op.
            problem: the problem.
            policy: the policy for the op.
            device: device index, for the contract's `bind`.
            elsewhere: function for other devices, for the contract's `bind`.
            generation: `generation` when `policy` was made.
            made: returns the result of another thread for the same call, or None.
            remember: stores the result, before other threads that wait for it continue.

        Raises:
            Outdated: the kernel could not be loaded, and the inputs of the selection changed meanwhile.
            NoKernel: no kernel supports the problem, or none of the requested ones.
            RanksDisagree: ranks agreed on another kernel for this problem.
            KernelUnavailable: the selected adapter cannot be loaded, and `strict` is on or kernelhub is sealed.
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
            self._log_unlocked(selection)
            if selection_log.isEnabledFor(logging.INFO):
                selection_log.info("%s: %s for %s (%s)", op, kernel.name, problem, selection.because)
                if selection.faster:
                    selection_log.info("%s: faster: %s", op, selection.faster[0].hint)
            return bound

    def watch(self) -> None:
        """Hook the imported libraries of backends, so that they log their compiles. It imports no library."""
        settings, modules, watched = self.settings, sys.modules, self._watched
        for watch in self.registry.watches:
            if watch.module in modules and watch not in watched:
                with self.making.alone("watches", timeout_s=self.patience_s):  # two threads would hook a library twice
                    watch_imported(self.registry.watches, watched, settings["KERNELHUB_LOAD_TIMEOUT_S"])
                break

    def configure(self, layer: Layer) -> None:
        """Replace the layer of `configure`, and discard every selection."""
        GATE.check_change("configure")
        with self.lock:
            _ = self.settings
            self.registry.check_layer(layer)
            self.configured = layer
            self.forget_selections()

    def reload(self) -> None:
        """Read the environment, the config file and the plugins again; discard probe results and selections."""
        GATE.check_change("reload")
        with self.lock:
            self.machine.forget()
            self._settings = None
            self.agreed = {}
            self.forget_selections()
            _ = self.settings

    def agree(self, agreed: Mapping[str, Agreed]) -> None:
        """Add agreements of ranks to the earlier ones, and discard every selection."""
        with self.lock:
            self.agreed = {**self.agreed, **agreed}
            self.forget_selections()

    def try_load(self, op: str, kernel: Kernel, problem: Any) -> Rejection | None:
        """Import and prepare a kernel's adapter; the reason of a failure, which later selections use, or None."""
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
        """Versions of the libraries of a kernel, by package."""
        return versions_of(kernel, self.registry.backends[kernel.backend].backend, machine or self.machine)

    def fingerprint_of(self, selection: Selection[Any], tuned: str = "") -> SelectionFingerprint:
        """The fingerprint of a selection; processes that must run the same kernel compare it."""
        assert selection.kernel is not None
        parts = tuple(str(self.fingerprint_of(part, tuned)) for part in selection.parts)
        backend = self.registry.backends[selection.kernel.backend].backend
        return fingerprint_of(selection, backend, self.machine, tuned, parts)

    def selections(self) -> list[Selection[Any]]:
        """The current selection for each problem since the report was last cleared.

        A selection requested by a call or a `use` block stays as it was, since the request would be repeated.
        """
        contexts = self.contexts.get()
        return [
            selection
            if selection.source in ("kwarg", "context")
            else self.select(selection.op, selection.problem, self.policy(selection.op, None, contexts))
            for selection in self.ledger.selections()
        ]

    def add_backend(self, module: Any) -> Registered:
        """Register a backend at run time, and discard every selection."""
        GATE.check_change("register_backend")
        with self.lock:
            _ = self.settings
            registry = self.registry.copied()  # a selection in another thread continues with the old one
            registered = registry.add(module)
            self.registry = registry
            self._added[registered.name] = module
            self.forget_selections()
            return registered

    def is_of_this_process(self, backend: str) -> bool:
        """Whether a backend was registered at run time, so that other processes do not have it."""
        return backend in self._added

    def remove_backend(self, name: str) -> None:
        """Unregister a backend of `add_backend`, and discard every selection."""
        GATE.check_change("remove")
        with self.lock:
            registry = self.registry.copied()
            registry.remove(name)
            self.registry = registry
            self._added.pop(name, None)
            self.forget_selections()

    def restore(self) -> None:
        """Restore the state after import: no settings, backends, probe results, selections or report."""
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
            self.forget_selections()

    @property
    def audit(self) -> AuditSettings:
        """The audit settings of `configure`, else of the environment."""
        configured, settings = self.configured, self.settings
        share = settings["KERNELHUB_AUDIT"] if configured.audit is None else configured.audit
        if not share:
            return OFF
        return AuditSettings(
            share, settings["KERNELHUB_AUDIT_BYTES"], configured.audit_action or settings["KERNELHUB_AUDIT_ACTION"]
        )

    def on_change(self, forget: Callable[[], None]) -> None:
        """Register `forget`, which is called when selections are discarded."""
        self._caches.append(forget)

    def on_launcher(self, begin: Callable[[], None]) -> None:
        """Register `begin`, which is called once `calls_of` is there."""
        self._on_launcher.append(begin)
        if self.calls_of is not None:
            begin()

    def recognise(
        self,
        known_of: Callable[..., Any],
        calls_of: Callable[..., tuple[Any, Callable[..., Any]]],
        layers_of: LayersOf,
        fresh_of: Callable[..., Any],
    ) -> None:
        """Let the launcher's extension recognise known calls, whole ones, and those of an engine's layers."""
        with self.lock:
            self.known_of, self.calls_of, self.layers_of = known_of, calls_of, layers_of
            self.fresh_of = fresh_of
            for begin in self._on_launcher:
                begin()

    def on_loss(self, forget: Callable[[int], None]) -> None:
        """Register `forget`, which is called with the index of each device that is lost."""
        self._on_loss.append(forget)

    def forget_device(self, device: int) -> None:
        """Remove the functions that run on a lost device from every table."""
        with self.lock:
            for forget in self._on_loss:
                forget(device)

    def forget_selections(self) -> None:
        """Discard every selection: clear all tables of bound kernels."""
        with self.lock:
            self.generation += 1
            self._policies.clear()
            for forget in self._caches:
                forget()
            self.ledger.settle()

    def forget_evidence(self) -> None:
        """Read the store of evidence again, and discard every selection."""
        with self.lock:
            self.machine.forget_evidence()
            self.forget_selections()

    def renew(self) -> None:
        """In a forked child: replace locks that other threads held, and drop modules that they had half imported."""
        drop_half_imported()
        self.lock = threading.RLock()
        self.making.forget()
        self.ledger.renew()
        AUDITS.renew()

    def report(self) -> Report:
        """The report. Repeated selections of the same problem with the same result share a row."""
        return self.ledger.report()

    def forget_report(self) -> None:
        """Clear the report."""
        with self.lock:
            self.ledger.forget_report()

    def _load(self) -> None:
        """Read the settings, and register ops, backends and plugins."""
        settings, registry = read_settings(), Registry(self.part("order"))
        plugins, timeout_s = settings["KERNELHUB_PLUGINS"], settings["KERNELHUB_LOAD_TIMEOUT_S"]
        registry.load(self.part("records"), self.part("backends")(), plugins, timeout_s)
        for module in self._added.values():
            registry.add(module)
        for layer in (settings.force, settings.environment, settings.file):
            registry.check_layer(layer)
        if settings.lock is not None:
            from kernelhub.dispatch.lock_file import check_lock

            check_lock(settings.lock, registry.contracts)
        print_events(settings["KERNELHUB_LOG"])
        if not settings["KERNELHUB_IGNORE_VLLM_ENV"]:
            settings = self._with_engine_variables(settings, registry)
        self.machine.evidence = self.part("evidence") if settings["KERNELHUB_EVIDENCE"] else None
        self.machine.tables = settings["KERNELHUB_TUNED"]
        self.machine.load()
        JOURNAL.compile_timeout_s = settings["KERNELHUB_COMPILE_TIMEOUT_S"]
        self.patience_s = max(settings["KERNELHUB_LOAD_TIMEOUT_S"], settings["KERNELHUB_COMPILE_TIMEOUT_S"])
        self._unlocked_logged = False
        self.registry, self._settings = registry, settings
        registry.log_left_out()

    def _with_engine_variables(self, settings: Settings, registry: Registry) -> Settings:
        """The settings with the requests of other projects' variables. A variable that names no kernel is logged."""
        settings = replace(settings, foreign=self.part("engine_variables")(os.environ))
        known = {override.origin for override in registry.known_part(settings.foreign).requests}
        for origin in dict.fromkeys(override.origin for override in settings.foreign.requests):
            if origin not in known:
                fallback_log.warning("%s is ignored: none of the kernels it names is registered", origin)
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
        """The object of another room with a role, imported at its first use."""
        module, _, attribute = self._parts[role].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def _log_unlocked(self, selection: Selection[Any]) -> None:
        """Log the first problem that a lock file lacks."""
        lock = self.settings.lock
        if lock is None or selection.explicit or self._unlocked_logged:
            return
        self._unlocked_logged = True
        fallback_log.warning(lock.missing_message(selection))

    def _adapter(self, kernel: Kernel, contract: Contract[Any], problem: Any) -> Any:
        timeout_s = self.settings["KERNELHUB_LOAD_TIMEOUT_S"]
        if not is_imported(kernel.target.partition(":")[0]):  # modules of one library import each other
            with self.making.alone("import", kernel.backend, timeout_s=self.patience_s):
                load_attribute(kernel.target, timeout_s)
        adapter = make_adapter(kernel, contract, problem, timeout_s, self.watch)
        if kernel.configurable:
            configure(adapter, kernel, sizes_of(self.machine, kernel, problem))
        return adapter

    def _note_failure(
        self, selection: Selection[Any], kernel: Kernel, failure: LoadFailure, policy: Policy, generation: int
    ) -> None:
        """Store why a selected kernel could not be loaded; raise if a fallback is not allowed."""
        rejection = Rejection(failure.code, failure.reason, failure.remedy)
        op = selection.op
        failed = [kernel]
        if failure.code == "load_timeout":  # the other kernels of the backend would hang on the same import
            failed = [k for k in self.registry.candidates(op).kernels if k.backend == kernel.backend]
        with self.lock:
            if generation != self.generation:
                raise Outdated
            for item in failed:
                self.machine.cannot_load(op, item.name, rejection)
        if policy.strict or GATE.sealed:
            raise unavailable(selection, failure, policy.strict) from failure
        self.add_fallback(op, kernel.name, failure)

    def add_fallback(self, op: str, kernel: str, failure: LoadFailure) -> None:
        """Count the fallback from a selected kernel to the next, and log it once."""
        if self.ledger.add_fallback(op, kernel, failure):
            message = "%s: %s cannot be loaded, using the next kernel: %s; %s"
            fallback_log.warning(message, op, kernel, failure.reason, failure.remedy)


def keep(table: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Store an entry in a table of bounded size. The oldest entry is removed; a sealed process removes none."""
    if len(table) >= _KEPT:
        if GATE.sealed:
            return
        table.pop(next(iter(table)), None)
    table[key] = value


HUB: Hub = Hub(PARTS)
at_fork(HUB.renew)
