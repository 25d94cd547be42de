"""What a process has set for a model's layers, autocast or the precision of float32 products, alters no result."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kernelhub
from kernelhub.ops import precision
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp8.batched.inputs import bmm_fp8_inputs
from kernelhub.ops.gemm.fp8.inputs import fp8_gemm_inputs
from kernelhub.ops.gemm.grouped.inputs import grouped_gemm_inputs
from kernelhub.ops.mla.cache.inputs import write_mla_cache_inputs
from kernelhub.ops.mla.concat.inputs import concat_inputs
from kernelhub.ops.precision import own_precision

F32, SIZES = torch.float32, {"tokens": 33, "n": 160, "k": 256}
X = torch.randn(33, 256, generator=torch.Generator().manual_seed(0))
CALLS: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "fp8_gemm, blocks": lambda: ("fp8_gemm", fp8_gemm_inputs(**SIZES, out_dtype=F32)),
    "fp8_gemm, rows": lambda: ("fp8_gemm", fp8_gemm_inputs(**SIZES, scaling="row", bias=True, out_dtype=F32)),
    "fp8_gemm, weights": lambda: ("fp8_gemm", fp8_gemm_inputs(**SIZES, weight_only=torch.float16, out_dtype=F32)),
    "bmm_fp8": lambda: ("bmm_fp8", bmm_fp8_inputs(batch=3, **SIZES, out_dtype=F32)),
    "fp4_gemm": lambda: ("fp4_gemm", fp4_gemm_inputs(**SIZES, out_dtype=F32)),
    "fp4_gemm, many rows": lambda: ("fp4_gemm", fp4_gemm_inputs(tokens=512, n=32, k=64, out_dtype=F32)),
    "grouped_gemm": lambda: ("grouped_gemm", grouped_gemm_inputs(a_dtype=F32, format="float32")),
    "grouped_gemm, halves": lambda: ("grouped_gemm", grouped_gemm_inputs(a_dtype=torch.float16, format="float16")),
    "grouped_gemm, nvfp4": lambda: ("grouped_gemm", {**grouped_gemm_inputs(format="nvfp4"), "out_dtype": F32}),
    "write_mla_cache": lambda: ("write_mla_cache", write_mla_cache_inputs(tokens=9)),
    "concat_mla_k": lambda: ("concat_mla_k", concat_inputs(tokens=9)),
    "quantize_fp8": lambda: ("quantize_fp8", {"x": X, "granularity": "group"}),
    "quantize_nvfp4": lambda: ("quantize_nvfp4", {"x": X}),
    "quantize_mxfp4": lambda: ("quantize_mxfp4", {"x": X}),
    "quantize_mxfp8": lambda: ("quantize_mxfp8", {"x": X}),
    "dequantize_fp8": lambda: (
        "dequantize_fp8",
        dict(zip(("x", "scale"), kernelhub.quantize_fp8(X, "group"), strict=True)),
    ),
}


@contextlib.contextmanager
def products_in(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def tensors_in(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "medium": lambda: products_in("medium"),
    "bfloat16 by default": lambda: tensors_in(torch.bfloat16),
    "float64 by default": lambda: tensors_in(torch.float64),
}


def results(made: Any) -> list[Tensor]:
    tensors = list(made) if isinstance(made, tuple) else [made]
    return [tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor for tensor in tensors]


@pytest.mark.parametrize("backend", ["torch", "triton", "cpp", "reference"])
@pytest.mark.parametrize("case", CALLS)
def test_settings_for_layers_alter_nothing(case: str, backend: str) -> None:
    op, call = CALLS[case]()
    function = getattr(kernelhub, op)
    if backend not in ("reference", *(name.split(".")[0] for name in function.kernels())):
        return  # the op has no such kernel
    if (backend == "cpp" and "weight" in case) or (backend == "triton" and "many rows" not in case):
        return  # the one multiplies quantised activations; of the other nothing but products of many rows is torch's

    def run() -> list[Tensor]:
        return results(function.reference(**call) if backend == "reference" else function(**call, backend=backend))

    want = run()
    for name, setting in SETTINGS.items():
        if backend == "triton" and "default" in name:
            continue  # Triton's interpreter makes tensors of the default dtype
        with setting():
            given = run()
        for one, other in zip(given, want, strict=True):
            assert one.dtype is other.dtype, name
            rows = slice(0, 25) if op == "grouped_gemm" else slice(None)
            assert torch.equal(one[rows], other[rows]), name


@pytest.mark.parametrize("setting", ["autocast to bfloat16", "autocast to float16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_references_that_join_rows_alter_nothing(
    dtype: torch.dtype, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)
    for module in ("kernelhub.ops.comm.reference", "kernelhub.ops.comm.experts.reference"):
        monkeypatch.setattr(f"{module}.resolved", lambda op, given: given)
    x = X[:3].to(dtype)
    ids, weights = torch.tensor([[0, 1]] * 3, dtype=torch.int32), torch.full((3, 2), 0.5)
    joined = torch.randn(3, 2, 8).to(dtype), torch.randn(3, 4).to(dtype)
    cache = torch.zeros(1, 4, 24, dtype=dtype)
    with SETTINGS[setting]():
        rows = kernelhub.all_gather.reference(x, group)
        sent = kernelhub.moe_dispatch.reference(x, ids, weights, group, num_experts=2)
        k = kernelhub.concat_mla_k.reference(*joined)
        written = kernelhub.write_mla_cache.reference(x[:, :16], x[:, 16:24], cache, torch.arange(3))
    for made, want in ((rows, x), (sent.x, x), (k[..., :8], joined[0]), (written[0, :3], x[:, :24])):
        assert made.dtype is dtype
        assert torch.equal(made, want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here: what a forked child finds")
class TestForks:
    """A data loader forks workers while a thread of the server runs a kernel."""

    def test_a_child_gets_the_settings_of_the_process_back(self) -> None:
        inside, leave = threading.Event(), threading.Event()

        def run() -> None:
            with own_precision():
                inside.set()
                leave.wait(60)

        with products_in("high"):
            thread = threading.Thread(target=run)
            thread.start()
            assert inside.wait(60)
            try:
                assert answer_of_a_child(precisions_around_a_kernel) == "high high"
            finally:
                leave.set()
                thread.join()
            assert torch.get_float32_matmul_precision() == "high"

    def test_a_child_waits_for_no_thread_that_it_does_not_have(self) -> None:
        with products_in("high"), precision._lock:
            assert answer_of_a_child(precisions_around_a_kernel) == "high high"

    def test_a_child_that_is_forked_in_a_kernel_goes_on(self) -> None:
        def leave_and_run() -> str:
            guarded.close()
            return precisions_around_a_kernel()

        with products_in("high"):
            guarded = contextlib.ExitStack()
            with guarded:
                guarded.enter_context(own_precision())
                assert answer_of_a_child(leave_and_run) == "high high"


def precisions_around_a_kernel() -> str:
    before = torch.get_float32_matmul_precision()
    kernelhub.fp8_gemm(**fp8_gemm_inputs(tokens=3, n=16, k=128), backend="torch")
    return f"{before} {torch.get_float32_matmul_precision()}"


def answer_of_a_child(call: Callable[[], str]) -> str:
    """What the call returns in a forked child, or that the child did not end."""
    ear, mouth = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            answer = call()
        except BaseException as error:  # the child must not go on as a second pytest
            answer = repr(error)
        os.write(mouth, answer.encode())
        os._exit(0)
    os.close(mouth)
    try:
        ready, _, _ = select.select([ear], [], [], 60)
        return os.read(ear, 1000).decode() if ready else "the child waits"
    finally:
        os.close(ear)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
