"""What FlashInfer's quantisers need on the machine in addition to all of its kernels. Only files are read."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kernelhub.dispatch.constraint import NOT_BUILT, Rejection
from kernelhub.dispatch.machine import Machine
from kernelhub.dispatch.problem import Problem
from kernelhub.ops.quant.problem import QuantizeProblem
from kernelhub.probes.finding import Finding, found, lacking
from kernelhub.probes.package import folders

_REMEDY = 'pip install "cuda-tile[tileiras]>=1.4.0"'


@dataclass(frozen=True)
class CompilesTiles:
    """A kernel of cuTile, compiled in the process at the first call of a kind of group: never built ahead.

    So it is selected only on request, and only if its compiler is installed.
    """

    fields = ()

    def reject(self, problem: Problem, machine: Machine) -> Rejection | None:
        finding = machine.ask("flashinfer cuTile", tile_compiler, "nvcc")
        if not finding.ok:
            return finding.rejection
        reason = "cuTile compiles it at run time, at the first call of each dtype and group size"
        return Rejection(
            NOT_BUILT, reason, "force or prefer the kernel, and call it once with each of them during warm-up"
        )


def tile_compiler() -> Finding:
    """cuTile in a version that FlashInfer takes, and its compiler, where cuTile looks for it."""
    subject = "cuTile"
    places = [folder / "tile" for folder in folders("cuda")]
    place = next((folder for folder in places if folder.is_dir()), None)
    if place is None:
        return lacking(subject, "package_missing", "cuda.tile is not installed", _REMEDY)
    if not (place / "tune").is_dir():  # FlashInfer's test for 1.4.0
        return lacking(subject, "package_version", f"{place} is too old: 1.4.0 or newer is needed", _REMEDY)
    paths = [str(folder / "cu13" / "bin") for folder in folders("nvidia")]
    paths += [os.environ.get("PATH", ""), str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"))]
    compiler = shutil.which("tileiras", path=os.pathsep.join(paths))
    if compiler is None:
        reason = "cuTile has no compiler: there is no tileiras on PATH nor in CUDA_HOME"
        return lacking(subject, "toolkit_missing", reason, _REMEDY)
    return found(subject, compiler, f"compiled by {compiler} at first use")


def fp4_modules(problem: QuantizeProblem) -> tuple[str, ...]:
    """What the module of float4 may be called: on sm_120 and sm_121 of both from CUDA 12.9 on, of each before."""
    major, minor = problem.device.capability
    each = f"fp4_quantization_{major}{minor}"
    return ("fp4_quantization_120f", each) if major == 12 else (each,)
