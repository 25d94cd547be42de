"""The stored evidence about a device, as selection reads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kernelhub.dispatch.constraint import Rejection
from kernelhub.dispatch.machine import Evidence
from kernelhub.dispatch.tuned import TunedTable
from kernelhub.evidence.quarantine import quarantined
from kernelhub.evidence.trust import classes
from kernelhub.evidence.tuning.lookup import check_table, table_from, table_of
from kernelhub.probes.device import DeviceFacts


class _Known:
    """The store of evidence, as `kernelhub.dispatch.machine.Evidence` describes it."""

    def quarantined(self, device: DeviceFacts) -> Mapping[tuple[str, str], Rejection]:
        return quarantined(device)

    def verified(self, device: DeviceFacts) -> Mapping[tuple[str, str], Collection[Any]]:
        return classes(device)

    def measured(self, device: DeviceFacts, files: Sequence[str]) -> TunedTable:
        return table_of(device, files)

    def measured_by(self, document: Mapping[str, Any], device: DeviceFacts) -> TunedTable:
        return table_from(document, device)

    def check(self, document: Mapping[str, Any]) -> None:
        check_table(document)


KNOWN: Evidence = _Known()
