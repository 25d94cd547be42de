"""Public functions that change or report the state of a process: preferences, registered backends, the report."""

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

# Who entered each of `HUB.contexts`, in the same order: blocks may end in another order than they began, as those of
# generators do, and each takes out its own layer. Layers alone do not tell, since equal words are one layer.
_entered: ContextVar[tuple[use, ...]] = ContextVar("kernelhub contexts entered", default=())
_ELSEWHERE = (
    "a kernelhub.use() block ends in a task or thread that it was not entered in, most often that of a generator which "
    "was not closed where it ran: its words stay in force where it was entered; close the generator there (aclosing)"
)


class use(contextlib.ContextDecorator):
    """Say what runs inside a block: task-local, nestable, also a decorator.

    Args:
        backend: these, for every op.
        prefer: rank these first where they can run: names, or a mapping of op to names.
        disable: never these: names, or a mapping of op to names.
        deterministic: only kernels that repeat bit for bit.
        batch_invariant: only kernels whose rows do not depend on the rest of the batch.
        strict: never fall to another kernel; raise instead.
        unsafe: let an explicit choice run past its kernel's own limits and known defects.
        trust: on whose word a kernel may be chosen that nobody names: ``"here"``, it was verified on this family of
            devices, by the project or on this machine; ``"vendor"``, a vendor's statement suffices too;
            ``"measured"``, the project ran it on this family (docs/trust.md).
        ops: for each op named, the backends or kernels that run it, first supported one.

    Raises:
        ConfigurationError: a name means no op, no backend and no kernel.

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
    """A graph cannot hold a context: the choice would be frozen, or forgotten."""
    if is_dynamo_compiling():
        raise ConfigurationError(
            "kernelhub.use() cannot be entered inside a torch.compile region; enter it around the compiled call"
        )


def strict() -> use:
    """A block in which no choice may fall to another kernel: what cannot run raises."""
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
    """Say what runs in this process; arguments as of `use`. Replaces what an earlier call said.

    Call it before serving: every choice made so far is made again at its next call.

    Args:
        audit: the share of calls, from 0 to 1, that are recomputed and compared; by default KERNELHUB_AUDIT.
        audit_action: ``"record"`` or ``"quarantine"``; by default KERNELHUB_AUDIT_ACTION.
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
    """What ran in this process, how often, and why; print it, or take `to_dict()`.

    Calls of ops, plans and steps are counted on the host. A call that is made while a CUDA graph is captured counts
    once, and a replay of that graph not at all: the host makes no call then. Where a graph serves most steps, the
    numbers tell which kernels are in it, and a profiler how often they ran.
    """
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
    """The layer that the arguments describe; the same one each time the same is said."""

    def overrides(said: OverrideLike, parameter: str) -> tuple[Override, ...]:
        table = said if isinstance(said, Mapping) else {"*": said}
        return tuple(
            Override(op, names, source, _origin(word, parameter or op, op, names))
            for op, likes in table.items()
            if (names := names_of(likes, f"{word}({parameter or ('backend' if op == '*' else op)}=...)"))
        )

    if trust is not None and trust not in TRUSTS:
        near = did_you_mean(trust, TRUSTS) if isinstance(trust, str) else ""
        raise ConfigurationError(f"{word}: trust is {trust!r}{near}; give {', '.join(map(repr, TRUSTS))}")
    flags = (deterministic, batch_invariant, strict, unsafe)
    parts = (overrides(requests, ""), overrides(prefer, "prefer"), overrides(disable, "disable"))
    layer = Layer(*parts, *flags, trust=trust)
    _ = HUB.settings
    for op in requests:
        close = difflib.get_close_matches(op, (*HUB.registry.contracts, *_PARAMETERS), n=1, cutoff=0.75)
        if close and close[0] in _PARAMETERS:
            raise ConfigurationError(f"{word}({op}=...): {op!r} is no parameter and no op (did you mean {close[0]}?)")
    HUB.registry.check_layer(layer)
    with HUB.lock:
        key = (*parts, *flags, trust)
        known = HUB.layers.get(key)
        if known is None:
            keep(HUB.layers, key, layer)
        return known or layer


def _origin(word: str, parameter: str, op: str, names: Names) -> str:
    """The override as the user wrote it, e.g. ``use(disable='triton')``."""
    said: Any = names[0] if len(names) == 1 else list(names)
    if parameter == op:
        return f"{word}({'backend' if op == '*' else op}={said!r})"
    return f"{word}({parameter}={said!r})" if op == "*" else f"{word}({parameter}={{{op!r}: {said!r}}})"
