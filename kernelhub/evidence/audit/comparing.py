"""One audited call held against the op's reference, or first against another kernel, by the op's own judge.

The judge is `OpCases.judge`, the one that `kernelhub.verify` asks, so that both mean the same by right. A kernel is
found wrong by the reference alone. Another kernel that answers the same within the tolerance spares the reference's
time and memory; where it answers otherwise, the reference decides, and where that takes too much the call is disputed.
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
    """What came of a comparison.

    Attributes:
        outcome: ``"right"``, ``"wrong"``, ``"disputed"`` or ``"no_numbers"``.
        code: of what is wrong, a key of `results.CODES`; empty unless it is.
        ratio: the largest error over what is allowed.
        figures: the error in words.
        by: what it was held against: ``"reference"`` or the name of a kernel.
    """

    outcome: str
    code: str = ""
    ratio: float = 0.0
    figures: str = ""
    by: str = "reference"


@dataclass
class Others:
    """The kernels that may be asked before the reference: of another backend, able, and verified on this machine.

    Their standing is read once. After `kernelhub.seal` one answers only if it was made ready before; what it would
    have to compile or load is refused there as for any call, and the reference is taken.
    """

    selection: Selection[Any]
    _names: list[str] | None = field(default=None)

    def names(self) -> list[str]:
        """Their names, best first."""
        if self._names is None:
            self._names = [kernel.name for kernel in self._able() if self._is_right(kernel)]
        return self._names

    def drop(self, name: str) -> None:
        """Compare with this kernel no more."""
        self._names = [other for other in self.names() if other != name]

    def _able(self) -> list[Kernel]:
        """Those against which nothing speaks but that another was asked for; none under KERNELHUB_FORCE."""
        chosen = self.selection.kernel
        if chosen is None or self.selection.source == "force":
            return []
        records = {kernel.name: kernel for kernel in HUB.registry.candidates(self.selection.op).kernels}
        able = [item.kernel for item in self.selection.decisions if item.accepted or item.code == "not_requested"]
        return [records[name] for name in able if name in records and records[name].backend != chosen.backend]

    def _is_right(self, kernel: Kernel) -> bool:
        record = kept_of(kernel, self.selection.problem.device)
        return record is not None and record.result.status == RIGHT


def compared(
    cases: OpCases, results: Mapping[str, Tensor], arguments: Arguments, others: Others, *, affordable: bool
) -> Comparison:
    """Hold results against another kernel, the reference, or both.

    Args:
        cases: of the op.
        results: what the kernel gave, by the names that the judge knows.
        arguments: as before the launch.
        others: kernels that may be asked.
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
        except KernelhubError:  # it cannot answer this after all, or kernelhub is sealed and it was not made ready
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
    """The same judge, with a kernel in the reference's place."""

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
    """Whether the reference gives NaN, or more than the result's dtype holds, where the op is to write.

    Rows that an engine pads with what was there before give such; a kernel is not to blame for what it makes of them.
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
