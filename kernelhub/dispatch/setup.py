"""What happens at the first decision and at a reload: settings are read, ops and backends registered, both checked."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kernelhub.dispatch.contract import OpRecord
from kernelhub.dispatch.events import fallback_log, print_events
from kernelhub.dispatch.foreign import read_foreign
from kernelhub.dispatch.lock_file import check_lock
from kernelhub.dispatch.registry import Registry
from kernelhub.dispatch.settings import Settings, read_settings


def ops() -> dict[str, Any]:
    """The public function of every op, by name."""
    functions = importlib.import_module("kernelhub.ops").functions()
    return {function.op.contract.name: function for function in functions}


def op_records() -> tuple[OpRecord[Any], ...]:
    """Every op as data, which needs no torch."""
    records: tuple[OpRecord[Any], ...] = importlib.import_module("kernelhub.ops.records").OPS
    return records


def set_up(registry: Registry, contracts: Iterable[OpRecord[Any]], added: Iterable[Any]) -> Settings:
    """The settings, once everything that they may name is registered.

    Args:
        registry: is filled.
        contracts: every op.
        added: backends that were registered at run time.

    Raises:
        ConfigurationError: a variable or file says what cannot be, or names what does not exist.
        RegistrationError: a record contradicts the schema of its op.
    """
    settings = read_settings()
    registry.load(contracts, settings["KERNELHUB_PLUGINS"], settings["KERNELHUB_LOAD_TIMEOUT_S"])
    for module in added:
        registry.add(module)
    for layer in (settings.force, settings.environment, settings.file):
        registry.check_layer(layer)
    if settings.lock is not None:
        check_lock(settings.lock, registry.contracts)
    print_events(settings["KERNELHUB_LOG"])
    return settings if settings["KERNELHUB_IGNORE_VLLM_ENV"] else _with_foreign(settings, registry)


def _with_foreign(settings: Settings, registry: Registry) -> Settings:
    """The settings with what other projects' variables say; of what names nothing here it is said once."""
    settings = replace(settings, foreign=read_foreign())
    met = {override.origin for override in registry.known_part(settings.foreign).requests}
    for origin in dict.fromkeys(override.origin for override in settings.foreign.requests):
        if origin not in met:
            fallback_log.warning("%s is not obeyed: none of the kernels it names is registered", origin)
    return settings
