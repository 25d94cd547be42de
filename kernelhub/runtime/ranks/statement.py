"""The statement of one rank: its versions, its settings, and its selection for every problem class."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kernelhub.dispatch.fingerprint import digest, own_version, record_digest
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.plan import Plan
from kernelhub.dispatch.policy import Layer
from kernelhub.dispatch.problem_class import facets_of
from kernelhub.dispatch.selection import Selection
from kernelhub.dispatch.settings import Setting
from kernelhub.errors import ConfigurationError
from kernelhub.ops.models.problems import Need
from kernelhub.probes.device import DeviceFacts

# Variables that can change a selection.
_CHOOSING = (
    "KERNELHUB_FORCE", "KERNELHUB_PREFER", "KERNELHUB_DISABLE", "KERNELHUB_DETERMINISTIC", "KERNELHUB_BATCH_INVARIANT",
    "KERNELHUB_STRICT", "KERNELHUB_PLUGINS", "KERNELHUB_IGNORE_VLLM_ENV", "KERNELHUB_LOCK_MISSING",
    "KERNELHUB_EVIDENCE",
)  # fmt: skip


@dataclass(frozen=True)
class Stated:
    """A rank's selections by key of the problem class, its plans, and whether weights will be packed."""

    selections: Mapping[str, Selection[Any]]
    plans: Mapping[str, tuple[Plan, ...]]
    packing: bool = False


def state(what: Iterable[Plan | Need | Selection[Any]], device: DeviceFacts, packing: bool = False) -> Stated:
    """This rank's selections.

    Args:
        what: plans and selections, used as they are; for a need the selection is made now. Those of the ops that a
            kernel is made of are among the result.
        device: device of the needs.
        packing: whether weights of needs are packed before the selected kernel runs.

    Raises:
        ConfigurationError: two plans of one problem class run different kernels.
    """
    selections: dict[str, Selection[Any]] = {}
    plans: dict[str, tuple[Plan, ...]] = {}
    for item in what:
        if isinstance(item, Need):
            function = HUB.function(item.op)
            selection = function.op.select(item.problem(device), None, packing=packing)
        else:
            selection = item.selection if isinstance(item, Plan) else item
        for one in (selection, *selection.parts):
            key = key_of(one)
            known = selections.setdefault(key, one)
            if known.selected != one.selected:
                raise ConfigurationError(
                    f"agree: plans of one problem class run {known.selected} and {one.selected} ({key}); ranks hold "
                    "one kernel for each class"
                )
        if isinstance(item, Plan):
            key = key_of(selection)
            plans[key] = (*plans.get(key, ()), item)
    return Stated(selections, plans, packing)


def key_of(selection: Selection[Any]) -> str:
    """The problem class of a selection, as text: the op, then its facets."""
    return f"{selection.op} {json.dumps(dict(facets_of(selection.problem)), sort_keys=True)}"


def statement_of(stated: Stated, rank: int, where: str, tuned: str) -> dict[str, Any]:
    """The statement as plain values.

    Args:
        stated: the rank's selections.
        rank: its number in the group.
        where: host and process, for messages.
        tuned: digest of the rank's own results of tuning.
    """
    kernels: dict[str, dict[str, Any]] = {}
    for selection in stated.selections.values():
        records = {kernel.name: kernel for kernel in HUB.registry.candidates(selection.op).kernels}
        known = kernels.setdefault(selection.op, {})
        for decision in selection.decisions:
            if decision.accepted and decision.kernel not in known:
                kernel = records[decision.kernel]
                known[kernel.name] = {"versions": HUB.versions_of(kernel), "record": record_digest(kernel)}
    return {
        "rank": rank,
        "where": where,
        "kernelhub": own_version(),
        "policy": policy_words() | ({"packing": "True"} if stated.packing else {}),
        "strict": HUB.policy(next(iter(HUB.registry.contracts)), None, HUB.contexts.get()).strict,
        "tuned": tuned,
        "kernels": kernels,
        "selections": {key: _selection(selection) for key, selection in stated.selections.items()},
    }


def policy_words() -> dict[str, str]:
    """All settings of this process that can change a selection, by source."""
    settings = HUB.settings
    words = {name: _said(settings.values[name]) for name in _CHOOSING}
    words["the config file"] = _words(settings.file)
    words["variables of other projects"] = _words(settings.foreign)
    words["the lock file"] = settings.lock.digest[:16] if settings.lock else ""
    words["configure()"] = _words(HUB.configured)
    words["use()"] = "; ".join(filter(None, map(_words, HUB.contexts.get())))
    return {place: said for place, said in words.items() if said}


def _said(setting: Setting) -> str:
    """The normalised value of a variable; empty if it is the default."""
    if setting.value == setting.variable.default:
        return ""
    return str(setting.value) if isinstance(setting.value, bool) else setting.text or ""


def _words(layer: Layer) -> str:
    parts = [
        f"{kind} {override.ops}={','.join(override.names)}"
        for kind, overrides in (("request", layer.requests), ("prefer", layer.prefers), ("disable", layer.disables))
        for override in overrides
    ]
    for flag in ("deterministic", "batch_invariant", "strict", "unsafe", "trust"):
        if getattr(layer, flag) is not None:
            parts.append(f"{flag}={getattr(layer, flag)}")
    return ", ".join(parts)


def _selection(selection: Selection[Any]) -> dict[str, Any]:
    return {
        "order": [item.kernel for item in selection.decisions if item.accepted],
        "because": f"{selection.source}: {selection.because}",
        "refused": {
            item.kernel: [item.code, item.reason, item.remedy] for item in selection.decisions if not item.accepted
        },
    }


def table_digest(table: Mapping[str, Any]) -> str:
    """Digest of a table of tuning results; empty for an empty one."""
    return digest(dict(table)) if table else ""
