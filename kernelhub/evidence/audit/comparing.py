"""Comparison of one audited call with the op's reference, or first with another kernel, by the op's tolerance.

`OpCases.judge` compares, as in `kernelhub.verify`, so that right means the same in both. Only the reference can prove a
kernel wrong. If another kernel gives the same result within the tolerance, the reference is not computed, which saves
time and memory. If the two differ, the reference decides; if it would take too much memory, the call is disputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kernelhub.dispatch.api import use
from kernelhub.dispatch.audits import unaudited
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.dispatch.selection import Selection
from kernelhub.errors import KernelhubError
from kernelhub.evidence.poison import kind_of_error
from kernelhub.evidence.quarantine import kept_of
from kernelhub.evidence.results import RIGHT
from kernelhub.ops.case import Arguments, Judgement, OpCases
from kernelhub.ops.precision import without_autocast

RIGHT_NUMBERS, WRONG_NUMBERS, DISPUTED, NO_NUMBERS = "right", "wrong", "disputed", "no_numbers"


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        outcome: ``"right"``, ``"wrong"``, ``"disputed"`` or ``"no_numbers"``.
        code: code of the fault, a key of `results.CODES`; empty if it is right.
        ratio: the largest error relative to the tolerance.
        figures: the error in words.
        by: what it was compared with: ``"reference"`` or the name of a kernel.
    """

    outcome: str
    code: str = ""
    ratio: float = 0.0
    figures: str = ""
    by: str = "reference"


@dataclass
class Others:
    """Kernels that may be compared before the reference: of another backend, supported, and verified on this machine.

    Their standing is read once. After `kernelhub.seal` such a kernel runs only if it was prepared before; otherwise its
    call is refused like any other, and the reference is computed.
    """

    selection: Selection[Any]
    _names: list[str] | None = field(default=None)

    def names(self) -> list[str]:
        """The names of the kernels, best first."""
        if self._names is None:
            self._names = [kernel.name for kernel in self._supported() if self._is_right(kernel)]
        return self._names

    def drop(self, name: str) -> None:
        """Stop comparing with this kernel."""
        self._names = [other for other in self.names() if other != name]

    def _supported(self) -> list[Kernel]:
        """Kernels whose only rejection is that another one was requested; none under KERNELHUB_FORCE."""
        chosen = self.selection.kernel
        if chosen is None or self.selection.source == "force":
            return []
        records = {kernel.name: kernel for kernel in HUB.registry.candidates(self.selection.op).kernels}
        supported = [item.kernel for item in self.selection.decisions if item.accepted or item.code == "not_requested"]
        return [records[name] for name in supported if name in records and records[name].backend != chosen.backend]

    def _is_right(self, kernel: Kernel) -> bool:
        record = kept_of(kernel, self.selection.problem.device)
        return record is not None and record.result.status == RIGHT


def compared(
    cases: OpCases, results: Mapping[str, Tensor], arguments: Arguments, others: Others, *, affordable: bool
) -> Comparison:
    """Compare results with another kernel, the reference, or both.

    Args:
        cases: cases of the op.
        results: results of the kernel, by the names of `OpCases.judge`.
        arguments: arguments as before the launch.
        others: kernels that may be compared.
        affordable: whether the reference may be computed.
    """
    with unaudited(), torch.inference_mode(False), torch.no_grad():
        return _compared(cases, results, arguments, others, affordable)


@without_autocast
def _compared(
    cases: OpCases, results: Mapping[str, Tensor], arguments: Arguments, others: Others, affordable: bool
) -> Comparison:
    disputed: Comparison | None = None
    for name in others.names()[:1]:
        try:
            with HUB.ledger.unreported():
                judgement = _answering(cases, name).judge(results, arguments)
        except KernelhubError:  # the call is unsupported, or kernelhub is sealed and the kernel is not ready
            others.drop(name)
            continue
        if judgement.ok:
            return Comparison(RIGHT_NUMBERS, by=name)
        disputed = Comparison(DISPUTED, "", judgement.ratio, judgement.figures, name)
    if not affordable:
        return disputed or Comparison(NO_NUMBERS)
    judgement = cases.judge(results, arguments)
    if judgement.ok:
        return Comparison(RIGHT_NUMBERS, ratio=judgement.ratio)
    if not cases.exact and _no_numbers(cases, results, arguments, judgement):
        return Comparison(NO_NUMBERS, ratio=judgement.ratio, figures=judgement.figures)
    code = kind_of_error(results, judgement)
    return Comparison(WRONG_NUMBERS, code, judgement.ratio, judgement.figures)


def _answering(cases: OpCases, kernel: str) -> OpCases:
    """The op's cases, with a kernel in place of the reference."""

    class Answering(type(cases)):  # type: ignore[misc]
        @property
        def reference(self) -> Any:
            def answer(*args: Any, dtype: Any = None, compute_dtype: Any = None, **kwargs: Any) -> Any:
                with use(strict=True):
                    made = HUB.function(cases.op)(*args, **kwargs, backend=kernel)
                wide = dtype or compute_dtype
                return made if wide is None else _widened(made, wide)

            return answer

    made: OpCases = Answering.__new__(Answering)
    made.__dict__.update(vars(cases))
    return made


def _widened(made: Any, dtype: torch.dtype) -> Any:
    if isinstance(made, tuple):
        return tuple(_widened(part, dtype) for part in made)
    return made.to(dtype) if made.is_floating_point() else made


def _no_numbers(cases: OpCases, results: Mapping[str, Tensor], arguments: Arguments, judgement: Judgement) -> bool:
    """Whether the reference gives NaN or overflows the result's dtype in a place that the op writes.

    Rows that an engine pads with stale values cause this; a kernel's result for them has no meaning.
    """
    past = cases.untouched(arguments)
    for name, want in judgement.want.items():
        got = results.get(name)
        if got is None or not want.is_floating_point() or want.itemsize == 1 or not got.is_floating_point():
            continue
        mine = want[~past[name]] if name in past and want.shape[:1] == past[name].shape[:1] else want
        if name in past and want.ndim > 1 and past[name].ndim > 1:
            mine = want[~past[name]]
        most = torch.finfo(got.dtype).max
        if bool((mine.isnan() | (mine == torch.inf) | ((mine.abs() > most) & mine.isfinite())).any()):
            return True
    return False
