"""The words of the command line: those of the field, one for one thing (docs/design.md)."""

from __future__ import annotations

import re

import pytest

from kernelhub.cli.main import COMMANDS

NOT_OURS = re.compile(r"\b(verdicts?|able|outranked|wish(es)?|mend|refuses|lineup|falls? past|bears|speaks?)\b")


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        *((command, "--help") for command in COMMANDS),
        ("explain", "paged_attention", "--device", "H200", "--model", "llama-3.1-8b"),
        ("explain", "paged_attention", "--device", "H200", "--backend", "triton", "--all"),
        ("explain", "fp4_gemm", "--device", "B200"),
        ("backends",),
        ("backends", "--op", "attention"),
        ("doctor",),
        ("doctor", "--all"),
        ("env",),
        ("info", "triton.split_kv"),
    ],
    ids=" ".join,
)
def test_no_word_of_our_own_is_printed(ask, words) -> None:
    answer = ask(*words)
    found = {match[0]: line for line in answer.out.splitlines() for match in NOT_OURS.finditer(line)}
    assert found == {}
