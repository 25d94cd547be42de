"""The copies that `benchmarks/graphs.py` compares kernels with move all bytes, and only those."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kernelhub.backends.cuda import nvrtc
from kernelhub.probes.device import simulated
from tests.cuda import emulated

SOURCE = Path(__file__).parents[2] / "benchmarks" / "copy.cu"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SOURCE.parent))
    yield importlib.import_module
    for name in ("graphs", "roofline"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(not emulated.COMPILER.ok, reason=emulated.COMPILER.reason)
@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize(("reads", "writes"), [(300, 300), (700, 300), (300, 700), (1, 1)])
def test_a_copy_reads_and_writes_as_many_vectors_as_it_is_asked_to(each: int, reads: int, writes: int) -> None:
    given, to = torch.zeros(reads, 4, dtype=torch.int32), torch.full((writes + 1, 4), 7, dtype=torch.int32)
    given[: min(reads, writes)] = torch.arange(4 * min(reads, writes), dtype=torch.int32).view(-1, 4)
    kernel = emulated.EmulatedLibrary(str(SOURCE), {"EACH": each, "STREAMED": 0}).kernel("copy", "2P" + "2q")
    kernel(0, -(-max(reads, writes) // (64 * each)), 64, given, to, reads, writes)
    assert torch.equal(to[: min(reads, writes)], given[: min(reads, writes)])
    assert not to[reads:writes].any()
    assert (to[writes:] == 7).all()


def test_nvrtc_compiles_it(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason='without NVRTC nothing is compiled: pip install "cuda-bindings[all]"')
    for streamed in (0, 1):
        constants = {"EACH": 4, "STREAMED": streamed, "OVERLAPS": 1}
        made = nvrtc.compiled(str(SOURCE), constants, simulated("H200").capability, tmp_path)
        assert made.startswith(b"\x7fELF")


def test_operands_of_a_graph_exceed_a_cache_or_are_many(benchmarks: Any) -> None:
    graphs = benchmarks("graphs")
    assert [graphs.copies_for(moved) for moved in (1, 1 << 20, 10 << 20, 1 << 30)] == [64, 64, 16, 2]


class Pair(NamedTuple):
    one: torch.Tensor
    other: Any


def test_a_copy_of_operands_has_their_strides_and_none_of_their_memory(benchmarks: Any) -> None:
    x = torch.arange(12.0).view(3, 4)
    given = {"x": x.t(), "pair": Pair(x[:, ::2], None), "list": [x, 3]}
    made = benchmarks("graphs").copied(given)
    assert type(made["pair"]) is Pair
    assert made["pair"].other is None
    for got, want in ((made["x"], given["x"]), (made["pair"].one, given["pair"].one), (made["list"][0], x)):
        assert torch.equal(got, want)
        assert got.stride() == want.stride()
        assert got.untyped_storage().data_ptr() != want.untyped_storage().data_ptr()


def test_the_share_of_a_copy_is_shown_beside_that_of_the_roof(benchmarks: Any, capsys: pytest.CaptureFixture) -> None:
    row = {
        "case": "a call",
        "chosen": "cuda.write",
        "kernels_ms": {"cuda.write": 0.006},
        "torch_ms": {},
        "roof_ms": 0.001,
        "graph_us": {"cuda.write": 4.0},
        "copy_us": 3.0,
    }
    benchmarks("roofline").show([row])
    assert "4.00 µs in a graph: 75 % of a copy of as many bytes, 25 % of the roof" in capsys.readouterr().out
