"""What lies in a cache is recognised by its form, judged by what is installed, and nothing else is ever removed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

import kernelhub
from kernelhub.runtime.caches import inventory, known, lock, notices
from kernelhub.runtime.caches.fingerprint import fingerprint
from kernelhub.runtime.caches.inventory import Cache, CacheItem
from kernelhub.runtime.caches.store import Store
from kernelhub.runtime.caches.variables import cache_variables, set_cache_variables
from tests.runtime.caches import clean

CACHES = {item.name: item for item in known.KNOWN}
LONG_AGO = time.time() - 86400


def file(path: Path, content: str | bytes = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def states(cache: Cache) -> dict[str, str]:
    return {item.path.name: item.state for item in cache.items}


def old(path: Path) -> None:
    os.utime(path, (LONG_AGO, LONG_AGO))


class TestTriton:
    key = "A" * 52

    def read(self, folder: Path) -> Cache:
        cache = CACHES["triton"].read({"TRITON_CACHE_DIR": str(folder)})
        assert cache is not None
        return cache

    def entry(self, folder: Path, letter: str, version: str) -> Path:
        path = folder / (letter * 52)
        file(path / "kernel.cubin")
        file(path / "kernel.json", json.dumps({"triton_version": version, "name": "kernel"}))
        paths = {"kernel.cubin": str(path / "kernel.cubin")}
        file(path / "__grp__kernel.json", json.dumps({"child_paths": paths}))
        return path

    def test_entries_tell_who_made_them(self, tmp_path) -> None:
        version = metadata.version("triton")
        self.entry(tmp_path, "A", version)
        self.entry(tmp_path, "B", "2.0.0")
        file(self.entry(tmp_path, "C", version) / "kernel.cubin", "")
        (self.entry(tmp_path, "D", version) / "kernel.cubin").unlink()
        file(self.entry(tmp_path, "E", version) / "kernel.json", "{")
        file(tmp_path / ("F" * 52) / "cuda_utils.so")
        file(tmp_path / ("G" * 52) / "tmp.pid_77_x" / "kernel.ttir")
        old(tmp_path / ("G" * 52))
        file(tmp_path / ("H" * 52) / "tmp.pid_77_x" / "kernel.ttir")
        file(tmp_path / "notes" / "kernel.json")
        file(tmp_path / "thesis.tex")
        cache = self.read(tmp_path)
        assert {name[0]: state for name, state in states(cache).items()} == {
            "A": "current", "B": "stale", "C": "broken", "D": "broken", "E": "broken", "F": "unknown",
            "G": "leftover", "H": "busy",
        }  # fmt: skip
        reasons = {item.path.name[0]: item.reason for item in cache.items}
        assert reasons["B"] == f"made by Triton 2.0.0, {version} is installed"
        assert reasons["C"] == "kernel.cubin is empty"
        assert "kernel.cubin, which does not exist" in reasons["D"]
        assert all(item.num_bytes > 0 for item in cache.items if item.path.name[0] in "ABDEF")

    def test_an_entry_that_triton_itself_made_is_current(self, tmp_path) -> None:
        source = tmp_path / "one_kernel.py"
        source.write_text(
            "import triton, triton.language as tl\n"
            "from triton.backends.compiler import GPUTarget\n"
            "@triton.jit\n"
            "def copy(x, y, n: tl.constexpr):\n"
            "    tl.store(y + tl.arange(0, n), tl.load(x + tl.arange(0, n)))\n"
            "kinds = {'x': '*fp32', 'y': '*fp32', 'n': 'constexpr'}\n"
            "source = triton.compiler.ASTSource(copy, kinds, constexprs={(2,): 128})\n"
            "triton.compile(source, target=GPUTarget('cuda', 90, 32))\n"
        )
        environment = clean(TRITON_CACHE_DIR=str(tmp_path / "cache"), TRITON_INTERPRET=None)
        done = subprocess.run(
            [sys.executable, str(source)], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]
        cache = self.read(tmp_path / "cache")
        assert [item.state for item in cache.items] == ["current"]
        assert cache.num_bytes > 1000
        assert cache.installed == metadata.version("triton")

    def test_a_folder_that_is_no_cache_is_not_looked_into(self, tmp_path) -> None:
        for folder in ("/", str(tmp_path)):
            cache = CACHES["triton"].read({"TRITON_CACHE_DIR": folder, "HOME": str(tmp_path)})
            assert cache is not None
            assert (cache.items, cache.problem) == ((), f"TRITON_CACHE_DIR names {folder}, which is not a cache")


class TestFlashInfer:
    def test_versions_are_folders(self, tmp_path, monkeypatch) -> None:
        site = tmp_path / "site"
        file(site / "flashinfer" / "__init__.py", "")
        meta = "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.2\n"
        file(site / "flashinfer_python-0.7.2.dist-info" / "METADATA", meta)
        monkeypatch.syspath_prepend(str(site))
        base = tmp_path / ".cache" / "flashinfer"
        file(base / "0.6.18.post1" / "90a" / "cached_ops" / "page" / "page.so")
        file(base / "0.7.2" / "90a" / "cached_ops" / "page" / "page.so")
        file(base / "0.7.2" / "90a" / "cached_ops" / "rope" / "rope.so", "")
        file(base / "0.7.2" / "90a" / "cached_ops" / "norm" / "build.ninja")
        old(base / "0.7.2" / "90a" / "cached_ops" / "norm")
        file(base / "0.7.2" / "90a" / "cached_ops" / "moe" / "build.ninja")
        file(base / "0.7.2" / "90a" / "cached_ops" / "tmp" / "page.lock")
        file(base / "cubins" / "x.cubin")
        cache = CACHES["flashinfer"].read({"FLASHINFER_WORKSPACE_BASE": str(tmp_path)})
        assert cache is not None
        assert states(cache) == {
            "0.6.18.post1": "stale", "page": "current", "rope": "broken", "norm": "leftover", "moe": "busy",
        }  # fmt: skip
        (stale,) = (item for item in cache.items if item.state == "stale")
        assert stale.reason == "made by FlashInfer 0.6.18.post1, 0.7.2 is installed"

    def test_without_the_library_nothing_is_stale(self, tmp_path) -> None:
        file(tmp_path / ".cache" / "flashinfer" / "0.6.1" / "90a" / "cached_ops" / "page" / "page.so")
        cache = CACHES["flashinfer"].read({"FLASHINFER_WORKSPACE_BASE": str(tmp_path)})
        assert cache is not None
        assert (cache.installed, states(cache)) == (None, {"page": "unknown"})


def test_deep_gemm(tmp_path) -> None:
    file(tmp_path / "cache" / "kernel.gemm.0123" / "kernel.cubin")
    file(tmp_path / "cache" / "kernel.gemm.4567" / "kernel.cubin", "")
    file(tmp_path / "cache" / "kernel.gemm.89ab" / "kernel.cu")
    old(tmp_path / "cache" / "kernel.gemm.89ab")
    file(tmp_path / "cache" / "mine" / "kernel.cubin")
    cache = CACHES["deep_gemm"].read({"DG_JIT_CACHE_DIR": str(tmp_path)})
    assert cache is not None
    assert states(cache) == {
        "kernel.gemm.0123": "unknown",
        "kernel.gemm.4567": "broken",
        "kernel.gemm.89ab": "leftover",
    }
    home = CACHES["deep_gemm"].read({"HOME": "/home/x"})
    assert home is not None
    assert home.path == Path("/home/x/.deep_gemm")


def test_vllm(tmp_path) -> None:
    file(tmp_path / "torch_compile_cache" / "0123456789" / "rank_0_0" / "backbone" / "cache_key_factors.json", "{}")
    file(tmp_path / "torch_compile_cache" / "torch_aot_compile" / ("ab" * 32) / "model")
    file(tmp_path / "deep_gemm" / "cache" / "kernel.gemm.0123" / "kernel.cubin")
    file(tmp_path / "flashinfer_autotune_cache" / "0.7.2" / "90a" / "autotune_configs.json", "{}")
    file(tmp_path / "assets" / "cat.jpg")
    cache = CACHES["vllm"].read({"VLLM_CACHE_ROOT": str(tmp_path)})
    assert cache is not None
    assert set(states(cache)) == {"0123456789", "ab" * 32, "kernel.gemm.0123", "0.7.2"}
    xdg = CACHES["vllm"].read({"XDG_CACHE_HOME": "/xdg"})
    assert xdg is not None
    assert xdg.path == Path("/xdg/vllm")


def test_inductor(tmp_path) -> None:
    file(tmp_path / "3g" / f"c3g{'a' * 49}.so")
    file(tmp_path / "rc" / f"crc{'a' * 49}.main.so", "")
    file(tmp_path / "fxgraph" / "xe" / f"fxe{'a' * 49}" / "entry")
    file(tmp_path / "aotautograd" / f"a{'b' * 51}" / "entry")
    file(tmp_path / "us" / "letters.txt")
    file(tmp_path / "letters" / "us.txt")
    cache = CACHES["inductor"].read({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert cache is not None
    found = {"3g": "unknown", "rc": "broken", f"fxe{'a' * 49}": "unknown", f"a{'b' * 51}": "unknown"}
    assert states(cache) == found


class TestOurs:
    @pytest.fixture(autouse=True)
    def root(self, tmp_path, monkeypatch):
        for name, folder in (("KERNELHUB_CACHE_DIR", "root"), ("XDG_CACHE_HOME", "xdg"), ("TMPDIR", "tmp")):
            monkeypatch.setenv(name, str(tmp_path / folder))
        notices.forget()
        yield tmp_path / "root"
        notices.forget()

    @staticmethod
    def read(**how: bool) -> Cache:
        (cache,) = inventory.caches(**how)
        return cache

    def test_entries_documents_and_what_makers_left(self, root) -> None:
        made = Store("kind", fingerprint("sm_90a", cuda="13.0"))
        folder = made.get("good", lambda place: file(place / "x")).path.parent
        made.get("edited", lambda place: file(place / "x"))
        made.write("good", {"a": 1})
        made.write("spoilt", {"a": 1})
        file(folder / "edited" / "x", "y")
        file(folder / "spoilt.json", "{")
        (folder / f".x.making-{'a' * 32}").mkdir()
        (folder / f".y.making-{'b' * 32}").mkdir()
        old(folder / f".y.making-{'b' * 32}")
        file(folder / "held.lock", lock.myself("c" * 32).to_text())
        file(folder / "dead.lock", json.dumps(lock.myself("c" * 32).__dict__ | {"pid": 999_999_999}))
        (folder / "link").symlink_to(root)
        file(folder / "stray.txt")
        file(root / "notes" / "mine.txt")
        quick, thorough = states(self.read()), states(self.read(thorough=True))
        assert thorough == {
            "good": "current", "good.json": "current", "edited": "broken", "spoilt.json": "broken",
            f".x.making-{'a' * 32}": "busy", f".y.making-{'b' * 32}": "leftover",
            "held.lock": "busy", "dead.lock": "leftover", "link": "broken",
        }  # fmt: skip
        assert quick == thorough | {"edited": "current"}, "contents are read only when asked"
        codes = {item.path.name: item.code for item in self.read(thorough=True).items if item.code}
        assert codes == {"edited": "file_edited", "spoilt.json": "manifest_unreadable", "link": "entry_symlink"}

    def test_one_that_was_copied_into_another_fingerprints_folder_is_broken(self, root) -> None:
        entry = Store("kind", fingerprint("sm_90a")).get("x", lambda place: file(place / "x")).path
        shutil.copytree(entry.parent, root / "kind" / "sm_80" / entry.parent.name)
        items = {item.path.parents[1].name: item for item in self.read().items}
        assert (items["sm_90a"].state, items["sm_80"].state, items["sm_80"].code) == (
            "current", "broken", "manifest_foreign",
        )  # fmt: skip

    def test_one_of_a_library_that_was_upgraded_is_stale(self, tmp_path, monkeypatch) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        file(tmp_path / "some_kernels.py", "")
        meta = file(tmp_path / "some_kernels-1.0.dist-info" / "METADATA", "Name: some-kernels\nVersion: 1.0\n")
        file(meta.with_name("RECORD"), "some_kernels.py,sha256=a,0\n")
        store = Store("kind", fingerprint("sm_90a", libraries=["some_kernels"]))
        store.get("x", lambda place: file(place / "x"))
        assert states(self.read()) == {"x": "current"}
        meta.write_text("Name: some-kernels\nVersion: 1.1\n")
        (item,) = self.read().items
        assert (item.state, item.reason) == ("stale", "with some_kernels 1.0, 1.1 is installed")
        meta.write_text("Name: some-kernels\nVersion: 1.0\n")
        file(meta.with_name("RECORD"), "some_kernels.py,sha256=b,0\n")
        (item,) = self.read().items
        assert (item.state, item.reason) == (
            "stale",
            "with files of some_kernels 1.0 that differ from the installed ones",
        )

    def test_one_of_another_compiler_is_stale_here_and_left_alone_elsewhere(self, tmp_path, monkeypatch) -> None:
        compiler = file(tmp_path / "nvcc", "12.9")
        store = Store("kind", fingerprint("sm_90a", compiler=str(compiler)))
        store.get("x", lambda place: file(place / "x"))
        compiler.write_text("13.0")
        (item,) = self.read().items
        assert item.state == "stale"
        assert str(compiler) in item.reason
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        (item,) = self.read().items
        assert item.state == "elsewhere"
        assert self.read().useless() == ()

    def test_one_of_another_release_is_stale(self, monkeypatch) -> None:
        Store("kind", fingerprint("any")).write("x", 1)
        before = kernelhub.__version__
        monkeypatch.setattr("kernelhub.__version__", "99.0")
        (item,) = self.read().items
        assert (item.state, item.reason) == ("stale", f"made by kernelhub {before}, this is 99.0")


class TestRemoving:
    def cache(self, path: Path, *items: Path) -> Cache:
        return Cache("x", path, "X", None, tuple(CacheItem(item, "stale") for item in items))

    def test_removes_files_and_folders_and_nothing_beside_them(self, tmp_path) -> None:
        file(tmp_path / "cache" / "a" / "b" / "c")
        file(tmp_path / "cache" / "d")
        file(tmp_path / "cache" / "e")
        cache = self.cache(tmp_path / "cache", tmp_path / "cache" / "a", tmp_path / "cache" / "d")
        assert [inventory.remove(cache, item) for item in cache.items] == ["", ""]
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["e"]
        assert inventory.remove(cache, cache.items[0]) == "", "gone already is as good"

    def test_never_leaves_the_cache(self, tmp_path) -> None:
        outside = file(tmp_path / "outside" / "precious").parent
        inside = tmp_path / "cache"
        inside.mkdir()
        (inside / "link").symlink_to(outside)
        (inside / "file").symlink_to(outside / "precious")
        wrong = (
            outside, inside, inside / ".." / "outside", inside / "link", inside / "link" / "precious", inside / "file",
        )  # fmt: skip
        for path in wrong:
            cache = self.cache(inside, path)
            why = inventory.remove(cache, cache.items[0])
            assert "symbolic link" in why or "is not in" in why, path
        assert (outside / "precious").read_text() == "x"
        assert sorted(path.name for path in inside.iterdir()) == ["file", "link"]

    def test_links_inside_of_an_entry_are_removed_and_not_followed(self, tmp_path) -> None:
        outside = file(tmp_path / "outside" / "precious").parent
        entry = file(tmp_path / "cache" / "entry" / "x").parent
        (entry / "link").symlink_to(outside)
        cache = self.cache(tmp_path / "cache", entry)
        assert inventory.remove(cache, cache.items[0]) == ""
        assert not entry.exists()
        assert (outside / "precious").exists()

    def test_a_library_whose_folder_of_modules_is_a_link_keeps_what_it_leads_to(self, tmp_path) -> None:
        outside = file(tmp_path / "outside" / "page" / "page.so").parents[1]
        arch = tmp_path / ".cache" / "flashinfer" / "0.7.2" / "90a"
        arch.mkdir(parents=True)
        (arch / "cached_ops").symlink_to(outside)
        cache = CACHES["flashinfer"].read({"FLASHINFER_WORKSPACE_BASE": str(tmp_path)})
        assert cache is not None
        assert all("symbolic link" in inventory.remove(cache, item) for item in cache.items)
        assert (outside / "page" / "page.so").exists()

    def test_a_cache_that_is_itself_a_link_is_emptied_where_it_is(self, tmp_path) -> None:
        entry = file(tmp_path / "scratch" / "entry" / "x").parent
        (tmp_path / "cache").symlink_to(tmp_path / "scratch")
        cache = self.cache(tmp_path / "cache", tmp_path / "cache" / "entry")
        assert inventory.remove(cache, cache.items[0]) == ""
        assert not entry.exists()

    def test_what_is_being_made_is_left(self, tmp_path) -> None:
        path = file(tmp_path / "cache" / "x.lock")
        item = CacheItem(path, "busy", "held by process 7")
        assert inventory.remove(self.cache(tmp_path / "cache"), item) == "held by process 7"
        assert path.exists()


class TestVariables:
    def test_all_lie_below_one_root_each_in_a_folder_of_its_own(self, tmp_path) -> None:
        environment = {"KERNELHUB_CACHE_DIR": str(tmp_path)}
        told = set_cache_variables(environ=environment)
        values = [value for name, value in environment.items() if name != "KERNELHUB_CACHE_DIR"]
        assert {item.name for item in told.variables} == set(environment) - {"KERNELHUB_CACHE_DIR"}
        assert {"TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "DG_JIT_CACHE_DIR"} <= set(environment)
        assert "FLASHINFER_NO_DOWNLOAD" not in environment
        assert len(set(values)) == len(values)
        assert all(Path(value).is_relative_to(tmp_path / "libraries") and Path(value).is_dir() for value in values)
        assert Counter(item.became for item in told.variables) == {"set": len(values)}

    def test_what_the_user_set_stays_and_is_reported(self, tmp_path) -> None:
        environment = {"KERNELHUB_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": "/mine", "FLASHINFER_NO_DOWNLOAD": "0"}
        told = set_cache_variables(offline=True, environ=environment)
        assert (environment["TRITON_CACHE_DIR"], environment["FLASHINFER_NO_DOWNLOAD"]) == ("/mine", "0")
        kept = {item.name: item.value for item in told.variables if item.became == "kept"}
        assert kept == {"TRITON_CACHE_DIR": "/mine", "FLASHINFER_NO_DOWNLOAD": "0"}
        assert "TRITON_CACHE_DIR=/mine (kept)" in str(told)

    def test_looking_changes_nothing(self, tmp_path) -> None:
        environment = {"KERNELHUB_CACHE_DIR": str(tmp_path / "root")}
        assert (
            cache_variables(environ=environment).to_dict() == set_cache_variables(environ=dict(environment)).to_dict()
        )
        assert environment == {"KERNELHUB_CACHE_DIR": str(tmp_path / "root")}

    def test_another_version_of_a_library_has_another_folder_and_the_old_one_is_stale(
        self, tmp_path, monkeypatch
    ) -> None:
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "root"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
        monkeypatch.syspath_prepend(str(tmp_path))
        file(tmp_path / "flashinfer" / "__init__.py", "")
        meta = file(
            tmp_path / "flashinfer_python-0.7.2.dist-info" / "METADATA", "Name: flashinfer-python\nVersion: 0.7.2\n"
        )
        file(meta.with_name("RECORD"), "flashinfer/__init__.py,sha256=a,0\n")
        file(meta.with_name("top_level.txt"), "flashinfer\n")
        first, second = dict(os.environ), dict(os.environ)
        set_cache_variables(environ=first)
        file(Path(first["FLASHINFER_WORKSPACE_BASE"], ".cache", "flashinfer", "x"))
        meta.write_text("Name: flashinfer-python\nVersion: 0.7.3\n")
        set_cache_variables(environ=second)
        assert first["FLASHINFER_WORKSPACE_BASE"] != second["FLASHINFER_WORKSPACE_BASE"]
        assert first["TRITON_CACHE_DIR"] == second["TRITON_CACHE_DIR"]
        (cache,) = inventory.caches()
        (stale,) = (item for item in cache.useless() if item.path.parent.name == "flashinfer")
        assert stale.path == Path(first["FLASHINFER_WORKSPACE_BASE"])
        assert stale.reason == "with flashinfer 0.7.2, 0.7.3 is installed"

    def test_in_this_process_it_reports_which_library_is_past_reading_it(self, tmp_path, monkeypatch) -> None:
        for name in ("TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path))
        monkeypatch.setitem(sys.modules, "deep_gemm", os)
        became = {item.name: item.became for item in cache_variables().variables}
        assert (became["DG_JIT_CACHE_DIR"], became["TRITON_CACHE_DIR"]) == ("late", "set")

    def test_where_nothing_can_be_written_only_downloads_are_forbidden(self, tmp_path, monkeypatch) -> None:
        blocked = str(file(tmp_path / "file"))
        monkeypatch.setenv("TMPDIR", blocked)
        environment = {"KERNELHUB_CACHE_DIR": blocked, "XDG_CACHE_HOME": blocked, "TMPDIR": blocked}
        told = set_cache_variables(offline=True, environ=environment)
        assert (told.finding.ok, told.finding.code) == (False, "cache_not_a_folder")
        assert set(environment) == {"KERNELHUB_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR", "FLASHINFER_NO_DOWNLOAD"}

    def test_triton_keeps_what_it_compiles_where_it_was_configured(self, tmp_path) -> None:
        code = (
            "import os, kernelhub\n"
            "told = kernelhub.set_cache_variables()\n"
            "import triton.runtime.cache as cache\n"
            "print(cache.get_cache_manager('0' * 64).cache_dir)\n"
            "print(os.environ['TRITON_CACHE_DIR'])\n"
        )
        environment = clean(KERNELHUB_CACHE_DIR=str(tmp_path), TRITON_CACHE_DIR=None)
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        used, named = done.stdout.split()
        assert named.startswith(f"{tmp_path}/libraries/triton/")
        assert used.startswith(named)
