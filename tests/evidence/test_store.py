"""Results on disk: replaced whole, keyed by everything that they depend on, and never believed without."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import kernelhub
from kernelhub.dispatch.hub import HUB
from kernelhub.dispatch.kernel import Kernel
from kernelhub.evidence import quarantine, store, validity
from kernelhub.evidence.results import Check, Result
from kernelhub.probes.device import facts
from kernelhub.runtime.caches import inventory, root
from kernelhub.runtime.caches import inventory as caches
from kernelhub.runtime.caches.fingerprint import fingerprint
from tests.evidence import liars

CPU = facts(torch.device("cpu"))


def kernel(op: str = "attention", name: str = "cpp.split_kv") -> Kernel:
    _ = HUB.settings
    return next(item for item in HUB.registry.candidates(op).kernels if item.name == name)


def bad(op: str = "attention", name: str = "cpp.split_kv") -> Result:
    return Result(
        op, name, (Check("plain", "wrong_numbers", "q_dtype=float32", 30.0, "off by 3 where 0.1 is allowed"),)
    )


def operands():
    return torch.randn(3, 1, 4, 2, 64)


def chosen() -> str:
    return kernelhub.attention.explain(*operands()).selected


@pytest.fixture
def kept(cache) -> Path:
    """A bad result of a kernel of ours that would be chosen."""
    assert chosen() == "cpp.split_kv"
    assert quarantine.keep(kernel(), CPU, bad(), "2026-11-20T12:00:00+00:00") == ""
    path = path_of_kept()
    assert cache in path.parents
    kernelhub.reload()
    return path


def path_of_kept() -> Path:
    return store.documents(validity.made_for(CPU)).path(validity.name_of(kernel()))


def rewrite(**changes) -> None:
    """Keep another result in place of the one that is there, as a kernelhub that differs would have."""
    made_for = validity.made_for(CPU)
    document = store.read(made_for, validity.name_of(kernel()))
    for name, value in changes.items():
        (document["key"] if name in document["key"] else document)[name] = value
    assert store.write(made_for, validity.name_of(kernel()), document) == ""
    kernelhub.reload()


class TestWhatHolds:
    def test_a_bad_result_is_heeded(self, kept) -> None:
        assert chosen() != "cpp.split_kv"
        document = json.loads(kept.read_text())["document"]
        assert document["status"] == "wrong"
        assert document["checks"][0]["figures"] == "off by 3 where 0.1 is allowed"
        told = ("device", "architecture", "driver", "torch", "triton", "cuda", "kernelhub", "record and source")
        assert set(told) <= set(document["key"])

    @pytest.mark.parametrize(
        "field",
        ["device", "driver", "torch", "triton", "cuda", "kernelhub", "record and source", "kernel", "op", "format"],
    )
    def test_one_that_is_about_something_else_is_a_miss_and_says_so(self, kept, field, caplog) -> None:
        rewrite(**{field: "other"})
        assert chosen() == "cpp.split_kv"
        assert f"{field} was other, is " in caplog.text
        assert str(kept) in caplog.text

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "is not JSON"),
            ('{"op": "attention", "kern', "is not JSON"),
            ("[1, 2]", "is JSON, but not a manifest"),
            ("\x00\xff\x00", "is not JSON"),
            ("{}", "is JSON, but not a manifest"),
        ],
    )
    def test_a_broken_one_is_a_miss_with_its_reason(self, kept, text, reason) -> None:
        kept.write_bytes(text.encode("latin-1"))
        kernelhub.reload()
        assert chosen() == "cpp.split_kv"
        (miss,) = quarantine.all_kept(CPU).misses
        assert miss.path == kept
        assert reason in miss.reason

    @pytest.mark.parametrize(
        ("document", "reason"),
        [
            ([1, 2], "contains a list"),
            ({}, "is about a kernel that is not registered"),
            ({"op": "attention", "kernel": "cpp.split_kv"}, "has no key"),
        ],
    )
    def test_one_that_holds_something_else_is_too(self, kept, document, reason) -> None:
        store.documents(validity.made_for(CPU)).write(validity.name_of(kernel()), document)
        kernelhub.reload()
        assert chosen() == "cpp.split_kv"
        (miss,) = quarantine.all_kept(CPU).misses
        assert miss.path == kept
        assert reason in miss.reason

    def test_one_that_was_edited_is_not_believed(self, kept, caplog) -> None:
        kept.write_text(kept.read_text().replace('"cpp.split_kv"', '"torch.grouped"'))
        kernelhub.reload()
        assert chosen() == "cpp.split_kv"
        assert "was changed after it was written" in caplog.text

    def test_one_that_was_copied_from_another_device_is_not_believed(self, kept, caplog) -> None:
        other = dataclasses.replace(CPU, name="another card")
        elsewhere = store.documents(validity.made_for(other)).path(validity.name_of(kernel()))
        elsewhere.parent.mkdir(parents=True)
        elsewhere.write_bytes(kept.read_bytes())
        (miss,) = quarantine.all_kept(other).misses
        assert f"device {CPU.name[:20]}" in miss.reason
        assert "not another card" in miss.reason

    def test_another_torch_is_another_place(self, kept, monkeypatch) -> None:
        monkeypatch.setattr(validity, "_files_of", lambda package: "2.0 with other files")
        kernelhub.reload()
        assert chosen() == "cpp.split_kv"
        assert quarantine.all_kept(CPU).misses == []

    def test_the_inventory_of_the_caches_shows_and_removes_it(self, kept, cache) -> None:
        (place,) = [place for place in caches.caches(thorough=True) if place.path == cache]
        (item,) = [item for item in place.items if item.path == kept]
        assert item.state == inventory.CURRENT
        assert inventory.remove(place, item) == ""
        kernelhub.reload()
        assert chosen() == "cpp.split_kv"

    def test_the_inventory_lists_what_an_upgrade_left_behind(self, kept, cache, monkeypatch) -> None:
        monkeypatch.setattr(validity, "_files_of", lambda package: "2.0 0123456789")
        quarantine.keep(kernel(), CPU, bad(), "2026-11-20T12:00:00+00:00")
        (place,) = [place for place in caches.caches() if place.path == cache]
        states = {item.path: (item.state, item.reason) for item in place.items}
        assert states.pop(kept) == (inventory.CURRENT, "")
        ((state, reason),) = states.values()
        assert state == inventory.STALE
        assert "with torch 2.0," in reason

    @pytest.mark.parametrize(
        "checks", [None, [], [{"case": "x"}], [{"case": "x", "code": "odd", "problem": "", "ratio": 1}]]
    )
    def test_one_whose_checks_mean_nothing_quarantines_nothing(self, kept, checks) -> None:
        rewrite(checks=checks)
        assert chosen() == "cpp.split_kv"

    def test_it_is_read_once(self, kept) -> None:
        assert chosen() != "cpp.split_kv"
        kept.unlink()
        kernelhub.attention.op._forget()
        assert chosen() != "cpp.split_kv"
        kernelhub.reload()
        assert chosen() == "cpp.split_kv"

    def test_a_change_of_the_adapters_source_is_another_kernel(self, tmp_path, monkeypatch) -> None:
        package = tmp_path / "changing_plugin"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "adapter.py").write_text("A = 1\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        record = kernel()
        plugin = Kernel(record.op, "x.y", "changing_plugin.adapter:A", "", record.band, record.constraints)
        before = validity.digest_of(plugin)
        assert validity.digest_of(plugin) == before
        (package / "adapter.py").write_text("A = 2\n")
        validity._digest_of_sources.cache_clear()
        assert validity.digest_of(plugin) != before

    def test_bytecode_and_files_that_vanish_are_no_sources(self, monkeypatch, tmp_path) -> None:
        folder = tmp_path / "backends" / "x"
        cached = folder / "__pycache__" / "adapter.cpython-311.pyc.140085412165904"
        cached.parent.mkdir(parents=True)
        (folder / "adapter.py").write_text("A = 1\n")
        monkeypatch.setattr(validity, "_origin", lambda module: folder / "adapter.py")
        digest = validity._digest_of_sources.__wrapped__
        before = digest("kernelhub.backends.x")
        cached.write_bytes(b"half")
        assert digest("kernelhub.backends.x") == before
        found = validity._sources("kernelhub.backends.x")
        assert found == [folder / "adapter.py"]
        monkeypatch.setattr(validity, "_sources", lambda module: [*found, folder / "gone.tmp"])
        assert digest("kernelhub.backends.x") == before


class TestWriting:
    @pytest.fixture
    def next_best(self, tmp_path, monkeypatch) -> Path:
        """Where things are kept if the named folder takes nothing."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        return tmp_path / "home" / "kernelhub"

    @pytest.fixture
    def blocked(self, tmp_path, monkeypatch) -> Path:
        """A named folder that takes nothing."""
        if os.geteuid() == 0:
            path = tmp_path / "a file"
            path.write_text("")  # root may write anywhere, but not below a file
        else:
            path = tmp_path / "locked"
            path.mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
        monkeypatch.setenv("KERNELHUB_CACHE_DIR", str(path))
        return path

    @pytest.mark.fault("evidence_blocked")
    def test_a_blocked_folder_gives_way_to_the_next_best(self, blocked, next_best) -> None:
        liars.attention(liars.Zeros)
        found = kernelhub.verify("attention", backend="liar", device="cpu", quick=True)
        assert not found.ok
        assert found.unwritten == ""
        (path,) = next_best.rglob("attention.liar.k.json")
        assert json.loads(path.read_text())["document"]["code"] == "zeros"
        assert chosen() != "liar.k"
        kernelhub.reload()
        assert chosen() != "liar.k"
        assert str(blocked) in "".join(notice.subject for notice in kernelhub.cache_notices())

    def test_what_a_shared_folder_holds_is_lifted_in_the_next_best(self, cache, next_best, monkeypatch) -> None:
        """A folder of an image, where verification failed, that is read-only by now."""
        liars.attention(liars.Zeros)
        kernelhub.verify("attention", backend="liar", device="cpu", quick=True)
        assert list(cache.rglob("attention.liar.k.json"))
        monkeypatch.setattr(root.Place, "judge", no_writing_to(cache))
        kernelhub.reload()
        assert chosen() != "liar.k"
        with liars.mended(liars.Zeros):
            assert kernelhub.verify("attention", backend="liar", device="cpu", quick=True).unwritten == ""
        kernelhub.reload()
        assert chosen() == "liar.k"
        assert list(next_best.rglob("attention.liar.k.json"))

    def test_where_nothing_can_be_written_it_holds_for_the_process(self, blocked, next_best, monkeypatch) -> None:
        next_best.parent.write_text("")
        monkeypatch.setenv("TMPDIR", str(blocked))
        if os.geteuid():
            monkeypatch.setattr(root.Place, "judge", no_writing_to(blocked))
        liars.attention(liars.Zeros)
        found = kernelhub.verify("attention", backend="liar", device="cpu", quick=True)
        assert not found.ok
        assert "cannot be written" in found.unwritten
        assert "KERNELHUB_CACHE_DIR" in found.unwritten
        assert chosen() != "liar.k"
        kernelhub.reload()
        assert chosen() != "liar.k"
        with liars.mended(liars.Zeros):
            assert kernelhub.verify("attention", backend="liar", device="cpu", quick=True).ok
        assert chosen() == "liar.k"

    def test_a_full_disk_leaves_the_old_document(self, kept) -> None:
        before = kept.read_text()
        full = "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))"
        answer = child(
            f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); {full}\n"
            "print(store.write(fingerprint('any'), 'x', {'x': 'y' * 10000}))\n"
            "print(len(store.read(fingerprint('any'), 'x')['x']))\n"
        )
        told, size = answer.stdout.splitlines()
        assert "cannot be written: " in told
        assert "File too large" in told
        assert size == "10000"
        assert kept.read_text() == before
        left = [path for path in kept.parents[2].rglob("*") if path.is_file() and path != kept]
        assert left == [], "nothing half-written is left"

    @pytest.mark.fault("evidence_writer_killed")
    def test_a_process_killed_while_it_writes_leaves_whole_documents(self) -> None:
        code = "print('go', flush=True)\nwhile True: store.write(fingerprint('any'), 'b', {'x': 'y' * 100000})\n"
        for _ in range(3):
            with subprocess.Popen([sys.executable, "-c", PRELUDE + code], stdout=subprocess.PIPE, text=True) as writer:
                assert writer.stdout.readline() == "go\n"
                for _ in range(50):
                    found = store.read(fingerprint("any"), "b")
                    assert found is None or len(found["x"]) == 100000
                writer.kill()
            found = store.read(fingerprint("any"), "b")
            assert found is None or len(found["x"]) == 100000

    def test_many_threads_write_one_document(self) -> None:
        made_for = fingerprint("any")
        threads = [threading.Thread(target=store.write, args=(made_for, "b", {"x": [n] * 1000})) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(store.read(made_for, "b")["x"])) == 1
        assert [item.name for item in store.documents(made_for).path("b").parent.iterdir()] == ["b.json"]


PRELUDE = """
from kernelhub.evidence import store
from kernelhub.runtime.caches.fingerprint import fingerprint
"""


def child(code: str) -> subprocess.CompletedProcess[str]:
    answer = subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    return answer


def no_writing_to(folder: Path):
    """A judge of places for which a folder, and all below, is on a read-only file system."""
    judge = root.Place.judge

    def judged(place: root.Place, *, executable: bool = False):
        if place.path == folder or folder in place.path.parents:
            return place._bad("cache_read_only", f"{place.path} is on a read-only file system")
        return judge(place, executable=executable)

    return judged


class TestWhereNothingIs:
    def test_no_folder_is_made_and_nothing_is_imported_at_import(self, cache) -> None:
        code = (
            "import sys, torch, kernelhub\n"
            "assert [name for name in sys.modules if name.startswith('kernelhub.')] == ['kernelhub.homes']\n"
            "kernelhub.explain('attention', device='B200')\n"
            "kernelhub.attention(*torch.zeros(3, 1, 40, 2, 16), backend='torch')\n"
            "assert 'kernelhub.evidence.cases' not in sys.modules\n"
        )
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert answer.returncode == 0, answer.stderr
        assert list(cache.iterdir()) == []

    def test_switched_off_it_is_not_even_looked_for(self, kept, monkeypatch) -> None:
        monkeypatch.setenv("KERNELHUB_EVIDENCE", "0")
        kernelhub.reload()
        assert chosen() == "cpp.split_kv"
