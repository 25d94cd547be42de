"""The errors of a choice that stands where nothing may take its place: no kernel can run, or the chosen one is gone."""

from __future__ import annotations

from typing import Any

from kernelhub.dispatch.held import LOCK
from kernelhub.dispatch.load import LoadFailure
from kernelhub.dispatch.policy import Policy
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import KernelUnavailable, NoKernel


def no_kernel(selection: Selection[Any], policy: Policy) -> NoKernel:
    """Nothing that may run a problem can run it.

    Args:
        selection: the selection.
        policy: what the user said about the problem.
    """
    return NoKernel(_no_kernel_message(selection, policy), selection)


def unavailable(selection: Selection[Any], failure: LoadFailure, strict: bool) -> KernelUnavailable:
    """The chosen kernel cannot be loaded, and nothing may take its place: `strict` is on, or kernelhub is sealed."""
    why = "strict is on" if strict else "kernelhub is sealed"
    return KernelUnavailable(
        f"{selection.op}: {selection.selected} was chosen ({selection.because}) but {failure.reason}, and {why}; "
        f"{failure.remedy}"
    )


def _no_kernel_message(selection: Selection[Any], policy: Policy) -> str:
    request = policy.request_for(selection.op)
    if request is None:
        return f"{selection.op}: no registered kernel can run this."
    if request.source == LOCK and not any(item.kernel in request.names for item in selection.decisions):
        return (
            f"{selection.op}: {request.origin} holds {request.names[0]}, and no kernel of that name is registered in "
            f"this version. To take that back, {request.undo}."
        )
    message = f"{selection.op}: {request.origin} asks for {' or '.join(request.names)}, which cannot run this."
    return f"{message} To take that back, {request.undo}." if request.undo else message
