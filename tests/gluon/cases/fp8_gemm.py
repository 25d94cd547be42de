"""Float8 products."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelhub.backends.gluon.gemm.fp8.adapter import Fp8Gemm
from kernelhub.ops.formats import E4M3, E8M0
from kernelhub.ops.gemm.fp8.problem import Fp8GemmProblem
from kernelhub.probes.device import DeviceFacts
from tests.backends.ahead.case import Case


def _launch(tokens: int, facets: dict[str, Any], device: DeviceFacts) -> None:
    problem = Fp8GemmProblem(device=device, **{"n": 7168, "k": 2304, **facets})
    n, k = problem.n, problem.k
    of_a, of_b = {
        "tensor": ((), ()),
        "row": ((tokens, 1), (n,)),
        "block": ((tokens, -(-k // 128)), (-(-n // 128), -(-k // 128))),
    }[problem.scaling]
    dtypes = [torch.float32 if name == "float32" else E8M0 for name in (problem.a_scale_dtype, problem.b_scale_dtype)]
    dtype = getattr(torch, problem.out_dtype)
    Fp8Gemm(problem).launch(
        torch.empty(tokens, k, dtype=E4M3, device="cuda"),
        torch.empty(n, k, dtype=E4M3, device="cuda"),
        torch.empty(of_a, dtype=dtypes[0], device="cuda"),
        torch.empty(of_b, dtype=dtypes[1], device="cuda"),
        torch.empty(n, dtype=dtype, device="cuda") if problem.bias else None,
        torch.empty(tokens, n, dtype=dtype, device="cuda"),
    )


_EXPONENTS = {"a_scale_dtype": "float8_e8m0fnu", "b_scale_dtype": "float8_e8m0fnu"}
CASES = [
    Case("fp8 blocks, 4096 rows", functools.partial(_launch, 4096, {"scaling": "block"})),
    Case("fp8 blocks, 128 rows", functools.partial(_launch, 128, {"scaling": "block"})),
    Case("fp8 rows, 4096 rows, bias", functools.partial(_launch, 4096, {"scaling": "row", "bias": True})),
    Case("fp8 rows, 128 rows", functools.partial(_launch, 128, {"scaling": "row", "out_dtype": "float16"})),
    Case("fp8 blocks in e8m0, 4096 rows", functools.partial(_launch, 4096, {"scaling": "block", **_EXPONENTS})),
    Case("fp8 tensor, 4096 rows", functools.partial(_launch, 4096, {"scaling": "tensor"})),
    Case("fp8 tensor, 128 rows, bias", functools.partial(_launch, 128, {"scaling": "tensor", "bias": True})),
    Case("fp8 blocks, float32", functools.partial(_launch, 4096, {"scaling": "block", "out_dtype": "float32"})),
]
