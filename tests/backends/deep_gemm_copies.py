"""Copies of DeepGEMM that are not the library: folders on sys.path, from whole and right to broken."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import kernelhub
from kernelhub.backends.deep_gemm import kernels as records
from kernelhub.backends.deep_gemm.requirements import Offers, Toolkit, Whole, WritableCache
from kernelhub.dispatch.constraint import AnyOf, OnDevice, anything
from kernelhub.dispatch.kernel import Backend, Band
from tests.dispatch.backends import EVERYWHERE

FAKE = (Path(__file__).parent / "fakes" / "deep_gemm.py").read_text()
_OF_THE_MACHINE = (OnDevice, AnyOf, Whole, Offers, Toolkit, WritableCache)
_OURS = "kernelhub.backends.deep_gemm."
_KEPT = tuple(_OURS + name for name in ("kernels", "requirements", "copies"))


def write(root: Path, source: str = FAKE, *, headers: bool = True, compiled: str = "_C.cpython-312.so") -> Path:
    """A folder deep_gemm with that source, files of headers and a compiled module (empty)."""
    folder = root / "deep_gemm"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(source)
    if headers:
        (folder / "include" / "deep_gemm").mkdir(parents=True)
    if compiled:
        (folder / compiled).touch()
    return folder


@contextlib.contextmanager
def installed(root: Path) -> Iterator[None]:
    """The folder is what is installed; nothing of the library was imported before, and nothing stays."""
    _forget()
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        _forget()


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Backend `fake`: the records of deep_gemm without what they ask of the machine."""
    made = [
        dataclasses.replace(
            kernel,
            name=kernel.name.replace("deep_gemm.", "fake."),
            band=Band.PLUGIN,
            standings=EVERYWHERE,
            constraints=(
                anything("device"),
                *(item for item in kernel.constraints if not isinstance(item, _OF_THE_MACHINE)),
            ),
        )
        for kernel in records.KERNELS
    ]
    module = SimpleNamespace(__name__="fake", BACKEND=Backend("fake", "DeepGEMM in plain torch"), KERNELS=made)
    handle = kernelhub.register_backend(module)
    try:
        yield
    finally:
        handle.remove()


def _forget() -> None:
    for name in list(sys.modules):
        top = name.split(".")[0]
        if top in ("deep_gemm", "vllm", "vllm_third_party_deep_gemm") or (name.startswith(_OURS) and name not in _KEPT):
            del sys.modules[name]
