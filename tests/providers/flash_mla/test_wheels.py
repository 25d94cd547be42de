"""The functions of released wheels take the calls that the adapters make."""

from __future__ import annotations

import pytest

from kernelhub.backends.flash_mla.requirements import LEGACY, STATEFUL, generation
from tests.providers.wheels import wheel


@pytest.mark.parametrize(
    ("distribution", "version", "want"),
    [
        ("tokenspeed-flashmla", "1.0.0.post20251110", STATEFUL),
        ("tokenspeed-flashmla", "1.0.0.post20260615", STATEFUL),
        ("tokenspeed-flashmla", "1.0.0.post20260924", STATEFUL),
        ("sgl-flash-mla", "1.0.0", LEGACY),
    ],
)
@pytest.mark.parametrize("kernel", ["dense", "sparse"])
def test_a_released_wheel_takes_our_calls(distribution, version, want, kernel) -> None:
    folder = wheel(distribution, version)
    finding = generation(kernel, folder / "flash_mla")
    assert finding.ok, finding.reason
    assert finding.value == want
