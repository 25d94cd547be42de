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


def test_the_released_frontend_has_what_is_said_of_pages() -> None:
    """Its `sdpa` is made at run time; what checks a graph of it has the names."""
    source = (wheel("nvidia-cudnn-frontend", "1.32.0") / "cudnn" / "_sdpa_validate.py").read_text()
    for name in ("paged_attention_k_table", "paged_attention_v_table", "paged_attention_max_seq_len_kv"):
        assert f'"{name}"' in source
