"""``kernelhub cache``: nothing is removed unasked, and nothing but what is recognised."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kernelhub.runtime.caches import known, notices
from kernelhub.runtime.caches.fingerprint import fingerprint
from kernelhub.runtime.caches.store import Store
from tests.runtime.caches import clean

FOLDERS = {
    "KERNELHUB_CACHE_DIR": "root",
    "XDG_CACHE_HOME": "xdg",
    "TMPDIR": "tmp",
    **{item.variable: item.name for item in known.KNOWN},
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No cache of this machine is seen."""
    for name, folder in FOLDERS.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    notices.forget()
    yield tmp_path
    notices.forget()


@pytest.fixture
def store() -> Store:
    """With a good entry, an edited one and a document."""
    store = Store("kind", fingerprint("sm_90a"))
    for name in ("good", "edited"):
        store.get(name, lambda folder: (folder / "x").write_text("x" * 1000))
    store.write("document", {"a": 1})
    found = store.find("edited")
    assert found is not None
    found.file("x").write_text("y" * 1000)
    return store


@pytest.fixture
def triton(tmp_path) -> Path:
    """One stale entry, and something that is none."""
    folder = tmp_path / "triton"
    (folder / ("A" * 52)).mkdir(parents=True)
    (folder / ("A" * 52) / "kernel.json").write_text('{"triton_version": "2.0.0"}')
    (folder / "thesis.tex").write_text("years of work")
    return folder


class TestList:
    def test_every_cache_with_path_size_and_what_to_remove(self, ask, store, triton, tmp_path) -> None:
        answer = ask("cache", "list", "--json")
        assert answer.code == 0
        caches = {cache["name"]: cache for cache in answer.json["caches"]}
        assert list(caches) == ["kernelhub", "triton", "flashinfer", "deep_gemm", "vllm", "inductor"]
        mine = caches["kernelhub"]
        assert (mine["path"], mine["entries"], mine["states"]) == (str(tmp_path / "root"), 3, {"current": 3})
        assert mine["bytes"] > 2000
        (stale,) = caches["triton"]["remove"]
        assert stale["state"] == "stale"
        assert "made by Triton 2.0.0" in stale["reason"]
        assert not caches["vllm"]["exists"]
        table = ask("cache", "list")
        assert str(triton) in table.row("triton")
        assert "1 stale" in table.row("triton")
        assert f"{tmp_path}/vllm (not there)" in table.row("vllm")
        assert "kernelhub cache clear --stale triton" in table.out

    def test_only_those_that_are_named(self, ask) -> None:
        assert [cache["name"] for cache in ask("cache", "list", "vllm", "--json").json["caches"]] == ["vllm"]
        answer = ask("cache", "list", "tritn")
        assert answer.code == 2
        assert "did you mean triton?" in answer.err


class TestCheck:
    def test_an_edited_entry_is_found_byte_by_byte(self, ask, store) -> None:
        answer = ask("cache", "check", "--json")
        assert (answer.code, answer.json["ok"]) == (1, False)
        (broken,) = answer.json["broken"]
        assert (broken["cache"], broken["code"]) == ("kernelhub", "file_edited")
        words = ask("cache", "check")
        assert "file_edited" in words.out
        assert "kernelhub cache clear --stale kernelhub" in words.out

    def test_all_well(self, ask) -> None:
        Store("kind", fingerprint("sm_90a")).write("x", 1)
        answer = ask("cache", "check")
        assert (answer.code, answer.out.split(",")[0]) == (0, "1 entries")


class TestClear:
    def test_unasked_nothing_is_removed(self, ask, store, tmp_path) -> None:
        before = sorted(tmp_path.rglob("*"))
        answer = ask("cache", "clear")
        assert answer.code == 2
        assert "3 entries" in answer.err
        assert "add --yes" in answer.err
        assert sorted(tmp_path.rglob("*")) == before

    def test_yes_removes_our_entries_and_no_others(self, ask, store, triton) -> None:
        answer = ask("cache", "clear", "--yes", "--json")
        assert (answer.code, len(answer.json["removed"]), answer.json["left"]) == (0, 3, [])
        assert answer.json["bytes"] > 2000
        assert (store.find("good"), store.read("document")) == (None, None)
        assert len(list(triton.iterdir())) == 2

    def test_with_a_folder_named_the_users_own_cache_is_not_touched(self, ask, store, tmp_path, monkeypatch) -> None:
        monkeypatch.delenv("KERNELHUB_CACHE_DIR")
        Store("kind", fingerprint("sm_90a")).write("mine", 1)
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(tmp_path / "root"))
        (listed,) = ask("cache", "list", "kernelhub", "--json").json["caches"]
        assert listed["path"] == str(tmp_path / "root")
        assert len(ask("cache", "clear", "--yes", "--json").json["removed"]) == 3
        monkeypatch.delenv("KERNELHUB_CACHE_DIR")
        assert Store("kind", fingerprint("sm_90a")).read("mine") == 1

    def test_stale_takes_only_what_nothing_reads_again(self, ask, store) -> None:
        assert ask("cache", "clear", "--stale", "--yes").code == 0
        assert store.find("good") is not None

    def test_of_a_library_only_what_is_recognised(self, ask, triton) -> None:
        assert ask("cache", "clear", "triton", "--yes").out.startswith("removed 1 entries")
        assert [path.name for path in triton.iterdir()] == ["thesis.tex"]

    def test_the_line_that_list_prints_is_the_one_to_run(self, ask, store, triton) -> None:
        line = next(line for line in ask("cache", "list").out.splitlines() if "kernelhub cache clear" in line)
        words = line.partition("kernelhub cache ")[2].split()
        assert words == ["clear", "--stale", "triton"]
        assert ask("cache", *words, "--yes").out.startswith("removed 1 entries")
        assert ask("cache", "--yes", "clear", "--stale", "kernelhub", "triton").code == 0

    def test_a_folder_that_is_no_cache_is_left_and_that_is_said(self, ask, monkeypatch) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", "/")
        answer = ask("cache", "clear", "--yes", "triton")
        assert (answer.code, "left /: TRITON_CACHE_DIR names /, which is not a cache" in answer.out) == (1, True)
        assert ask("cache", "clear", "--yes", "triton", "--json").json["left"][0]["path"] == "/"

    def test_links_are_left_with_the_reason(self, ask, store, tmp_path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "precious").write_text("x")
        found = store.find("good")
        assert found is not None
        (found.path.parent / "link").symlink_to(outside)
        answer = ask("cache", "clear", "--yes", "--json")
        assert answer.code == 1
        (left,) = answer.json["left"]
        assert "symbolic link" in left["reason"]
        assert (outside / "precious").exists()

    @pytest.mark.parametrize(("word", "entries", "code"), [("y\n", 0, 0), ("\n", 3, 2), ("no\n", 3, 2)])
    def test_asks_on_a_terminal(self, ask, store, monkeypatch, word, entries, code) -> None:
        terminal = io.StringIO(word)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        answer = ask("cache", "clear")
        assert answer.code == code
        assert "Remove 3 entries" in answer.err
        assert str(store.fingerprint.digest) in answer.err
        (cache,) = ask("cache", "list", "kernelhub", "--json").json["caches"]
        assert cache["entries"] == entries


class TestPath:
    def test_the_place_alone_on_stdout(self, ask, tmp_path) -> None:
        answer = ask("cache", "path")
        assert (answer.code, answer.out, answer.err) == (0, f"{tmp_path}/root\n", "")

    def test_why_not_the_one_that_was_named(self, ask, tmp_path) -> None:
        (tmp_path / "root").write_text("")
        answer = ask("cache", "path")
        assert (answer.code, answer.out) == (0, f"{tmp_path}/xdg/kernelhub\n")
        assert f"not {tmp_path}/root (KERNELHUB_CACHE_DIR): {tmp_path}/root is not a folder" in answer.err
        places = ask("cache", "path", "--json").json["places"]
        assert [(place["origin"], place["code"]) for place in places] == [
            ("KERNELHUB_CACHE_DIR", "cache_not_a_folder"), ("XDG_CACHE_HOME", "found"), ("temporary", "found"),
        ]  # fmt: skip

    def test_no_place_is_exit_1_with_the_code(self, ask, tmp_path) -> None:
        for folder in ("root", "xdg", "tmp"):
            (tmp_path / folder).write_text("")
        answer = ask("cache", "path")
        assert (answer.code, answer.out) == (1, "")
        assert "cache_not_a_folder" in answer.err
        assert ask("cache", "env").code == 1


class TestEnv:
    def test_a_shell_that_evaluates_it_has_the_variables(self, tmp_path, monkeypatch) -> None:
        environment = clean(KERNELHUB_CACHE_DIR=str(tmp_path / "it's a root"))
        for item in known.KNOWN:
            environment.pop(item.variable, None)
        environment["TRITON_CACHE_DIR"] = "/mine"
        python = shlex.quote(sys.executable)
        show = "import os, json; print(json.dumps(dict(os.environ)))"
        script = f'eval "$({python} -m kernelhub cache env --offline)" && {python} -c "{show}"'
        done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        got = json.loads(done.stdout)
        assert got["TRITON_CACHE_DIR"] == "/mine"
        assert got["FLASHINFER_NO_DOWNLOAD"] == "1"
        for name in ("FLASHINFER_WORKSPACE_BASE", "DG_JIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
            assert got[name].startswith(f"{tmp_path}/it's a root/libraries/")
            assert os.path.isdir(got[name])

    def test_what_the_user_set_is_reported_as_a_comment(self, ask, tmp_path) -> None:
        lines = ask("cache", "env").out.splitlines()
        assert f"# TRITON_CACHE_DIR is kept: {tmp_path}/triton" in lines
        became = {item["name"]: item["became"] for item in ask("cache", "env", "--json").json["variables"]}
        assert became["TRITON_CACHE_DIR"] == "kept"
        assert became["TVM_FFI_CACHE_DIR"] == "set"
