"""An entry is what was made, or a miss that says why; a document is the last that was written."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
from pathlib import Path

import pytest

from kernelhub.errors import CacheError
from kernelhub.runtime.caches import manifest, notices
from kernelhub.runtime.caches.fingerprint import Fingerprint, file_digest, fingerprint, library
from kernelhub.runtime.caches.notices import before_making
from kernelhub.runtime.caches.store import Entry, Store

H200 = fingerprint("sm_90a", cuda="13.0", nvrtc="13.0.88")


@pytest.fixture(autouse=True)
def fresh_notices():
    notices.forget()
    yield
    notices.forget()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store("nvrtc", H200, folder=tmp_path)


def make(text: str = "made"):
    return lambda folder: (folder / "kernel.cubin").write_text(text)


def text_of(entry: Entry) -> str:
    return entry.file("kernel.cubin").read_text()


def codes() -> list[str]:
    return [notice.code for notice in notices.cache_notices()]


class TestEntries:
    def test_is_made_once_and_found_again(self, store, tmp_path) -> None:
        assert store.find("kernel") is None
        made = store.get("kernel", make())
        assert made.path == tmp_path / "nvrtc" / "sm_90a" / H200.digest / "kernel"
        assert text_of(store.get("kernel", make("another"))) == "made"
        found = store.find("kernel")
        assert found is not None
        assert found.manifest["parts"]["nvrtc"] == "13.0.88"
        assert [path.name for path in made.path.parent.iterdir()] == ["kernel"], "no lock or half-made folder is left"
        assert codes() == []

    def test_what_it_was_made_for_decides(self, tmp_path) -> None:
        seen = set()
        for other in (H200, fingerprint("sm_100a", cuda="13.0", nvrtc="13.0.88"), fingerprint("sm_90a", cuda="12.9")):
            entry = Store("nvrtc", other, folder=tmp_path).get("kernel", make(other.digest))
            seen.add(text_of(entry))
        assert len(seen) == 3

    def test_a_maker_that_fails_leaves_nothing_and_its_error_reaches_the_caller(self, store) -> None:
        def fail(folder: Path) -> None:
            (folder / "half").write_text("...")
            raise RuntimeError("no such header")

        with pytest.raises(RuntimeError, match="no such header"):
            store.get("kernel", fail)
        assert list((store.folder / "nvrtc").rglob("*.*half*")) == []
        assert [path for path in (store.folder / "nvrtc").rglob("*") if path.is_file()] == []
        assert text_of(store.get("kernel", make())) == "made"

    def test_a_name_cannot_leave_the_folder(self, store) -> None:
        for name in ("../x", "a/b", "", ".hidden", "x" * 200):
            with pytest.raises(ValueError, match="is not a valid name of an entry"):
                store.get(name, make())

    def test_an_unknown_file_is_reported_with_those_there_are(self, store) -> None:
        with pytest.raises(KeyError, match=r"kernel\.cubin, not kernel\.ptx"):
            store.get("kernel", make()).file("kernel.ptx")

    def test_a_place_that_cannot_be_used_is_an_error_with_the_reason(self, tmp_path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(CacheError, match=r"stored anywhere: .*file"):
            Store("nvrtc", H200, folder=tmp_path / "file").get("kernel", make())
        assert codes() == ["cache_not_a_folder", "cache_unavailable"]

    def test_who_watches_may_forbid_that_anything_is_made(self, store) -> None:
        store.get("there", make())
        seen = []

        def forbid(*what: str) -> None:
            seen.append(what)
            raise PermissionError("sealed")

        end = before_making(forbid)
        try:
            assert text_of(store.get("there", make("again"))) == "made"
            with pytest.raises(PermissionError, match="sealed"):
                store.get("kernel", make())
        finally:
            end()
        assert seen == [("nvrtc", "kernel")]
        assert text_of(store.get("kernel", make())) == "made"

    @pytest.mark.fault("stale_handle")
    def test_a_stale_handle_is_a_miss(self, store, monkeypatch) -> None:
        """As NFS gives it for a file that another machine replaced; there is no NFS here to give it."""
        store.get("kernel", make())
        real = os.open

        def stale(path, *arguments: object, **named: object):
            if Path(path).name == "kernel.cubin":
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return real(path, *arguments, **named)

        monkeypatch.setattr(os, "open", stale)
        assert store.find("kernel") is None
        assert codes() == ["entry_unreadable"]
        monkeypatch.undo()
        assert text_of(store.get("kernel", make("again"))) == "made"

    def test_sixteen_threads_at_first_use_make_it_once(self, store) -> None:
        made, found, barrier = [], [], threading.Barrier(16)

        def work() -> None:
            barrier.wait()
            entry = store.get("kernel", lambda folder: (made.append(1), make()(folder)))
            found.append(text_of(entry))

        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert (len(made), found) == (1, ["made"] * 16)


def resealed(path: Path, **changes: object) -> None:
    """Change a manifest as somebody would who knows how its digest is made."""
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    path.write_text(manifest.sealed({**content, **changes}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("13.0.88", "13.0.99"))


def swap_for_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


LIES = {
    "the manifest is gone": (lambda entry: (entry / "manifest.json").unlink(), "manifest_missing"),
    "the manifest is empty": (lambda entry: (entry / "manifest.json").write_text(""), "manifest_unreadable"),
    "the manifest is truncated": (lambda entry: cut(entry / "manifest.json"), "manifest_unreadable"),
    "the manifest is no object": (lambda entry: (entry / "manifest.json").write_text("[1]"), "manifest_unreadable"),
    "the manifest is nested": (lambda entry: (entry / "manifest.json").write_text("[" * 99999), "manifest_unreadable"),
    "the manifest is binary": (lambda entry: (entry / "manifest.json").write_bytes(b"\xff\0"), "manifest_unreadable"),
    "the manifest is edited": (lambda entry: edit(entry / "manifest.json"), "manifest_edited"),
    "the manifest lists nonsense": (lambda entry: resealed(entry / "manifest.json", files=[1]), "manifest_unreadable"),
    "another format": (lambda entry: resealed(entry / "manifest.json", format=99), "manifest_foreign"),
    "another compiler": (lambda entry: resealed(entry / "manifest.json", parts={"cuda": "12"}), "manifest_foreign"),
    "another device": (lambda entry: resealed(entry / "manifest.json", sm="sm_80"), "manifest_foreign"),
    "a file outside": (
        lambda entry: resealed(entry / "manifest.json", files={"../../x": {"bytes": 0, "sha256": ""}}),
        "manifest_foreign",
    ),
    "the file is gone": (lambda entry: (entry / "kernel.cubin").unlink(), "file_missing"),
    "the file is empty": (lambda entry: (entry / "kernel.cubin").write_bytes(b""), "file_truncated"),
    "the file is truncated": (lambda entry: cut(entry / "kernel.cubin"), "file_truncated"),
    "the file is edited": (lambda entry: (entry / "kernel.cubin").write_text("edam"), "file_edited"),
    "the file is a link": (lambda entry: swap_for_link(entry / "kernel.cubin"), "entry_symlink"),
    "the entry is a link": (swap_for_link, "entry_symlink"),
    "the manifest is a folder": (
        lambda entry: ((entry / "manifest.json").unlink(), (entry / "manifest.json").mkdir()),
        "entry_unreadable",
    ),
}


class TestLies:
    @pytest.mark.parametrize(
        "lie", [pytest.param(lie, marks=pytest.mark.fault(code)) for lie, (_, code) in LIES.items()]
    )
    def test_is_a_miss_with_a_code_of_its_own_and_made_again(self, store, lie) -> None:
        spoil, code = LIES[lie]
        spoil(store.get("kernel", make()).path)
        assert store.find("kernel") is None
        assert codes() == [code]
        assert text_of(store.get("kernel", make("made again"))) == "made again"
        found = store.find("kernel")
        assert found is not None
        assert text_of(found) == "made again"
        assert codes() == [code], "said once"

    def test_an_entry_of_another_source_that_was_copied_here_is_reported_by_its_parts(self, store, tmp_path) -> None:
        other = Store("nvrtc", fingerprint("sm_90a", cuda="12.9", nvrtc="12.9.1"), folder=tmp_path)
        mine = store.get("kernel", make()).path
        shutil.rmtree(mine)
        shutil.copytree(other.get("kernel", make("foreign")).path, mine)
        assert store.find("kernel") is None
        (notice,) = notices.cache_notices()
        assert notice.code == "manifest_foreign"
        assert "cuda 12.9, not 13.0" in notice.sentence
        assert "nvrtc 12.9.1, not 13.0.88" in notice.sentence

    def test_a_stray_file_in_place_of_the_entry_is_replaced(self, store) -> None:
        path = store.get("kernel", make()).path
        shutil.rmtree(path)
        path.write_text("stray")
        assert text_of(store.get("kernel", make("made again"))) == "made again"


class TestDocuments:
    def test_is_replaced_and_read_again(self, store) -> None:
        assert store.read("timings") is None
        store.write("timings", {"triton": 21.5})
        store.write("timings", {"triton": 20.0, "μ": [1, None]})
        assert store.read("timings") == {"triton": 20.0, "μ": [1, None]}
        assert Store("nvrtc", fingerprint("sm_80"), folder=store.folder).read("timings") is None

    def test_changes_of_many_threads_are_all_kept(self, store) -> None:
        def add(document):
            return [*(document or []), 1]

        threads = [threading.Thread(target=lambda: store.update("list", add)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert store.read("list") == [1] * 16

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_number_that_is_none_is_refused(self, store, value) -> None:
        with pytest.raises(ValueError, match="JSON compliant"):
            store.write("timings", {"triton": value})
        assert store.read("timings") is None

    @pytest.mark.parametrize(
        ("spoil", "code"),
        [
            (cut, "manifest_unreadable"),
            (edit, "manifest_edited"),
            (lambda path: path.write_text(path.read_text().replace("21.5", "NaN")), "manifest_unreadable"),
            (lambda path: resealed(path, sm="sm_80"), "manifest_foreign"),
            (swap_for_link, "entry_symlink"),
        ],
        ids=["truncated", "edited", "not a number", "foreign", "a link"],
    )
    def test_a_wrong_one_is_a_miss(self, store, spoil, code) -> None:
        store.write("timings", {"triton": 21.5})
        (path,) = (store.folder / "nvrtc").rglob("timings.json")
        spoil(path)
        assert store.read("timings") is None
        assert codes() == [code]
        store.write("timings", {"triton": 1})
        assert store.read("timings") == {"triton": 1}

    def test_where_nothing_can_be_written_it_lives_in_memory(self, tmp_path) -> None:
        (tmp_path / "file").write_text("")
        store = Store("evidence", H200, folder=tmp_path / "file")
        document = {"list": [1]}
        store.write("memory", document)
        document["list"].append(2)
        assert store.read("memory") == {"list": [1]}
        assert store.update("memory", lambda known: {"list": [*known["list"], 3]}) == {"list": [1, 3]}
        assert "cache_memory" in codes()


class TestFingerprint:
    @pytest.mark.fault("same_mtime")
    def test_contents_decide_not_times(self, tmp_path) -> None:
        header = tmp_path / "mma.h"
        header.write_text("one")
        told = header.stat()
        before = fingerprint("any", sources=[header])
        header.write_text("two")
        os.utime(header, ns=(told.st_atime_ns, told.st_mtime_ns))
        assert fingerprint("any", sources=[header]) != before
        header.write_text("one")
        os.utime(header)
        assert fingerprint("any", sources=[header]) == before

    def test_where_one_word_ends_counts(self) -> None:
        assert fingerprint("any", a="b", c="d").digest != fingerprint("any", a="bc", d="").digest
        assert Fingerprint("a", (("b", "c"),)).digest != Fingerprint("ab", (("", "c"),)).digest

    def test_the_compilers_contents_decide(self, tmp_path) -> None:
        compiler = tmp_path / "nvcc"
        compiler.write_text("12.9")
        link = tmp_path / "cuda-nvcc"
        link.symlink_to(compiler)
        before = fingerprint("any", compiler=str(link))
        assert dict(before.parts)["compiler"] == f"{compiler.resolve()} {file_digest(compiler)}"
        compiler.write_text("13.0")
        assert fingerprint("any", compiler=str(link)).digest != before.digest

    def test_a_library_installed_again_in_the_same_version_is_another(self, tmp_path, monkeypatch) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / "some_kernels").mkdir()
        (tmp_path / "some_kernels" / "__init__.py").write_text("")
        info = tmp_path / "some_kernels-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-kernels\nVersion: 1.0\n")
        (info / "RECORD").write_text("some_kernels/__init__.py,sha256=aaa,0\n")
        first = library("some_kernels")
        (info / "RECORD").write_text("some_kernels/__init__.py,sha256=bbb,0\n")
        second = library("some_kernels")
        assert first.startswith("1.0 ")
        assert second.startswith("1.0 ")
        assert first != second
        shutil.rmtree(info)
        assert library("some_kernels").startswith("unknown ")
        assert library("no_such_library") == "absent"


@pytest.mark.parametrize("spoil", ["another's", "group", "everybody"])
@pytest.mark.parametrize("what", ["kernel.cubin", "manifest.json", "."], ids=["file", "manifest", "entry"])
def test_an_entry_that_another_user_can_write_is_made_again(store, spoil, what) -> None:
    path = store.get("kernel", make()).path
    if spoil == "another's":
        if os.geteuid() != 0:
            pytest.skip("only a superuser gives a file to another user: 1 case")
        os.chown(path / what, 65534, 65534)
    else:
        (path / what).chmod((path / what).stat().st_mode | (0o020 if spoil == "group" else 0o002))
    assert store.find("kernel") is None
    assert codes() == ["entry_untrusted"]
    made = store.get("kernel", make("made again"))
    assert text_of(made) == "made again"
    for inside in (made.path, made.path / "kernel.cubin", made.path / "manifest.json"):
        assert (inside.stat().st_uid, inside.stat().st_mode & 0o077) == (os.geteuid(), 0)


@pytest.mark.parametrize("depth", range(4))
def test_a_folder_above_an_entry_that_another_user_can_write_is_no_place(store, depth) -> None:
    path = store.get("kernel", make()).path
    folder = path.parents[3 - depth]
    folder.chmod(0o777)
    assert store.find("kernel") is None
    with pytest.raises(CacheError, match="can be written by other users"):
        store.get("kernel", make("made again"))
    assert set(codes()) == {"entry_untrusted", "cache_open_to_others", "cache_unavailable"}
