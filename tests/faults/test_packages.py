"""FX1: libraries that are not there, of odd versions, cut off, or without what they need."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import kernelhub
from kernelhub.dispatch.constraint import Package
from kernelhub.probes.toolchain import c_compiler
from tests.dispatch.backends import qkv
from tests.faults.record import NOTHING
from tests.faults.records import FAULTS
from tests.faults.scene import KERNEL, acme, check, decision

WORKS = """
from tests.dispatch.backends import Ones
"""
MODULE = """
#include <Python.h>
{declaration}
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "_C", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit__C(void) {{ {use} return PyModule_Create(&module); }}
"""
needs_compiler = pytest.mark.skipif(not c_compiler().ok, reason="no C compiler here: 3 faults")


@pytest.fixture
def site(tmp_path: Path, monkeypatch):
    """A site-packages folder; what is imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "fakelib"]:
        del sys.modules[name]


def install(site: Path, version: str | None, metadata: bool = True) -> Path:
    folder = site / "fakelib"
    folder.mkdir()
    (folder / "__init__.py").write_text(WORKS)
    if metadata:
        info = site / "fakelib-1.dist-info"
        info.mkdir()
        said = "" if version is None else f"Version: {version}\n"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fakelib\n{said}")
    importlib.invalidate_caches()
    return folder


@pytest.mark.fault("package_absent")
def test_a_package_that_is_not_there() -> None:
    acme("fakelib:Ones", Package("fakelib", ">=0.6.2,<0.7"))
    check("package_absent")


@pytest.mark.parametrize(
    ("key", "version"),
    [
        pytest.param(key, version, marks=pytest.mark.fault(key))
        for key, version in (
            ("version_as_text", "0.6.1"),
            ("version_prerelease", "0.6.7rc1"),
            ("version_too_new", "0.8.0"),
            ("version_unknown", "0.0.0+unknown"),
            ("version_empty", ""),
            ("version_none", None),
        )
    ],
)
def test_a_version_that_does_not_fit(site, key, version) -> None:
    install(site, version)
    oldest = "0.6.7" if key == "version_prerelease" else "0.6.2"
    acme("fakelib:Ones", Package("fakelib", f">={oldest},<0.7"))
    check(key)
    assert "fakelib" not in sys.modules


@pytest.mark.fault("no_dist_info")
def test_a_package_without_metadata(site) -> None:
    install(site, None, metadata=False)
    acme("fakelib:Ones", Package("fakelib", ">=0.6.2,<0.7"))
    check("no_dist_info")


@pytest.mark.fault("version_that_fits")
@pytest.mark.parametrize("version", ["0.6.10", "0.6.16.post3", "0.6.7+cu130"])
def test_a_version_that_fits_is_taken(site, version) -> None:
    install(site, version)
    acme("fakelib:Ones", Package("fakelib", ">=0.6.2,<0.7"))
    assert decision().accepted
    assert float(kernelhub.attention(*qkv()).mean()) == 1.0
    assert FAULTS["version_that_fits"].code == NOTHING


def compiled(folder: Path, declaration: str, use: str, *words: str) -> Path:
    """An extension module of Python's."""
    (folder / "_C.c").write_text(MODULE.format(declaration=declaration, use=use))
    target = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_paths()['include']}"
    command = [str(c_compiler().value), "-shared", "-fPIC", include, str(folder / "_C.c"), "-o", str(target), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return target


@needs_compiler
class TestCompiledLibraries:
    """Real libraries, which the dynamic linker itself refuses."""

    @pytest.fixture
    def package(self, site) -> Path:
        folder = install(site, "0.6.5")
        (folder / "__init__.py").write_text(f"from fakelib import _C\n{WORKS}")
        acme("fakelib:Ones", Package("fakelib", ">=0.6.2,<0.7"))
        return folder

    @pytest.mark.fault("undefined_symbol")
    def test_an_undefined_symbol(self, package) -> None:
        compiled(package, "extern void *_ZN3c105ErrorC1E(void);", "_ZN3c105ErrorC1E();")
        check("undefined_symbol")
        assert "undefined symbol: _ZN3c105ErrorC1E" in decision().reason

    @pytest.mark.fault("missing_library")
    def test_a_library_that_is_gone(self, package, tmp_path) -> None:
        (tmp_path / "lib.c").write_text("int here(void) { return 1; }")
        library = tmp_path / "libcudart.so.12"
        command = [str(c_compiler().value), "-shared", "-fPIC", str(tmp_path / "lib.c"), "-o", str(library)]
        subprocess.run([*command, "-Wl,-soname,libcudart.so.12"], check=True, capture_output=True, timeout=60)
        compiled(package, "extern int here(void);", "here();", str(library))
        library.unlink()
        check("missing_library")
        assert "libcudart.so.12" in decision().reason

    @pytest.mark.fault("damaged_library")
    def test_a_library_that_is_cut_off(self, package) -> None:
        whole = compiled(package, "", "")
        whole.write_bytes(whole.read_bytes()[:100])
        check("damaged_library")

    @pytest.mark.fault("version_that_fits")
    def test_a_whole_one_is_loaded(self, package) -> None:
        compiled(package, "", "")
        assert float(kernelhub.attention(*qkv()).mean()) == 1.0
        shutil.rmtree(package)
        assert KERNEL in kernelhub.attention.kernels()
