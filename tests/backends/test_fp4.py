"""float4 weights in Triton: every word of codes by every scale, exactly, and columns put side by side."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import kernelhub
from kernelhub.backends.triton import fp4, interpreter
from kernelhub.backends.triton.gemm.fp4 import adapter, few, pieces
from kernelhub.backends.triton.planes import Planes, wide, words
from kernelhub.ops import formats
from kernelhub.ops.gemm.fp4.inputs import fp4_gemm_inputs
from kernelhub.ops.gemm.fp4.problem import Fp4GemmProblem
from kernelhub.probes.device import SIMULATED
from kernelhub.runtime.counters import MOST, counters_of
from tests.conftest import DEVICE

if triton.knobs.runtime.interpret:
    interpreter.repair()

pytestmark = pytest.mark.device

ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
FORMS = [("mxfp4", "bfloat16"), ("nvfp4", "bfloat16"), ("nvfp4", "float16"), ("nvfp4", "float32"), ("mxfp4", "float32")]


@triton.jit
def decode(
    w, scales, out, FORMAT: tl.constexpr, NATIVE: tl.constexpr, PTX: tl.constexpr, WORDS: tl.constexpr,
    IN_PIECES: tl.constexpr,
):  # fmt: skip
    """The words by the 16 scales of this program: out [256, 4, WORDS]."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    word = tl.arange(0, WORDS)
    dtype: tl.constexpr = out.dtype.element_ty
    raw = tl.load(scales + row)[:, None]
    values = tl.broadcast_to(tl.load(w + word)[None, :], (16, WORDS))
    if IN_PIECES:
        factor = fp4.spread(pieces.piece_factor(raw, FORMAT, dtype, NATIVE, PTX), 16, 1, WORDS)
        w0, w1, w2, w3 = pieces.piece_quads(values, factor, FORMAT, dtype, PTX)
    else:
        factor = fp4.spread(fp4.group_factor(raw, FORMAT, dtype, NATIVE, PTX), 16, 1, WORDS)
        w0, w1, w2, w3 = fp4.quads(values, factor, FORMAT, dtype, PTX)
    at = out + row[:, None] * (4 * WORDS) + word[None, :]
    tl.store(at, w0)
    tl.store(at + WORDS, w1)
    tl.store(at + 2 * WORDS, w2)
    tl.store(at + 3 * WORDS, w3)


def decoded(w: torch.Tensor, form: str, dtype: str, in_pieces: bool) -> torch.Tensor:
    """[256 scales, 4, words], as float64."""
    out = torch.empty(256, 4, w.numel(), dtype=getattr(torch, dtype), device=DEVICE)
    native = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    ptx = fp4.by_ptx("nvidia", dtype, form)
    decode[(16,)](w.to(DEVICE), ALL_BYTES.to(DEVICE), out, form, native, ptx, w.numel(), in_pieces)
    return out.cpu().double() * fp4.left_of(form, dtype, ptx)


@pytest.mark.parametrize("in_pieces", [False, True], ids=["quads", "pieces"])
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_every_word_by_every_scale(form: str, dtype: str, in_pieces: bool) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    some = every[:: (1 << 8) + 1].contiguous()  # every byte, twice
    scales = formats.from_e8m0(ALL_BYTES) if form == "mxfp4" else ALL_BYTES.view(torch.float8_e4m3fn).float()
    for w in every.split(1 << 12) if DEVICE == "cuda" else (some,):
        codes = formats.from_e2m1(w.view(torch.uint8)).view(-1, 4).t().double()
        want = codes * scales.double()[:, None, None]  # up to 6 x 2^127, which no such dtype holds
        assert torch.equal(decoded(w, form, dtype, in_pieces).nan_to_num(nan=1e300), want.nan_to_num(nan=1e300))


@pytest.mark.parametrize(("rows", "k"), [(1, 16), (7, 2), (3, 1030), (600, 2052)])
def test_columns_are_put_side_by_side(rows: int, k: int) -> None:
    x = torch.randn(rows, 2 * k, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)
    padded = torch.nn.functional.pad(x[:, :k], (0, -k % 4))
    want = padded.view(rows, -1, 4).transpose(1, 2).reshape(rows, -1)
    assert torch.equal(Planes(k)(x[:, :k].contiguous()), want)
    assert torch.equal(Planes(k)(x[:, :k]), want)


def test_only_rows_that_are_there() -> None:
    x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    lengths = torch.tensor([0, 5, 2], dtype=torch.int32, device=DEVICE)
    got = Planes(32, masked=True)(x, lengths)
    want = x.view(3, 5, 8, 4).transpose(2, 3).reshape(3, 5, 32)
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[2, :2], want[2, :2])


def test_what_is_read_as_words() -> None:
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    assert wide(codes)
    assert words(codes)[1] == (4, 1)
    assert not wide(codes[:, 1:])
    assert not wide(codes[:, :33])
    assert not wide(codes.t())


def test_one_launch_of_a_product_has_the_bits_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    given = fp4_gemm_inputs(tokens=20, n=72, k=2048, device=DEVICE)
    given["bias"] = torch.randn(72, device=DEVICE)
    given["out"] = torch.empty(72, 20, dtype=torch.bfloat16, device=DEVICE).t()
    results = []
    for one in (True, True, False):
        monkeypatch.setattr(adapter, "ONE_LAUNCH_ROWS", 1 << 20 if one else 0)
        kernelhub.fp4_gemm.op._forget()
        given["out"].fill_(torch.nan)
        results.append(kernelhub.fp4_gemm(**given, backend="triton").clone())
        counters = counters_of(given["out"], MOST)
        assert counters is not None
        assert not counters.any(), "zero for the next launch"
    kernelhub.fp4_gemm.op._forget()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("n", "k", "kind"),
    [
        (2048, 4096, None),
        (4096, 4096, "small"),
        (5760, 2880, "small"),
        (6144, 4096, "medium"),
        (4096, 14336, "medium"),
        (16384, 4096, None),
        (28672, 4096, "wide"),
        (57344, 8192, None),
    ],
)
def test_few_rows_have_forms_of_their_own_on_hopper(n: int, k: int, kind: str | None) -> None:
    for name, device in SIMULATED.items():
        for form in ("mxfp4", "nvfp4"):
            problem = Fp4GemmProblem(device=device, b_format=form, n=n, k=k)
            got = tuple(few.form_of(problem, size) for size in few.SIZES)
            forms = (None,) * 4 if kind is None or device.family != "hopper" else few.FORMS[form, kind]
            assert got == forms, name


def test_forms_need_the_memory_that_the_plan_declares() -> None:
    problem = Fp4GemmProblem(device=SIMULATED["H200"], b_format="mxfp4", n=4096, k=4096)
    parts = 4 * 64 * 4096 * 8
    assert adapter.Fp4Gemm(problem).workspace_bytes(num_tokens=64) == parts + 2 * 64 * 4096
