"""The whole of `csrc/cuda/sm_90/fp4_gemm.cu`, emulated: schedule, copies, decoding, products, parts and results."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelhub.backends.cuda.nvrtc import SOURCES
from kernelhub.ops.formats import from_e2m1, from_e8m0
from kernelhub.ops.gemm.fp4.tolerance import error_allowed
from tests.cuda.emulated import COMPILER, HERE, EmulatedLibrary, folder

pytestmark = pytest.mark.skipif(not COMPILER, reason="no C++ compiler")

AFTER = """
struct Call {
  const char *a, *w;
  u8* scales;
  float* factor;
  void* bias;
  OUT* out;
  float4* parts;
  int* counters;
  i64 a_row, w_row, counted, unit, rows, n, k, split, each, together, bias_kind, vectors, scale_row, out_row;
  i64 out_column, late;
};
void gemm(const Call& c) {
  static TensorMap a, w;
  emulated_late = c.late, emulated_random = c.late;
  a = {c.a, c.rows, c.k, c.a_row, 2, TOKENS, 64, 3};
  w = {c.w, c.n, c.k / 2, c.w_row, 1, ROWS, 32, 1};
  fp4_gemm(a, w, c.scales, c.factor, c.bias, c.out, c.parts, c.counters, c.counted, c.unit, c.rows, c.n, c.k, c.split,
           c.each, c.together, c.bias_kind, c.vectors, c.scale_row, c.out_row, c.out_column);
}
EMULATED(gemm, Call)
void sum(const Call& c) {
  fp4_sum(c.factor, c.bias, c.out, c.parts, c.rows, c.n, c.k, c.split, c.each, c.together, c.bias_kind, c.vectors,
          c.out_row, c.out_column);
}
EMULATED(sum, Call)
"""
FIELDS = "P" * 8 + "q" * 16
C_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "float"}


@functools.cache
def text() -> str:
    source = (SOURCES / "sm_90" / "fp4_gemm.cu").read_text()
    source = source.replace("extern __shared__ __align__(1024) char memory[];", "char* memory = emulated_memory;")
    return source.replace("__shared__ __align__(16) char staged[8 * 512];", "char* staged = emulated_memory;") + AFTER


@functools.cache
def compiled(fault: tuple[str, str] = ("", ""), **form: Any) -> EmulatedLibrary:
    """The source with `fault[1]` in place of `fault[0]`."""
    given = text()
    assert fault[0] in given
    place = folder() / f"fp4-{abs(hash(fault))}"
    place.mkdir(exist_ok=True)
    for name in ("warpgroup.h", "register_products.h"):
        (place / name).write_text((HERE / "emulated_warpgroup.h").read_text())
    (place / "formats.h").write_text((SOURCES / "formats.h").read_text())
    (place / "fp4_gemm.cu").write_text(given.replace(*fault) if fault[0] else given)
    return EmulatedLibrary("fp4_gemm.cu", form, place)


def weight(n: int, k: int, form: str, hostile: bool = True) -> tuple[Tensor, Tensor, float]:
    """Codes, scales and the global factor."""
    draw = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 256, (n, k // 2), generator=draw, dtype=torch.uint8)
    if form == "nvfp4":
        scales = torch.randint(0, 256, (n, k // 16), generator=draw, dtype=torch.uint8)
        scales[(scales & 127) == 127] = 60
        if hostile:
            scales[n // 2, -1] = 127
        return codes, scales, 0.375
    scales = torch.randint(100, 140, (n, k // 32), generator=draw, dtype=torch.uint8)
    if hostile:
        for row, raw in enumerate((0, 1, 2, 3, 254, 253, 255)):
            scales[(row * 7) % n, row % (k // 32)] = raw
    return codes, scales, 1.0


def run(
    rows: int,
    n: int,
    k: int,
    form: str = "nvfp4",
    tokens: int = 64,
    stages: int = 3,
    programs: int = 3,
    split: int | None = None,
    counted: bool = True,
    bias: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
    late: int = 1,
    together: int = 2,
    odd_strides: bool = False,
    fault: tuple[str, str] = ("", ""),
    hostile: bool = True,
) -> tuple[Tensor, bool]:
    """The result, and whether it is that of the reference."""
    codes, scales, factor = weight(n, k, form, hostile)
    group = 16 if form == "nvfp4" else 32
    draw = torch.Generator().manual_seed(rows)
    a = torch.randn(rows, k, generator=draw).bfloat16()
    beyond = torch.full((rows + 2, n * 2 + 16), 7.0, dtype=dtype)
    out = beyond[1:-1, 8 : 8 + 2 * n : 2] if odd_strides else beyond[1:-1, 8 : 8 + n]
    tiles = -(-n // 128) * -(-rows // tokens)
    split = tiles % programs if split is None else split
    each = max(1, -(-split * -(-k // 64) // programs))
    unit = next(size for size in (256 // group, 2, 1) if (k // group) % size == 0)
    library = compiled(
        fault=fault, TOKENS=tokens, STAGES=stages, NVFP4=int(group == 16), OUT=C_TYPES[dtype],
    )  # fmt: skip
    parts = torch.full((2 * programs, 128 * tokens), torch.nan)
    counters = torch.zeros(max(split, 1), dtype=torch.int32)
    added = torch.zeros(n) if bias is None else torch.randn(n, generator=draw).to(bias)
    kind = 0 if bias is None else 1 if bias is torch.float32 else 2
    vectors = int(out.stride(1) == 1 and out.stride(0) % 8 == 0 and not out.data_ptr() % 16)
    given = (
        a, codes, scales, torch.tensor([factor]), added, out, parts, counters, 2 * k, k // 2, int(counted), unit, rows,
        n, k, split, each, together, kind, vectors, k // group, *out.stride(), late,
    )  # fmt: skip
    kernel = library.kernel("gemm", FIELDS)
    kernel.count = late  # blocks backwards if it is odd
    kernel(0, programs, 384, *given)
    if not counted and split:
        library.kernel("sum", FIELDS)(0, split, 256, *given)
    assert not counters.any()
    wide = scales.view(torch.float8_e4m3fn).double() if form == "nvfp4" else from_e8m0(scales).double()
    w = from_e2m1(codes).double() * wide.repeat_interleave(group, 1) * factor
    want = a.double() @ w.t() + added.double()
    sizes = a.double().abs() @ w.abs().t() + added.double().abs()
    checked = ~(sizes >= (60000.0 if dtype is torch.float16 else 2.0**126))
    right = torch.equal((out.isnan() & checked), want.isnan() & checked)
    off = (out.double() - want).abs() <= error_allowed(want, sizes, k, dtype)
    right = right and bool((off | ~checked | want.isnan()).all())
    untouched = beyond.clone()
    untouched[1:-1, 8 : 8 + 2 * n : 2] = 7.0 if odd_strides else untouched[1:-1, 8 : 8 + 2 * n : 2]
    if not odd_strides:
        untouched[1:-1, 8 : 8 + n] = 7.0
    assert (untouched == 7.0).all()
    return out.clone(), right


CASES: dict[str, dict[str, Any]] = {
    "one tile": {"rows": 64, "n": 128, "k": 256, "programs": 1},
    "a tile of three programs": {"rows": 64, "n": 128, "k": 512, "programs": 3},
    "few": {"rows": 1, "n": 1, "k": 32},
    "a rest of K": {"rows": 5, "n": 72, "k": 96 + 64},
    "an odd N": {"rows": 33, "n": 131, "k": 320, "bias": torch.float32},
    "many tiles": {"rows": 150, "n": 300, "k": 192, "programs": 4, "bias": torch.bfloat16},
    "groups of tiles": {"rows": 330, "n": 260, "k": 128, "programs": 5},
    "without counters": {"rows": 70, "n": 300, "k": 448, "programs": 5, "counted": False},
    "parts of one step": {"rows": 64, "n": 128, "k": 320, "programs": 7},
    "16 tokens": {"rows": 14, "n": 200, "k": 352, "tokens": 16, "bias": torch.bfloat16},
    "32 tokens": {"rows": 40, "n": 200, "k": 352, "tokens": 32},
    "128 tokens": {"rows": 100, "n": 200, "k": 352, "tokens": 128, "bias": torch.bfloat16},
    "192 tokens": {"rows": 200, "n": 140, "k": 128, "tokens": 192},
    "256 tokens": {"rows": 256, "n": 130, "k": 192, "tokens": 256, "programs": 2},
    "to float32": {"rows": 30, "n": 75, "k": 288, "dtype": torch.float32, "bias": torch.float32},
    "to float16": {"rows": 30, "n": 72, "k": 288, "dtype": torch.float16, "bias": torch.float16},
    "strides": {"rows": 20, "n": 75, "k": 160, "odd_strides": True},
    "strides, float32": {"rows": 20, "n": 75, "k": 160, "odd_strides": True, "dtype": torch.float32},
}


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_right(case: dict[str, Any], form: str) -> None:
    first = None
    for late in (1, 0, 77):
        got, right = run(**{**case, "late": late, "form": form})
        assert right, f"late {late}"
        first = got if first is None else first
        assert torch.equal(got.nan_to_num(), first.nan_to_num())


FAULTS: dict[str, tuple[str, str]] = {
    "another byte of a word": ("u32 byte = lane % 4,", "u32 byte = (lane + 1) % 4,"),
    "operands that are overwritten too early": ("  made_wait<1>();\n  keep(w[0].of);", "  keep(w[0].of);"),
    "another group's scale": ("int group = (half * 2 + product)", "int group = (half + product)"),
    "one place for two parts": ("2 * part + (part * of.each <= tile * of.steps)", "2 * part"),
    "no last part": ("p.counters + now.tile, 1) == others", "p.counters + now.tile, 1) == others + 1"),
    "codes without their swizzle": ("int chunk = half ^ ((at >> 2) & 1);", "int chunk = half;"),
    "the same activations in both halves": ("+ half * 4;", ";"),
    "the same activations in both products": ("tokens + 2 * i", "tokens"),
    "results without their swizzle": ("u32 from = mine + token * 32 + ((half ^ (token >> 2 & 1)) << 4);",
                                      "u32 from = mine + token * 32 + (half << 4);"),
    "the other row's bias": ("return x + by.bias[lower];", "return x + by.bias[1 - lower];"),
    "no factor": ("if (NVFP4) x *= by.factor;", ""),
    "stages that are read before they are full": ("Ring ring = {0, 0};", "Ring ring = {0, 1};"),
    "stages that are overwritten": ("multiply_step<false>(d, w, codes, scales, ring, base, row, pick, step > now.low);",
        "{ barrier_arrive_warp(empty_bar(base, ring.stage)); "
        "multiply_step<false>(d, w, codes, scales, ring, base, row, pick, false); }"),
    "scales of a step before": ("u32 made[EACH], word;", "u32 made[EACH], word; int part = step ? (step - 1) % 4 : 0;"),
    "rows that swapped": ("codes.of[lower][2 * product + right]", "codes.of[1 - lower][2 * product + right]"),
    "its own part twice": ("first + last - own", "own"),
    "a sign that is lost": ("(x & 0x80008000u)", "(x & 0x80000000u)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_found(fault: tuple[str, str]) -> None:
    wrong = 0
    for late in (1, 0, 5):
        case: dict[str, Any] = {"rows": 40, "n": 200, "k": 640, "programs": 3, "bias": torch.float32, "late": late}
        try:
            wrong += not run(**case, fault=fault)[1]
        except AssertionError:  # it did not end, or left counters
            wrong += 1
    assert wrong
