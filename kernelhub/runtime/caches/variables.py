"""Environment variables that move the caches of libraries below our root. Variables that the user set are kept.

Each library's folder depends on its version and files, the C library and torch, since some libraries reuse entries of
another CUDA, compiler or build of the same version (FlashInfer's issues 4489 and 5145). So a mixed fleet, and an
upgrade, can share a mount.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kernelhub.probes.finding import Finding, lacking
from kernelhub.runtime.caches import manifest, root
from kernelhub.runtime.caches.fingerprint import Fingerprint, fingerprint
from kernelhub.runtime.caches.notices import CODES
from kernelhub.runtime.caches.store import PlaceError, watching
from kernelhub.runtime.caches.store import replace as rewrite

LIBRARIES = "libraries"  # the folder below the root
NOTE = "kernelhub.json"  # in each library's folder: the versions that it is for
SET, KEPT, LATE = "set", "kept", "late"


@dataclass(frozen=True)
class Assignment:
    """One variable.

    Attributes:
        name: name of the variable.
        value: its current or planned value.
        became: ``"set"``; ``"kept"``, the user had set it; ``"late"``, it is set, but the library is already imported
            and only child processes will read it.
        meaning: its effect.
    """

    name: str
    value: str
    became: str
    meaning: str


@dataclass(frozen=True)
class Assignments:
    """All variables, and the root of their folders.

    Attributes:
        root: the folder.
        variables: the state of each variable.
        finding: whether the root is writable.
    """

    root: Path
    variables: tuple[Assignment, ...]
    finding: Finding

    def __str__(self) -> str:
        lines = [f"caches below {self.root}: {self.finding.reason}"]
        lines += [f"{item.name}={item.value} ({item.became}): {item.meaning}" for item in self.variables]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "root": str(self.root),
            "writable": self.finding.ok,
            "reason": self.finding.reason,
            "variables": [asdict(item) for item in self.variables],
        }


@dataclass(frozen=True)
class _Moved:
    """A library's cache that a variable moves; `reads_once` if the variable is read when the package is imported."""

    variable: str
    package: str
    folder: str
    meaning: str
    reads_once: bool = True


_MOVED = (
    _Moved("TRITON_CACHE_DIR", "triton", "triton", "Triton keeps compiled kernels there", reads_once=False),
    _Moved("TORCHINDUCTOR_CACHE_DIR", "torch", "inductor", "torch.compile keeps what it compiles there", False),
    _Moved("TORCH_EXTENSIONS_DIR", "torch", "torch_extensions", "torch builds extensions there", False),
    _Moved("FLASHINFER_WORKSPACE_BASE", "flashinfer", "flashinfer", "FlashInfer builds its modules there"),
    _Moved("TRTLLM_DG_CACHE_DIR", "flashinfer", "trtllm_deep_gemm", "FlashInfer's fp8 block product compiles there"),
    _Moved("DG_JIT_CACHE_DIR", "deep_gemm", "deep_gemm", "DeepGEMM keeps compiled kernels there"),
    _Moved("VLLM_CACHE_ROOT", "vllm", "vllm", "vLLM keeps compiled graphs and its tables there"),
    _Moved("TVM_FFI_CACHE_DIR", "tvm_ffi", "tvm_ffi", "SGLang's and TVM's small kernels are built there", False),
    _Moved("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "flash_attn", "flash_attn_4", "FlashAttention-4 keeps kernels there"),
)
_NO_DOWNLOAD = "FLASHINFER_NO_DOWNLOAD"


def cache_variables(*, offline: bool = False, environ: MutableMapping[str, str] | None = None) -> Assignments:
    """The variables that `set_cache_variables` would set; nothing is changed or written."""
    environ = os.environ if environ is None else environ
    finding = _root(environ)
    below = Path(finding.subject)
    result = []
    for moved in _MOVED:
        value = str(below / LIBRARIES / moved.folder / _made_for(moved).digest)
        late = moved.reads_once and environ is os.environ and moved.package in sys.modules
        result.append(_assignment(environ, moved.variable, value, moved.meaning, late))
    if offline:
        meaning = "FlashInfer downloads nothing: a missing file fails immediately, not after a minute of attempts"
        result.append(_assignment(environ, _NO_DOWNLOAD, "1", meaning, late=False))
    return Assignments(below, tuple(result), finding)


def set_cache_variables(*, offline: bool = False, environ: MutableMapping[str, str] | None = None) -> Assignments:
    """Move the caches of all libraries below kernelhub's root, and return the variables.

    Call it before the libraries are imported, or start the engine with the output of ``kernelhub cache env``. Each
    folder is created with a note of its versions, so that `kernelhub cache list` can identify old ones.

    Args:
        offline: also forbid downloads.
        environ: the environment to change, by default that of this process and its children.

    Returns:
        The state of each variable; those that were set before are kept. If no root is writable, nothing is set, and
        ``finding`` has the reason.

    Example:
        >>> import kernelhub, tempfile
        >>> environment = {"KERNELHUB_CACHE_DIR": tempfile.mkdtemp(), "TRITON_CACHE_DIR": "/mine"}
        >>> assigned = kernelhub.set_cache_variables(offline=True, environ=environment)
        >>> environment["FLASHINFER_NO_DOWNLOAD"], environment["TRITON_CACHE_DIR"]
        ('1', '/mine')
    """
    environ = os.environ if environ is None else environ
    result = cache_variables(offline=offline, environ=environ)
    refused = _note(result) if result.finding.ok else None
    if refused is not None:
        result = replace(result, finding=refused)
    for item in result.variables:
        if item.became != KEPT and (result.finding.ok or item.name == _NO_DOWNLOAD):
            environ[item.name] = item.value
    return result


def _note(result: Assignments) -> Finding | None:
    """Create each folder for this user only, with a note of its versions; returns why that fails, or None.

    Libraries load files from there, so a variable never points at a folder that others can write.
    """
    place = root.Place(result.root, root.VARIABLE)
    wanted = {item.name: item.value for item in result.variables if item.became != KEPT}
    try:
        with watching(place):
            place.make()
            for moved in _MOVED:
                if moved.variable in wanted:
                    folder = Path(wanted[moved.variable])
                    place.tree().make(folder)
                    about = manifest.describe(LIBRARIES, moved.folder, _made_for(moved))
                    rewrite(folder / NOTE, manifest.sealed(about))
    except PlaceError as failed:
        failed.say()
        return lacking(str(result.root), failed.code, failed.reason, CODES[failed.code][1])
    return None


def _made_for(moved: _Moved) -> Fingerprint:
    return fingerprint(moved.folder, libraries=tuple(dict.fromkeys((moved.package, "torch"))))


def _root(environ: MutableMapping[str, str]) -> Finding:
    """The first writable place of an environment, else the first place with its fault."""
    findings = [root.judged(place, executable=True) for place in root.places(environ)]
    return next((finding for finding in findings if finding.ok), findings[0])


def _assignment(environ: MutableMapping[str, str], name: str, value: str, meaning: str, late: bool) -> Assignment:
    if environ.get(name):
        return Assignment(name, environ[name], KEPT, meaning)
    return Assignment(name, value, LATE if late else SET, meaning)
