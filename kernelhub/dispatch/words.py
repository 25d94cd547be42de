"""What was said about an op from every place, put together as its policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from kernelhub.dispatch.held import Held
from kernelhub.dispatch.policy import Layer, Names, Policy, combine
from kernelhub.dispatch.registry import Registry
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.settings import Settings

Layers = tuple[Layer, ...]


class Agreed(Protocol):
    """What ranks agreed on for one op."""

    @property
    def held(self) -> Held: ...

    def check(self, selection: Selection[Any]) -> None:
        """Raise if this rank chose another kernel than was agreed on."""


def policy_for(
    op: str,
    backend: Names | None,
    contexts: Layers,
    configured: Layer,
    settings: Settings,
    agreed: Mapping[str, Agreed],
    registry: Registry,
) -> Policy:
    """The policy of an op.

    Args:
        op: its name.
        backend: ``backend=`` of the call.
        contexts: the contexts that the call is in, outermost first.
        configured: what `configure` said.
        settings: the environment, the config file and the lock file.
        agreed: what ranks agreed on, by op.
        registry: the kernels there are.

    Raises:
        ConfigurationError: `backend` names no backend and no kernel.
    """
    layers = (settings.force, *reversed(contexts), configured, settings.environment, settings.file)
    policy = combine(layers, registry.known_part(settings.foreign), op)
    if backend is not None:
        registry.check_names(backend, "backend=")
        policy = policy.asking(op, backend)
    held = _held(op, settings, agreed, registry)
    return replace(policy, held=held) if held else policy


def _held(op: str, settings: Settings, agreed: Mapping[str, Agreed], registry: Registry) -> tuple[Held, ...]:
    """What stands fixed for an op, strongest first."""
    held = []
    if op in agreed:
        held.append(agreed[op].held)
    if settings.lock is not None:
        closed = settings["KERNELHUB_LOCK_MISSING"] == "error"
        layouts = {kernel.name: kernel.layouts for kernel in registry.candidates(op).kernels}
        held.append(settings.lock.held(registry.contracts[op], layouts, closed))
    return tuple(held)
