"""The adapter of cuDNN keeps the contract against a cuDNN in torch; without the library its kernel is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import random
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import kernelhub
from kernelhub.backends.cudnn import kernels
from kernelhub.dispatch.constraint import OnDevice, anything
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Backend, Band
from kernelhub.dispatch.machine import SimulatedMachine
from kernelhub.errors import NoKernel, NotWarmed
from kernelhub.ops.attention.inputs import attention_inputs, paged_attention_inputs
from kernelhub.ops.attention.tables import bound
from kernelhub.ops.models.shapes import AttentionModel
from kernelhub.testing import KernelCase
from tests.backends.fake.cudnn import write
from tests.conftest import HAS_GPU
from tests.contract.attention import DenseContract, PagedContract, split
from tests.contract.varied_attention import VariedContract, varied, with_finite_ends
from tests.dispatch.backends import EVERYWHERE

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
            standings=EVERYWHERE,
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


class OnFake:
    """A contract on a CPU. Its cases are collected with the fake installed, too."""

    device: ClassVar[str] = "cpu"

    @classmethod
    def accepted_cases(cls) -> list[KernelCase]:
        with contextlib.nullcontext() if "fake" in HUB.registry.backends else installed():
            return super().accepted_cases()  # type: ignore[misc]

    @pytest.fixture(autouse=True)
    def fake(self) -> Iterator[None]:
        with installed():
            yield


class TestSdpa(OnFake, DenseContract):
    kernel = "fake.sdpa"


class TestSdpaPaged(OnFake, VariedContract, PagedContract):
    kernel = "fake.sdpa_paged"
    table = varied("paged_attention", change=with_finite_ends)


class TestPages:
    """What is of pages alone."""

    decode: ClassVar[dict[str, Any]] = {"seq_lens": (40, 200, 7, 128, 0), "page_size": 16}

    def run(self, arguments: dict[str, Any], **more: Any) -> Any:
        return kernelhub.paged_attention(**arguments, backend="fake.sdpa_paged", **more)

    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    def test_nan_in_the_unused_end_of_a_page_reaches_the_result_by_way_of_values(self, name) -> None:
        """Which is why the kernel is known to be bad; pages of nobody do not matter."""
        poisoned = paged_attention_inputs(SMALL, **self.decode)
        finite = with_finite_ends(poisoned)
        with installed():
            want = self.run(finite)
            assert want.isfinite().all()
            got = self.run(finite | {name: poisoned[name]})
        spoilt = [False, False, False, False, False] if name == "k_cache" else [True, True, True, False, False]
        assert got.isnan().any(2).any(1).tolist() == spoilt
        assert torch.equal(got[3:], want[3:]), "a sequence that ends with its page"

    def test_pages_behind_a_sequence_are_not_looked_at(self) -> None:
        arguments = with_finite_ends(paged_attention_inputs(SMALL, **self.decode))
        table, lengths = arguments["block_table"], arguments["seq_lens"]
        behind = torch.arange(table.shape[1]) >= ((lengths + 15) // 16)[:, None]
        with installed():
            want = self.run(arguments)
            for rubbish in (-1, 1 << 30, -(1 << 31)):
                changed = table.masked_fill(behind, rubbish)
                assert torch.equal(self.run(arguments | {"block_table": changed}), want)

    def test_steps_of_one_class_of_sizes_share_a_graph(self) -> None:
        with installed():
            built = importlib.import_module("cudnn").BUILT
            cache = with_finite_ends(paged_attention_inputs(SMALL, seq_lens=(120, 100, 60), page_size=16))
            for rows in ((0, 1, 2), (2, 1, 0), (1, 0, 2, 2)):
                step = {name: cache[name][list(rows)] for name in ("q", "block_table", "seq_lens")}
                self.run(cache | step)
            assert [dims for dims, *_ in built] == [(4, 4, 128, 64)]

    def test_caches_of_either_layout_are_read_where_they_lie(self) -> None:
        """In a cache of k and v side by side, as engines keep them."""
        arguments = with_finite_ends(paged_attention_inputs(SMALL, seq_lens=(40, 9), page_size=16, spare_pages=2))
        both = torch.stack([arguments["k_cache"], arguments["v_cache"]], 1)
        with installed():
            want = self.run(arguments)
            built = importlib.import_module("cudnn").BUILT
            assert torch.equal(self.run(arguments | {"k_cache": both[:, 0], "v_cache": both[:, 1]}), want)
            assert built[-1][3] == (2 * 16 * 2 * 64, 64, 2 * 64, 1)
            heads_first = {name: arguments[name].transpose(1, 2).contiguous() for name in ("k_cache", "v_cache")}
            assert torch.equal(self.run(arguments | heads_first | {"kv_layout": "HND"}), want)
            assert built[-1][3] == (16 * 2 * 64, 16 * 64, 64, 1)

    @pytest.mark.parametrize("page_size", [16, 256])
    def test_a_cache_without_pages_gives_zeros(self, page_size) -> None:
        arguments = paged_attention_inputs(SMALL, seq_lens=(0, 0), q_lens=3, page_size=page_size, spare_pages=0)
        for columns in (1, 0):
            arguments["block_table"] = arguments["block_table"][:, :columns]
            with installed():
                out, lse = self.run(arguments, return_lse=True)
            assert not out.any()
            assert (lse == -torch.inf).all()

    def test_it_is_never_chosen_and_reported_with_the_report(self) -> None:
        machine = SimulatedMachine({"triton": "3.7.1", "cudnn": "1.32.0"})
        selection = kernelhub.explain("paged_attention", device="H200", machine=machine)
        assert selection.selected != "cudnn.sdpa_paged"
        told = next(item for item in selection.decisions if item.kernel == "cudnn.sdpa_paged").rejections
        assert [rejection.code for rejection in told] == ["known_bad", "opt_in"]
        rejection = told[0]
        assert "cudnn-frontend/pull/740" in rejection.reason
        with kernelhub.use(unsafe=True):
            forced = kernelhub.explain("paged_attention", device="H200", machine=machine, backend="cudnn.sdpa_paged")
        assert forced.selected == "cudnn.sdpa_paged"


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


def test_warm_up_builds_the_graphs_of_all_sequences_and_lengths() -> None:
    """A kernel that `compiles_sizes` is warmed by a call for each; any prefill of as many tokens then has its graph."""
    from kernelhub.ops.models.calls import calls_of, need_of

    most, chance = 300, random.Random(0)

    with installed():
        facets = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64, "ragged": True}
        problem = kernelhub.explain("attention", device="cpu", causal=True, q_len="many", **facets).problem
        need = need_of("attention", problem)
        for call in calls_of(need, (most,), "cpu", every_size=True):
            kernelhub.attention(**call.arguments, backend="fake.sdpa")
        with kernelhub.seal():
            for _ in range(60):
                left, lengths = chance.choice((most, chance.randint(1, most))), []
                while left:
                    lengths.append(chance.randint(1, chance.choice((min(left, 3), left))))
                    left -= lengths[-1]
                longest = max(lengths)
                said = max(17, longest + chance.randint(0, 3))  # of more than 16 a class of its own
                arguments = attention_inputs(SMALL, q_lens=lengths, kv_lens=lengths)
                arguments |= {"causal": True, "max_seqlen_q": said, "max_seqlen_k": longest}
                kernelhub.attention(**arguments, backend="fake.sdpa")


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
    selection = kernelhub.explain("attention", device="H200", machine=SimulatedMachine(packages), **facets)
    decision = next(item for item in selection.decisions if item.kernel == "cudnn.sdpa")
    assert code in {rejection.code for rejection in decision.rejections}


def test_it_serves_ragged_prefill_where_it_is_installed() -> None:
    facets = {"ragged": True, "q_len": "any", "causal": True}
    for packages, want in (({"cudnn": "1.32.0"}, "cudnn.sdpa"), ({}, "triton.prefill")):
        machine = SimulatedMachine({"triton": "3.7.1"} | packages)
        asked = {"device": "H200", "machine": machine, **facets}
        assert kernelhub.explain("attention", **asked).selected == "gluon.prefill_pipelined"
        with kernelhub.use(disable="gluon.prefill_pipelined"):
            assert kernelhub.explain("attention", **asked).selected == want
        assert kernelhub.explain("attention", device="A100", machine=machine, **facets).selected == "torch.varlen_attn"


def test_a_graph_is_for_many_queries() -> None:
    """One for a single query leaves the LSE of most heads unwritten (NVIDIA/cudnn-frontend#1083)."""
    with installed():
        fewest = importlib.import_module("kernelhub.backends.cudnn.queries").FEWEST_TOKENS
        assert [bound(tokens, fewest) for tokens in (0, 1, 2, 128, 129)] == [128, 128, 128, 128, 256]


def test_an_old_cudnn_gives_way_with_its_reason() -> None:
    args, kwargs = split(ragged((9, 4), (9, 6)))
    with installed(backend=90700):
        with pytest.raises(NoKernel, match="cuDNN is 90700, 91900 is needed"):
            kernelhub.attention(*args, backend="fake.sdpa", **kwargs)
        assert kernelhub.attention(*args, backend=("fake.sdpa", "torch.packed"), **kwargs).shape == (13, 4, 64)
