"""The settings of `configure` and `use` as plain values, so that a child process selects as its parent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.policy import Layer, Override

_OVERRIDES = ("requests", "prefers", "disables")
_FLAGS = ("deterministic", "batch_invariant", "strict", "unsafe", "trust")


def plain_layers() -> list[dict[str, Any]]:
    """The settings of `configure`, then of each context, outermost first."""
    return [_plain(layer) for layer in (HUB.configured, *HUB.contexts.get())]


def take_over(plain: list[dict[str, Any]]) -> None:
    """Apply in this process what `plain_layers` returned in another one."""
    configured, *contexts = [_layer(item) for item in plain]
    HUB.configure(configured)
    if contexts:
        HUB.contexts_used.append(True)
        HUB.contexts.set(tuple(contexts))


def _plain(layer: Layer) -> dict[str, Any]:
    overrides = {
        name: [
            [override.ops, list(override.names), override.source, override.origin] for override in getattr(layer, name)
        ]
        for name in _OVERRIDES
    }
    return {**overrides, **{name: getattr(layer, name) for name in _FLAGS}}


def _layer(plain: Mapping[str, Any]) -> Layer:
    def overrides(name: str) -> tuple[Override, ...]:
        return tuple(Override(ops, tuple(names), source, origin) for ops, names, source, origin in plain[name])

    return Layer(overrides("requests"), overrides("prefers"), overrides("disables"), *(plain[name] for name in _FLAGS))
