"""Public functions that set or report the state of a process: requests, preferences, backends, the report.

This module checks the arguments. `dispatch.hub` holds the state.
"""

from __future__ import annotations

import contextlib
import difflib
import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from torch.compiler import is_dynamo_compiling

from kernelhub.dispatch.audits import ACTIONS
from kernelhub.dispatch.hub import HUB, keep
from kernelhub.dispatch.policy import Layer, Names, Override, names_of
from kernelhub.dispatch.registry import Registered
from kernelhub.dispatch.report import Report
from kernelhub.dispatch.settings import did_you_mean
from kernelhub.dispatch.standing import TRUSTS
from kernelhub.errors import ConfigurationError

NamesLike = str | Sequence[str]
_PARAMETERS = (
    "backend",
    "prefer",
    "disable",
    "deterministic",
    "batch_invariant",
    "strict",
    "unsafe",
    "trust",
    "audit",
    "audit_action",
)
OverrideLike = NamesLike | Mapping[str, NamesLike]
T = TypeVar("T")

# The `use` that entered each of `HUB.contexts`, in the same order. Blocks may exit in another order than they were
# entered, as those of generators do, and each removes its own layer. Equal arguments give one layer, so that a layer
# does not identify its block.
_entered: ContextVar[tuple[use, ...]] = ContextVar("kernelhub contexts entered", default=())
_ELSEWHERE = (
    "a kernelhub.use() block ends in a task or thread that it was not entered in, usually because a generator was not "
    "closed where it ran; its settings stay in force where it was entered: close the generator there (aclosing)"
)


class use(contextlib.ContextDecorator):
    """Request, prefer or disable kernels inside a block. A context manager and decorator; task-local, nestable.

    A name is that of a backend (``"triton"``), of a kernel (``"triton.split_kv"``), or a glob over kernels
    (``"triton.*"``). The innermost block is the strongest, and an argument that is not given leaves the setting of
    the outer blocks, `configure` and the environment.

    Args:
        backend: name or names that must run every op: the fastest supported kernel of the first name that has one.
            A call that none of them supports raises `NoKernel`.
        prefer: name or names to rank first where they are supported, or a mapping of op to such names.
        disable: name or names that never run, or a mapping of op to such names.
        deterministic: select only kernels whose results are bitwise equal from run to run.
        batch_invariant: select only kernels whose rows do not depend on the other rows of the batch.
        strict: raise `KernelUnavailable` when the selected kernel cannot be loaded, without a fallback.
        unsafe: run a requested kernel even if its record's limits or a known defect reject it.
        trust: evidence that a kernel needs to be selected without a request or preference. ``"here"`` (default): it
            was verified on this family of devices by the project, or on this machine. ``"vendor"``: a vendor's
            statement is enough. ``"measured"``: the project ran it on this family (docs/trust.md).
        ops: op=names, e.g. ``attention="triton"``: as `backend`, for one op.

    Raises:
        ConfigurationError: a name is not that of an op, backend or kernel, or a value is not supported.

    Example:
        >>> import kernelhub
        >>> with kernelhub.use(paged_attention="torch", disable="torch.sdpa"):
        ...     pass
    """

    def __init__(
        self,
        *,
        backend: NamesLike | None = None,
        prefer: OverrideLike = (),
        disable: OverrideLike = (),
        deterministic: bool | None = None,
        batch_invariant: bool | None = None,
        strict: bool | None = None,
        unsafe: bool | None = None,
        trust: str | None = None,
        **ops: NamesLike,
    ) -> None:
        _refuse_inside_compiled_code()
        requests = dict(ops) if backend is None else {**ops, "*": backend}
        self._layer = _layer(
            "context", "use", requests, prefer, disable, deterministic, batch_invariant, strict, unsafe, trust
        )

    def __enter__(self) -> use:
        _refuse_inside_compiled_code()
        if not HUB.contexts_used:
            HUB.contexts_used.append(True)
        HUB.contexts.set((*HUB.contexts.get(), self._layer))
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = _entered.get()
        places = [place for place, one in enumerate(entered) if one is self]
        if not places:
            warnings.warn(_ELSEWHERE, RuntimeWarning, stacklevel=2)
            return
        last = places[-1]
        HUB.contexts.set(_without(HUB.contexts.get(), last))
        _entered.set(_without(entered, last))


def _without(items: tuple[T, ...], place: int) -> tuple[T, ...]:
    return (*items[:place], *items[place + 1 :])


def _refuse_inside_compiled_code() -> None:
    """A compiled graph cannot contain a context: its selection would be frozen, or ignored."""
    if is_dynamo_compiling():
        raise ConfigurationError(
            "kernelhub.use() cannot be entered inside a torch.compile region; enter it around the compiled call"
        )


def strict() -> use:
    """A block without fallbacks: a call raises `KernelUnavailable` if its selected kernel cannot be loaded."""
    return use(strict=True)


def configure(
    *,
    backend: NamesLike | None = None,
    prefer: OverrideLike = (),
    disable: OverrideLike = (),
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    strict: bool | None = None,
    unsafe: bool | None = None,
    trust: str | None = None,
    audit: float | None = None,
    audit_action: str | None = None,
    **ops: NamesLike,
) -> None:
    """Request, prefer or disable kernels in the whole process. The other arguments are those of `use`.

    A call replaces all settings of an earlier one; ``configure()`` removes them. Call it before serving: it discards
    every selection, and the next call of each problem selects again.

    Args:
        audit: share of calls that are recomputed and compared, from 0 to 1; by default KERNELHUB_AUDIT.
        audit_action: ``"record"`` or ``"quarantine"``; by default KERNELHUB_AUDIT_ACTION.

    Raises:
        ConfigurationError: a name is not that of an op, backend or kernel, a value is not supported, or kernelhub is
            sealed.
    """
    requests = dict(ops) if backend is None else {**ops, "*": backend}
    if audit is not None and not (isinstance(audit, int | float) and 0 <= audit <= 1):
        raise ConfigurationError(f"configure: audit is {audit!r}; give a share of calls from 0 to 1, such as 1e-4")
    if audit_action is not None and audit_action not in ACTIONS:
        raise ConfigurationError(f"configure: audit_action is {audit_action!r}; give {' or '.join(map(repr, ACTIONS))}")
    layer = _layer(
        "configure",
        "configure",
        requests,
        prefer,
        disable,
        deterministic,
        batch_invariant,
        strict,
        unsafe,
        trust,
    )
    HUB.configure(replace(layer, audit=audit, audit_action=audit_action))


def report() -> Report:
    """Return the `Report` of this process: the kernels that ran, their calls, and the reason of each selection.

    Print it, or use its `to_dict()`. Calls of ops, plans and steps are counted on the host. A call that is captured in
    a CUDA graph counts once; replays of the graph are not counted, because the host makes no call. If graphs serve
    most steps, the report lists the kernels in them, and a profiler shows how often they ran.
    """
    return HUB.report()


def reload() -> None:
    """Read the KERNELHUB_* variables, the config file and the plugins again, and discard probe results and selections.

    Settings of `configure` and backends of `register_backend` stay. An agreement of ranks ends.

    Raises:
        ConfigurationError: a variable or the config file is invalid, or kernelhub is sealed.
    """
    HUB.reload()


@dataclass(frozen=True)
class BackendHandle:
    """A backend registered at run time.

    Attributes:
        registered: its name, module and records.
    """

    registered: Registered

    def remove(self) -> None:
        """Unregister the backend, and discard every selection.

        Raises:
            ConfigurationError: kernelhub is sealed.
        """
        HUB.remove_backend(self.registered.name)


def register_backend(module: Any) -> BackendHandle:
    """Register a backend in this process, as an entry point of `kernelhub.backends` does, and discard every selection.

    Args:
        module: a module or object with the attributes `BACKEND` (a `Backend`), `KERNELS` (a tuple of `Kernel`) and
            optionally `KNOWN_BAD` (a tuple of `KnownBad`); see `kernelhub.dispatch.kernel`.

    Returns:
        A handle whose `remove()` unregisters the backend.

    Raises:
        RegistrationError: a record contradicts the schema of its op, or the name is already registered.
        ConfigurationError: kernelhub is sealed.
    """
    return BackendHandle(HUB.add_backend(module))


def _layer(
    source: str,
    word: str,
    requests: Mapping[str, NamesLike],
    prefer: OverrideLike,
    disable: OverrideLike,
    deterministic: bool | None,
    batch_invariant: bool | None,
    strict: bool | None,
    unsafe: bool | None,
    trust: str | None,
) -> Layer:
    """The layer that the arguments describe; equal arguments give the same object."""

    def overrides(given: OverrideLike, parameter: str) -> tuple[Override, ...]:
        table = given if isinstance(given, Mapping) else {"*": given}
        return tuple(
            Override(op, names, source, _origin(word, parameter or op, op, names))
            for op, likes in table.items()
            if (names := names_of(likes, f"{word}({parameter or ('backend' if op == '*' else op)}=...)"))
        )

    _ = HUB.settings
    for op in requests:
        close = difflib.get_close_matches(op, (*HUB.registry.contracts, *_PARAMETERS), n=1, cutoff=0.75)
        if close and close[0] in _PARAMETERS:
            raise ConfigurationError(f"{word}({op}=...): {op!r} is not a parameter or op (did you mean {close[0]}?)")
    if trust is not None and trust not in TRUSTS:
        near = did_you_mean(trust, TRUSTS)
        raise ConfigurationError(f"{word}: trust is {trust!r}{near}; give {', '.join(map(repr, TRUSTS))}")
    flags = (deterministic, batch_invariant, strict, unsafe)
    for name, flag in zip(("deterministic", "batch_invariant", "strict", "unsafe"), flags, strict=True):
        if flag is not None and not isinstance(flag, bool):
            raise ConfigurationError(f"{word}: {name} is {flag!r}; give True or False, or leave it out")
    parts = (overrides(requests, ""), overrides(prefer, "prefer"), overrides(disable, "disable"))
    layer = Layer(*parts, *flags, trust=trust)
    HUB.registry.check_layer(layer)
    with HUB.lock:
        key = (*parts, *flags, trust)
        known = HUB.layers.get(key)
        if known is None:
            keep(HUB.layers, key, layer)
        return known or layer


def _origin(word: str, parameter: str, op: str, names: Names) -> str:
    """The override as the user wrote it, e.g. ``use(disable='triton')``."""
    given: Any = names[0] if len(names) == 1 else list(names)
    if parameter == op:
        return f"{word}({'backend' if op == '*' else op}={given!r})"
    return f"{word}({parameter}={given!r})" if op == "*" else f"{word}({parameter}={{{op!r}: {given!r}}})"
