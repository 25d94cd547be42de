"""Float8 products."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.triton.gemm.fp8.adapter import Fp8Gemm
from kernelhub.backends.triton.gemm.fp8.batched_adapter import BmmFp8
from kernelhub.ops.formats import E4M3, E5M2, E8M0
from kernelhub.ops.gemm.fp8.batched.problem import BmmFp8Problem
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem, complete
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _launch(tokens: int, facets: dict[str, Any], device: DeviceFacts) -> None:
    problem = Fp8GemmProblem(device=device, **complete({"n": 7168, "k": 2304, **facets}))
    n, k = problem.n, problem.k
    of_a, of_b = {
        "tensor": ((), ()),
        "row": ((tokens, 1), (n,)),
        "block": ((tokens, -(-k // 128)), (-(-n // 128), -(-k // 128))),
        "row_block": ((tokens, -(-k // 128)), (n, -(-k // 128))),
        "mx": ((tokens, -(-k // 32)), (n, -(-k // 32))),
    }[problem.scaling]
    dtypes = [torch.float32 if name == "float32" else E8M0 for name in (problem.a_scale_dtype, problem.b_scale_dtype)]
    dtype = getattr(torch, problem.out_dtype)
    if problem.weight_only is not None:
        Fp8Gemm(problem).launch_weights(
            torch.empty(tokens, k, dtype=getattr(torch, problem.weight_only), device="cuda"),
            torch.empty(n, k, dtype=E4M3, device="cuda"),
            torch.empty(of_b, dtype=dtypes[1], device="cuda"),
            None,
            torch.empty(tokens, n, dtype=dtype, device="cuda"),
        )
        return
    Fp8Gemm(problem).launch(
        torch.empty(tokens, k, dtype=E5M2 if problem.e5m2 else E4M3, device="cuda"),
        torch.empty(n, k, dtype=E4M3, device="cuda"),
        torch.empty(of_a, dtype=dtypes[0], device="cuda"),
        torch.empty(of_b, dtype=dtypes[1], device="cuda"),
        torch.empty(n, dtype=dtype, device="cuda") if problem.bias else None,
        torch.empty(tokens, n, dtype=dtype, device="cuda"),
    )


def _launch_batch(tokens: int, facets: dict[str, Any], device: DeviceFacts) -> None:
    problem = BmmFp8Problem(device=device, **facets)
    BmmFp8(problem).launch(
        torch.empty(tokens, 128, problem.k, dtype=E5M2 if problem.e5m2 == "a" else E4M3, device="cuda").transpose(0, 1),
        torch.empty(128, problem.n, problem.k, dtype=E5M2 if problem.e5m2 == "b" else E4M3, device="cuda"),
        torch.empty((), device="cuda"),
        torch.empty(128, device="cuda"),
        torch.empty(128, tokens, problem.n, dtype=torch.bfloat16, device="cuda"),
    )


CASES = [
    *(
        Case(f"bmm_fp8 {n} x {k}, {tokens} rows", functools.partial(_launch_batch, tokens, {"n": n, "k": k}))
        for n, k, tokens in ((512, 128, 16), (128, 512, 16), (512, 192, 2048))
    ),
    *(
        Case(f"bmm_fp8 e5m2 {e5m2}, {tokens} rows", functools.partial(_launch_batch, tokens, {"e5m2": e5m2}))
        for e5m2, tokens in (("a", 16), ("b", 2048))
    ),
    *(
        Case(f"fp8_gemm {scaling}, {tokens} rows", functools.partial(_launch, tokens, {"scaling": scaling}))
        for scaling in ("row", "block", "mx")
        for tokens in (1, 32, 64, 4096)
    ),
    *(
        Case(
            f"fp8_gemm {scaling} of weights, {tokens} rows",
            functools.partial(_launch, tokens, {"scaling": scaling, "weight_only": dtype}),
        )
        for scaling, dtype in (("row", "float16"), ("block", "bfloat16"))
        for tokens in (1, 64, 4096)
    ),
    *(
        Case(f"fp8_gemm row_block, {tokens} rows", functools.partial(_launch, tokens, {"scaling": "row_block"}))
        for tokens in (16, 4096)
    ),
    *(
        Case(f"fp8_gemm e5m2 {s}, {rows} rows", functools.partial(_launch, rows, {"scaling": s, "e5m2": True}))
        for s, rows in (("row", 16), ("row", 4096), ("block", 4096), ("mx", 16), ("mx", 4096))
    ),
    Case(
        "fp8_gemm block, e8m0, ragged K",
        functools.partial(
            _launch, 4096, {"a_scale_dtype": "float8_e8m0fnu", "b_scale_dtype": "float8_e8m0fnu", "k": 2320}
        ),
    ),
    Case(
        "fp8_gemm K split, bias", functools.partial(_launch, 16, {"scaling": "row", "n": 576, "k": 7168, "bias": True})
    ),
]
