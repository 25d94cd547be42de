"""One guarded call of one kernel.

Destinations are poisoned with NaN, destinations and workspaces are between guards, and inputs are compared with their
values before the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernelhub.dispatch.audits import unaudited
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.op import OpFunction
from kernelhub.errors import (
    CacheError,
    ConfigurationError,
    KernelUnavailable,
    LockTimeout,
    NoKernel,
    NotWarmed,
    RanksDisagree,
)
from kernelhub.evidence.poison import (
    around,
    changed,
    copied,
    inner,
    largest_difference,
    poisoned,
    untouched,
    wide_shape,
)
from kernelhub.evidence.results import CANNOT_LAUNCH
from kernelhub.ops.case import Arguments, Judgement, OpCases
from kernelhub.ops.operands import share_memory
from kernelhub.runtime.scratch import Guarded, watched

# Errors before a launch are no evidence about a kernel: policy, ranks, seal, a full disk.
_NOT_ITS_OWN = (NoKernel, KernelUnavailable, NotWarmed, RanksDisagree, ConfigurationError, CacheError, LockTimeout)


class Unavailable(Exception):
    """The kernel cannot run here at all, which is no evidence about its numbers."""


class OutOfMemory(Exception):
    """There is no room for this case."""


class Failed(Exception):
    """The call itself failed, with a code of `results.CODES`."""

    def __init__(self, code: str, figures: str) -> None:
        self.code = code
        super().__init__(figures)


class Expectations:
    """The expected results of calls, computed once per call and cached for the last two calls."""

    def __init__(self) -> None:
        self._known: tuple[tuple[Arguments, Any], ...] = ()

    def of(self, cases: OpCases, arguments: Arguments) -> Any:
        """The result of `cases.expect` for exactly these arguments."""
        for known, expected in self._known:
            if known is arguments:
                return expected
        made = cases.expect(arguments)
        self._known = (*self._known[-1:], (arguments, made))
        return made


class JudgedResults(NamedTuple):
    """The results of a call, and their judgement."""

    results: dict[str, Tensor]
    judgement: Judgement


@dataclass(frozen=True)
class GuardedCall:
    """A way to call a kernel with guards.

    Attributes:
        function: its op.
        kernel: its record.
        cases: the op's cases.
        device: its device.
        expectations: expected results of its calls.
    """

    function: OpFunction[Any, Any, Any]
    kernel: Kernel
    cases: OpCases
    device: torch.device
    expectations: Expectations = field(default_factory=Expectations)

    def __call__(
        self,
        arguments: Arguments,
        *,
        packed: Arguments | None = None,
        given: Arguments | None = None,
        apart: bool = False,
        own: bool = False,
        places: Mapping[str, Tensor] | None = None,
    ) -> JudgedResults:
        """Call the kernel and judge its results.

        Args:
            arguments: arguments for the expected results.
            packed: arguments with a packed weight, passed to the kernel instead.
            given: operands that already contain these values, passed to the kernel; by default copies.
            apart: make destinations parts of wider tensors.
            own: pass no destinations, so that the kernel allocates its results.
            places: destinations, which may share memory with operands.

        Raises:
            Failed, Unavailable, OutOfMemory: there is no result.
        """
        meant = arguments if packed is None else packed
        given = copied(meant) if given is None else given
        wanted = [] if own or places is not None else self._places(arguments)
        made = {name: self._place(name, *place, apart) for name, place in wanted}
        destinations = {name: place.tensor for name, place in made.items()} | dict(places or {})
        returned, workspaces = self._run(given | destinations)
        guards = [place.guard for place in made.values()]
        for code, where, all_of in (("past_workspace", "workspace", workspaces), ("past_output", "", guards)):
            for guard in all_of:
                if guard.trespassed():
                    raise Failed(code, f"{guard.trespassed()} bytes around {where} {guard.tag!r} were changed")
        for name, place in made.items():
            written = sum(int((~untouched(part)).sum()) for part in place.around)
            if written:
                raise Failed("past_output", f"{written} elements between the rows of {name} were written")
        for name, rows in (self.cases.untouched(arguments) if made else {}).items():
            written = int((~untouched(destinations[name][rows])).sum())
            if written:
                raise Failed("past_output", f"{written} elements of {name} in rows of no sequence were written")
        written_to = {name for name, value in given.items() if places and _lies_in(value, places)}
        spoiled = list(changed(given, meant, {*self._written(given), *written_to}))
        if spoiled:
            raise Failed("input_changed", f"{' and '.join(spoiled)} is not as it was before the call")
        if own:
            destinations = self.cases.returned_for([name for name, _ in self._places(arguments)], returned)
        results = self.cases.results(returned, destinations, given)
        expected = self.expectations.of(self.cases, arguments)
        judgement = self.cases.compare(results, arguments, expected)
        if not judgement.ok:
            where = largest_difference(results, judgement.want)
            judgement = replace(judgement, figures="; ".join(filter(None, (judgement.figures, where))))
        return JudgedResults(results, judgement)

    def _run(self, given: Arguments) -> tuple[Any, list[Guarded]]:
        """The result of the op, and the workspaces that it requested."""
        with watched() as workspaces, unaudited():
            try:
                returned = self.function(**given, backend=self.kernel.name)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            except _NOT_ITS_OWN as error:
                raise Unavailable(why(error, self.kernel.name)) from error
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(str(error)) from error
            except SystemExit as error:
                raise Failed("crashed", f"it raised SystemExit({error.code!r})") from error
            except (ImportError, OSError) as error:
                raise Failed(CANNOT_LAUNCH, f"{type(error).__name__}: {_shortened(error)}") from error
            except Exception as error:
                raise Failed("raised", f"{type(error).__name__}: {_shortened(error)}") from error
        return returned, workspaces

    def _places(self, arguments: Arguments) -> list[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
        return list(self.cases.destinations(arguments).items())

    def _written(self, given: Arguments) -> set[str]:
        """Operands that a call writes to, also those in whose memory it does: a state may be stored where it was."""
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        written = [tensors[name] for name in self.cases.written if name in tensors]
        return {name for name, value in tensors.items() if any(share_memory(value, place) for place in written)}

    def _place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, apart: bool) -> _Destination:
        apart = apart and bool(shape) and name not in self.cases.whole
        guard = poisoned(name, wide_shape(shape, dtype) if apart else shape, dtype, self.device)
        if not apart:
            return _Destination(guard, guard.body.view(dtype).view(shape), ())
        wide = guard.body.view(dtype).view(wide_shape(shape, dtype))
        return _Destination(guard, inner(wide, shape[-1]), around(wide, shape[-1]))


class _Destination(NamedTuple):
    """A destination: the guarded memory, the tensor in it, and the elements between its rows."""

    guard: Guarded
    tensor: Tensor
    around: tuple[Tensor, ...]


def _lies_in(value: Any, places: Mapping[str, Tensor]) -> bool:
    """Whether an argument shares memory with a destination."""
    memory = {place.untyped_storage().data_ptr() for place in places.values()}
    parts = value if isinstance(value, list) else [value]
    return any(isinstance(part, Tensor) and part.untyped_storage().data_ptr() in memory for part in parts)


def why(error: Exception, kernel: str) -> str:
    """Why a kernel cannot run: its rejection, if there is one, else the first line of the error."""
    if isinstance(error, NoKernel):
        found = next((item for item in error.selection.decisions if item.kernel == kernel and item.rejections), None)
        if found is not None:
            return f"{found.rejections[0].code}: {found.rejections[0].reason}"
    return str(error).partition("\n")[0]


def _shortened(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:300]
