"""The one place that holds state and decides: registry, machine, settings, contexts, report.

`HUB` is made empty at import. Records are loaded, variables read and probes asked at the first decision.
Every question about a kernel goes through `HUB.select`; every call that misses its table through
`HUB.commit`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kernelhub.dispatch.configuration import Configuration
from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.contract import Contract
from kernelhub.dispatch.fingerprint import Fingerprint, digest, fingerprint_of, versions_of
from kernelhub.dispatch.foreign import read_foreign
from kernelhub.dispatch.gate import GATE, Caller
from kernelhub.dispatch.held import LOCK, Held
from kernelhub.dispatch.kernel import Kernel, Watch
from kernelhub.dispatch.load import LoadFailure, is_imported, load_attribute
from kernelhub.dispatch.lock import check_lock
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.order import line_for, ranked
from kernelhub.dispatch.policy import Layer, Names, Policy, combine
from kernelhub.dispatch.problem import as_dict
from kernelhub.dispatch.registry import Registered, Registry
from kernelhub.dispatch.report import Fallback, Report, Row
from kernelhub.dispatch.select import Selection, as_wished, select
from kernelhub.dispatch.settings import Settings, did_you_mean, read_settings
from kernelhub.dispatch.work import JOURNAL
from kernelhub.errors import ConfigurationError, KernelUnavailable, NoKernel

selection_log = logging.getLogger("kernelhub.selection")
fallback_log = logging.getLogger("kernelhub.fallback")
watch_log = logging.getLogger("kernelhub.watch")

Layers = tuple[Layer, ...]


@dataclass(frozen=True, eq=False)
class Bound:
    """A selection made ready: the adapter's instance and the function that a call runs.

    Attributes:
        selection: the verdict it came from.
        adapter: instance of the op's adapter class, made for the problem.
        run: the call, with the op's arguments in the order that the op's module says.
        device: index of the GPU that it was made for, -1 for the CPU.
        calls: how often `run` was entered.
    """

    selection: Selection[Any]
    adapter: Any
    run: Callable[..., Any]
    counter: Any
    device: int

    @property
    def calls(self) -> int:
        return int(repr(self.counter)[len("count(") : -1])  # the only way to read one that Python will keep


class Agreed(Protocol):
    """What ranks agreed on for one op."""

    @property
    def held(self) -> Held: ...

    def check(self, selection: Selection[Any]) -> None:
        """Raise if this rank chose another kernel than was agreed on."""


class Hub:
    """State of the library in one process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.registry = Registry()
        self.machine = Machine()
        self.contexts: ContextVar[Layers] = ContextVar("kernelhub contexts", default=())
        # Filled when the first context is entered, and never emptied, since a task started inside one keeps
        # it after the block ends. Until then a call need not read the ContextVar.
        self.contexts_used: list[bool] = []
        self.configured: Layer = Layer()
        self.agreed: Mapping[str, Agreed] = {}  # what ranks agreed on, by op; it holds until a reload
        self._settings: Settings | None = None
        self._missing_said = False  # that a lock file lacks a problem
        self._policies: dict[tuple[Layers, Names | None, str], Policy] = {}
        self._caches: list[Callable[[], None]] = []
        self._functions: dict[str, Any] = {}
        self._added: dict[str, Any] = {}  # backends registered at run time, which outlive a reload
        self._bound: list[Bound] = []
        self._fallbacks: dict[tuple[str, str, str], Fallback] = {}
        self._alive: weakref.WeakValueDictionary[int, Bound] = weakref.WeakValueDictionary()
        self.plans: weakref.WeakSet[Any] = weakref.WeakSet()
        self._watched: set[Watch] = set()  # libraries that tell, which they do until the process ends
        JOURNAL.caller = lambda: caller_on_stack(self)

    @property
    def settings(self) -> Settings:
        """The environment and config file; reading them also loads the registry."""
        if self._settings is None:
            with self.lock:
                if self._settings is None:
                    self._load()
        assert self._settings is not None
        return self._settings

    def function(self, op: str) -> Any:
        """The public function of an op by its name."""
        _ = self.settings
        if op not in self._functions:
            known = ", ".join(self._functions)
            raise ConfigurationError(f"{op!r} is no op{did_you_mean(op, self._functions)}; there are {known}")
        return self._functions[op]

    def policy(self, op: str, backend: Names | None = None, contexts: Layers = ()) -> Policy:
        """What the user said about `op`, from every place."""
        key = (contexts, backend, op)
        policy = self._policies.get(key)
        if policy is None:
            settings = self.settings
            layers = (
                settings.force,
                *reversed(contexts),
                self.configured,
                settings.environment,
                settings.file,
            )
            policy = combine(layers, self.registry.known_part(settings.foreign), op)
            if backend is not None:
                self.registry.check_names(backend, "backend=")
                policy = policy.asking(op, backend)
            held = self._held(op)
            if held:
                policy = replace(policy, held=held)
            self._policies[key] = policy
        return policy

    def select(self, op: str, problem: Any, policy: Policy, machine: Machine | None = None) -> Selection[Any]:
        """The verdict on one problem. `explain` and every call get theirs here."""
        _ = self.settings
        contract = self.registry.contracts[op]
        return select(
            op,
            contract.schema,
            problem,
            contract.regime(problem),
            self.registry.candidates(op),
            machine or self.machine,
            policy,
        )

    def ranked(self, op: str, problem: Any, policy: Policy) -> list[Kernel]:
        """The kernels that the policy leaves, in the order in which they are tried, whether or not they can run."""
        _ = self.settings
        candidates = self.registry.candidates(op)
        line = line_for(candidates.lines, problem.device, self.registry.contracts[op].regime(problem))
        kernels: Sequence[Kernel] = ranked(candidates.kernels, line)
        tuned = self.machine.tuned(problem.device).find(op, problem)
        if tuned is not None:
            kernels = tuned.ranked(kernels)
        return as_wished(op, kernels, policy.about(problem, self.machine))

    def commit(
        self,
        op: str,
        problem: Any,
        policy: Policy,
        device: int,
        elsewhere: Callable[[int], Callable[..., Any]],
    ) -> Bound:
        """Select a kernel, load its adapter and bind it; the only place where a choice may fall to the next.

        `device` and `elsewhere` are for the contract's `bind`.

        Raises:
            NoKernel: nothing that may run can run.
            RanksDisagree: ranks agreed on another kernel for this problem.
            KernelUnavailable: the chosen adapter failed to load, and `strict` is on.
        """
        while True:
            selection = self.select(op, problem, policy)
            contract = self.registry.contracts[op]
            kernel = selection.kernel
            if kernel is None:
                raise NoKernel(_no_kernel_message(selection, policy.about(problem, self.machine)), selection)
            if op in self.agreed:
                self.agreed[op].check(selection)
            try:
                adapter = self._adapter(kernel, contract, problem)
            except LoadFailure as failure:
                self._note_failure(selection, kernel, failure, policy)
                continue
            counter = itertools.count()
            run = contract.bind(adapter, problem, device, counter.__next__, elsewhere)
            bound = Bound(selection, adapter, run, counter, device)
            self._bound.append(bound)
            self._alive[id(adapter)] = bound
            self._say_what_the_lock_lacks(selection)
            selection_log.info("%s: %s for %s (%s)", op, kernel.name, problem, selection.because)
            return bound

    def bound_of(self, adapter: Any) -> Bound | None:
        """The selection that an adapter was made for."""
        bound = self._alive.get(id(adapter))
        return bound if bound is not None and bound.adapter is adapter else None

    @property
    def made(self) -> list[Bound]:
        """Every selection made ready that something still holds, oldest first."""
        return list(self._alive.values())

    def watch(self) -> None:
        """Have those backends' libraries that are imported by now tell of what they compile; imports none of them."""
        for watch in self.registry.watches:
            if watch.module in sys.modules and watch not in self._watched and is_imported(watch.module):
                self._watched.add(watch)
                try:
                    load_attribute(watch.target, self.settings["KERNELHUB_LOAD_TIMEOUT_S"])(watch.module, JOURNAL)
                except Exception as error:  # a library may have changed; calls of it are as good as before
                    watch_log.warning("what %s compiles is neither counted nor refused: %r", watch.module, error)

    def configure(self, layer: Layer) -> None:
        """Replace what `configure` said, and forget every choice made under it."""
        self._refuse_if_sealed("configure")
        with self.lock:
            _ = self.settings
            self.registry.check_layer(layer)
            self.configured = layer
            self.forget_choices()

    def reload(self) -> None:
        """Read the environment, the config file and the plugins again, and ask every probe again."""
        self._refuse_if_sealed("reload")
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
            self._adapter(kernel, self.registry.contracts[op], problem)
        except LoadFailure as failure:
            rejection = Rejection(failure.code, failure.reason, failure.remedy)
            self.machine.load_failures[op, kernel.name] = rejection
            return rejection
        return None

    def versions_of(self, kernel: Kernel, machine: Machine | None = None) -> dict[str, str]:
        """Versions of the libraries behind a kernel, by package."""
        return versions_of(kernel, self.registry.backends[kernel.backend].backend, machine or self.machine)

    def fingerprint_of(self, selection: Selection[Any], tuned: str = "") -> Fingerprint:
        """What must be equal in two processes that are to run the same.

        Args:
            selection: a verdict that chose a kernel.
            tuned: digest of a whole table; by default that of the measured sizes which the kernel takes.
        """
        kernel = selection.kernel
        assert kernel is not None
        sizes = self.configurations_of(kernel, selection.problem)
        tuned = tuned or (digest(dict(sizes)) if sizes else "")
        return fingerprint_of(selection, self.registry.backends[kernel.backend].backend, self.machine, tuned)

    def configurations_of(self, kernel: Kernel, problem: Any) -> Mapping[int, Configuration]:
        """Sizes of a kernel that were measured for a problem, by number of tokens; empty if it takes its own."""
        if not kernel.configurable:
            return {}
        tuned = self.machine.tuned(problem.device).find(kernel.op, problem)
        return {} if tuned is None else tuned.configurations.get(kernel.name, {})

    def chosen(self) -> list[Selection[Any]]:
        """The verdict on every problem that was met since the report began, as it is now, each once.

        One that a call or a block asked for by name stands as it was, since it would be asked for again.
        """
        latest = {(bound.selection.op, bound.selection.problem): bound.selection for bound in self._bound}
        contexts = self.contexts.get()
        return [
            verdict
            if verdict.source in ("kwarg", "context")
            else self.select(verdict.op, verdict.problem, self.policy(verdict.op, None, contexts))
            for verdict in latest.values()
        ]

    def add_backend(self, module: Any) -> Registered:
        """Register a backend at run time."""
        self._refuse_if_sealed("register_backend")
        with self.lock:
            _ = self.settings
            registered = self.registry.add(module)
            self._added[registered.name] = module
            self.forget_choices()
            return registered

    def remove_backend(self, name: str) -> None:
        """Forget a backend that `add_backend` registered."""
        self._refuse_if_sealed("remove")
        with self.lock:
            self.registry.remove(name)
            self._added.pop(name, None)
            self.forget_choices()

    def restore(self) -> None:
        """Back to the state after import: nothing configured, registered, probed, chosen or reported."""
        with self.lock:
            GATE.open()
            GATE.lost.clear()
            self._alive.clear()
            self.plans.clear()
            self.configured = Layer()
            self.machine.forget()
            self._settings = None
            self.agreed = {}
            self.registry = Registry()
            self._added.clear()
            self.forget_choices()
            self.forget_report()

    def _refuse_if_sealed(self, word: str) -> None:
        if GATE.sealed:
            raise ConfigurationError(
                f"{word}() would have every choice made again, and kernelhub is sealed; unseal() first, then warm "
                "up and seal() again"
            )

    def on_change(self, forget: Callable[[], None]) -> None:
        """Have `forget` called whenever choices made so far no longer hold."""
        self._caches.append(forget)

    def forget_choices(self) -> None:
        """Empty every table of plans."""
        with self.lock:
            self._policies.clear()
            for forget in self._caches:
                forget()

    def forget_evidence(self) -> None:
        """Choose anew with what the store of evidence says now."""
        with self.lock:
            self.machine.forget_evidence()
            self.forget_choices()

    def report(self) -> Report:
        """What ran so far; choices made again after a change of configuration are counted together."""
        calls: dict[Any, int] = {}
        for bound in self._bound:
            verdict = bound.selection
            key = (verdict.op, verdict.selected, verdict.source, verdict.because, verdict.problem)
            calls[key] = calls.get(key, 0) + bound.calls
        rows = [
            Row(op, kernel, count, source, because, as_dict(problem))
            for (op, kernel, source, because, problem), count in calls.items()
        ]
        return Report(tuple(rows), tuple(self._fallbacks.values()), JOURNAL.work, GATE.sealed)

    @contextlib.contextmanager
    def unreported(self) -> Iterator[None]:
        """A block whose choices neither the report nor an agreement of ranks counts, since nobody served by them."""
        before = len(self._bound)
        try:
            yield
        finally:
            del self._bound[before:]

    def forget_report(self) -> None:
        """Start the report anew."""
        with self.lock:
            self._bound.clear()
            self._fallbacks.clear()
            JOURNAL.clear()

    def _load(self) -> None:
        settings = read_settings()
        self._functions = {function.op.contract.name: function for function in _ops()}
        contracts = [function.op.contract for function in self._functions.values()]
        self.registry.load(contracts, settings["KERNELHUB_PLUGINS"], settings["KERNELHUB_LOAD_TIMEOUT_S"])
        for module in self._added.values():
            self.registry.add(module)
        for layer in (settings.force, settings.environment, settings.file):
            self.registry.check_layer(layer)
        self.machine.heeds_evidence = settings["KERNELHUB_EVIDENCE"]
        self.machine.tables = settings["KERNELHUB_TUNED"]
        if settings.lock is not None:
            check_lock(settings.lock, self.registry.contracts)
        self._missing_said = False
        _print_events(settings["KERNELHUB_LOG"])
        if not settings["KERNELHUB_IGNORE_VLLM_ENV"]:
            settings = replace(settings, foreign=read_foreign())
            met = {wish.origin for wish in self.registry.known_part(settings.foreign).requests}
            for origin in dict.fromkeys(wish.origin for wish in settings.foreign.requests):
                if origin not in met:
                    fallback_log.warning("%s is not obeyed: none of the kernels it names is registered", origin)
        self._settings = settings

    def _held(self, op: str) -> tuple[Held, ...]:
        """What stands fixed for an op, strongest first."""
        settings, held = self.settings, []
        if op in self.agreed:
            held.append(self.agreed[op].held)
        if settings.lock is not None:
            closed = settings["KERNELHUB_LOCK_MISSING"] == "error"
            layouts = {kernel.name: kernel.layouts for kernel in self.registry.candidates(op).kernels}
            held.append(settings.lock.held(self.registry.contracts[op], layouts, closed))
        return tuple(held)

    def _say_what_the_lock_lacks(self, selection: Selection[Any]) -> None:
        """Tell once that a problem was chosen for freely beside a lock file."""
        lock = self.settings.lock
        if lock is None or selection.explicit or self._missing_said:
            return
        self._missing_said = True
        fallback_log.warning(lock.lacks(selection))

    def _adapter(self, kernel: Kernel, contract: Contract[Any], problem: Any) -> Any:
        make = load_attribute(kernel.target, self.settings["KERNELHUB_LOAD_TIMEOUT_S"])
        self.watch()
        try:
            adapter = make(problem)
        except (Exception, SystemExit) as error:  # some libraries are imported here, and leave where there is no GPU
            raise LoadFailure(
                "load_failed",
                f"preparing it raised {type(error).__name__}: {error}",
                "disable it and report this",
            ) from error
        if not isinstance(adapter, contract.adapter):
            raise LoadFailure(
                "load_failed",
                f"{kernel.target} gives {type(adapter).__name__}, not a {contract.adapter.__name__}",
                "mend the backend",
            )
        self.watch()  # making it may have imported its library
        if kernel.configurable:
            self._configure(adapter, kernel, problem)
        return adapter

    def _configure(self, adapter: Any, kernel: Kernel, problem: Any) -> None:
        """Have an adapter take the sizes that were measured for the problem, if some were."""
        measured = self.configurations_of(kernel, problem)
        if not measured:
            return
        try:
            adapter.configure(measured)
        except (KeyError, TypeError, ValueError) as error:
            adapter.configure({})
            fallback_log.warning(
                "%s: %s does not understand its measured sizes and takes its own: %r; `kernelhub tune` measures anew",
                kernel.op, kernel.name, error,
            )  # fmt: skip

    def _note_failure(self, selection: Selection[Any], kernel: Kernel, failure: LoadFailure, policy: Policy) -> None:
        """Remember why a chosen kernel could not be loaded; raise if nothing may take its place."""
        rejection = Rejection(failure.code, failure.reason, failure.remedy)
        op = selection.op
        failed = [kernel]
        if failure.code == "load_timeout":  # the rest of the backend would hang on the same import
            failed = [k for k in self.registry.candidates(op).kernels if k.backend == kernel.backend]
        for item in failed:
            self.machine.load_failures[op, item.name] = rejection
        if policy.strict or GATE.sealed:
            why = "strict is on" if policy.strict else "kernelhub is sealed"
            raise KernelUnavailable(
                f"{op}: {kernel.name} was chosen ({selection.because}) but {failure.reason}, and {why}; "
                f"{failure.remedy}"
            ) from failure
        key = (op, kernel.name, failure.code)
        known = self._fallbacks.get(key)
        self._fallbacks[key] = Fallback(
            op, kernel.name, failure.code, failure.reason, 1 + (known.count if known else 0)
        )
        if known is None:
            fallback_log.warning("%s: falling past %s: %s; %s", op, kernel.name, failure.reason, failure.remedy)


def caller_on_stack(hub: Hub) -> Caller | None:
    """On behalf of which op the calling code works: told by the adapter whose method is on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        said = frame.f_locals
        if frame.f_code is Hub.commit.__code__:
            kernel = said.get("kernel")
            return Caller(said["op"], kernel.name if kernel else "", said["problem"], None, frame)
        for holder in (said.get("self"), said.get("adapter"), getattr(said.get("launch"), "__self__", None)):
            bound = None if holder is None else hub.bound_of(holder)
            if bound is not None:
                verdict = bound.selection
                return Caller(verdict.op, str(verdict.selected), verdict.problem, None, frame, bound)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _ops() -> tuple[Any, ...]:
    """Every public op."""
    functions: tuple[Any, ...] = importlib.import_module("kernelhub.ops").functions()
    return functions


def _no_kernel_message(selection: Selection[Any], policy: Policy) -> str:
    request = policy.request_for(selection.op)
    if request is None:
        return f"{selection.op}: no registered kernel can run this."
    if request.source == LOCK and not any(item.kernel in request.names for item in selection.decisions):
        return (
            f"{selection.op}: {request.origin} holds {request.names[0]}, and no kernel of that name is registered in "
            f"this version. To take that back, {request.undo}."
        )
    message = f"{selection.op}: {request.origin} asks for {' or '.join(request.names)}, which cannot run this."
    return f"{message} To take that back, {request.undo}." if request.undo else message


def _print_events(events: Names) -> None:
    """Send the named events to stderr."""
    for event in events:
        log = logging.getLogger(f"kernelhub.{event}")
        log.setLevel(logging.INFO)
        if not log.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            log.addHandler(handler)
            log.propagate = False


HUB = Hub()


def report() -> Report:
    """What ran in this process, how often, and why; print it, or take `to_dict()`."""
    return HUB.report()


def reload() -> None:
    """Read the KERNELHUB_* variables, the config file and the plugins again, and ask every probe again."""
    HUB.reload()


@dataclass(frozen=True)
class BackendHandle:
    """A backend registered at run time.

    Attributes:
        registered: what was registered.
    """

    registered: Registered

    def remove(self) -> None:
        """Take the backend out again."""
        HUB.remove_backend(self.registered.name)


def register_backend(module: Any) -> BackendHandle:
    """Register a backend in this process, as an entry point of `kernelhub.backends` would.

    Args:
        module: anything with `BACKEND`, `KERNELS` and optionally `KNOWN_BAD`.

    Returns:
        A handle whose `remove()` takes it out again.

    Raises:
        RegistrationError: a record contradicts the schema of its op, or a name is taken.
    """
    return BackendHandle(HUB.add_backend(module))
