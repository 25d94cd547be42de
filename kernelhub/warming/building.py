"""Kernels that take minutes to compile. Selection accepts them only once they are built; `build=True` builds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernelhub.dispatch.constraint import NOT_BUILT
from kernelhub.dispatch.hub import HUB
from kernelhub.runtime.progress import Heart
from kernelhub.warming.outcome import FAILED
from kernelhub.warming.ready import Sizing, make_ready
from kernelhub.warming.wanted import Item


def unbuilt(item: Item, device: torch.device) -> list[str]:
    """Kernels that would rank above the selected one if they were built, best first."""
    if item.need is None or item.backend is not None:
        return []
    op, problem = HUB.function(item.op).op, item.need.problem(device)
    selection = item.selection(device)
    only = {
        decision.kernel
        for decision in selection.decisions
        if decision.rejections and all(rejection.code == NOT_BUILT for rejection in decision.rejections)
    }
    better = []
    for kernel in op.ranked(problem, None):
        if kernel.name == selection.selected:
            break
        if kernel.name in only:
            better.append(kernel.name)
    return better


def build_better(items: Sequence[Item], device: torch.device, sizing: Sizing, heart: Heart) -> list[str]:
    """Build, for each item, the best kernel that ranks above the selected one; return failures as sentences.

    After the build, probes find the kernel, and selection treats it like any other.
    """
    failed: list[str] = []
    heart.stage("building", len(items))
    for place, item in enumerate(items):
        for kernel in unbuilt(item, device):
            heart.step(f"{item.op} {kernel}", place)
            assert item.need is not None
            asked = Item(item.need, item.tokens[:1], kernel)
            outcome = make_ready(asked, device, sizing)
            with HUB.lock:
                HUB.machine.forget()
                HUB.forget_selections()
            if outcome.how != FAILED:
                break
            failed.append(f"{item.op} {kernel} could not be built: {outcome.reason}")
    return failed
