"""csrc/cpu compiled for levels of instructions, and run by `driver.cpp`, without Python and PyTorch."""

from __future__ import annotations

import runpy
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernelhub.backends.cpp import build
from kernelhub.probes.device import cpu_flags

HERE = Path(__file__).parent
CASES = 53  # of the driver
CASES_OF_BFLOAT16 = 18  # of attention, once more by AVX-512 BF16 and by AMX
# What is compiled together; the rest of csrc/cpu is headers, and the question which level a CPU has.
UNITS = {"attention": ("attention.cpp", "routing.cpp"), "products": ("fp8_gemm.cpp", "experts.cpp")}
# Names of the wheel's libraries -> flags.
LEVELS: dict[str, tuple[str, ...]] = runpy.run_path(str(HERE.parents[1] / "setup.py"), run_name="setup")["LEVELS"]


def runs(level: str) -> bool:
    """Whether this CPU has the instructions of a level."""
    needed = {flag.removeprefix("-m") for flag in LEVELS[level]}
    names = {"avx512bf16": "avx512_bf16", "avx512vbmi": "avx512vbmi"}  # as Linux calls them
    return {names.get(name, name) for name in needed} <= set(Path("/proc/cpuinfo").read_text().split())


def by_dots(level: str) -> bool:
    """Whether a level multiplies bfloat16 by AVX-512 BF16."""
    return level == "avx512bf16"


def by_amx(level: str) -> bool:
    """Whether this CPU has AMX, which functions of a level use."""
    return level == "avx512bf16" and "amx_bf16" in cpu_flags()


def compile_all(
    compiler: str, folder: Path, levels: Mapping[str, tuple[str, ...]], of_driver: tuple[str, ...] = ("-O1",)
) -> tuple[Path, dict[str, list[Path]]]:
    """The driver, and for each name the libraries compiled with its flags; two compilers at a time."""
    driver, made = folder / "driver", {name: [folder / f"{name}_{unit}.so" for unit in UNITS] for name in levels}
    commands = []
    for unit, sources in UNITS.items():
        path = folder / f"all_of_{unit}.cpp"
        path.write_text("".join(f'#include "{source}"\n' for source in sources))
        for name, flags in levels.items():
            library = ("-fPIC", "-shared", f"-I{build.SOURCES}", *flags)
            commands.append((compiler, *library, str(path), "-o", str(folder / f"{name}_{unit}.so")))
    commands.append((compiler, *of_driver, str(HERE / "driver.cpp"), "-o", str(driver)))
    with ThreadPoolExecutor(2) as pool:
        for status, output in pool.map(lambda command: answer([*command, "-std=c++17", "-pthread", "-ldl"]), commands):
            assert status == 0, output[-3000:]
    return driver, made


def answer(command: list[str | Path], environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output."""
    done = subprocess.run(
        [str(word) for word in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


def digests(output: str) -> dict[str, str]:
    """Name of each case -> digest of its results' bits."""
    lines = [line.split(maxsplit=3) for line in output.splitlines() if line.startswith(("ok ", "BAD "))]
    return {name: digest for _, digest, _, name in lines}
