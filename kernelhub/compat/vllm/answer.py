"""Yes-or-no queries of vLLM's modules, which here also give a reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, ParamSpec

from kernelhub.dispatch.hub import HUB
from kernelhub.probes.finding import Finding

P = ParamSpec("P")


class Answer(Generic[P]):
    """A function that returns a bool; ``why(...)`` returns the finding behind it.

    Results are cached in `HUB.machine`; `kernelhub.reload()` and ``cache_clear()`` clear them.
    """

    def __init__(self, question: Callable[P, Finding]) -> None:
        functools.update_wrapper(self, question)
        self.why = question

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        return self.why(*args, **kwargs).ok

    @staticmethod
    def cache_clear() -> None:
        """Clear the cached results of all probes, as the function of that name does in vLLM."""
        HUB.machine.forget()
        HUB.forget_selections()


def answer(question: Callable[P, Finding]) -> Answer[P]:
    """Decorate a function that returns a finding, so that it returns a bool."""
    return Answer(question)


def first_bad(*findings: Finding) -> Finding:
    """The first negative finding, else the last finding."""
    return next((finding for finding in findings if not finding.ok), findings[-1])
