"""The functions of a released frontend take the calls that the adapter makes, where its source has them."""

from __future__ import annotations

import pytest

from kernelhub.backends.cudnn.requirements import CALLS
from kernelhub.probes.signature import Call, takes
from tests.providers.wheels import wheel


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.target)
def test_the_released_frontend_takes_our_calls(call: Call) -> None:
    finding = takes(call, root=wheel("nvidia-cudnn-frontend", "1.32.0") / "cudnn")
    assert finding.ok, finding.reason
