"""The adapters' calls compared with released DeepGEMMs: which bind, and which are rejected with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelhub.backends.deep_gemm.copies import Copy, headers, name_of, offers
from kernelhub.backends.deep_gemm.requirements import CALLS
from tests.providers.wheels import wheel

# Distribution, version, whether it claims torch's namespace, and calls that it has no function for.
RELEASES = (
    ("tokenspeed-deepgemm", "2.5.0.post20260629", False, set()),
    ("sgl-deep-gemm", "0.1.4.post1", False, set()),
    ("sgl-deep-gemm", "0.2.3.post2", True, set()),
    # Since 2.8 logits come from functions of other names, in another layout: refused, not guessed.
    ("tokenspeed-deepgemm", "2.8.2.post20261020", False, {"mqa_logits", "paged_mqa_logits"}),
)


def copy_of(distribution: str, version: str) -> Copy:
    return Copy("deep_gemm", Path(wheel(distribution, version)) / "deep_gemm")


@pytest.mark.parametrize(("distribution", "version", "claims", "missing"), RELEASES)
def test_a_release_is_whole_and_takes_our_calls(distribution, version, claims, missing) -> None:
    copy = copy_of(distribution, version)
    assert copy.defect is None
    assert copy.registers_operators is claims
    wrong = {name: finding for name, calls in CALLS.items() if not (finding := offers(calls, copy)).ok}
    assert set(wrong) == missing, wrong


def test_functions_are_taken_under_the_names_that_a_release_has() -> None:
    """sgl-deep-gemm names the masked product otherwise than upstream; both positions are the same."""
    taken = {
        version: offers(CALLS["fp8_masked"], copy_of(distribution, version)).subject
        for distribution, version, *_ in RELEASES[:2]
    }
    assert taken == {
        "2.5.0.post20260629": "m_grouped_fp8_gemm_nt_masked",
        "0.1.4.post1": "m_grouped_fp8_fp4_gemm_nt_masked",
    }


def test_what_sources_state_of_parameters_is_reported() -> None:
    """Of these two releases every function that adapters call, so that `offers` is no empty promise."""
    for distribution, version, *_ in RELEASES[:2]:
        known = headers(copy_of(distribution, version))
        for name in ("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_masked"):
            assert known[name] is not None or distribution == "tokenspeed-deepgemm", name
        for call in (*CALLS["mqa_logits"][:1], *CALLS["paged_metadata"]):
            assert known[name_of(call)] is not None
