"""The calls to DeepEP, compared with a release of it; a DeepEP of the second generation is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernelhub.backends.deep_ep import requirements
from kernelhub.dispatch.constraint import Takes
from kernelhub.probes.signature import Call, takes
from tests.providers.wheels import wheel

FIRST = ("tokenspeed-deepep", "1.2.1.post20251110")
SECOND = ("tokenspeed-deepep", "2.0.0.post20260430")
_LIMITS: tuple[Any, ...] = (*requirements.DISPATCH_MACHINE, *requirements.COMBINE_MACHINE)
CALLS = list(dict.fromkeys(limit.call for limit in _LIMITS if isinstance(limit, Takes)))


@pytest.fixture(scope="module")
def first() -> Path:
    return wheel(*FIRST)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.target)
def test_the_first_generation_takes_our_calls(first: Path, call: Call) -> None:
    finding = takes(call, root=first / "deep_ep")
    assert finding.ok, finding.reason


def test_it_has_the_compiled_module(first: Path) -> None:
    assert list(first.glob("deep_ep_cpp*.so"))


def test_the_second_generation_is_refused() -> None:
    folder = wheel(*SECOND)
    assert not all(takes(call, root=folder / "deep_ep").ok for call in CALLS)
