"""csrc/cpu under ASan and UBSan: operands end where memory ends, sizes are odd, sequences and experts may be empty."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

from kernelhub.probes.toolchain import cxx_compiler
from tests.cpu import compiled
from tests.cpu.compiled import CASES, CASES_OF_BFLOAT16, LEVELS

SANITIZERS = (
    "-fsanitize=address,shift,signed-integer-overflow,bounds,alignment,float-cast-overflow,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
)
FLAGS = ("-O0", "-g1", *SANITIZERS)  # optimised, attention alone would be compiled for 25 s
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("ASAN_", "UBSAN_", "LSAN_"))}
TESTED = tuple(name for name in ("base", "avx2") if name in LEVELS and compiled.runs(name))

# A library that reads one element too many, in place of the kernel's.
FAULTY = """
#include <cstdint>
extern "C" void kernelhub_fp8_decode(const uint8_t *codes, int64_t count, void *into) {
    static_cast<char *>(into)[0] = codes[count];
}
"""


@functools.cache
def missing() -> str | None:
    """Why nothing can be sanitised here."""
    finding = cxx_compiler()
    if finding.value is None:
        return f"no C++ compiler here: {CASES} cases of {len(TESTED)} levels"
    command = [str(finding.value), *SANITIZERS, "-x", "c++", "-", "-o", os.devnull]
    done = subprocess.run(command, input="int main() {}", capture_output=True, text=True)
    return f"{finding.value} has no sanitizers: {CASES} cases of {len(TESTED)} levels" if done.returncode else None


@pytest.mark.full
def test_memory_and_arithmetic_of_products_of_bfloat16(tmp_path: Path) -> None:
    """Compiled for a minute. AMX reads its tiles by instructions that the sanitizers do not see."""
    level = "avx512bf16"
    if reason := missing() or (None if level in LEVELS and compiled.runs(level) else f"this CPU does not run {level}"):
        pytest.skip(reason)
    flags = {level: (*FLAGS, "-DKERNELHUB_NO_AMX", *LEVELS[level])}
    driver, libraries = compiled.compile_all(str(cxx_compiler().value), tmp_path, flags, ("-fsanitize=address",))
    status, output = compiled.answer([driver, *libraries[level]], ENVIRONMENT)
    assert status == 0, output[-3000:]
    assert len(compiled.digests(output)) == CASES + CASES_OF_BFLOAT16


def test_memory_and_arithmetic_of_every_kernel(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    compiler = str(cxx_compiler().value)
    levels = {name: (*FLAGS, *LEVELS[name]) for name in TESTED}
    driver, libraries = compiled.compile_all(compiler, tmp_path, levels, ("-fsanitize=address",))
    for name, paths in libraries.items():
        status, output = compiled.answer([driver, *paths], ENVIRONMENT)
        assert status == 0, f"{name}: {output[-3000:]}"
        assert len(compiled.digests(output)) == CASES
    (tmp_path / "faulty.cpp").write_text(FAULTY)
    faulty = tmp_path / "faulty.so"
    status, output = compiled.answer([compiler, *FLAGS, "-fPIC", "-shared", tmp_path / "faulty.cpp", "-o", faulty])
    assert status == 0, output
    status, output = compiled.answer([driver, faulty, *libraries["base"]], ENVIRONMENT)
    assert status != 0
    assert "heap-buffer-overflow" in output
