"""Preparation of one item in this process: makes its calls, directly and by a plan, and reports their work."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.gate import GATE
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import is_final
from kernelhub.dispatch.work import JOURNAL, Work
from kernelhub.errors import DeviceLost, InvalidArgument, KernelUnavailable, NoKernel
from kernelhub.ops.models.calls import OpCall, calls_of, holds
from kernelhub.ops.serving import SCALE_BITS
from kernelhub.warming.outcome import BEFORE, COMPILED, DECIDED, FAILED, LOADED, Outcome
from kernelhub.warming.wanted import Item

_WORK = {"compile": COMPILED, "download": COMPILED, "tune": COMPILED, "load": LOADED}
# Messages of compilers, ninja and make when they or their child processes were killed.
_KILLED = re.compile(
    r"\b[Kk]illed\b|signal 9\b|SIGKILL|(?:exit|return|status|code)\D{0,12}(?:-9|137)\b|cannot allocate memory|"
    r"virtual memory exhausted|out of memory allocating|bad_alloc",
    re.IGNORECASE,
)
OUT_OF_MEMORY = "a compiler was killed or failed because memory was exhausted"


@dataclass(frozen=True)
class Sizing:
    """The sizes of a warm-up's calls.

    Attributes:
        context_len: tokens of a sequence in a paged cache.
        max_context_len: tokens that a row of a block table has room for.
    """

    context_len: int
    max_context_len: int


OnCall = Callable[[str], None]


def make_ready(
    item: Item, device: torch.device, sizing: Sizing, on_call: OnCall = lambda label: None, before: bool = False
) -> Outcome:
    """Make an item's calls and report the work they caused. The outcome contains any error.

    Args:
        item: the item.
        device: device of the calls.
        sizing: sizes of the calls.
        on_call: called with the label of each call before it is made.
        before: whether its problem was decided before.

    Raises:
        DeviceLost: a device error, after which this process can prepare nothing.
    """
    begun, count = time.monotonic(), JOURNAL.count
    expected = "" if item.need is None else item.selection(device).selected or ""
    tokens: list[int] = []
    try:
        with torch.no_grad():
            if item.need is None:
                assert item.task is not None
                item.task()
            else:
                for call in _calls(item, device, sizing, _scale_bits(item, device, sizing)):
                    on_call(call.label)
                    make(call, item.backend, packing=item.packing)
                    tokens.append(call.tokens)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except DeviceLost:
        raise
    except InvalidArgument as error:
        return _failed(item, tokens, begun, str(error))
    except torch.OutOfMemoryError as error:
        reason = f"the device has too little memory for it: {error}; give fewer or smaller token_counts"
        return _failed(item, tokens, begun, reason)
    except Exception as error:
        if GATE.lost or is_final(error):
            raise
        explained = isinstance(error, (NoKernel, KernelUnavailable))
        reason = str(error) if explained else f"{type(error).__name__}: {error}"
        return _failed(item, tokens, begun, f"{OUT_OF_MEMORY}: {reason}" if for_want_of_memory(error) else reason)
    work = _work_since(count)
    done = {_WORK[piece.kind] for piece in work if piece.kind in _WORK}
    how = COMPILED if COMPILED in done else LOADED if LOADED in done else BEFORE if before else DECIDED
    kernel, reason = expected, ""
    failure = HUB.machine.load_failures.get((item.op, expected))
    if item.need is not None and failure is not None:
        kernel = item.selection(device).selected or ""
        if _KILLED.search(failure.reason):
            return _failed(item, tokens, begun, f"{OUT_OF_MEMORY}: {expected}: {failure.reason}")
        reason = f"in place of {expected}: {failure.reason}"
    return Outcome(item.op, kernel, item.label, tuple(tokens), how, time.monotonic() - begun, reason)


def make(call: OpCall, backend: str | None, *, packing: bool = False) -> None:
    """Make one call in every way that engines use: directly, by a plan, and with packed weights.

    Args:
        call: the call, with weights as in a checkpoint.
        backend: the kernel that is requested by name.
        packing: as of ``prepare``.
    """
    function, said = HUB.function(call.op), {} if backend is None else {"backend": backend}
    arguments = call.arguments
    plan = function.prepare(**arguments, **said, packing=True) if packing else function.prepare(**arguments, **said)
    packs = hasattr(plan, "pack") and plan.selection.kernel.packs_to
    if packs:
        arguments = _packed(plan, arguments)
        function(**arguments, **said)
        plan = function.prepare(**arguments, **said)
    if not (packs and plan.selection.kernel.needs_packing):
        function(**call.arguments, **said)
    _run(plan, arguments)


def for_want_of_memory(error: BaseException | None) -> bool:
    """Whether an error or one of its causes reports a compiler that was killed for memory."""
    while error is not None:
        code = getattr(error, "returncode", None)
        if code in (-9, 137) or isinstance(error, MemoryError):
            return True
        output = " ".join(str(getattr(error, name, "") or "") for name in ("stderr", "output"))
        if _KILLED.search(f"{error} {output}"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _calls(item: Item, device: torch.device, sizing: Sizing, scale_bits: int | None) -> Any:
    assert item.need is not None
    sizes: dict[str, Any] = {"context_len": sizing.context_len, "max_context_len": sizing.max_context_len}
    record = item.selection(device).kernel
    sizes["every_size"] = record is not None and record.compiles_sizes
    return calls_of(item.need, item.tokens, device, scale_bits=scale_bits, **sizes)


def _scale_bits(item: Item, device: torch.device, sizing: Sizing) -> int | None:
    """Most significant bits of scales in the packed layout of the kernel."""
    record = item.selection(device).kernel
    if not item.packing or record is None or not record.needs_packing:
        return None
    first = replace(item, tokens=item.tokens[:1])
    return next((bits for bits in SCALE_BITS if holds(record, next(_calls(first, device, sizing, bits)))), None)


def _run(plan: Any, arguments: Mapping[str, Any]) -> None:
    """One step of a plan, with lengths on the host, as engines that must not wait pass them."""
    if hasattr(plan, "begin"):
        step = plan.begin(**_taken(plan.begin, arguments))
        step.run(**_taken(step.run, arguments))
    plan.run(**_taken(plan.run, {name: value for name, value in arguments.items() if name not in plan.weights}))


def _taken(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for a function's parameters; ``x_cpu`` is x on the host."""
    found = {}
    for name in inspect.signature(function).parameters:
        if name in arguments:
            found[name] = arguments[name]
        elif isinstance(on_device := arguments.get(name.removesuffix("_cpu")), Tensor):
            found[name] = on_device.tolist()
    return found


def _packed(plan: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with packed weights, without operands that the packed weights contain."""
    given = _taken(plan.pack, arguments)
    made = plan.pack(**given)
    weights = made if isinstance(made, tuple) else (made,)
    rest = {name: value for name, value in arguments.items() if name not in given}
    return rest | dict(zip(given, weights, strict=False))


def _work_since(count: int) -> list[Work]:
    """The work since a position of the journal."""
    new = JOURNAL.count - count
    return list(JOURNAL.work)[-new:] if new else []


def _failed(item: Item, tokens: list[int], begun: float, reason: str) -> Outcome:
    return Outcome(item.op, "", item.label, tuple(tokens), FAILED, time.monotonic() - begun, reason)
