"""Measurement of one call: check every kernel that supports it against the reference, then time the right ones."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelhub.dispatch.configuration import Configurable, Configuration
from kernelhub.dispatch.kernel import GraphLevel, Kernel
from kernelhub.dispatch.op import OpFunction
from kernelhub.errors import DeviceLost, KernelhubError
from kernelhub.evidence.call import OutOfMemory, Unavailable
from kernelhub.evidence.cases import CASES
from kernelhub.evidence.checks import DeviceUnusable, Subject
from kernelhub.evidence.results import CODES
from kernelhub.evidence.timing import Timing
from kernelhub.evidence.tuning.decide import Time, beats
from kernelhub.evidence.tuning.entry import WRONG, Measured, MeasuredSize
from kernelhub.evidence.tuning.operands import Operands, Room, bytes_of, out_of_memory, rotated
from kernelhub.evidence.tuning.timers import Timer, race
from kernelhub.ops.case import Arguments, Case, OpCases

# Other tiles do not make a kernel the fastest if it takes this many times as long as the fastest.
_WORTH_CONFIGURING = 2.0
_MOST_STAGES = 4
_OF_A_CONFIGURATION = 5  # samples, before interleaved timing with the kernel's default


class MeasurementAborted(Exception):
    """A kernel left the device unusable for this process."""

    def __init__(self, kernel: str, error: BaseException) -> None:
        first = str(error).partition("\n")[0][:300]
        super().__init__(f"{kernel} left the device unusable for this process; restart it ({first})")


@dataclass(frozen=True)
class Limits:
    """Limits of a measurement.

    Attributes:
        room: memory that may be used.
        samples: most samples per kernel.
        sampling_s: seconds per call after which only the fewest samples are taken.
        configurations: whether other sizes of kernels are tried.
        until: `time.monotonic` after which no further configuration is tried.
    """

    room: Room
    samples: int = 30
    sampling_s: float = 2.0
    configurations: bool = True
    until: float = float("inf")


@dataclass
class _Runner:
    """A right kernel, ready for timing."""

    kernel: Kernel
    subject: Subject
    case: Case
    calls: list[Callable[[], object]]
    adapter: Any
    timer: Timer
    configuration: Configuration | None = None
    own: Timing | None = field(default=None)


def measure(
    function: OpFunction[Any, Any, Any],
    kernels: Sequence[Kernel],
    arguments: Arguments,
    tokens: int,
    label: str,
    limits: Limits,
) -> MeasuredSize:
    """Check and time kernels on one call.

    Args:
        function: the op.
        kernels: kernels that support it, in their order.
        arguments: arguments of the call, without destinations; they are not changed.
        tokens, label: description of the call.
        limits: limits of the measurement.

    Raises:
        NoRoom: the operands do not fit.
        MeasurementAborted: a kernel left the device unusable.
    """
    device = limits.room.device
    limits.room.check(bytes_of(arguments))
    cases = _remembering(CASES[function.op.contract.name], arguments)
    case = Case(label=label, make=lambda device: arguments)
    out: dict[str, str] = {}
    right: list[Subject] = []
    for kernel in kernels:
        subject = Subject(function, kernel, cases, device)
        why = _wrong_with(subject, case)
        if why:
            out[kernel.name] = why
        else:
            right.append(subject)
    sets = rotated(cases, arguments, limits.room.copies(bytes_of(arguments)), device) if right else []
    runners = []
    for subject in right:
        made = _tried(functools.partial(_runner, subject, case, sets), out, subject.kernel.name)
        if made is not None:
            runners.append(made)
    if not runners:
        return MeasuredSize(tokens, label, {}, out)
    timings = race([runner.timer for runner in runners], limits.samples, limits.sampling_s * len(runners))
    fastest_s = min(timing.median_s for timing in timings)
    times = {}
    for runner, timing in zip(runners, timings, strict=True):
        close = timing.median_s < _WORTH_CONFIGURING * fastest_s
        if limits.configurations and close and runner.kernel.configurable:
            timing = _configured(runner, tokens, timing, limits)
        times[runner.kernel.name] = Measured(
            1e6 * timing.median_s,
            1e6 * timing.noise_s,
            timing.samples,
            runner.timer.how,
            runner.configuration,
            None if runner.own is None else 1e6 * runner.own.median_s,
        )
    return MeasuredSize(tokens, label, times, out)


def _wrong_with(subject: Subject, case: Case) -> str:
    """Why a kernel is not timed on a call; empty if its result is right.

    Raises:
        MeasurementAborted: nothing can run after this.
    """
    try:
        found = subject.check(case)
    except Unavailable as error:
        return f"cannot run: {error}"
    except OutOfMemory as error:
        return f"out of memory: {str(error).partition(chr(10))[0]}"
    except (DeviceUnusable, DeviceLost) as error:
        raise MeasurementAborted(subject.kernel.name, error) from error
    except Exception as error:
        if out_of_memory(error):
            return f"out of memory: {str(error).partition(chr(10))[0]}"
        raise
    if isinstance(found, str):
        return f"does not support the call: {found}"
    return "" if found.ok else f"{WRONG} {CODES[found.code]}: {found.figures}"


def _runner(subject: Subject, case: Case, sets: Sequence[Operands]) -> _Runner:
    """The kernel's launches on every copy of the operands, warmed up, and captured if possible."""
    kernel = subject.kernel
    made = [operands.call_of(subject.function, kernel.name) for operands in sets]
    adapter, calls = made[0][0].adapter, [call for _, call in made]
    before = None
    if kernel.configurable and isinstance(adapter, Configurable):
        before = functools.partial(adapter.configure, {})  # without earlier measurements
    capture = kernel.graph is not GraphLevel.NONE
    return _Runner(kernel, subject, case, calls, adapter, Timer(calls, subject.device, capture=capture, before=before))


def _configured(runner: _Runner, tokens: int, own: Timing, limits: Limits) -> Timing:
    """Try the kernel's other sizes; returns the timing of the best, stored in the runner, or of the defaults."""
    adapter: Configurable = runner.adapter
    best: Configuration | None = None
    best_time, best_timer = _time(own), runner.timer
    for stage in range(_MOST_STAGES):
        tried = adapter.configurations(tokens, stage, best)
        if not tried:
            break
        for configuration in tried:
            if time.monotonic() > limits.until:
                break
            timer = _tried(functools.partial(_timer, runner, tokens, configuration), {}, runner.kernel.name)
            if timer is None:
                continue
            for _ in range(_OF_A_CONFIGURATION):
                timer.sample()
            if beats(_time(timer.timing), best_time):
                best, best_time, best_timer = configuration, _time(timer.timing), timer
    if best is not None:  # the best of many samples is biased: both are timed again, interleaved
        runner.timer.samples.clear()
        best_timer.samples.clear()
        own, again = race([runner.timer, best_timer], limits.samples, limits.sampling_s)
        if beats(_time(again), _time(own)):
            runner.configuration, runner.own = best, own
            own = again
    adapter.configure({})
    return own


def _timer(runner: _Runner, tokens: int, configuration: Configuration) -> Timer | None:
    """The kernel with other sizes, if its result is right."""
    before = functools.partial(runner.adapter.configure, {tokens: configuration})
    before()
    if _wrong_with(runner.subject, runner.case):
        return None
    capture = runner.kernel.graph is not GraphLevel.NONE
    return Timer(runner.calls, runner.subject.device, capture=capture, before=before)


def _tried(make: Callable[[], Any], out: dict[str, str], name: str) -> Any:
    """The result of `make`; None, with the reason, if the kernel cannot run this way.

    Raises:
        MeasurementAborted: nothing can run after this.
    """
    try:
        return make()
    except (DeviceUnusable, DeviceLost) as error:
        raise MeasurementAborted(name, error) from error
    except MeasurementAborted:
        raise
    except Exception as error:
        first = str(error).partition("\n")[0][:300]
        if out_of_memory(error):
            out[name] = f"out of memory: {first}"
        elif isinstance(error, KernelhubError):
            out[name] = first
        else:
            out[name] = f"raised {type(error).__name__}: {first}"
        return None


def _remembering(cases: OpCases, arguments: Arguments) -> OpCases:
    """The op's cases with the reference of this call computed once, for the checks of all kernels."""

    class Remembering(type(cases)):  # type: ignore[misc]
        _answer: Any

        def expect(self, given: Arguments) -> Any:
            if given is not arguments:
                return super().expect(given)
            if self._answer is None:
                self._answer = super().expect(given)
            return self._answer

    made: OpCases = Remembering.__new__(Remembering)
    made.__dict__.update(vars(cases) | {"_answer": None})
    return made


def _time(timing: Timing) -> Time:
    return Time(1e6 * timing.median_s, 1e6 * timing.noise_s)
