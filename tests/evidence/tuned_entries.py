"""Measurements as `kernelhub.tune` keeps them, written out for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import kernelhub
from kernelhub.dispatch.fingerprint import record_digest
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.problem_class import facets_of
from kernelhub.evidence.tuning import tables
from kernelhub.evidence.tuning.entry import Kind, Measured, MeasuredSize, TuningEntry
from kernelhub.probes.device import facts

CPU = facts(torch.device("cpu"))
DATE = "2026-11-21T02:00:00+00:00"


def entry(op: str, facets: Mapping[str, Any], us: Mapping[str, float], tokens: int = 4, **more: Any) -> TuningEntry:
    """One size of a problem class, in which kernels took so many microseconds; the fastest is chosen."""
    problem = kernelhub.explain(op, device="cpu", **facets).problem
    records = {kernel.name: kernel for kernel in HUB.registry.candidates(op).kernels}
    kinds = {name: Kind(HUB.versions_of(records[name]), record_digest(records[name])) for name in us}
    times = {name: Measured(value, 0.01 * value, 9, "clock", **more.get(name, {})) for name, value in us.items()}
    ranking = tuple(sorted(us, key=lambda name: us[name]))
    regime = HUB.registry.contracts[op].regime(problem)
    size = MeasuredSize(tokens, f"{op}, {tokens} tokens", times)
    return TuningEntry(
        op, facets_of(problem), regime, tuple(reversed(ranking)), ranking, "faster", (size,), kinds, DATE
    )


def keep(*entries: TuningEntry) -> None:
    """Have selection read these from now on."""
    tables.keep(CPU, entries)
    HUB.forget_evidence()
