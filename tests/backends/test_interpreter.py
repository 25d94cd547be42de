"""Triton's interpreter as it is repaired: types are promoted as Triton itself promotes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

from kernelhub.backends.triton.interpreter import repair

if not triton.knobs.runtime.interpret:
    pytest.skip("a GPU runs kernels here, and Triton interprets none: 52 cases", allow_module_level=True)
repair()

KINDS = (
    *(tl.int1, tl.uint8, tl.int8, tl.int32, tl.uint32, tl.int64, tl.uint64),
    *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e4nv),
    tl.pointer_type(tl.float32),
)
NUMBERS = (0, 1, -1, 127, 255, 256, 2**31 - 1, 2**31, 2**40, 2**63, 2**70, 0.0, -0.5, 1e-300, float("inf"), True)
OF_SUMS = {"allow_lhs_ptr": True, "allow_rhs_ptr": True}


def value(kind: Any, shape: tuple[int, ...]) -> Any:
    data = np.ones(shape or (1,), dtype=np.uint64 if kind.is_ptr() else interpreter._get_np_dtype(kind))
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)


def outcome(promote: Any, left: Any, right: Any, options: dict[str, bool]) -> Any:
    """Types and bits of both operands, or the error."""
    try:
        both = promote(interpreter.interpreter_semantic, left, right, **options)
    except Exception as error:
        return type(error), str(error)
    return [(str(one.type), one.handle.data.dtype, one.handle.data.shape, one.handle.data.tobytes()) for one in both]


@pytest.mark.parametrize("options", [{}, OF_SUMS, {"div_or_mod": True}, {"arithmetic_check": False}], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_operands_become_what_triton_makes_of_them(kind: Any, options: dict[str, bool]) -> None:
    promote: Any = TritonSemantic.binary_op_type_checking_impl
    for shape in ((), (4,), (2, 4)):
        others = [*NUMBERS, *(value(other, of) for other in KINDS for of in ((), (4,)))]
        for one in others:
            for left, right in ((value(kind, shape), one), (one, value(kind, shape))):
                assert outcome(promote, left, right, options) == outcome(promote.__wrapped__, left, right, options)
