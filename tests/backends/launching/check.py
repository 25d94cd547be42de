"""Scenarios of the launcher on the stub driver: `python -m tests.backends.launching.check [NAME ...]`.

Triton compiles the kernels for sm_90; nothing runs, so what is checked is what the driver receives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import itertools
import mmap
import struct
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_int, c_uint64
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.nn.functional  # its defaults keep the group that is there when it is imported
import triton
import triton.language as tl
from torch import distributed as dist
from torch.autograd import forward_ad
from torch.testing._internal.distributed.fake_pg import FakeStore

import kernelhub
from kernelhub.backends.comm_pairs.kernels import parts_of
from kernelhub.backends.comm_pairs.norm import SumThenQuant
from kernelhub.backends.cuda import library as of_cuda
from kernelhub.backends.cuda.attention import decode as of_pages
from kernelhub.backends.cuda.comm.total import OneShot as CudaOneShot
from kernelhub.backends.cuda.gemm import fp8 as product
from kernelhub.backends.cuda.mapped import MappedKernel
from kernelhub.backends.cuda.mla import decode as latent
from kernelhub.backends.cuda.moe import routing as of_routing
from kernelhub.backends.shared import direct
from kernelhub.backends.shared.direct import direct_launch
from kernelhub.backends.shared.launches import Launch, Shared, sequence
from kernelhub.backends.shared.repeat import Repeated, repetition
from kernelhub.backends.shared.slot_memory import Workspace
from kernelhub.backends.triton import launch as of_triton
from kernelhub.backends.triton.comm.adapter import ClusteredRmsNorm, OneShot, OneShotRmsNorm, TwoShot, TwoShotRmsNorm
from kernelhub.backends.triton.comm.experts.adapter import PushRows, PushSums
from kernelhub.backends.triton.comm.parts import AllGather, ReduceScatter
from kernelhub.backends.triton.comm.quantised import OneShotRmsNormQuant
from kernelhub.backends.triton.fused_quant.adapter import Norm
from kernelhub.backends.triton.launch import Launcher
from kernelhub.dispatch.bound import Bound
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.lost import is_final
from kernelhub.dispatch.whole_calls import WATCHED
from kernelhub.errors import RanksDisagree
from kernelhub.ops.attention import paged_call
from kernelhub.ops.attention.adapter import PagedStep
from kernelhub.ops.attention.arguments import Values
from kernelhub.ops.attention.problem import PagedAttentionProblem
from kernelhub.ops.comm.experts.problem import CombineProblem, DispatchProblem
from kernelhub.ops.comm.experts.received import header_of
from kernelhub.ops.comm.experts.results import outputs_of
from kernelhub.ops.comm.problem import AllGatherProblem, AllReduceProblem, AllReduceRmsNormProblem, ReduceScatterProblem
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.mla.attention import call as mla_call
from kernelhub.ops.mla.attention.adapter import MlaValues
from kernelhub.ops.mla.attention.problem import MlaProblem
from kernelhub.ops.moe.experts.inputs import moe_inputs
from kernelhub.ops.moe.routing.problem import RoutingProblem
from kernelhub.ops.operands import span_of
from kernelhub.probes.device import simulated
from kernelhub.runtime import launch as runtime
from kernelhub.runtime.counters import counters_of
from tests.backends.launching.stub import (
    Memory,
    OneDevice,
    Stub,
    addresses_of,
    install_launcher,
    number,
    perform,
)
from tests.ops.test_known_calls import call_of, others_than, outcome

WHOLE = 9  # calls after which the extension makes them from their arguments


@triton.jit
def every_kind(a, absent, n, big, scale, flag, b, one, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(a + at, mask=at < n).to(tl.float32) * scale
    if absent is not None:
        value += tl.load(absent + at)
    if flag:
        value += big.to(tl.float32) + one
    tl.store(b + at, value)


@triton.jit
def twice(x, y, n, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < n, other=0) * 2, mask=at < n)


def sizes_of(compiled: Any, given: int) -> list[int]:
    """The parameters that Triton's function has, as its signature says."""
    kinds = [direct._kind(kind) for kind in list(compiled.src.signature.values())[:given]]
    maps = direct._maps(compiled.metadata, list(compiled.src.signature.values()))
    return [*direct._parameters("".join(filter(None, kinds)), maps or ()), 8, 8]


def on_stub(stub: Stub, expected: list[int] | None = None) -> None:
    """Let launchers take what the stub says of a function, which notes these parameters or the newest kernel's."""

    def made(compiled: Any, given: int, **options: Any) -> Any:
        sizes = sizes_of(compiled, given)
        stub.expect(sizes if expected is None else expected)
        return direct_launch(compiled, given, sizes=lambda function, most: sizes, **options)

    of_triton.direct_launch = made


def on_stub_by_function(stub: Stub) -> None:
    """The same where kernels differ in their parameters; of a launch that Triton makes the stub notes none."""

    def made(compiled: Any, given: int, **options: Any) -> Any:
        sizes = sizes_of(compiled, given)
        stub.expect_of(compiled.function, sizes)
        return direct_launch(compiled, given, sizes=lambda function, most: sizes, **options)

    stub.expect([])
    of_triton.direct_launch = made


def same_as_triton(stub: Stub) -> None:
    """What is passed equals what Triton's launcher passes, for every kind of argument and every attribute."""
    given = [torch.ones(64), None, 5, -(1 << 40), 0.5, True, torch.zeros(64), 1]
    for options in ({}, {"launch_pdl": True}, {"num_ctas": 2}, {"num_warps": 8}):
        compiled = every_kind[(6,)](*given, SIZE=64, **options)
        sizes = sizes_of(compiled, len(given))
        stub.expect(sizes)
        stub.take()
        for arguments in (given, [*given[:2], 7, 1 << 40, 1e300, False, torch.ones(64), 1]):
            compiled[(6, 2, 3)](*arguments, 64)
            kernel = direct_launch(compiled, len(given), sizes=lambda function, most, sizes=sizes: sizes)
            assert kernel.launch((6, 2, 3), *arguments) is True
            by_triton, ours = stub.take()
            assert ours == by_triton, (options, ours, by_triton)
            assert len(ours.parameters) == 6 + 2
    print("parameters", [len(one) for one in ours.parameters])
    on_stub(stub)
    clustered = Launcher(every_kind, {"SIZE": 64}, num_warps=4, cluster=2)  # Triton compiles each program for itself
    clustered(6, "alike", *given)
    clustered._ready["alike"].compiled[(3, 1, 1)](*given, 64)
    ours, by_triton = stub.take()
    assert ours == by_triton
    assert ours.grid == (6, 1, 1)
    assert (4, 2) in [one[:2] for one in ours.attributes], ours.attributes


def tensor_maps(stub: Stub) -> None:
    """Descriptors are passed as Triton passes them, and encoded again only if address or shape changed."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def of_map(x, y, n):
        tl.store(y + tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :], x.load([n, 0]))

    globals()["of_map"] = of_map
    x, y = torch.zeros(256, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)

    def descriptor(rows: int) -> Any:
        return TensorDescriptor(x, [rows, 64], [64, 1], [64, 64])

    compiled = of_map[(1,)](descriptor(256), y, 3)
    sizes = sizes_of(compiled, 3)
    stub.expect(sizes)
    kernel = direct_launch(compiled, 3, sizes=lambda function, most: sizes)
    stub.take()
    for rows in (256, 128):
        compiled[(1, 1, 1)](descriptor(rows), y, 3)
        before = stub.encoded.value
        for _ in range(3):
            assert kernel.launch(1, descriptor(rows), y, 3)
        assert stub.encoded.value == before + 1
        by_triton, *ours = stub.take()
        assert all(one == by_triton for one in ours), (ours[0], by_triton)
    kernel.launch(1, descriptor(256), y, 3)
    assert struct.unpack_from("<q", stub.take()[0].parameters[0], 40)[0] == 256
    stub.fail(1)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(1, descriptor(64), y, 3)
    assert kernel.launch(1, descriptor(64), y, 3), "the map is encoded after the error"
    entered = c_int.in_dll(stub.library, "entered")
    before = entered.value
    stub.fail(201)
    stub.take()
    assert kernel.launch(1, descriptor(32), y, 3)
    assert entered.value == before + 1, "a thread without a context gets one"
    assert len(stub.take()) == 1


def gluon_maps(stub: Stub) -> None:
    """The same of a Gluon kernel."""
    from kernelhub.backends.gluon import launch as of_gluon
    from kernelhub.backends.gluon.language import gl, gluon, mbarrier, tma_load

    @gluon.jit
    def copies(x, y, n, SIZE: gl.constexpr):
        tile = gl.allocate_shared_memory(x.dtype, [SIZE, SIZE], x.layout)
        barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(barrier, count=1)
        mbarrier.expect(barrier, x.block_type.nbytes)
        tma_load(x, [n, 0], barrier, tile)
        mbarrier.wait(barrier, 0)
        gl.store(y, n)

    globals().update(copies=copies, gl=gl, mbarrier=mbarrier, tma_load=tma_load)
    x, y = torch.zeros(256, 64, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    compiled = copies[(3,)](of_gluon.descriptor(x, (64, 64)), y, 5, SIZE=64)
    sizes = sizes_of(compiled, 3)
    stub.expect(sizes)
    kernel = direct_launch(compiled, 3, sizes=lambda function, most: sizes)
    for rows in (256, 128):
        given = (of_gluon.descriptor(x, (64, 64), (rows, 64), (64, 1)), y, 7)
        stub.take()
        compiled[(3, 1, 1)](*given, 64)
        assert kernel.launch(3, *given)
        by_triton, ours = stub.take()
        assert ours == by_triton, (ours, by_triton)


def repeated_maps(stub: Stub) -> None:
    """A call that is repeated encodes the maps of its tensors, each once while its address stays."""
    from kernelhub.backends.gluon import launch as of_gluon
    from kernelhub.backends.gluon.language import gl, gluon, mbarrier, tma_load

    @gluon.jit
    def copies_of_two(x, y, z, n, SIZE: gl.constexpr):
        tile = gl.allocate_shared_memory(x.dtype, [SIZE, SIZE], x.layout)
        barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(barrier, count=1)
        mbarrier.expect(barrier, 2 * x.block_type.nbytes)
        tma_load(x, [n, 0], barrier, tile)
        tma_load(y, [n, 0], barrier, tile)
        mbarrier.wait(barrier, 0)
        gl.store(z, n)

    globals().update(copies_of_two=copies_of_two, gl=gl, mbarrier=mbarrier, tma_load=tma_load)
    sizes: list[int] = []

    def made(compiled: Any, given: int) -> Any:
        sizes[:] = sizes_of(compiled, given)
        stub.expect(sizes)
        return direct_launch(compiled, given, sizes=lambda function, most: sizes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(of_gluon, "direct_launch", made)
        launcher, repeated, met = of_gluon.Launcher(copies_of_two, {"SIZE": 64}), Repeated(), []

        def given_of(x: torch.Tensor, z: torch.Tensor) -> tuple[Any, ...]:
            halves = [of_gluon.descriptor(x[64 * at : 64 * at + 64], (64, 64)) for at in range(2)]
            return (*halves, z, 7)

        def anew(x: torch.Tensor, z: torch.Tensor) -> None:
            met.append(x)
            launcher((3, 2), (0,), *given_of(x, z))

        pairs = [(torch.zeros(128, 64, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)) for _ in range(4)]
        for x, z in (*pairs, *pairs[2:]):
            repeated.run("key", (x, z), anew, x, z)
        assert len(met) == 2
        for count, (x, z) in enumerate((pairs[0], pairs[0], pairs[1], pairs[1])):
            stub.take()
            before = stub.encoded.value
            repeated.run("key", (x, z), anew, x, z)
            assert stub.encoded.value == before + (2 if count % 2 == 0 else 0)
            launcher._ready[(0,)].compiled[(3, 2, 1)](*given_of(x, z), 64)
            ours, by_triton = stub.take()
            assert ours == by_triton, (ours, by_triton)
        x, z = pairs[2]
        stub.fail(1)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
            repeated.run("key", (x, z), anew, x, z)
        stub.take()
        repeated.run("key", (x, z), anew, x, z)  # encoded after the error
        launcher._ready[(0,)].compiled[(3, 2, 1)](*given_of(x, z), 64)
        ours, by_triton = stub.take()
        assert ours == by_triton
        assert len(met) == 2


@contextlib.contextmanager
def gluon_on_stub(stub: Stub) -> Iterator[pytest.MonkeyPatch]:
    """Gluon's launches of several kernels are noted; of a kernel's first one nothing is read."""
    from kernelhub.backends.gluon import launch as of_gluon

    def made(compiled: Any, given: int) -> Any:
        sizes = sizes_of(compiled, given)
        stub.expect_of(compiled.function, sizes)
        return direct_launch(compiled, given, sizes=lambda function, most: sizes)

    stub.expect([])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(of_gluon, "direct_launch", made)
        yield patched
    stub.forget()


def gluon_again(stub: Stub) -> None:
    """What Gluon repeats, prefill and grouped products, has the parameters of launches made anew, but for counters."""
    half = {"dtype": torch.bfloat16}
    offsets = torch.tensor([0, 3, 3, 133], dtype=torch.int32)
    dense = {name: torch.zeros(2, 130, heads, 64, **half) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    ragged = {name: torch.zeros(133, heads, 64, **half) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    ragged |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets.clone(), "causal": True, "return_lse": True}
    kv = torch.zeros(5, 2, 16, 2, 64, **half)  # caches that lie between each other
    paged = {"q": torch.zeros(2, 4, 64, **half), "k_cache": kv[:, 0], "v_cache": kv[:, 1]}
    paged |= {
        "block_table": torch.tensor([[0, 1], [4, 2]], dtype=torch.int32),
        "seq_lens": torch.tensor([20, 32], dtype=torch.int32),
    }
    float8 = {
        "k_cache": torch.zeros(5, 16, 2, 64, dtype=torch.float8_e4m3fn),
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
    }
    float8 |= {"v_cache": float8["k_cache"].clone(), "sinks": torch.zeros(4, **half), "window": 7}
    calls = (
        (kernelhub.attention, "gluon.prefill_pipelined_any", dense | {"sinks": torch.zeros(4, **half), "window": 40}),
        (kernelhub.attention, "gluon.prefill_pipelined_any", ragged),
        (kernelhub.attention, "gluon.prefill_pipelined_any", dense | {"causal": True, "scale": -0.5}),
        (kernelhub.paged_attention, "gluon.prefill_pipelined_any", paged),
        (kernelhub.paged_attention, "gluon.prefill_fp8_any", paged | float8),
        (kernelhub.grouped_gemm, "gluon.grouped_halves", grouped_gemm_inputs(bias=True)),
        (kernelhub.grouped_gemm, "gluon.grouped_halves", grouped_gemm_inputs(masked=True)),
        (
            kernelhub.grouped_gemm,
            "gluon.grouped_fp8",
            grouped_gemm_inputs(format="block", n=256),
        ),
    )
    with gluon_on_stub(stub) as patched:
        for op, name, given in calls:
            out = (
                torch.zeros_like(given["q"])
                if "q" in given
                else torch.zeros(*given["a"].shape[:-1], given["b"].shape[1], **half)
            )
            given |= {"out": out, "backend": name}
            with believed_on_gpu(op.op):
                kind = type(op.prepare(**{one: value for one, value in given.items() if one != "out"}).adapter)
                anew: list[Any] = []
                patched.setattr(kind, "_launch_anew", _noting(kind._launch_anew, anew))
                for like in (_cloned(given), given):
                    for _ in range(3):
                        op(**given)
                    made_anew = len(anew)
                    stub.take()
                    op(**like)
                    (again,) = stub.take()
                    assert len(anew) == made_anew, (name, "a call like one before is made again")
                    op.op._forget()
                    op(**like)
                    (first,) = stub.take()
                    assert len(anew) == made_anew + 1
                    assert again._replace(parameters=()) == first._replace(parameters=())
                    pairs = zip(again.parameters, first.parameters, strict=True)
                    differing = [at for at, (one, other) in enumerate(pairs) if one != other]
                    # The LSE is a new result of each call.
                    assert len(differing) <= ("pipelined" in name) + ("return_lse" in given), (name, differing)


def gluon_experts_again(stub: Stub) -> None:
    """What Gluon repeats of `fused_moe` has the parameters of launches made anew, but for the places of temporaries."""
    op, sizes = kernelhub.fused_moe, {"num_experts": 8, "hidden_size": 256, "intermediate_size": 128}
    with gluon_on_stub(stub) as patched, believed_on_gpu(op.op):
        for name, weights, tokens in (
            ("gluon.experts", "fp8_block", 64),
            ("gluon.experts", "fp8_block", 1200),  # pairs are counted by a launch of their own
            ("gluon.experts_halves", "plain", 3),
            ("gluon.experts_halves", "plain", 300),
        ):
            given = moe_inputs(weights=weights, tokens=tokens, **sizes)
            given |= {"out": torch.zeros_like(given["x"]), "residual": torch.zeros_like(given["x"]), "backend": name}
            kind = type(op.prepare(**{one: value for one, value in given.items() if one != "out"}).adapter)
            anew: list[Any] = []
            patched.setattr(kind, "_launch_rounds", _noting(kind._launch_rounds, anew))
            for like in (_cloned(given), given):
                for _ in range(3):
                    op(**given)
                made_anew = len(anew)
                stub.take()
                op(**like)
                again = stub.take()
                assert len(anew) == made_anew, (name, "a call like one before is made again")
                op.op._forget()
                op(**like)
                first = stub.take()
                assert len(anew) == made_anew + 1
                assert len(again) == len(first) == 4 + (weights == "fp8_block") + (tokens > 256), name
                places: dict[bytes, bytes] = {}
                for one, other in zip(again, first, strict=True):
                    assert one._replace(parameters=()) == other._replace(parameters=())
                    for ours, theirs in zip(one.parameters, other.parameters, strict=True):
                        if ours != theirs:
                            assert places.setdefault(ours, theirs) == theirs, (name, "one temporary in two places")
                assert len(set(places.values())) == len(places) > 2, (name, "two temporaries in one place")


def _noting(launch: Any, met: list[Any]) -> Any:
    def noted(self: Any, *given: Any) -> None:
        met.append(given)
        launch(self, *given)

    return noted


class Adapter:
    """Two launches with memory of their own between."""

    def __init__(self) -> None:
        self.first = Launcher(twice, {"SIZE": 64}, 4)
        self.second = Launcher(twice, {"SIZE": 64}, 4)
        self.repeated = Repeated()
        self.anew = 0
        self.clears = False

    def launch(self, x: torch.Tensor, y: torch.Tensor, n: int) -> None:
        self.repeated.run(n, (x, y), self.launch_anew, x, y, n)

    def launch_anew(self, x: torch.Tensor, y: torch.Tensor, n: int) -> None:
        self.anew += 1
        between = torch.empty(64, dtype=torch.float32, device="cpu")
        if self.clears:
            between.zero_()
        variant = None if (x.data_ptr() | y.data_ptr()) & 15 else (OneDevice.current,)
        self.first(3, variant, x, between, n)
        self.second(5, variant, between.view(8, 8).view(64), y, n)


def repeated(stub: Stub) -> None:
    """The third call and later ones make the launches of the second with their own tensors and temporaries."""
    on_stub(stub)
    adapter = Adapter()
    tensors = [(torch.zeros(64), torch.zeros(64)) for _ in range(5)]
    for x, y in tensors:
        adapter.launch(x, y, 7)
    assert adapter.anew == 2, adapter.anew
    for x, y in tensors[2:]:
        stub.take()
        adapter.launch(x, y, 7)
        first, second = stub.take()
        pointers = [struct.unpack("<QQi", b"".join(one.parameters[:3])) for one in (first, second)]
        assert (pointers[0][0], pointers[1][1]) == (x.data_ptr(), y.data_ptr())
        assert pointers[0][1] == pointers[1][0] not in (x.data_ptr(), y.data_ptr(), 0)
        assert (first.grid[0], second.grid[0], pointers[0][2]) == (3, 5, 7)
    x, y = tensors[0]
    adapter.launch(x, y, 9)
    adapter.launch(x[1:33], y[1:33], 7)
    assert adapter.anew == 4, "another value, and another form"
    memory = torch.zeros(65)
    adapter.launch(memory[1:], y, 7)
    assert adapter.anew == 5, "another alignment"
    adapter.launch(x, x, 7)
    adapter.launch(x, x, 7)
    stub.take()
    adapter.launch(x, x, 7)
    assert [struct.unpack("<Q", one.parameters[at])[0] for one, at in zip(stub.take(), (0, 1), strict=True)] == [
        x.data_ptr()
    ] * 2

    cleared = Adapter()
    cleared.clears = True
    for _ in range(4):
        cleared.launch(x, y, 7)
    assert cleared.anew == 4, "an operator of torch is no launch of ours"

    overlapping = Adapter()
    both = torch.zeros(128)
    for _ in range(4):
        overlapping.launch(both[:64], both[32:96], 7)
    assert overlapping.anew == 2, "operands are told apart as objects, though they overlap"


def struct_of_cuda(stub: Stub) -> None:
    """A CUDA kernel's only parameter gets the struct that cuda-bindings would be given, and its calls are repeated."""

    def by_bindings(*given: Any) -> Any:
        raise AssertionError("the launcher launches it")

    driver = SimpleNamespace(cuLaunchKernel=by_bindings, CUresult=SimpleNamespace(CUDA_SUCCESS=0))
    of = SimpleNamespace(driver=driver, function=lambda name, device: 4321)
    size = 5 * 8  # 36 bytes and the padding that C adds
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: OneDevice.stream_of(device), raising=False
        )
        patched.setattr(torch._C, "_cuda_getDevice", lambda: OneDevice.current, raising=False)
        patched.setattr(runtime, "parameter_sizes", lambda function, most: [size])
        kernel = of_cuda.Kernel(of, "rows", "2P" + "2q" + "f")
        stub.expect([size])
        repeated, met = Repeated(), []

        def anew(x: torch.Tensor, y: torch.Tensor) -> None:
            met.append(x)
            kernel(0, 3, 96, x, y, -2, 1 << 40, 0.5)

        for count in range(5):
            x, y = torch.zeros(64), torch.zeros(64)
            stub.take()
            repeated.run("key", (x, y), anew, x, y)
            (one,) = stub.take()
            fields = struct.pack("<QQqqf", x.data_ptr(), y.data_ptr(), -2, 1 << 40, 0.5)
            assert one.parameters[0][: len(fields)] == fields
            assert (one.grid[0], one.block[0], one.function, one.stream) == (3, 96, 4321, OneDevice.stream_of(0))
            assert len(met) == min(count + 1, 2)

        for cluster in (1, 2):  # overlap is asked for in graphs only, by calls that are repeated, too
            following, again = of_cuda.Kernel(of, "rows", "2P" + "2q" + "f", cluster, overlaps=True), Repeated()
            follow = lambda x, y, kernel=following: kernel(0, 3, 96, x, y, 1, 2, 0.5)  # noqa: E731
            for captured in (0, 0, 0, 1, 0):
                stub.capturing.value = captured
                stub.take()
                again.run("key", (x, y), follow, x, y)
                (one,) = stub.take()
                ids = [attribute[0] for attribute in one.attributes]
                assert ids == [4, 5][: 2 * (cluster > 1)] + [6] * captured, ids
        stub.capturing.value = 0

        address = x.data_ptr()
        for _ in range(4):  # an address without its tensor is that of one call
            repeated.run("address", (x, y), lambda x, y: met.append(kernel(0, 3, 96, address, y, -2, 7, 0.5)), x, y)
        assert len(met) == 6

        codes = torch.zeros(80, dtype=torch.uint8)
        begin = -codes.data_ptr() % 16 + 8
        for offset in (0, 0, 0, 1):  # vectors of 8 codes are moved in the first calls; nothing says so of a later one
            met.append(repeated.sequence_of("codes", (x, codes[begin : begin + 32])))
            anew_of_codes = lambda x, y: kernel(0, 3, 96, x, y, y.data_ptr() % 8, 7, 0.5)  # noqa: E731
            given = x, codes[begin + offset : begin + offset + 32]
            stub.take()
            repeated.run("codes", given, anew_of_codes, *given)
            (one,) = stub.take()
            assert struct.unpack_from("<q", one.parameters[0], 16) == (offset,)
        assert not any(met[-4:])

        patched.setattr(runtime, "parameter_sizes", lambda function, most: [size + 8])
        other = of_cuda.Kernel(of, "rows", "2P" + "2q" + "f")
        with pytest.raises(AssertionError, match="the launcher launches it"):
            other(0, 3, 96, x, y, 0, 0, 0.0)  # a struct of another size is left to cuda-bindings


def routing_of_cuda(stub: Stub) -> None:
    """A lane of `cuda.routing` reads two float32 at once only where every repeated call may, too."""
    functions, size = {"route_elements": 4325, "route_vectors": 4326}, 13 * 8
    driver = SimpleNamespace(cuLaunchKernel=None, CUresult=None)
    of = SimpleNamespace(driver=driver, function=lambda name, device: functions[name])

    def kernel(name: str, packing: str) -> Any:
        launch = of_cuda.Kernel(of, name, packing)
        return lambda device, *given: launch(0, *given)  # tensors are the CPU's

    given_library = SimpleNamespace(kernel=kernel)
    problem = RoutingProblem(device=simulated("H200"), dtype="float32", num_experts=64, top_k=8)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch._C, "_cuda_getCurrentRawStream", OneDevice.stream_of, raising=False)
        patched.setattr(torch._C, "_cuda_getDevice", lambda: OneDevice.current, raising=False)
        patched.setattr(runtime, "parameter_sizes", lambda function, most: [size])
        patched.setattr(of_routing.library, "library", lambda *given: given_library)
        stub.expect([size])
        memory = torch.zeros(5 * 64 + 8)
        begin = -memory.data_ptr() % 16 // 4
        for first, then in ((2, 1), (1, 2), (0, 1), (0, 2)):  # elements beyond a multiple of 16 bytes
            adapter = of_routing.Routing(problem)
            for offset in (first, first, first, then):
                logits = memory[begin + offset : begin + offset + 5 * 64].view(5, 64)
                stub.take()
                adapter.launch(logits, None, 1.0, torch.zeros(5, 8), torch.zeros(5, 8, dtype=torch.int32))
                (one,) = stub.take()
                assert number("Q", one.parameters[0][:8]) == logits.data_ptr()
                assert one.function == functions["route_elements" if offset else "route_vectors"]


def paged_decode_of_cuda(stub: Stub) -> None:
    """`cuda.paged_decode` in one launch or two, ragged or not: tensors, strides, offsets, the stream's counters."""
    functions = {"paged_decode": 4327, "paged_merge": 4328, "paged_decode_merging": 4329}
    driver = SimpleNamespace(cuLaunchKernel=None, CUresult=None)
    of = SimpleNamespace(
        driver=driver,
        function=lambda name, device: functions[name],
        allow_shared=lambda function, shared_bytes: None,
    )
    sizes: dict[int, list[int]] = {}

    def kernel(name: str, packing: str, **options: Any) -> Any:
        sizes[functions[name]] = [-(-of_cuda.packing_of(packing).size // 8) * 8]
        stub.expect_of(functions[name], sizes[functions[name]])
        launch = of_cuda.Kernel(of, name, packing, **options)
        return lambda device, *given: launch(0, *given)  # tensors are the CPU's

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch._C, "_cuda_getCurrentRawStream", OneDevice.stream_of, raising=False)
        patched.setattr(torch._C, "_cuda_getDevice", lambda: OneDevice.current, raising=False)
        patched.setattr(runtime, "parameter_sizes", lambda function, most: sizes[function])
        patched.setattr(of_pages.library, "library", lambda *given, **named: SimpleNamespace(kernel=kernel))
        for ragged, merges in ((False, False), (False, True), (True, False), (True, True)):
            patched.setattr(of_pages.Decode, "merges", merges)
            adapter, anew = of_pages.Decode(PagedAttentionProblem(device=simulated("H200"), ragged=ragged)), []
            launch_anew = adapter._launch_anew
            counted = lambda *given, of=anew, by=launch_anew: of.append(given) or by(*given)  # noqa: E731
            patched.setattr(adapter, "_launch_anew", counted)
            for count in range(5):
                q = torch.zeros(5, 34, 128, dtype=torch.bfloat16)[:, 1:33]
                k, v = (torch.zeros(50, 16, 8, 128, dtype=torch.bfloat16) for _ in "kv")
                table, lengths = torch.zeros(4, 7, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
                if not ragged:
                    q = q[:4]
                out, offsets = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(5, dtype=torch.int32)
                step = PagedStep(table, lengths, *((offsets, 1) if ragged else ()))
                stub.take()
                adapter.launch(q, k, v, step, Values(0.5), out, None)
                first, *others = stub.take()
                assert len(anew) == min(count + 1, 2)
                assert first.function == functions["paged_decode_merging" if merges else "paged_decode"]
                assert [one.function for one in others] == [functions["paged_merge"]] * (not merges)
                (given,) = first.parameters
                assert struct.unpack_from("<4Q", given) == tuple(one.data_ptr() for one in (q, k, v, out))
                assert struct.unpack_from("<2Q", given, 80) == (table.data_ptr(), lengths.data_ptr())
                assert struct.unpack_from("<3i", given, 108) == (4, 1, 1)
                assert struct.unpack_from("<4q", given, 136) == (7, 34 * 128, 34 * 128 * ragged, 128)
                assert struct.unpack_from("<3q", given, 216) == (32 * 128, 32 * 128 * ragged, 128)
                if ragged:
                    assert struct.unpack_from("<2Q", given, 264) == (offsets.data_ptr(), 5)
                if merges:
                    (own,) = struct.unpack_from("<Q", given, 280 if ragged else 264)
                    kept = counters_of(q, 1) if len(anew) > count else OneDevice.counted[0, 77]
                    assert kept is not None
                    assert own == kept.data_ptr()


def latent_decode_of_cuda(stub: Stub) -> None:
    """Both launches of `cuda.decode`: descriptors as the driver encoded them, sizes and strides beside them."""
    sizes = {"mla_decode": MappedKernel.sizes_of(latent._DECODE), "mla_merge": MappedKernel.sizes_of(latent._MERGE)}
    functions = {"mla_decode": 4321, "mla_merge": 4322}
    of = SimpleNamespace(
        overlaps=True,
        will_load=lambda name: None,
        function=lambda name, device: functions[name],
        allow_shared=lambda function, shared_bytes: None,
    )
    problem = MlaProblem(device=simulated("H200"), num_heads=128)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch._C, "_cuda_getDevice", lambda: OneDevice.current, raising=False)
        patched.setattr(latent.library, "library", lambda *given, **named: of)
        by_function = {functions[name]: of_name for name, of_name in sizes.items()}
        patched.setattr(runtime, "parameter_sizes", lambda function, most: by_function[function])
        for function, of_name in by_function.items():
            stub.expect_of(function, of_name)
        adapter, anew = latent.Decode(problem), []
        launch_anew = adapter.launch_anew
        patched.setattr(adapter, "launch_anew", lambda *given: anew.append(given) or launch_anew(*given))
        for count in range(5):
            q = torch.zeros(40, 128, 576, dtype=torch.bfloat16)
            cache = torch.zeros(50, 64, 576, dtype=torch.bfloat16)
            table, lengths = torch.zeros(40, 7, dtype=torch.int32), torch.zeros(40, dtype=torch.int32)
            out = torch.zeros(40, 128, 512, dtype=torch.bfloat16)
            stub.take()
            adapter.launch(q, cache, None, PagedStep(table, lengths), MlaValues(0.5), out, None)
            decode, merge = stub.take()
            assert len(anew) == min(count + 1, 2)
            assert (decode.function, decode.grid[0], decode.block[0], decode.shared_bytes) == (4321, 132, 384, 231152)
            assert (merge.function, merge.grid[0], merge.block[0], merge.shared_bytes) == (4322, 40 * 32, 128, 0)
            assert not decode.attributes + merge.attributes, "they overlap where they are captured"
            given = decode.parameters
            assert [number("i", one) for one in (*given[1:3], *given[6:8])] == [40 * 128, 576, 50 * 64, 576]
            assert [number("q", one) for one in (*given[3:5], *given[8:10])] == [576, 1] * 2
            read = [number("Q", given[at]) for at in (10, 15, 16, 17)]
            assert read == [one.data_ptr() for one in (out, table, lengths, cache)]
            assert number("f", given[18]) == pytest.approx(0.5 * 1.4426950408889634)
            assert [number("i", one) for one in given[19:28]] == [40, 1, 128, 64, 50 * 64, 49, 7 * 64, 2, 0]
            assert [number("q", one) for one in given[28:]] == [7, 1152, 128 * 512, 0, 512, 0, 0, 0]
            shared = [number("Q", one) for one in given[12:14]]
            assert shared == [number("Q", one) for one in merge.parameters[2:4]]
            assert number("Q", merge.parameters[0]) == out.data_ptr()
            assert [number("i", one) for one in merge.parameters[6:13]] == [40, 128, 66, 2, 7 * 64, 4, 0]
        other, memory = latent.Decode(problem), torch.zeros(out.numel() + 16, dtype=torch.bfloat16)
        begin = -memory.data_ptr() % 16 // 2
        for offset in (4, 4, 4, 1):  # pairs of numbers are written where the first ones are
            into = memory[begin + offset : begin + offset + out.numel()].view(out.shape)
            stub.take()
            other.launch(q, cache, None, PagedStep(table, lengths), MlaValues(0.5), into, None)
            decode, merge = stub.take()
            for one in (number("Q", decode.parameters[10]), number("Q", merge.parameters[0])):
                assert (one == into.data_ptr()) == (offset == 4)
                assert one % 8 == 0
    stub.forget()


def product_of_cuda(stub: Stub) -> None:
    """The launch of `cuda.fp8_gemm`: four descriptors with boxes of their own, and two blocks of a cluster."""
    of = SimpleNamespace(
        overlaps=True,
        will_load=lambda name: None,
        function=lambda name, device: 4323,
        allow_shared=lambda *given: None,
        kernel=lambda *given, **options: None,  # these scales are not turned
    )
    m, n, k = 4096, 6144, 2304
    problem = Fp8GemmProblem(device=simulated("H200"), n=n, k=k)
    sizes = MappedKernel.sizes_of(product._KINDS)
    form = product.form_for(m, n, k, 132)
    assert (form.rows, form.sharing) == (192, 2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch._C, "_cuda_getDevice", lambda: OneDevice.current, raising=False)
        patched.setattr(product.library, "library", lambda *given, **named: of)
        patched.setattr(runtime, "parameter_sizes", lambda function, most: sizes)
        stub.expect_of(4323, sizes)
        adapter, anew = product.Fp8Gemm(problem), []
        launch_anew = adapter._launch_anew
        patched.setattr(adapter, "_launch_anew", lambda *given: anew.append(given) or launch_anew(*given))
        for count in range(5):
            a, b = (torch.zeros(rows, k, dtype=torch.uint8) for rows in (m, n))
            a_scale, b_scale = torch.zeros(k // 128, m).t(), torch.zeros(n // 128, k // 128)
            out = torch.zeros(m, n, dtype=torch.bfloat16)
            stub.take()
            adapter.launch(a, b, a_scale, b_scale, None, out)
            (one,) = stub.take()
            assert len(anew) == min(count + 1, 2)
            assert (one.function, one.grid[0], one.block[0], one.shared_bytes) == (4323, 132, 512, form.shared_bytes)
            assert [attribute[0] for attribute in one.attributes] == [4, 5], "it overlaps where it is captured"
            assert one.attributes[0][1] & 0xFFFFFFFF == 2
            given = one.parameters
            for at, (of_map, type_of, swizzle, box) in enumerate(
                ((a, 0, 3, (128, 96)), (b, 0, 3, (128, 128)), (a_scale, 7, 0, (192, 1)), (out, 9, 3, (64, 64)))
            ):
                encoded = given[5 * at]
                assert struct.unpack_from("<IIII", encoded) == (type_of, 2, 0, swizzle)
                inner_first = reversed(of_map.shape) if of_map is not a_scale else of_map.shape
                bytes_apart = of_map.element_size() * max(of_map.stride())
                want = (of_map.data_ptr(), *inner_first, bytes_apart)
                assert struct.unpack_from("<QQQ", encoded, 24) + struct.unpack_from("<Q", encoded, 64) == want
                assert struct.unpack_from("<II", encoded, 88) == box
            assert [number("Q", one) for one in given[20:22]] == [b_scale.data_ptr(), out.data_ptr()]
            assert [number("i", one) for one in given[22:26]] == [m, n, 18, 8]
            assert [number("q", one) for one in given[26:29]] == [18, 1, 0]
            assert [number(kind, one) for kind, one in zip("Qq", given[29:], strict=True)] == [out.data_ptr(), n]
    stub.forget()


def turned_scales_of_cuda(stub: Stub) -> None:
    """Scales of rows side by side in a row: `cuda.fp8_gemm` is repeated with the launch that turns them."""
    driver = SimpleNamespace(cuLaunchKernel=None, CUresult=None)
    functions = {"turn_scales": 4327, "fp8_gemm": 4328}
    of = SimpleNamespace(
        driver=driver,
        overlaps=True,
        will_load=lambda name: None,
        function=lambda name, device: functions[name],
        allow_shared=lambda *given: None,
    )

    def kernel(name: str, packing: str, **options: Any) -> Any:
        launch = of_cuda.Kernel(of, name, packing, overlaps=True, **options)
        return lambda device, *given: launch(0, *given)  # tensors are the CPU's

    m, n, k = 1024, 7168, 2304
    problem = Fp8GemmProblem(device=simulated("H200"), n=n, k=k)
    sizes = {4327: [7 * 8], 4328: MappedKernel.sizes_of(product._KINDS)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch._C, "_cuda_getCurrentRawStream", OneDevice.stream_of, raising=False)
        patched.setattr(torch._C, "_cuda_getDevice", lambda: OneDevice.current, raising=False)
        made = SimpleNamespace(kernel=kernel, **vars(of))
        patched.setattr(product.library, "library", lambda *given, **named: made)
        patched.setattr(runtime, "parameter_sizes", lambda function, most: sizes[function])
        for function, of_name in sizes.items():
            stub.expect_of(function, of_name)
        adapter, anew = product.Fp8Gemm(problem), []
        launch_anew = adapter._launch_anew
        patched.setattr(adapter, "_launch_anew", lambda *given: anew.append(given) or launch_anew(*given))
        for count in range(5):
            a, b = (torch.zeros(rows, k, dtype=torch.uint8) for rows in (m, n))
            a_scale, b_scale = torch.zeros(m, k // 128), torch.zeros(n // 128, k // 128)
            stub.take()
            adapter.launch(a, b, a_scale, b_scale, None, torch.zeros(m, n, dtype=torch.bfloat16))
            turn, one = stub.take()
            assert len(anew) == min(count + 1, 2)
            assert (turn.function, turn.grid[0], turn.block[0]) == (4327, m * 3 // 128, 128)
            read, written, *numbers = struct.unpack("<QQqqqqq", turn.parameters[0])
            assert read == a_scale.data_ptr()
            assert numbers == [m, 18, 18, 1, m]
            assert one.function == 4328
            assert struct.unpack_from("<QQQ", one.parameters[10], 24) == (written, m, 18)
    stub.forget()


def devices_and_streams(stub: Stub) -> None:
    """A launch goes to the current stream of the kernel's device; another current device is left to the caller."""
    on_stub(stub)
    adapter, (x, y) = Adapter(), (torch.zeros(64), torch.zeros(64))
    for _ in range(3):
        adapter.launch(x, y, 7)
    streams = OneDevice.stream_of
    for stream in (77, 0, 1 << 40):
        OneDevice.stream_of = staticmethod(lambda device, stream=stream: stream)
        install_launcher(stub)
        other = Adapter()
        stub.take()
        for _ in range(3):
            other.launch(x, y, 7)
        assert {one.stream for one in stub.take()[-4:]} == {stream}
    OneDevice.stream_of = staticmethod(streams)
    install_launcher(stub)
    two = Adapter()
    for _ in range(3):
        two.launch(x, y, 7)
    assert two.anew == 2
    OneDevice.current = 1
    two.launch(x, y, 7)
    assert two.anew == 3, "device 1 has a context and functions of its own"
    stub.take()
    two.launch(x, y, 7)
    assert {one.stream for one in stub.take()} == {78}
    OneDevice.current = 0


def counters(stub: Stub) -> None:
    """Launches get the counters of their stream; where it has none, or is captured, they are made otherwise."""
    on_stub(stub)
    x, between = torch.zeros(64), torch.zeros(64)
    launcher = Launcher(twice, {"SIZE": 64}, 4)
    launcher(3, (0,), x, between, 7)
    step = launcher.step(3, (0,), x, between, 7)
    made = sequence([step], [[(0, 0), (2, 0), None]], 1, [0], 256, True)
    streams = OneDevice.stream_of
    seen = []
    for stream in (77, 78, 78, 77):
        OneDevice.stream_of = staticmethod(lambda device, stream=stream: stream)
        stub.take()
        assert made.launch(x) is True
        (noted,) = stub.take()
        assert noted.stream == stream
        seen.append(struct.unpack("<Q", noted.parameters[1])[0])
    wanted = [OneDevice.counted[0, stream].data_ptr() for stream in (77, 78)]
    assert seen == [wanted[0], wanted[1], wanted[1], wanted[0]]
    assert not Memory.live
    stub.capturing.value = 1
    assert made.launch(x) is False
    stub.capturing.value = 0
    before = OneDevice.counters_of
    for answer, stream in ((0, 79), (None, 80)):
        OneDevice.stream_of = staticmethod(lambda device, stream=stream: stream)
        OneDevice.counters_of = staticmethod(lambda device, stream, answer=answer: answer)
        install_launcher(stub)
        launcher = Launcher(twice, {"SIZE": 64}, 4)
        launcher(3, (0,), x, between, 7)
        stub.take()
        made = sequence([launcher.step(3, (0,), x, between, 7)], [[(0, 0), (1, 0), None]], 1, [0], 0, True)
        if answer is None:
            with pytest.raises(TypeError):
                made.launch(x)
        else:
            assert made.launch(x) is False
        assert not stub.take()
    OneDevice.counters_of, OneDevice.stream_of = before, streams
    install_launcher(stub)


def shared_memory(stub: Stub) -> None:
    """Memory that is no operand stays the same; words of the host decide whether the launches are made, and live on."""
    on_stub(stub)
    x, kept = torch.zeros(64), torch.zeros(64)
    words = (c_uint64 * 2)(0, 77)
    alive = weakref.finalize(words, lambda: None)
    shared = Shared((kept,), addressof(words), addressof(words) + 8, words)
    launcher = Launcher(twice, {"SIZE": 64}, 4)
    launcher(3, (0,), x, kept, 7)
    made = repetition([Launch(launcher, 3, (0,), (x, kept, 7))], (x,), shared)
    streams = OneDevice.stream_of
    OneDevice.stream_of = staticmethod(lambda device: 77)
    stub.take()
    assert made.launch(x) is True
    assert struct.unpack("<Q", stub.take()[0].parameters[1])[0] == kept.data_ptr()
    for first, second, launched in ((1, 77, False), (0, 78, False), (1 << 63, 77, False), (0, 77, True)):
        words[0], words[1] = first, second
        assert made.launch(x) is launched
        assert len(stub.take()) == launched
    module, driver = runtime.native().module, runtime.native().driver
    known = module.Known(driver, lambda tensor: True, 1, (0,), (), ())
    known.attach(made, (0,))
    assert known.launch((x,)) == 2
    words[0] = 1
    assert known.launch((x,)) == 1, "the call holds, and is launched otherwise"
    words[0] = 0
    del shared, words
    gc.collect()
    assert alive.alive
    assert made.launch(x) is True
    del made, known
    gc.collect()
    assert not alive.alive
    step = launcher.step(3, (0,), x, kept, 7)
    with pytest.raises(ValueError, match="eight bytes"):
        sequence([step], [[(0, 0), (), None]], 1, [0], shared=Shared((kept,), 4, 0, kept))
    with pytest.raises(ValueError, match="names an operand"):
        sequence([step], [[(0, 0), None, None]], 1, [0])
    OneDevice.stream_of = staticmethod(streams)
    stub.take()


def memory_as_a_tensor(stub: Stub) -> None:
    """Temporaries may be a tensor, as on a GPU: it lives as long as the call."""
    on_stub(stub)
    made: list[Any] = []

    def allocate(size: int, stream: int) -> torch.Tensor:
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        made.append((weakref.ref(memory), memory.data_ptr(), size, stream))
        return memory

    native = stub.native(stream_of=OneDevice.stream_of, current=lambda: 0, allocate=allocate, release=None)
    runtime.native = lambda: native
    adapter, (x, y) = Adapter(), (torch.zeros(64), torch.zeros(64))
    for _ in range(4):
        adapter.launch(x, y, 7)
    assert adapter.anew == 2
    assert len(made) == 2
    first, second = stub.take()[-2:]
    memory, address, size, stream = made[-1]
    assert first.parameters[1] == second.parameters[0] == struct.pack("<Q", address)
    assert (size, stream) == (256, 77)
    assert memory() is None
    install_launcher(stub)


def errors(stub: Stub) -> None:
    """An error of the driver names its code and the kernel; a thread without a context gets one; no launch is lost."""
    on_stub(stub)
    adapter, (x, y) = Adapter(), (torch.zeros(64), torch.zeros(64))
    for _ in range(3):
        adapter.launch(x, y, 7)
    stub.fail(700)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS, 700.* twice") as raised:
        adapter.launch(x, y, 7)
    assert is_final(raised.value)
    assert not Memory.live, "temporaries are given back after an error, too"
    entered = c_int.in_dll(stub.library, "entered")
    before = entered.value
    stub.take()
    stub.fail(201)
    adapter.launch(x, y, 7)
    assert len(stub.take()) == 2
    assert entered.value == before + 1
    kernel = adapter.first._ready[(0,)].direct
    for wrong, error in (
        ((3, x, y), TypeError),
        ((3, x, y, 7, 8), TypeError),
        ((3, None, y, 7), TypeError),
        ((3, "x", y, 7), TypeError),
        ((3, x, y, 1 << 31), OverflowError),
        ((3, x, y, -(1 << 70)), OverflowError),
        ((3, x, y, 0.5), TypeError),
        ((-1, x, y, 7), ValueError),
        ((1 << 31, x, y, 7), ValueError),
        (((1, 70000), x, y, 7), ValueError),
        (((), x, y, 7), ValueError),
    ):
        with pytest.raises(error):
            kernel.launch(*wrong)
    assert not stub.take()
    assert kernel.launch(0, x, y, 7)
    assert not stub.take(), "an empty grid is no launch"


def hooks(stub: Stub) -> None:
    """While a profiler has hooks, Triton launches."""
    on_stub(stub)
    adapter, (x, y), called = Adapter(), (torch.zeros(64), torch.zeros(64)), []
    for _ in range(3):
        adapter.launch(x, y, 7)
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(called.append)
    adapter.launch(x, y, 7)
    hook.remove(called.append)
    hook.calls.clear()
    assert len(called) == 2
    assert adapter.anew == 3
    adapter.launch(x, y, 7)
    assert adapter.anew == 3


def threads_and_leaks(stub: Stub) -> None:
    """Threads share a kernel without mixing arguments, and launches keep nothing alive."""
    on_stub(stub)
    adapter = Adapter()
    mine = [(torch.zeros(64), torch.zeros(64)) for _ in range(4)]
    for _ in range(3):
        adapter.launch(*mine[0], 7)
    wrong: list[Any] = []

    def work(x: torch.Tensor, y: torch.Tensor) -> None:
        kernel = adapter.first._ready[(0,)].direct
        for n in range(500):
            packed = kernel.packed(x, y, n)
            if struct.unpack("<QQi", b"".join(packed[:3])[:20]) != (x.data_ptr(), y.data_ptr(), n):
                wrong.append(n)
            adapter.launch(x, y, 7)

    workers = [threading.Thread(target=work, args=pair) for pair in mine]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    x, y = mine[0]
    known = adapter.repeated._known[7]
    kernel = adapter.first._ready[(0,)].direct
    tracked = (x, y, kernel, known.launch, *known.forms[0], None, True, False)
    gc.collect()
    before = [sys.getrefcount(one) for one in tracked]
    for _ in range(1000):
        adapter.launch(x, y, 7)
        kernel.launch(3, x, y, 7)
        with contextlib.suppress(OverflowError):
            kernel.launch(3, x, y, 1 << 40)
    after = [sys.getrefcount(one) for one in tracked]
    assert all(abs(a - b) < 20 for a, b in zip(before, after, strict=True)), (before, after)
    assert not Memory.live
    adapter.first._ready.clear()
    adapter.repeated.clear()


@contextlib.contextmanager
def believed_on_gpu(op: Any) -> Iterator[None]:
    """The op's problems are those of a GPU, though its tensors are in CPU memory."""
    contract = op.contract

    def problem_of(key: Any, device: int) -> Any:
        return dataclasses.replace(contract.problem_of(key, device), device=simulated("H200"))

    op.contract = dataclasses.replace(contract, problem_of=problem_of)
    try:
        yield
    finally:
        op.contract = contract
        op._forget()


def decode(name: str) -> tuple[Any, dict[str, Any]]:
    """An op over pages, and a call of it with a destination."""
    name, _, features = name.partition(" of ")
    table = torch.tensor([[0, 1], [4, 2]], dtype=torch.int32)
    given = {"block_table": table, "seq_lens": torch.tensor([20, 32], dtype=torch.int32), "backend": "triton"}
    half = {"dtype": torch.bfloat16}
    if name == "paged_attention":
        caches = {"k_cache": torch.zeros(5, 16, 2, 64, **half), "v_cache": torch.zeros(5, 16, 2, 64, **half)}
        tokens = 2
        if features == "fp8":
            caches = {one: cache.to(torch.float8_e4m3fn) for one, cache in caches.items()}
            given |= {"k_scale": torch.ones(1), "v_scale": torch.ones(1), "window": 7, "softcap": 3.0, "scale": 0.2}
            given |= {"sinks": torch.zeros(8, **half)}
        if features == "lse":
            given |= {"return_lse": True}
        if features == "gluon":
            given |= {"backend": "gluon.prefill_pipelined_any"}
        if features == "speculation":
            given["q"] = torch.zeros(2, 3, 8, 64, **half)
        if features == "ragged":
            tokens = 4
            given |= {"cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32), "max_seqlen_q": 3, "window": 5}
        return kernelhub.paged_attention, {
            "q": torch.zeros(tokens, 8, 64, **half),
            **caches,
            **given,
            "out": torch.zeros_like(given.get("q", torch.empty(tokens, 8, 64, **half))),
        }
    given |= {"scale": 0.1, "value_dim": 64}
    operands = {"q": torch.zeros(2, 4, 96, **half), "kv_cache": torch.zeros(5, 16, 96, **half)}
    return kernelhub.mla_attention, {**operands, **given, "out": torch.zeros(2, 4, 64, **half)}


def _parts(given: Any) -> Sequence[Any]:
    """What an operand of a launch consists of."""
    if dataclasses.is_dataclass(given):
        return [getattr(given, field.name) for field in dataclasses.fields(given)]
    return given if isinstance(given, tuple | list) else (given,)


@contextlib.contextmanager
def counted(adapter: type) -> Iterator[list[Any]]:
    """The calls that reach the adapter, which the launcher does not recognise. A small kernel replaces those of it."""
    met: list[Any] = []
    name = next(one for one in ("_launch_anew", "launch_anew", "_launch_rounds") if hasattr(adapter, one))
    of_launch, of_anew = (next(kind for kind in adapter.__mro__ if one in vars(kind)) for one in ("launch", name))
    launch, anew, small = adapter.launch, getattr(adapter, name), Launcher(twice, {"SIZE": 64}, 4)
    small(1, (0,), torch.zeros(64), torch.zeros(64), 7)  # compiled for float32, which is all the same to the stub

    def noted(self: Any, *operands: Any) -> None:
        met.append(operands)
        launch(self, *operands)

    def small_anew(self: Any, *operands: Any) -> None:
        first, *flat = (one for given in operands for one in _parts(given))
        for tensor in flat:
            if isinstance(tensor, torch.Tensor):
                small(1, (0,), first, tensor, 7)

    of_launch.launch = noted
    setattr(of_anew, name, small_anew)
    try:
        yield met
    finally:
        of_launch.launch = launch
        setattr(of_anew, name, anew)


def _decodes_again(stub: Stub, name: str) -> None:
    """A decode call like one before is launched at once, and every other is checked as if it were the first."""
    on_stub(stub, [8] * 2)
    runtime.recognise_in_c(runtime.native())
    op, good = decode(name)
    with believed_on_gpu(op.op):
        plan = op.prepare(**{one: value for one, value in good.items() if one != "out"})
        adapter = type(plan.adapter)
        others = [
            (parameter, kind, other)
            for parameter, tensor in good.items()
            if isinstance(tensor, torch.Tensor)
            for kind, other in others_than(tensor, parameter, good)
        ]
        others += [("window", "another", 6), ("window", "true", True), ("window", "a pair", (7, 0))]
        others += [("softcap", "another", 2.0), ("softcap", "text", "x"), ("kv_layout", "a list", ["NHD"])]
        others += [("value_dim", "another", 48), ("value_dim", "a float", 64.0), ("kv_scale", "another", 1.0)]
        others += [("topk_indices", "a list", [0]), ("sinks", "another", torch.zeros(4))]
        others = [one for one in others if one[0] in inspect.signature(op).parameters]
        others += [("scale", "another", 0.3), ("scale", "text", "x"), ("scale", "true", True)]
        others += [("scale", "a tensor", torch.ones(())), ("return_lse", "another", True), ("return_lse", "one", 1)]
        others += [
            ("causal", "none", None),
            ("causal", "one", 1),
            ("max_seqlen_q", "text", "x"),
            ("backend", "none", "no"),
        ]
        with counted(adapter) as met:
            first = [outcome(op, good | {parameter: other}) for parameter, _, other in others]
            assert sum(isinstance(one, type) for one in first) > 30
            op.op._forget()
            stub.take()
            op(**good)
            launches = _launched(stub, good)
            assert "out" in {one for of_one in launches for one in of_one}
            for _ in range(3):
                op(**good)
            calls = len(met)
            assert calls >= 2
            for (parameter, kind, other), expected in zip(others, first, strict=True):
                stub.take()
                like = _cloned(good)
                op(**like)
                assert len(met) == calls, (parameter, kind, "a call like one before reaches no adapter")
                assert _launched(stub, like) == launches
                assert outcome(op, good | {parameter: other}) == expected, (parameter, kind)
                op(**good)
                calls = len(met)
            _states(op, good, met, mla_call if name == "mla_attention" else paged_call)
            _steps_again(stub, op, good, met)


def _whole(op: Any, given: dict[str, Any]) -> Any:
    """The result of a call that the extension makes from its arguments alone."""
    bound = inspect.signature(op).bind(**given)
    bound.apply_defaults()
    results = op.op.again(*(bound.arguments[name] for name in op.op.parameters))
    assert results is not None
    return results


def shapes_of(results: Any) -> Any:
    """The forms of what a call returned."""
    if isinstance(results, tuple):
        return tuple(map(shapes_of, results))
    return None if results is None else (results.shape, results.stride(), results.dtype, type(results))


def assert_own_memory(results: Any, given: dict[str, Any]) -> None:
    """A result is one of the arguments, or has memory of its own."""
    all_of = results if isinstance(results, tuple) else (results,)
    arguments = [one for one in given.values() if isinstance(one, torch.Tensor)]
    spans = [span_of(one) for one in arguments]
    for one in all_of:
        if one is not None and not any(one is argument for argument in arguments):
            begin, end = span_of(one)
            assert all(end <= first or last <= begin for first, last in spans)


def _cloned(given: dict[str, Any]) -> dict[str, Any]:
    """The same call in other memory."""

    def cloned(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").copy_(value)

    return {one: cloned(value) if isinstance(value, torch.Tensor) else value for one, value in given.items()}


def _launched(stub: Stub, given: dict[str, Any]) -> list[list[str]]:
    """Which of a call's tensors each launch since the last time got; "" for others."""
    names = {value.data_ptr(): one for one, value in given.items() if isinstance(value, torch.Tensor)}
    pointers = [[struct.unpack("<Q", value)[0] for value in one.parameters] for one in stub.take()]
    return [[names.get(pointer, "") for pointer in of_one] for of_one in pointers]


def _states(op: Any, good: dict[str, Any], met: list[Any], module: Any) -> None:
    """Nothing is recognised in another state of torch or of the process."""
    fresh = {one: value for one, value in good.items() if one != "out"}
    results = outcome(op, good)
    for given in (good, fresh):
        for _ in range(4):
            op(**given)
        calls = len(met)
        assert outcome(op, given) == results
        assert len(met) == calls
        with forward_ad.dual_level():
            op(**given)
        assert len(met) == calls + 1
        with torch.inference_mode():
            op(**given)
        assert len(met) == calls + 2
        HUB.forget_selections()
        op(**given)
        assert len(met) == calls + 3, "settings may have changed"
    checks, module.checks_devices = module.checks_devices, lambda: True
    HUB.forget_selections()
    for _ in range(5):
        calls = len(met)
        op(**good)
        assert len(met) == calls + 1, "KERNELHUB_CHECK looks at each call"
    module.checks_devices = checks
    HUB.forget_selections()


def _steps_again(stub: Stub, op: Any, good: dict[str, Any], met: list[Any]) -> None:
    """The same of a step's runs."""
    plan = op.prepare(**{one: value for one, value in good.items() if one != "out"})
    layer = {one: value for one, value in good.items() if one in ("q", "k_cache", "v_cache", "kv_cache", "out")}
    metadata = [good[one] for one in ("block_table", "seq_lens", "cu_seqlens_q") if one in good]
    others = [(one, *other) for one, value in layer.items() for other in others_than(value, one, good)]
    first = []
    for parameter, _, other in others:
        step = plan.begin(*metadata, max_seqlen_q=good.get("max_seqlen_q"))
        first.append(outcome(step.run, layer | {parameter: other}))
    plan = op.prepare(**{one: value for one, value in good.items() if one != "out"})
    step = plan.begin(*metadata, max_seqlen_q=good.get("max_seqlen_q"))
    stub.take()
    step.run(**layer)
    launches = _launched(stub, layer)
    for _ in range(3):
        step.run(**layer)
    calls = len(met)
    for (parameter, kind, other), expected in zip(others, first, strict=True):
        stub.take()
        like = _cloned(layer)
        step.run(**like)
        assert len(met) == calls, (parameter, kind, "a run like one before reaches no adapter")
        assert _launched(stub, like) == launches
        assert outcome(step.run, layer | {parameter: other}) == expected, (parameter, kind)
        step.run(**layer)
        calls = len(met)
    without = {one: value for one, value in layer.items() if one != "out"}
    made = step.run(**without)
    assert (made[0] if isinstance(made, tuple) else made).data_ptr() != layer["out"].data_ptr()
    assert len(met) == calls
    plan.adapter.launch = lambda *operands: None  # as an audit does
    assert not plan.adapter.repeats
    del plan.adapter.launch


def decode_again(stub: Stub) -> None:
    """Of `paged_attention`."""
    _decodes_again(stub, "paged_attention")


def decode_with_features_again(stub: Stub) -> None:
    """Of `paged_attention` with tensors that not every call has."""
    for features in ("gluon", "fp8", "lse", "ragged", "speculation"):
        _decodes_again(stub, f"paged_attention of {features}")


def latent_decode_again(stub: Stub) -> None:
    """Of `mla_attention`."""
    _decodes_again(stub, "mla_attention")


def _products_again(stub: Stub, name: str, *more: str) -> None:
    """A call like one before is launched at once, and every other is checked as if it were the first."""
    on_stub(stub, [8] * 2)
    runtime.recognise_in_c(runtime.native())
    name, _, backend = name.partition(" by ")
    op, good = call_of(name)
    good["backend"] = backend or "triton"
    if backend.startswith("gluon"):  # wide heads of 16 bits
        wide = (*good["q"].shape[:-1], 64), (*good["k"].shape[:-1], 64)
        shapes = {"q": wide[0], "k": wide[1], "v": wide[1], "out": wide[0]}
        good |= {one: torch.zeros(shape, dtype=torch.bfloat16) for one, shape in shapes.items()}
    with believed_on_gpu(op.op):
        made = op.prepare(**{one: value for one, value in good.items() if one != "out"}).adapter
        adapter = type(made)
        with counted(adapter) as met:
            for given in (good, {one: value for one, value in good.items() if one != "out"}):
                others = [
                    (parameter, kind, other)
                    for parameter, tensor in given.items()
                    if parameter in ("a", "b_scale", "x", "w13_scale", "out", *more)
                    for kind, other in others_than(tensor, parameter, given)
                ]
                first = [outcome(op, given | {parameter: other}) for parameter, _, other in others]
                assert sum(isinstance(one, type) for one in first) > 10
                op.op._forget()
                stub.take()
                op(**given)
                launches = _launched(stub, given)
                assert {one for of_one in launches for one in of_one} >= {
                    one for one, value in given.items() if isinstance(value, torch.Tensor)
                }
                for _ in range(WHOLE):
                    op(**given)
                calls = len(met)
                for (parameter, kind, other), expected in zip(others, first, strict=True):
                    stub.take()
                    like = _cloned(given)
                    results = _whole(op, like)
                    assert len(met) == calls, (parameter, kind, "a call like one before reaches no adapter")
                    assert _launched(stub, like) == launches
                    assert shapes_of(results) == shapes_of(op(**given))
                    assert_own_memory(results, like)
                    assert outcome(op, given | {parameter: other}) == expected, (parameter, kind)
                    op.op._forget()
                    for _ in range(WHOLE):
                        op(**given)
                    calls = len(met)
                with forward_ad.dual_level():
                    op(**given)
                assert len(met) == calls + 1
                with torch.inference_mode():
                    op(**given)
                assert len(met) == calls + 2
                plan = op.prepare(**{one: value for one, value in given.items() if one != "out"})
                if hasattr(plan.adapter, "configure"):
                    calls = len(met)
                    op(**given)
                    assert len(met) == calls
                    plan.adapter.configure({})
                    op(**given)
                    assert len(met) == calls + 1, "other tiles are launched anew"
            if name in ("attention", "linear_attention"):
                for _ in range(WHOLE):
                    op(**good)
                calls = len(met)
                op(**good | {"scale": 0.3})
                assert len(met) == calls + 1, "another factor"
            if name == "fused_moe":
                _experts_run_again(stub, op, good, met)


def _experts_run_again(stub: Stub, op: Any, good: dict[str, Any], met: list[Any]) -> None:
    """The same of a plan's runs, whose layer is fixed."""
    plan = op.prepare(**{one: value for one, value in good.items() if one != "out"})
    tokens = {one: value for one, value in good.items() if one in ("x", "topk_weights", "topk_ids", "out")}
    others = [(one, *other) for one in ("topk_ids", "out") for other in others_than(tokens[one], one, good)]
    first = [outcome(plan.run, tokens | {parameter: other}) for parameter, _, other in others]
    assert sum(isinstance(one, type) for one in first) > 10
    for given in (tokens, {one: value for one, value in tokens.items() if one != "out"}):
        for (parameter, kind, other), expected in zip(others, first, strict=True):
            if parameter not in given:
                continue
            plan = op.prepare(**{one: value for one, value in good.items() if one != "out"})
            stub.take()
            plan.run(**given)
            launches = _launched(stub, good | given)
            for _ in range(4):
                plan.run(**given)
            calls, like = len(met), _cloned(given)
            stub.take()
            plan.run(**like)
            assert len(met) == calls, (parameter, kind, "a run like one before reaches no adapter")
            assert _launched(stub, good | like) == launches or "out" not in given
            if "out" not in given:
                break
            assert outcome(plan.run, given | {parameter: other}) == expected, (parameter, kind)


def product_again(stub: Stub) -> None:
    """Of `fp8_gemm`."""
    _products_again(stub, "fp8_gemm")


def experts_again(stub: Stub) -> None:
    """Of `fused_moe`."""
    _products_again(stub, "fused_moe")


def small_calls_again(stub: Stub) -> None:
    """Of ops whose launch is the most of what they take."""
    for name, changed in (
        ("rms_norm_quant", ("weight", "out_residual", "out_scale")),
        ("silu_and_mul_quant", ()),
        ("write_kv_cache", ("k", "k_cache", "slot_mapping")),
        ("write_kv_cache, rotated", ("q", "k_cache", "positions", "cos_sin_cache")),
        ("write_mla_cache", ("k_rope", "kv_cache", "slot_mapping")),
        ("concat_mla_k", ("k_nope", "k_rope")),
        ("route_experts", ("logits", "out_weights", "out_ids")),
        ("quantize_fp8", ("out_scale",)),
        ("quantize_mxfp8", ("out_scale",)),
        ("quantize_nvfp4", ("out_scale", "out_global_scale")),
        ("fp4_gemm", ("a_scale",)),
        ("bmm_fp8", ("b",)),
        ("mqa_logits", ("q", "k")),
        ("paged_mqa_logits", ("q", "k_cache", "seq_lens")),
        ("paged_mqa_logits, scales in pages", ("q", "k_cache", "block_table")),
        ("topk_indices", ("logits",)),
        ("dequantize_fp8", ("scale",)),
        ("dequantize_nvfp4", ("scale", "global_scale")),
        ("attention", ("k",)),
        ("attention by gluon.prefill_pipelined_any", ("k",)),
        ("linear_attention", ("state", "out_state")),
    ):
        _products_again(stub, name, *changed)
    op, outs, lses = kernelhub.merge_attention_states, torch.randn(4, 3, 4, 16), torch.randn(4, 4, 3)
    with believed_on_gpu(op.op):
        adapter = type(op.prepare([*outs[:2]], [*lses[:2]], return_lse=True, backend="triton").adapter)
        with counted(adapter) as met:
            for stacked in (False, True):
                launches = []
                for first in (*(0,) * WHOLE, 2):
                    parts = tuple(of[first : first + 2] if stacked else [*of[first : first + 2]] for of in (outs, lses))
                    out, out_lse = torch.empty(3, 4, 16), torch.empty(4, 3)
                    calls, _ = len(met), stub.take()
                    op(*parts, out, out_lse, backend="triton")
                    given = dict(enumerate((*parts[0], *parts[1], out, out_lse)))
                    launches.append(_launched(stub, {str(at): value for at, value in given.items()}))
                assert len(met) == calls, "a call like one before reaches no adapter"
                assert launches[-1] == launches[0]
                assert {"0", "2", "4", "5"} <= {one for of_one in launches[0] for one in of_one}


def _collectives() -> Iterator[tuple[Any, Any, dict[str, Any], tuple[str, ...]]]:
    """Collectives over memory of all ranks: the op, its kernel's adapter, a call, and its destinations."""
    facets = {"device": simulated("H100"), "link": "nvlink", "peers": "atomics", "message": "32KB", "world_size": 2}
    half, part = {"dtype": torch.bfloat16}, torch.zeros(2, 64, dtype=torch.bfloat16)
    x = {"x": torch.zeros(4, 64, **half)}
    norm = {"residual": torch.zeros(4, 64, **half), "weight": torch.ones(64, **half), "eps": 1e-5}
    rows = torch.zeros(8, 64, **half)
    of_norm = AllReduceRmsNormProblem(**facets, hidden_size=64)
    reduced = {**x, "out": torch.zeros(4, 64, **half)}
    added = {**reduced, **norm, "residual_out": torch.zeros(4, 64, **half)}
    yield kernelhub.all_reduce, OneShot(AllReduceProblem(**facets)), reduced, ("out",)
    yield kernelhub.all_reduce, TwoShot(AllReduceProblem(**facets)), reduced, ("out",)
    yield kernelhub.all_reduce_rms_norm, OneShotRmsNorm(of_norm), added, ("out", "residual_out")
    yield kernelhub.all_reduce_rms_norm, TwoShotRmsNorm(of_norm), added, ("out", "residual_out")
    wide = {name: torch.zeros(4, 2048, **half) for name in ("x", "residual", "out", "residual_out")}
    wide |= {"weight": torch.ones(2048, **half), "eps": 1e-5}
    of_wide = dataclasses.replace(of_norm, hidden_size=2048)
    yield kernelhub.all_reduce_rms_norm, ClusteredRmsNorm(of_wide), wide, ("out", "residual_out")
    for form in ("fp8_group", "fp8_tensor", "nvfp4"):
        problem = dataclasses.replace(of_norm, hidden_size=256, format=form)
        if form == "fp8_group":
            problem = dataclasses.replace(problem, column=True)
        wide = {name: torch.zeros(4, 256, **half) for name in ("x", "residual", "residual_out")}
        wide |= {"weight": torch.ones(256, **half), "eps": 1e-5, **QUANTISED[form]()}
        ours = tuple(name for name in wide if name in ("out", "residual_out", "out_scale"))
        yield kernelhub.all_reduce_rms_norm, OneShotRmsNormQuant(problem), wide, ours
    yield kernelhub.all_gather, AllGather(AllGatherProblem(**facets)), {**x, "out": rows}, ("out",)
    yield kernelhub.reduce_scatter, ReduceScatter(ReduceScatterProblem(**facets)), {**x, "out": part}, ("out",)


QUANTISED = {
    "fp8_group": lambda: {
        "out": torch.zeros(4, 256).to(torch.float8_e4m3fn),
        "out_scale": torch.zeros(2, 4).t(),
    },
    "fp8_tensor": lambda: {"out": torch.zeros(4, 256).to(torch.float8_e4m3fn), "scale": torch.ones(1)},
    "nvfp4": lambda: {
        "out": torch.zeros(4, 128, dtype=torch.uint8),
        "out_scale": torch.zeros(4, 16).to(torch.float8_e4m3fn),
        "global_scale": torch.ones(1),
    },
}


def collectives_again(stub: Stub) -> None:
    """A collective like one before is launched at once, until a rank is missing or its group has other memory."""
    on_stub_by_function(stub)
    runtime.recognise_in_c(runtime.native())
    groups = _groups_of_two()
    for op, adapter, good, places in _collectives():
        parameters = list(inspect.signature(op).parameters)[:-1]
        ticks: list[int] = []

        def refused(device: int) -> Any:
            raise AssertionError(device)

        bind = op.op.contract.bind
        bound = bind(adapter, adapter.problem, -1, lambda ticks=ticks: ticks.append(0) or 0, refused)
        took = [one for one in parameters if one in _TAKEN[op.__name__]]

        def run(group: Any, given: dict[str, Any], bound: Any = bound, took: Any = took) -> Any:
            return bound(*(group if one == "group" else given.get(one) for one in took))

        memories = [_Workspaces() for _ in groups]
        for group, memory in zip(groups, memories, strict=True):
            getattr(adapter, "parts", adapter).attach(group.group_name, memory.own)
        met: list[Any] = []
        kind, launch = type(adapter), type(adapter).launch
        kind.launch = lambda *given, launch=launch, met=met: (met.append(given), launch(*given))[1]
        try:
            bound = bind(adapter, adapter.problem, -1, lambda ticks=ticks: ticks.append(0) or 0, refused)
            fresh = {one: value for one, value in good.items() if one not in places}
            with captured_calls():
                for _ in range(8):
                    run(groups[0], good, bound)
            for given in (good, fresh):
                stub.take()
                run(groups[0], given, bound)
                [first] = stub.take()
                for _ in range(4):
                    run(groups[0], given, bound)
                calls, ticked = len(met), len(ticks)
                stub.take()
                like = _cloned(given)
                results = run(groups[0], like, bound)
                assert (len(met), len(ticks)) == (calls, ticked + 1), "a call like one before reaches no adapter"
                [again] = stub.take()
                assert (again.grid, again.function) == (first.grid, first.function)
                made = dict(enumerate(results if isinstance(results, tuple) else (results,)))
                pointers = {one.data_ptr() for one in (*like.values(), *made.values()) if isinstance(one, torch.Tensor)}
                own = memories[0].own
                shared = {own.missing.data_ptr()}
                if isinstance(adapter, ClusteredRmsNorm):
                    assert again.grid == (8, 1, 1), "two programs of each row"
                    shared |= {own.turn_counters.data_ptr(), *own.turn_slots[:2]}
                else:
                    shared |= {own.counters.data_ptr(), *own.slots[:2]}
                addresses = addresses_of(again)
                assert pointers | shared <= addresses
                scalars = [value for value in again.parameters if len(value) == 4]
                assert scalars == [value for value in first.parameters if len(value) == 4]
                # Not scales by columns, which are views, and not a given scale, which is a result of each call.
                ready = given is fresh and getattr(adapter.problem, "format", "none") in ("none", "nvfp4")
                kept = [run(groups[0], fresh, bound) for _ in range(40)] if ready else []
                kept = [one for result in kept for one in (result if isinstance(result, tuple) else (result,))]
                spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in kept)
                assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), "results are fresh"
                assert not any(one._is_view() for one in kept)
                assert len(met) == calls
                if given is good:  # in the place of an operand
                    place = {
                        "all_reduce": {"out": "x"},
                        "all_reduce_rms_norm": {"out": "x", "residual_out": "residual"},
                    }
                    place = place.get(op.__name__, {})
                    if good["out"].dtype is not torch.bfloat16:  # codes
                        place = {"residual_out": "residual"}
                    inside = good | {one: good[operand] for one, operand in place.items()}
                    for _ in range(5 if place else 0):
                        run(groups[0], inside, bound)
                    calls = len(met)
                    run(groups[0], _in_place(inside, places), bound)
                    assert len(met) == calls
                run(groups[1], given, bound)
                assert len(met) > calls, "another group has other memory"
                run(groups[1], given, bound)
                [other] = stub.take()[-1:]
                addresses = addresses_of(other)
                at = "turn_slots" if isinstance(adapter, ClusteredRmsNorm) else "slots"
                assert set(getattr(memories[1].own, at)[:2]) <= addresses
                assert not set(getattr(own, at)[:2]) & addresses
                for _ in range(4):
                    run(groups[0], given, bound)
                calls = len(met)
                shifted = torch.zeros(like["x"].numel() + 1, dtype=torch.bfloat16)[1:].view_as(like["x"])
                run(groups[0], given | {"x": shifted}, bound)
                assert len(met) == calls + 1, "an operand that is not aligned is copied"
                own.missing[1] = 1
                with pytest.raises(RanksDisagree, match="rank 1"):
                    run(groups[0], given, bound)
                own.missing[1] = 0
                newer = _Workspaces()
                getattr(adapter, "parts", adapter).attach(groups[0].group_name, newer.own)
                stub.take()
                for _ in range(2):
                    run(groups[0], given, bound)
                addresses = addresses_of(stub.take()[-1])
                assert set(getattr(newer.own, at)[:2]) <= addresses, "prepared anew, over other memory"
                memories[0] = newer
        finally:
            kind.launch = launch


def pairs_again(stub: Stub) -> None:
    """A collective of two ops like one before makes the launches of both at once, as long as both would repeat theirs.

    What ends that for one of them ends it for the pair: a rank is missing, its group has other memory, other tiles.
    """
    on_stub_by_function(stub)
    runtime.recognise_in_c(runtime.native())
    groups, memories = _groups_of_two(), [_Workspaces() for _ in range(2)]
    facets = {"device": simulated("H100"), "link": "nvlink", "peers": "atomics", "world_size": 2, "message": "32KB"}
    facets |= {"dtype": "bfloat16", "weight_dtype": "bfloat16", "hidden_size": 256, "format": "fp8_group"}
    problem = AllReduceRmsNormProblem(**facets)
    pair, (of_sum, of_norm) = SumThenQuant(problem), parts_of(problem)
    total, norm = OneShot(of_sum[1]), Norm(of_norm[1])
    for group, memory in zip(groups, memories, strict=True):
        total.attach(group.group_name, memory.own)
    pair.part_bounds[:] = [Bound(None, adapter, None, None, -1) for adapter in (total, norm)]  # type: ignore[arg-type]
    ticks: list[int] = []
    met: list[Any] = []
    of_class = SumThenQuant.launch

    def refused(device: int) -> Any:
        raise AssertionError(device)

    def tensors() -> dict[str, torch.Tensor]:
        x, residual, added = (torch.zeros(4, 256, dtype=torch.bfloat16) for _ in range(3))
        out, scale = torch.zeros(4, 256, dtype=torch.float8_e4m3fn), torch.zeros(4, 2)
        return {"x": x, "residual": residual, "weight": x[0].clone(), "out": out, "scale": scale, "added": added}

    def launches(given: dict[str, Any], at: int = 0) -> tuple[list[Any], Any]:
        stub.take()
        names = ("x", "residual", "weight")
        places = given.get("out"), given.get("added"), None, None, given.get("scale")
        result = run(*(given[name] for name in names), 1e-5, groups[at], *places)
        return stub.take(), result

    def at_once(given: dict[str, Any]) -> tuple[list[Any], Any]:
        """The launches of a call that reaches no adapter."""
        before = len(met), len(ticks)
        found = launches(given)
        assert (len(met), len(ticks)) == (before[0], before[1] + 1)
        assert [one.function for one in found[0]] == functions
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SumThenQuant, "launch", lambda *given: (met.append(given), of_class(*given))[1])
        run = kernelhub.all_reduce_rms_norm.op.contract.bind(pair, problem, -1, lambda: ticks.append(0) or 0, refused)
        functions = [one.function for one in launches(tensors())[0]]
        assert len(set(functions)) == 2
        for _ in range(7):
            launches(tensors())

        given = tensors()
        (first, second), _ = at_once(given)
        own = memories[0].own
        read = {given["x"].data_ptr(), given["added"].data_ptr(), own.counters.data_ptr(), *own.slots[:2]}
        assert read <= addresses_of(first)
        assert {given[name].data_ptr() for name in given if name != "x"} <= addresses_of(second)
        assert given["x"].data_ptr() not in addresses_of(second), "it reads the sum where the new residual goes"

        fresh = {name: given[name] for name in ("x", "residual", "weight")}
        for _ in range(8):
            launches(fresh)
        kept = [one for _ in range(40) for one in at_once(fresh)[1]]
        spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in kept)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans)), "results are fresh"
        assert not any(one._is_view() for one in kept)

        for place in ("residual", "x"):
            inside = given | {"added": given[place]}
            for _ in range(8):
                launches(inside)
            like = tensors()
            like["added"] = like[place]
            (first, second), _ = at_once(like)
            between = addresses_of(first) & addresses_of(second) - {0}
            assert (like["added"].data_ptr() in between) == (place == "x"), (
                "the residual is read after the sum is there"
            )

        before = len(met)
        (first, _), _ = launches(given, at=1)
        assert len(met) > before, "another group has other memory"
        assert set(memories[1].own.slots[:2]) <= addresses_of(first)

        at_once(given)
        norm._repeated.clear()  # as when it has other tiles
        before = len(met)
        launches(given)
        assert len(met) == before + 1
        for _ in range(4):
            launches(given)
        at_once(given)

        own.missing[1] = 1
        with pytest.raises(RanksDisagree, match="rank 1"):
            launches(given)
        own.missing[1] = 0
        newer = _Workspaces()
        total.attach(groups[0].group_name, newer.own)
        (first, _), _ = launches(given)
        assert set(newer.own.slots[:2]) <= addresses_of(first), "prepared anew, over other memory"
        for _ in range(8):
            launches(given)
        (first, _), _ = at_once(given)
        assert set(newer.own.slots[:2]) <= addresses_of(first)

    audited = SumThenQuant(problem)
    audited.part_bounds[:] = pair.part_bounds
    norm.launch = lambda *given: (met.append(given), Norm.launch(norm, *given))[1]  # type: ignore[method-assign]
    run = kernelhub.all_reduce_rms_norm.op.contract.bind(audited, problem, -1, int, refused)
    before = len(met)
    for _ in range(8):
        launches(given)
    assert len(met) == before + 8, "an audit of a part sees all calls"
    stub.forget()


def pair_of_cuda_sum_again(stub: Stub) -> None:
    """The sum of a pair may be CUDA's and the norm Triton's: both launches are repeated, until a rank is missing."""
    runtime.recognise_in_c(runtime.native())

    def made(compiled: Any, given: int, **options: Any) -> Any:
        sizes = sizes_of(compiled, given)
        stub.expect_of(compiled.function, sizes)
        return direct_launch(compiled, given, sizes=lambda function, most: sizes, **options)

    def by_bindings(*given: Any) -> Any:
        raise AssertionError("the launcher launches it")

    of_sum_launch, size = 4321, 10 * 8
    driver = SimpleNamespace(cuLaunchKernel=by_bindings, CUresult=SimpleNamespace(CUDA_SUCCESS=0))
    of = SimpleNamespace(driver=driver, function=lambda name, device: of_sum_launch)

    def kernel(name: str, packing: str) -> Any:
        launch = of_cuda.Kernel(of, name, packing)
        return lambda device, *given: launch(0, *given)  # tensors are the CPU's

    groups, memory = _groups_of_two(), _Workspaces()
    facets = {"device": simulated("H200"), "link": "nvlink", "peers": "atomics", "world_size": 2, "message": "32KB"}
    facets |= {"dtype": "bfloat16", "weight_dtype": "bfloat16", "hidden_size": 256, "format": "fp8_group"}
    problem = AllReduceRmsNormProblem(**facets)
    pair, (of_sum, of_norm) = SumThenQuant(problem), parts_of(problem)
    met: list[Any] = []
    of_class = SumThenQuant.launch

    def refused(device: int) -> Any:
        raise AssertionError(device)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda device: OneDevice.stream_of(device), raising=False
        )
        patched.setattr(torch._C, "_cuda_getDevice", lambda: OneDevice.current, raising=False)
        patched.setattr(runtime, "parameter_sizes", lambda function, most: [size])
        patched.setattr(of_triton, "direct_launch", made)
        given_library = SimpleNamespace(kernel=kernel, function=of.function)
        patched.setattr(of_cuda, "library", lambda source, constants, device: given_library)
        patched.setattr(SumThenQuant, "launch", lambda *given: (met.append(given), of_class(*given))[1])
        stub.expect_of(of_sum_launch, [size])
        total, norm = CudaOneShot(of_sum[1]), Norm(of_norm[1])
        total.attach(groups[0].group_name, memory.own)
        pair.part_bounds[:] = [Bound(None, adapter, None, None, -1) for adapter in (total, norm)]  # type: ignore[arg-type]
        run = kernelhub.all_reduce_rms_norm.op.contract.bind(pair, problem, -1, int, refused)

        def launches() -> tuple[list[Any], dict[str, torch.Tensor]]:
            x, residual, added = (torch.zeros(4, 256, dtype=torch.bfloat16) for _ in range(3))
            out, scale = torch.zeros(4, 256, dtype=torch.float8_e4m3fn), torch.zeros(4, 2)
            given = {"x": x, "residual": residual, "weight": x[0].clone(), "out": out, "scale": scale, "added": added}
            stub.take()
            run(x, residual, given["weight"], 1e-5, groups[0], out, added, None, None, scale)
            return stub.take(), given

        own, calls = memory.own, []
        for _ in range(12):
            before = len(met)
            (first, second), given = launches()
            calls.append(len(met) - before)
            assert first.function == of_sum_launch != second.function
            assert (first.grid[0], first.block[0]) == (1, 128), "a thread has 16 bytes of 2 KB"
            fields = struct.unpack_from("<QQQQqQQqqq", first.parameters[0])
            places = given["x"].data_ptr(), given["added"].data_ptr(), own.turn_counters.data_ptr()
            assert fields[:3] == places
            assert fields[3:8] == (own.missing.data_ptr(), 0, own.turn_slots[1], own.turn_slots[0], 1 << 16)
            assert fields[9] == 128
            addresses = addresses_of(second)
            if calls[1:]:  # the first is Triton's own launch
                assert {given[name].data_ptr() for name in given if name != "x"} <= addresses
                assert given["x"].data_ptr() not in addresses, "it reads the sum where the new residual goes"
        assert calls[-4:] == [0] * 4, "a call like one before reaches no adapter"
        own.missing[1] = 1
        with pytest.raises(RanksDisagree, match="rank 1"):
            launches()
        own.missing[1] = 0
    stub.forget()


def exchanges_again(stub: Stub) -> None:
    """The same of a combine; the launches of a dispatch are repeated with results of its own."""
    on_stub_by_function(stub)
    runtime.recognise_in_c(runtime.native())
    (group, _), memory = _groups_of_two(), _Workspaces()
    facets = {"device": simulated("H100"), "link": "nvlink", "peers": "atomics", "world_size": 2}
    facets |= {"capacity": "few", "hidden_size": 256, "top_k": 2, "num_experts": 8}

    def refused(device: int) -> Any:
        raise AssertionError(device)

    for format, with_scales in itertools.product(("tokens", "contiguous", "masked"), (False, True)):
        dtype = torch.float8_e4m3fn if with_scales else torch.bfloat16
        problem = DispatchProblem(**facets, dtype=str(dtype)[6:], format=format, scales=with_scales)
        dispatch = PushRows(problem)
        dispatch.attach(group.group_name, memory.own)
        bind = kernelhub.moe_dispatch.op.contract.bind
        anew: list[Any] = []
        made_anew = dispatch._launch_anew
        dispatch._launch_anew = lambda *given, anew=anew, made=made_anew: (anew.append(given), made(*given))[1]
        entered: list[Any] = []
        of_rows, launch_rows = type(dispatch), type(dispatch).launch
        of_rows.launch = lambda *all_of, entered=entered, made=launch_rows: (entered.append(0), made(*all_of))[1]
        run = bind(dispatch, problem, -1, lambda: 0, refused)
        of_rows.launch = launch_rows

        def given(rows: int, dtype: torch.dtype = dtype, with_scales: bool = with_scales, format: str = format) -> Any:
            x, ids, weights = torch.zeros(rows, 256).to(dtype), torch.zeros(rows, 2, dtype=torch.int32), None
            weights = torch.zeros(rows, 2)
            return x, ids, weights, group, 8, torch.ones(rows, 2) if with_scales else None, format, 4

        for rows in (3, 4):
            sent = [run(*given(rows)) for _ in range(2)][-1]
            assert len(anew) == 2
            for _ in range(2):
                tokens = given(rows)
                stub.take()
                sent = run(*tokens)
                assert len(anew) == 2, "a call like one before is launched at once"
                launches = stub.take()
                assert len(launches) == (1 if format == "tokens" else 3)
                if format != "tokens":  # the others are made by several launches
                    continue
                pointers = addresses_of(launches[0])
                parts = [*tokens[:3], sent.x, sent.scales, sent.topk_ids, sent.topk_weights, sent.counts, sent.offsets]
                parts += [tokens[5], *sent.handle[1:4], memory.own.counters, memory.own.missing]
                assert {part.data_ptr() for part in parts if part is not None} <= pointers
            anew.clear()
            for _ in range(6):
                run(*given(rows))
            entered.clear()
            stub.take()
            tokens = given(rows)
            kept = [run(*tokens), run(*tokens)]
            assert not entered, "a call like one before reaches no adapter"
            assert len(stub.take()) == (2 if format == "tokens" else 6)
            first, second = ({part.data_ptr() for part in (sent.x, sent.counts, *sent.handle[2:4])} for sent in kept)
            assert not first & second, "each call has results of its own"
            assert kept[0].handle[1] is tokens[1]
            anew.clear()
            for _ in range(6):
                run(*given(rows), kept[0])
            assert len(anew) == 2, "a call into an earlier result is another one"
            entered.clear()
            stub.take()
            for out in kept:  # that of another layer has the same form
                tokens = given(rows)
                assert run(*tokens, out) is out
                assert out.handle[1] is tokens[1]
                launches = stub.take()
                assert len(launches) == (1 if format == "tokens" else 3)
                if format == "tokens":
                    pointers = addresses_of(launches[0])
                    parts = [*tokens[:3], *outputs_of(out), dispatch._connections.get(group).words]
                    assert {part.data_ptr() for part in parts} <= pointers
            assert not entered, "nor does one into an earlier result"
            for wrong in (
                kept[0]._replace(counts=kept[0].counts.long()),
                kept[0]._replace(x=kept[0].x[..., :-1]),
                kept[0]._replace(counts=kept[0].handle[2].view(-1)[: kept[0].counts.numel()]),
                tuple(kept[0]),
            ):
                with pytest.raises(kernelhub.errors.InvalidArgument, match="out"):
                    run(*tokens, wrong)
            alias = list(tokens)
            alias[2] = kept[0].handle[3][:rows]
            with pytest.raises(kernelhub.errors.InvalidArgument, match="overlaps"):
                run(*alias, kept[0])
            assert not entered
            assert not stub.take()
            anew.clear()
        alike = list(given(4))
        if with_scales:
            alike[5] = alike[2]
            for _ in range(3):
                run(*alike)
            assert len(anew) == 2, "scales and weights may be one tensor"
            anew.clear()
        memory.own.missing[1] = 1
        with pytest.raises(RanksDisagree, match="rank 1"):
            run(*given(4))
        with pytest.raises(RanksDisagree, match="rank 1"):
            run(*given(4), kept[0])
        memory.own.missing[1] = 0

        of_y = CombineProblem(**facets, format=format, rows="fixed")
        combine = PushSums(of_y)
        combine.attach(group.group_name, memory.own)
        met: list[Any] = []
        kind = type(combine)
        launch = kind.launch
        kind.launch = lambda *given, met=met, launch=launch: (met.append(given), launch(*given))[1]
        try:
            run = kernelhub.moe_combine.op.contract.bind(combine, of_y, -1, lambda: 0, refused)
            y, out = sent.x.to(torch.bfloat16), torch.zeros(4, 256, dtype=torch.bfloat16)
            for place in (out, None):
                for _ in range(4):
                    run(y, sent.handle, group, place)
                copied = [part.clone() for part in sent.handle]  # as another process might make one
                for like in ([*copied[:4], *sent.handle[4:]], copied, [part.clone() for part in copied]):
                    for _ in range(0 if like[4] is sent.handle[4] else 3):  # it is checked before it is known
                        run(y, like, group, place)
                    calls, into = len(met), None if place is None else place.clone()
                    stub.take()
                    found = run(y.clone(), like, group, into)
                    assert len(met) == calls, "a call like one before reaches no adapter"
                    [one] = stub.take()
                    pointers = addresses_of(one)
                    assert {part.data_ptr() for part in (*like[1:4], found, memory.own.counters)} <= pointers
                other = [sent.handle[0].clone(), *sent.handle[1:]]
                other[0][4] = 3  # another number of tokens
                with pytest.raises(kernelhub.errors.InvalidArgument):
                    run(y, other, group, place)
                for at in range(1, 7):  # of another type, also those that the kernel does not read
                    other = list(sent.handle)
                    other[at] = other[at].double()
                    with pytest.raises(kernelhub.errors.InvalidArgument, match="no handle"):
                        run(y, other, group, place)
            memory.own.missing[1] = 1
            with pytest.raises(RanksDisagree, match="rank 1"):
                run(y, sent.handle, group, out)
            memory.own.missing[1] = 0
        finally:
            kind.launch = launch


def into_results_again(stub: Stub) -> None:
    """A dispatch into an earlier result that comes again is made without a look-up, if nothing else decides on it."""
    on_stub_by_function(stub)
    runtime.recognise_in_c(runtime.native())
    facets = {"device": simulated("H100"), "link": "nvlink", "peers": "atomics", "world_size": 2}
    facets |= {"capacity": "few", "hidden_size": 256, "top_k": 2, "num_experts": 8}
    ticks: list[int] = []
    elsewhere: list[int] = []

    def other_device(device: int) -> Any:
        elsewhere.append(device)
        return lambda *arguments: "elsewhere"

    for format, with_scales in (("tokens", False), ("contiguous", True), ("masked", False)):
        groups, memories = _groups_of_two(), [_Workspaces(_OfStream), _Workspaces(_OfStream)]
        dtype = torch.float8_e4m3fn if with_scales else torch.bfloat16
        problem = DispatchProblem(**facets, dtype=str(dtype)[6:], format=format, scales=with_scales)
        dispatch, entered = PushRows(problem), []
        for group, memory in zip(groups, memories, strict=True):
            dispatch.attach(group.group_name, memory.own)
        kind, launch = type(dispatch), type(dispatch).launch
        kind.launch = lambda *given, entered=entered, launch=launch: (entered.append(0), launch(*given))[1]
        run = kernelhub.moe_dispatch.op.contract.bind(dispatch, problem, -1, lambda: ticks.append(0) or 0, other_device)
        kind.launch = launch

        def tokens(rows: int = 3, format: str = format, dtype: torch.dtype = dtype, scaled: bool = with_scales) -> Any:
            x, ids = torch.zeros(rows, 256).to(dtype), torch.zeros(rows, 2, dtype=torch.int32)
            scales = torch.ones(rows, 2) if scaled else None
            return [x, ids, torch.zeros(rows, 2), groups[0], 8, scales, format, 4]  # noqa: B023

        def at_once(given: list[Any], out: Any) -> bool:
            """Whether a call reached no adapter; its result is right in either way."""
            before, ticked = len(entered), len(ticks)  # noqa: B023
            assert run(*given, out) is out  # noqa: B023
            assert len(ticks) == ticked + 1
            assert header_of(out.handle).tokens == len(given[0])
            assert out.handle[1] is given[1]
            assert all(one is other for one, other in zip(out.handle[2:4], outputs_of(out)[-2:], strict=True))
            return len(entered) == before  # noqa: B023

        def met(address: int, given: list[Any], out: Any, format: str = format) -> bool:
            """Whether a call's launch has an address, where the launches are of one function."""
            stub.take()
            at_once(given, out)
            if format != "tokens":
                return True
            return address in addresses_of(stub.take()[0])

        outs = [run(*tokens()) for _ in range(2)]
        for _ in range(6):
            at_once(tokens(), outs[0])
        assert all(at_once(tokens(), out) for out in (*outs, *outs))
        assert met(memories[0].own.slots[1], tokens(), outs[1])

        for _ in range(6):  # of another shape
            at_once(tokens(2), outs[0])
        for turn in range(6):
            assert at_once(tokens(2 + turn % 2), outs[turn % 2]), "numbers of tokens may take turns"
        assert at_once([value + 0 if type(value) is int else value for value in tokens()], outs[0])

        for at, value in ((4, 8.0), (4, True), (7, 4.0), (7, True), (6, ["tokens"]), (6, b"tokens"), (3, None)):
            wrong = tokens()
            wrong[at] = value
            with pytest.raises(kernelhub.errors.InvalidArgument):
                run(*wrong, outs[0])
        good, out = tokens(), outs[0]
        nested = torch.nested.nested_tensor([*good[2]])
        for at, value in (
            (0, good[0][:, :-16]),
            (0, good[0].to(torch.float16)),
            (1, good[1].long()),
            (1, good[1][:2]),
            (2, nested),
            (2, good[2].to_sparse()),
            (2, outs[0].handle[3][:3]),  # which the call writes
            (5, None if with_scales else torch.ones(3, 2)),
        ):
            wrong = list(good)
            wrong[at] = value
            with pytest.raises(kernelhub.errors.InvalidArgument):
                run(*wrong, out)
        for wrong in (
            tuple(out),
            list(out),
            out._replace(handle=tuple(out.handle)),
            out._replace(handle=out.handle[:3]),
            out._replace(x=good[0]),
            out._replace(x=out.x.clone().requires_grad_() if dtype.itemsize > 1 else out.x.to("meta")),
            out._replace(counts=torch.nested.nested_tensor([out.counts])),
            out._replace(counts=out.counts.clone().resize_(1)),
            out._replace(topk_ids=torch.zeros(3, 2) if format != "tokens" else None),
        ):
            before = len(entered)
            with pytest.raises(kernelhub.errors.InvalidArgument, match="out"):
                run(*good, wrong)
            assert len(entered) == before
        stub.take()

        shifted = list(good)
        shifted[0] = torch.zeros(good[0].numel() + 1).to(dtype)[1:].view_as(good[0])
        assert not at_once(shifted, out), "rows that are not aligned are copied"
        moved = outputs_of(out)[-1]
        odd = torch.zeros(moved.numel() + 1)[1:].view_as(moved)
        other = out._replace(handle=[*out.handle[:3], odd, *out.handle[4:]])
        if format == "tokens":
            other = other._replace(topk_weights=odd)
        assert not at_once(good, other), "so are places of the result"
        assert at_once(good, out)

        with forward_ad.dual_level():
            assert not at_once(good, out), "torch differentiates"
        watched, WATCHED.launched = WATCHED.launched, []
        assert at_once(good, out)
        noted, WATCHED.launched = WATCHED.launched, watched
        assert len(noted) == 1, "what learns a whole call sees this one"
        assert all(any(part is one for one in noted[0][2]) for part in (*good[:3], *outputs_of(out)))

        streams = OneDevice.stream_of
        OneDevice.stream_of = staticmethod(lambda device: 90)
        assert not at_once(good, out), "on another stream the call follows the last one"
        assert at_once(good, out)
        OneDevice.stream_of = staticmethod(streams)
        assert not at_once(good, out)
        OneDevice.current = 1
        torch_current = torch.cuda.current_device
        assert not at_once(good, out), "another device is current"
        OneDevice.current, torch.cuda.current_device = 0, torch_current
        assert at_once(good, out)
        hook = triton.knobs.runtime.launch_enter_hook
        hook.add(print_nothing)
        assert not at_once(good, out), "a profiler sees each launch"
        hook.remove(print_nothing)
        assert at_once(good, out)

        stub.take()
        stub.capturing.value = 1
        assert at_once(good, out), "a captured call is made of kernels"
        stub.capturing.value = 0
        assert len(stub.take()) == (1 if format == "tokens" else 3)
        with pytest.MonkeyPatch.context() as patch:
            settings = SimpleNamespace(settings={"KERNELHUB_COMM_TIMEOUT_S": 7.0})
            patch.setattr("kernelhub.ops.comm.experts.dispatch.HUB", settings)
            later = kernelhub.moe_dispatch.op.contract.bind(dispatch, problem, -1, lambda: 0, other_device)
        for _ in range(9):
            stub.take()
            assert later(*good, out) is out
            limits = [struct.unpack("<i", value)[0] for value in stub.take()[0].parameters if len(value) == 4]
            assert not limits or limits[-1] == 7_000_000, "another setting is another call"
        assert at_once(good, out)

        second = list(good)
        second[3] = groups[1]
        slots = memories[1].own.slots[1]
        assert met(slots, second, out), "another group has other memory"
        assert format != "tokens" or not met(slots, good, out)
        memories[0].own.missing[1] = 1
        with pytest.raises(RanksDisagree, match="rank 1"):
            run(*good, out)
        memories[0].own.missing[1] = 0
        newer = _Workspaces(_OfStream)
        dispatch.attach(groups[0].group_name, newer.own)
        assert met(newer.own.slots[1], good, out), "prepared anew, over other memory"
        for _ in range(6):
            at_once(good, out)
        assert at_once(good, out)
        kept, handle = weakref.ref(out.x), out.handle
        del out, outs, other, noted, moved, wrong, group
        handle.clear()
        gc.collect()
        assert kept() is None, "the result of the last call is not kept"
        gone = [weakref.ref(group) for group in groups]
        del good, second, shifted
        groups.clear()
        dist.destroy_process_group()
        gc.collect()
        assert [one() for one in gone] == [None, None], "nor is its group"
        assert not elsewhere


def print_nothing(metadata: Any) -> None:
    """A profiler's hook."""


_TAKEN = {
    "all_reduce": ("x", "group", "out"),
    "reduce_scatter": ("x", "group", "out"),
    "all_gather": ("x", "group", "out", "rows"),
    "all_reduce_rms_norm": (
        *("x", "residual", "weight", "eps", "group", "out", "residual_out", "scale", "global_scale"),
        "out_scale",
    ),
}


class _OfStream(Workspace):
    """It follows the stream of the stub's device, as that of a GPU follows the current one."""

    def shared(self, *more: Any) -> Any:
        return super().shared(*more)._replace(stream=addressof(self._raw_stream))

    def follow_last_call(self) -> None:
        self._raw_stream.value = OneDevice.stream_of(0)


class _Workspaces:
    """Memory of two ranks in this process.

    It is mapped, so that its addresses are above 4 GB, as a GPU's are. Triton takes the address of a slot, which it is
    given as a number, in 4 bytes if it is below 2 GB, as the heap of a Python is that is not position-independent.
    """

    def __init__(self, kind: type[Workspace] = Workspace) -> None:
        self.memories = [torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8) for _ in range(2)]
        self.own = kind(0, self.memories[0], [memory.data_ptr() for memory in self.memories], 1 << 14)


@contextlib.contextmanager
def captured_calls() -> Iterator[None]:
    """Calls go into a CUDA graph, as far as kernelhub asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernelhub.backends.shared.repeat.captures", lambda: True)
        patch.setattr("kernelhub.ops.known_calls.captured", lambda given: True)
        yield


def _groups_of_two() -> list[Any]:
    """Two process groups of two ranks, of which only this one is there."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return [dist.group.WORLD, dist.new_group([0, 1])]


def _in_place(given: dict[str, Any], places: Sequence[str]) -> dict[str, Any]:
    """Other tensors, destinations being again the operands that they were."""
    made = _cloned({one: value for one, value in given.items() if one not in places})
    for place in places:
        same = next((one for one, value in given.items() if one not in places and value is given[place]), None)
        made[place] = given[place].clone() if same is None else made[same]
    return made


SCENARIOS = (
    same_as_triton,
    tensor_maps,
    gluon_maps,
    repeated,
    repeated_maps,
    gluon_again,
    gluon_experts_again,
    struct_of_cuda,
    routing_of_cuda,
    paged_decode_of_cuda,
    latent_decode_of_cuda,
    product_of_cuda,
    turned_scales_of_cuda,
    devices_and_streams,
    counters,
    shared_memory,
    memory_as_a_tensor,
    errors,
    hooks,
    threads_and_leaks,
    decode_again,
    decode_with_features_again,
    latent_decode_again,
    product_again,
    experts_again,
    small_calls_again,
    collectives_again,
    pairs_again,
    pair_of_cuda_sum_again,
    exchanges_again,
    into_results_again,
)


def main(names: list[str]) -> None:
    perform(SCENARIOS, names)


if __name__ == "__main__":
    main(sys.argv[1:])
