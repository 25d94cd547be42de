"""Each level of csrc/cpu that this CPU runs, compiled as for the wheel, and aarch64 under QEMU, beside the reference.

    python -m pytest -n 0 -m ahead tests/cpu -rs

The preprocessor chooses between levels, so a CPU with AVX-512 tests the lower ones too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kernelhub.backends.cpp import build
from kernelhub.probes.toolchain import cxx_compiler
from tests.backends import test_cpp, test_cpp_attention
from tests.cpu import compiled
from tests.cpu.compiled import CASES, CASES_OF_BFLOAT16, LEVELS

pytestmark = pytest.mark.skipif(not cxx_compiler().ok, reason="no C++ compiler here: all levels of csrc/cpu")

CONTRACTS: dict[str, Any] = {
    "fp8_gemm": test_cpp.TestFp8Gemm,
    "bmm_fp8": test_cpp.TestBmmFp8,
    "fp4_gemm": test_cpp.TestFp4Gemm,
    "fused_moe": test_cpp.TestExperts,
    "route_experts": test_cpp.TestRouting,
    "attention": test_cpp_attention.TestDense,
    "paged_attention": test_cpp_attention.TestPaged,
    "mla_attention": test_cpp_attention.TestLatent,
    "attention by AVX-512 BF16": test_cpp_attention.TestDenseByDots,
    "paged_attention by AVX-512 BF16": test_cpp_attention.TestPagedByDots,
    "mla_attention by AVX-512 BF16": test_cpp_attention.TestLatentByDots,
    "attention by AMX": test_cpp_attention.TestDenseByAmx,
    "paged_attention by AMX": test_cpp_attention.TestPagedByAmx,
    "mla_attention by AMX": test_cpp_attention.TestLatentByAmx,
}
_KNOWN = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")  # which g++ 12 sees in its own headers of AVX-512
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_ANSWER = """
#include <cstdint>
#include <cstdio>
extern "C" int64_t kernelhub_cpu_level();
int main() { printf("%d", (int)kernelhub_cpu_level()); }
"""


def needs(level: str) -> None:
    if not compiled.runs(level):
        pytest.skip(f"this CPU does not run {level}: {CASES} cases and {len(CONTRACTS)} contracts")


def of_tier(level: str) -> Any:
    """The highest level that this CPU runs is of the full tier: the wheel's flags break what a checkout's do not."""
    highest = [name for name in LEVELS if compiled.runs(name)][-1:]
    return pytest.param(level, marks=pytest.mark.full if level in highest else pytest.mark.ahead)


@pytest.mark.parametrize("level", [of_tier(level) for level in LEVELS])
def test_odd_operands(level: str, tmp_path: Path) -> None:
    needs(level)
    flags = {level: ("-O3", *LEVELS[level])}
    driver, libraries = compiled.compile_all(str(cxx_compiler().value), tmp_path, flags)
    status, output = compiled.answer([driver, *libraries[level]])
    assert status == 0, output
    assert len(compiled.digests(output)) == CASES + CASES_OF_BFLOAT16 * (
        compiled.by_dots(level) + compiled.by_amx(level)
    )


@pytest.mark.ahead
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_compiles(level: str, tmp_path: Path) -> None:
    """Those too that this CPU does not run."""
    compiled.compile_all(
        str(cxx_compiler().value), tmp_path, {level: ("-O1", "-Wall", "-Werror", *_KNOWN, *LEVELS[level])}
    )


@pytest.mark.ahead
@pytest.mark.parametrize("op", CONTRACTS)
@pytest.mark.parametrize("level", LEVELS)
def test_contract(level: str, op: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    needs(level)
    if op.endswith("by AMX") and not compiled.by_amx(level):
        pytest.skip(f"no AMX in {level} on this CPU: {op}")
    if op.endswith("by AVX-512 BF16") and not (compiled.by_dots(level) and test_cpp_attention.DOTS):
        pytest.skip(f"no AVX-512 BF16 in {level}, or this CPU has AMX: {op}")
    monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "levels"))
    flags = ("-O3", "-std=c++17", *LEVELS[level], "-shared", "-fPIC", "-pthread")
    monkeypatch.setattr(build, "flags", lambda: flags)
    build.library.cache_clear()
    try:
        subject = CONTRACTS[op]()
        for case in subject.accepted_cases():
            subject.test_case(case)
        assert build.library.cache_info().currsize  # compiled for the level, and not one of before
    finally:
        build.library.cache_clear()


def _answer(folder: Path, *emulator: str) -> str:
    """Of `kernelhub_cpu_level()`."""
    program, source = folder / "answer", folder / "answer.cpp"
    source.write_text(_ANSWER)
    command = [str(cxx_compiler().value), "-static", source, build.SOURCES / "cpu.cpp", "-o", program]
    status, output = compiled.answer(command)
    assert status == 0, output
    status, output = compiled.answer([*emulator, program])
    assert status == 0, output
    return build.LEVELS[int(output.split()[-1])]  # after what an emulator says that it lacks


@pytest.mark.full
def test_this_cpu_gets_its_level(tmp_path: Path) -> None:
    """It asks the CPU itself: of a compiler's own function for that, one that says no to everything is known."""
    assert _answer(tmp_path) == [level for level in LEVELS if compiled.runs(level)][-1]


@pytest.mark.ahead
@pytest.mark.parametrize(
    ("cpu", "level"),
    [("Nehalem", "base"), ("Haswell", "avx2"), ("EPYC", "avx2")]
    + [(f"Haswell,-{lacking}", "base") for lacking in ("fma", "f16c", "avx2", "avx", "xsave")],
)
def test_other_cpus_get_their_level(cpu: str, level: str, tmp_path: Path) -> None:
    if len(LEVELS) == 1 or not shutil.which("qemu-x86_64"):
        pytest.skip("no x86-64, or not installed: qemu-x86_64: the levels of other CPUs")
    assert _answer(tmp_path, "qemu-x86_64", "-cpu", cpu) == level


@pytest.mark.ahead
def test_aarch64_gives_the_bits_of_x86(tmp_path: Path) -> None:
    """Without contraction of products and sums. With it, as for a wheel, within the bounds of the reference."""
    lacking = [command for command in (CROSS, EMULATOR) if not shutil.which(command)]
    if lacking:
        pytest.skip(f"not installed: {', '.join(lacking)}: {CASES} cases of aarch64")
    there = tmp_path / "aarch64"
    there.mkdir()
    exact = ("-O2", "-ffp-contract=off")
    driver, libraries = compiled.compile_all(str(cxx_compiler().value), tmp_path, {"exact": exact})
    status, output = compiled.answer([driver, *libraries["exact"]])
    assert status == 0, output
    driver, libraries = compiled.compile_all(CROSS, there, {"exact": exact, "wheel": ("-O3",)})
    emulated = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", driver]
    for name, paths in libraries.items():
        status, output_there = compiled.answer([*emulated, *paths])
        assert status == 0, f"{name}: {output_there}"
        assert len(compiled.digests(output_there)) == CASES
        if name == "exact":
            assert compiled.digests(output_there) == compiled.digests(output)
