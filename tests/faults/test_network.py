"""FX5: no network, and addresses that lead nowhere. The interpreter's own audit counts every attempt to reach it."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from pathlib import Path

import pytest

import kernelhub
from kernelhub.dispatch.machine import SimulatedMachine
from tests.faults.record import NOTHING
from tests.faults.records import FAULTS
from tests.faults.scene import code_is, run

EVERYTHING = """
import sys
attempts = []
def count(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"):
        attempts.append((event, repr(arguments)))
sys.addaudithook(count)
import contextlib, io, torch, kernelhub
from kernelhub.cli.main import main
q = torch.randn(1, 4, 2, 16)
assert torch.allclose(kernelhub.attention(q, q, q), kernelhub.attention.reference(q, q, q), atol=1e-5)
for op in ("paged_attention", "fp8_gemm", "fused_moe"):
    assert kernelhub.explain(op, device="B200").decisions
assert kernelhub.verify("merge_attention_states", backend="torch", device="cpu", quick=True).ok
for words in (["doctor"], ["cache", "list"]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(words)
print("attempts", attempts)
"""


def caches(folder: Path) -> dict[str, str]:
    """Variables that have all caches below a folder, where there is nothing to be listed."""
    return {name: str(folder / name) for name in ("KERNELHUB_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}


@functools.cache
def without_network() -> tuple[str, ...] | None:
    """Words after which a process has no network; None without leave."""
    for words in (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net")):
        try:
            if subprocess.run([*words, "true"], capture_output=True, timeout=30).returncode == 0:
                return words
        except (OSError, subprocess.TimeoutExpired):
            return None
    return None


@pytest.mark.skipif(without_network() is None, reason="no leave to take the network away: 1 fault")
@pytest.mark.fault("no_network")
def test_without_any_network_all_answers_and_nothing_tries_to_reach_it(tmp_path) -> None:
    environment = os.environ | caches(tmp_path)
    assert run(EVERYTHING, environment, *(without_network() or ())) == "attempts []\n"
    assert FAULTS["no_network"].code == NOTHING


@pytest.mark.fault("black_hole")
def test_addresses_that_lead_nowhere_are_never_asked(tmp_path) -> None:
    """192.0.2.0/24 is for documentation: packets to it are dropped, and who waits for an answer waits for minutes."""
    nowhere = "http://192.0.2.1:9"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "HF_ENDPOINT", "FLASHINFER_CUBINS_REPOSITORY")
    environment = os.environ | caches(tmp_path) | dict.fromkeys(names, nowhere)
    begun = time.monotonic()
    assert run(EVERYTHING, environment) == "attempts []\n"
    assert time.monotonic() - begun < 60
    assert FAULTS["black_hole"].code == NOTHING


@pytest.mark.fault("cubins_absent")
def test_binaries_that_would_be_downloaded_keep_their_kernels_out() -> None:
    machine = SimulatedMachine({"flashinfer": "0.6.18", "triton": "3.7.1"}, lacks={"cubins"})
    selection = kernelhub.explain("paged_attention", device="B200", machine=machine)
    lacking = [
        item for decision in selection.decisions for item in decision.rejections if item.code == "cubins_missing"
    ]
    assert lacking
    for rejection in lacking:
        code_is(FAULTS["cubins_absent"], rejection)
    assert selection.selected is not None
