"""A record says how it stands on each family of devices, and a standing without evidence is refused."""

from __future__ import annotations

import types
from typing import Any

import pytest

from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band
from kernelhub.dispatch.records import records_of
from kernelhub.dispatch.standing import OPT_IN, PUBLISHED, UNTESTED, VERIFIED, Standing, opt_in, published, verified
from kernelhub.errors import RegistrationError
from tests.dispatch.backends import record

H200 = verified("hopper", evidence="H200, 2026-11-21, torch 2.11.0: 104 tests")


def registered(*standings: Any, **backend: Any) -> Any:
    _ = HUB.settings
    module = types.SimpleNamespace(
        __name__="fake.standing",
        BACKEND=Backend("fake", "a fake", **backend),
        KERNELS=(record("fake.k", standings=standings),),
    )
    return records_of(module, HUB.registry.contracts, builtin=False)


def test_a_family_has_its_own_standing_before_that_of_all_others() -> None:
    kernel = record("fake.k", standings=(published("*", evidence="https://example.com"), H200))
    assert kernel.standing_on("hopper").word == VERIFIED
    assert kernel.standing_on("blackwell").word == PUBLISHED
    assert record("fake.k", standings=(H200,)).standing_on("blackwell").word == UNTESTED
    assert record("fake.k").band is Band.PLUGIN


@pytest.mark.parametrize(
    ("standings", "said"),
    [
        ((Standing("verfied", ("hopper",), "x"),), "did you mean verified"),
        ((Standing(VERIFIED, ("hopper",)),), "has no evidence; give device, date"),
        ((Standing(OPT_IN, ("hopper",)),), "has no evidence; give why"),
        ((verified("hoper", evidence="x"),), "did you mean hopper"),
        ((verified(evidence="x"),), "names no family"),
        ((H200, opt_in("hopper", evidence="other bits")), "two standings name hopper"),
        (("verified",), "of type str, not Standing"),
        ((Standing(VERIFIED, "hopper", "x"),), "not a tuple"),  # type: ignore[arg-type]
    ],
)
def test_a_standing_that_says_nothing_is_refused(standings: Any, said: str) -> None:
    with pytest.raises(RegistrationError, match=said):
        registered(*standings)


def test_a_third_party_cannot_be_exempt_from_trust() -> None:
    with pytest.raises(RegistrationError, match="portable is for kernelhub's own"):
        registered(H200, portable=True)
    assert registered(H200).kernels[0].standings == (H200,)
