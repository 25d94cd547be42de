"""The adapter of cuDNN keeps the contract against a cuDNN in torch; without the library its kernel is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kernelhub
from kernelhub.backends.cudnn import kernels
from kernelhub.dispatch.constraint import OnDevice, anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import NoKernel, NotWarmed
from kernelhub.ops.attention.inputs import AttentionModel, attention_inputs
from tests.backends.fake.cudnn import write
from tests.conftest import HAS_GPU
from tests.contract.attention import Case, DenseContract, split

pytestmark = pytest.mark.skipif(HAS_GPU, reason="a cuDNN in torch stands in for the real one on a CPU only")

# The same record for a CPU: a third party's, so of its band.
ANYWHERE = types.SimpleNamespace(
    __name__="tests.fake",
    BACKEND=Backend("fake", "cuDNN's record on a CPU"),
    KERNELS=tuple(
        dataclasses.replace(
            record,
            name=record.name.replace("cudnn", "fake"),
            band=Band.PLUGIN,
            constraints=(anything("device"), *(c for c in record.constraints if not isinstance(c, OnDevice))),
        )
        for record in kernels.KERNELS
    ),
)
SMALL = AttentionModel("small", 4, 2, 64, 64)


@contextlib.contextmanager
def installed(**how: object) -> Iterator[None]:
    """A cuDNN whose kernel takes CPU tensors."""
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(write(Path(folder), **how)))
        importlib.invalidate_caches()
        HUB.machine.forget()
        HUB.add_backend(ANYWHERE)
        try:
            yield
        finally:
            HUB.remove_backend("fake")
            sys.path.pop(0)
            for name in [n for n in sys.modules if n == "cudnn" or n.startswith("kernelhub.backends.cudnn.")]:
                if name not in ("kernelhub.backends.cudnn.kernels", "kernelhub.backends.cudnn.requirements"):
                    del sys.modules[name]
            HUB.machine.forget()


class TestSdpa(DenseContract):
    kernel = "fake.sdpa"
    device = "cpu"
    fewest_cases = 35

    @classmethod
    def accepted_cases(cls) -> list[Case]:
        with contextlib.nullcontext() if "fake" in HUB.registry.backends else installed():
            return super().accepted_cases()

    @pytest.fixture(autouse=True)
    def fake(self) -> Iterator[None]:
        with installed():
            yield


def ragged(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> dict[str, object]:
    return attention_inputs(SMALL, q_lens=q_lens, kv_lens=kv_lens) | {"causal": True}


def test_batches_of_one_class_of_sizes_share_a_graph() -> None:
    with installed():
        built = importlib.import_module("cudnn").BUILT
        for q_lens in ((100, 20, 7), (60, 128, 3, 9), (1, 2, 3)):
            args, kwargs = split(ragged(q_lens, q_lens) | {"max_seqlen_q": 128, "max_seqlen_k": 128})
            kernelhub.attention(*args, backend="fake.sdpa", **kwargs)
        assert [dims[0] for dims in built] == [(4, 4, 128, 64)]
        args, kwargs = split(ragged((300, 1), (300, 1)) | {"max_seqlen_q": 300, "max_seqlen_k": 300})
        kernelhub.attention(*args, backend="fake.sdpa", **kwargs)
        assert built[-1][0][:3] == (2, 4, 512)


def test_no_graph_is_built_after_seal_and_the_line_builds_it() -> None:
    with installed():
        built = importlib.import_module("cudnn").BUILT
        calls = {
            most: split(ragged((most, 7), (most, 7)) | {"max_seqlen_q": most, "max_seqlen_k": most})
            for most in (100, 300)
        }
        kernelhub.attention(*calls[100][0], backend="fake.sdpa", **calls[100][1])
        told = [(item.kind, item.by, item.op, item.kernel) for item in kernelhub.report().work]
        assert told == [("compile", "cudnn", "attention", "fake.sdpa")]
        args, kwargs = calls[300]
        with kernelhub.seal():
            kernelhub.attention(*calls[100][0], backend="fake.sdpa", **calls[100][1])
            with pytest.raises(NotWarmed, match="compile a graph") as refused:
                kernelhub.attention(*args, backend="fake.sdpa", **kwargs)
        assert len(built) == 1
        exec(refused.value.line, {"kernelhub": kernelhub, "torch": torch})
        assert len(built) == 2
        with kernelhub.seal():
            kernelhub.attention(*args, backend="fake.sdpa", **kwargs)


def test_rows_of_a_fused_projection_are_read_where_they_lie() -> None:
    fused = torch.randn(2, 40, 8, 64).bfloat16()
    q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    with installed():
        out = kernelhub.attention(q, k, v, causal=True, backend="fake.sdpa")
        assert importlib.import_module("cudnn").BUILT[-1][2] == (128 * 512, 64, 512, 1)
    assert (out - kernelhub.attention.reference(q, k, v, causal=True)).abs().max() < 0.02


def test_tokens_past_the_last_offset_are_left_alone() -> None:
    arguments = ragged((9, 4), (9, 6))
    longer = arguments | {"q": torch.cat([arguments["q"], arguments["q"][:3]])}
    with installed():
        for out in (torch.full((16, 4, 64), -777.0).bfloat16(), torch.full((16, 5, 64), -777.0).bfloat16()[:, :4]):
            args, kwargs = split(longer)
            kernelhub.attention(*args, backend="fake.sdpa", out=out, **kwargs)
            assert (out[-3:] == -777.0).all()


@pytest.mark.parametrize(
    ("how", "facets", "code"),
    [
        ({"version": "1.31.0"}, {}, "package_version"),
        ({}, {"head_dim_qk": 72, "head_dim_vo": 72}, "value"),
        ({}, {"sinks": True}, "feature"),
        ({}, {"q_dtype": "float32", "kv_dtype": "float32"}, "dtype"),
        ({}, {"kv_dtype": "float8_e4m3fn", "kv_scale": "value"}, "mismatch"),
    ],
)
def test_what_was_not_seen_to_be_right_is_refused(how, facets, code) -> None:
    packages = {"triton": "3.7.1", "cudnn": how.get("version", "1.32.0")}
    verdict = kernelhub.explain("attention", device="H200", machine=SimulatedMachine(packages), **facets)
    decision = next(item for item in verdict.decisions if item.kernel == "cudnn.sdpa")
    assert code in {rejection.code for rejection in decision.rejections}


def test_it_serves_ragged_prefill_where_it_is_installed() -> None:
    facets = {"ragged": True, "q_len": "any", "causal": True}
    for packages, want in (({"cudnn": "1.32.0"}, "cudnn.sdpa"), ({}, "triton.prefill")):
        machine = SimulatedMachine({"triton": "3.7.1"} | packages)
        assert kernelhub.explain("attention", device="H200", machine=machine, **facets).selected == want
        assert kernelhub.explain("attention", device="A100", machine=machine, **facets).selected == "triton.prefill"


def test_a_graph_is_for_many_queries() -> None:
    """One for a single query leaves the LSE of most heads unwritten (NVIDIA/cudnn-frontend#1083)."""
    with installed():
        graphs = importlib.import_module("kernelhub.backends.cudnn.graphs")
        assert [graphs.bound(tokens) for tokens in (0, 1, 2, 128, 129)] == [128, 128, 128, 128, 256]


def test_an_old_cudnn_gives_way_with_its_reason() -> None:
    args, kwargs = split(ragged((9, 4), (9, 6)))
    with installed(backend=90700):
        with pytest.raises(NoKernel, match="cuDNN is 90700, 91900 is needed"):
            kernelhub.attention(*args, backend="fake.sdpa", **kwargs)
        assert kernelhub.attention(*args, backend=("fake.sdpa", "torch.packed"), **kwargs).shape == (13, 4, 64)
