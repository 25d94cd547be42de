"""A question that vLLM's modules answer with yes or no, and here with a reason too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, ParamSpec

from kernelhub.dispatch.hub import HUB
from kernelhub.probes.finding import Finding

P = ParamSpec("P")


class Answer(Generic[P]):
    """A function that says yes or no; ``why(...)`` gives the finding behind it.

    Answers rest on what `HUB.machine` remembers, which `kernelhub.reload()` and ``cache_clear()`` forget.
    """

    def __init__(self, question: Callable[P, Finding]) -> None:
        functools.update_wrapper(self, question)
        self.why = question

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        return self.why(*args, **kwargs).ok

    @staticmethod
    def cache_clear() -> None:
        """Run every probe again, as the function of that name on vLLM's cached ones."""
        HUB.machine.forget()
        HUB.forget_choices()


def answer(question: Callable[P, Finding]) -> Answer[P]:
    """Make a function that finds something one that says yes or no."""
    return Answer(question)


def first_bad(*findings: Finding) -> Finding:
    """The first finding that is not good enough, else the last."""
    return next((finding for finding in findings if not finding.ok), findings[-1])
