"""The registry of ops, backends, kernels and order lines.

Built-in backends are the folders of `kernelhub.backends`; plugins are entry points of the group
``kernelhub.backends``. Both are modules with `BACKEND`, `KERNELS` and optionally `KNOWN_BAD`, and are registered by the
same `add`, which rejects a record that contradicts its op's schema.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.kernel import Backend, Kernel, KnownBad, Watch
from kernelhub.dispatch.load import LoadFailure, load_module
from kernelhub.dispatch.order import Candidates, Line
from kernelhub.dispatch.policy import Layer, Override
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.errors import ConfigurationError, RegistrationError
from kernelhub.probes.distributions import EntryPoint, entry_points
from kernelhub.probes.finding import Finding

ENTRY_POINT_GROUP = "kernelhub.backends"

logger = logging.getLogger("kernelhub.plugins")


@dataclass(frozen=True)
class Registered:
    """A registered backend, or a plugin that could not be registered, with the reason.

    Attributes:
        name: name of the backend, or of the entry point of a broken plugin.
        origin: its module.
        backend: its record; None if the plugin is broken.
        kernels: its kernel records.
        known_bad: its known defects.
        error: why the plugin is not registered; empty if it is.
        code: stable code of the error; empty if there is none.
        builtin: whether it is part of kernelhub.
        distribution: name and version of the installed distribution that it is from; empty if there is none.
    """

    name: str
    origin: str
    backend: Backend | None = None
    kernels: tuple[Kernel, ...] = ()
    known_bad: tuple[KnownBad, ...] = ()
    error: str = ""
    code: str = ""
    builtin: bool = False
    distribution: str = ""


@dataclass
class Registry:
    """The registered ops and backends. `HUB.registry` is the one in use.

    Attributes:
        order: order lines by op.
        contracts: records of the ops, by name.
        backends: registered backends and broken plugins, by name.
        watches: hooks of all backends.
        left_out: plugins that are not registered, each with the reason.
    """

    order: Mapping[str, tuple[Line, ...]]
    contracts: dict[str, OpRecord[Any]] = field(default_factory=dict)
    backends: dict[str, Registered] = field(default_factory=dict)
    watches: tuple[Watch, ...] = ()
    left_out: list[Registered] = field(default_factory=list)
    _candidates: dict[str, Candidates] = field(default_factory=dict)

    def load(
        self,
        contracts: Iterable[OpRecord[Any]],
        backends: Iterable[ModuleType],
        plugins: tuple[str, ...],
        timeout_s: float,
    ) -> None:
        """Register every op, every built-in backend, and the plugins that `plugins` (KERNELHUB_PLUGINS) allows.

        A broken plugin is added to `left_out` and does not raise.
        """
        self.contracts = {contract.name: contract for contract in contracts}
        self.backends = {}
        for module in backends:
            self.add(module, builtin=True)
        entries, wrong = _allowed_entry_points(plugins)
        self.left_out = []
        for finding in wrong:
            self._leave_out(Registered(finding.subject, finding.subject, code=finding.code, error=finding.reason))
        for entry in entries:
            self._add_plugin(entry, timeout_s)

    def log_left_out(self) -> None:
        """Log a warning for each plugin in `left_out`. Not part of `load`, since a log handler may call kernelhub."""
        for item in self.left_out:
            name, origin = item.name, item.distribution or item.origin
            logger.warning("backend %s (%s) is not available: %s: %s", name, origin, item.code, item.error)

    def add(self, module: ModuleType | Any, *, builtin: bool = False, distribution: str = "") -> Registered:
        """Register the backend of a module.

        Raises:
            RegistrationError: a record contradicts the schema of its op, or a name is taken.
        """
        from kernelhub.dispatch.records import records_of  # to import an op takes less without

        records = records_of(module, self.contracts, builtin=builtin)
        name, origin = records.backend.name, str(getattr(module, "__name__", repr(module)))
        if name in self.backends and not self.backends[name].error:
            raise RegistrationError(
                f"{origin}: backend {name!r} is already registered from {self.backends[name].origin}"
            )
        registered = Registered(name, origin, *records, builtin=builtin, distribution=distribution)
        self.backends[name] = registered
        self._candidates.clear()
        self._gather_watches()
        return registered

    def copied(self) -> Registry:
        """A copy to change while this registry is in use."""
        return replace(self, contracts=dict(self.contracts), backends=dict(self.backends), _candidates={})

    def remove(self, name: str) -> None:
        """Unregister a backend."""
        self.backends.pop(name, None)
        self._candidates.clear()
        self._gather_watches()

    def candidates(self, op: str) -> Candidates:
        """Every record of `op`, with its order lines and known defects."""
        found = self._candidates.get(op)
        if found is None:
            kernels = tuple(k for item in self.backends.values() for k in item.kernels if k.op == op)
            known_bad = tuple(entry for item in self.backends.values() for entry in item.known_bad)
            everywhere = {name for name, item in self.backends.items() if item.backend and item.backend.portable}
            portable = frozenset(kernel for kernel in kernels if kernel.backend in everywhere)
            lines = order_lines(self.contracts[op], self.order.get(op, ()), kernels)
            found = self._candidates[op] = Candidates(kernels, lines, known_bad, portable)
        return found

    def check_layer(self, layer: Layer) -> None:
        """Raise ConfigurationError if an override names an unknown op, backend or kernel."""
        for override in (*layer.requests, *layer.prefers, *layer.disables):
            self.check_op(override.ops, override.origin)
            self.check_names(override.names, override.origin)

    def known_part(self, layer: Layer) -> Layer:
        """The layer without names of unknown ops, and of kernels that an op does not have.

        Variables of other projects may name kernels that are not registered here, such as FlashAttention for latent
        attention.
        """

        def known(overrides: tuple[Override, ...]) -> tuple[Override, ...]:
            parts = [replace(override, names=self.known_names(override.names, override.ops)) for override in overrides]
            return tuple(override for override in parts if override.names and self._is_op(override.ops))

        return replace(
            layer, requests=known(layer.requests), prefers=known(layer.prefers), disables=known(layer.disables)
        )

    def known_names(self, names: Iterable[str], ops: str) -> tuple[str, ...]:
        """The names that mean a kernel of an op that matches the pattern `ops`."""
        kernels = [kernel for item in self.backends.values() for kernel in item.kernels]
        kernels = [kernel for kernel in kernels if fnmatch.fnmatchcase(kernel.op, ops)]
        return tuple(name for name in names if any(kernel.matches(name) for kernel in kernels))

    def check_names(self, names: Iterable[str], origin: str) -> None:
        """Raise ConfigurationError if a name does not mean a backend or kernel."""
        kernels = [kernel for item in self.backends.values() for kernel in item.kernels]
        for name in names:
            if name not in self.backends and not any(kernel.matches(name) for kernel in kernels):
                known = [*self.backends, *(kernel.name for kernel in kernels)]
                op, _, rest = name.partition(":")
                meant = f" (did you mean {op}={rest}?)" if rest and self._is_op(op) else did_you_mean(name, known)
                raise ConfigurationError(
                    f"{origin}: {name!r} is not a backend or kernel{meant}; `kernelhub backends` lists them"
                )

    def check_op(self, pattern: str, origin: str) -> None:
        """Raise ConfigurationError if a pattern matches no op."""
        if not self._is_op(pattern):
            raise ConfigurationError(
                f"{origin}: {pattern!r} is not an op{did_you_mean(pattern, self.contracts)}; "
                f"the ops are {', '.join(self.contracts)}"
            )

    def _is_op(self, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(op, pattern) for op in self.contracts)

    def _gather_watches(self) -> None:
        backends = (item.backend for item in self.backends.values() if item.backend is not None)
        self.watches = tuple(watch for backend in backends for watch in backend.watches)

    def _add_plugin(self, entry: EntryPoint, timeout_s: float) -> None:
        """Register a plugin, or add it to `left_out` with the reason."""
        distribution = f"{entry.distribution.name} {entry.distribution.version or ''}".strip()
        try:
            self.add(load_module(entry.module, timeout_s), distribution=distribution)
        except (LoadFailure, RegistrationError) as error:
            code = error.code if isinstance(error, LoadFailure) else "plugin_invalid"
            self._leave_out(Registered(entry.name, entry.value, code=code, error=str(error), distribution=distribution))

    def _leave_out(self, broken: Registered) -> None:
        """Add a broken plugin to `left_out` and `backends`; a registered backend of the same name stays."""
        taken = broken.name in self.backends
        self.backends[f"{broken.name} ({broken.origin})" if taken else broken.name] = broken
        self.left_out.append(broken)


def order_lines(contract: OpRecord[Any], lines: tuple[Line, ...], kernels: Iterable[Kernel]) -> tuple[Line, ...]:
    """The order lines of an op, after a check against its regimes and kernels.

    Raises:
        RegistrationError: a line names an unknown regime or kernel or has no evidence, or two lines have the same key.
    """
    known = {kernel.name for kernel in kernels}
    seen: set[tuple[str, str]] = set()
    for line in lines:
        where = f"order of {contract.name}: {line.family}/{line.regime}"
        if line.regime not in (*contract.regimes, "*"):
            raise RegistrationError(f"{where}: {contract.name} has no such regime; it has {contract.regimes}")
        if (line.family, line.regime) in seen:
            raise RegistrationError(f"{where}: two lines")
        seen.add((line.family, line.regime))
        unknown = [kernel for kernel in line.kernels if kernel not in known]
        if unknown:
            raise RegistrationError(f"{where}: unknown kernel {unknown[0]}{did_you_mean(unknown[0], known)}")
        if not line.evidence:
            raise RegistrationError(f"{where}: a line needs its evidence")
    return lines


def _allowed_entry_points(plugins: tuple[str, ...]) -> tuple[list[EntryPoint], list[Finding]]:
    """The plugins that may be loaded, and the findings about distributions whose entry points cannot be read."""
    if plugins == ("none",):
        return [], []
    entries, wrong = entry_points(ENTRY_POINT_GROUP)
    if plugins in ((), ("all",)):
        return entries, wrong
    known = [entry.name for entry in entries]
    for name in plugins:
        if name not in known:
            reasons = "".join(f"; {finding.reason}" for finding in wrong)
            raise ConfigurationError(
                f"KERNELHUB_PLUGINS: no installed plugin is named {name!r}{did_you_mean(name, known)}{reasons}"
            )
    return [entry for entry in entries if entry.name in plugins], []
