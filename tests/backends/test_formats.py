"""Number formats: the device code and the torch code give the same bits, and those of torch's own conversions."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernelhub.backends.triton import formats as device
from kernelhub.backends.triton import int4, interpreter
from kernelhub.ops import formats
from tests.conftest import DEVICE

if triton.knobs.runtime.interpret:
    interpreter.repair()

pytestmark = pytest.mark.device

ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@triton.jit
def to_float(x, y, n, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(x + i, i < n, other=0)
    if FORMAT == "e4m3":
        value = device.e4m3_to_float(raw, tl.float32, False)
    elif FORMAT == "e2m1":
        value = device.e2m1_to_float(raw)
    elif FORMAT == "int4":
        value = int4.int4_to_float(raw)
    else:
        value = device.e8m0_to_float(raw)
    tl.store(y + i, value, i < n)


@triton.jit
def from_float(x, y, n, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < n, other=0.0)
    if FORMAT == "e4m3":
        code = device.float_to_e4m3(value)
    elif FORMAT == "e2m1":
        code = device.float_to_e2m1(value).to(tl.uint8)
    else:
        code = device.float_to_e8m0_up(value)
    tl.store(y + i, code, i < n)


def decoded(raw: torch.Tensor, name: str) -> torch.Tensor:
    out = torch.empty(raw.shape, device=DEVICE)
    to_float[(triton.cdiv(raw.numel(), 1024),)](raw.to(DEVICE), out, raw.numel(), name, 1024)
    return out.cpu()


def encoded(x: torch.Tensor, name: str) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    block = 1 << 15
    from_float[(triton.cdiv(x.numel(), block),)](x.to(DEVICE), out, x.numel(), name, block)
    return out.cpu()


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.nan_to_num(nan=1e38), want.nan_to_num(nan=1e38)) and torch.equal(
        torch.signbit(got)[~want.isnan()], torch.signbit(want)[~want.isnan()]
    )


def awkward() -> torch.Tensor:
    """Every bfloat16, ties and their neighbours, denormals, and random values of every size."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 464.0, 448.0, 1e-23, 2.0**-127, 1e-45])
    codes = torch.cat([codes, (torch.arange(1 << 12) + 0.5) * 2.0**-10, 2.0 ** torch.arange(-149, 128).float()])
    near = torch.cat([codes, torch.nextafter(codes, codes * 0 + 9e9), torch.nextafter(codes, codes * 0)])
    noise = torch.randn(1 << 15, generator=torch.Generator().manual_seed(0))
    noise = noise * 2.0 ** torch.randint(-20, 12, noise.shape, generator=torch.Generator().manual_seed(1))
    return torch.cat([every, near, -near, noise])


def test_every_byte_of_e4m3_and_e8m0_is_decoded_exactly() -> None:
    want = ALL_BYTES.view(torch.float8_e4m3fn).float()
    assert same(decoded(ALL_BYTES, "e4m3"), want)
    exponents = torch.pow(2.0, ALL_BYTES.double() - 127).float()
    exponents[255] = torch.nan
    assert same(formats.from_e8m0(ALL_BYTES), exponents)
    assert same(decoded(ALL_BYTES, "e8m0"), exponents)


def test_every_code_of_e2m1_is_decoded_exactly() -> None:
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    want = torch.cat([positive, -positive])
    assert same(decoded(ALL_BYTES[:16], "e2m1"), want)
    pairs = formats.from_e2m1(ALL_BYTES).unflatten(0, (256, 2))
    assert same(pairs[:, 0], want.repeat(16))
    assert same(pairs[:, 1], want.repeat_interleave(16))


def test_every_integer_of_four_bits_is_decoded_exactly() -> None:
    want = torch.tensor([*range(8), *range(-8, 0)]).float()
    assert same(decoded(ALL_BYTES, "int4"), want.repeat(16))  # of other bits nothing comes in
    pairs = formats.from_int4(ALL_BYTES).unflatten(0, (256, 2))
    assert same(pairs[:, 0], want.repeat(16))
    assert same(pairs[:, 1], want.repeat_interleave(16))
    # What `int4.bfloat16_int4_quads` does to the bits of a nibble.
    bits = (torch.arange(16) ^ 0x4308).to(torch.int16).view(torch.bfloat16)
    assert same((bits - torch.tensor(0xC308 - (1 << 16)).to(torch.int16).view(torch.bfloat16).neg()).float(), want)


def test_integers_of_four_bits_are_encoded_to_the_nearest_even_and_saturate() -> None:
    x = torch.tensor([-torch.inf, -8.6, -8.5, -7.5, -0.5, -0.0, 0.5, 1.5, 2.5, 7.4, 7.6, 1e30, torch.nan, 3.0])
    want = torch.tensor([-8.0, -8, -8, -8, 0, 0, 0, 2, 2, 7, 7, 7, 0, 3])
    assert torch.equal(formats.from_int4(formats.to_int4(x)), want)


def test_e4m3_is_encoded_to_the_nearest_and_saturates() -> None:
    x = awkward()
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(formats.to_e4m3(x).view(torch.uint8), want.view(torch.uint8))
    got, finite = encoded(x, "e4m3"), ~x.isnan()
    assert torch.equal(got[finite], want.view(torch.uint8)[finite])
    assert bool(((got[~finite] & 0x7F) == 0x7F).all())


def test_e2m1_is_encoded_to_the_nearest_even_and_saturates() -> None:
    x = awkward()
    x = x[: x.numel() // 2 * 2]
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    size = x.double().abs().nan_to_num(nan=6.0, posinf=6.0).clamp(max=6.0)
    distance = (size.unsqueeze(1) - grid).abs()
    # of two nearest codes the even one
    nearest = distance + (torch.arange(8) % 2) * 1e-300
    best = distance.min(1, keepdim=True).values
    want = torch.where((distance == best) & (torch.arange(8) % 2 == 0), -1.0, nearest).argmin(1)
    code = (want + torch.signbit(x) * 8).to(torch.uint8)
    packed = formats.to_e2m1(x)
    assert torch.equal(packed & 7, code[0::2] & 7)
    assert torch.equal(packed >> 4 & 7, code[1::2] & 7)
    finite = ~x.isnan()
    assert torch.equal(encoded(x, "e2m1")[finite], code[finite])
    assert torch.equal((packed & 15)[finite[0::2]], code[0::2][finite[0::2]])


def test_e8m0_is_rounded_up_to_a_power_of_two() -> None:
    x = awkward().abs()
    code = formats.to_e8m0_up(x).view(torch.uint8)
    assert torch.equal(encoded(x, "e8m0"), code)
    finite = x.isfinite() & (x <= 2.0**127)
    scale = torch.pow(2.0, code.double() - 127)[finite]
    assert bool((scale >= x.double()[finite]).all())
    above = finite & (code > 0)
    assert bool((torch.pow(2.0, code.double() - 128)[above] < x.double()[above]).all())
    assert bool((code[x.isnan()] == 255).all())
    assert bool((code[x > 2.0**127] == 254).all())
